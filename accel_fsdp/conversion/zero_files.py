"""Writes DeepSpeed's ZeRO checkpoints for any number of ranks: the layout that `checkpoints.deepspeed` reads.

It is that of DeepSpeed 0.19: `stage_1_and_2.py` (`state_dict`), `stage3.py` (`_rigid_state_dict`) and `engine.py`
(`_save_checkpoint`). The ranks' vectors are filled in one pass over the tensors, in files that are mapped into memory.
"""

import contextlib
import io
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch

from accel_fsdp.checkpoints import Stored, deepspeed, file_names
from accel_fsdp.conversion.training_state import GROUPS, PARAMS, TrainingState, refused
from accel_fsdp.errors import UserError, require
from accel_fsdp.exporter import Description

ALIGNED_ELEMENTS = 2
"""ZeRO-1 and 2: each rank's part of a group is a multiple of this (`nccl_start_alignment_factor`)."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""ZeRO-3: a rank's elements from which on a group is divided, by default (`sub_group_size`)."""
MASTER = torch.float32
WEIGHTS = ""
"""The key of a part's weights, beside those of its moments."""
Vectors = dict[str, list[torch.Tensor]]
"""By key, the vector of each rank."""


@dataclass(frozen=True)
class _Part:
    """A group of the optimizer's parameters, or in ZeRO-3 a part of one; it is stored as one vector per rank."""

    group: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class ZeroLayout:
    """A checkpoint of a stage for `ranks` ranks, after so many steps and rows."""

    description: Description
    stage: int
    ranks: int
    step: int
    rows: int
    is_bf16: bool
    """DeepSpeed looks for files of another name under bf16 (`_get_zero_ckpt_prefix`)."""

    def write(self, state: TrainingState, folder: Path) -> None:
        """Writes all files into a folder inside of `folder`, and its name into `latest`.

        Raises:
            UserError: the state can't be stored for DeepSpeed, or DeepSpeed isn't installed.
            OSError: the folder can't be written.
        """
        require("a checkpoint of DeepSpeed", "deepspeed")
        _check(state, self.description)
        inner, prefix = folder / f"{file_names.GLOBAL_STEP}{self.step}", file_names.BF16 if self.is_bf16 else ""
        inner.mkdir()
        (folder / file_names.LATEST).write_text(inner.name)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            parts, keys = self._parts(state), [WEIGHTS, *next(iter(state.moments.values()), {})]
            vectors = [{key: self._vectors(state, part, key, Path(scratch)) for key in keys} for part in parts]
            model = self._model(state, parts, Path(scratch))
            for rank in range(self.ranks):
                of_rank = f"{file_names.ZERO_RANK}{rank}_mp_rank_00"
                if self.stage == 3 or rank == 0:
                    name = of_rank if self.stage == 3 else "mp_rank_00"
                    torch.save(model, inner / f"{name}_model_states.pt")
                torch.save(self._optimizer(state, parts, vectors, rank), inner / f"{prefix}{of_rank}_optim_states.pt")

    def _parts(self, state: TrainingState) -> list[_Part]:
        order = {name: number for number, name in enumerate(self.description.memory)}
        parts: list[_Part] = []
        for number, group in enumerate(state.filled_groups):
            names, elements = list[str](), 0
            for name in sorted(group.names, key=lambda name: order[name]):
                names.append(name)
                elements += -(-prod(state.weights[name].shape) // self.ranks)
                if self.stage == 3 and elements >= SUB_GROUP_ELEMENTS:
                    parts.append(_Part(number, tuple(names)))
                    names, elements = [], 0
            parts += [_Part(number, tuple(names))] if names else []
        return parts

    def _vectors(self, state: TrainingState, part: _Part, key: str, scratch: Path) -> list[torch.Tensor]:
        """The ranks' shares of the vector of a part's weights, or of their moments under `key`."""
        tensors = [state.weights[name] if key == WEIGHTS else state.moments[name][key] for name in part.names]
        counts = [prod(tensor.shape) for tensor in tensors]
        shares = [-(-count // self.ranks) for count in counts]  # of ZeRO-3, which divides each parameter
        total, share = sum(counts), self._share(sum(counts))
        sizes = [sum(shares) if self.stage == 3 else share for _ in range(self.ranks)]
        if self.stage < 3 and key == WEIGHTS:  # weights are stored without padding
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
            start, base = (0, base + rank_share) if self.stage == 3 else (start + count, 0)
        return vectors

    def _share(self, elements: int) -> int:
        """ZeRO-1 and 2: a rank's part of a group, with padding."""
        return -(-elements // (ALIGNED_ELEMENTS * self.ranks)) * ALIGNED_ELEMENTS

    def _model(self, state: TrainingState, parts: list[_Part], scratch: Path) -> dict[str, Any]:
        is_whole, trained = self.stage < 3, state.trained
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
            "param_shapes": [{name: torch.Size(state.weights[name].shape) for name in part.names} for part in parts],
            **{"frozen_param_shapes": None if is_whole else {}, "frozen_param_fragments": None if is_whole else {}},
            **{"shared_params": shared, "lr_scheduler": None, "data_sampler": None, "random_ltd": None},
            **{"skipped_steps": 0, "global_steps": self.step, "global_samples": self.rows},
            **{"dp_world_size": self.ranks, "mp_world_size": 1, "ds_config": {}, "ds_version": version("deepspeed")},
        }

    def _optimizer(self, state: TrainingState, parts: list[_Part], vectors: list[Vectors], rank: int) -> dict[str, Any]:
        stage, scaler = _own_objects(self.stage)
        states: dict[int, dict[str, torch.Tensor]] = {}
        for number, (part, by_key) in enumerate(zip(parts, vectors, strict=True)):
            numbers = {key: torch.tensor(value, dtype=MASTER) for key, value in _numbers(state, part).items()}
            states[number] = {key: of_ranks[rank] for key, of_ranks in by_key.items() if key != WEIGHTS} | numbers
        groups = [
            {**group.settings, PARAMS: [number for number, part in enumerate(parts) if part.group == index]}
            for index, group in enumerate(state.filled_groups)
        ]
        weights, flat = [by_key[WEIGHTS] for by_key in vectors], {"state": states, GROUPS: groups}
        own = [of_ranks[rank] for of_ranks in weights]
        stored = {
            **{"zero_stage": stage, "loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False},
            "ds_version": version("deepspeed"),
        }
        if self.stage == 3:
            stored |= {"partition_count": self.ranks, deepspeed.INNER_3: flat, deepspeed.FLAT_3: own}
        else:
            shares = [self._share(sum(vector.numel() for vector in of_ranks)) for of_ranks in weights]
            paddings = [share - len(vector) for share, vector in zip(shares, own, strict=True)]
            aligned = [[0] * len(part.names) for part in parts]
            stored |= {"group_paddings": paddings, "param_alignment_paddings": aligned}
            stored |= {"partition_count": [self.ranks] * len(parts)}
            stored |= {deepspeed.INNER_2: flat, deepspeed.FLAT_2: own}
        return {deepspeed.STATE: stored, "ds_config": {}, "ds_version": version("deepspeed")}


def _check(state: TrainingState, description: Description) -> None:
    """Refuses what DeepSpeed's files have no place for, or a model whose order of weights is another."""
    memory, trained = description.memory, state.trained
    parameters = dict(description.model.named_parameters()).keys() & memory.keys()
    for name in sorted(trained | (parameters - state.weights.keys())):
        shape = state.weights[name].shape if name in state.weights else None
        if shape is None or shape != memory.get(name):
            raise UserError(
                f"{name} has the shape {shape or 'of no weight'} in the checkpoint, and {memory.get(name, 'none')} "
                "in the model",
                why="DeepSpeed stores weights in the order of the model's code",
                fix="give the model that was trained: --model ID_OR_FOLDER",
            )
    copies = {name for group in description.ties for name in group}
    moments = [(name, moment) for name in trained for moment in state.moments.get(name, {}).values()]
    stored = [*(state.weights[name] for name in trained), *(moment for _, moment in moments)]
    if any(moment.shape != memory[name] for name, moment in moments):
        raise _unfit("an optimizer's state has another shape than its weight")
    if len({tuple(sorted(state.moments.get(name, {}))) for name in trained}) > 1:
        raise _unfit("some weights have no optimizer state")
    if frozen := sorted((parameters & state.weights.keys()) - trained - copies):
        raise _unfit(f"{frozen[0]} is not trained")
    if any(tensor.dtype != MASTER for tensor in stored):
        raise _unfit("weights or moments aren't in float32, in which DeepSpeed stores them")


def _numbers(state: TrainingState, part: _Part) -> dict[str, float]:
    numbers = [state.numbers.get(name, {}) for name in part.names]
    if any(other != numbers[0] for other in numbers):
        raise _unfit("the weights of a group were trained for different numbers of steps")
    return numbers[0]


def _unfit(what: str) -> UserError:
    what = f"{what}: such a checkpoint isn't written for DeepSpeed"
    return refused(what, "its files have no place for that, or the place depends on the run; --to fsdp2 has one")


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
