"""The exported folder: what it must contain, in which dtype, and the check that it does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from accel_fsdp import atomic_files, models
from accel_fsdp.checkpoints import DTYPES, ITEM_BYTES, file_names, safetensors_header
from accel_fsdp.errors import UserError
from accel_fsdp.units import counted, first_few

if TYPE_CHECKING:
    import torch
    from torch import nn

SHOWN_PROBLEMS = 5


class Spec(NamedTuple):
    """Shape and dtype of one tensor; dtype as safetensors spells it in a file's header, such as F32 or BF16."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Rounding(NamedTuple):
    """Weights that are saved in a dtype that can't hold all of their values; dtypes as torch names them."""

    trained: str
    saved: str

    def __str__(self) -> str:
        return f"{self.trained} weights rounded to {self.saved}"


@dataclass(frozen=True)
class Expected:
    """The tensors an export must hold. Each group of `ties` is one tensor under several names: the first is saved.

    `casts` are the parameters whose gathered dtype differs from the saved one, by their names in the model; `rounding`
    says whether the cast loses digits. `gathered_bytes` is the size of the whole gathered model, including the frozen
    base of an adapter.
    """

    tensors: dict[str, Spec]
    ties: tuple[tuple[str, ...], ...]
    casts: "Mapping[str, torch.dtype]" = field(default_factory=dict)
    gathered_bytes: int = 0
    rounding: Rounding | None = None


def expected_tensors(
    model: "nn.Module", trained_as: "torch.dtype | None", saved_as: "torch.dtype | None" = None
) -> Expected:
    """Lists what `save_model` must write, by the model before FSDP wraps it.

    `trained_as`: the dtype to which the engine casts trainable parameters and in which it gathers them, None if none.
    `saved_as`: the dtype of the export, None for as gathered; parameters that transformers keeps in float32 stay in it.
    """
    import torch
    from peft import PeftModel, get_peft_model_state_dict

    blueprint = _meta_state_dict(model, trained_as)
    gathered_bytes = sum(tensor.numel() * tensor.element_size() for tensor in blueprint.values())
    casts = {} if saved_as is None else dict.fromkeys(_castable(model, blueprint, saved_as), saved_as)
    rounds = rounding({blueprint[name].dtype for name in casts}, saved_as)
    for name, dtype in casts.items():
        blueprint[name] = torch.empty_like(blueprint[name], dtype=dtype)
    is_adapter = isinstance(model, PeftModel)
    ties = () if is_adapter else ties_of(model)
    if is_adapter:
        saved = get_peft_model_state_dict(model, state_dict=blueprint)
    else:
        saved = as_saved(model, without_tied_copies(blueprint, ties))
    specs = {name: Spec(tuple(t.shape), DTYPES[str(t.dtype).removeprefix("torch.")]) for name, t in saved.items()}
    return Expected(specs, ties, casts, gathered_bytes, rounds)


def rounding(trained: "set[torch.dtype]", saved: "torch.dtype | None") -> Rounding | None:
    """Whether a cast to `saved` loses digits or range of one of these dtypes."""
    import torch

    lossy = [dtype for dtype in trained if saved is not None and torch.promote_types(dtype, saved) != saved]
    if not lossy:
        return None
    widest = max(lossy, key=lambda dtype: dtype.itemsize)
    return Rounding(str(widest).removeprefix("torch."), str(saved).removeprefix("torch."))


def _meta_state_dict(model: "nn.Module", trained_as: "torch.dtype | None") -> "dict[str, torch.Tensor]":
    """The full state dict that the engine will return, on the meta device."""
    import torch

    parameters = model.named_parameters(remove_duplicate=False)
    shapes = {name: getattr(parameter, "ds_shape", None) for name, parameter in parameters}
    # DeepSpeed casts no model that ZeRO-3 has built in parts, nor whole adapters that were added to one
    casts = trained_as is not None and not any(shapes.values())
    trainable = set(_trainable(model)) if casts else ()
    blueprint = {}
    for name, tensor in model.state_dict().items():
        cast = name in trainable and tensor.is_floating_point()
        shape = shapes.get(name) or tensor.shape  # under ZeRO-3 the parameter itself is empty
        blueprint[name] = torch.empty(shape, device="meta", dtype=trained_as if cast else tensor.dtype)
    return blueprint


def _castable(model: "nn.Module", blueprint: "dict[str, torch.Tensor]", dtype: "torch.dtype") -> list[str]:
    """The trained parameters of another floating dtype, without those that need float32; 4-bit weights stay packed."""
    float32 = set(models.kept_in_float32(model, str(dtype).removeprefix("torch.")))
    trained = [name for name in _trainable(model) if name not in float32]
    return [name for name in trained if blueprint[name].is_floating_point() and blueprint[name].dtype != dtype]


def cast(state_dict: "dict[str, torch.Tensor]", casts: "Mapping[str, torch.dtype]") -> "dict[str, torch.Tensor]":
    """Converts one tensor after the other in place of the old one, so that the model is never in memory twice."""
    for name in [name for name in state_dict if name in casts]:
        state_dict[name] = state_dict[name].to(casts[name])
    return state_dict


def finish(folder: Path, dtype: str, card: str) -> None:
    """Finishes a saved model for publication: its dtype in the config, a card, and no pickle of Trainer's arguments."""
    path = folder / file_names.CONFIG
    if dtype and path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            if part.get("dtype"):
                part["dtype"] = dtype
        atomic_files.write_text(path, json.dumps(config, indent=2, sort_keys=True) + "\n")
    if card:
        atomic_files.write_text(folder / file_names.CARD, card)
    (folder / file_names.TRAINING_ARGS).unlink(missing_ok=True)


def _trainable(model: "nn.Module") -> list[str]:
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad]


def without_tied_copies(
    state_dict: "dict[str, torch.Tensor]", ties: tuple[tuple[str, ...], ...]
) -> "dict[str, torch.Tensor]":
    """Keeps one name of each tied tensor: gathering makes copies, and safetensors would store both."""
    copies = {name for group in ties for name in group[1:]}
    return {name: tensor for name, tensor in state_dict.items() if name not in copies}


def as_saved(model: "nn.Module", state_dict: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Renames and splits tensors as `save_pretrained`: transformers 5 has its own layout for some models in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    skipped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    exported = {name: tensor for name, tensor in state_dict.items() if name not in skipped}
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, exported)
    return saved


def ties_of(model: "nn.Module") -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def verify(folder: Path, expected: Expected) -> int:
    """Compares the files in `folder` with the expected tensors; returns their number."""
    headers = [safetensors_header.read(path) for path in sorted(folder.glob(file_names.ALL_SAFETENSORS))]
    specs = {name: Spec(tensor.shape, tensor.dtype) for header in headers for name, tensor in header.items()}
    problems = [f"{name} is missing" for name in expected.tensors if name not in specs]
    problems += [f"{name} is unexpected" for name in specs if name not in expected.tensors]
    problems += [
        f"{name} is {spec.dtype} {list(spec.shape)}, expected {want.dtype} {list(want.shape)}"
        for name, spec in specs.items()
        if (want := expected.tensors.get(name)) is not None and want != spec
    ]
    if problems or not specs:
        problem_list = first_few(problems, SHOWN_PROBLEMS, "; ") or "no tensor at all"
        raise UserError(
            f"the export holds {counted(len(specs), 'tensor')}, expected {len(expected.tensors)}: {problem_list}",
            why="a model loaded from it would have random or empty weights",
            fix="keep the checkpoints of this run and report this with your YAML: the model itself was not lost",
        )
    return len(specs)
