"""What Accelerate makes of a file of any engine, in one vocabulary, and files of all engines to ask it about."""

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from hypothesis import assume
from hypothesis import strategies as st
from test_config import answers, seen_by_accelerate

from accel_fsdp.config import STRATEGIES
from accel_fsdp.wizard import Answers, to_yaml

STAGES = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3}


def meaning(path: Path) -> dict[str, Any]:
    """What Accelerate's own launcher and plugins make of a file, in one vocabulary for all engines."""
    args, environment = seen_by_accelerate(path)
    facts = {
        "processes": args.num_processes,
        "machines": args.num_machines,
        "precision": environment["ACCELERATE_MIXED_PRECISION"],
    }
    if args.use_deepspeed:
        return facts | {"engine": "zero"} | _zero(args)
    if not args.use_fsdp:
        assert args.multi_gpu
        return facts | {"engine": "ddp", "strategy": "NO_SHARD", "offload": False, "checkpointing": False}
    with mock.patch.dict(os.environ, environment):
        plugin = FullyShardedDataParallelPlugin()
        mesh = ParallelismConfig() if "ACCELERATE_USE_PARALLELISM_CONFIG" in environment else None
    return facts | _fsdp(plugin, mesh, facts)


def _zero(args: Any) -> dict[str, Any]:
    args.deepspeed_fields_from_accelerate_config = ""
    _, environment = prepare_deepspeed_cmd_env(args)
    with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DeepSpeed Zero3 Init flag is only applicable")
        plugin = DeepSpeedPlugin()
    parameters = plugin.offload_param_device if plugin.zero_stage == 3 else "none"
    stages = {stage: name for name, stage in STAGES.items()} | {1: "ZERO1"}
    return {
        "strategy": stages[plugin.zero_stage],
        "offload": plugin.zero_stage > 0 and "cpu" in (plugin.offload_optimizer_device, parameters),
        "parameters_offload": parameters == "cpu",
        "ram": plugin.zero3_init_flag,
        "saves": plugin.zero3_save_16bit_model,
        "training arguments decide": {plugin.gradient_accumulation_steps, plugin.gradient_clipping} == {"auto"},
        "torchrun": args.num_machines == 1 or args.deepspeed_multinode_launcher == "standard",
        "checkpointing": False,
    }


def _fsdp(plugin: Any, mesh: Any, facts: dict[str, Any]) -> dict[str, Any]:
    if plugin.fsdp_version == 1:
        strategy, offload = plugin.sharding_strategy.name.lstrip("_"), plugin.cpu_offload.offload_params
        strategy = strategy.removesuffix("_ZERO2") + "_ZERO2" * (plugin.sharding_strategy.value == 5)
        if facts["machines"] == 1:  # the group is the machine: hybrid sharding of one machine is the plain one
            strategy = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}.get(strategy, strategy)
        assert mesh is None
    else:
        offload = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
        strategy = "FULL_SHARD" if plugin.reshard_after_forward else "SHARD_GRAD_OP"
        if mesh is not None:
            assert mesh.total_size == facts["processes"]
            assert mesh.dp_shard_size > 1
            assert mesh.dp_replicate_size in (1, facts["machines"])
        if mesh is not None and mesh.dp_replicate_size > 1:
            strategy = "HYBRID_SHARD" if plugin.reshard_after_forward else "HYBRID_SHARD_ZERO2"
    policy = getattr(plugin.auto_wrap_policy, "__name__", "no_wrap").partition("_")[0]
    return {
        "engine": f"fsdp{plugin.fsdp_version}",
        "strategy": strategy,
        "offload": offload,
        "checkpointing": plugin.activation_checkpointing,
        "policy": policy,
        "classes": plugin.transformer_cls_names_to_wrap if policy == "transformer" else None,
        "state": plugin.state_dict_type.name,
        "ram": plugin.cpu_ram_efficient_loading,
        "ignored": plugin.ignored_modules,
    }


BOOLEANS = {True: [True, "True", "yes", "1", 1], False: [False, "False", "no", "0", 0]}


def spelled(draw: st.DrawFn, key: str, value: Any) -> Any:
    """The same value as someone else would write it."""
    if isinstance(value, bool):
        return draw(st.sampled_from(BOOLEANS[value]))
    if key in ("fsdp_sharding_strategy", "fsdp_version") and draw(st.booleans()):
        return str(value)
    if key in ("fsdp_auto_wrap_policy", "fsdp_state_dict_type") and draw(st.booleans()):
        return value.lower()
    return value


@st.composite
def fsdp_files(draw: st.DrawFn) -> str:
    """What the wizard would write, in another dialect and with parts left to Accelerate's defaults."""
    wanted: Answers = draw(answers(engines=["fsdp"]))
    assume("Embedding" not in wanted.layer_class and "Linear" not in wanted.layer_class)
    content = to_yaml.to_mapping(wanted)
    section = content.get("fsdp_config", {})
    strategy = section.get("fsdp_sharding_strategy")
    if strategy is not None and draw(st.booleans()):
        names = dict(zip((1, 2, 3, 4, 5), STRATEGIES.values(), strict=True))
        section["fsdp_sharding_strategy"] = draw(st.sampled_from([str.lower, str.upper]))(names[strategy])
    for key in (
        "fsdp_state_dict_type",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_offload_params",
        "fsdp_use_orig_params",
    ):
        if draw(st.booleans()):
            section.pop(key, None)
    if section.get("fsdp_version") == 1:
        section |= draw(st.sampled_from([{}, {"fsdp_reshard_after_forward": False}, {"fsdp_cpu_offload": True}]))
    else:
        section |= draw(st.sampled_from([{}, {"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}])) if section else {}
    spelt = {key: spelled(draw, key, value) for key, value in section.items()}
    short = draw(st.booleans())
    if section:
        content["fsdp_config"] = {key.removeprefix("fsdp_") if short else key: value for key, value in spelt.items()}
    return yaml.safe_dump(content, sort_keys=draw(st.booleans()))


@st.composite
def other_files(draw: st.DrawFn) -> str:
    """DDP and DeepSpeed."""
    machines = draw(st.integers(1, 3))
    several = {"main_process_ip": "10.0.0.1", "main_process_port": 29501} if machines > 1 else {}
    top = {
        "mixed_precision": draw(st.sampled_from(["no", "bf16", "fp16"])),
        "num_processes": machines * draw(st.integers(2, 8)),
        "num_machines": machines,
        **several,
    }
    if draw(st.booleans()):
        return yaml.safe_dump({"distributed_type": draw(st.sampled_from(["MULTI_GPU", "MULTI_XPU"])), **top})
    stage = draw(st.sampled_from([0, 1, 2, 3, "2", "3"]))
    options = {
        "offload_optimizer_device": st.sampled_from(["none", "cpu", "CPU"]),
        "offload_param_device": st.sampled_from(["none", "cpu"]),
        "gradient_accumulation_steps": st.sampled_from(["auto", 1]),
        "gradient_clipping": st.sampled_from(["auto", 1.0]),
        "zero3_init_flag": st.booleans(),
        "deepspeed_moe_layer_cls_names": st.just("SomeMoeBlock"),
    }
    section = {key: draw(value) for key, value in options.items() if draw(st.booleans())}
    if machines > 1:
        section["deepspeed_multinode_launcher"] = "standard"
    section |= {"zero_stage": stage, "zero3_save_16bit_model": True}
    return yaml.safe_dump({"distributed_type": "DEEPSPEED", **top, "deepspeed_config": section})
