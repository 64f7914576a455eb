"""Files written past the system's cache have the bytes that were given, whatever the disk offers; turns end at once."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from accel_fsdp.hardware import host
from accel_fsdp.training import background_saves, uncached_files
from accel_fsdp.training.uncached_files import UncachedFiles

PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def written(path: Path, parts: list[bytes]) -> str:
    """The hash of the file."""
    files = UncachedFiles(lambda: None)
    with files.create_stream(path, "wb") as file:
        for count, part in enumerate(parts):
            assert file.tell() == sum(map(len, parts[:count]))
            assert file.write(part) == len(part)
    return files.hashes[path]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 5 * PAGE_BYTES), max_size=8), of_piece=st.sampled_from([1, 2, 7]))
def test_any_parts_make_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], of_piece: int
) -> None:
    parts = [os.urandom(size) for size in sizes]
    path = tmp_path_factory.mktemp("any") / "file"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(uncached_files, "PIECE_BYTES", of_piece * PAGE_BYTES)
        hashed = written(path, parts)
    assert path.read_bytes() == b"".join(parts)
    assert hashed == xxhash.xxh3_128(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("lacking", ["O_DIRECT", "its unit"])
def test_a_disk_that_cannot_has_the_same_file(tmp_path: Path, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1,000 bytes are smaller than any disk's unit, so that the first write is refused."""
    if lacking == "O_DIRECT":
        monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.setattr(uncached_files, "PIECE_BYTES", 1000)
    content = os.urandom(10_500)
    written(tmp_path / "file", [content])
    assert (tmp_path / "file").read_bytes() == content


def test_a_full_disk_is_an_error_and_the_file_is_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left on device"):
        written(Path("/dev/full"), [bytes(PAGE_BYTES)])
    assert set(os.listdir("/proc/self/fd")) <= before


def test_training_that_waits_ends_the_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next turn in half a century, only the wait can let the write go on."""
    monkeypatch.setattr(host, "cores", lambda: 1)
    monkeypatch.setattr(background_saves, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(background_saves, "TURNS_EVERY_SECONDS", time.time() * 2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        saves = background_saves.BackgroundSaves(60.0)
        written_files: list[Path] = []
        for value in (1.0, 2.0):
            folder = tmp_path / f"{value:g}"
            with saves.staging():
                content = {"weight": torch.full((3_000_000,), value)}
                dcp.save(content, storage_writer=FileSystemWriter(folder))  # type: ignore[attr-defined]
            saves.begin(lambda write: written_files.extend(write()))
            time.sleep(0.5)
            assert folder / "__0_0.distcp" not in written_files
            saves.wait()
            assert folder / "__0_0.distcp" in written_files
            read = {"weight": torch.zeros(3_000_000)}
            dcp.load(read, checkpoint_id=folder)  # type: ignore[attr-defined]
            assert torch.equal(read["weight"], torch.full((3_000_000,), value))
    finally:
        dist.destroy_process_group()
