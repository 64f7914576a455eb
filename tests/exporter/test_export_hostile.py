"""`accel-fsdp export` of checkpoints whose makers mean harm: no code runs, no file of another folder is read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import INNER, export, refused
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import LlamaConfig, LlamaForCausalLM

from accel_fsdp.errors import UserError
from accel_fsdp.exporter import hub


def zero_files(folder: Path, state: dict[str, torch.Tensor], ranks: int = 2) -> None:
    """As DeepSpeed's stage 2 writes them."""
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    parts = torch.nn.functional.pad(flat, (0, -len(flat) % ranks)).chunk(ranks)
    shapes = {name: tensor.shape for name, tensor in state.items()}
    model = {"module": state, "buffer_names": [], "param_shapes": [shapes], "shared_params": {}, "ds_version": "0.19"}
    folder.mkdir(parents=True)
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(parts):
        held = {"zero_stage": 2, "partition_count": ranks, "single_partition_of_fp32_groups": [part.clone()]}
        torch.save({"optimizer_state_dict": held}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def as_zero(run: Path) -> None:
    """The checkpoint as DeepSpeed's stage 2 writes it."""
    state = FileSystemReader(run / INNER).read_metadata().state_dict_metadata
    shutil.rmtree(run / "checkpoint-1")
    zero_files(
        run / "checkpoint-1" / "global_step1",
        {name.partition(".")[2]: torch.randn(tensor.size) for name, tensor in state.items()},
    )
    (run / "checkpoint-1" / "latest").write_text("global_step1")


def elsewhere(name: str, run: Path) -> None:
    """Moves a file or folder of a run out of it, and leaves a link."""
    path = run / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    target = run.parent / "elsewhere" / path.name
    target.parent.mkdir()
    shutil.move(path, target)
    path.symlink_to(target)


def as_full(run: Path) -> None:
    """The checkpoint as one file of FSDP."""
    shutil.rmtree(run / "checkpoint-1")
    (run / "checkpoint-1").mkdir()
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(run / "model"))
    torch.save(model.state_dict(), run / "checkpoint-1" / "pytorch_model_fsdp.bin")


def as_safetensors(run: Path) -> None:
    """The checkpoint as files that `from_pretrained` loads, as an adapter too."""
    as_full(run)
    (run / "checkpoint-1" / "pytorch_model_fsdp.bin").unlink()
    LlamaForCausalLM(LlamaConfig.from_pretrained(run / "model")).save_pretrained(run / "checkpoint-1")


def as_adapter(run: Path) -> None:
    as_full(run)
    (run / "checkpoint-1" / "pytorch_model_fsdp.bin").unlink()
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{prefix}.lora_A.weight": torch.ones(2, 36), f"{prefix}.lora_B.weight": torch.ones(36, 2)}
    save_file(tensors, run / "checkpoint-1" / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": str(run / "model"),
    }
    (run / "checkpoint-1" / "adapter_config.json").write_text(json.dumps(settings))


def as_it_is(run: Path) -> None:
    """Sharded."""


ZERO = "checkpoint-1/global_step1"
LINKS = [
    *((as_it_is, f"model/{name}") for name in ("config.json", "README.md", "tokenizer.json", "vocab.txt")),
    *((as_it_is, f"model/{name}") for name in ("generation_config.json", "chat_template.jinja")),
    (as_it_is, "model/additional_chat_templates/tool.jinja"),
    *(
        (as_it_is, name)
        for name in ("model", "checkpoint-1", str(INNER), f"{INNER}/.metadata", f"{INNER}/__1_0.distcp")
    ),
    (as_full, "checkpoint-1/pytorch_model_fsdp.bin"),
    (as_safetensors, "checkpoint-1/model.safetensors"),
    (as_full, "checkpoint-1/model.safetensors.index.json"),
    *(
        (as_zero, f"{ZERO}/{name}")
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    ),
    *((as_zero, name) for name in (ZERO, "checkpoint-1/latest")),
    *((as_adapter, f"checkpoint-1/{name}") for name in ("adapter_model.safetensors", "adapter_config.json")),
]


@pytest.mark.parametrize(("make", "name"), LINKS, ids=[name for _, name in LINKS])
def test_links_out_of_a_run_are_refused(
    make: Callable[[Path], None], name: str, run_folder: Path, tmp_path: Path
) -> None:
    """Whatever they replace: what lies elsewhere is neither read nor copied."""
    make(run_folder)
    elsewhere(name, run_folder)
    refused(r"is a link to .*/elsewhere/", run_folder)


def test_a_source_may_be_named_by_a_link(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run link").symlink_to(run_folder)
    (tmp_path / "link").symlink_to(run_folder / "checkpoint-1")
    as_full(tmp_path / "run link")
    (tmp_path / "file.bin").symlink_to(run_folder / "checkpoint-1" / "pytorch_model_fsdp.bin")
    for number, name in enumerate(("run link", "link", "file.bin")):
        export(tmp_path / name, tmp_path / f"out {number}", model=str(run_folder / "model"))


@pytest.mark.parametrize("name", ["README.md", "inner/vocab.txt", ".hidden"])
def test_a_push_follows_no_link(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "inner").mkdir(parents=True)
    elsewhere(name, out)
    with pytest.raises(UserError, match=r"is a link to .*/elsewhere/"):
        hub.push(out, "me/model", private=True)


PIPES = [
    (as_it_is, "checkpoint-1/complete.json"),
    (as_it_is, f"{INNER}/__1_0.distcp"),
    (as_it_is, f"{INNER}/.metadata"),
    (as_it_is, "model/config.json"),
    (as_it_is, "model/tokenizer.json"),
    (as_zero, f"{ZERO}/mp_rank_00_model_states.pt"),
    (as_zero, "checkpoint-1/latest"),
    (as_full, "checkpoint-1/pytorch_model_fsdp.bin"),
    (as_adapter, "checkpoint-1/adapter_config.json"),
]


@pytest.mark.parametrize(("make", "name"), PIPES, ids=[name for _, name in PIPES])
def test_pipes_are_not_waited_for(make: Callable[[Path], None], name: str, run_folder: Path, tmp_path: Path) -> None:
    make(run_folder)
    path = run_folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(UserError):
        export(run_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def of_these(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    config = {"model_type": "own", "architectures": ["M"], "auto_map": {"AutoConfig": "x.X"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float8_e4m3fn", "uint16"])
def test_all_dtypes_that_safetensors_can_name(dtype: str, tmp_path: Path) -> None:
    tensors = {
        "w": torch.arange(1, 9).view(torch.uint8)[:8].clone().view(getattr(torch, dtype)),
        "e": torch.ones(4, 0, 3),
    }
    export(of_these(tensors, tmp_path), tmp_path / "out", allow_non_finite=True)
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8))


@pytest.mark.parametrize("dtype", ["complex128", "float4_e2m1fn_x2"])
def test_dtypes_that_safetensors_cannot_name(dtype: str, tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(16, dtype=torch.uint8).view(getattr(torch, dtype))}
    refused(f"holds a tensor of {dtype}", of_these(tensors, tmp_path), tmp_path / "out")


def test_tensors_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    """In another order, as a part, expanded, and with a mark that changes their values."""
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        **{"turned": base.T, "part": base[1:3, ::2], "expanded": torch.ones(1).expand(3, 5)},
        **{"negative": torch._neg_view(base), "conjugate": torch.randn(3, dtype=torch.complex64).conj()},
    }
    export(of_these(tensors, tmp_path), tmp_path / "out")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(ours[name], tensor.resolve_conj().resolve_neg()) for name, tensor in tensors.items())
