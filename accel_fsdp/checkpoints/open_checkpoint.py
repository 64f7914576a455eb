"""Opens a checkpoint of any kind as a mapping of tensors by their names in the model's code."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import (
    dcp,
    deepspeed,
    file_names,
    safetensors_header,
    summary,
    tensor_names,
    torch_zip,
)
from accel_fsdp.checkpoints.discover import CheckpointLocation
from accel_fsdp.checkpoints.tensor_names import clean_name
from accel_fsdp.checkpoints.tensor_storage import ITEM_BYTES, FileReader, FileRecord, Piece, Stored, damaged, tensor
from accel_fsdp.checkpoints.torch_zip import View
from accel_fsdp.errors import UsageError, UserError

MODEL_KEYS = frozenset({"model", "module", "state_dict", "model_state_dict", "weights", "net", "app", "job", "state"})
OPTIMIZER_KEYS = frozenset({"optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict"})
Paths = Mapping[tuple[str, ...], Stored]


@dataclass(frozen=True)
class Weights:
    """The content of a checkpoint.

    `tensors` are the model's, empty where only an adapter was saved; `adapter` has those of a PEFT adapter, by the
    names in PEFT's own files. `filed`: the names are those in files, not those of the model in memory, as in the files
    of ranks.
    """

    tensors: dict[str, Stored]
    adapter: dict[str, Stored] = field(default_factory=dict)
    optimizer: dict[str, Stored] = field(default_factory=dict)
    filed: bool = False


def read(place: CheckpointLocation, reader: FileReader, optimizer: bool = False, adapter: str | None = None) -> Weights:
    """Finds all tensors of a checkpoint without reading them. Of several adapters it takes the one named `adapter`.

    Raises:
        UsageError: there are several adapters, and `adapter` names none of them.
        UserError: a file is missing, damaged or not to be trusted, or there is no tensor.
    """
    weights = _read(place, reader, optimizer, adapter)
    weights = weights if optimizer else replace(weights, optimizer={})  # it may be in the same files as the model
    if not weights.tensors and not weights.adapter:
        raise UserError(
            f"{place.weights} holds no tensor of a model",
            why="there is nothing to read",
            fix="take another checkpoint; PEFT 0.21 alone saves empty adapters under FSDP1",
        )
    return weights


def _read(checkpoint: CheckpointLocation, reader: FileReader, optimizer: bool, adapter: str | None) -> Weights:
    if checkpoint.kind == "safetensors":
        state = _full_optimizer(checkpoint.folder, reader) if optimizer else {}
        of_ranks = checkpoint.weights.is_dir() and any(checkpoint.weights.glob(file_names.RANKS_MODEL))
        return Weights(of_place(checkpoint.weights), optimizer=split(state).optimizer, filed=not of_ranks)
    if checkpoint.kind == "adapter":
        return Weights({}, of_file(checkpoint.weights))
    if checkpoint.kind == "ZeRO":
        return split(deepspeed.read(checkpoint.weights, reader, optimizer), adapter)
    if checkpoint.kind == "sharded (DCP)":
        paths = dcp.read(checkpoint.weights, reader)
        if optimizer and checkpoint.optimizer:
            paths |= dcp.read(checkpoint.optimizer, reader)
        return split(paths, adapter)
    content = torch_zip.load(reader, checkpoint.weights)
    paths = {path: view.stored(".".join(path)) for path, view in _flat(content, ())}
    if optimizer:
        paths |= _full_optimizer(checkpoint.folder, reader)
    return split(paths, adapter)


def _full_optimizer(folder: Path, reader: FileReader) -> dict[tuple[str, ...], Stored]:
    """The optimizer state that Accelerate saves beside a full state dict or safetensors files; empty if missing."""
    path = folder / file_names.FULL_OPTIMIZER
    state = torch_zip.load(reader, path) if path.is_file() else {}
    return {("optimizer", *keys): view.stored(".".join(keys)) for keys, view in _flat(state, ())}


def of_place(place: Path) -> dict[str, Stored]:
    """The tensors of a model's folder, or of a single safetensors file."""
    return of_folder(place) if place.is_dir() else of_file(place)


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


