"""Writes DeepSpeed's ZeRO checkpoints for any number of ranks: the layout that `checkpoints.deepspeed` reads.

It is that of DeepSpeed 0.19: `stage_1_and_2.py` (`state_dict`), `stage3.py` (`_rigid_state_dict`) and `engine.py`
(`_save_checkpoint`).
"""

import contextlib
import io
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints import ITEM_BYTES, FileReader, Stored, deepspeed, file_names, part_of
from accel_fsdp.conversion.training_state import GROUPS, PARAMS, Group, TrainingState
from accel_fsdp.errors import UserError, require
from accel_fsdp.exporter import Description, Output, TensorPlacement, pth_writer

ALIGNED_ELEMENTS = 2
"""ZeRO-1 and 2: each rank's part of a group is a multiple of this (`nccl_start_alignment_factor`)."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""ZeRO-3: a rank's elements from which on a group is divided, by default (`sub_group_size`)."""
MASTER = "F32"
Span = tuple[Stored | None, int, int]
"""Elements `start` to `stop` of a tensor; of None, so many zeros."""


@dataclass(frozen=True)
class Spans:
    """A vector of spans of tensors, one after another."""

    spans: tuple[Span, ...]
    dtype: str = MASTER
    unit: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(stop - start for _, start, stop in self.spans),)

    def read(self, reader: FileReader, start: int, stop: int, buffer: memoryview) -> None:
        """Fills `buffer` with elements `start` to `stop`."""
        at, item = 0, ITEM_BYTES[self.dtype]
        for stored, first, last in deepspeed.cut_spans(self.spans, start, stop):
            part = buffer[at : at + (last - first) * item]
            part[:] = bytes(len(part)) if stored is None else _cut(reader, stored, first, last - first)
            at += len(part)


@dataclass(frozen=True)
class Number:
    """A tensor without dimensions."""

    value: float
    dtype: str = MASTER
    unit: int = 1
    shape: tuple[int, ...] = ()

    def read(self, reader: FileReader, start: int, stop: int, buffer: memoryview) -> None:
        """Fills `buffer` with the number."""
        buffer[:] = struct.pack("<f", self.value)


