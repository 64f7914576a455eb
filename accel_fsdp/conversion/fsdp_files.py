"""Writes Accelerate's sharded checkpoints of FSDP in one process, one tensor after another.

FSDP1, FSDP2 and meshes read them on any number of ranks.
"""

import mmap
import warnings
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from accel_fsdp.checkpoints import Stored, file_names
from accel_fsdp.conversion.training_state import GROUPS, TrainingState


class _Planner(dcp.DefaultSavePlanner):  # type: ignore[misc, name-defined]
    """Loads each tensor when it is written; what is saved holds tensors without content in their places.

    torch 2.13 keeps all tensors of a file until its end, so that they share one buffer.
    """

    def __init__(self, stored: dict[int, Stored]) -> None:
        super().__init__()
        self.stored = stored
        self.buffer = mmap.mmap(-1, max((tensor.size_bytes for tensor in stored.values()), default=0) or 1)

    def lookup_object(self, index: Any) -> Any:
        """The object at an index of the plan."""
        value = self.state_dict[index.fqn]
        stored = self.stored.get(id(value))
        if stored is None:
            return value
        if not stored.size_bytes:
            return stored.load()
        shared = torch.frombuffer(self.buffer, dtype=stored.dtype, count=prod(stored.shape))  # not a view: it is cloned
        return shared.view(stored.shape).copy_(stored.load())


def write(state: TrainingState, folder: Path) -> None:
    """Writes weights and optimizer into `folder`.

    Raises:
        CheckpointException: the disk is full, or a tensor can't be read.
    """
    stored: dict[int, Stored] = {}

    def placed(tensors: dict[str, Stored]) -> dict[str, Any]:
        blank = {name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in tensors.items()}
        stored.update({id(blank[name]): tensor for name, tensor in tensors.items()})
        return dict(blank)

    states = {name: placed(moments) for name, moments in state.moments.items()}
    contents = {
        file_names.SHARDED_MODEL: {"model": placed(state.weights)},
        file_names.SHARDED_OPTIMIZER: {"optimizer": {"state": states, GROUPS: state.groups}},
    }
    for name, content in contents.items():
        writer = FileSystemWriter(folder / name, per_thread_copy_ahead=0)  # with a GPU, torch reads tensors ahead
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a single process
            dcp.save(content, storage_writer=writer, planner=_Planner(stored), no_dist=True)  # type: ignore[attr-defined]
