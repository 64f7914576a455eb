"""`accel-fsdp checkpoints`: what a run holds, and what is deleted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished

from accel_fsdp import atomic_files, cli
from accel_fsdp.checkpoints_command import checkpoints
from accel_fsdp.errors import UsageError, UserError

Sft = Callable[..., Finished]


@pytest.fixture
def run(sft: Sft, tiny_model: Path, text_data: Path, tmp_path: Path) -> Path:
    """A run of six steps with a checkpoint and a held-out loss at each second one."""
    folder = tmp_path / "run"
    flags = "--max_steps 6 --save_steps 2 --eval_steps 2 --eval_strategy steps --logging_steps 1 --learning_rate 0.01"
    data = ["--dataset_name", text_data, "--dataset_test_split", "train", "--max_length", "32"]
    ended = sft("--model_name_or_path", tiny_model, "--output_dir", folder, *data, *flags.split())
    assert ended.code == 0, ended.output
    return folder


def printed(capfd: pytest.CaptureFixture[str], *words: str | Path) -> str:
    capfd.readouterr()
    assert cli.call(["checkpoints", *map(str, words)]) == 0
    return capfd.readouterr().out


def test_a_table_and_what_is_deleted(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = json.loads((run / "checkpoint-6/trainer_state.json").read_text())["log_history"]
    held_out = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
    losses = {entry["step"]: entry["loss"] for entry in log if "loss" in entry}
    rows = {row["step"]: row for row in json.loads(printed(capfd, run, "--json"))}
    assert list(rows) == [2, 4, 6]
    assert {step: row["eval_loss"] for step, row in rows.items()} == held_out
    assert {step: row["loss"] for step, row in rows.items()} == {step: losses[step] for step in rows}
    assert all(row["complete"] and row["engine"] == "DDP" and row["ranks"] == 1 for row in rows.values())
    size = sum(path.stat().st_size for path in (run / "checkpoint-2").rglob("*") if path.is_file())
    assert rows[2]["size_bytes"] == size
    best = min(held_out, key=lambda step: held_out[step])
    assert [step for step, row in rows.items() if row["is_best"]] == [best]

    (run / "checkpoint-4/optimizer.pt").unlink()
    table = printed(capfd, run)
    assert "optimizer.pt is missing" in table
    assert "complete, newest" in table
    assert "would be deleted" in printed(capfd, run, "--delete", "2", "--dry-run")
    assert (run / "checkpoint-2").is_dir()
    printed(capfd, run, "--delete", "2")
    assert sorted(run.glob("checkpoint-*")) == [run / "checkpoint-4", run / "checkpoint-6"]
    with pytest.raises(UserError, match=r"no complete checkpoint of .* would be left"):
        cli.call(["checkpoints", str(run), "--delete", ",".join(path.name[11:] for path in run.glob("checkpoint-*"))])
    assert not list(run.glob(".checkpoint*"))


def test_what_is_wrong_deletes_nothing(run: Path, tmp_path: Path) -> None:
    for words, said in {
        ("--delete", "40"): "holds no checkpoint-40. Did you mean 4?",
        ("--delete", "2,5"): "holds no checkpoint-5",
    }.items():
        with pytest.raises(UsageError) as refused:
            cli.call(["checkpoints", str(run), *words])
        assert said in refused.value.what
    for folder, said in (
        (tmp_path, "holds no checkpoint-N"),
        (tmp_path / "none", "is not a folder"),
        (run / "checkpoint-2", "is a checkpoint"),
    ):
        with pytest.raises(UsageError, match=said):
            cli.call(["checkpoints", str(folder)])
    (run / "checkpoint-6/complete.json").write_text('{"complete": false}')  # as while it is written
    held = atomic_files.only_run(run)
    with pytest.raises(UserError, match="another run is writing"):
        cli.call(["checkpoints", str(run), "--delete", "6"])
    held.release()
    assert [item.step for item in checkpoints(run)] == [2, 4, 6]
    cli.call(["checkpoints", str(run), "--delete", "6"])
    assert [item.step for item in checkpoints(run)] == [2, 4]
