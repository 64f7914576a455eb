"""A run with a checkpoint of several ranks, to be damaged, and the export of any checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_fsdp import exporter
from accel_fsdp.errors import UserError

SIZES = {"vocab_size": 509, "hidden_size": 36, "intermediate_size": 70, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "architectures": ["LlamaForCausalLM"]}
INNER = Path("checkpoint-1") / "pytorch_model_fsdp_0"
State = dict[str, torch.Tensor]


def export(src: Path, out: Path | None = None, **options: Any) -> State:
    """`accel-fsdp export` in this process, without the checks that load the model; what is in OUT."""
    assert exporter.run(exporter.ExportCommand(src, out, **{"verify": "bytes", "no_sync": True, **options})) == 0
    return load_all(out) if out else {}


def set_in(path: Path, **settings: Any) -> None:
    """Changes settings in a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def as_loops_save(model: Path, run: Path, state: State | None = None) -> Path:
    """A run with a model's config and tokenizer, and its weights, or others, in one file of torch's."""
    shutil.copytree(model, run, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    torch.save(load_file(model / "model.safetensors") if state is None else state, run / "model.pth")
    return run


def load_all(folder: Path) -> State:
    return {name: tensor for path in folder.glob("*model*.safetensors") for name, tensor in load_file(path).items()}


def same(first: State, other: State) -> None:
    assert first.keys() == other.keys()
    for name, tensor in first.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def refused(message: str, src: Path, out: Path | None = None, **options: Any) -> UserError:
    """The error of an export, by default into `out` beside SRC, or of a check; OUT stays as it was."""
    out = out if out or options.get("check") else src.parent / "out"
    before = out is not None and out.exists()
    with pytest.raises(UserError, match=message) as caught:
        export(src, out, **options)
    assert out is None or out.exists() == before
    return caught.value
