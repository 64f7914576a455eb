"""`checkpoints.store`: at no moment of an upload or a deletion does a store show a checkpoint that isn't whole."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from accel_fsdp.checkpoints import Damaged, Origin, Store, completeness, marker, store
from accel_fsdp.training import stored

FILES = {"pytorch_model_fsdp_0/__0_0.distcp": 30, "pytorch_model_fsdp_0/.metadata": 5, "trainer_state.json": 0}


class Down(Exception):
    """As each library has its own."""


def checkpoint(run: Path, step: int, letter: str, files: dict[str, int] | None = None) -> Path:
    folder = run / f"checkpoint-{step}"
    completeness.begin(folder)
    for name, size in (files or FILES).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({"global_step": step, "log_history": []}) if not size else letter * size)
    completeness.seal(folder, Origin("FSDP", 2, 4))
    return folder


def failing(place: Store, after: int) -> Callable[[], int]:
    """Lets a store fail at a later change of it; returns what counts those that came before."""
    changes = 0
    files = place.files

    def wrapped(change: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes > after:
                raise Down("503 Slow Down")
            return change(*args, **options)

        return act

    for name in ("put_file", "pipe_file", "rm"):
        setattr(files, name, wrapped(getattr(files, name)))
    return lambda: changes


def put(uri: str, checkpoint: Path, machine: int = 0, machines: int = 1) -> bool:
    place = Store(uri)
    place.unseal(checkpoint.name)
    for name in list(marker.sizes_of(checkpoint))[machine::machines]:
        place.put(checkpoint, name)
    return place.seal(checkpoint, machine, machines)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


@pytest.fixture(autouse=True)
def _own_file_systems() -> Iterator[None]:
    """fsspec keeps one object for each store, which a test here changes."""
    yield
    LocalFileSystem.clear_instance_cache()


def test_no_moment_of_a_push_shows_half_a_checkpoint(tmp_path: Path, uri: str) -> None:
    """The same step is saved again with other content and fewer files, as after a resume from an earlier one."""
    first = checkpoint(tmp_path / "first", 8, "a", {**FILES, "rng_state_1.pth": 7})
    again = checkpoint(tmp_path / "again", 8, "b")
    wholes = [{name: (folder / name).read_bytes() for name in marker.sizes_of(folder)} for folder in (first, again)]
    seen = []
    for after in range(30):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        put(uri, first)
        place = Store(uri)
        place.files.clear_instance_cache()
        place = Store(uri)
        failing(place, after)
        try:
            put(uri, again)
        except Down:
            pass
        else:
            break
        finally:
            place.files.clear_instance_cache()
        name = Store(uri).newest()
        assert bool(name) == (completeness.choose(tmp_path / "store" / "run").newest is not None)  # read as a folder
        seen.append(name)
        if name:
            shutil.rmtree(tmp_path / "got", ignore_errors=True)
            Store(uri).get(name, tmp_path / "got")
            got = tmp_path / "got" / name
            assert {file: (got / file).read_bytes() for file in marker.sizes_of(got)} in wholes
    assert seen == ["checkpoint-8", *[""] * (len(seen) - 1)]
    assert len(seen) == 1 + 1 + len(FILES)  # its marker goes; the files and the marker come


def test_no_moment_of_a_deletion_shows_half_a_checkpoint(tmp_path: Path, uri: str) -> None:
    for step in (2, 4, 6):
        put(uri, checkpoint(tmp_path / "run", step, "a"))
    failing(Store(uri), 1)
    with pytest.raises(Down):
        Store(uri).retire(1, None)
    LocalFileSystem.clear_instance_cache()
    assert Store(uri).newest() == "checkpoint-6"
    assert not Store(uri).written("checkpoint-2").complete
    assert completeness.flaw(tmp_path / "store" / "run" / "checkpoint-2")
    Store(uri).retire(1, str(tmp_path / "run" / "checkpoint-4"))
    assert Store(uri).checkpoints() == ["checkpoint-4", "checkpoint-6"]
    Store(uri).unseal("checkpoint-8")
    Store(uri).retire(2, None)
    assert Store(uri).checkpoints() == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    Store(uri).retire(None, None)
    assert Store(uri).checkpoints() == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]


def test_the_marker_comes_once_all_machines_are_done(tmp_path: Path, uri: str) -> None:
    """The files of an earlier upload of that step, which never ended, have the same names and sizes."""
    old = checkpoint(tmp_path / "a", 8, "a")
    for name in marker.sizes_of(old):
        Store(uri).put(old, name)
    Store(uri).seal(old, 1, 2)
    new = checkpoint(tmp_path / "b", 8, "b")
    assert not put(uri, new, 0, 2)
    assert Store(uri).newest() == ""
    assert put(uri, new, 1, 2)
    assert put(uri, new, 0, 2)
    assert Store(uri).newest() == "checkpoint-8"
    assert set(Store(uri).names("checkpoint-8")) == {*marker.sizes_of(new), "complete.json"}
    Store(uri).get("checkpoint-8", tmp_path / "got")
    assert (tmp_path / "got" / "checkpoint-8" / next(iter(FILES))).read_text() == "b" * 30


def test_a_lost_object_is_damage(tmp_path: Path, uri: str) -> None:
    put(uri, checkpoint(tmp_path / "run", 8, "a"))
    (tmp_path / "store" / "run" / "checkpoint-8" / "trainer_state.json").unlink()
    with pytest.raises(Damaged, match=r"checkpoint-8: trainer_state\.json is missing"):
        Store(uri).get("checkpoint-8", tmp_path / "got")
    assert not list((tmp_path / "got").glob("*8*"))


def test_a_checkpoint_that_is_deleted_for_a_newer_one(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its upload ends without a word, and the newer one is uploaded."""
    run, put_file = tmp_path / "run", Store.put
    ranks = {"process_index": 0, "local_process_index": 0, "world_size": 1, "save_on_each_node": False}
    args = SimpleNamespace(checkpoint_uri=uri, output_dir=str(run), upload_timeout=60, **ranks)
    uploads = stored.Uploads(SimpleNamespace(args=args, state=SimpleNamespace(best_model_checkpoint=None)), 1)
    monkeypatch.setattr(stored, "PAUSE_SECONDS", 0.01)

    def put_deleted(self: Store, folder: Path, name: str) -> None:
        if folder.name == "checkpoint-2":
            completeness.delete(folder)
        put_file(self, folder, name)

    monkeypatch.setattr(Store, "put", put_deleted)
    old = checkpoint(run, 2, "a")
    uploads.begin()
    while old.exists():
        time.sleep(0.01)
    uploads.offer(checkpoint(run, 4, "b"))
    assert uploads.finish() == ""
    assert [name for name in Store(uri).checkpoints() if Store(uri).written(name).complete] == ["checkpoint-4"]
    assert "can't be uploaded" not in capfd.readouterr().err


URIS = ("s3://bucket", "gs://bucket/a b/c._-1", "abfs+x.y://host/run", "file:///folder/run")
PATHS = ("run", "a b/c._-1", "/folder/run", "C:\\runs\\first", "C:/runs/first", "-")


@pytest.mark.parametrize(("place", "uri"), [*zip(URIS, URIS, strict=True), *((path, "") for path in PATHS)])
def test_a_uri_is_told_from_a_path(place: str, uri: str) -> None:
    """Flags for paths make one slash of two."""
    assert store.uri_of(place) == store.uri_of(Path(place)) == store.uri_of(f"{place}/") == uri
