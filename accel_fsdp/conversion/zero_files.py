"""Writes DeepSpeed's ZeRO checkpoints for any number of ranks: the layout that `checkpoints.deepspeed` reads.

It is that of DeepSpeed 0.19: `stage_1_and_2.py` (`state_dict`), `stage3.py` (`_rigid_state_dict`) and `engine.py`
(`_save_checkpoint`). The ranks' vectors are filled in one pass over the tensors, in files that are mapped into memory.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch

from accel_fsdp.checkpoints import Stored, deepspeed, file_names
from accel_fsdp.conversion.training_state import GROUPS, PARAMS, Group, TrainingState
from accel_fsdp.errors import UserError, require
from accel_fsdp.exporter import Description

ALIGNED_ELEMENTS = 2
"""ZeRO-1 and 2: each rank's part of a group is a multiple of this (`nccl_start_alignment_factor`)."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""ZeRO-3: a rank's elements from which on a group is divided, by default (`sub_group_size`)."""
MASTER = torch.float32
Vectors = list[torch.Tensor]
"""A vector for each rank."""


@dataclass(frozen=True)
class _Part:
    """A group of the optimizer's parameters, or in ZeRO-3 a part of one; it is stored as one vector per rank."""

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

    def write(self, folder: Path, name: str, progress: Callable[[int], None]) -> None:
        """Writes all files into the folder `name`, and its name into `latest`.

        Raises:
            UserError: the state can't be stored for DeepSpeed, or DeepSpeed isn't installed.
            OSError: the folder can't be written.
        """
        require("a checkpoint of DeepSpeed", "deepspeed")
        self._check()
        inner = folder / name
        inner.mkdir()
        (folder / file_names.LATEST).write_text(name)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            weights = [self._vectors(part, "", Path(scratch), progress) for part in self._parts]
            moments = [
                {key: self._vectors(part, key, Path(scratch), progress) for key in self._keys} for part in self._parts
            ]
            for rank in range(self.ranks if self.stage == 3 else 1):
                file = f"{file_names.ZERO_RANK}{rank}_mp_rank_00" if self.stage == 3 else "mp_rank_00"
                torch.save(self._model(Path(scratch)), inner / f"{file}_model_states.pt")
            for rank in range(self.ranks):
                prefix = file_names.BF16 if self.is_bf16 else ""
                file = f"{prefix}{file_names.ZERO_RANK}{rank}_mp_rank_00_optim_states.pt"
                torch.save(self._optimizer(rank, weights, moments), inner / file)

    @property
    def _groups(self) -> list[Group]:
        """DeepSpeed removes empty groups."""
        return [group for group in self.state.groups if group.names]

    @property
    def _keys(self) -> list[str]:
        return sorted(next(iter(self.state.moments.values()), {}))

    @cached_property
    def _parts(self) -> list[_Part]:
        order = {name: number for number, name in enumerate(self.description.memory)}
        parts: list[_Part] = []
        for number, group in enumerate(self._groups):
            names, elements = list[str](), 0
            ordered = sorted(group.names, key=lambda name: order[name])
            for name in ordered:
                names.append(name)
                elements += -(-prod(self.state.weights[name].shape) // self.ranks)
                if (self.stage == 3 and elements >= SUB_GROUP_ELEMENTS) or name == ordered[-1]:
                    parts.append(_Part(number, tuple(names)))
                    names, elements = [], 0
        return parts

    def _vectors(self, part: _Part, key: str, scratch: Path, progress: Callable[[int], None]) -> Vectors:
        """The ranks' shares of the vector of a part's weights, or of their moments under `key`."""
        tensors = [self.state.moments[name][key] if key else self.state.weights[name] for name in part.names]
        counts = [prod(tensor.shape) for tensor in tensors]
        shares = [-(-count // self.ranks) for count in counts]  # of ZeRO-3, which divides each parameter
        total = sum(counts)
        share = -(-total // (ALIGNED_ELEMENTS * self.ranks)) * ALIGNED_ELEMENTS
        sizes = [sum(shares) if self.stage == 3 else share for _ in range(self.ranks)]
        if self.stage < 3 and not key:  # weights are stored without padding
            sizes = [max(0, min(share, total - rank * share)) for rank in range(self.ranks)]
        vectors = [_mapped(scratch, size) for size in sizes]
        start = base = 0
        for tensor, count, rank_share in zip(tensors, counts, shares, strict=True):
            flat, width = tensor.load().reshape(-1), rank_share if self.stage == 3 else share
            for rank in range(self.ranks):
                low, high = max(start, rank * width), min(start + count, (rank + 1) * width)
                if low < high:
                    at = base + low - rank * width
                    vectors[rank][at : at + high - low] = flat[low - start : high - start]
            progress(tensor.size_bytes)
            start, base = (0, base + rank_share) if self.stage == 3 else (start + count, 0)
        return vectors

    def _check(self) -> None:
        state, memory = self.state, self.description.memory
        copies = {name for group in self.description.ties for name in group}
        trained = {name for group in state.groups for name in group.names}
        for name in sorted(trained):
            shape = state.weights[name].shape if name in state.weights else None
            if shape is None or shape != memory.get(name):
                raise _other_model(name, shape, memory.get(name))
            if any(part.shape != shape for part in state.moments.get(name, {}).values()):
                raise _unfit(f"the optimizer's state of {name} has another shape than the weight")
        if lacking := sorted((self.description.floating & memory.keys()) - state.weights.keys()):
            raise _other_model(lacking[0], None, memory[lacking[0]])
        if len({tuple(sorted(state.moments.get(name, {}))) for name in trained}) > 1:
            raise _unfit("some weights have no optimizer state")
        if frozen := sorted((self.description.floating & state.weights.keys()) - trained - copies):
            raise _unfit(f"{frozen[0]} is not trained")
        tensors = [state.weights[name] for name in trained] + [s for of in state.moments.values() for s in of.values()]
        if any(tensor.dtype != MASTER for tensor in tensors):
            raise _unfit("weights or moments aren't in float32, in which DeepSpeed stores them")

    def _model(self, scratch: Path) -> dict[str, Any]:
        state, is_whole = self.state, self.stage < 3
        trained = {name for group in state.groups for name in group.names}
        ties = {copy: first for first, *copies in self.description.ties for copy in copies}
        shared = {copy: first for copy, first in ties.items() if first in trained}
        weights = {name: state.weights[ties.get(name, name)] for name in (*state.weights, *ties)}
        buffers = [name for name in weights if name not in trained | shared.keys()]
        module = {
            name: _copied(stored, scratch) if is_whole or name in buffers else torch.empty(0)
            for name, stored in weights.items()
        }
        return {
            **{"module": module, "buffer_names": buffers, "optimizer": None},
            "param_shapes": [{name: torch.Size(state.weights[name].shape) for name in p.names} for p in self._parts],
            **{"frozen_param_shapes": None if is_whole else {}, "frozen_param_fragments": None if is_whole else {}},
            **{"shared_params": shared, "lr_scheduler": None, "data_sampler": None, "random_ltd": None},
            **{"skipped_steps": 0, "global_steps": self.step, "global_samples": self.step * self.rows_per_step},
            **{"dp_world_size": self.ranks, "mp_world_size": 1, "ds_config": {}, "ds_version": version("deepspeed")},
        }

    def _optimizer(self, rank: int, weights: list[Vectors], moments: list[dict[str, Vectors]]) -> dict[str, Any]:
        stage, scaler = _own_objects(self.stage)
        states: dict[int, dict[str, torch.Tensor]] = {}
        for number, part in enumerate(self._parts):
            numbers = {key: torch.tensor(value, dtype=MASTER) for key, value in self._numbers(part).items()}
            states[number] = {key: vectors[rank] for key, vectors in moments[number].items()} | numbers
        groups = [
            {**group.settings, PARAMS: [number for number, part in enumerate(self._parts) if part.group == index]}
            for index, group in enumerate(self._groups)
        ]
        inner, flat = [vectors[rank] for vectors in weights], {"state": states, GROUPS: groups}
        stored = {
            **{"zero_stage": stage, "loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False},
            "ds_version": version("deepspeed"),
        }
        if self.stage == 3:
            stored |= {"partition_count": self.ranks, deepspeed.INNER_3: flat, deepspeed.FLAT_3: inner}
        else:
            elements = [sum(vector.numel() for vector in vectors) for vectors in weights]
            shares = [-(-count // (ALIGNED_ELEMENTS * self.ranks)) * ALIGNED_ELEMENTS for count in elements]
            paddings = [share - len(vectors[rank]) for share, vectors in zip(shares, weights, strict=True)]
            aligned = [[0] * len(part.names) for part in self._parts]
            stored |= {"group_paddings": paddings, "param_alignment_paddings": aligned}
            stored |= {"partition_count": [self.ranks] * len(self._parts)}
            stored |= {deepspeed.INNER_2: flat, deepspeed.FLAT_2: inner}
        return {deepspeed.STATE: stored, "ds_config": {}, "ds_version": version("deepspeed")}

    def _numbers(self, part: _Part) -> Mapping[str, float]:
        numbers = [self.state.numbers.get(name, {}) for name in part.names]
        if any(other != numbers[0] for other in numbers):
            raise _unfit("the weights of a group were trained for different numbers of steps")
        return numbers[0]


def _mapped(folder: Path, elements: int, dtype: torch.dtype = MASTER) -> torch.Tensor:
    """A vector of zeros in a file: the system may write it out when memory is short."""
    if not elements:
        return torch.empty(0, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return torch.from_file(file.name, shared=True, size=elements, dtype=dtype)


def _copied(stored: Stored, folder: Path) -> torch.Tensor:
    return _mapped(folder, prod(stored.shape), stored.dtype).copy_(stored.load().reshape(-1)).view(stored.shape)


def _own_objects(stage: int) -> tuple[Any, Any]:
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
