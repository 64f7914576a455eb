"""Files that each rank wrote with torch.save, as verl, SkyRL and loops do; and several models of one `save_state`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import here
from runs import HEADS, State, export, refused, same
from torch.distributed.checkpoint import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 101, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2}


def llama(seed: int = 0, **sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}, **HEADS, dtype="float32"))


def sharded(state: State, rank: int, shape: tuple[int, ...], placements: list[Any]) -> State:
    """What a rank of a mesh holds, as DTensors."""
    dist.init_process_group("fake", rank=rank, world_size=torch.Size(shape).numel(), store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "fsdp")[-len(shape) :])
        parts = {}
        for name, tensor in state.items():
            chunks = tensor.detach().chunk(shape[-1])
            number = rank % shape[-1]
            local = chunks[number].clone() if number < len(chunks) else tensor[:0]
            layout = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
            parts[name] = DTensor.from_local(local, mesh, placements, **layout)
        return parts
    finally:
        dist.destroy_process_group()


def verl(folder: Path, model: LlamaForCausalLM, ranks: int, shape: tuple[int, ...] = (), placed: Any = None) -> Path:
    """The actor's folder in a checkpoint of verl."""
    (folder / "huggingface").mkdir(parents=True)
    model.config.save_pretrained(folder / "huggingface")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    for rank in range(ranks):
        state = sharded(model.state_dict(), rank, shape or (ranks,), placed or [Shard(0)])
        torch.save(state, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        torch.save({"state": {}, "param_groups": []}, folder / f"optim_world_size_{ranks}_rank_{rank}.pt")
        torch.save({"lr_scheduler": {}}, folder / f"extra_state_world_size_{ranks}_rank_{rank}.pt")
    return folder


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_verls_files_are_the_gathered_model(ranks: int, tmp_path: Path) -> None:
    """On 8 ranks the last ones hold less, or nothing, of what 8 doesn't divide."""
    model, step = llama(), tmp_path / "run" / "global_step_10"
    verl(step / "actor", model, ranks)
    same(export(step, tmp_path / "out"), model.state_dict())
    refused(r"run holds no checkpoint itself", step.parent, tmp_path / "other")  # not DeepSpeed's, in spite of its name


def test_weights_that_are_rounded_to_the_configs_dtype_are_told(tmp_path: Path) -> None:
    model = llama()
    model.config.dtype = torch.bfloat16
    shown = here("export", verl(tmp_path / "actor", model, 2), tmp_path / "out").output
    assert "float32 weights rounded to bfloat16, the config's dtype; --dtype float32 keeps them" in shown


def test_replicas_are_taken_once(tmp_path: Path) -> None:
    model = llama()
    folder = verl(tmp_path / "actor", model, 6, (2, 3), [Replicate(), Shard(0)])
    same(export(folder, tmp_path / "out", verify="load"), model.state_dict())


def test_parts_of_tensor_parallelism_that_fsdp_has_cut_again(tmp_path: Path) -> None:
    model = llama(vocab_size=104)
    folder = verl(tmp_path / "actor", model, 1)
    (folder / "model_world_size_1_rank_0.pt").unlink()
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        state = {}
        for name, tensor in model.state_dict().items():
            local = tensor.detach().chunk(2)[rank % 2].chunk(2)[rank // 2].clone()
            layout = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
            state[name] = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2), Shard(0)], **layout)
        dist.destroy_process_group()
        torch.save(state, folder / f"model_world_size_4_rank_{rank}.pt")
    same(export(folder, tmp_path / "out"), model.state_dict())


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = verl(tmp_path / "actor", llama(), 3)
    (folder / "model_world_size_3_rank_2.pt").unlink()
    for src in (folder, folder / "model_world_size_3_rank_0.pt"):
        refused(r"lacks model_world_size_3_rank_2\.pt", src, tmp_path / "out")


def changed(folder: Path, *by_rank: State) -> Path:
    """The folder, with these tensors in the files of its ranks."""
    for rank, tensors in enumerate(by_rank):
        path = folder / f"model_world_size_{len(by_rank)}_rank_{rank}.pt"
        torch.save({**torch.load(path, weights_only=False), **tensors}, path)
    return folder


