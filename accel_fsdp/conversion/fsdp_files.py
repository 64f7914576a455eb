"""Writes Accelerate's sharded checkpoints of FSDP in one process, one tensor after another.

FSDP1, FSDP2 and meshes read them on any number of ranks.
"""

import mmap
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from accel_fsdp.checkpoints import Stored, file_names
from accel_fsdp.conversion.training_state import GROUPS, TrainingState


class _Planner(dcp.DefaultSavePlanner):  # type: ignore[misc, name-defined]
    """Saves a state dict of `Stored`, each of which is loaded when it is written.

    torch 2.13 keeps all tensors of a file until its end, so that they share one buffer.
    """

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Replaces what is to be loaded by tensors without content, of which torch makes its plan."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.stored = {name: value for name, value in self.state_dict.items() if isinstance(value, Stored)}
        for name, stored in self.stored.items():
            self.state_dict[name] = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        self.buffer = mmap.mmap(-1, max((stored.size_bytes for stored in self.stored.values()), default=0) or 1)

    def lookup_object(self, index: Any) -> Any:
        """The object at an index of the plan."""
        if (stored := self.stored.get(index.fqn)) is None:
            return self.state_dict[index.fqn]
        if not stored.size_bytes:
            return stored.load()
        shared = torch.frombuffer(memoryview(self.buffer)[: stored.size_bytes], dtype=stored.dtype)  # a view is cloned
        return shared.view(stored.shape).copy_(stored.load())


def write(state: TrainingState, folder: Path) -> None:
    """Writes weights and optimizer into `folder`.

    Raises:
        CheckpointException: the disk is full, or a tensor can't be read.
    """
    contents = {
        file_names.SHARDED_MODEL: {"model": state.weights},
        file_names.SHARDED_OPTIMIZER: {"optimizer": {"state": state.moments, GROUPS: state.groups}},
    }
    for name, content in contents.items():
        writer = FileSystemWriter(folder / name, per_thread_copy_ahead=0)  # with a GPU, torch reads tensors ahead
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a single process
            dcp.save(content, storage_writer=writer, planner=_Planner(), no_dist=True)  # type: ignore[attr-defined]
