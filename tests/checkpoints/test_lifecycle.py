"""Checkpoints of runs that were killed at any moment: none is lost, and none is taken for complete that isn't."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.local import LocalFileSystem

from accel_fsdp import cli
from accel_fsdp.checkpoints import Origin, completeness
from accel_fsdp.errors import UserError
from accel_fsdp.training import resuming


def complete(run: Path, *steps: int) -> None:
    for step in steps:
        folder = run / f"checkpoint-{step}"
        completeness.begin(folder)
        (folder / "model.safetensors").write_text("x" * step)
        (folder / "trainer_state.json").write_text("{}")
        completeness.seal(folder, Origin("FSDP"))


def chosen(run: Path) -> Path | None:
    training = SimpleNamespace(output_dir=str(run), resume_from_checkpoint="true", checkpoint_uri=None)
    training.process_index, training.world_size, training.should_save, training.save_on_each_node = 0, 1, True, False
    return resuming.newest(training)


@pytest.mark.parametrize("moment", ["after the rename", "after the marker", "after a file"])
def test_a_step_that_was_being_saved_again_is_not_lost(moment: str, tmp_path: Path) -> None:
    """The run went on from step 20, and was killed while it completed step 40 again."""
    complete(tmp_path, 20, 40)
    if moment == "after the rename":
        os.replace(tmp_path / "checkpoint-40", tmp_path / ".checkpoint-40.old")
    else:
        completeness.begin(tmp_path / "checkpoint-40")
    if moment == "after a file":
        (tmp_path / "checkpoint-40" / "model.safetensors").write_text("half")
    completeness.retire(tmp_path, 1, None)
    assert chosen(tmp_path) == tmp_path / "checkpoint-40"
    assert (tmp_path / "checkpoint-40" / "model.safetensors").read_text() == "x" * 40
    completeness.retire(tmp_path, 1, None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-40"]


def test_what_is_partly_deleted_is_not_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(tmp_path, 20, 40)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed here
        completeness.delete(tmp_path / "checkpoint-40")
    assert chosen(tmp_path) == tmp_path / "checkpoint-20"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-20"]


@pytest.mark.parametrize("name", ["../../evil.txt", "inner/../../evil.txt", "/evil.txt"])
def test_an_object_outside_of_its_folder_is_not_fetched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of objects are any text; in a file system no name is like this."""
    run = tmp_path / "store" / "run"
    complete(run, 4)
    find = LocalFileSystem.find

    def find_evil(self: LocalFileSystem, path: str, **options: object) -> list[str]:
        return [*find(self, path, **options), f"{path}/{name}"]

    monkeypatch.setattr(LocalFileSystem, "find", find_evil)
    with pytest.raises(UserError, match="outside of its folder"):
        cli.call(["export", f"file://{run}", str(tmp_path / "out")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
