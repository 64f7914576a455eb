"""The command `accel-fsdp migrate`: exit codes, what it writes, and what it leaves alone."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from checking import V2
from conftest import ROOT, here, run
from test_migrate import BREAKS, COMMENTED, FSDP2_COMMENTED

from accel_fsdp import wizard
from accel_fsdp.config import TARGETS


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
    assert strategy == asdict(wizard.migrated(path, "fsdp2").changes[0])
    assert (strategy["kind"], strategy["old"], strategy["new"]) == ("renamed", "2", "false")
    assert path.read_text() == COMMENTED


def test_the_command_takes_the_targets_there_are() -> None:
    assert set(get_args(get_type_hints(wizard.MigrateCommand)["to"])) == set(TARGETS)


@pytest.mark.parametrize("columns", [60, 80])
def test_advice_is_whole_at_any_width(columns: int, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(V2 + "  fsdp_activation_checkpointing: true\n")
    words = [sys.executable, "-m", "accel_fsdp", "migrate", path, "--to", "zero3", "--force"]
    shown = run(words, COLUMNS=str(columns)).output
    row = shown[shown.index("lost!") :].partition("changed")[0]
    assert row.split().count("true") == 2, shown  # the key's value, and the end of the advice


def test_the_header_says_what_the_file_is_now(tmp_path: Path) -> None:
    path = tmp_path / "zero3.yaml"
    assert here("migrate", ROOT / "accelerate_configs/fsdp2.yaml", "--to", "zero3", "-o", path).code == 0
    first, *rest = path.read_text().splitlines()
    assert first.startswith("# Migrated from FSDP2 to DeepSpeed ZeRO-3.")
    assert rest[:4] == (ROOT / "accelerate_configs/fsdp2.yaml").read_text().splitlines()[1:5]


def test_what_had_no_effect_is_named_as_the_file_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(COMMENTED.replace("fsdp_config:\n", "fsdp_config:\n  zzz: 1\n  fsdp_yyy: 2\n"))
    lost = {change.key for change in wizard.migrated(path, "fsdp2").changes if change.kind == "lost"}
    assert {"fsdp_config.zzz", "fsdp_config.fsdp_yyy"} <= lost
