"""Opens a checkpoint of any kind as a mapping of tensors by their names in the model's code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import (
    completeness,
    dcp,
    deepspeed,
    file_names,
    safetensors_files,
    saved_files,
    tensor_names,
)
from accel_fsdp.checkpoints.discover import CheckpointLocation
from accel_fsdp.checkpoints.stored import Shapes, Stored, same_bytes
from accel_fsdp.checkpoints.tensor_names import clean_name
from accel_fsdp.errors import UserError

MODEL_KEYS = frozenset({"model", "module", "state_dict", "model_state_dict", "weights", "net", "app", "job", "state"})
OPTIMIZER_KEYS = frozenset({"optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict"})
STATES = (file_names.SCHEDULER, f"{file_names.RNG_STATE}*.pth", f"{file_names.SCALER}*.pt", "**/*_states.pt")
"""A checkpoint's schedule, random states and loss scaling, and all files of DeepSpeed's ranks."""
Paths = Mapping[tuple[str, ...], Stored]


@dataclass(frozen=True)
class Weights:
    """The content of a checkpoint.

    `tensors` are the model's, empty where only an adapter was saved; `adapter` has those of a PEFT adapter, by the
    names in PEFT's own files. `filed`: the names are those in files, not those of the model in memory.
    """

    tensors: dict[str, Stored]
    adapter: dict[str, Stored] = field(default_factory=dict)
    optimizer: dict[str, Stored] = field(default_factory=dict)
    filed: bool = False


def read(place: CheckpointLocation, optimizer: bool = False, shapes: Shapes | None = None) -> Weights:
    """Finds all tensors of a checkpoint without reading them.

    `shapes`: those of the model's config, which plain shards of ranks need.

    Raises:
        UserError: a file is missing, damaged or not to be trusted, there is no tensor, or there are several adapters.
    """
    if place.kind == "safetensors":
        state = _full_optimizer(place) if optimizer else {}
        tensors = safetensors_files.of_place(place.weights)
        weights = Weights(tensors, optimizer=split(state).optimizer, filed=True)
    elif place.kind == "adapter":
        weights = Weights({}, safetensors_files.of_file(place.weights))
    elif place.kind == "ZeRO":
        weights = split(deepspeed.read(place.weights, optimizer))
    elif place.kind == "files of ranks":
        from accel_fsdp.checkpoints import rank_files  # torch takes half a second to import its DTensor

        weights = split(rank_files.read(place.weights, shapes))
    elif place.kind == "sharded (DCP)":
        optimizer_state = dcp.read(place.optimizer) if optimizer and place.optimizer else {}
        weights = split(dcp.read(place.weights) | optimizer_state)
    else:
        weights = split(saved_files.tensors(place.weights) | (_full_optimizer(place) if optimizer else {}))
    if not weights.tensors and not weights.adapter:
        raise UserError(
            f"{place.weights} holds no tensor of a model",
            why="there is nothing to read",
            fix="take another checkpoint; PEFT 0.21 alone saves empty adapters under FSDP1",
        )
    return weights


def _full_optimizer(checkpoint: CheckpointLocation) -> dict[tuple[str, ...], Stored]:
    """The optimizer state that Accelerate saves beside a full state dict or safetensors files; empty if missing."""
    path = checkpoint.folder / file_names.FULL_OPTIMIZER
    return {("optimizer", *keys): s for keys, s in saved_files.tensors(path).items()} if path.is_file() else {}


def split(paths: Paths) -> Weights:
    """Divides a nested state dict into model, adapter and optimizer; other tensors are a training loop's own."""
    inner = {path: stored for path, stored in paths.items() if len(path) > 1 and set(path[:-1]) <= MODEL_KEYS}
    model = inner or {path: stored for path, stored in paths.items() if len(path) == 1}
    optimizer = {optimizer_name(path): stored for path, stored in paths.items() if OPTIMIZER_KEYS & set(path[:-1])}
    tensors = _by_name(model)
    if not tensor_names.is_adapted(tensors):
        if any(name.startswith(tensor_names.PEFT_PREFIX) for name in tensors):  # wrapped for an adapter of any kind
            raise UserError(
                f"the checkpoint is of a PEFT model, and its adapter is not LoRA: {next(iter(tensors))}",
                why="only LoRA and DoRA adapters can be separated from their base",
                fix="load it with PEFT, and save_pretrained it",
            )
        return Weights(tensors, optimizer=optimizer)
    base, adapters = tensor_names.divided(tensors)
    if len(adapters) > 1:
        raise UserError(
            f"the checkpoint holds {len(adapters)} adapters: {', '.join(sorted(adapters))}",
            why="an export holds one of them, and it is unclear which is meant",
            fix=f"in Python: model.save_pretrained(FOLDER, selected_adapters=['{min(adapters)}']), and export that",
        )
    return Weights(base, next(iter(adapters.values())), optimizer)


def _by_name(paths: Paths) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for path, stored in paths.items():
        name = clean_name(path[-1]).removeprefix("module.")
        if not same_bytes(tensors.setdefault(name, stored), stored):
            raise UserError(
                f"the checkpoint holds two tensors named {name}, one of them at {'.'.join(path)}",
                why="it is unclear which of them belongs to the model",
                fix="save the state dict that you want in a separate file or folder, and export that",
            )
    return tensors


def optimizer_name(path: tuple[str, ...]) -> str:
    """The name of an entry of a nested state dict that is of an optimizer, from below the optimizer's key on."""
    index = next(number for number, key in enumerate(path) if key in OPTIMIZER_KEYS)
    return ".".join(map(clean_name, path[index + 1 :]))


def refusal(checkpoint: Path, part: int = 0, of: int = 1) -> UserError | None:
    """Why a checkpoint's pickles can't be loaded: one is damaged or could run code; None if all are fine.

    DeepSpeed would unpickle some without restrictions. Every `of`-th file is read, from `part` on, so that ranks share
    the work. Weights and optimizer states in single files are left out: torch itself loads them as tensors alone.
    """
    try:
        latest = completeness.deepspeed_latest(checkpoint)
        if latest is not None:  # DeepSpeed would follow it out of the checkpoint
            untrusted_files.inside(checkpoint, latest, file_names.LATEST)
        metadata = [path for place in ("", "*/") for path in checkpoint.glob(f"{place}*{file_names.DCP_METADATA}")]
        states = [path for name in STATES for path in checkpoint.glob(name)]
        for path in sorted(path for path in (*metadata, *states) if path.exists())[part::of]:
            if path in metadata:
                dcp.unpickled(untrusted_files.read_bytes(path), path)
            else:
                saved_files.load(path)
    except UserError as error:
        return error
    return None
