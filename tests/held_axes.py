"""One rank of `test_axes.py`: trains a step on transformers' own meshes, prints the bytes that it then holds.

`held_axes.py MODELS FOLDER`, with each model's config and meshes. Reads torch's storages and nothing of the planner.
Rank 0 prints `HELD {model: {mesh: {parameters, optimizer}}}`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from held import storages
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from upstream_probe import local, rank

from accel_fsdp.ranks import cpu


def held(folder: Path, sizes: dict[str, int]) -> dict[str, int]:
    config = DistributedConfig(**sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.arange(32).view(2, 16) % 7 + rank() // sizes.get("tp_size", 1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    state = [value for tensor in optimizer.state.values() for value in tensor.values() if local(value).dim()]
    # on the CPU a rank's part is a view of the whole tensor in its file; on a GPU it is a copy of the part
    parameters = sum(local(parameter).numel() * parameter.element_size() for parameter in model.parameters())
    return {"parameters": parameters, "optimizer": storages(state)}


def main(models: dict[str, dict[str, Any]], folder: Path) -> None:
    cpu.enable()
    cpu.init_process_group(60)
    seen: dict[str, dict[str, dict[str, int]]] = {}
    for kind, asked in models.items():
        place = folder / kind
        if rank() == 0 and not place.exists():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**asked["config"])).save_pretrained(place)
        torch.distributed.barrier()
        seen[kind] = {name: held(place, sizes) for name, sizes in asked["meshes"].items()}
    if rank() == 0:
        print("HELD " + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
