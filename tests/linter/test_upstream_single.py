"""What the libraries do in one process today: the reasons for rules and workarounds. Red means: fixed upstream.

Settings travel as in a real launch: YAML, Accelerate's launcher parser, environment, plugin. `pain` marks the rows of
the list of known pains that a test shows; the last test holds that list complete.
"""

import importlib
import inspect
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, prepare_multi_gpu_env
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from checking import V1, codes_of, subject
from conftest import ROOT
from safetensors.torch import save_file
from test_fields import MINIMAL, environment
from torch.distributed.fsdp import StateDictType
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

from accel_fsdp import linter  # noqa: F401 (rules register)
from accel_fsdp.errors import UserError
from accel_fsdp.linter.rules import RULES

LAYERWISE = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
ONLY_CPU = {"fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False}


Plugin = Callable[..., FullyShardedDataParallelPlugin]
Arguments = Callable[..., TrainingArguments]


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """TrainingArguments and the plugin write to Accelerate's state."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    """The plugin that a rank builds for an `fsdp_config`; without the settings that need an accelerator."""

    def make(version: int, **fsdp_config: Any) -> FullyShardedDataParallelPlugin:
        for name in [name for name in os.environ if name.startswith("FSDP_")]:
            del os.environ[name]
        settings = {"fsdp_version": version, **ONLY_CPU, **fsdp_config}
        os.environ.update(environment(tmp_path, fsdp_config=settings))
        return FullyShardedDataParallelPlugin()

    return make


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    def make(**options: Any) -> TrainingArguments:
        return TrainingArguments(output_dir=str(tmp_path), **{"use_cpu": True, "report_to": "none", **options})

    return make


def tiny_llama() -> LlamaForCausalLM:
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def on_meta(kind: str) -> torch.nn.Module:
    """A model type at its default size, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))


@pytest.mark.pain("P06")
def test_a_missing_version_means_2_in_the_arguments(arguments: Arguments) -> None:
    """AF301: the same omission means 1 in the YAML."""
    assert arguments(fsdp=True, fsdp_config={}).fsdp_plugin_args["fsdp_version"] == 2


@pytest.mark.pain("P10")
@pytest.mark.parametrize("kind", ["gemma3", "gemma4_text", "mllama", "qwen3_5_text", "qwen3_5_moe_text"])
def test_a_model_names_layers_that_it_does_not_have(kind: str, plugin: Plugin) -> None:
    """AF503: `_no_split_modules` of these text models names classes of the vision tower."""
    with pytest.raises(ValueError, match="Could not find the transformer layer class"):
        plugin(2, **LAYERWISE).set_auto_wrap_policy(on_meta(kind))


@pytest.mark.pain("P11")
@pytest.mark.parametrize("kind", ["bert-generation", "biogpt", "openai-gpt", "xlm"])
def test_a_model_names_no_layer(kind: str, plugin: Plugin) -> None:
    """AF503: nothing to wrap is no error, and no module then becomes a unit."""
    fsdp_plugin, model = plugin(2, **LAYERWISE), on_meta(kind)
    fsdp_plugin.set_auto_wrap_policy(model)
    assert fsdp_plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == set()
    policy = fsdp2_prepare_auto_wrap_policy(fsdp_plugin, model)
    assert policy is not None
    assert not any(policy(module) for module in model.modules())


@pytest.mark.pain("P28")
def test_a_size_of_zero_means_no_policy(plugin: Plugin, arguments: Arguments) -> None:
    """AF308: 0 is TrainingArguments' default, and Accelerate drops the policy silently."""
    args = arguments(fsdp=True, fsdp_config={"auto_wrap_policy": "SIZE_BASED_WRAP"})
    from_arguments = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    for fsdp_plugin in (from_arguments, plugin(1, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=0)):
        assert fsdp_plugin.auto_wrap_policy is not None
        fsdp_plugin.set_auto_wrap_policy(tiny_llama())
        assert fsdp_plugin.auto_wrap_policy is None


