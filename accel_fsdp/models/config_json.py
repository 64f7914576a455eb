"""Consistency checks of a model's config.json, before a model is built from it.

transformers trusts a config: text in place of a width ends in a traceback, a hundred million layers exhaust the
memory. Values that are invalid in every model are refused here, by key.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import LIBRARIES, UserError

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode

LARGEST_CONFIG = 1 << 24
ANYWHERE = Path(os.path.abspath(os.sep))
"""Reading a model copies nothing, so its user may have put links to another disk into its folder."""
READ_BY_PYTHON = (
    *(file_names.TOKENIZER_CONFIG, file_names.TOKENS_MAP, file_names.ADDED_TOKENS),
    file_names.PROCESSOR_TEMPLATE,
)
WIDTHS = frozenset(
    {
        *("hidden_size", "n_embd", "d_model", "embed_dim", "vocab_size", "num_attention_heads", "n_head", "n_heads"),
        *("num_heads", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "moe_intermediate_size", "max_position_embeddings"),
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_positions", "num_kv_heads"),
    }
)
"""Keys whose value is a whole number (or a list, or nothing) in every model."""
NO_SIZES = frozenset({"auto_map", "id2label", "label2id", "task_specific_params", "quantization_config"})
"""Mappings whose keys mean something else."""
POSITIVE = frozenset({"hidden_size", "n_embd", "d_model", "vocab_size", "num_attention_heads", "n_head", "n_heads"})
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""Config keys for the experts of a layer, and for those that a token is routed to."""
LAYERS = re.compile(r"layer|depth|block|stage|n_repeat|codebooks|levels")
PARTS = re.compile(r"expert|head|num_labels")
NO_COUNTS = re.compile(r"size|dim|vocab|_ids?$|_idx|index")
MOST_LAYERS, MOST_PARTS = 2_000, 20_000
"""The limits of layers and of parts; the largest known models have 126 layers and 16,384 experts."""
MOST_EXPERTS = 300_000
"""The limit for all layers together; the largest known have 31,000."""
LARGEST_WIDTH = 10**9
MOST_CALLS = 100_000
"""Calls of torch to build one model; DeepSeek-V3 takes 2,600."""

DEQUANTISED = frozenset({"mxfp4", "fp_quant"})
"""Quantisations that full training supports: weights are converted to 16 bits on loading, or masters are kept."""


def settings_in(folder: Path) -> dict[str, Any]:
    """Reads the config of a model folder."""
    settings = untrusted_files.read_json(folder / file_names.CONFIG, within=ANYWHERE, largest=LARGEST_CONFIG)
    if settings is None:
        raise UserError(
            f"model folder {folder} has no {file_names.CONFIG}",
            why="the architecture can't be known without it",
            fix="give the folder that save_pretrained wrote, or a hub id",
        )
    if "configuration_files" in settings:
        raise UserError(
            f"the config of {folder} names other files: configuration_files",
            why="transformers would read one of them in place of config.json",
            fix="remove configuration_files from config.json, or copy the file for your version over it",
        )
    check(str(folder), settings)
    return settings


def check_files(folder: Path) -> None:
    """Refuses files that can't hold a tokenizer: pipes and devices, and JSON that would overflow Python's stack."""
    for path in (path for pattern in file_names.PAPERS for path in sorted(folder.glob(pattern))):
        if not path.exists():
            continue  # a broken link
        if path.name in READ_BY_PYTHON:
            untrusted_files.read_json(path, within=ANYWHERE)
        else:
            os.close(untrusted_files.open_file(path, within=ANYWHERE))


def check(name: str, settings: Mapping[str, Any], place: str = "") -> None:
    """Refuses settings that are invalid in every model, at any depth."""
    for key, value in settings.items():
        if key == "model_type" and not isinstance(value, str | None):
            raise contradictory(name, f"{place}{key} is {json.dumps(value)[:40]}: it must be a name")
        if key == "attribute_map":
            raise contradictory(name, f"{place}{key} would give its keys other meanings, as only a model's code does")
        if key in NO_SIZES:
            if not isinstance(value, dict | None):
                raise contradictory(name, f"{place}{key} is {json.dumps(value)[:40]}: it must be a mapping")
            continue
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, dict):
                check(name, item, f"{place}{key}.")
            elif problem := _problem(key, item):
                raise contradictory(name, f"{place}{key} is {json.dumps(item)[:40]}: {problem}")
    heads, groups = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
        counts = f"num_attention_heads is {heads}, {place}num_key_value_heads {groups}"
        raise contradictory(name, f"{place}{counts}: the one must be a multiple of the other")
    _check_experts(name, settings, place)