def test_plain_buffers_beside_dtensors_are_copies(tmp_path: Path) -> None:
    """Older Llamas save their rotary frequencies, which FSDP2 doesn't shard."""
    model, ones = llama(), torch.ones(6)
    folder = changed(verl(tmp_path / "actor", model, 2), {"inv_freq": ones}, {"inv_freq": ones})
    same(export(folder, tmp_path / "out"), model.state_dict())
    changed(folder, {}, {"inv_freq": 2 * ones})
    refused("inv_freq is whole in each rank's file, and differs", folder, tmp_path / "other")


def test_a_tensor_that_one_rank_alone_holds_is_named(tmp_path: Path) -> None:
    folder = changed(verl(tmp_path / "actor", llama(), 2), {}, {"extra": torch.ones(6)})
    refused(r"rank_1\.pt and model_world_size_2_rank_0\.pt hold different tensors: extra", folder, tmp_path / "out")


def by_hand(folder: Path, model: LlamaForCausalLM, ranks: int) -> Path:
    """Plain shards, of the norms copies: what the file holds doesn't say which is which."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    for rank in range(ranks):
        state = {
            name: tensor.detach() if "norm" in name else tensor.detach().chunk(ranks)[rank].clone()
            for name, tensor in model.state_dict().items()
        }
        torch.save({"model": state, "step": 3}, folder / f"rank_{rank}.pt")
    return folder


def test_plain_shards_are_joined_as_the_config_says(tmp_path: Path) -> None:
    model = llama()
    folder = by_hand(tmp_path / "run", model, 3)
    same(export(folder, tmp_path / "out"), model.state_dict())
    same(export(folder / "rank_1.pt", tmp_path / "again"), model.state_dict())
    larger = llama(hidden_size=72)
    larger.config.save_pretrained(tmp_path / "larger")
    refused("it is unclear how the parts belong together", folder, tmp_path / "other", model=str(tmp_path / "larger"))


def test_copies_that_differ_are_refused(tmp_path: Path) -> None:
    folder = by_hand(tmp_path / "run", llama(), 2)
    content = torch.load(folder / "rank_1.pt")
    content["model"]["model.norm.weight"] += 1
    torch.save(content, folder / "rank_1.pt")
    refused(r"model\.norm\.weight is whole in each rank's file, and differs", folder, tmp_path / "out")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["sharded", "full", "safetensors"])
def test_of_several_models_none_is_taken_in_silence(kind: str, tmp_path: Path) -> None:
    """As `Accelerator.save_state` writes two prepared models."""
    models, folder = [llama(), llama(1, hidden_size=12, num_hidden_layers=1)], tmp_path / "state"
    folder.mkdir()
    torch.save({}, folder / "random_states_0.pkl")
    names = {
        "sharded": ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"),
        "full": ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"),
        "safetensors": ("model.safetensors", "model_1.safetensors"),
    }[kind]
    for name, model in zip(names, models, strict=True):
        model.config.save_pretrained(tmp_path / f"config of {name}")
        if kind == "sharded":
            save_dcp({"model": dict(model.state_dict())}, checkpoint_id=folder / name, no_dist=True)
        elif kind == "full":
            torch.save(model.state_dict(), folder / name)
        else:
            model.save_pretrained(tmp_path / "saved")
            (tmp_path / "saved" / "model.safetensors").rename(folder / name)
    listed = json.loads(here("export", folder, "--list", "--json").output)
    assert [Path(row["weights"]).name for row in listed] == list(names)
    for which in (None, "third"):
        config = str(tmp_path / f"config of {names[0]}")
        refused(f"holds 2 models: {names[0]}, {names[1]}", folder, tmp_path / "out", model=config, which=which)
    for name, model in zip(names, models, strict=True):
        config = str(tmp_path / f"config of {name}")
        same(export(folder, tmp_path / f"out of {name}", model=config, which=name), model.state_dict())
        same(export(folder / name, tmp_path / f"again {name}", model=config), model.state_dict())
