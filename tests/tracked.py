"""One rank of `test_memory.py`: what torch's own tracker sees of a forward and backward under Accelerate's FSDP2.

`tracked.py SETTINGS FOLDER`: the other ranks are a fake process group's. Prints `TRACKED [{...}]`, one for each setting:
bytes of the sharded parameters and gradients, and the highest point of all.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from held import storages
from upstream_probe import V2, prepared

from accel_fsdp import cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def built(config: dict[str, Any], dtype: str) -> Any:
    options = dict(config)
    made = AutoConfig.for_model(options.pop("model_type"), **options, use_cache=False)
    return AutoModelForCausalLM.from_config(made, dtype=DTYPES[dtype], attn_implementation="eager").train()


def tracked(setting: dict[str, Any]) -> dict[str, int]:
    torch.manual_seed(0)
    model = built(setting["config"], setting["dtype"])
    block = type(model.model.layers[0]).__name__
    fsdp = {**V2, "fsdp_transformer_layer_cls_to_wrap": block, "fsdp_reshard_after_forward": setting["reshards"]}
    if setting["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    accelerator, model, optimizer = prepared(model, fsdp, setting["precision"])
    ids = torch.ones(setting["rows"], setting["length"], dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": ids.clone()}
    count = torch.tensor(ids.numel())
    tracker = MemTracker()
    tracker.track_external(model, *batch.values())
    with tracker:
        loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
        del loss
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    held = {"parameters": model.parameters(), "gradients": [one.grad for one in model.parameters()]}
    found = {name: storages(tensors) for name, tensors in held.items()}
    return {**found, "peak": peak["Total"], "kinds": {str(k): v for k, v in peak.items()}}


def main() -> None:
    settings, ranks = json.loads(sys.argv[1]), 4
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"})
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    cpu.enable()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    print("TRACKED " + json.dumps([tracked(setting) for setting in settings]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
