"""Opens a checkpoint of any kind as one thing: tensors by the names that the model's own code gives them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_fsdp import archive, dcp, weights, zero_checkpoint
from accel_fsdp.adapters import clean_name
from accel_fsdp.archive import View
from accel_fsdp.checkpoint import Found
from accel_fsdp.errors import UserError
from accel_fsdp.stored import Piece, Reader, Record, Stored, damaged, tensor

MODEL_KEYS = frozenset({"model", "module", "state_dict", "model_state_dict", "weights", "net", "app", "job", "state"})
OPTIMIZER_KEYS = frozenset({"optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict"})
LORA = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)(?:\.|$)")
INDEX = "model.safetensors.index.json"
PEFT_PREFIX = "base_model.model."
Paths = Mapping[tuple[str, ...], Stored]


@dataclass(frozen=True)
class Weights:
    """The content of a checkpoint.

    `tensors` are the model's, empty where only an adapter was saved; `adapter` are those of a PEFT adapter, by the
    names in PEFT's own files. `filed`: the names are already those of files, not of the model in memory.
    """

    tensors: dict[str, Stored]
    adapter: dict[str, Stored] = field(default_factory=dict)
    optimizer: dict[str, Stored] = field(default_factory=dict)
    filed: bool = False


def read(found: Found, reader: Reader, optimizer: bool = False) -> Weights:
    """Finds all tensors of a checkpoint; none is read.

    Raises:
        UserError: a file is missing, damaged or not to be trusted, or there is no tensor.
    """
    made = _read(found, reader, optimizer)
    if not made.tensors and not made.adapter:
        raise UserError(
            f"{found.weights} holds no tensor of a model",
            why="there is nothing to export",
            fix="export another checkpoint; PEFT 0.21 alone saves empty adapters under FSDP1",
        )
    return made


def _read(found: Found, reader: Reader, optimizer: bool) -> Weights:
    if found.kind == "safetensors":
        state = _full_optimizer(found.folder, reader) if optimizer else {}
        return Weights(dict(_filed(found.folder)), optimizer=split(state).optimizer, filed=True)
    if found.kind == "adapter":
        return Weights({}, of_file(found.weights))
    if found.kind == "ZeRO":
        return split(zero_checkpoint.read(found.weights, reader, optimizer))
    if found.kind == "sharded (DCP)":
        paths = dcp.read(found.weights, reader)
        if optimizer and found.optimizer:
            paths |= dcp.read(found.optimizer, reader)
        return split(paths)
    content = archive.load(reader, found.weights)
    paths = {path: view.stored(".".join(path)) for path, view in _flat(content, ())}
    if optimizer:
        paths |= _full_optimizer(found.folder, reader)
    return split(paths)


def _full_optimizer(folder: Path, reader: Reader) -> dict[tuple[str, ...], Stored]:
    """What Accelerate saves beside a full state dict and beside safetensors files alike; empty if it isn't there."""
    path = folder / "optimizer.bin"
    state = archive.load(reader, path) if path.is_file() else {}
    return {("optimizer", *keys): view.stored(".".join(keys)) for keys, view in _flat(state, ())}


def _filed(folder: Path) -> Iterator[tuple[str, Stored]]:
    index = weights.read_json(folder / INDEX)
    names = sorted(set(map(str, dict(index.get("weight_map") or {}).values()))) or ["model.safetensors"]
    for name in names:
        yield from of_file(folder / name if _in_hub_cache(folder, name) else dcp.inside(folder, name, INDEX)).items()


def _in_hub_cache(folder: Path, name: str) -> bool:
    """Whether it is huggingface_hub's link from `REPO/snapshots/REVISION/` to a file right in `REPO/blobs/`."""
    path, home = folder / name, folder.resolve().parent
    if Path(name).name != name or home.name != "snapshots" or not path.is_symlink():
        return False
    return path.resolve().parent == home.parent / "blobs"


