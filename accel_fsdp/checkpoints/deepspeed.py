"""DeepSpeed's ZeRO checkpoints: where each parameter's float32 master weights and moments are among the partitions.

The layout is that of DeepSpeed 0.19 (`deepspeed/utils/zero_to_fp32.py` reads the same keys). ZeRO-1 and 2: each
parameter group is one flat vector, cut into one part per rank. ZeRO-3: each parameter is cut into one part per rank,
padded to equal lengths, and a rank's parts follow one after another in its flat groups. The optimizer's state has the
same layout (`deepspeed/checkpoint/ds_to_universal.py`). That script makes universal checkpoints: beside the model's
files, a folder for each parameter has its weight and moments, whole; from ZeRO-3 they are vectors of its elements.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names, torch_zip
from accel_fsdp.checkpoints.safe_unpickle import ERRORS, Inert
from accel_fsdp.checkpoints.tensor_storage import ITEM_BYTES, FileReader, Piece, Stored, damaged
from accel_fsdp.checkpoints.torch_zip import View
from accel_fsdp.errors import UserError
from accel_fsdp.units import counted

T = TypeVar("T")
ViewSpan = tuple[View, int, int]
"""Elements `start` to `stop` of a one-dimensional tensor."""
LONGEST_NAME = 4096
FLAT_2, FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
INNER_2, INNER_3 = "base_optimizer_state", "optimizer_state_dict"
"""The keys of a rank's flat weights, and of the optimizer's own state: of ZeRO-1 and 2, and of ZeRO-3."""
WEIGHT, STEP = "fp32.pt", "step.pt"
"""The files of a parameter's weight and of its number of steps in universal checkpoints; others are of its moments."""
Paths = dict[tuple[str, ...], Stored]
Groups = list[View]
"""A rank's flat tensors, one per group of parameters."""


def _stage(number: Any) -> int:
    return int(number)


ADMITTED: dict[tuple[str, str], Any] = {
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): Inert,
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): Inert,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _stage,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): Inert,
}
"""Classes in DeepSpeed's files besides tensors; all of them become inert."""


def folder_of(checkpoint: Path) -> Path | None:
    """The folder of the ranks' files: the one that `latest` names, else the highest `global_stepN`; None without one.

    `Accelerator.save_state` names it `pytorch_model`, Trainer `global_stepN`.
    """
    if any(checkpoint.glob(file_names.ZERO_OPTIMIZERS)) or is_universal(checkpoint):
        return checkpoint
    name = latest(checkpoint)
    if name and Path(name).name == name and any((checkpoint / name).glob(file_names.ZERO_OPTIMIZERS)):
        return checkpoint / name
    steps = checkpoint.glob(f"{file_names.GLOBAL_STEP}*")
    return max(steps, key=lambda path: (_numbers(path.name), not is_universal(path)), default=None)


def is_universal(folder: Path) -> bool:
    """Whether a folder has a folder for each parameter, instead of the ranks' files."""
    return (folder / file_names.UNIVERSAL_STATE).is_file()


def is_inner(folder: Path) -> bool:
    """Whether a folder of the ranks' files is inside of a checkpoint."""
    return folder.name.startswith(file_names.GLOBAL_STEP) or latest(folder.parent) == folder.name


def latest(checkpoint: Path) -> str | None:
    """The folder that DeepSpeed's file `latest` names; None without such a file: `latest` may link to a checkpoint."""
    path = checkpoint / file_names.LATEST
    text = None if path.is_dir() else untrusted_files.read_text(path, LONGEST_NAME)
    return None if text is None else text.strip()


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def read(folder: Path, reader: FileReader, optimizer_too: bool = False) -> Paths:
    """Finds all parameters in float32, frozen ones and buffers as stored, by path, without reading any.

    With `optimizer_too` also the optimizer's state, whose paths begin as in the nested state dict of other checkpoints.
    """
    optimizer = sorted(folder.glob(file_names.ZERO_OPTIMIZERS), key=lambda path: _numbers(path.name))
    model = sorted(folder.glob(file_names.ZERO_MODELS), key=lambda path: _numbers(path.name))
    if not model or not (optimizer or is_universal(folder)):
        pattern = file_names.ZERO_MODELS if not model else file_names.ZERO_OPTIMIZERS
        raise damaged(folder, f"holds no {pattern}")
    try:
        return _read(folder, reader, model, optimizer, optimizer_too)
    except ERRORS as error:
        raise damaged(folder, f"is not laid out as DeepSpeed does: {type(error).__name__} {error}") from error


