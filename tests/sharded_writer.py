"""Run by torchrun on 4 ranks: trains nothing, writes checkpoints of many kinds as Accelerate does, and what they hold.

Each goes to OUT/NAME: `model/config.json`, `checkpoint-1/pytorch_model_fsdp_0`, and `full.pt`, gathered by torch.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

OUT = Path(sys.argv[1])
SIZES = {"vocab_size": 509, "hidden_size": 36, "intermediate_size": 70, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "architectures": ["LlamaForCausalLM"]}
Gather = Callable[[], dict[str, Any]]


def llama(tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied, dtype=str(dtype).removeprefix("torch."))
    return LlamaForCausalLM(config).to(dtype)


def save(name: str, group: Any, config: LlamaConfig, sharded: dict[str, Any], full: dict[str, Any]) -> None:
    run = OUT / name
    inner = run / "checkpoint-1" / "pytorch_model_fsdp_0"
    if dist.get_rank() == 0:
        inner.mkdir(parents=True)
        config.save_pretrained(run / "model")
        (run / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
        torch.save({key: tensor.detach().clone() for key, tensor in full.items()}, run / "full.pt")
    write(inner, {"model": sharded}, group)


def write(folder: Path, state: dict[str, Any], group: Any) -> None:
    dist.barrier(group)
    writer = dist_cp.FileSystemWriter(folder)
    dist_cp.save(state, storage_writer=writer, planner=DefaultSavePlanner(), process_group=group)


def fsdp1(name: str, group: Any, model: LlamaForCausalLM, **options: Any) -> None:
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    groups = options or {"process_group": group}
    wrapped = FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True, **groups)
    with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        sharded = wrapped.state_dict()
    with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
        full = wrapped.state_dict()
    save(name, group, model.config, sharded, full)


def fsdp2(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    for module in model.modules():
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    return {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in state.items()}


def fsdp2_full(name: str, group: Any, mesh: DeviceMesh, model: LlamaForCausalLM) -> None:
    fsdp2(model, mesh)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    save(name, group, model.config, get_model_state_dict(model), full)


def lora(name: str, group: Any, mesh: DeviceMesh, whole: bool, **settings: Any) -> None:
    base = llama()
    if dist.get_rank() == 0:
        base.save_pretrained(OUT / name / "base")
    settings = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], **settings}
    model = get_peft_model(base, LoraConfig(**settings))
    model.peft_config["default"].base_model_name_or_path = str(OUT / name / "base")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.1).abs_()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0, group)
    fsdp2(model, mesh)
    state = get_model_state_dict(model)
    adapter = get_peft_model_state_dict(model, state_dict=state)
    config = base.config
    save(name, group, config, state if whole else adapter, gathered(adapter))
    if dist.get_rank() == 0:
        model.peft_config["default"].save_pretrained(OUT / name / "model")


def variants(ranks: int, group: Any) -> Iterator[tuple[str, Callable[[str], None]]]:
    """By name, each a function of it. Called on the group's ranks only."""
    mesh = DeviceMesh.from_group(group, "cpu")
    low = torch.bfloat16
    for number, strategy in ((1, ShardingStrategy.FULL_SHARD), (2, ShardingStrategy.SHARD_GRAD_OP)):
        options = {"process_group": group, "sharding_strategy": strategy}
        yield f"fsdp1-{number}", lambda name, options=options: fsdp1(name, group, llama(), **options)  # type: ignore[misc]
    yield "fsdp1-tied-bf16", lambda name: fsdp1(name, group, llama(True, low))
    yield "fsdp2", lambda name: fsdp2_full(name, group, mesh, llama())
    yield "fsdp2-bf16", lambda name: fsdp2_full(name, group, mesh, llama(False, low))
    yield "fsdp2-tied", lambda name: fsdp2_full(name, group, mesh, llama(True))
    yield "lora", lambda name: lora(name, group, mesh, whole=False)
    if ranks == 3:
        yield "dora-whole", lambda name: lora(name, group, mesh, whole=True, use_dora=True, use_rslora=True)
        patterns = {"alpha_pattern": {"q_proj": 5}, "rank_pattern": {"layers.1.self_attn.q_proj": 2}}
        yield (
            "lora-patterns",
            lambda name: lora(name, group, mesh, whole=False, modules_to_save=["lm_head"], **patterns),
        )
    if ranks == 4:
        hybrid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
        for number, strategy in ((4, ShardingStrategy.HYBRID_SHARD), (5, ShardingStrategy._HYBRID_SHARD_ZERO2)):
            options = {"device_mesh": hybrid, "sharding_strategy": strategy}
            yield f"fsdp1-{number}", lambda name, options=options: fsdp1(name, group, llama(), **options)  # type: ignore[misc]
        yield "fsdp2-hybrid", lambda name: fsdp2_full(name, group, hybrid, llama())


def main() -> None:
    dist.init_process_group("gloo")
    names = []
    for ranks in (1, 3, 4):
        group = dist.new_group(list(range(ranks)))
        if dist.get_rank() < ranks:
            for kind, make in variants(ranks, group):
                names.append(f"{kind}-{ranks}")
                make(names[-1])
        dist.barrier()
    if dist.get_rank() == 0:
        (OUT / "names.json").write_text(json.dumps(names))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
