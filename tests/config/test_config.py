"""The wizard's YAML means to Accelerate what the answers say. Judge: Accelerate's own parser and plugin."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_fsdp.config import Engine
from accel_fsdp.errors import UserError
from accel_fsdp.launch import launcher
from accel_fsdp.wizard import Answers, interview, to_yaml
from accel_fsdp.wizard.answers import engine_of

ENGINES = ("fsdp", "fsdp", "fsdp", "fsdp", "ddp", "deepspeed", "tpu")


@st.composite
def answers(draw: st.DrawFn, engines: Sequence[str] = ENGINES, fsdp1: bool = False) -> Answers:
    """Any answers that the wizard would accept; `fsdp1`: of its version 1, without the policy that 2 lacks."""
    engine = draw(st.sampled_from(engines))
    adapts = engine in ("fsdp", "ddp") and not fsdp1
    method = "full" if fsdp1 else draw(st.sampled_from(["full", "lora", "qlora"] if adapts else ["full", "lora"]))
    version = 1 if fsdp1 else draw(st.sampled_from([1, 2] if method == "full" else [2]))
    sized = version == 1 and not fsdp1
    policies = ["TRANSFORMER_BASED_WRAP", "NO_WRAP"] + (["SIZE_BASED_WRAP"] if sized else [])
    policy = draw(st.sampled_from(policies))
    checkpointing = engine == "tpu" or (policy != "NO_WRAP" and method == "full")
    machines = 1 if engine == "tpu" else draw(st.integers(1, 4))
    names = st.lists(st.from_regex(r"[A-Z][A-Za-z0-9_]{0,20}", fullmatch=True), min_size=1, max_size=3)
    precisions = ["bf16"] + (["fp16"] if engine != "tpu" else []) + (["no"] if method != "qlora" else [])
    return Answers(
        model="some/model",
        method=method,
        gpus=draw(st.sampled_from(["cpu", "8xH100-80GB"])),
        num_machines=machines,
        engine=engine,
        fsdp_version=version,
        strategy=draw(st.integers(1, 5)) if engine == "fsdp" else 1,
        zero_stage=draw(st.integers(0, 3)),
        wrap_policy=policy,
        layer_class=tuple(draw(names)),
        min_num_params=draw(st.integers(1, 10**10)),
        cpu_offload=draw(st.booleans()),
        activation_checkpointing=checkpointing and draw(st.booleans()),
        state_dict_type=draw(st.sampled_from(["SHARDED_STATE_DICT", "FULL_STATE_DICT"])),
        ram_efficient_loading=draw(st.booleans()),
        mixed_precision=draw(st.sampled_from(precisions)),
        num_processes=machines * draw(st.integers(2, 8)),
        main_process_ip="10.0.0.1" if machines > 1 else "",
        main_process_port=29501,
    )


@pytest.fixture
def made_file(tmp_path: Path) -> Path:
    return tmp_path / "fsdp.yaml"


@pytest.fixture(autouse=True)
def offline_machine() -> Iterator[None]:
    """`sync_module_states` looks for a GPU when the plugin is built; the value itself is what is tested here."""
    with (
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
    ):
        yield


def seen_by_accelerate(made_file: Path) -> tuple[Any, dict[str, str]]:
    """Accelerate's parsed launch arguments and the environment it would give each rank."""
    args = launcher.launcher_args(made_file, Path(__file__), ())
    return args, launcher.environment(args)


