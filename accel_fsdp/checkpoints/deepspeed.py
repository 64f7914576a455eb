"""DeepSpeed's ZeRO checkpoints: where each parameter's float32 master weights and moments are among the partitions.

The layout is that of DeepSpeed 0.19 (`deepspeed/utils/zero_to_fp32.py` reads the same keys). ZeRO-1 and 2: each
parameter group is one flat vector, cut into one part per rank. ZeRO-3: each parameter is cut into one part per rank,
padded to equal lengths, and a rank's parts follow one after another in its flat groups. The optimizer's state has the
same layout.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel_fsdp.checkpoints import file_names, saved_files
from accel_fsdp.checkpoints.saved_files import ERRORS, SavedFile
from accel_fsdp.checkpoints.stored import Stored
from accel_fsdp.errors import UserError
from accel_fsdp.units import counted
from accel_fsdp.untrusted_files import broken

STATE = "optimizer_state_dict"
_KEYS_2, _KEYS_3 = ("single_partition_of_fp32_groups", "base_optimizer_state"), ("fp32_flat_groups", STATE)
KEYS = {1: _KEYS_2, 2: _KEYS_2, 3: _KEYS_3}
"""The keys of a rank's flat weights, and of the optimizer's own state, in a checkpoint of each stage."""
Paths = dict[tuple[str, ...], Stored]


class Span(NamedTuple):
    """Elements `start` to `stop` of a flat tensor in a file."""

    file: SavedFile
    keys: tuple[Any, ...]
    start: int
    stop: int

    @classmethod
    def whole(cls, file: SavedFile, keys: tuple[Any, ...]) -> "Span":
        return cls(file, keys, 0, prod(file.stored(keys).shape))


def read(folder: Path, optimizer_too: bool = False) -> Paths:
    """Finds all parameters in float32, frozen ones and buffers as stored, by path, without reading any.

    With `optimizer_too` also the optimizer's state, whose paths begin as in the nested state dict of other checkpoints.
    """
    model, optimizer = (
        [SavedFile(path) for path in sorted(folder.glob(pattern), key=lambda path: file_names.numbers(path.name))]
        for pattern in (file_names.ZERO_MODELS, file_names.ZERO_OPTIMIZERS)
    )
    if not model or not optimizer:
        raise broken(folder, f"holds no {file_names.ZERO_OPTIMIZERS if model else file_names.ZERO_MODELS}")
    try:
        first, stage = model[0].content, int(optimizer[0].content[STATE]["zero_stage"])
        _check_ranks(folder, first, optimizer, len(model), stage)
        paths: Paths = {(name,): tensor for name, tensor in _unpartitioned(model, stage).items()}
        paths |= _partitioned(first, optimizer, stage, optimizer_too)
        return paths | {(copy,): paths[(name,)] for copy, name in first["shared_params"].items() if (name,) in paths}
    except ERRORS as error:
        raise _not_laid_out(folder, error) from error


def _not_laid_out(folder: Path, error: Exception) -> UserError:
    return broken(folder, f"is not laid out as DeepSpeed does: {type(error).__name__} {error}")


def _unpartitioned(model: list[SavedFile], stage: int) -> dict[str, Stored]:
    """Buffers and frozen parameters. Before stage 2 only the module's state contains the latter."""
    first = model[0].content
    saved = first["buffer_names"] if stage == 3 else first["module"] or {}
    module = first["module"] or {}
    tensors = {name: model[0].stored(("module", name)) for name in saved if isinstance(module[name], torch.Tensor)}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        keys = ("frozen_param_fragments", name)
        tensors[name] = _joined(name, shape, [Span.whole(file, keys) for file in (model if stage == 3 else model[:1])])
    return tensors


