"""One rank of `test_memory.py`: what torch's profiler sees of a forward and backward after Accelerate's `prepare`.

`tracked.py SETTINGS FOLDER`: the other ranks are a fake process group's, which sends nothing. Prints `TRACKED [{...}]`,
one for each setting: bytes of the sharded parameters and gradients, and the highest point of all.

The profiler counts in the CPU's allocator. torch's `FSDPMemTracker` hooks each module of a group on its own, so that
Accelerate's last unit (norm and head) is reduced twice under it (torch 2.13, `_instrument_fsdp_module`).
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from held import storages
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from upstream_probe import V1, V2, local, prepared

from accel_fsdp.ranks import cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STRATEGIES = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD"}


def built(setting: dict[str, Any]) -> Any:
    options = dict(setting["config"])
    config = AutoConfig.for_model(options.pop("model_type"), **options, use_cache=False)
    config.pad_token_id = 0
    kind = AutoModelForSequenceClassification if setting["model"] == "classifier" else AutoModelForCausalLM
    model = kind.from_config(config, dtype=DTYPES[setting["dtype"]], attn_implementation="eager")
    if setting["checkpointing"] != "none" and not setting.get("offloads_inputs"):
        reentrant = setting["checkpointing"] == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model.train()


def fsdp(setting: dict[str, Any], model: Any) -> dict[str, Any]:
    block = {"fsdp_transformer_layer_cls_to_wrap": type(model.model.layers[0]).__name__}
    if setting["engine"] == "fsdp2":
        keys = ("fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload")
        offload = dict.fromkeys(keys, True) if setting.get("offloads_inputs") else {}
        return {**V2, **block, **offload, "fsdp_reshard_after_forward": setting["strategy"] == 1}
    settings = {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_use_orig_params": True}
    return {**V1, **block, **settings, "fsdp_sharding_strategy": STRATEGIES[setting["strategy"]]}


class SaveOnHost(torch.autograd.graph.saved_tensors_hooks):
    """`save_on_cpu` with numpy's memory for the host's, as the profiler counts only torch's allocator."""

    packed_bytes = 0

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(self.pack, torch.Tensor.clone)

    @staticmethod
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        SaveOnHost.packed_bytes += tensor.nbytes
        return torch.from_numpy(np.empty(tensor.nbytes, np.uint8)).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def unsent(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A bucket as it is: the fake group's all-reduce gives DDP no result."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def wrapped(setting: dict[str, Any], model: Any) -> tuple[Any, Callable[[], Any]]:
    """The model as the engine has it, and its context for micro-batches that reduce nothing."""
    if setting["engine"] == "ddp":  # Accelerate's own options; it would name a GPU
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=False)
        parallel.register_comm_hook(None, unsent)
        return parallel, parallel.no_sync
    accelerator, sharded, _ = prepared(model, fsdp(setting, model), setting["precision"])
    return sharded, lambda: accelerator.no_sync(sharded)


def tracked(setting: dict[str, Any]) -> dict[str, int]:
    gc.collect()
    torch.manual_seed(0)
    model = built(setting)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as wrapping:
        model, no_sync = wrapped(setting, model)
    buckets = sum(event.nbytes() for event in memory_events(wrapping)) if setting["engine"] == "ddp" else 0
    ids = torch.ones(setting["rows"], setting["length"], dtype=torch.long)
    labels = torch.zeros(setting["rows"], dtype=torch.long) if setting["model"] == "classifier" else ids.clone()
    batch = {"input_ids": ids, "labels": labels, "attention_mask": ids.clone()}
    count = {} if setting["model"] == "classifier" else {"num_items_in_batch": torch.tensor(ids.numel())}

    def step() -> None:
        last = setting.get("accumulation", 1)
        for number in range(1, last + 1):
            with no_sync() if number < last else nullcontext():
                model(**batch, **count).loss.backward()

    gc.collect()
    before = storages([*model.parameters(), *model.buffers(), *batch.values()])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    alive, peak = before + buckets, 0
    for event in sorted(memory_events(seen), key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    gradients = [
        parameter.grad
        for parameter in model.parameters()
        if parameter.grad is not None and local(parameter.grad).numel()
    ]
    held = [parameter for parameter in model.parameters() if local(parameter).numel()]
    on_host, SaveOnHost.packed_bytes = SaveOnHost.packed_bytes, 0
    return {"parameters": storages(held), "gradients": storages(gradients), "peak": peak, "host": on_host}


def memory_events(seen: Any) -> list[Any]:
    return [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]


def main() -> None:
    settings, ranks = json.loads(sys.argv[1]), 4
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"})
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    cpu.enable()
    checkpoint_wrapper.save_on_cpu = SaveOnHost
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    print("TRACKED " + json.dumps([tracked(setting) for setting in settings]), flush=True)
    os._exit(0)  # no teardown of a group that has no other ranks


if __name__ == "__main__":
    main()