@pytest.mark.pain("P51")
def test_arguments_beside_a_yaml_win_and_let_leftovers_through(arguments: Arguments, tmp_path: Path) -> None:
    """AF607: version, state dict and RAM loading are the arguments' defaults, offload is the YAML's."""
    settings = {**LAYERWISE, "fsdp_version": 1, "fsdp_offload_params": True, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}
    os.environ.update(environment(tmp_path, fsdp_config=settings))
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    fsdp_plugin = FullyShardedDataParallelPlugin(**arguments(fsdp=True).fsdp_plugin_args)
    assert fsdp_plugin.fsdp_version == 2
    assert fsdp_plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert type(fsdp_plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"].lower() == "false"


@pytest.mark.pain("P52")
def test_an_fsdp_config_without_fsdp_is_ignored(arguments: Arguments) -> None:
    """AF607: half of the setting is nothing."""
    assert arguments(fsdp_config={"version": 2}).fsdp_plugin_args is None


@pytest.mark.pain("P62")
def test_safetensors_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    """Whatever the umask says; a file made with `open` follows it."""
    before = os.umask(0o022)
    try:
        save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
        (tmp_path / "plain").write_text("")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o600


@pytest.mark.pain("P65")
@pytest.mark.parametrize(
    ("value", "missing"),
    [
        (["LlamaDecoderLayer"], "['LlamaDecoderLayer']"),
        ("LlamaDecoderLayer, LlamaMLP", " LlamaMLP"),
        ("llamadecoderlayer", "llamadecoderlayer"),
    ],
    ids=["list", "space", "case"],
)
def test_layer_classes_are_taken_to_the_letter(value: Any, missing: str, plugin: Plugin) -> None:
    """AF206, and AF501 for the case: brackets, spaces and capitals belong to the name."""
    fsdp_plugin = plugin(2, **LAYERWISE, fsdp_transformer_layer_cls_to_wrap=value)
    with pytest.raises(ValueError, match=re.escape(f"layer class {missing} in")):
        fsdp_plugin.set_auto_wrap_policy(tiny_llama())


@pytest.mark.pain("P67")
@pytest.mark.parametrize("strategy", [2, "2", "SHARD_GRAD_OP", "shard_grad_op", "_HYBRID_SHARD_ZERO2"])
def test_a_strategy_has_a_number_and_names(strategy: Any, plugin: Plugin) -> None:
    """AF203 takes them, torch's own included, as Accelerate does."""
    job = subject(f"{V1}  fsdp_sharding_strategy: {strategy}\n")
    assert "AF203" not in codes_of(job)
    name = plugin(1, fsdp_sharding_strategy=strategy).sharding_strategy.name
    assert job.strategy == name.removeprefix("_")


@pytest.mark.pain("P69")
def test_the_launcher_checks_a_key_that_fsdp2_does_not_use(tmp_path: Path) -> None:
    """AF311: a false is refused under version 2 too, the text 'false' slips past."""
    with pytest.raises(UserError, match="set `--fsdp_sync_module_states` to `True`"):
        environment(tmp_path, fsdp_config={"fsdp_version": 2, "fsdp_sync_module_states": False})
    seen = environment(tmp_path, fsdp_config={"fsdp_version": 2, "fsdp_sync_module_states": "false"})
    assert (seen["FSDP_SYNC_MODULE_STATES"], seen["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("false", "true")


@pytest.mark.pain("P80")
def test_fsdp2_ignores_keys_of_fsdp1(plugin: Plugin, caplog: pytest.LogCaptureFixture) -> None:
    """AF305: in silence, except for backward prefetch."""
    quiet = {"fsdp_forward_prefetch": True, "fsdp_use_orig_params": False, "fsdp_sync_module_states": True}
    fsdp_plugin = plugin(2, **quiet)
    read = (fsdp_plugin.forward_prefetch, fsdp_plugin.use_orig_params, fsdp_plugin.sync_module_states)
    assert read == (None, None, None)
    assert not caplog.records
    assert plugin(2, fsdp_backward_prefetch="BACKWARD_PRE").backward_prefetch is None
    assert "backward_prefetch is not supported in FSDP2" in caplog.text


@pytest.mark.pain("P81")
def test_bf16_in_the_arguments_beats_the_yaml(arguments: Arguments) -> None:
    """AF606: the YAML's answer was no."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    assert arguments(bf16=True).mixed_precision == "bf16"


@pytest.mark.pain("P44", "P46")
@pytest.mark.parametrize(
    ("processes", "attribute", "value"),
    [
        *((count, "nproc_per_node", each) for count, each in ((9, "4"), (1, "0"), (0, "0"))),  # AF402, AF407
        (2, "rdzv_endpoint", "None:29500"),  # AF403: the address is the text None
    ],
)
def test_what_starts_on_two_machines(processes: int, attribute: str, value: str, tmp_path: Path) -> None:
    content = {**MINIMAL, "fsdp_config": {}, "num_processes": processes, "num_machines": 2, "machine_rank": 1}
    (path := tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    words = ["--main_process_port", "29500", "--config_file", str(path), __file__]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    prepare_multi_gpu_env(args)
    assert getattr(args, attribute) == value


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_upstream_*.py")), ids=lambda path: path.stem)
def test_the_rules_that_docstrings_name_exist(path: Path) -> None:
    assert set(re.findall(r"\bAF\d{3}\b", path.read_text())) <= set(RULES)


def test_accelerate_prepares_tensor_parallelism_with_a_name_that_transformers_lacks() -> None:
    """Why `rehearse` refuses tp_size with another script: Accelerate splits no layer."""
    assert "import ReplicateParallel" in inspect.getsource(Accelerator._prepare_tp)
    assert not hasattr(importlib.import_module("transformers.integrations.tensor_parallel"), "ReplicateParallel")