def _check_experts(name: str, settings: Mapping[str, Any], place: str) -> None:
    """Refuses a config in which tokens use more experts than a layer has: such a model can be built, but not run.

    With one expert, some models have an ordinary layer without a router.
    """
    check_count(name, max(map(_number, map(settings.get, EXPERTS))) * _number(settings.get("num_hidden_layers")))
    for count, used in ((count, used) for count in EXPERTS for used in EXPERTS_USED):
        expert_count, used_count = settings.get(count), settings.get(used)
        if isinstance(expert_count, int) and isinstance(used_count, int) and 1 < expert_count < used_count:
            counts = f"{count} is {expert_count}, {place}{used} {used_count}"
            raise contradictory(name, f"{place}{counts}: a token can't go to more experts than there are")


def check_count(name: str, experts: int) -> None:
    """Refuses more experts over all layers than any model has, because each has separate tensors in the files."""
    if experts > MOST_EXPERTS:
        raise contradictory(name, f"it has {experts:,} experts in all, many times those of the largest known model")


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _problem(key: str, value: Any) -> str:
    if key in WIDTHS:
        if value is None:
            return ""
        computed = "position" in key and isinstance(value, float) and value.is_integer()  # a scaled number
        if not (isinstance(value, int) or computed) or isinstance(value, bool):
            return "it must be a whole number"
        if value < (1 if key in POSITIVE else 0):
            return f"it must be at least {1 if key in POSITIVE else 0}"
        if value > LARGEST_WIDTH and "position" not in key:
            return f"no model has more than {LARGEST_WIDTH:,}"
    limit = MOST_LAYERS if LAYERS.search(key) else MOST_PARTS if PARTS.search(key) else None
    counts = limit is not None and isinstance(value, int) and not NO_COUNTS.search(key)
    return f"no model has more than {limit:,}" if counts and value > limit else ""


def contradictory(name: str, what: str) -> UserError:
    return UserError(
        f"the config is invalid for every model: {name}: {what}",
        why="the layer classes and sizes come from it",
        fix="copy its config.json again from where the model comes from, or correct that value",
    )


@contextmanager
def explained_errors(name: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Converts all errors that transformers raises for a config into one message.

    `passing` are errors with other reasons, which the caller handles.

    Raises:
        UserError: any other error was raised, except for a library that isn't installed.
    """
    try:
        yield
    except passing:
        raise
    except (UserError, MemoryError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise contradictory(name, "it needs more memory than there is") from error
    except ImportError as error:
        if error.name in LIBRARIES:
            raise
        raise UserError(
            f"the class of {name} needs a package that is not installed: {_message_of(error)}",
            why="the layer classes and sizes come from the built model",
            fix="install that package, and run the same command again",
        ) from error
    except Exception as error:
        raise contradictory(name, _message_of(error)) from error


def _message_of(error: Exception) -> str:
    """The message of a transformers error; for a failed validation that is the second line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines or len(lines[0].split()) == 1:  # a KeyError, whose text is the key
        return f"{type(error).__name__} {' '.join(lines)}".strip()
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for a one-line message; for a UserError, its `what`."""
    if isinstance(error, UserError):
        return error.what
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def bounded(name: str) -> "TorchFunctionMode":
    """A context in which a model can be built with a limited number of parts.

    Raises:
        UserError: in the block, if the model has more parts than any real model.
    """
    from torch.overrides import TorchFunctionMode

    class Bounded(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            if self.calls > MOST_CALLS:
                raise contradictory(name, "it has many times the layers and experts of the largest known")
            return func(*args, **(kwargs or {}))

    return Bounded()


def quant_method(settings: Any) -> str:
    """The quantisation of a model with this `quantization_config`, if the weights stay quantised; empty otherwise.

    "unknown" if the config doesn't name it.
    """
    config = settings.to_dict() if hasattr(settings, "to_dict") else settings
    if not isinstance(config, Mapping):
        return ""
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method")) or "unknown")
    online = method == "bitnet" and config.get("quantization_mode") == "online"
    return "" if config.get("dequantize") is True or method in DEQUANTISED or online else method
