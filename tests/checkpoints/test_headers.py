"""What tells files apart: safetensors headers through the library, and the names of DeepSpeed's folders."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel_fsdp.checkpoints import discover, safetensors_files
from accel_fsdp.errors import UserError

KINDS = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16)


def test_all_dtypes_are_read_and_a_cut_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {f"w{i}": torch.arange(3.0 * i).view(3, i).to(kind) for i, kind in enumerate(KINDS)}
    save_file(tensors, path)
    stored = safetensors_files.of_file(path)
    assert {name: (part.dtype, part.shape) for name, part in stored.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert all(stored[name].load().equal(tensor) for name, tensor in tensors.items())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{path} is damaged"):
        safetensors_files.of_file(path)


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
