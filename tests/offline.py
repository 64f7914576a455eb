"""An export of a run's newest checkpoint, held against what the run itself exported."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from accel_fsdp import exporter
from accel_fsdp.checkpoints import discover


def assert_exports_offline(run_folder: Path, out: Path, trained_as: torch.dtype = torch.float32) -> None:
    """`accel-fsdp export` of the checkpoint is what the run gathered at its end, and of ZeRO what DeepSpeed finds.

    DeepSpeed gathers the model that it trained, `trained_as` 16 bits beside the float32 masters of the checkpoint.
    """
    gathered = tensors_in(run_folder / "final")
    dtype = str(next(iter(gathered.values())).dtype).removeprefix("torch.")
    assert exporter.run(exporter.ExportCommand(run_folder, out, dtype=dtype, verify="bytes", no_sync=True)) == 0
    tensors = {name: tensor.to(trained_as).to(tensor.dtype) for name, tensor in tensors_in(out).items()}
    assert_same(tensors, gathered)
    newest = discover.find(run_folder)[0].folder
    if any(newest.glob("global_step*")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        options = exporter.ExportCommand(run_folder, out, dtype="float32", verify="bytes", no_sync=True, force=True)
        assert exporter.run(options) == 0
        assert_same(tensors_in(out), get_fp32_state_dict_from_zero_checkpoint(str(newest)))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*model*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert first.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())
