"""A run that goes on from a checkpoint with other settings: refused, or allowed and told for good."""

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from conftest import Finished, accel_fsdp

from accel_fsdp import atomic_files
from accel_fsdp.checkpoints import completeness, file_names

Sft = Callable[..., Finished]


def words(model: Path, data: Path, output: Path, **more: object) -> list[str]:
    fixed = {
        "model_name_or_path": model,
        "dataset_name": data,
        "output_dir": output,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "disable_tqdm": "true",
    }
    return [str(word) for name, value in {**fixed, **more}.items() for word in (f"--{name}", value)]


@pytest.fixture
def stopped(sft: Sft, tiny_model: Path, text_data: Path, tmp_path: Path) -> Path:
    """A run of four steps of which the last two are gone."""
    finished = sft(*words(tiny_model, text_data, tmp_path / "run"))
    assert finished.code == 0, finished.output
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    return tmp_path / "run"


def test_other_settings_are_refused_and_named(
    stopped: Path, sft: Sft, tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(reversed(text_data.read_text().splitlines(keepends=True))))
    moved = tmp_path / "moved.jsonl"
    moved.write_text(text_data.read_text())
    changed = {
        "learning_rate 0.001 → 0.01": {"learning_rate": 1e-2},
        "lr_scheduler_type linear → cosine": {"lr_scheduler_type": "cosine"},
        "warmup_steps 0 → 1": {"warmup_steps": 1},
        "weight_decay 0 → 0.1": {"weight_decay": 0.1},
        "optim adamw_torch → sgd": {"optim": "sgd"},
        "seed 42 → 7": {"seed": 7},
        "train_sampling_strategy random → sequential": {"train_sampling_strategy": "sequential"},
        "packing none → 64": {"packing": "true", "max_length": 64},
        "content of the rows (other tokens)": {"dataset_name": other},
        "max_length 1024 → 12": {"max_length": 12},
        "--max_steps 1, but": {"max_steps": 1},
    }
    for message, flags in changed.items():
        refused = sft(*words(tiny_model, text_data, stopped, resume_from_checkpoint="true", **flags))
        assert refused.code == 1, message
        assert message in refused.output, refused.output
        assert "Traceback" not in refused.output
    same = sft(*words(tiny_model, moved, stopped, resume_from_checkpoint="true"))
    assert same.code == 0, same.output
    assert f"resumed: {stopped / 'checkpoint-2'}, after 2 steps" in same.output
    assert "changed from here on" not in same.output
    assert len(json.loads((stopped / "run.json").read_text())["segments"]) == 1


def test_what_was_allowed_is_told_by_card_and_account_for_good(
    stopped: Path, sft: Sft, tiny_model: Path, text_data: Path
) -> None:
    """The account goes with the checkpoints: a third session knows of the first two."""
    more = {"resume_from_checkpoint": "true", "resume_with_changes": "true", "learning_rate": 1e-2, "seed": 7}
    second = sft(*words(tiny_model, text_data, stopped, **more))
    assert second.code == 0, second.output
    assert "changed from here on: learning_rate 0.001 → 0.01" in second.output
    shutil.rmtree(stopped / "final")
    third = sft(*words(tiny_model, text_data, stopped, **{**more, "max_steps": 5, "learning_rate": 1e-4}))
    assert third.code == 0, third.output
    segments = json.loads((stopped / "run.json").read_text())["segments"]
    assert [(segment["first_step"], segment["last_step"]) for segment in segments] == [(1, 2), (3, 4), (5, 5)]
    assert [segment["settings"]["schedule"]["learning_rate"] for segment in segments] == [1e-3, 1e-2, 1e-4]
    assert [segment["settings"]["order"]["seed"] for segment in segments] == [42, 7, 7]
    card = (stopped / "final" / "README.md").read_text()
    assert "| steps | order: seed | schedule: learning_rate | length: max_steps |" in card
    assert "| 1 to 2 | 42 | 0.001 | 4 |" in card
    assert "| 5 to 5 | 7 | 0.0001 | 5 |" in card


def test_the_account_says_which_steps_are_of_this_session(
    stopped: Path, sft: Sft, tiny_model: Path, text_data: Path
) -> None:
    """Log and losses are the whole run's, tokens and arguments the last session's, which may have another batch."""
    more = {"resume_from_checkpoint": "true", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    second = sft(*words(tiny_model, text_data, stopped, **more))
    assert second.code == 0, second.output
    assert "changed from here on: per_device_train_batch_size 4 → 2" in second.output
    record = json.loads((stopped / "run.json").read_text())
    assert record["session"] == {"first_step": 3, "last_step": 4}
    assert [row["step"] for row in record["log"] if "loss" in row] == [1, 2, 3, 4]
    card = (stopped / "final" / "README.md").read_text()
    assert "| steps | ranks: per_device_train_batch_size | ranks: gradient_accumulation_steps |" in card
    assert "| 1 to 2 | 4 | 1 |" in card
    assert "Those under Arguments are of its last session." in card


def test_spoilt_bytes_are_passed_over_and_named(stopped: Path, sft: Sft, tiny_model: Path, text_data: Path) -> None:
    """The newest one has a flipped byte, which resumed into another model before; the one before it is whole."""
    again = words(tiny_model, text_data, stopped, resume_from_checkpoint="true")
    assert sft(*again).code == 0
    shutil.rmtree(stopped / "final")
    path = stopped / "checkpoint-4" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 64
    path.write_bytes(content)
    named = sft(*words(tiny_model, text_data, stopped, resume_from_checkpoint=stopped / "checkpoint-4"))
    assert named.code == 1
    assert "model.safetensors has changed since it was written" in named.output
    exported = accel_fsdp("export", stopped / "checkpoint-4", stopped / "out")
    assert exported.code == 1
    assert "model.safetensors has changed since it was written" in exported.output
    resumed = sft(*again)
    assert resumed.code == 0, resumed.output
    assert "checkpoint-4: model.safetensors has changed since it was written" in resumed.output
    assert "resumed:" in resumed.output
    assert "checkpoint-2, after 2 steps" in resumed.output


def test_a_step_that_cannot_be_saved_again_is_still_there(
    stopped: Path, sft: Sft, tiny_model: Path, text_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for the marker that a save begins with, or for the one that ends it."""
    again = words(tiny_model, text_data, stopped, resume_from_checkpoint=stopped / "checkpoint-2")
    assert sft(*again).code == 0
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
        full = sft(*again)
        assert full.code == 1
        assert f"error: cannot save {stopped}/checkpoint-4: the disk is full" in full.output, full.output
        assert f"{stopped}/checkpoint-4 is the newest complete checkpoint" in full.output
        assert "free some space, then --resume_from_checkpoint true" in full.output
        assert sorted(path.name for path in stopped.glob("*checkpoint*")) == ["checkpoint-2", "checkpoint-4"]
        assert completeness.choose(stopped).newest == stopped / "checkpoint-4"
