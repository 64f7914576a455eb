"""`accel-fsdp export` of checkpoints whose makers mean harm: no code runs, no file of another folder is read."""

import contextlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from runs import INNER, export
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import LlamaConfig, LlamaForCausalLM

from accel_fsdp import exporter
from accel_fsdp.checkpoints import FileReader, discover, torch_zip
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import companion_files, compare_logits, hub, safetensors_writer

SIZES = {"vocab_size": 64, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 6}


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory, SIZES)


@pytest.fixture
def run_folder(trained_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


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


def hide_metadata(run: Path, proof: Path) -> None:
    """A `.metadata` that our reader takes and torch doesn't, so that torch looks for another one."""
    inner = run / INNER
    content = (inner / ".metadata").read_bytes()
    pickled = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)R0"
    assert content[:2] == b"\x80\x04"
    (inner / ".metadata").write_bytes(content[:2] + pickled + pickle.dumps(FileSystemReader(inner).read_metadata())[2:])
    (inner / "__0.metadata").write_bytes(pickle.dumps(Evil(proof)))


def to_zero(run: Path, proof: Path) -> None:
    state = FileSystemReader(run / INNER).read_metadata().state_dict_metadata
    shutil.rmtree(run / "checkpoint-1")
    zero_files(
        run / "checkpoint-1" / "global_step1",
        {name.partition(".")[2]: torch.randn(tensor.size) for name, tensor in state.items()},
    )
    (run / "checkpoint-1" / "latest").write_text("global_step1")


def hide_record(run: Path, proof: Path) -> None:
    """A second pickle in a ZeRO file, the name of which differs by case."""
    to_zero(run, proof)
    path = run / "checkpoint-1" / "global_step1" / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr(name.replace("data.pkl", "Data.pkl"), pickle.dumps(Evil(proof), 2))


@pytest.mark.parametrize("hide", [hide_metadata, hide_record, to_zero])
def test_logits_are_compared_through_our_readers_alone(
    hide: Callable[[Path, Path], None], run_folder: Path, tmp_path: Path
) -> None:
    proof, out = tmp_path / "proof", tmp_path / "out"
    export(run_folder, out)
    hide(run_folder, proof)
    location, _ = discover.find(run_folder)
    with pytest.raises(UserError, match="no archive") if hide is hide_record else contextlib.nullcontext():
        compare_logits.difference(out, location, companion_files.find(location, None))
    assert not proof.exists()


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same, in another order in memory."""
    return tensor.mT.clone().mT if tensor.dim() == 2 else tensor


def test_logits_of_every_kind_of_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    """Laid out by the library that wrote them: none differs from its export, and each from one with another weight."""
    out = tmp_path / "out"
    export(run_folder, out)
    state = load_file(out / "model.safetensors")
    config = (run_folder / "model" / "config.json").read_text()
    kinds = {kind: tmp_path / kind / "checkpoint-1" for kind in ("zero", "safetensors", "file")}
    zero_files(kinds["zero"] / "global_step1", state)
    for kind in ("safetensors", "file"):
        kinds[kind].mkdir(parents=True)
    save_file(state, kinds["safetensors"] / "model.safetensors")
    torch.save({"model": {name: turned(tensor) for name, tensor in state.items()}}, kinds["file"] / "model.pth")
    kinds["sharded"] = run_folder / "checkpoint-1"
    for folder in kinds.values():
        (folder / "config.json").write_text(config)
        location, _ = discover.find(folder)
        difference, largest = compare_logits.difference(out, location, companion_files.find(location, None))
        assert difference == 0 < largest, location.kind
    state["model.norm.weight"] *= 2
    save_file(state, out / "model.safetensors", {"format": "pt"})
    for folder in kinds.values():
        location, _ = discover.find(folder)
        assert compare_logits.difference(out, location, companion_files.find(location, None))[0] > 0


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


def as_zero(run: Path) -> None:
    to_zero(run, run)


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
    (as_it_is, "README.md"),
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
    with pytest.raises(UserError, match=r"is a link to .*/elsewhere/"):
        export(run_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float8_e4m3fn", "uint16"])
def test_all_dtypes_that_safetensors_can_name(dtype: str, tmp_path: Path) -> None:
    tensors = {
        "w": torch.arange(1, 9).view(torch.uint8)[:8].clone().view(getattr(torch, dtype)),
        "e": torch.ones(4, 0, 3),
    }
    torch.save(tensors, tmp_path / "w.pth")
    reader = FileReader()
    for name, view in torch_zip.load(reader, tmp_path / "w.pth").items():
        elements = safetensors_writer.whole(reader, view.stored(name))
        assert elements.dtype == tensors[name].dtype
        assert torch.equal(elements.view(torch.uint8), tensors[name].view(torch.uint8))
    reader.close()


@pytest.mark.parametrize("dtype", ["complex128", "float4_e2m1fn_x2"])
def test_dtypes_that_safetensors_cannot_name(dtype: str, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(16, dtype=torch.uint8).view(getattr(torch, dtype))}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=f"holds a tensor of {dtype}"):
        torch_zip.load(FileReader(), tmp_path / "w.pth")


@pytest.mark.parametrize("kind", ["negative", "conjugate"])
def test_tensors_whose_numbers_are_not_as_stored_are_refused(kind: str, tmp_path: Path) -> None:
    """torch keeps a mark beside the tensor, and reads it again."""
    tensor = torch._neg_view(torch.ones(3)) if kind == "negative" else torch.ones(3, dtype=torch.complex64).conj()
    torch.save({"w": tensor, "v": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"with flags that change its values: (neg|conj)(?s:.*)resolve_neg"):
        exporter.run(exporter.ExportCommand(tmp_path, tmp_path / "out", verify="bytes"))
