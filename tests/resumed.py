"""Runs `train/sft.py` unchanged and follows each storage while a checkpoint is loaded, on the device and on the host.

On CPU ranks both are the CPU's memory. Where the libraries load to the host, or move to it, is known by the function
that makes the storage (`ON_HOST`, read in torch 2.13 and accelerate 1.15); what is still held after loading is the
device's. Each rank writes `resumed-RANK.json` to the folder named by PROBE_OUT: the most bytes of `device`, of `host`
for each load, and those held `after`.
"""

import gc
import json
import os
import runpy
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_fsdp.training import trainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"
ON_HOST = {
    "load_file": "safetensors.torch, of weights",
    "_load": "torch.load, without a device",
    "_create_chunk_sharded_tensor": "FSDP1's sharded state dict of weights, with offload_to_cpu",
    "sharded_clone": "that of the optimizer: `cpu.copy_full_optimizer_state` clones where a GPU's tensor moves",
}
HELD_BY_ZERO = (
    *("single_partition_of_fp32_groups", "bit16_groups_flat", "fp32_partitioned_groups_flat"),
    *("fp16_partitioned_groups_flat", "grad_partitions_flat_buffer"),
)
most: dict[str, Any] = {"device": 0, "host": [], "after": 0}


class Follow(TorchDispatchMode):
    """The bytes of all storages alive, in two sums."""

    def __init__(self, held: Iterable[Any], device_loads: bool) -> None:
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self.device_loads = device_loads
        for tensor in tree_leaves(held):
            self.add(tensor, False)

    def add(self, tensor: Any, on_host: bool) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if isinstance(local, torch.Tensor) and local.device.type == "cpu":
            storage = local.untyped_storage()
            self.alive.setdefault(storage._cdata, (weakref.ref(storage), on_host))

    def total(self, on_host: bool) -> int:
        storages = [(ref(), host) for ref, host in self.alive.values()]
        self.alive = {key: kept for key, kept in self.alive.items() if kept[0]() is not None}
        return sum(storage.nbytes() for storage, host in storages if storage is not None and host == on_host)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        gone = [key for key, (ref, _) in self.alive.items() if ref() is None]
        for key in gone:
            del self.alive[key]
        on_host = made_on_host() and not self.device_loads
        for tensor in tree_leaves(result):
            self.add(tensor, on_host)
        most["device"] = max(most["device"], self.total(False))
        most["host"][-1] = max(most["host"][-1], self.total(True))
        return result


def made_on_host() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in ON_HOST:
        frame = frame.f_back
    return frame is not None


def followed(held: Iterable[Any], load: Callable[[], Any], device_loads: bool = False) -> Any:
    gc.collect()
    most["host"].append(0)
    follow = Follow(held, device_loads)
    with follow:
        result = load()
    looks = []
    for _ in range(10):  # gloo's thread lets go of a collective's buffers a moment later
        time.sleep(0.05)
        gc.collect()
        looks.append(follow.total(False) + follow.total(True))
    most["after"] = min(looks)
    (Path(os.environ["PROBE_OUT"]) / f"resumed-{os.environ['RANK']}.json").write_text(json.dumps(most))
    return result


def held_by(self: Any) -> list[Any]:
    model = self.model_wrapped if self.model_wrapped is not None else self.model
    flat = [m._handle.flat_param for m in FullyShardedDataParallel.fsdp_modules(model) if m._handle is not None]
    return [*flat, *model.parameters()]


load_weights = trainer.SftTrainer._load_from_checkpoint
load_optimizer = trainer.SftTrainer._load_optimizer_and_scheduler
load_zero = deepspeed.DeepSpeedEngine.load_checkpoint


def weights(self: Any, checkpoint: str, model: Any = None) -> None:
    followed(held_by(self), lambda: load_weights(self, checkpoint, model))


def optimizer(self: Any, checkpoint: str | None) -> None:
    """Without FSDP, Trainer loads the state to the device if there are several ranks."""
    if checkpoint is None or self.is_deepspeed_enabled:
        load_optimizer(self, checkpoint)
    else:
        followed(held_by(self), lambda: load_optimizer(self, checkpoint), not self.is_fsdp_enabled)


def zero(self: Any, *args: Any, **more: Any) -> Any:
    own = [getattr(self.optimizer, name, []) for name in HELD_BY_ZERO]
    return followed([*self.module.parameters(), *own], lambda: load_zero(self, *args, **more))


trainer.SftTrainer._load_from_checkpoint = weights
trainer.SftTrainer._load_optimizer_and_scheduler = optimizer
deepspeed.DeepSpeedEngine.load_checkpoint = zero
runpy.run_path(str(SFT), run_name="__main__")
