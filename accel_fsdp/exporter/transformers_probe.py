"""Asks transformers about a model's files."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError, first_line, require
from accel_fsdp.models import kept_in_float32, model_class, on_meta, part_for, read_config, read_tokenizer, remote_code

if TYPE_CHECKING:
    import torch
    from torch import nn

SHOWN = 3
FIX_CONFIG = "give the trained model: --model ID_OR_FOLDER"
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Description:
    """The tensors of a model by its config, on the meta device.

    `held` are those of the model in memory, of tied weights the first name only; `saved` are the same in the layout of
    files. Each group of `ties` is the names of one tensor.
    """

    model: "nn.Module"
    held: "dict[str, torch.Tensor]"
    saved: "dict[str, torch.Tensor]"
    ties: tuple[tuple[str, ...], ...]

    @cached_property
    def memory(self) -> Shapes:
        return {name: tuple(tensor.shape) for name, tensor in self.held.items()}

    @cached_property
    def files(self) -> Shapes:
        return {name: tuple(tensor.shape) for name, tensor in self.saved.items()}

    @property
    def converts(self) -> bool:
        """Whether the layout of files differs from that in memory, even if only in the order of elements."""
        return any(self.saved.get(name) is not tensor for name, tensor in self.held.items())

    @cached_property
    def filed_as(self) -> dict[str, str]:
        """The names in files of the model's tensors that need no conversion."""
        names = {id(tensor): name for name, tensor in self.saved.items()}
        return {name: names[id(tensor)] for name, tensor in self.held.items() if id(tensor) in names}


def build(folder: Path, dtype: "torch.dtype | None" = None) -> "nn.Module":
    """The model of a folder's config on the meta device, as the class that the config names."""
    import torch

    config = read_config(str(folder))
    return on_meta(str(folder), model_class(config), config, dtype=dtype or torch.float32)


def describe(folder: Path, dtype: "torch.dtype | None" = None) -> Description:
    """The tensors of an export with this folder's config and this dtype, in the dtypes of `from_pretrained`.

    transformers keeps some in a wider dtype than the requested one, such as float32 for the biases of routers.
    """
    require("the layout of this model's files", "transformers", "torch")
    from accel_fsdp.exporter import exported_folder

    model = build(folder, dtype)
    ties = exported_folder.ties_of(model)
    held = exported_folder.without_tied_copies(model.state_dict(), ties)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    short = str(dtype).removeprefix("torch.")
    wide = set(kept_in_float32(model, short, buffers=True)) if dtype and dtype.itemsize == 2 else set()
    held = {name: t.float() if name in wide else t for name, t in held.items() if name not in ignored}
    saved = exported_folder.as_saved(model, held)
    return Description(model, held, saved, ties)


def loads(folder: Path) -> None:
    """Loads an export as users will, but on the meta device: every name and shape has to fit."""
    try:
        config = read_config(str(folder))
        kind = model_class(config)
        options = {"config": part_for(kind, config), "device_map": "meta", "output_loading_info": True}
        _, report = kind.from_pretrained(folder, **options, trust_remote_code=False)
        if (folder / file_names.TOKENIZER_CONFIG).is_file():
            read_tokenizer(str(folder))
    except remote_code.NeedsCode:
        raise
    except Exception as error:  # a config that was edited by hand
        raise _refusal(folder, first_line(error)) from error
    problems = {key: sorted(map(str, names))[:SHOWN] for key, names in report.items() if names and key != "error_msgs"}
    if problems:
        raise _refusal(folder, "; ".join(f"{key}: {', '.join(names)}" for key, names in problems.items()))


def _refusal(folder: Path, what: str) -> UserError:
    being_written = folder.name.startswith(".")
    return UserError(
        f"from_pretrained doesn't load {'what was written' if being_written else folder}: {what}",
        why="loading the export would fail or give random weights",
        fix=FIX_CONFIG if being_written else "export it again: accel-fsdp export SRC OUT --force",
    )
