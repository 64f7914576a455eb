"""`checkpoints.discover`: what a folder holds, and what it lacks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import here
from safetensors.torch import save_file

from accel_fsdp.checkpoints import discover


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


def listed(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(here("export", folder, "--list", "--json").printed)
    return rows


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_lacks_its_settings(name: str, tmp_path: Path) -> None:
    tensors = {"base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(2, 3)}
    (save_file if name.endswith("s") else torch.save)(tensors, tmp_path / name)
    for settings in (["adapter_config.json"], []):
        assert [row["missing"] for row in listed(tmp_path)] == [settings]
        (tmp_path / "adapter_config.json").write_text("{}")


def test_the_size_of_weights_is_without_optimizers(tmp_path: Path) -> None:
    """verl writes them beside the ranks' files of the model, Trainer beside its safetensors."""
    tensors = {"w": torch.ones(10)}
    for rank in range(2):
        torch.save(tensors, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        for kind in ("optim", "extra_state"):
            torch.save([tensors, torch.ones(99)], tmp_path / f"{kind}_world_size_2_rank_{rank}.pt")
    trainer = tmp_path / "trainer"
    trainer.mkdir()
    save_file(tensors, trainer / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth"):
        torch.save(torch.ones(99), trainer / name)
    for folder, pattern in ((tmp_path, "model_*.pt"), (trainer, "*.safetensors")):
        size_bytes = sum(path.stat().st_size for path in folder.glob(pattern))
        assert [row["size_bytes"] for row in listed(folder)] == [size_bytes]


def test_none_of_several_models_of_a_step_is_taken(tmp_path: Path) -> None:
    """verl's actor and critic stand side by side."""
    for name in ("actor", "critic"):
        (folder := tmp_path / "global_step_20" / name).mkdir(parents=True)
        torch.save({"w": torch.ones(10)}, folder / "model_world_size_1_rank_0.pt")
    refused = here("export", tmp_path / "global_step_20", tmp_path / "out")
    assert refused.code == 1
    assert f"fix: give {tmp_path}/global_step_20/actor or {tmp_path}/global_step_20/critic" in refused.text
    assert discover.find(tmp_path / "global_step_20" / "actor")[0].folder.name == "actor"