def of_file(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file."""
    return _read_all(path.parent, [path.name])


def _read_all(
    folder: Path, names: Sequence[str], listed: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Stored]:
    """The tensors of several files, some of which may be in parts; `listed` is each tensor's file by their index."""
    parts: dict[str, dict[tuple[int, ...], safetensors_header.Tensor]] = {}
    listed_in: set[tuple[str, str]] = set()
    for file in names:
        path = untrusted_files.inside(folder, file, file_names.INDEX)
        tensors, places = safetensors_header.read_parts(path)
        for name, header in tensors.items():
            listed_in.add((name, file))
            previous = parts.setdefault(name, {}).setdefault(places.get(name, (0,) * len(header.shape)), header)
            if previous is not header and not summary.equal(previous, header):
                raise damaged(path, f"holds a {name} that differs from the one in {previous.file.name}")
    for name, file in listed.items():
        if (name, file) not in listed_in:
            elsewhere = ", while another file does" if name in parts else ""
            raise damaged(folder / file_names.INDEX, f"lists {name} in {file}, which doesn't hold it{elsewhere}")
    return {name: _tensor_of_parts(name, parts_of) for name, parts_of in parts.items()}


def _tensor_of_parts(name: str, parts: Mapping[tuple[int, ...], safetensors_header.Tensor]) -> Stored:
    first = next(iter(parts.values()))
    if first.dtype not in ITEM_BYTES:
        raise UserError(
            f"{first.file} holds {name} in {first.dtype}, several elements to a byte",
            why="the export reads and writes whole bytes",
            fix="export it with the library that quantised it",
        )
    if any((part.dtype, len(part.shape)) != (first.dtype, len(first.shape)) for part in parts.values()):
        raise damaged(first.file, f"and its siblings hold parts of {name} that don't belong together")
    ends = [tuple(map(add, low, part.shape)) for low, part in parts.items()]
    shape = tuple(max(ends_of) for ends_of in zip(*ends, strict=True))
    pieces = [
        Piece(FileRecord(part.file, part.start, part.end - part.start), low, part.shape) for low, part in parts.items()
    ]
    return tensor(name, first.dtype, shape, pieces)


def _flat(content: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], View]]:
    if isinstance(content, View):
        yield path, content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _flat(value, (*path, str(key)))
    elif isinstance(content, (list, tuple)):
        for number, value in enumerate(content):
            yield from _flat(value, (*path, str(number)))


def split(paths: Paths, adapter: str | None = None) -> Weights:
    """Divides a nested state dict into model, adapter and optimizer; other tensors are a training loop's own."""
    inner = {path: stored for path, stored in paths.items() if len(path) > 1 and not OPTIMIZER_KEYS & set(path[:-1])}
    inner = {path: stored for path, stored in inner.items() if set(path[:-1]) <= MODEL_KEYS}
    model = inner or {path: stored for path, stored in paths.items() if len(path) == 1}
    optimizer = {optimizer_name(path): stored for path, stored in paths.items() if OPTIMIZER_KEYS & set(path[:-1])}
    tensors = _by_name({**model, **_second_model(paths, model)})
    if not tensor_names.is_adapted(tensors):
        if tensor_names.is_wrapped(tensors):
            raise UserError(
                f"the checkpoint is of a PEFT model, and its adapter is not LoRA: {next(iter(tensors))}",
                why="only LoRA and DoRA adapters can be separated from their base",
                fix="load it with PEFT, and save_pretrained it",
            )
        return Weights(tensors, optimizer=optimizer)
    base, adapters = tensor_names.divided(tensors)
    return Weights(base, _chosen_adapter(adapters, adapter), optimizer)


def _chosen_adapter(adapters: Mapping[str, dict[str, Stored]], name: str | None) -> dict[str, Stored]:
    names = ", ".join(sorted(adapters))
    if name is not None and name not in adapters and any(adapters):
        raise UsageError(
            f"--adapter {name}: the checkpoint holds {names}",
            why="there is no adapter of that name to export",
            fix=f"--adapter {min(adapters)}",
        )
    if name is None and len(adapters) > 1:
        raise UsageError(
            f"the checkpoint holds {len(adapters)} adapters: {names}",
            why="an export holds one of them, and it is unclear which is meant",
            fix=f"--adapter {min(adapters)}",
        )
    return adapters.get(name or "") or next(iter(adapters.values()))


def _second_model(paths: Paths, model: Paths) -> Paths:
    """Copies of the model under further keys, such as an average of weights: most names and shapes match."""
    shapes = {_plain(path[-1]): stored.shape for path, stored in model.items()}
    mappings: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in paths:
        if path not in model and not any("optim" in key.lower() for key in path[:-1]):
            mappings.setdefault(path[:-1], []).append(path)
    second: dict[tuple[str, ...], Stored] = {}
    for group in mappings.values():
        copies = {path: paths[path] for path in group if shapes.get(_plain(path[-1])) == paths[path].shape}
        if 2 * len(copies) > len(group):
            second |= copies
    return second


def _by_name(paths: Paths) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    origins: dict[str, tuple[str, ...]] = {}
    for path, stored in paths.items():
        name = _plain(path[-1])
        first = tensors.setdefault(name, stored)
        if first is not stored and first.content != stored.content:
            raise UserError(
                f"the checkpoint holds two tensors named {name}: {'.'.join(origins[name])} and {'.'.join(path)}",
                why="it is unclear which of them belongs to the model",
                fix="save the state dict that you want in a separate file or folder, and export that",
            )
        origins.setdefault(name, path)
    return tensors


def optimizer_name(path: tuple[str, ...]) -> str:
    """The name of an entry of a nested state dict that is of an optimizer, from below the optimizer's key on."""
    index = next(number for number, key in enumerate(path) if key in OPTIMIZER_KEYS)
    return ".".join(map(clean_name, path[index + 1 :]))


def _plain(name: str) -> str:
    return clean_name(name).removeprefix("module.")
