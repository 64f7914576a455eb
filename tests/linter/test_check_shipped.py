"""The files that Accelerate and TRL ship: the linter passes them, with `--strict`, and says no word of a repair."""

import os
from pathlib import Path

import pytest
from accelerate.commands.config.default import write_basic_config
from checking import finding, findings

from accel_fsdp import linter

SHIPPED = sorted((Path(__file__).parent / "shipped").glob("*/*.yaml"))
ON_THE_COMMAND_LINE = {"slurm_fsdp": "accelerate launch --num_processes 8 --num_machines 2 --main_process_ip $IP x.py"}
"""What the example's own job script gives the launcher."""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in as the examples want it: DeepSpeed's files lie where they say."""
    (tmp_path / "work").mkdir()
    (tmp_path / "deepspeed_config_templates").mkdir()
    (tmp_path / "deepspeed_config_templates" / "zero_stage1_config.json").write_text("{}")
    (tmp_path / "work" / "sp-alst.ds-config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_shipped_file_passes(path: Path, beside: Path) -> None:
    args = None
    if path.stem in ON_THE_COMMAND_LINE:
        args = beside / "args.sh"
        args.write_text(ON_THE_COMMAND_LINE[path.stem])
    copy = beside / path.name
    copy.write_bytes(path.read_bytes())
    options = linter.CheckCommand(files=(copy,), args=args, strict=True)
    assert [(f.code, f.what) for f in linter.lint(copy, options) if f.severity != "note"] == []
    assert linter.lint_all(options) == 0


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_basic_config_passes(precision: str, tmp_path: Path) -> None:
    """It is JSON, and what `accelerate config default` writes."""
    path = tmp_path / "default_config.json"
    assert write_basic_config(precision, str(path)) == path
    assert linter.lint_all(linter.CheckCommand(files=(path,), strict=True)) == 0


ULYSSES = (Path(__file__).parent / "shipped/trl/alst_ulysses_4gpu.yaml").read_text()


@pytest.mark.parametrize("size", [1, 4])
def test_a_wrong_number_of_batches_beside_sequences(size: int, tmp_path: Path) -> None:
    """Accelerate tells DeepSpeed a batch of as many rows as `dp_shard_size` says (accelerator.py, `pc.sp_size > 1`)."""
    error = finding("AF316", ULYSSES.replace("dp_shard_size: 2 ", f"dp_shard_size: {size} "), tmp_path)
    assert (error.code, error.key.rpartition("_config_")[2]) == ("AF316", "sp_size" if size == 1 else "dp_shard_size")
    assert "train_batch_size" in error.why


def test_replicas_under_deepspeed_without_sequences(tmp_path: Path) -> None:
    text = ULYSSES.replace("sp_size: 2 ", "sp_size: 1 ").replace("dp_shard_size: 2 ", "dp_shard_size: 4 ")
    severities = {finding.code: finding.severity for finding in findings(text, tmp_path)}
    assert {code: severity for code, severity in severities.items() if severity != "note"} == {"AF315": "warning"}


@pytest.mark.parametrize(
    ("keys", "severity"),
    [
        ("fsdp_reshard_after_forward: FULL_SHARD", "note"),
        ("fsdp_reshard_after_forward: true", "note"),
        ("fsdp_reshard_after_forward: SHARD_GRAD_OP", "error"),
        ("fsdp_reshard_after_forward: false", "error"),
        ("fsdp_sharding_strategy: 2\n  fsdp_reshard_after_forward: false", "note"),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_reshard_after_forward: true", "warning"),
        ("fsdp_sharding_strategy: 1\n  fsdp_reshard_after_forward: FULL_SHARD", "note"),
    ],
)
def test_how_bad_a_key_of_fsdp2_is_under_fsdp1(keys: str, severity: str, tmp_path: Path) -> None:
    """As bad as what then runs: Accelerate exports FULL_SHARD unless `fsdp_sharding_strategy` says something else."""
    text = (Path(__file__).parent / "shipped/trl/fsdp1.yaml").read_text()
    text = text.replace("fsdp_reshard_after_forward: FULL_SHARD", keys)
    assert finding("AF302", text, tmp_path).severity == severity


MISSPELT = {
    "a section": ("fsdp_config:", "fsdp_confg:"),
    "a section with a dash": ("fsdp_config:", "fsdp-config:"),
    "the engine": ("distributed_type:", "distributed_typ:"),
    "a key of a section": ("fsdp_version:", "fsdp_verion:"),
    "both": ("fsdp_config:", "fsdp_confg:"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_name_is_one_finding_and_is_renamed(name: str, tmp_path: Path) -> None:
    right = (Path(__file__).parent / "shipped/trl/fsdp2.yaml").read_text()
    wrong = right.replace(*MISSPELT[name])
    if name == "both":
        wrong = wrong.replace("fsdp_offload_params", "fsdp_ofload_params")
    fixes = [finding.fix for finding in findings(wrong, tmp_path) if finding.severity != "note"]
    assert len(fixes) == (2 if name == "both" else 1)
    assert all("rename it" in fix for fix in fixes)
    findings(wrong, tmp_path, fix=True)
    assert (tmp_path / "checked.yaml").read_text() == right


def test_a_misspelt_section_beside_the_right_one_stays(tmp_path: Path) -> None:
    """Which of the two is meant is not the linter's to say."""
    path = tmp_path / "two.yaml"
    path.write_text((Path(__file__).parent / "shipped/trl/fsdp2.yaml").read_text() + "fsdp_confg: {fsdp_version: 1}\n")
    before = os.stat(path).st_mtime_ns, path.read_text()
    assert "AF102" in {finding.code for finding in linter.lint(path, linter.LintOptions(fix=True))}
    assert (os.stat(path).st_mtime_ns, path.read_text()) == before