def _read(folder: Path, reader: FileReader, model: list[Path], optimizer: list[Path], optimizer_too: bool) -> Paths:
    loaded = [torch_zip.load(reader, path, ADMITTED) for path in model]
    first = loaded[0]
    if is_universal(folder):
        stage = int(torch_zip.load(reader, folder / file_names.UNIVERSAL_STATE, ADMITTED)["zero_stage"])
        trained = _universal(folder, first["param_shapes"], reader, optimizer_too)
    else:
        states = [torch_zip.load(reader, path, ADMITTED)["optimizer_state_dict"] for path in optimizer]
        stage = int(states[0]["zero_stage"])
        trained = _partitioned(folder, loaded, states, stage, optimizer_too)
    tensors = _unpartitioned(loaded, stage) if first.get("mp_world_size", 1) == 1 else {}
    paths: Paths = {(name,): tensor for name, tensor in tensors.items()} | trained
    return paths | {(copy,): paths[(name,)] for copy, name in first["shared_params"].items() if (name,) in paths}


def _unpartitioned(loaded: list[dict[str, Any]], stage: int) -> dict[str, Stored]:
    """Buffers and frozen parameters. Before stage 2 only the module's state contains the latter."""
    first = loaded[0]
    saved = first["buffer_names"] if stage == 3 else first["module"] or {}
    tensors = {name: first["module"][name].stored(name) for name in saved if isinstance(first["module"][name], View)}
    return tensors | _frozen_tensors(loaded if stage == 3 else loaded[:1])


def _partitioned(
    folder: Path, loaded: list[dict[str, Any]], states: list[dict[str, Any]], stage: int, optimizer_too: bool
) -> Paths:
    """The trained parameters from the ranks' parts."""
    first, ranks = loaded[0], states[0]["partition_count"]
    if first.get("mp_world_size", 1) != 1:
        raise UserError(
            f"{folder} is of {first['mp_world_size']} tensor-parallel ranks",
            why="only the training code knows how tensor parallelism split the parameters",
            fix=f"make it universal: python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder} "
            f"--output_folder {folder}_universal",
        )
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    if len(states) != ranks:
        raise damaged(folder, f"holds *_optim_states.pt of {counted(len(states), 'rank')}, but {ranks} wrote it")
    if stage == 3 and len(loaded) != ranks:
        raise damaged(folder, f"holds *_model_states.pt of {counted(len(loaded), 'rank')}, but {ranks} wrote it")
    paddings = states[0].get("param_alignment_paddings")
    place = _stage3 if stage == 3 else partial(_stage2, paddings=paddings)
    flat = FLAT_3 if stage == 3 else FLAT_2
    paths: Paths = {(name,): tensor for name, tensor in place(first, [state[flat] for state in states]).items()}
    for key, groups in _moments(states, flat) if optimizer_too else ():
        paths |= {("optimizer", "state", name, key): tensor for name, tensor in place(first, groups).items()}
    return paths


def _universal(folder: Path, groups: list[dict[str, Any]], reader: FileReader, optimizer_too: bool) -> Paths:
    """The trained parameters from their own folders."""
    paths: Paths = {}
    for name, shape in (item for shapes in groups for item in shapes.items()):
        place = _of_parameter(folder, name)
        for path in sorted({place / WEIGHT, *(place.glob("*.pt") if optimizer_too else ())}):
            if path.name == STEP:
                continue
            content = torch_zip.load(reader, path)
            is_vector = isinstance(content, View)
            tensor = _joined(name, shape, [_span_of(content)]) if is_vector else content["param"].stored(name)
            paths[(name,) if path.name == WEIGHT else ("optimizer", "state", name, path.stem)] = tensor
    return paths


def _of_parameter(folder: Path, name: str) -> Path:
    """A parameter's own folder in a universal checkpoint."""
    return untrusted_files.inside(folder / file_names.UNIVERSAL, name, file_names.UNIVERSAL_STATE)


def _model(folder: Path, reader: FileReader) -> Any:
    """What one rank stored of the model."""
    return torch_zip.load(reader, min(folder.glob(file_names.ZERO_MODELS)), ADMITTED)


def has_schedule(folder: Path, reader: FileReader) -> bool:
    """Whether DeepSpeed itself steps a schedule of the learning rate.

    Raises:
        UserError: a file is missing or damaged.
    """
    return _model(folder, reader).get("lr_scheduler") is not None


def scaled(folder: Path) -> UserError:
    """The error for a checkpoint of fp16 that is to become one of another engine."""
    return UserError(
        f"{folder} is of fp16",
        why="engines scale its loss in different ways, and the scale would be lost",
        fix="resume it under its own engine, or train in bf16",
    )