def _cut(reader: FileReader, stored: Stored, first: int, count: int) -> memoryview:
    """Elements of a tensor from any one on; it is read from a multiple of its `unit`."""
    item, before = ITEM_BYTES[stored.dtype], first % stored.unit
    end = min(-(-(first + count) // stored.unit) * stored.unit, prod(stored.shape))
    content = memoryview(part_of(reader, stored, first - before, end))
    return content[before * item : (before + count) * item]


@dataclass(frozen=True)
class _Part:
    """A group of the optimizer's parameters, or in ZeRO-3 a part of one; it is stored as one vector."""

    group: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class ZeroLayout:
    """A state that is to be written for `ranks` ranks of a stage."""

    state: TrainingState
    description: Description
    stage: int
    ranks: int
    step: int
    rows_per_step: int
    is_bf16: bool
    """DeepSpeed looks for files of another name under bf16 (`_get_zero_ckpt_prefix`)."""

    def place(self, folder: Path, name: str) -> list[TensorPlacement]:
        """Writes all files without their tensors' bytes into the folder `name`, and says where those go.

        Raises:
            UserError: the state can't be stored for DeepSpeed, or DeepSpeed isn't installed.
            OSError: the folder can't be written.
        """
        require("a checkpoint of DeepSpeed", "deepspeed")
        self._check()
        inner = folder / name
        inner.mkdir()
        (folder / file_names.LATEST).write_text(name)
        placed = []
        for rank in range(self.ranks if self.stage == 3 else 1):
            file = f"{file_names.ZERO_RANK}{rank}_mp_rank_00" if self.stage == 3 else "mp_rank_00"
            placed += _place(self._model(rank), inner / f"{file}_model_states.pt")
        for rank in range(self.ranks):
            file = f"{file_names.BF16 if self.is_bf16 else ''}{file_names.ZERO_RANK}{rank}_mp_rank_00_optim_states.pt"
            placed += _place(self._optimizer(rank), inner / file)
        return placed

    @property
    def _groups(self) -> list[Group]:
        """DeepSpeed removes empty groups."""
        return [group for group in self.state.groups if group.names]

    @cached_property
    def _parts(self) -> list[_Part]:
        order = {name: number for number, name in enumerate(self.description.memory)}
        parts: list[_Part] = []
        for number, group in enumerate(self._groups):
            names, elements = list[str](), 0
            ordered = sorted(group.names, key=lambda name: order[name])
            for name in ordered:
                names.append(name)
                elements += self._share(name)
                if (self.stage == 3 and elements >= SUB_GROUP_ELEMENTS) or name == ordered[-1]:
                    parts.append(_Part(number, tuple(names)))
                    names, elements = [], 0
        return parts

    def _share(self, name: str) -> int:
        """ZeRO-3: a rank's elements of a parameter."""
        return -(-prod(self.state.weights[name].shape) // self.ranks)

    def _check(self) -> None:
        state = self.state
        copies = {name for group in self.description.ties for name in group}
        trained = {name for group in state.groups for name in group.names}
        for name in sorted(trained):
            shape = state.weights[name].shape if name in state.weights else None
            if shape is None or shape != self.description.memory.get(name):
                raise _other_model(name, shape, self.description.memory.get(name))
            if any(part.shape != shape for part in state.moments.get(name, {}).values()):
                raise _unfit(f"the optimizer's state of {name} has another shape than the weight")
        if lacking := sorted((self.description.floating & self.description.memory.keys()) - state.weights.keys()):
            raise _other_model(lacking[0], None, self.description.memory[lacking[0]])
        keys = {tuple(sorted(state.moments.get(name, {}))) for name in trained}
        if len(keys) > 1:
            raise _unfit("some weights have no optimizer state")
        if frozen := sorted((self.description.floating & state.weights.keys()) - trained - copies):
            raise _unfit(f"{frozen[0]} is not trained")
        tensors = [state.weights[name] for name in trained] + [s for of in state.moments.values() for s in of.values()]
        if any(tensor.dtype != MASTER for tensor in tensors):
            raise _unfit("weights or moments aren't in float32, in which DeepSpeed stores them")

    def _model(self, rank: int) -> dict[str, Any]:
        import torch

        state = self.state
        trained = {name for group in state.groups for name in group.names}
        ties = {copy: first for first, *copies in self.description.ties for copy in copies}
        shared = {copy: first for copy, first in ties.items() if first in trained}
        weights = {name: state.weights[ties.get(name, name)] for name in (*state.weights, *ties)}
        is_whole = self.stage < 3
        empty = Spans(())
        module = {
            name: Output(f"{name} of {rank}", stored.dtype, stored)
            if is_whole or name not in trained | shared.keys()
            else Output(f"{name} of {rank}", MASTER, empty)
            for name, stored in weights.items()
        }
        buffers = [name for name in weights if name not in trained | shared.keys()]
        return {
            **{"module": module, "buffer_names": buffers, "optimizer": None},
            "param_shapes": [{name: torch.Size(state.weights[name].shape) for name in p.names} for p in self._parts],
            **{"frozen_param_shapes": None if is_whole else {}, "frozen_param_fragments": None if is_whole else {}},
            **{"shared_params": shared, "lr_scheduler": None, "data_sampler": None, "random_ltd": None},
            **{"skipped_steps": 0, "global_steps": self.step, "global_samples": self.step * self.rows_per_step},
            **{"dp_world_size": self.ranks, "mp_world_size": 1, "ds_config": {}, "ds_version": _version()},
        }

    def _optimizer(self, rank: int) -> dict[str, Any]:
        stage, scaler = _inert_parts(self.stage)
        parts = self._parts
        keys = sorted(next(iter(self.state.moments.values()), {}))
        states: dict[int, dict[str, Output]] = {}
        for number, part in enumerate(parts):
            states[number] = {key: self._output(rank, part, key, padded=True) for key in keys}
            for key, value in self._numbers(part).items():
                states[number][key] = Output(f"{key} of {part.names[0]} of {rank}", MASTER, Number(value))
        groups = [
            {**group.settings, PARAMS: [number for number, part in enumerate(parts) if part.group == index]}
            for index, group in enumerate(self._groups)
        ]
        weights = [self._output(rank, part, "", padded=self.stage == 3) for part in parts]
        stored = {
            **{"zero_stage": stage, "loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False},
            "ds_version": _version(),
        }
        if self.stage == 3:
            inner = {deepspeed.INNER_3: {"state": states, GROUPS: groups}, deepspeed.FLAT_3: weights}
            stored |= {"partition_count": self.ranks, **inner}
        else:
            inner = {deepspeed.INNER_2: {"state": states, GROUPS: groups}, deepspeed.FLAT_2: weights}
            paddings = [sum(b - a for stored, a, b in self._flat(rank, p, "") if stored is None) for p in parts]
            aligned = [[0] * len(part.names) for part in parts]
            counts = [self.ranks] * len(parts)
            stored |= {"group_paddings": paddings, "param_alignment_paddings": aligned, "partition_count": counts}
            stored |= inner
        return {"optimizer_state_dict": stored, "ds_config": {}, "ds_version": _version()}

    def _numbers(self, part: _Part) -> Mapping[str, float]:
        numbers = [self.state.numbers.get(name, {}) for name in part.names]
        if any(other != numbers[0] for other in numbers):
            raise _unfit("the weights of a group were trained for different numbers of steps")
        return numbers[0]

    def _output(self, rank: int, part: _Part, key: str, padded: bool) -> Output:
        spans = tuple(span for span in self._flat(rank, part, key) if padded or span[0] is not None)
        return Output(f"{key or 'weights'} of {part.names[0]} of {rank}", MASTER, Spans(spans))

    def _flat(self, rank: int, part: _Part, key: str) -> Iterator[Span]:
        """A rank's share of the vector of a part's weights, or of their moments."""
        tensors = [self.state.moments[name][key] if key else self.state.weights[name] for name in part.names]
        whole = [(tensor, prod(tensor.shape)) for tensor in tensors]
        if self.stage == 3:
            for name, (tensor, count) in zip(part.names, whole, strict=True):
                yield from self._own_share(rank, [(tensor, 0, count)], self._share(name), count)
            return
        total = sum(count for _, count in whole)
        share = -(-total // (ALIGNED_ELEMENTS * self.ranks)) * ALIGNED_ELEMENTS
        yield from self._own_share(rank, [(tensor, 0, count) for tensor, count in whole], share, total)

    def _own_share(self, rank: int, spans: list[Span], share: int, total: int) -> Iterator[Span]:
        """A rank's `share` elements of spans laid end to end, `total` long; zeros fill up what the last ranks lack."""
        filled: list[Span] = [*spans, (None, 0, share * self.ranks - total)]
        return deepspeed.cut_spans(filled, rank * share, (rank + 1) * share)


def _place(content: dict[str, Any], path: Path) -> list[TensorPlacement]:
    return pth_writer.place(content, path, deepspeed.ADMITTED)


def _version() -> str:
    from importlib.metadata import version

    return version("deepspeed")


def _inert_parts(stage: int) -> tuple[Any, Any]:
    """DeepSpeed's own objects of a stage, and of a loss that isn't scaled; it greets on stdout when it is imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
    return ZeroStageEnum(stage), LossScaler(scale=1.0)


def _other_model(name: str, shape: tuple[int, ...] | None, described: tuple[int, ...] | None) -> UserError:
    return UserError(
        f"{name} has the shape {shape or 'of no weight'} in the checkpoint, and {described or 'none'} in the model",
        why="DeepSpeed stores weights in the order of the model's code",
        fix="give the model that was trained: --model ID_OR_FOLDER",
    )


def _unfit(what: str) -> UserError:
    return UserError(
        f"{what}: such a checkpoint isn't written for DeepSpeed",
        why="its files have no place for that, or the place depends on the run",
        fix="--to fsdp2; or a new run from the weights: accel-fsdp export",
    )
