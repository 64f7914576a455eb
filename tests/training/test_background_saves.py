"""`--async_checkpoints`: what is written in the background is what Trainer would write, and training doesn't wait."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, SFT, accelerate_launch
from test_training import make_config, sft_args

from accel_fsdp.checkpoints import completeness, file_names

SCARCE = ROOT / "tests" / "scarce.py"
AXES = {"fsdp2": {}, "fsdp1": {"fsdp_version": "1"}, "tp3": {"tp": "3", "num_processes": "3"}}


def hashes(checkpoint: Path) -> dict[str, str]:
    """Those of the states: the descriptions have times and random names."""
    listed: dict[str, str] = json.loads((checkpoint / file_names.MARKER).read_text())["hashes"]
    return {name: digest for name, digest in listed.items() if name.endswith((".distcp", ".pt", ".pth"))}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("axes", AXES)
def test_the_same_files_while_training_goes_on(axes: str, tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """Each step changes what is saved after the one before it, so a copy that came late would differ."""
    config = make_config(tmp_path, tiny_model, **AXES[axes])
    args = ("--save_strategy", "steps", "--save_steps", "1", "--max_steps", "3")
    outputs = []
    for flags in ((), ("--async_checkpoints",)):
        run = tmp_path / f"run{len(outputs)}"
        finished = accelerate_launch(config, SFT, *sft_args(tiny_model, text_data, run, *args, *flags))
        assert finished.code == 0, finished.output
        outputs.append(finished.output)
    for step in (1, 2, 3):
        in_line, behind = (hashes(tmp_path / f"run{number}" / f"checkpoint-{step}") for number in (0, 1))
        assert len(in_line) > 5
        assert behind == in_line
        assert not completeness.flaw(tmp_path / "run1" / f"checkpoint-{step}")
        [begun] = re.findall(
            rf"checkpoint-{step} is being written; training waited [\d.]+ m?s for its copy", outputs[1]
        )
        assert outputs[1].index(begun) < outputs[1].index(f"checkpoint-{step} is complete, written in ")
    assert "is being written" not in outputs[0]


def test_without_shards_or_memory_it_stops_before_a_step(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    args = sft_args(tiny_model, text_data, tmp_path / "run", "--max_steps", "1", "--async_checkpoints")
    whole = accelerate_launch(make_config(tmp_path, tiny_model, state_dict_type="FULL_STATE_DICT"), SFT, *args)
    assert whole.code == 1
    assert "error: --async_checkpoints without shards" in whole.output
    scarce = accelerate_launch(make_config(tmp_path, tiny_model), SCARCE, *args, SCARCE="host")
    assert scarce.code == 1
    assert re.search(
        r"--async_checkpoints copies [\d.]+ MiB of shards to a host's memory, 0\.0 MiB are free", scarce.output
    )
    assert "  loss " not in scarce.output


def test_what_is_being_written_is_completed_before_a_run_fails(
    tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """The second step diverges while the first one's checkpoint is still being written."""
    flags = ("--max_steps", "2", "--save_steps", "1", "--async_checkpoints")
    args = sft_args(tiny_model, text_data, tmp_path / "run", *flags)
    failed = accelerate_launch(make_config(tmp_path, tiny_model), SCARCE, *args, SCARCE="time")
    assert failed.code == 1
    assert "error: training diverged: in step 2" in failed.output, failed.output
    assert not completeness.flaw(tmp_path / "run" / "checkpoint-1")
    assert not (tmp_path / "run" / "checkpoint-2").exists()
