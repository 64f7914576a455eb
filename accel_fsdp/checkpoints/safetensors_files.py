"""Opens safetensors files, through their own library."""

from functools import partial
from math import prod
from pathlib import Path

import torch

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names, safetensors_header
from accel_fsdp.checkpoints.stored import Mapped, Stored, same_bytes, torch_dtype
from accel_fsdp.errors import UserError
from accel_fsdp.untrusted_files import broken


def of_place(place: Path) -> dict[str, Stored]:
    """The tensors of a model's folder, or of a single safetensors file."""
    return of_folder(place) if place.is_dir() else of_file(place)


def of_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of a model's folder.

    Raises:
        UserError: it holds no safetensors files, or damaged ones; its index is damaged, names files elsewhere, or lists
            a tensor that is in none of them.
    """
    names, listed = safetensors_header.model_files(folder)
    tensors: dict[str, Stored] = {}
    files: dict[str, list[str]] = {}
    for file in names or sorted(path.name for path in folder.glob(file_names.MODELS)):
        path = untrusted_files.inside(folder, file, file_names.INDEX)
        for name, tensor in of_file(path).items():
            if not same_bytes(tensors.setdefault(name, tensor), tensor):
                raise broken(path, f"holds a {name} that differs from the one in {files[name][0]}")
            files.setdefault(name, []).append(file)
    for name, file in listed.items():
        if file not in files.get(name, ()):
            raise broken(folder / file_names.INDEX, f"lists {name} in {file}, which doesn't hold it")
    if not tensors:
        raise UserError(
            f"{folder} holds no {file_names.MODELS}",
            why="its weights are needed, to be exported or for an adapter to be merged into",
            fix="give the model with its weights: --model ID_OR_FOLDER",
        )
    return tensors


def of_file(path: Path) -> dict[str, Stored]:
    """The tensors of a file.

    Raises:
        UserError: it is damaged, or holds parts of bytes.
    """
    header = safetensors_header.read(path)
    mapped = Mapped(partial(safetensors_header.opened, path, "pt"))
    return {name: _stored(mapped, path, name, tensor) for name, tensor in header.items()}


def _stored(mapped: Mapped, path: Path, name: str, tensor: safetensors_header.Tensor) -> Stored:
    if tensor.dtype not in safetensors_header.TORCH_NAMES:
        raise UserError(
            f"{path} holds {name} in {tensor.dtype}, several elements to a byte",
            why="the export reads and writes whole bytes",
            fix="export it with the library that quantised it",
        )
    dtype = torch_dtype(tensor.dtype)
    size_bytes = prod(tensor.shape) * dtype.itemsize

    def load() -> torch.Tensor:
        loaded: torch.Tensor = mapped.get(size_bytes).get_tensor(name)
        return loaded

    return Stored(tensor.shape, dtype, load)