@settings(max_examples=150)
@given(wanted=answers())
def test_accelerate_reads_what_was_answered(wanted: Answers, made_file: Path) -> None:
    made_file.write_text(to_yaml.to_text(wanted))
    args, environment = seen_by_accelerate(made_file)
    assert args.num_processes == wanted.num_processes
    assert args.num_machines == wanted.num_machines
    engine = engine_of(vars(wanted))
    if engine is Engine.TPU:
        assert args.tpu
        return
    assert environment["ACCELERATE_MIXED_PRECISION"] == wanted.mixed_precision
    if wanted.num_machines > 1:
        assert args.rdzv_endpoint == "10.0.0.1:29501"
    if engine is Engine.DDP:
        assert args.multi_gpu
    assert ("ACCELERATE_USE_FSDP" in environment) == (engine in (Engine.FSDP1, Engine.FSDP2))
    with mock.patch.dict(os.environ, environment):
        if engine is Engine.DEEPSPEED:
            assert_deepspeed(DeepSpeedPlugin(), wanted)
        if engine in (Engine.FSDP1, Engine.FSDP2):
            assert_plugin(FullyShardedDataParallelPlugin(), wanted)
        mesh = ParallelismConfig() if "PARALLELISM_CONFIG_DP_SHARD_SIZE" in environment else None
    if engine is Engine.FSDP2 and wanted.strategy in (4, 5):
        assert mesh is not None
        assert mesh.dp_replicate_size == wanted.num_machines
        assert mesh.dp_shard_size * mesh.dp_replicate_size == wanted.num_processes
    else:
        assert mesh is None


def assert_deepspeed(plugin: Any, wanted: Answers) -> None:
    device = "cpu" if wanted.cpu_offload else "none"
    assert plugin.zero_stage == wanted.zero_stage
    assert plugin.offload_optimizer_device == (device if wanted.zero_stage else "none")
    assert plugin.offload_param_device == (device if wanted.zero_stage == 3 else "none")
    assert plugin.zero3_save_16bit_model == (wanted.zero_stage == 3)
    assert (plugin.gradient_accumulation_steps, plugin.gradient_clipping) == ("auto", "auto")


def assert_plugin(plugin: Any, wanted: Answers) -> None:
    assert plugin.fsdp_version == wanted.fsdp_version
    if wanted.fsdp_version == 1:
        assert plugin.sharding_strategy.value == wanted.strategy
        assert plugin.use_orig_params
        assert plugin.sync_module_states
        assert plugin.cpu_offload.offload_params == wanted.cpu_offload
    else:
        assert plugin.reshard_after_forward == (wanted.strategy in (1, 4))
        assert (type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy") == wanted.cpu_offload
    assert plugin.activation_checkpointing == wanted.activation_checkpointing
    assert plugin.state_dict_type.name == wanted.state_dict_type
    assert plugin.cpu_ram_efficient_loading == wanted.ram_efficient_loading
    policy = plugin.auto_wrap_policy
    assert not isinstance(policy, functools.partial)
    if wanted.wrap_policy == "TRANSFORMER_BASED_WRAP":
        assert policy is transformer_auto_wrap_policy
        assert plugin.transformer_cls_names_to_wrap == list(wanted.layer_class)
    elif wanted.wrap_policy == "SIZE_BASED_WRAP":
        assert policy is size_based_auto_wrap_policy
        assert plugin.min_num_params == wanted.min_num_params
    else:
        assert policy is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp_config: {}\n", "A `distributed_type` must be specified"),
        ("distributed_type: FSDP\nfdsp_config: {}\n", "unknown keys (['fdsp_config'])"),
        ("distributed_type: FSPD\n", "'FSPD' is not a valid DistributedType"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nmain_process_port: 99999\n", "Accelerate refuses"),
    ],
)
def test_what_accelerate_refuses_is_one_clear_error(text: str, message: str, made_file: Path) -> None:
    made_file.write_text(text)
    with pytest.raises(UserError) as caught:
        launcher.launch(launcher.launcher_args(made_file, Path(__file__), ()))
    assert message in str(caught.value)


def test_a_class_named_like_a_boolean_stays_text() -> None:
    flags = {"model": "gpt2", "gpus": "2xA100-80GB"}
    answers = dataclasses.replace(interview.answers(interview.interview(flags, {}, defaults=True)), layer_class=("NO",))
    written = yaml.safe_load(to_yaml.to_text(answers))
    assert written["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "NO"
