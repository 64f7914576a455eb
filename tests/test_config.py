"""The wizard's YAML means to Accelerate what the answers say. Judge: Accelerate's own parser and plugin."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_fsdp import config, jobs
from accel_fsdp.errors import UserError
from accel_fsdp.types import Answers


@st.composite
def answers(draw: st.DrawFn) -> Answers:
    """Any answers that the wizard would accept."""
    version = draw(st.sampled_from([1, 2]))
    policies = ["TRANSFORMER_BASED_WRAP", "NO_WRAP"] + (["SIZE_BASED_WRAP"] if version == 1 else [])
    policy = draw(st.sampled_from(policies))
    machines = draw(st.integers(1, 4))
    return Answers(
        model="some/model",
        method=draw(st.sampled_from(["full", "lora"])),
        fsdp_version=version,
        strategy=draw(st.integers(1, 5)),
        wrap_policy=policy,
        layer_class=tuple(
            draw(st.lists(st.from_regex(r"[A-Z][A-Za-z0-9_]{0,20}", fullmatch=True), min_size=1, max_size=3))
        ),
        min_num_params=draw(st.integers(1, 10**10)),
        cpu_offload=draw(st.booleans()),
        activation_checkpointing=policy != "NO_WRAP" and draw(st.booleans()),
        state_dict_type=draw(st.sampled_from(["SHARDED_STATE_DICT", "FULL_STATE_DICT"])),
        ram_efficient_loading=draw(st.booleans()),
        mixed_precision=draw(st.sampled_from(["bf16", "fp16", "no"])),
        num_processes=machines * draw(st.integers(2, 8)),
        num_machines=machines,
        main_process_ip="10.0.0.1" if machines > 1 else "",
        main_process_port=29501,
    )


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "fsdp.yaml"


@pytest.fixture(autouse=True)
def offline_machine() -> Iterator[None]:
    """`sync_module_states` looks for a GPU when the plugin is built; the value itself is what is tested here."""
    with (
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
    ):
        yield


def seen_by_accelerate(yaml_file: Path) -> tuple[Any, dict[str, str]]:
    """Accelerate's parsed launch arguments and the environment it would give each rank."""
    args = jobs.launcher_args(yaml_file, Path(__file__), ())
    return args, jobs.environment(args)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=answers())
def test_accelerate_reads_what_was_answered(wanted: Answers, yaml_file: Path) -> None:
    yaml_file.write_text(config.to_text(wanted))
    args, environment = seen_by_accelerate(yaml_file)
    assert args.num_processes == wanted.num_processes
    assert args.num_machines == wanted.num_machines
    assert environment["ACCELERATE_MIXED_PRECISION"] == wanted.mixed_precision
    if wanted.num_machines > 1:
        assert args.rdzv_endpoint == "10.0.0.1:29501"
    if wanted.fsdp_version == 2 and wanted.strategy == 3:
        assert args.multi_gpu
        assert "ACCELERATE_USE_FSDP" not in environment
        return
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    with mock.patch.dict(os.environ, environment):
        plugin = FullyShardedDataParallelPlugin()
        mesh = ParallelismConfig() if "PARALLELISM_CONFIG_DP_SHARD_SIZE" in environment else None
    assert_plugin(plugin, wanted)
    if wanted.fsdp_version == 2 and wanted.strategy in (4, 5):
        assert mesh is not None
        assert mesh.dp_replicate_size == wanted.num_machines
        assert mesh.dp_shard_size * mesh.dp_replicate_size == wanted.num_processes
    else:
        assert mesh is None


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
        ("a: [1\nb: 2\n", "fsdp.yaml:2: expected ',' or ']'"),
        ("just text\n", "holds no keys"),
        ("", "holds no keys"),
        ("a: 1\na: 2\n", "fsdp.yaml:2: found duplicate key"),
        ("\x00", "special characters are not allowed"),
        ("fsdp_config: {}\n", "A `distributed_type` must be specified"),
        ("distributed_type: FSDP\nfdsp_config: {}\n", "unknown keys (['fdsp_config'])"),
        ("distributed_type: FSPD\n", "'FSPD' is not a valid DistributedType"),
    ],
)
def test_unusable_yaml_is_one_clear_error(text: str, message: str, yaml_file: Path) -> None:
    yaml_file.write_text(text)
    with pytest.raises(UserError) as caught:
        jobs.launcher_args(yaml_file, Path(__file__), ())
    assert message in str(caught.value)


def test_comments_and_unknown_keys_survive_loading(yaml_file: Path) -> None:
    yaml_file.write_text("distributed_type: FSDP  # why\nmine: 1\n")
    assert list(config.load(yaml_file)) == ["distributed_type", "mine"]
