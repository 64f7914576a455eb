"""What transformers makes of meshes that don't fit a model, on two gloo ranks."""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3MoeConfig,
)
from transformers.distributed import DistributedConfig

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 6, "head_dim": 8,
    "num_key_value_heads": 6, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MIXED = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TENSOR, EXPERTS = {"tp_size": 2}, {"fsdp_size": 2, "ep_size": 2}
BYTES = {**SIZES, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
FOUR_BITS = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.float32)}
CASES: dict[str, tuple[Any, dict[str, int], dict[str, Any]]] = {
    "even": (LlamaConfig(**SIZES), TENSOR, {}),
    "heads": (LlamaConfig(**{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 3}), TENSOR, {}),
    "key/value heads": (LlamaConfig(**{**SIZES, "num_key_value_heads": 3}), TENSOR, {}),
    "whole attention": (Phi3Config(**{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}), TENSOR, {}),
    "whole attention, others divided": (
        Olmo2Config(**{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}),
        TENSOR,
        {},
    ),
    "experts": (Qwen3MoeConfig(**{**SIZES, **MIXED}), EXPERTS, {}),
    "no tensor plan": (GPT2Config(n_embd=48, n_layer=1, n_head=6, vocab_size=64), TENSOR, {}),
    "no expert plan": (LlamaConfig(**SIZES), EXPERTS, {}),
    "head alone": (GptOssConfig(**{**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}), TENSOR, {}),
    "4 bits": (LlamaConfig(**BYTES), TENSOR, FOUR_BITS),
    "4 bits in shards": (LlamaConfig(**BYTES), {"fsdp_size": 2}, FOUR_BITS),
}


def seen(folder: Path, config: Any, sizes: dict[str, int], how: dict[str, Any]) -> str:
    """The error of loading and one forward; else the class of the first query projection's weight."""
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    try:
        mesh = DistributedConfig(**sizes)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=mesh, **how)
        model(input_ids=torch.arange(8).reshape(1, 8))
    except Exception as error:
        return f"{type(error).__name__}: {error} {traceback.extract_tb(error.__traceback__)[-1].filename}"
    return next((type(weight).__name__ for name, weight in model.named_parameters() if "q_proj" in name), "")


def main() -> None:
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        text = seen(Path(sys.argv[1]) / name.replace("/", " "), *case)
        if dist.get_rank() == 0:
            print("SEEN " + json.dumps([name, text]), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
