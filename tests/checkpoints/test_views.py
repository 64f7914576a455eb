"""Tensors of torch.save that are in another order, or are a part: read as torch does, in bounded memory."""

import resource
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp.checkpoints import FileReader, tensor_storage, torch_zip
from accel_fsdp.exporter import safetensors_writer


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A part of a tensor, with dimensions exchanged and some expanded."""
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    tensor = tensor.permute(*draw(st.permutations(range(len(shape)))))
    for dimension, size in enumerate(tensor.shape):
        first = draw(st.integers(0, max(size - 1, 0)))
        tensor = tensor[(slice(None),) * dimension + (slice(first, None, draw(st.integers(1, 3))),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@given(tensors=st.lists(views(), min_size=1, max_size=3), data=st.data())
@settings(max_examples=60)
def test_any_view_is_read_as_torch_reads_it(
    tensors: list[torch.Tensor], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "views.pt"
    torch.save(tensors, path)
    reader = FileReader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_storage, "SMALL_READ", data.draw(st.sampled_from([0, 16, 4096])))
        patch.setattr(tensor_storage, "LONGEST_ROW", data.draw(st.sampled_from([1, 4, 1 << 22])))
        for view, tensor in zip(torch_zip.load(reader, path), tensors, strict=True):
            source = view.stored("w")
            assert torch.equal(safetensors_writer.whole(reader, source), tensor)
            low, high = (
                sorted(data.draw(st.integers(0, tensor.numel() // source.unit)) * source.unit for _ in range(2))
                if source.unit
                else (0, 0)
            )
            part = torch.frombuffer(
                tensor_storage.part_of(reader, source, low, high) or bytearray(8), dtype=torch.int64
            )
            assert torch.equal(part[: high - low], tensor.reshape(-1)[low:high])
    reader.check()
    reader.close()


def test_a_transposed_tensor_takes_little_time_and_memory(tmp_path: Path) -> None:
    """100 MB, which were once read whole for each block."""
    size = 5_000
    torch.save({"w": torch.arange(size * size, dtype=torch.int32).view(size, size).T}, tmp_path / "w.pt")
    reader = FileReader()
    source = torch_zip.load(reader, tmp_path / "w.pt")["w"].stored("w")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    step = max(1, safetensors_writer.BLOCK_ELEMENTS // source.unit) * source.unit
    for at in range(0, size * size, step):
        part = tensor_storage.part_of(reader, source, at, min(at + step, size * size))
        assert int.from_bytes(part[4:8], "little") == int.from_bytes(part[:4], "little") + size
    assert reader.check() == 1
    reader.close()
    assert time.process_time() - started < 10, "2 s on an idle machine"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 << 10  # KiB


def test_an_expanded_tensor_takes_little_memory(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1, 10**9)}, tmp_path / "w.pt")
    reader = FileReader()
    source = torch_zip.load(reader, tmp_path / "w.pt")["w"].stored("w")
    assert source.unit == 1
    assert tensor_storage.part_of(reader, source, 10**9 - 2, 10**9) == bytearray(torch.ones(2).numpy().tobytes())
    reader.close()
