"""`--async_checkpoints`: what is written in the background is what Trainer would write, and training doesn't wait."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Finished

from accel_fsdp.checkpoints import completeness, file_names

Launches = Callable[..., Finished]
SCARCE = ROOT / "tests" / "scarce.py"
AXES = {"fsdp2": {}, "fsdp1": {"fsdp_version": "1"}, "tp3": {"tp": "3", "num_processes": "3"}}


def hashes(checkpoint: Path) -> dict[str, str]:
    """Those of the states: the descriptions have times and random names."""
    listed: dict[str, str] = json.loads((checkpoint / file_names.MARKER).read_text())["hashes"]
    return {name: digest for name, digest in listed.items() if name.endswith((".distcp", ".pt", ".pth"))}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("axes", AXES)
def test_the_same_files_while_training_goes_on(axes: str, launches: Launches, tmp_path: Path) -> None:
    """Each step changes what is saved after the one before it, so a copy that came late would differ."""
    args = ("--save_strategy", "steps", "--save_steps", "1", "--max_steps", "3")
    outputs = [
        launches(*args, *flags, into=f"run{number}", answers=AXES[axes]).output
        for number, flags in enumerate(((), ("--async_checkpoints",)))
    ]
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


def test_without_shards_or_memory_it_stops_before_a_step(launches: Launches) -> None:
    more = ("--max_steps", "1", "--async_checkpoints")
    whole = launches(*more, answers={"state_dict_type": "FULL_STATE_DICT"}, fails=True)
    assert "error: --async_checkpoints without shards" in whole.output
    scarce = launches(*more, script=SCARCE, SCARCE="host", fails=True).output
    assert re.search(r"--async_checkpoints copies [\d.]+ MiB of shards to a host's memory, 0\.0 MiB are free", scarce)
    assert "  loss " not in scarce


def test_what_is_being_written_is_completed_before_a_run_fails(launches: Launches, tmp_path: Path) -> None:
    """The second step diverges while the first one's checkpoint is still being written."""
    flags = ("--max_steps", "2", "--save_steps", "1", "--async_checkpoints")
    failed = launches(*flags, script=SCARCE, SCARCE="time", fails=True)
    assert "error: training diverged: in step 2" in failed.output, failed.output
    assert not completeness.flaw(tmp_path / "run" / "checkpoint-1")
    assert not (tmp_path / "run" / "checkpoint-2").exists()
