"""`accel-fsdp migrate`: what Accelerate makes of a file before and after, and what the command writes."""

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, here, run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from meaning import fsdp_files, meaning, other_files
from test_check import DOCUMENTS
from test_config import offline_machine  # noqa: F401 (a fixture)

from accel_fsdp import linter, wizard
from accel_fsdp.config import TARGETS, schema
from accel_fsdp.errors import UsageError
from accel_fsdp.wizard import Migration
from accel_fsdp.wizard import migrated as migration_of

ANY_FILE = settings(max_examples=100)


def migrated(path: Path, target: str, layer_class: str = "") -> tuple[Migration, Path]:
    """The migration of a file; the new file is written beside it."""
    output = path.with_name(f"{target}.yaml")
    migration = migration_of(path, target, layer_class)  # type: ignore[arg-type]
    output.write_text(migration.text)
    return migration, output


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
    ddp = before["strategy"] == "NO_SHARD" and before["engine"] != "ddp" and target == "fsdp2"
    shards = before["engine"] == "ddp" and target == "fsdp2"
    after |= {"engine": "ddp" if ddp else target, "strategy": "FULL_SHARD" if shards else before["strategy"]}
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
    if not migration.changes:
        assert output.read_text() == path.read_text()
        return migration
    assert errors(output) == [], output.read_text()
    before, after = meaning(path), meaning(output)
    if not migration.lost:
        wanted = expected(before, target)
        assert {key: after[key] for key in wanted} == wanted
        if before.get("policy") == "transformer" and "classes" in after:
            assert after["classes"] == before["classes"]
    return migration


def errors(path: Path) -> list[str]:
    return [
        f"{finding.code} {finding.key}"
        for finding in linter.lint(path, linter.LintOptions())
        if finding.severity == "error"
    ]


@ANY_FILE
@given(text=fsdp_files(), target=st.sampled_from(sorted(TARGETS)))
def test_accelerate_reads_the_same_from_an_fsdp_file(text: str, target: str, tmp_path: Path) -> None:
    """And each key that changes has one row."""
    path = tmp_path / "old.yaml"
    path.write_text(text)
    migration = assert_same_meaning(path, target)
    before = meaning(path)
    to_zero, to_ddp = target.startswith("zero"), target == "fsdp2" and before["strategy"] == "NO_SHARD"
    lost = [to_zero and before["strategy"].startswith("HYBRID"), (to_zero or to_ddp) and before["checkpointing"]]
    lost.append(to_ddp and before["offload"])
    assert len(migration.lost) == (sum(lost) if migration.changes else 0)
    rows = [change.key for change in migration.changes]
    assert len(rows) == len(set(rows))
    assert [change for change in migration.changes if change.kind == "changed" and change.old == change.new] == []
    reported = {key.rpartition(".")[2] for key in rows} | {change.new_key for change in migration.changes}
    contents = [flat(yaml.safe_load(content)) for content in (text, migration.text)]
    differing = {key for key in contents[0] | contents[1] if contents[0].get(key) != contents[1].get(key)}
    assert differing <= reported | {"parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"}