def _check_ranks(folder: Path, first: dict[str, Any], optimizer: list[SavedFile], models: int, stage: int) -> None:
    ranks = optimizer[0].content[STATE]["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    if first.get("mp_world_size", 1) != 1:
        raise UserError(
            f"{folder} is of {first['mp_world_size']} tensor-parallel ranks",
            why="only the training code knows how tensor parallelism split the parameters",
            fix="in the training script: engine.save_16bit_model(FOLDER), and export that",
        )
    if len(optimizer) != ranks:
        raise broken(folder, f"holds *_optim_states.pt of {counted(len(optimizer), 'rank')}, but {ranks} wrote it")
    if stage == 3 and models != ranks:
        raise broken(folder, f"holds *_model_states.pt of {counted(models, 'rank')}, but {ranks} wrote it")


def _partitioned(first: dict[str, Any], optimizer: list[SavedFile], stage: int, optimizer_too: bool) -> Paths:
    """The trained parameters from the ranks' parts."""
    flat, inner = KEYS[stage]
    state = optimizer[0].content[STATE]
    groups = range(len(state[flat]))

    def placed(keys: list[tuple[Any, ...]]) -> dict[str, Stored]:
        ranks = [[Span.whole(file, (STATE, *of_group)) for of_group in keys] for file in optimizer]
        if stage == 3:
            return _laid_out([item for shapes in first["param_shapes"] for item in shapes.items()], ranks)
        tensors: dict[str, Stored] = {}
        for group, shapes in enumerate(first["param_shapes"]):
            paddings = (state.get("param_alignment_paddings") or {group: ()})[group]
            tensors |= _laid_out(list(shapes.items()), [[groups[group] for groups in ranks]], paddings)
        return tensors

    paths: Paths = {(name,): tensor for name, tensor in placed([(flat, group) for group in groups]).items()}
    moments = state[inner]["state"] if optimizer_too and isinstance(state.get(inner), dict) else {}
    for key in moments.get(0, {}):  # an elastic checkpoint has none
        pairs = [(moments[group].get(key), state[flat][group]) for group in groups]
        if all(isinstance(moment, torch.Tensor) and moment.shape == weight.shape for moment, weight in pairs):
            tensors = placed([(inner, "state", group, key) for group in groups])
        else:  # such as `step`
            of_groups = zip(first["param_shapes"], pairs, strict=True)
            tensors = {name: _number(moment) for shapes, (moment, _) in of_groups for name in shapes}
        paths |= {("optimizer", "state", name, key): tensor for name, tensor in tensors.items()}
    return paths


def _number(value: Any) -> Stored:
    """A number that a group's parameters share, as a tensor without dimensions."""
    if getattr(value, "shape", ()):
        raise TypeError("a state of another shape than its weights")
    number = torch.tensor(float(value))
    return Stored((), number.dtype, lambda: number)


def groups(folder: Path) -> list[dict[str, Any]]:
    """The optimizer's groups, with the names of their parameters.

    Raises:
        UserError: a file is missing or damaged, or the loss is scaled (fp16), which no other engine does alike.
    """
    try:
        shapes = saved_files.load(min(folder.glob(file_names.ZERO_MODELS)))["param_shapes"]
        state = saved_files.load(min(folder.glob(file_names.ZERO_OPTIMIZERS)))[STATE]
        if state.get("dynamic_loss_scale"):
            raise scaled(folder)
        stored = state.get(KEYS[int(state["zero_stage"])][1], state)["param_groups"]
        return [
            {**group, "params": [name for number in group["params"] for name in shapes[number]]} for group in stored
        ]
    except ERRORS as error:
        raise _not_laid_out(folder, error) from error


def scaled(folder: Path) -> UserError:
    """The error for a checkpoint of fp16 that is to become one of another engine."""
    return UserError(
        f"{folder} is of fp16",
        why="engines scale its loss in different ways, and the scale would be lost",
        fix="resume it under its own engine, or train in bf16",
    )


def _laid_out(
    shapes: Sequence[tuple[str, Iterable[int]]], vectors: list[list[Span]], paddings: Sequence[int] = ()
) -> dict[str, Stored]:
    """Tensors that follow one another in vectors, each cut into equal parts, one in each vector.

    Those of ZeRO-3 are the ranks'; ZeRO-1 and 2 have one, which is laid end to end over the ranks.
    """
    offset = 0
    tensors: dict[str, Stored] = {}
    for number, (name, shape) in enumerate(shapes):
        share = -(-prod(shape) // len(vectors))
        spans = [span for vector in vectors for span in cut_spans(vector, offset, offset + share)]
        tensors[name] = _joined(name, shape, spans)
        offset += share + (paddings[number] if paddings else 0)
    return tensors


def cut_spans(spans: Iterable[Span], start: int, stop: int) -> Iterator[Span]:
    """Elements `start` to `stop` of spans laid end to end."""
    offset = 0
    for span in spans:
        low, high = max(start, offset), min(stop, offset + span.stop - span.start)
        if low < high:
            yield span._replace(start=span.start + low - offset, stop=span.start + high - offset)
        offset += span.stop - span.start


def _joined(name: str, shape: Iterable[int], spans: Iterable[Span]) -> Stored:
    """A tensor of spans laid end to end; the remainder at the end is padding."""
    sizes = tuple(shape)
    parts, total = list(spans), prod(sizes)
    if sum(span.stop - span.start for span in parts) < total or not parts:
        raise broken(parts[0].file.path if parts else Path(name), f"and its siblings lack a part of {name}")
    parts = list(cut_spans(parts, 0, total)) or parts[:1]

    def load() -> torch.Tensor:
        loaded = [span.file.tensor(span.keys, slice(span.start, span.stop)) for span in parts]
        return (loaded[0] if len(loaded) == 1 else torch.cat(loaded))[:total].view(sizes)

    return Stored(sizes, parts[0].file.stored(parts[0].keys).dtype, load)
