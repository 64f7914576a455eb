"""One rank of `test_axes.py`: what torch's profiler sees of a forward and backward on transformers' own meshes.

`tracked_axes.py SETTINGS FOLDER`: the other ranks are a fake process group's, as in `tracked.py`. Each rank keeps as
many tokens for its experts as it sends. Prints `TRACKED [{...}]`: bytes of parameters and gradients, the highest point.
"""

import gc
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from held import storages
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from tracked import DTYPES, memory_events
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig, expert_parallel
from upstream_probe import local

from accel_fsdp.ranks import cpu


def saved(setting: dict[str, Any], folder: Path) -> Path:
    place = folder / setting["model"]
    if not place.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**setting["config"])).save_pretrained(place)
    return place


def tracked(setting: dict[str, Any], folder: Path) -> dict[str, int]:
    place, mesh = saved(setting, folder), setting["mesh"]
    ranks = math.prod(mesh.get(f"{axis}_size", 1) for axis in ("dp_replicate", "fsdp", "tp"))
    os.environ["WORLD_SIZE"] = str(ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    config = DistributedConfig(**mesh, fsdp_mixed_precision=setting["precision"] == "bf16")
    model = AutoModelForCausalLM.from_pretrained(
        place, distributed_config=config, dtype=DTYPES[setting["dtype"]], attn_implementation="eager"
    )
    model.config.use_cache = False
    if setting["checkpointing"] != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    ids = torch.arange(setting["rows"] * setting["length"]).view(setting["rows"], setting["length"]) % 500
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    gc.collect()
    held = sum(local(parameter).numel() * parameter.element_size() for parameter in model.parameters())
    before = held + storages([*model.buffers(), *batch.values()])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(**batch, num_items_in_batch=torch.tensor(ids.numel())).loss.backward()
    alive, peak = before, 0
    for event in sorted(memory_events(seen), key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    gradients = storages([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    del model
    dist.destroy_process_group()
    return {"parameters": held, "gradients": gradients, "peak": peak}


def keep_own_tokens() -> None:
    """A fake group's all-to-all gives no counts, so a rank takes its own."""
    expert_parallel.all_to_all_single = lambda output, given, group=None: output.copy_(given)


def main() -> None:
    names = {"RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"})
    cpu.enable()
    keep_own_tokens()
    print("TRACKED " + json.dumps([tracked(setting, Path(sys.argv[2])) for setting in json.loads(sys.argv[1])]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
