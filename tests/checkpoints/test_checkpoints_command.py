"""`accel-fsdp checkpoints`: what a run holds, and what is deleted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished, here

from accel_fsdp import atomic_files

EVALUATED = "--max_steps 6 --save_steps 2 --eval_steps 2 --eval_strategy steps --dataset_test_split train"


@pytest.fixture
def run(trains: Callable[..., Finished], tmp_path: Path) -> Path:
    """A run of six steps with a checkpoint and a held-out loss at each second one."""
    trains(*EVALUATED.split(), "--learning_rate", "0.01", "--max_length", "32")
    return tmp_path / "run"


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name[11:]) for path in run.glob("checkpoint-*"))


def test_a_table_and_what_is_deleted(run: Path) -> None:
    log = json.loads((run / "checkpoint-6/trainer_state.json").read_text())["log_history"]
    held_out, losses = ({entry["step"]: entry[key] for entry in log if key in entry} for key in ("eval_loss", "loss"))
    rows = {row["step"]: row for row in json.loads(here("checkpoints", run, "--json").printed)}
    assert list(rows) == [2, 4, 6]
    assert {step: row["eval_loss"] for step, row in rows.items()} == held_out
    assert {step: row["loss"] for step, row in rows.items()} == {step: losses[step] for step in rows}
    assert all(row["complete"] and row["engine"] == "DDP" and row["ranks"] == 1 for row in rows.values())
    size = sum(path.stat().st_size for path in (run / "checkpoint-2").rglob("*") if path.is_file())
    assert rows[2]["size_bytes"] == size
    best = min(held_out, key=lambda step: held_out[step])
    assert [step for step, row in rows.items() if row["is_best"]] == [best]

    (run / "checkpoint-4/optimizer.pt").unlink()
    table = here("checkpoints", run).printed
    assert "optimizer.pt is missing" in table
    assert "complete, newest" in table
    assert "would be deleted" in here("checkpoints", run, "--delete", "2", "--dry-run").printed
    assert steps_of(run) == [2, 4, 6]
    assert here("checkpoints", run, "--delete", "2").code == 0
    assert steps_of(run) == [4, 6]
    refused = here("checkpoints", run, "--delete", "4,6")
    assert refused.code == 1
    assert f"no complete checkpoint of {run} would be left" in refused.text
    assert not list(run.glob(".checkpoint*"))


def test_what_is_wrong_deletes_nothing(run: Path, tmp_path: Path) -> None:
    for folder, words, said in (
        (run, ("--delete", "40"), "holds no checkpoint-40. Did you mean 4?"),
        (run, ("--delete", "2,5"), "holds no checkpoint-5"),
        (tmp_path, (), "holds no checkpoint-N"),
        (tmp_path / "none", (), "is not a folder"),
        (run / "checkpoint-2", (), "is a checkpoint"),
    ):
        refused = here("checkpoints", folder, *words)
        assert refused.code == 2
        assert said in refused.text
    (run / "checkpoint-6/complete.json").write_text('{"complete": false}')  # as while it is written
    held = atomic_files.only_run(run)
    assert "another run is writing" in here("checkpoints", run, "--delete", "6").text
    held.release()
    assert steps_of(run) == [2, 4, 6]
    assert here("checkpoints", run, "--delete", "6").code == 0
    assert steps_of(run) == [2, 4]
