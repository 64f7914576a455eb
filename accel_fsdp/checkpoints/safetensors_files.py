"""Opens safetensors files, through their own library: whole tensors, and the parts that ranks wrote."""

import json
from collections.abc import Mapping, Sequence
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names, safetensors_header, summary
from accel_fsdp.checkpoints.safe_pickles import damaged
from accel_fsdp.checkpoints.stored import Box, Mapped, Stored, assembled, same_bytes, torch_dtype
from accel_fsdp.errors import UserError

PARTS = "DCP_SHARDING_INFO"
"""torch's HuggingFaceStorageWriter: where the parts of tensors in a file belong."""


def of_place(place: Path) -> dict[str, Stored]:
    """The tensors of a model's folder, or of a single safetensors file."""
    return of_folder(place) if place.is_dir() else of_file(place)


def of_file(path: Path) -> dict[str, Stored]:
    return _read_all(path.parent, [path.name])


def of_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of a model's folder.

    Raises:
        UserError: it holds no safetensors files, or damaged ones; its index is damaged, names files elsewhere, or lists
            a tensor that is in none of them.
    """
    names, listed = summary.model_files(folder)
    ranks = [path.name for path in sorted(folder.glob(file_names.RANKS_MODEL))]
    if names and ranks:
        raise UserError(
            f"{folder} holds two models: {names[0]} and {ranks[0]}",
            why="versions of transformers differ in which of them from_pretrained loads",
            fix="move the files of one of them into a separate folder",
        )
    tensors = _read_all(folder, names or sorted(path.name for path in folder.glob(file_names.MODELS)) or ranks, listed)
    if not tensors:
        raise UserError(
            f"{folder} holds no {file_names.MODELS}",
            why="its weights are needed, to be exported or for an adapter to be merged into",
            fix="give the model with its weights: --model ID_OR_FOLDER",
        )
    return tensors


def _read_all(
    folder: Path, names: Sequence[str], listed: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Stored]:
    """The tensors of several files, some of which may be in parts; `listed` is each tensor's file by their index."""
    parts: dict[str, dict[tuple[int, ...], tuple[str, Path, Stored]]] = {}
    listed_in: set[tuple[str, str]] = set()
    for file in names:
        path = untrusted_files.inside(folder, file, file_names.INDEX)
        offsets, tensors = opened(path)
        for name, tensor in tensors.items():
            listed_in.add((name, file))
            offset = offsets.get(name, (0,) * len(tensor.shape))
            _, other, previous = parts.setdefault(name, {}).setdefault(offset, (file, path, tensor))
            if previous is not tensor and not same_bytes(previous, tensor):
                raise damaged(path, f"holds a {name} that differs from the one in {other.name}")
    for name, file in listed.items():
        if (name, file) not in listed_in:
            elsewhere = ", while another file does" if name in parts else ""
            raise damaged(folder / file_names.INDEX, f"lists {name} in {file}, which doesn't hold it{elsewhere}")
    return {name: _joined(name, by_offset) for name, by_offset in parts.items()}


def _joined(name: str, parts: Mapping[tuple[int, ...], tuple[str, Path, Stored]]) -> Stored:
    first = next(iter(parts.values()))[2]
    if any(len(part.shape) != len(first.shape) for _, _, part in parts.values()):
        path = next(iter(parts.values()))[1]
        raise damaged(path, f"and its siblings hold parts of {name} that don't belong together")
    ends = [tuple(map(add, low, part.shape)) for low, (_, _, part) in parts.items()]
    shape = tuple(max(ends_of) for ends_of in zip(*ends, strict=True))
    boxes = [Box(path, low, part.shape, part.load) for low, (_, path, part) in parts.items()]
    return assembled(name, shape, first.dtype, boxes)


def opened(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Stored]]:
    """The offsets of the parts of tensors in a file, if it holds parts, and all tensors or parts."""
    header = safetensors_header.read(path)
    for name, tensor in header.items():
        if tensor.dtype not in safetensors_header.TORCH_NAMES:
            raise UserError(
                f"{path} holds {name} in {tensor.dtype}, several elements to a byte",
                why="the export reads and writes whole bytes",
                fix="export it with the library that quantised it",
            )
    mapped = Mapped(lambda: _open(path))
    notes = mapped.get().metadata() or {}
    offsets: dict[str, tuple[int, ...]] = {}
    if PARTS in notes:
        try:
            offsets = {name: tuple(part["saved_offsets"]) for name, part in json.loads(notes[PARTS]).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(path, "is damaged: the offsets of its parts are missing") from error
    return offsets, {name: _stored(mapped, name, tensor) for name, tensor in header.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise damaged(path, f"is damaged: {error}") from error


def _stored(mapped: Mapped, name: str, tensor: safetensors_header.Tensor) -> Stored:
    def load() -> torch.Tensor:
        loaded: torch.Tensor = mapped.get(tensor.end - tensor.start).get_tensor(name)
        return loaded

    return Stored(tensor.shape, torch_dtype(tensor.dtype), load)
