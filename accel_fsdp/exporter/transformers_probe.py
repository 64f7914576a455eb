"""Asks transformers and PEFT about a model's files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError, require
from accel_fsdp.models import (
    catalogue,
    first_line,
    model_class,
    part_for,
    read_config,
    read_tokenizer,
    remote_code,
)

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from torch import nn

SHOWN = 3
BEGINNINGS = frozenset(
    {
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "monteclora_config"),
        *("megatron_config", "megatron_core", "runtime_config", "auto_mapping"),
        *("base_model_name_or_path", "revision"),
    }
)
"""Settings of an adapter's first weights, and of where its code and its base are."""
FIX_CONFIG = "give the trained model: --model ID_OR_FOLDER"


@dataclass(frozen=True)
class Description:
    """The tensors that a model's files must hold, by its config.

    `memory`: shapes by the names that the model's code uses, of tied weights the first name only. `files`: the same in
    the layout of files. `ties`: groups of names of one tensor. `converts`: whether the layout of files differs from
    that of the model in memory, even if only in the order of elements. `wider`: the tensors that transformers keeps in
    a wider dtype than the requested one, such as float32 for the biases of routers. `filed_as`: the names in files of
    the model's tensors that need no conversion. `turned`: the weights that are stored transposed (Conv1D), as the
    model's code names them. `floating`: the names, of both kinds, of the tensors that must hold floating-point numbers:
    the parameters, unless the config says that they are quantised.
    """

    memory: dict[str, tuple[int, ...]]
    files: dict[str, tuple[int, ...]]
    ties: tuple[tuple[str, ...], ...]
    converts: bool = False
    wider: "Mapping[str, torch.dtype]" = field(default_factory=dict)
    filed_as: Mapping[str, str] = field(default_factory=dict)
    turned: frozenset[str] = frozenset()
    floating: frozenset[str] = frozenset()


@contextmanager
def _create_on_meta(dtype: "torch.dtype | None") -> Iterator[None]:
    """Creates new tensors on the meta device, in this dtype unless the model's code asks for another."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def build(folder: Path, dtype: "torch.dtype | None" = None) -> "nn.Module":
    """The model of a folder's config on the meta device, as the class that the config names."""
    try:
        config = read_config(str(folder))
        with _create_on_meta(dtype):
            kind = model_class(config)
            if kind.__name__.startswith("Auto"):
                model = kind.from_config(config, trust_remote_code=False)
            else:
                model = kind(part_for(kind, config))
    except remote_code.NeedsCode:
        raise
    except Exception as error:  # a config that was edited by hand may cause any error in transformers
        raise UserError(
            f"transformers can't build the model of {folder / file_names.CONFIG}: {first_line(error)}",
            why="the tensors that the files must hold are unknown",
            fix=FIX_CONFIG,
        ) from error
    return model  # type: ignore[no-any-return]


def describe(folder: Path, dtype: "torch.dtype | None" = None) -> Description:
    """The tensors that an export with this folder's config and this dtype must hold."""
    require("the layout of this model's files", "transformers", "torch")
    import torch
    from transformers.pytorch_utils import Conv1D

    from accel_fsdp.exporter import exported_folder

    model = build(folder, dtype)
    ties = exported_folder.ties_of(model)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    tensors = _as_loaded(model, exported_folder.without_tied_copies(tensors, ties), dtype)
    saved = exported_folder.as_saved(model, tensors)  # expected_tensors would import PEFT, which takes a second
    memory, files = ({name: tuple(tensor.shape) for name, tensor in layout.items()} for layout in (tensors, saved))
    wide = {torch.float32, torch.float64} - {dtype} if dtype else set()
    wider = {name: tensor.dtype for name, tensor in saved.items() if tensor.dtype in wide}
    converts = any(saved.get(name) is not tensor for name, tensor in tensors.items())
    names = {id(tensor): name for name, tensor in saved.items()}
    filed_as = {name: names[id(tensor)] for name, tensor in tensors.items() if id(tensor) in names}
    turned = frozenset(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D))
    quantised = getattr(model.config, "quantization_config", None) is not None
    floating = frozenset() if quantised else _floating(model, tensors, saved)
    return Description(memory, files, ties, converts, wider, filed_as, turned, floating)


def _floating(model: "nn.Module", *states: "Mapping[str, torch.Tensor]") -> frozenset[str]:
    buffers = {name for name, _ in model.named_buffers()}
    return frozenset(
        name for state in states for name, tensor in state.items() if tensor.is_floating_point() and name not in buffers
    )


