"""`accel-fsdp config --from FILE`: what nobody changed means the same afterwards."""

from pathlib import Path

import pytest
import yaml
from checking import DDP, V1, V2
from conftest import ROOT, accel_fsdp

from accel_fsdp import linter, wizard
from accel_fsdp.errors import UsageError

SHIPPED = ROOT / "tests/linter/shipped"
SHORT_V1 = V1.replace("mixed_precision: 'no'\n", "")
DS_FILE = (
    "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
    "  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n"
)


def re_edited(path: Path, *flags: str) -> str:
    finished = accel_fsdp("config", "--yes", "--from", path, "--model", "meta-llama/Llama-3.1-8B", *flags)
    assert finished.code == 0, finished.output
    return path.read_text()


@pytest.mark.parametrize("text", [SHORT_V1, V1, V2, DS_FILE, DDP])
def test_nothing_changed_changes_nothing(text: str, tmp_path: Path) -> None:
    """Also what the file leaves to Accelerate: it isn't filled in with the wizard's own defaults."""
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    assert re_edited(path) == text


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_that_others_ship_loses_nothing(path: Path, tmp_path: Path) -> None:
    """Unchanged it comes back byte for byte; with one answer changed, one line differs."""
    text, copy = path.read_text(), tmp_path / path.name
    content, flags = yaml.safe_load(text), {"model": "meta-llama/Llama-3.1-8B"}
    copy.write_text(text)
    options = wizard.WizardOptions(from_file=copy, yes=True)
    if content["distributed_type"] == "NO":
        with pytest.raises(UsageError, match="can't be re-edited"):
            wizard.configure(options, flags)
        return
    if content.get("main_process_ip") == "1234":  # a placeholder
        content["main_process_ip"] = flags["main_process_ip"] = "10.0.0.1"
    else:
        wizard.configure(options, flags)
        assert copy.read_text() == text
    content["mixed_precision"] = flags["mixed_precision"] = "no" if content.get("mixed_precision") == "bf16" else "bf16"
    wizard.configure(options, flags)
    after = copy.read_text()
    assert yaml.safe_load(after) == content
    untouched = [line for line in text.splitlines() if "mixed_precision" not in line and "main_process_ip" not in line]
    assert [line for line in untouched if line not in after.splitlines()] == []


def test_what_is_left_out_counts_as_accelerate_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(SHORT_V1)
    changed = yaml.safe_load(re_edited(path, "--mixed-precision", "bf16", "--state-dict-type", "SHARDED_STATE_DICT"))
    assert changed["mixed_precision"] == "bf16"
    assert changed["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert "fsdp_backward_prefetch" not in changed["fsdp_config"]


@pytest.mark.parametrize("new", ["", "new.yaml"])
def test_the_diff_names_the_file_that_was_read_and_the_one_that_is_written(
    new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "old.yaml", tmp_path / (new or "old.yaml")
    path.write_text(V2)
    options = wizard.WizardOptions(from_file=path, yes=True, output=output if new else None)
    flags = {"model": "meta-llama/Llama-3.1-8B", "mixed_precision": "fp16"}
    assert wizard.configure(options, flags) == 0
    said = "".join(capsys.readouterr().err.split())
    assert f"---{path}+++{output}@@" in said
    assert (path.read_text() == V2) == bool(new)


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_another_engine_leaves_nothing_of_the_old_one(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("# mine\n" + V2 + "  fsdp_ignored_modules: model.head\n")
    text = re_edited(path, "--engine", engine)
    assert "fsdp_config" not in yaml.safe_load(text)
    assert text.startswith("# mine\n")
    assert [one for one in linter.lint(path, linter.LintOptions()) if one.severity != "note"] == []


def test_a_migrated_file_stays_what_it_is(tmp_path: Path) -> None:
    """Its header still names the method of before, QLoRA, which ZeRO-3 can't do."""
    path = tmp_path / "zero3.yaml"
    words = ["migrate", ROOT / "accelerate_configs/fsdp2_qlora.yaml", "--to", "zero3", "-o", path]
    assert accel_fsdp(*words).code == 0
    before = yaml.safe_load(path.read_text())
    assert yaml.safe_load(re_edited(path)) == before


def test_an_engine_that_the_wizard_has_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "megatron.yaml"
    path.write_text("distributed_type: MEGATRON_LM\nnum_processes: 2\n")
    refused = accel_fsdp("config", "--yes", "--from", path, "--model", "gpt2")
    assert refused.code == 2
    assert "MEGATRON_LM can't be re-edited" in refused.output
    assert path.read_text() == "distributed_type: MEGATRON_LM\nnum_processes: 2\n"
