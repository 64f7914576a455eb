"""safetensors files, against the library itself: nothing is read otherwise, and nothing that it refuses."""

import random
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from accel_fsdp.checkpoints import DTYPES, discover, safetensors_files
from accel_fsdp.checkpoints.stored import bytes_of
from accel_fsdp.errors import UserError

PLACE = b'"dtype":"F32","shape":[1],"data_offsets":[0,4]'
GOOD = b'{"a":{%s}}' % PLACE
ODD = {
    "negative": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
    "negative shape": b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}',
    "overlap": b'{"a":{%s},"b":{%s}}' % (PLACE, PLACE),
    "hole": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[],"data_offsets":[2,4]}}',
    "longer than its shape": b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'.replace(b"[]", b"[0]"),
    "bytes left over": b'{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}',
    "no tensor": b"{}",
    "dtype": b'{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}',
    "list as dtype": b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
    "float": b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
    "minus nothing": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}',
    "truth": b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    "three places": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}}',
    "text as shape": b'{"a":{"dtype":"F32","shape":"1","data_offsets":[0,4]}}',
    "half a byte": b'{"a":{"dtype":"F4","shape":[7],"data_offsets":[0,4]}}',
    "beyond 64 bits": b'{"a":{"dtype":"F32","shape":[18446744073709551617],"data_offsets":[0,4]}}',
    "numbers as notes": b'{"__metadata__":{"x":1},"a":{%s}}' % PLACE,
    "list of notes": b'{"__metadata__":[],"a":{%s}}' % PLACE,
    "null": b"null",
    "list": b"[]",
    "text": b'"a"',
    "half a character": b'{"\\ud800":{%s}}' % PLACE,
    "behind its end": GOOD + b"\0",
    "field twice": b'{"a":{"dtype":"F16",%s}}' % PLACE,
    "deep": b'{"a":' * 50_000,
}
SAME = {
    "plain": GOOD,
    "spaces": b" " + GOOD + b"\n ",
    "no notes": b'{"__metadata__":null,"a":{%s}}' % PLACE,
    "escapes": b'{"\\u0061":{%s}}' % PLACE,
    "scalar": b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
    "empty ones": b'{"a":{%s},"b":{"dtype":"F32","shape":[4,0,3],"data_offsets":[4,4]}}' % PLACE,
    "exponents": b'{"a":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}}',
    "other floats": b'{"a":{"dtype":"F8_E4M3FNUZ","shape":[4],"data_offsets":[0,4]}}',
}


def file(header: bytes, data: bytes = b"\1\2\3\4") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def theirs(content: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        return {
            name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
            for name, tensor in deserialize(content)
        }
    except SafetensorError:
        return None


def ours(content: bytes, path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    path.write_bytes(content)
    try:
        tensors = safetensors_files.of_file(path)
    except UserError:
        return None
    return {
        name: (DTYPES[str(stored.dtype).removeprefix("torch.")], stored.shape, bytes(bytes_of(stored.load()).numpy()))
        for name, stored in tensors.items()
    }


@pytest.mark.parametrize("name", [*ODD, *SAME])
def test_files_are_read_as_the_library_reads_them(name: str, tmp_path: Path) -> None:
    content = file({**ODD, **SAME}[name])
    outcome = ours(content, tmp_path / "a.safetensors")
    assert (outcome is None) == (name not in SAME)
    assert outcome == theirs(content)


def test_flipped_bits_and_cut_files(tmp_path: Path) -> None:
    """Whatever the library refuses is refused, and what it doesn't is read as it reads it."""
    tensors = {f"layers.{i}.w": torch.arange(3.0 * i).view(3, i).to(kind) for i, kind in enumerate(KINDS)}
    content = bytearray(save(tensors, {"format": "pt"}))
    length = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for bit in random.Random(0).sample(range(8 * length), 500):
        content[bit // 8] ^= 1 << bit % 8
        outcome, right = ours(bytes(content), tmp_path / "a.safetensors"), theirs(bytes(content))
        assert outcome in (None, right), bytes(content[:length])
        refused += right is None
        content[bit // 8] ^= 1 << bit % 8
    assert 100 < refused < 500
    for end in range(0, len(content), 7):
        assert ours(bytes(content[:end]), tmp_path / "a.safetensors") is theirs(bytes(content[:end])) is None


KINDS = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool, torch.float8_e4m3fn, torch.uint16)


def test_deepspeeds_folder_is_the_one_that_latest_names(tmp_path: Path) -> None:
    """`Accelerator.save_state` names it pytorch_model; in other folders `latest` may link to a checkpoint."""
    inner = tmp_path / "saved" / "pytorch_model"
    inner.mkdir(parents=True)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (inner / name).touch()
    (tmp_path / "saved" / "latest").write_text("pytorch_model")
    for folder in (inner.parent, inner):
        checkpoint = discover.look(folder)
        assert checkpoint is not None
        assert (checkpoint.kind, checkpoint.folder, checkpoint.weights) == ("ZeRO", inner.parent, inner)
    (tmp_path / "latest").symlink_to("saved")
    assert discover.look(tmp_path) is None