def _as_loaded(
    model: Any, tensors: "dict[str, torch.Tensor]", dtype: "torch.dtype | None"
) -> "dict[str, torch.Tensor]":
    """The tensors in the dtypes that `from_pretrained` uses for a model that is loaded in `dtype`."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype) if dtype else {}
    if not plan:
        return tensors
    pattern, by_group, _ = build_glob_alternation(list(plan))
    return {
        name: tensor.to(plan[by_group[str(match.lastgroup)]]) if (match := pattern.search(name)) else tensor
        for name, tensor in tensors.items()
    }


def describe_adapter(folder: Path, base: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The tensors of an adapter with this folder's settings, on the model of `base`.

    These are the tensors that its file must hold, and those that PEFT also saves if embeddings were adapted or have
    grown.
    """
    import torch
    from peft import get_peft_model, get_peft_model_state_dict

    try:
        settings = peft_settings(untrusted_files.read_json(folder / file_names.ADAPTER_CONFIG) or {})
        adapts_parameters = bool(getattr(settings, "target_parameters", None))
        with torch.device("meta"):
            model = get_peft_model(build(base), settings)
        if getattr(settings, "target_parameters", None) and not adapts_parameters:
            raise UserError(
                f"the adapter of {folder} holds matrices of single experts, which transformers 5 holds in one tensor",
                why="PEFT converts such an adapter when it loads it, and the export doesn't",
                fix="load it with PEFT, and merge_and_unload() or save_pretrained it",
            )
        needed = get_peft_model_state_dict(model, save_embedding_layers=False)  # else it would ask the hub
        with_embeddings = get_peft_model_state_dict(model, save_embedding_layers=True)
        shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in (needed, with_embeddings)]
        return shapes[0], shapes[1]
    except UserError:
        raise
    except Exception as error:  # PEFT raises many kinds of errors for settings that were edited by hand
        raise UserError(
            f"PEFT can't build the adapter of {folder}: {first_line(error)}",
            why="the tensors that the file must hold are unknown",
            fix="give the trained model: --model ID_OR_FOLDER",
        ) from error


def peft_settings(settings: Mapping[str, Any]) -> "PeftConfig":
    """PEFT's settings of a trained adapter, without its initialisation and its source files."""
    from peft import PeftConfig

    if settings.get("megatron_config"):
        raise remote_code.NeedsCode(
            f"the settings of the adapter name a module of Python, megatron_core: {settings.get('megatron_core')}",
            why="PEFT would import it, and no command runs code that comes with a model",
            fix="export the adapter with the Megatron that trained it",
        )
    return PeftConfig.from_peft_type(**{key: value for key, value in settings.items() if key not in BEGINNINGS})


def loads(folder: Path) -> None:
    """Loads an export as users will, but on the meta device: every name and shape has to fit."""
    try:
        config = read_config(str(folder))
        kind = model_class(config)
        options = {"config": part_for(kind, config), "device_map": "meta", "output_loading_info": True}
        _, report = kind.from_pretrained(folder, **options, trust_remote_code=False)
    except remote_code.NeedsCode:
        raise
    except Exception as error:  # a config that was edited by hand
        raise _refusal(folder, first_line(error)) from error
    problems = {key: names for key, names in report.items() if names and key != "error_msgs"}
    if problems:
        report_text = "; ".join(
            f"{key}: {', '.join(map(str, sorted(map(str, names))[:SHOWN]))}" for key, names in problems.items()
        )
        raise _refusal(folder, report_text)
    if (folder / file_names.TOKENIZER_CONFIG).is_file():
        try:
            read_tokenizer(str(folder))
        except remote_code.NeedsCode:
            raise
        except (UserError, KeyError, ImportError) as error:
            raise _refusal(folder, f"tokenizer: {first_line(error)}") from error


def _refusal(folder: Path, what: str) -> UserError:
    being_written = folder.name.startswith(".")
    return UserError(
        f"from_pretrained doesn't load {'what was written' if being_written else folder}: {what}",
        why="loading the export would fail or give random weights",
        fix=FIX_CONFIG if being_written else "export it again: accel-fsdp export SRC OUT --force",
    )


def fetch(model: str, with_weights: bool, revision: str | None = None) -> Path:
    """The folder of a hub model in the cache: config and tokenizer, and the weights where they are needed.

    `revision`: the branch, tag or commit that was trained on, None for the hub's own default.
    """
    from huggingface_hub import snapshot_download

    patterns = [*file_names.PAPERS, *([file_names.ALL_SAFETENSORS] if with_weights else [])]
    try:
        if ".." in (revision or ""):  # it becomes part of a path in the cache
            raise ValueError("there is no branch, tag or commit of that name")
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        source = f"{model} at revision {revision}" if revision else model
        raise UserError(
            f"cannot get {source}: {first_line(error)}{catalogue.did_you_mean(model)}",
            why="it is the model that --model names, else adapter_config.json or the run's run.json; "
            + ("the adapter is merged into it" if with_weights else "the export needs its config and tokenizer"),
            fix="say where it is now: --model FOLDER",
        ) from error
