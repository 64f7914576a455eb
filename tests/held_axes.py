"""One rank of `test_axes.py`: trains a step on transformers' own meshes and prints the bytes that the rank then holds.

Reads torch's storages and nothing of the planner. Rank 0 prints `HELD {model: {mesh: {parameters, optimizer}}}`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from held import storages
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from upstream_probe import local, rank

from accel_fsdp import cpu

SIZES = {
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 72},
    **{"hidden_size": 36, "intermediate_size": 48, "moe_intermediate_size": 24, "max_position_embeddings": 64},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": False},
    "qwen3": {**SIZES, "tie_word_embeddings": True},
    "qwen3_moe": {**SIZES, **EXPERTS, "tie_word_embeddings": False},
    "mixtral": {**SIZES, **EXPERTS, "tie_word_embeddings": False},
}
MESHES = {
    "fsdp 4": {"fsdp_size": 4},
    "tp 2": {"tp_size": 2},
    "tp 2 x fsdp 2": {"tp_size": 2, "fsdp_size": 2},
    "replicate 2 x fsdp 2": {"dp_replicate_size": 2, "fsdp_size": 2},
    "replicate 2 x tp 2": {"dp_replicate_size": 2, "tp_size": 2},
    "fsdp 2, ep 2": {"fsdp_size": 2, "ep_size": 2},
    "fsdp 4, ep 2": {"fsdp_size": 4, "ep_size": 2},
    "tp 2, ep 2": {"tp_size": 2, "ep_size": 2},
    "tp 2 x fsdp 2, ep 4": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    "tp 2 x fsdp 2, ep 2": {"tp_size": 2, "fsdp_size": 2, "ep_size": 2},
}


def meshes(ranks: int, experts: bool) -> dict[str, dict[str, int]]:
    """Those of so many ranks that a model has plans for."""
    return {
        name: sizes
        for name, sizes in MESHES.items()
        if sizes.get("tp_size", 1) * sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1) == ranks
        and (experts or "ep_size" not in sizes)
    }


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


def main(folder: Path) -> None:
    cpu.enable()
    cpu.init_process_group(60)
    seen: dict[str, dict[str, dict[str, int]]] = {}
    for kind, options in MODELS.items():
        place = folder / kind
        if rank() == 0 and not place.exists():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).save_pretrained(place)
        torch.distributed.barrier()
        chosen = meshes(int(os.environ["WORLD_SIZE"]), "num_experts" in options)
        seen[kind] = {name: held(place, sizes) for name, sizes in chosen.items()}
    if rank() == 0:
        print("HELD " + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
