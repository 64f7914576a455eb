"""`accel-fsdp init`: the files of a project of one's own, from a clone and from the wheel, never over what is there."""

import re
from pathlib import Path

import pytest
from conftest import ROOT, accel_fsdp

from accel_fsdp import cli
from accel_fsdp.errors import UserError


def test_a_project_is_written_once(tmp_path: Path) -> None:
    project = tmp_path / "new" / "project"
    first = accel_fsdp("init", project, "--config", "zero3")
    assert first.code == 0, first.output
    assert (project / "train" / "sft.py").read_text() == (ROOT / "train" / "sft.py").read_text()
    yaml = project / "accelerate_configs" / "zero3.yaml"
    assert yaml.read_text() == (ROOT / "accelerate_configs" / "zero3.yaml").read_text()
    schema = project / "accelerate_configs" / "schema.json"
    assert schema.read_text() == (ROOT / "accelerate_configs" / "schema.json").read_text()
    (project / "train" / "sft.py").write_text("mine")
    yaml.unlink()
    again = accel_fsdp("init", project, "--config", "zero3")
    assert again.code == 1
    assert str(project / "train" / "sft.py") in again.output
    assert (project / "train" / "sft.py").read_text() == "mine"
    assert not yaml.exists()


ADAPTER = "--dtype bfloat16 --learning_rate 0.0002 "


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ("fsdp2", ""),
        ("fsdp2_lora", f"--use_peft true {ADAPTER}"),
        ("fsdp2_qlora", f"--use_peft true --load_in_4bit true --bnb_4bit_quant_storage bfloat16 {ADAPTER}"),
        ("tpu", "--accelerate_config {path} "),
    ],
)
def test_the_script_is_told_what_the_yaml_needs(
    config: str, needed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--use_peft` the files for LoRA would train every weight."""
    assert cli.call(["init", str(tmp_path), "--config", config]) == 0
    path = f"accelerate_configs/{config}.yaml"
    assert f"--config_file {path} train/sft.py {needed.format(path=path)}--help\n" in capsys.readouterr().out
    readme = (tmp_path / "train" / "README.md").read_text()
    assert f"\n    {needed.format(path='fsdp.yaml')}--model_name_or_path MODEL --dataset_name DATA" in readme


def test_an_unknown_yaml_is_refused(tmp_path: Path) -> None:
    refused = accel_fsdp("init", tmp_path / "project", "--config", "fsdp2_lroa")
    assert refused.code == 2
    assert "Did you mean fsdp2_lora?" in refused.output
    assert not (tmp_path / "project").exists()


@pytest.mark.parametrize("inside", [(), ("project",)])
def test_a_file_is_no_place_for_a_project(inside: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(UserError, match=f"{re.escape(str(file))} is a file, and DIR must be a folder"):
        cli.call(["init", str(file.joinpath(*inside))])
    assert file.read_text() == "mine"
