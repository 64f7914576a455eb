"""Checkpoints of a megabyte that ask for hours or for all memory: each is refused in seconds, in little memory."""

import json
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT, accel_fsdp
from torch.distributed.checkpoint import save as save_dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

SECONDS, BYTES = 10, 1 << 30
TIMES = 5000
BIG = 900_000
CALLS = {
    "text into bytes": (b"c_codecs\nencode\n", b"X" + BIG.to_bytes(4, "little") + b"a" * BIG + b"\x85"),
    "a set of many": (
        b"cbuiltins\nset\n",
        b"(" + b"".join(b"J" + i.to_bytes(4, "little") for i in range(BIG // 5)) + b"l\x85",
    ),
    "a mapping of many": (
        b"ccollections\nOrderedDict\n",
        b"(" + b"".join(b"J" + i.to_bytes(4, "little") + b"N\x86" for i in range(BIG // 7)) + b"l\x85",
    ),
    "a size of many": (b"ctorch\nSize\n", b"(" + b"K\x01" * (BIG // 2) + b"t\x85"),
    "many arguments": (b"cpathlib\nPosixPath\n", b"(" + b"K\x01" * (BIG // 2) + b"t"),
    "a name of shared parts": (
        b"cbuiltins\ngetattr\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n" + b"N\x85" + b"2\x86" * 60 + b"\x86",
    ),
}
"""A function, and its arguments: both are kept, and the one is called with the other again and again."""


def called(function: bytes, arguments: bytes) -> bytes:
    return b"\x80\x02" + function + b"q\x010" + arguments + b"q\x020(" + b"h\x01h\x02R" * TIMES + b"l."


def shared_lists() -> bytes:
    return b"\x80\x02]q\x00" + b"".join(b"]q%c(h%ch%ce" % (at + 1, at, at) for at in range(200)) + b"."


def many_marks() -> bytes:
    return b"\x80\x02" + b"(" * 1_000_000 + b"."


def in_metadata(content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / ".metadata").write_bytes(content)
        (folder / "__0_0.distcp").write_bytes(b"")

    return write


def in_file(content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        with zipfile.ZipFile(folder / "model.pth", "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/data/0", bytes(4))

    return write


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
LONG_KEY = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX" + BIG.to_bytes(4, "little") + b"k" * BIG + b"NK\x01t"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x00K\x01\x85K\x01\x85\x89}tR"
ODD_DTYPE = b"ctorch._utils\n_rebuild_tensor_v3\n(" + STORAGE + b"K\x00))\x89}N\x85" + b"2\x86" * 60 + b"tR."


def long_names() -> bytes:
    """One long name, below which thousands of tensors lie."""
    tensors = (
        b"}" + TENSOR + b"q\x010(" + b"".join(b"M" + i.to_bytes(2, "little") + b"h\x01" for i in range(5000)) + b"u"
    )
    return b"\x80\x02}X" + BIG.to_bytes(4, "little") + b"n" * BIG + tensors + b"s."


def one_archive_often(folder: Path) -> None:
    """Thousands of tensors in one archive, which takes long to read."""
    odd = {"w": torch.ones(1), "rest": [[] for _ in range(100_000)]}
    torch.save(odd, folder / "__0_0.distcp")
    length = (folder / "__0_0.distcp").stat().st_size
    properties = TensorProperties(dtype=torch.float32)
    size = torch.Size((1,))
    listed = Metadata(
        {
            str(i): TensorStorageMetadata(properties, size, [ChunkStorageMetadata(torch.Size((0,)), size)])
            for i in range(5000)
        },
        storage_data={
            MetadataIndex(str(i), torch.Size((0,))): _StorageInfo("__0_0.distcp", 0, length) for i in range(5000)
        },
    )
    (folder / ".metadata").write_bytes(pickle.dumps(listed))


MEASURE = f"""
import json, resource, subprocess, sys
limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, ({10 * SECONDS}, {10 * SECONDS}))
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=limit)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, done.stdout, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""
"""A process of its own: what a child takes counts what the process that forked it holds, and pytest holds gigabytes."""
BOMBS: dict[str, Callable[[Path], None]] = {
    **{name: in_metadata(called(*call)) for name, call in CALLS.items()},
    "shared lists": in_metadata(shared_lists()),
    "many marks": in_metadata(many_marks()),
    "a long key of a storage": in_file(b"\x80\x02" + LONG_KEY + b"q\x010(" + b"h\x01Q" * TIMES + b"l."),
    "a dtype of shared parts": in_file(b"\x80\x02" + ODD_DTYPE),
    "long names": in_file(long_names()),
    "one archive often": one_archive_often,
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    BOMBS[name](source)
    assert sum(path.stat().st_size for path in source.iterdir()) < 4 << 20
    words = [sys.executable, "-m", "accel_fsdp", "export", source, tmp_path / "out", "--verify", "bytes"]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    code, output, seconds, kib = json.loads(measured.stdout)
    assert code == 1, output
    assert "is damaged: " in output
    assert seconds < SECONDS
    assert kib << 10 < BYTES


def test_numbers_in_a_tuple_are_no_key(tmp_path: Path) -> None:
    """Their hashes can be made to agree, and a mapping of such keys takes time by the square of its length."""
    in_metadata(pickle.dumps({(1, 2): None}, protocol=2))(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused = accel_fsdp("export", tmp_path, tmp_path / "out", "--verify", "bytes")
    assert refused.code == 1
    assert "an impossible key" in refused.output


def test_a_tensor_of_many_parts_takes_time_in_proportion(tmp_path: Path) -> None:
    """Boxes of two dimensions, cut so that none ends before the last one begins."""
    from accel_fsdp.checkpoints import FileRecord, Piece, tensor

    record = FileRecord(tmp_path, 0, 0)

    def seconds(count: int) -> float:
        pieces = [Piece(record, (0, i), (count, 1)) for i in range(count // 2)]
        pieces += [Piece(record, (i, count // 2), (1, count - count // 2)) for i in range(count)]
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        tensor("w", "F32", (count, count), pieces)
        return resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun

    assert seconds(32_000) < 30 * seconds(4_000)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_honest_checkpoints_of_all_shapes_are_read(tmp_path: Path) -> None:
    """Thousands of small tensors, optimizers, lists of groups and settings stay within what a pickle may take."""
    from accel_fsdp.checkpoints import FileReader, dcp, torch_zip

    state = {f"model.layers.{i}.mlp.experts.{j}.weight": torch.zeros(2, 2) for i in range(20) for j in range(50)}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.99), "params": list(range(1000))}]
    optimizer = {"state": {i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)} for i in range(500)}}
    settings = {"callbacks": {str(i): {} for i in range(2000)}, "loops": [[] for _ in range(2000)]}
    torch.save({"model": state, "optimizer": {**optimizer, "param_groups": groups}, **settings}, tmp_path / "all.pth")
    assert torch_zip.load(FileReader(), tmp_path / "all.pth")["model"].keys() == state.keys()
    save_dcp({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert len(dcp.read(tmp_path / "dcp", FileReader())) == len(state)