def flat(content: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in content.items():
        inside = value if isinstance(value, dict) else {key: value}
        keys |= {schema.full_name(key, inner) if inside is value else inner: v for inner, v in inside.items()}
    return keys


@pytest.mark.slow
@ANY_FILE
@given(text=other_files(), target=st.sampled_from(sorted(TARGETS)))
def test_accelerate_reads_the_same_from_ddp_and_deepspeed(text: str, target: str, tmp_path: Path) -> None:
    """But for a stage of ZeRO, which is what was asked for."""
    path = tmp_path / "old.yaml"
    path.write_text(text)
    if not target.startswith("zero"):
        migration = assert_same_meaning(path, target)
        assert bool(migration.lost) == (meaning(path)["strategy"] == "ZERO1")
        return
    migration, output = migrated(path, target)
    assert errors(output) == []
    after = meaning(output)
    assert (after["engine"], after["strategy"]) == ("zero", expected(meaning(path), target)["strategy"])
    assert not migration.lost


@pytest.mark.slow
@settings(max_examples=300)
@given(text=DOCUMENTS, target=st.sampled_from(sorted(TARGETS)), kind=st.sampled_from(["", "FSDP", "DEEPSPEED"]))
@example(text="num_processes: -_", target="fsdp2", kind="FSDP")  # a number to ruamel.yaml, which then fails on it
def test_odd_documents_are_migrated_or_refused(text: str, target: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(f"distributed_type: {kind}\n{text}" if kind else text, errors="ignore")
    with contextlib.suppress(UsageError):
        yaml.safe_load(migration_of(path, target).text)  # type: ignore[arg-type]


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


def test_the_comments_of_a_removed_section_stay(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(COMMENTED.replace("strategy: 2", "strategy: 3"))
    text = migrated(path, "fsdp2")[1].read_text()
    comments = [line.strip() for line in COMMENTED.splitlines() if line.strip().startswith("#")]
    assert [line for line in text.splitlines() if line.startswith("#")] == comments
    assert yaml.safe_load(text) == {"distributed_type": "MULTI_GPU", "num_processes": 8}


TOP = "distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 8\nnum_machines: 2\nmain_process_ip: a\n"
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
    assert len(migration.lost) == 1
    allowed = {"AF401 num_processes"} if "num_processes" not in text else set()
    assert set(errors(output)) <= allowed


HARMLESS = {
    "retired": (V1 + "  fsdp_cpu_offload: true\n", "fsdp2", "fsdp_cpu_offload"),
    "unknown": (V1 + "  fsdp_limit_all_gathers: true\n", "fsdp2", "fsdp_limit_all_gathers"),
    "unknown, without the prefix": (V1 + "  zzz: 1\n", "fsdp2", "zzz"),
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
    assert not migration.lost
    assert "lost" in {change.kind for change in migration.changes if change.key.rpartition(".")[2] == key}


@pytest.mark.parametrize(("target", "strategy"), [("fsdp1", "NO_SHARD"), ("fsdp2", "FULL_SHARD")])
def test_ddp_becomes_what_was_asked_for(target: str, strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "ddp.yaml"
    path.write_text(DDP)
    migration, output = migrated(path, target, "LlamaDecoderLayer")
    after = meaning(output)
    assert (after["engine"], after["strategy"], after["state"]) == (target, strategy, "FULL_STATE_DICT")
    assert after["classes"] == ["LlamaDecoderLayer"]
    change = next(change for change in migration.changes if change.key == "distributed_type")
    assert (change.old, change.new, change.kind) == ("MULTI_GPU", "FSDP", "changed")


def test_a_bare_no_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(V1.replace("'no'", "no"))
    assert meaning(migrated(path, "fsdp2")[1])["precision"] == "no"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: 'NO'\n", "can't be migrated"),
        ("distributed_type: XLA\n", "can't be migrated"),
        ("distributed_type: MEGATRON_LM\n", "can't be migrated"),
        ("distributed_type: MULTI_CPU\n", "can't be migrated"),
        ("num_processes: 2\n", "can't be migrated"),
        ("distributed_type: FSDP\nfsdp_config: [a]\n", "not a mapping"),
        ("distributed_type: FSDP\nfsdp_config: {1: a}\n", "is not text"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}\n", "neither 1 nor 2"),
        ("distributed_type: FSDP\ncompute_environment: AMAZON_SAGEMAKER\n", "not the config of a local machine"),
        ("x: &x {a: 1}\ndistributed_type: FSDP\nfsdp_config: {<<: *x, fsdp_version: 1}\n", "keys from another mapping"),
        ("a: [1\n", "expected ','"),
    ],
)
def test_what_cannot_be_migrated_is_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(text)
    finished = here("migrate", path, "--to", "fsdp2")
    assert finished.code == 2
    assert message in finished.output
    assert "Traceback" not in finished.output
    assert path.read_text() == text


def test_in_place(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(COMMENTED)
    finished = here("migrate", path, "--to", "fsdp2")
    assert finished.code == 0, finished.output
    assert path.read_text() == FSDP2_COMMENTED
    assert "+  fsdp_version: 2" in finished.output
    assert [path.name for path in tmp_path.iterdir()] == ["fsdp.yaml"]
    again = here("migrate", path, "--to", "fsdp2")
    assert again.code == 0
    assert "is FSDP2 already" in again.output
    assert path.read_text() == FSDP2_COMMENTED


def test_output_is_never_overwritten(tmp_path: Path) -> None:
    path, output = tmp_path / "fsdp.yaml", tmp_path / "new.yaml"
    path.write_text(COMMENTED)
    assert here("migrate", path, "--to", "fsdp2", "-o", output).code == 0
    assert (path.read_text(), output.read_text()) == (COMMENTED, FSDP2_COMMENTED)
    refused = here("migrate", path, "--to", "zero2", "-o", output)
    assert refused.code == 1
    assert "exists" in refused.output
    assert output.read_text() == FSDP2_COMMENTED
    assert "--overwrite" in refused.output
    assert here("migrate", path, "--to", "zero2", "-o", output, "--force").code == 1
    assert output.read_text() == FSDP2_COMMENTED
    assert here("migrate", path, "--to", "zero2", "-o", output, "--overwrite").code == 0
    copied = tmp_path / "copy.yaml"
    assert here("migrate", path, "--to", "fsdp1", "-o", copied).code == 0
    assert copied.read_text() == COMMENTED
    assert "zero_stage: 2" in output.read_text()


def test_a_lost_meaning_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    text = BREAKS["checkpointing to ZeRO"][0]
    path.write_text(text)
    refused = here("migrate", path, "--to", "zero3")
    assert refused.code == 1
    assert "\n  why: an argument of the script turns it on\n" in refused.output
    assert "or give the script --gradient_checkpointing true, and write the file: --force." in refused.output
    assert path.read_text() == text
    assert here("migrate", path, "--to", "zero3", "--dry-run").code == 1
    assert here("migrate", path, "--to", "zero3", "--force").code == 0
    assert yaml.safe_load(path.read_text())["deepspeed_config"]["zero_stage"] == 3


@pytest.mark.parametrize("target", ["zero3", "fsdp1", "fsdp2"])
def test_expert_parallelism_of_the_launch_line_is_lost_with_fsdp2(target: str, tmp_path: Path) -> None:
    path = ROOT / "accelerate_configs/fsdp2_moe_ep.yaml"
    migrated = tmp_path / "new.yaml"
    ended = here("migrate", path, "--to", target, "-o", migrated, "--force")
    assert ("lost!    --expert_parallel_size" in ended.output) == (target != "fsdp2")
    if target != "fsdp2":
        assert here("migrate", path, "--to", target, "--dry-run").code == 1
        assert "--expert_parallel_size" not in migrated.read_text()
        assert here("check", migrated).code == 0


def test_stdout_is_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(COMMENTED)
    assert wizard.migrate(wizard.MigrateCommand(path, "fsdp2", dry_run=True)) == 0
    assert capsys.readouterr().out == FSDP2_COMMENTED
    assert wizard.migrate(wizard.MigrateCommand(path, "fsdp2", json=True, dry_run=True)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["yaml"] == FSDP2_COMMENTED
    strategy = next(change for change in shown["changes"] if change["key"] == "fsdp_config.fsdp_sharding_strategy")
    assert strategy == asdict(migration_of(path, "fsdp2").changes[0])
    assert (strategy["kind"], strategy["old"], strategy["new"]) == ("renamed", "2", "false")
    assert path.read_text() == COMMENTED


def test_advice_is_whole_at_any_width(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(V2 + "  fsdp_activation_checkpointing: true\n")
    words = [sys.executable, "-m", "accel_fsdp", "migrate", path, "--to", "zero3", "--force"]
    shown = run(words, COLUMNS="60").output
    row = shown[shown.index("lost!") :].partition("changed")[0]
    assert row.split().count("true") == 2, shown  # the key's value, and the end of the advice


def test_the_header_says_what_the_file_is_now(tmp_path: Path) -> None:
    path = tmp_path / "zero3.yaml"
    assert here("migrate", ROOT / "accelerate_configs/fsdp2.yaml", "--to", "zero3", "-o", path).code == 0
    first, *rest = path.read_text().splitlines()
    assert first.startswith("# Migrated from FSDP2 to DeepSpeed ZeRO-3.")
    assert rest[:4] == (ROOT / "accelerate_configs/fsdp2.yaml").read_text().splitlines()[1:5]
