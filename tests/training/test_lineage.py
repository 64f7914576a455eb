"""A run that goes on from a checkpoint with other settings: refused, or allowed and told for good."""

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from conftest import Finished, here

from accel_fsdp import atomic_files
from accel_fsdp.checkpoints import completeness, file_names

Trains = Callable[..., Finished]
SAVED = ("--save_steps", "2")
RESUMED = (*SAVED, "--resume_from_checkpoint", "true")
CHANGED = {
    "learning_rate 0.001 → 0.01": ("--learning_rate", "1e-2"),
    "lr_scheduler_type constant → cosine": ("--lr_scheduler_type", "cosine"),
    "warmup_steps 0 → 1": ("--warmup_steps", "1"),
    "weight_decay 0 → 0.1": ("--weight_decay", "0.1"),
    "optim adamw_torch → sgd": ("--optim", "sgd"),
    "seed 42 → 7": ("--seed", "7"),
    "train_sampling_strategy sequential → random": ("--train_sampling_strategy", "random"),
    "packing none → 64": ("--packing", "true", "--max_length", "64"),
    "max_length 1024 → 12": ("--max_length", "12"),
    "--max_steps 1, but": ("--max_steps", "1"),
}


@pytest.fixture
def stopped(trains: Trains, tmp_path: Path) -> Path:
    """A run of four steps of which the last two are gone."""
    trains(*SAVED)
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    return tmp_path / "run"


def account(run: Path) -> dict:
    content: dict = json.loads((run / "run.json").read_text())
    return content


def test_other_settings_are_refused_and_named(stopped: Path, trains: Trains, text_data: Path, tmp_path: Path) -> None:
    other, moved = tmp_path / "other.jsonl", tmp_path / "moved.jsonl"
    other.write_text("".join(reversed(text_data.read_text().splitlines(keepends=True))))
    moved.write_text(text_data.read_text())
    for message, flags in CHANGED.items():
        refused = trains(*RESUMED, *flags, code=1)
        assert message in refused.output, refused.output
        assert "Traceback" not in refused.output
    assert "content of the rows (other tokens)" in trains(*RESUMED, data=other, code=1).output
    same = trains(*RESUMED, data=moved)
    assert f"resumed: {stopped / 'checkpoint-2'}, after 2 steps" in same.output
    assert "changed from here on" not in same.output
    assert len(account(stopped)["segments"]) == 1


def test_what_was_allowed_is_told_by_card_and_account_for_good(stopped: Path, trains: Trains) -> None:
    """The account goes with the checkpoints: a third session knows of the first two.

    Log and losses are the whole run's, tokens and arguments the last session's, which may have another batch.
    """
    more = (*RESUMED, "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2")
    second = trains(*more, "--resume_with_changes", "true", "--learning_rate", "1e-2", "--seed", "7")
    assert "changed from here on: learning_rate 0.001 → 0.01" in second.output
    assert "per_device_train_batch_size 2 → 1" in second.output
    assert account(stopped)["session"] == {"first_step": 3, "last_step": 4}
    assert [row["step"] for row in account(stopped)["log"] if "loss" in row] == [1, 2, 3, 4]
    shutil.rmtree(stopped / "final")
    changed = ("--resume_with_changes", "true", "--max_steps", "5", "--learning_rate", "1e-4", "--seed", "7")
    trains(*more, *changed)
    segments = account(stopped)["segments"]
    assert [(segment["first_step"], segment["last_step"]) for segment in segments] == [(1, 2), (3, 4), (5, 5)]
    assert [segment["settings"]["schedule"]["learning_rate"] for segment in segments] == [1e-3, 1e-2, 1e-4]
    assert [segment["settings"]["order"]["seed"] for segment in segments] == [42, 7, 7]
    card = (stopped / "final" / "README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in card.splitlines()]
    told = [row for row in rows if row[0] in ("steps", "1 to 2", "5 to 5")]
    columns = ["order: seed", "schedule: learning_rate", "length: max_steps", "ranks: per_device_train_batch_size"]
    assert told == [
        ["steps", *columns, "ranks: gradient_accumulation_steps"],
        ["1 to 2", "42", "0.001", "4", "2", "1"],
        ["5 to 5", "7", "0.0001", "5", "1", "2"],
    ]
    assert "Those under Arguments are of its last session." in card


def test_spoilt_bytes_are_passed_over_and_named(stopped: Path, trains: Trains) -> None:
    """The newest one has a flipped byte, which resumed into another model before; the one before it is whole."""
    trains(*RESUMED)
    shutil.rmtree(stopped / "final")
    path, fault = stopped / "checkpoint-4" / "model.safetensors", "model.safetensors has changed since it was written"
    content = bytearray(path.read_bytes())
    content[-5] ^= 64
    path.write_bytes(content)
    assert fault in trains(*SAVED, "--resume_from_checkpoint", path.parent, code=1).output
    exported = here("export", path.parent, stopped / "out")
    assert exported.code == 1
    assert fault in exported.text
    resumed = trains(*RESUMED)
    assert f"checkpoint-4: {fault}" in resumed.output
    assert f"resumed: {stopped / 'checkpoint-2'}, after 2 steps" in resumed.output


def test_a_step_that_cannot_be_saved_again_is_still_there(
    stopped: Path, trains: Trains, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for the marker that a save begins with, or for the one that ends it."""
    again = (*SAVED, "--resume_from_checkpoint", stopped / "checkpoint-2")
    trains(*again)
    make, left = atomic_files.new_file, 0  # markers for which there is room

    def scarce(path: Path) -> AbstractContextManager[Path]:
        nonlocal left
        if path.name == file_names.MARKER:
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return make(path)

    monkeypatch.setattr(atomic_files, "new_file", scarce)
    for room in (0, 1):
        left = room
        shutil.rmtree(stopped / "final", ignore_errors=True)
        output = trains(*again, code=1).output
        assert f"error: cannot save {stopped}/checkpoint-4: the disk is full" in output
        assert f"{stopped}/checkpoint-4 is the newest complete checkpoint" in output
        assert "free some space, then --resume_from_checkpoint true" in output
        assert sorted(path.name for path in stopped.glob("*checkpoint*")) == ["checkpoint-2", "checkpoint-4"]
        assert completeness.choose(stopped).newest == stopped / "checkpoint-4"