def groups(folder: Path, reader: FileReader) -> list[tuple[list[str], dict[str, Any], dict[str, Any]]]:
    """Each of the optimizer's groups: its parameters' names, its settings, and the state that they share (`step`).

    Raises:
        UserError: a file is missing or damaged, or the loss is scaled (fp16), which no other engine does alike.
    """
    try:
        first = _model(folder, reader)
        if is_universal(folder):
            state = torch_zip.load(reader, folder / file_names.UNIVERSAL_STATE, ADMITTED)
        else:
            path = min(folder.glob(file_names.ZERO_OPTIMIZERS))
            state = torch_zip.load(reader, path, ADMITTED)["optimizer_state_dict"]
        if state.get("dynamic_loss_scale"):
            raise scaled(folder)
        inner = state[INNER_3] if FLAT_3 in state else state.get(INNER_2, state)
        shapes, described = first["param_shapes"], []
        for group in inner["param_groups"]:
            names = [name for number in group["params"] for name in shapes[number]]
            steps = [_of_parameter(folder, name) / STEP for name in names[:1]]
            states = [{"step": torch_zip.load(reader, path)} for path in steps if path.is_file()]
            states += [inner.get("state", {}).get(number, {}) for number in group["params"]]
            shared = {key: value for key, value in next(iter(states), {}).items() if not getattr(value, "shape", ())}
            described.append((names, {key: value for key, value in group.items() if key != "params"}, shared))
        return described
    except ERRORS as error:
        raise damaged(folder, f"is not laid out as DeepSpeed does: {type(error).__name__} {error}") from error


def _moments(states: list[dict[str, Any]], flat: str) -> Iterator[tuple[str, list[Groups]]]:
    """The optimizer's tensors of the size of its weights, by key and rank; elastic checkpoints have none."""
    inner = INNER_3 if flat == FLAT_3 else INNER_2
    by_rank = [state[inner]["state"] if isinstance(state[inner], dict) else {} for state in states]
    weights = states[0][flat]
    for key in by_rank[0].get(0, {}):
        groups = [[states[number][key] for number in range(len(weights))] for states in by_rank]
        pairs = zip(groups[0], weights, strict=True)
        if all(isinstance(view, View) and view.shape == part.shape for view, part in pairs):
            yield key, groups


def _frozen_tensors(loaded: list[dict[str, Any]]) -> dict[str, Stored]:
    shapes = loaded[0].get("frozen_param_shapes") or {}
    return {
        name: _joined(name, shape, [_span_of(rank["frozen_param_fragments"][name]) for rank in loaded])
        for name, shape in shapes.items()
    }


def _span_of(view: View) -> ViewSpan:
    return view, 0, prod(view.shape)


def _stage2(first: dict[str, Any], ranks: list[Groups], paddings: list[list[int]] | None) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for group, shapes in enumerate(first["param_shapes"]):
        parts = [groups[group] for groups in ranks]
        at = 0
        for number, (name, shape) in enumerate(shapes.items()):
            count = prod(shape)
            tensors[name] = _joined(name, shape, list(cut_spans([_span_of(part) for part in parts], at, at + count)))
            at += count + (paddings[group][number] if paddings else 0)
    return tensors


def _stage3(first: dict[str, Any], ranks: list[Groups]) -> dict[str, Stored]:
    offset = 0
    tensors: dict[str, Stored] = {}
    for shapes in first["param_shapes"]:
        for name, shape in shapes.items():
            share = -(-prod(shape) // len(ranks))
            spans: list[ViewSpan] = []
            for groups in ranks:
                spans += cut_spans([_span_of(group) for group in groups], offset, offset + share)
            tensors[name] = _joined(name, shape, spans)
            offset += share
    return tensors


def cut_spans(spans: Iterable[tuple[T, int, int]], start: int, stop: int) -> Iterator[tuple[T, int, int]]:
    """Elements `start` to `stop` of spans laid end to end."""
    offset = 0
    for view, first, last in spans:
        low, high = max(start, offset), min(stop, offset + last - first)
        if low < high:
            yield view, first + low - offset, first + high - offset
        offset += last - first


def _joined(name: str, shape: tuple[int, ...], spans: list[ViewSpan]) -> Stored:
    """A tensor of spans laid end to end; the remainder at the end is padding."""
    pieces, offset, total = [], 0, prod(shape)
    for view, first, last in spans:
        count = min(last - first, total - offset)
        if count > 0:
            skip = (view.offset + first) * ITEM_BYTES[view.dtype]
            pieces.append(Piece(view.storage.record, (offset,), (count,), skip))
        offset += max(count, 0)
    if offset != total:
        raise damaged(
            spans[0][0].storage.record.path if spans else Path(name), f"and its siblings lack a part of {name}"
        )
    return Stored(spans[0][0].dtype, tuple(shape), tuple(pieces))
