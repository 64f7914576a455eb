"""Writes DeepSpeed's ZeRO checkpoints for any number of ranks: the layout that `checkpoints.deepspeed` reads.

It is that of DeepSpeed 0.19: `stage_1_and_2.py` (`state_dict`), `stage3.py` (`_rigid_state_dict`) and `engine.py`
(`_save_checkpoint`). The ranks' vectors are filled in one pass over the tensors, in files that are mapped into memory.
"""

import contextlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from accel_fsdp.checkpoints import Stored, deepspeed, file_names, flat
from accel_fsdp.conversion.training_state import GROUPS, PARAMS, TrainingState, refused
from accel_fsdp.errors import UserError, require
from accel_fsdp.exporter import Description

ALIGNED_ELEMENTS = 2
"""ZeRO-1 and 2: each rank's part of a group is a multiple of this (`nccl_start_alignment_factor`)."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""ZeRO-3: a rank's elements from which on a group is divided, by default (`sub_group_size`)."""
MASTER = torch.float32


@dataclass(frozen=True)
class _Part:
    """A group of the optimizer's parameters, or in ZeRO-3 a part of one, with each rank's share of it."""

    group: int
    names: list[str]
    weights: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class ZeroLayout:
    """A checkpoint of a stage for `ranks` ranks, after so many steps."""

    description: Description
    stage: int
    ranks: int
    step: int
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
            parts = [self._part(state, group, names, scratch) for group, names in self._divided(state)]
            model = self._model(state, parts, scratch)
            of_ranks = [f"{file_names.ZERO_RANK}{rank}_mp_rank_00" for rank in range(self.ranks)]
            for name in of_ranks if self.stage == 3 else ["mp_rank_00"]:
                torch.save(model, inner / f"{name}_model_states.pt")
            for rank, name in enumerate(of_ranks):
                torch.save(self._optimizer(state, parts, rank), inner / f"{prefix}{name}_optim_states.pt")

    def _divided(self, state: TrainingState) -> Iterator[tuple[int, list[str]]]:
        """The number of each part's group, and the names of its parameters in the order of the model."""
        for number, group in enumerate(state.filled_groups):
            names, elements, members = list[str](), 0, set(group[PARAMS])
            for name in filter(members.__contains__, self.description.memory):
                names.append(name)
                elements += -(-prod(state.weights[name].shape) // self.ranks)
                if self.stage == 3 and elements >= SUB_GROUP_ELEMENTS:
                    yield number, names
                    names, elements = [], 0
            if names:
                yield number, names

    def _part(self, state: TrainingState, group: int, names: list[str], scratch: str) -> _Part:
        weights = self._vectors([state.weights[name] for name in names], scratch, padded=self.stage == 3)
        of_names = [state.moments.get(name, {}) for name in names]
        keys = [key for key, moment in of_names[0].items() if moment.shape]
        moments = {key: self._vectors([of_name[key] for of_name in of_names], scratch) for key in keys}
        numbers = [{k: m.load() for k, m in of_name.items() if not m.shape} for of_name in of_names]  # such as `step`
        if any(other != numbers[0] for other in numbers):
            raise _unfit("the weights of a group were trained for different numbers of steps")
        states = [{key: vectors[rank] for key, vectors in moments.items()} | numbers[0] for rank in range(self.ranks)]
        return _Part(group, names, weights, states)

    def _vectors(self, tensors: list[Stored], scratch: str, padded: bool = True) -> list[torch.Tensor]:
        """The ranks' shares of the vector of these tensors; without padding at the end unless it is `padded`."""
        counts = [prod(tensor.shape) for tensor in tensors]
        parts = self.ranks if self.stage == 3 else 1  # of each parameter
        shares = [-(-count // parts) for count in counts]
        width = self._share(sum(shares))
        whole = _mapped(scratch, width * self.ranks)
        places = torch.split(whole[: parts * sum(shares)].view(parts, -1), shares, dim=1)
        for tensor, count, place in zip(tensors, counts, places, strict=True):
            elements = functional.pad(flat(tensor.load()), (0, place.numel() - count))
            place.copy_(elements.view(place.shape))
        end = len(whole) if padded else sum(counts)
        bounds = [min(rank * width, end) * MASTER.itemsize for rank in range(self.ranks + 1)]
        # torch.save writes whole storages, so that each rank gets one that is a part of the file
        return [torch.empty(0).set_(whole.untyped_storage()[low:high]) for low, high in pairwise(bounds)]

    def _share(self, elements: int) -> int:
        """A rank's part of a group, with padding; in ZeRO-3 the elements are a rank's already."""
        return elements if self.stage == 3 else -(-elements // (ALIGNED_ELEMENTS * self.ranks)) * ALIGNED_ELEMENTS

    def _model(self, state: TrainingState, parts: list[_Part], scratch: str) -> dict[str, Any]:
        trained = state.trained
        ties = {copy: first for first, *copies in self.description.ties for copy in copies}
        shared = {copy: first for copy, first in ties.items() if first in trained}
        weights = {name: state.weights[ties.get(name, name)] for name in (*state.weights, *ties)}
        buffers = weights.keys() - trained - shared.keys()
        stored = weights.keys() if self.stage < 3 else buffers
        return {
            "module": {n: _copied(w, scratch) if n in stored else torch.empty(0) for n, w in weights.items()},
            **{"buffer_names": sorted(buffers), "shared_params": shared, "lr_scheduler": None},
            "param_shapes": [{name: torch.Size(state.weights[name].shape) for name in part.names} for part in parts],
            **{"skipped_steps": 0, "global_steps": self.step},
            **{"dp_world_size": self.ranks, "mp_world_size": 1, "ds_version": version("deepspeed")},
        }

    def _optimizer(self, state: TrainingState, parts: list[_Part], rank: int) -> dict[str, Any]:
        states = {number: part.states[rank] for number, part in enumerate(parts)}
        groups = [
            {**group, PARAMS: [number for number, part in enumerate(parts) if part.group == index]}
            for index, group in enumerate(state.filled_groups)
        ]
        flat, inner = deepspeed.KEYS[self.stage]
        own = [part.weights[rank] for part in parts]
        stored = {
            **{"zero_stage": self.stage, "partition_count": self.ranks, "ds_version": version("deepspeed")},
            **{"loss_scaler": _no_scaler(), "dynamic_loss_scale": False, "overflow": False},
            **{inner: {"state": states, GROUPS: groups}, flat: own},
        }
        if self.stage < 3:
            sizes = [sum(prod(state.weights[name].shape) for name in part.names) for part in parts]
            stored["group_paddings"] = [self._share(size) - len(v) for size, v in zip(sizes, own, strict=True)]
        return {deepspeed.STATE: stored}


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
        tensors = (state.weights[name], *state.moments.get(name, {}).values())
        if any(tensor.dtype != MASTER or tensor.shape not in (shape, ()) for tensor in tensors):
            raise _unfit("weights or moments aren't in float32, or a moment has another shape than its weight")
    if len({tuple(sorted(state.moments.get(name, {}))) for name in trained}) > 1:
        raise _unfit("some weights have no optimizer state")
    if frozen := sorted(parameters - trained - {name for group in description.ties for name in group}):
        raise _unfit(f"{frozen[0]} is not trained")


def _unfit(what: str) -> UserError:
    what = f"{what}: such a checkpoint isn't written for DeepSpeed"
    return refused(what, "its files have no place for that, or the place depends on the run; --to fsdp2 has one")


def _mapped(folder: str, elements: int, dtype: torch.dtype = MASTER) -> torch.Tensor:
    """A vector of zeros in a file: the system may write it out when memory is short."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return torch.from_file(file.name, shared=True, size=max(elements, 1), dtype=dtype)[:elements]


def _copied(stored: Stored, folder: str) -> torch.Tensor:
    return _mapped(folder, prod(stored.shape), stored.dtype).copy_(flat(stored.load())).view(stored.shape)


def _no_scaler() -> Any:
    """DeepSpeed's own object of a loss that isn't scaled; it greets on stdout when it is imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
    return LossScaler(scale=1.0)
