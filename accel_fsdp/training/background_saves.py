"""Checkpoints that are written in the background (`--async_checkpoints`): training waits for a copy in host memory."""

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_map

from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal

RELIES_ON = (Internal("torch.distributed.checkpoint:save", "state_dict * storage_writer planner process_group"),)


class BackgroundSaves:
    """Writes one checkpoint at a time, with a thread and a gloo group of its own on each rank. Make it on all ranks.

    The thread is a daemon: a rank that fails ends without it, and leaves a checkpoint without a marker, as a rank that
    is killed in a save. torch's stagers (2.13) copy neither the ShardedTensors of FSDP1 nor all parts of a mesh.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._staged: list[tuple[Any, dict[str, Any]]] = []
        self._copies: list[torch.Tensor] = []
        self._written: Future[None] | None = None

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        """Copies what the block saves with torch's `save`, for `begin` to write.

        The memory of the copies is kept for the next save: to take it anew would take longer than to fill it.
        """
        self._staged, earlier, self._copies = [], iter(self._copies), []

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            self._copies.append(_in_host_memory(value.detach(), next(earlier, None)))
            return self._copies[-1]

        def stage(state_dict: dict[str, Any], **options: Any) -> None:
            self._staged.append((tree_map(copied, state_dict), options))

        with patch.object(dcp, "save", stage):
            yield

    def begin(self, completed: Callable[[Callable[[], None]], None]) -> None:
        """Calls `completed` in the background with a function that writes what was staged."""
        self._written = Future()
        threading.Thread(target=self._run, args=(self._written, completed), daemon=True).start()

    def _run(self, written: "Future[None]", completed: Callable[[Callable[[], None]], None]) -> None:
        try:
            completed(self._write)
        except BaseException as error:  # torch's CheckpointException isn't an Exception
            written.set_exception(error)
        else:
            written.set_result(None)

    def _write(self) -> None:
        for state_dict, options in self._staged:
            dcp.save(state_dict, process_group=self.group, **options)  # type: ignore[attr-defined]

    def wait(self) -> float:
        """Waits until the checkpoint is complete; returns the seconds. Raises its error, which all ranks have."""
        began, written, self._written = time.monotonic(), self._written, None
        if written is not None:
            written.result()
        return time.monotonic() - began


def _in_host_memory(value: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    """Copies a tensor, or a rank's part of a sharded one; into the earlier copy, if that is like it."""
    if earlier is None or (type(earlier), earlier.shape, earlier.dtype) != (type(value), value.shape, value.dtype):
        return value.to("cpu", copy=True)
    return earlier.copy_(value)


def requested(trainer: Any) -> BackgroundSaves | None:
    """The background saves that `--async_checkpoints` asks for; else None. Call on all ranks.

    Raises:
        UserError: the checkpoints of this run have no shards.
    """
    args = trainer.args
    if not args.async_checkpoints:
        return None
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if not (trainer.by_transformers or (plugin is not None and "SHARDED" in str(plugin.state_dict_type))):
        why = "it copies each rank's shards to its host's memory, and writes these while training goes on"
        fix = "an FSDP YAML with fsdp_state_dict_type: SHARDED_STATE_DICT; or leave out --async_checkpoints"
        if plugin is None and LaunchEnvironment.now().by_accelerate:
            why = "without a GPU, Accelerate's own launcher shards nothing"
            fix = "accel-fsdp launch --cpu, then the YAML and the script"
        raise UserError("--async_checkpoints without shards", why=why, fix=fix)
    return BackgroundSaves(args.ddp_timeout)
