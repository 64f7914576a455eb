"""`accel-fsdp migrate`: what Accelerate makes of a file before and after, and what the command writes."""

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from conftest import accel_fsdp
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_check import DOCUMENTS
from test_config import answers, offline_machine, seen_by_accelerate  # noqa: F401 (a fixture)

from accel_fsdp import check, config, lint
from accel_fsdp.check import Subject
from accel_fsdp.draft import Migration
from accel_fsdp.errors import UsageError
from accel_fsdp.migrate import TARGETS, plan
from accel_fsdp.types import Answers

ANY_FILE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
STAGES = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3}


def migrated(path: Path, target: str, layer_class: str = "") -> tuple[Migration, Path]:
    """Draws up and applies a migration as the command does; the new file stands beside the old one."""
    text, output = path.read_text(), path.with_name(f"{target}.yaml")
    document = config.load(path)
    migration = plan(Subject(yaml.safe_load(text)), target, layer_class)
    check.apply(document, migration.edits)
    output.write_text(config.dump(document) if migration.edits else text)
    return migration, output


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
    with mock.patch.dict(os.environ, environment):
        plugin = DeepSpeedPlugin()
    stages = {stage: name for name, stage in STAGES.items()} | {1: "ZERO1"}
    return {
        "strategy": stages[plugin.zero_stage],
        "offload": "cpu" in (plugin.offload_optimizer_device, plugin.offload_param_device),
        "parameters_offload": plugin.offload_param_device == "cpu",
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


def expected(before: dict[str, Any], target: str) -> dict[str, Any]:
    """What a migration without a break must mean: as before, but for what the new engine says by itself."""
    after = {key: before[key] for key in ("processes", "machines", "precision", "offload", "checkpointing")}
    if target.startswith("zero"):
        stage = int(target[-1])
        after |= {"engine": "zero", "strategy": {1: "ZERO1", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}[stage]}
        after |= {
            "parameters_offload": before["offload"] and stage == 3,
            "ram": before.get("ram", False) and stage == 3,
        }
        return after | {"saves": stage == 3, "training arguments decide": True, "torchrun": True}
    ddp = before["strategy"] == "NO_SHARD" and target == "fsdp2"
    after |= {"engine": "ddp" if ddp else target, "strategy": before["strategy"]}
    if ddp:
        return after
    after |= {"ram": before.get("ram", False), "ignored": before.get("ignored")}
    from_fsdp = before["engine"].startswith("fsdp")
    after |= {"state": before.get("state", "FULL_STATE_DICT" if before["engine"] == "ddp" else "SHARDED_STATE_DICT")}
    if after["state"] == "LOCAL_STATE_DICT":
        after["state"] = "SHARDED_STATE_DICT"
    policy = before["policy"] if from_fsdp else "transformer"
    return after | {"policy": "transformer" if policy == "size" and target == "fsdp2" else policy}


def assert_same_meaning(path: Path, target: str) -> Migration:
    """The judge: Accelerate. Returns the migration, whose breaks the caller looks at."""
    migration, output = migrated(path, target)
    assert errors(output) == [], output.read_text()
    before, after = meaning(path), meaning(output)
    if not migration.edits:
        assert after == before
    elif not migration.broken:
        wanted = expected(before, target)
        assert {key: after[key] for key in wanted} == wanted
        if before.get("policy") == "transformer" and "classes" in after:
            assert after["classes"] == before["classes"]
    return migration


def errors(path: Path) -> list[str]:
    return [f"{one.code} {one.key}" for one in lint.lint(path, lint.Options()) if one.severity == "error"]


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
    wanted: Answers = draw(answers())
    assume("Embedding" not in wanted.layer_class and "Linear" not in wanted.layer_class)
    content = config.to_mapping(wanted)
    section = content.get("fsdp_config", {})
    strategy = section.get("fsdp_sharding_strategy")
    if strategy is not None and draw(st.booleans()):
        names = dict(zip((1, 2, 3, 4, 5), config.STRATEGIES.values(), strict=True))
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
        content["fsdp_config"] = {key.removeprefix("fsdp_") if short else key: one for key, one in spelt.items()}
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


@ANY_FILE
@given(text=fsdp_files(), target=st.sampled_from(sorted(TARGETS)))
def test_accelerate_reads_the_same_from_an_fsdp_file(text: str, target: str, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(text)
    assert_same_meaning(path, target)


@ANY_FILE
@given(text=other_files(), target=st.sampled_from(["fsdp1", "fsdp2"]))
def test_accelerate_reads_the_same_from_ddp_and_deepspeed(text: str, target: str, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(text)
    migration = assert_same_meaning(path, target)
    assert bool(migration.broken) == (meaning(path)["strategy"] == "ZERO1")


@ANY_FILE
@given(text=other_files(), target=st.sampled_from(["zero1", "zero2", "zero3"]))
def test_a_stage_of_zero_is_what_was_asked_for(text: str, target: str, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(text)
    migration, output = migrated(path, target)
    assert errors(output) == []
    after = meaning(output)
    assert (after["engine"], after["strategy"]) == ("zero", expected(meaning(path), target)["strategy"])
    assert not migration.broken


@ANY_FILE
@given(wanted=answers())
def test_there_and_back_means_the_same(wanted: Answers, tmp_path: Path) -> None:
    assume(wanted.fsdp_version == 1 and wanted.wrap_policy != "SIZE_BASED_WRAP")
    path = tmp_path / "old.yaml"
    path.write_text(config.to_text(wanted))
    there, output = migrated(path, "fsdp2")
    back, again = migrated(output, "fsdp1", ",".join(wanted.layer_class))
    before, after = meaning(path), meaning(again)
    if before["strategy"] == "NO_SHARD":  # by way of DDP, which knows nothing of units and checkpoints
        keys = {"strategy", "processes", "precision"}
        before, after = ({key: one[key] for key in keys} for one in (before, after))
    if not there.broken and not back.broken:
        assert after == before


@ANY_FILE
@given(text=fsdp_files(), target=st.sampled_from(sorted(TARGETS)))
def test_each_key_has_one_row(text: str, target: str, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(text)
    migration, output = migrated(path, target)
    rows = [one.key for one in migration.changes]
    assert len(rows) == len(set(rows))
    told = {one.key.rpartition(".")[2] for one in migration.changes} | {one.new_key for one in migration.changes}
    for content in (yaml.safe_load(text), yaml.safe_load(output.read_text())) if migration.edits else ():
        inside = {check.full_name("fsdp_config", key) for key in content.get("fsdp_config", {})}
        assert set(content) - {"fsdp_config", "deepspeed_config", "parallelism_config"} <= told
        assert inside | set(content.get("deepspeed_config", {})) <= told


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=DOCUMENTS, target=st.sampled_from(sorted(TARGETS)), kind=st.sampled_from(["", "FSDP", "DEEPSPEED"]))
def test_odd_documents_are_migrated_or_refused(text: str, target: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(f"distributed_type: {kind}\n{text}" if kind else text, errors="ignore")
    with contextlib.suppress(UsageError, yaml.YAMLError, ValueError):
        config.load(path)
        assume(isinstance(yaml.safe_load(path.read_text()), dict))
    with contextlib.suppress(UsageError):
        subject, document = lint.read_subject(path, None, None)
        check.apply(document, plan(subject, target).edits)
        yaml.safe_load(config.dump(document))


COMMENTED = """\
# top

distributed_type: FSDP  # kind
# before the section
fsdp_config:
  # before the strategy
  fsdp_sharding_strategy: 2  # memory is fine
  # before the retired key
  fsdp_backward_prefetch_policy: BACKWARD_PRE  # from the documentation
  # before the policy

  fsdp_auto_wrap_policy: transformer_based_wrap
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer  # Llama
  # before the last
  fsdp_use_orig_params: true  # for LoRA
  # inside, at the end
# before the number
num_processes: 8
# end
"""
FSDP2_COMMENTED = """\
# top

distributed_type: FSDP  # kind
# before the section
fsdp_config:
  # before the strategy
  fsdp_reshard_after_forward: false  # memory is fine
  # before the retired key
  # before the policy

  fsdp_auto_wrap_policy: transformer_based_wrap
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer  # Llama
  # before the last
  # inside, at the end
  fsdp_version: 2
  fsdp_state_dict_type: FULL_STATE_DICT
# before the number
num_processes: 8
# end
"""
ZERO2_COMMENTED = """\
# top

distributed_type: DEEPSPEED  # kind
# before the section
deepspeed_config:
  # before the strategy
  zero_stage: 2  # memory is fine
  # before the retired key
  # before the policy

  # before the last
  # inside, at the end
  offload_optimizer_device: none
  offload_param_device: none
  gradient_accumulation_steps: auto
  gradient_clipping: auto
# before the number
num_processes: 8
# end
"""


@pytest.mark.parametrize(("target", "text"), [("fsdp2", FSDP2_COMMENTED), ("zero2", ZERO2_COMMENTED)])
def test_comments_and_order_stay(target: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(COMMENTED)
    assert migrated(path, target)[1].read_text() == text


def test_the_comments_of_a_removed_section_stay(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(COMMENTED.replace("strategy: 2", "strategy: 3"))
    text = migrated(path, "fsdp2")[1].read_text()
    comments = [line.strip() for line in COMMENTED.splitlines() if line.strip().startswith("#")]
    assert [line for line in text.splitlines() if line.startswith("#")] == comments
    assert yaml.safe_load(text) == {"distributed_type": "MULTI_GPU", "num_processes": 8}


TOP = "distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 8\nnum_machines: 2\nmain_process_ip: a\n"
CRASHING = {
    "number": "fsdp_sharding_strategy: 2",
    "numeric text": "fsdp_sharding_strategy: '1'",
    "lower case": "fsdp_sharding_strategy: shard_grad_op",
    "local": "fsdp_sharding_strategy: FULL_SHARD\n  fsdp_state_dict_type: LOCAL_STATE_DICT",
}
CHANGING = {
    "hybrid": "fsdp_sharding_strategy: HYBRID_SHARD",
    "no shard": "fsdp_sharding_strategy: NO_SHARD",
    "ignored": "fsdp_sharding_strategy: FULL_SHARD\n  fsdp_reshard_after_forward: SHARD_GRAD_OP",
    "default": "fsdp_sharding_strategy: FULL_SHARD",
}


@pytest.mark.parametrize("name", [*CRASHING, *CHANGING])
def test_where_accelerates_own_converter_fails(name: str, tmp_path: Path) -> None:
    """Red when `accelerate to-fsdp2` learns to convert these: then say so in the README."""
    path, theirs = tmp_path / "old.yaml", tmp_path / "theirs.yaml"
    keys = (CRASHING | CHANGING)[name]
    path.write_text(f"{TOP}fsdp_config:\n  fsdp_version: 1\n  fsdp_auto_wrap_policy: NO_WRAP\n  {keys}\n")
    theirs.write_text(yaml.safe_dump(convert_config_to_fsdp2(yaml.safe_load(path.read_text()))))
    if name in CRASHING:
        with pytest.raises(ValueError, match="invalid truth value|does not support LOCAL_STATE_DICT"):
            meaning(theirs)
    else:
        same = ("strategy", "state")
        assert [meaning(theirs).get(fact) for fact in same] != [meaning(path)[fact] for fact in same]
    assert not assert_same_meaning(path, "fsdp2").broken


V1 = TOP + "fsdp_config:\n  fsdp_version: 1\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
V2 = V1.replace("version: 1", "version: 2")
DS = TOP.replace("FSDP", "DEEPSPEED") + "deepspeed_config:\n  deepspeed_multinode_launcher: standard\n  zero_stage: 3\n"
DDP = TOP.replace("FSDP", "MULTI_GPU")
MESH = "parallelism_config:\n  parallelism_config_dp_shard_size: {}\n  parallelism_config_{}_size: {}\n"
BREAKS = {
    "checkpointing to DDP": (V1 + "  fsdp_sharding_strategy: 3\n  fsdp_activation_checkpointing: true\n", "fsdp2"),
    "offload to DDP": (V1 + "  fsdp_sharding_strategy: 3\n  fsdp_offload_params: true\n", "fsdp2"),
    "hybrid without ranks": (V1.replace("num_processes: 8\n", "") + "  fsdp_sharding_strategy: 4\n", "fsdp2"),
    "hybrid of one": (V1.replace("processes: 8", "processes: 2") + "  fsdp_sharding_strategy: 4\n", "fsdp2"),
    "checkpoints unwrapped": (
        V1.replace("TRANSFORMER_BASED_WRAP", "NO_WRAP") + "  fsdp_activation_checkpointing: true\n", "fsdp2"),
    "unknown strategy": (V1 + "  fsdp_sharding_strategy: ZERO3\n", "fsdp2"),
    "offloaded checkpoints": (
        V2 + "  fsdp_activation_checkpointing: true\n  fsdp_activation_checkpointing_offload: true\n", "fsdp1"),
    "other mesh": (V2 + MESH.format(2, "dp_replicate", 4), "fsdp1"),
    "wrong mesh": (V2 + MESH.format(2, "dp_replicate", 2), "fsdp1"),
    "tensor parallel": (V2 + MESH.format(4, "tp", 2), "fsdp1"),
    "tensor parallel to ZeRO": (V2 + MESH.format(4, "tp", 2), "zero3"),
    "hybrid to ZeRO": (V2 + MESH.format(4, "dp_replicate", 2), "zero3"),
    "checkpointing to ZeRO": (V2 + "  fsdp_activation_checkpointing: true\n", "zero3"),
    "ignored modules": (V2 + "  fsdp_ignored_modules: lm_head\n", "zero3"),
    "nvme": (DS + "  offload_optimizer_device: nvme\n", "fsdp2"),
    "accumulation": (DS + "  gradient_accumulation_steps: 4\n", "fsdp2"),
    "clipping": (DS + "  gradient_clipping: 0.5\n", "fsdp1"),
    "own file": (DS + "  deepspeed_config_file: ds.json\n", "fsdp2"),
    "own file, other stage": (DS + "  deepspeed_config_file: ds.json\n", "zero2"),
    "hosts": (DS.replace("standard", "pdsh") + "  deepspeed_hostfile: hosts\n", "fsdp2"),
    "ZeRO-1": (DS.replace("stage: 3", "stage: 1"), "fsdp2"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_what_cannot_be_kept_breaks(name: str, tmp_path: Path) -> None:
    text, target = BREAKS[name]
    path = tmp_path / "old.yaml"
    path.write_text(text)
    migration, output = migrated(path, target)
    assert len(migration.broken) == 1
    allowed = {"AF401 num_processes"} if "num_processes" not in text else set()
    assert set(errors(output)) <= allowed


HARMLESS = {
    "retired": (V1 + "  fsdp_cpu_offload: true\n", "fsdp2", "fsdp_cpu_offload"),
    "unknown": (V1 + "  fsdp_limit_all_gathers: true\n", "fsdp2", "fsdp_limit_all_gathers"),
    "of the other version": (V2 + "  fsdp_use_orig_params: false\n", "fsdp1", "fsdp_use_orig_params"),
    "of DeepSpeed": (DS + "  offload_optimizer_nvme_path: /x\n", "fsdp2", "offload_optimizer_nvme_path"),
    "left over": (V2 + "deepspeed_config:\n  zero_stage: 1\n", "zero3", "deepspeed_config"),
    "left over by FSDP": (DDP + "fsdp_config:\n  fsdp_offload_params: true\n", "fsdp1", "fsdp_config"),
    "null": (V1 + "  fsdp_state_dict_type:\n", "fsdp2", "fsdp_state_dict_type"),
}


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_had_no_effect_gets_none(name: str, tmp_path: Path) -> None:
    text, target, key = HARMLESS[name]
    path = tmp_path / "old.yaml"
    path.write_text(text)
    migration = assert_same_meaning(path, target)
    assert not migration.broken
    assert "lost" in {one.kind for one in migration.changes if one.key.rpartition(".")[2] == key}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: 'NO'\n", "can't be migrated"),
        ("distributed_type: XLA\n", "can't be migrated"),
        ("distributed_type: MEGATRON_LM\n", "can't be migrated"),
        ("distributed_type: MULTI_CPU\n", "can't be migrated"),
        ("num_processes: 2\n", "can't be migrated"),
        ("distributed_type: FSDP\nfsdp_config: [a]\n", "not a mapping"),
        ("distributed_type: FSDP\nfsdp_config: {1: a}\n", "is no text"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}\n", "neither 1 nor 2"),
        ("distributed_type: FSDP\ncompute_environment: AMAZON_SAGEMAKER\n", "no config of a local machine"),
        ("x: &x {a: 1}\ndistributed_type: FSDP\nfsdp_config: {<<: *x, fsdp_version: 1}\n", "keys from elsewhere"),
        ("a: [1\n", "expected ','"),
    ],
)
def test_what_cannot_be_migrated_is_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(text)
    finished = accel_fsdp("migrate", path, "--to", "fsdp2")
    assert finished.code == 2
    assert message in finished.output
    assert "Traceback" not in finished.output
    assert path.read_text() == text


def test_in_place(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(COMMENTED)
    finished = accel_fsdp("migrate", path, "--to", "fsdp2")
    assert finished.code == 0, finished.output
    assert path.read_text() == FSDP2_COMMENTED
    assert "+  fsdp_version: 2" in finished.output
    assert [one.name for one in tmp_path.iterdir()] == ["fsdp.yaml"]
    again = accel_fsdp("migrate", path, "--to", "fsdp2")
    assert again.code == 0
    assert "is FSDP2 already" in again.output
    assert path.read_text() == FSDP2_COMMENTED


def test_output_is_never_overwritten(tmp_path: Path) -> None:
    path, output = tmp_path / "fsdp.yaml", tmp_path / "new.yaml"
    path.write_text(COMMENTED)
    assert accel_fsdp("migrate", path, "--to", "fsdp2", "-o", output).code == 0
    assert (path.read_text(), output.read_text()) == (COMMENTED, FSDP2_COMMENTED)
    refused = accel_fsdp("migrate", path, "--to", "zero2", "-o", output)
    assert refused.code == 1
    assert "exists" in refused.output
    assert output.read_text() == FSDP2_COMMENTED
    assert accel_fsdp("migrate", path, "--to", "zero2", "-o", output, "--force").code == 0
    assert output.read_text() == ZERO2_COMMENTED


def test_a_lost_meaning_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    text = BREAKS["checkpointing to ZeRO"][0]
    path.write_text(text)
    refused = accel_fsdp("migrate", path, "--to", "zero3")
    assert refused.code == 1
    assert "type --gradient_checkpointing true" in refused.output
    assert path.read_text() == text
    assert accel_fsdp("migrate", path, "--to", "zero3", "--dry-run").code == 1
    assert accel_fsdp("migrate", path, "--to", "zero3", "--force").code == 0
    assert yaml.safe_load(path.read_text())["deepspeed_config"]["zero_stage"] == 3


def test_stdout_is_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accel_fsdp import rewrite

    path = tmp_path / "fsdp.yaml"
    path.write_text(COMMENTED)
    with mock.patch("accel_fsdp.render.data.file", None), mock.patch("accel_fsdp.render.talk.file", None):
        assert rewrite.migrate(path, "fsdp2", rewrite.Options(dry_run=True)) == 0
    assert capsys.readouterr().out == FSDP2_COMMENTED
    assert rewrite.migrate(path, "fsdp2", rewrite.Options(json=True, dry_run=True)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["yaml"] == FSDP2_COMMENTED
    strategy = next(one for one in shown["changes"] if one["key"] == "fsdp_config.fsdp_sharding_strategy")
    assert strategy == asdict(plan(Subject(yaml.safe_load(COMMENTED)), "fsdp2").changes[1])
    assert (strategy["kind"], strategy["old"], strategy["new"]) == ("renamed", "2", "false")
    assert path.read_text() == COMMENTED


def test_the_layer_class_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "ddp.yaml"
    path.write_text(DDP)
    _, output = migrated(path, "fsdp1", "LlamaDecoderLayer")
    assert meaning(output)["classes"] == ["LlamaDecoderLayer"]


def test_a_bare_no_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(V1.replace("'no'", "no"))
    assert meaning(migrated(path, "fsdp2")[1])["precision"] == "no"