def of_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of a model's folder.

    Raises:
        UserError: it holds no safetensors files, or damaged ones.
    """
    found = {name: one for path in sorted(folder.glob("model*.safetensors")) for name, one in of_file(path).items()}
    if not found:
        raise UserError(
            f"{folder} holds no model*.safetensors",
            why="there is nothing to merge the adapter into",
            fix="give the base model with its weights: --model ID_OR_FOLDER",
        )
    return found


def of_file(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file.

    Raises:
        UserError: it is missing, cut short or none.
    """
    read_tensors = weights.tensors_of(path)
    if read_tensors is None:
        raise damaged(path, "is missing" if not path.is_file() else "is damaged or cut short")
    return {name: _of_header(name, one) for name, one in read_tensors.items()}


def _of_header(name: str, one: weights.Tensor) -> Stored:
    record = Record(one.file, one.start, one.end - one.start)
    return tensor(name, one.dtype, one.shape, [Piece(record, (0,) * len(one.shape), one.shape)])


def _flat(content: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], View]]:
    if isinstance(content, View):
        yield path, content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _flat(value, (*path, str(key)))
    elif isinstance(content, (list, tuple)):
        for number, value in enumerate(content):
            yield from _flat(value, (*path, str(number)))


def split(paths: Paths) -> Weights:
    """Divides a nested state dict into model, adapter and optimizer; other tensors are a training loop's own."""
    inner = {path: one for path, one in paths.items() if len(path) > 1 and not OPTIMIZER_KEYS & set(path[:-1])}
    inner = {path: one for path, one in inner.items() if set(path[:-1]) <= MODEL_KEYS}
    model = inner or {path: one for path, one in paths.items() if len(path) == 1}
    optimizer = {_behind(path): one for path, one in paths.items() if OPTIMIZER_KEYS & set(path[:-1])}
    named = _named(model)
    adapter = {name: one for name, one in named.items() if LORA.search(name)}
    if not adapter:
        return Weights(named, optimizer=optimizer)
    whole = any(".base_layer." in name for name in named)
    if not whole:
        return Weights({}, {_adapter_name(name): one for name, one in named.items()}, optimizer)
    replaced = {name for name in named if ".modules_to_save." in name}
    adapter |= {name: named[name] for name in replaced}
    base = {name.replace(".original_module.", "."): one for name, one in named.items() if name not in adapter}
    base = {name.replace(".base_layer.", ".").removeprefix(PEFT_PREFIX): one for name, one in base.items()}
    return Weights(base, {_adapter_name(name): one for name, one in adapter.items()}, optimizer)


def _named(paths: Paths) -> dict[str, Stored]:
    """By the model's own names, each of which stands for one tensor."""
    named: dict[str, Stored] = {}
    origins: dict[str, tuple[str, ...]] = {}
    for path, one in paths.items():
        name = _plain(path[-1])
        if named.setdefault(name, one) != one:
            raise UserError(
                f"the checkpoint holds two tensors named {name}: {'.'.join(origins[name])} and {'.'.join(path)}",
                why="which of them is the model's can't be guessed",
                fix="save the state dict that you want in a file or folder of its own, and export that",
            )
        origins.setdefault(name, path)
    return named


def _behind(path: tuple[str, ...]) -> str:
    at = next(number for number, key in enumerate(path) if key in OPTIMIZER_KEYS)
    return ".".join(map(clean_name, path[at + 1 :]))


def _plain(name: str) -> str:
    """Without what FSDP, torch.compile and DDP put into names."""
    return clean_name(name).removeprefix("module.")


def _adapter_name(name: str) -> str:
    """As in PEFT's files, which leave out the adapter's name: `...lora_A.default.weight` is `...lora_A.weight`."""
    name = re.sub(r"\.(lora_magnitude_vector)\.[^.]+(?:\.weight)?$", r".\1", name)
    name = re.sub(r"\.(lora_embedding_[AB])\.[^.]+$", r".\1", name)
    name = re.sub(r"\.(lora_[AB])\.[^.]+\.(weight|bias)$", r".\1.\2", name)
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)
