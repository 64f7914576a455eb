"""A run with a checkpoint of several ranks, to be damaged, and the export of any checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from accel_fsdp import exporter
from accel_fsdp.errors import UserError

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "architectures": ["LlamaForCausalLM"]}
INNER = Path("checkpoint-1") / "pytorch_model_fsdp_0"
State = dict[str, torch.Tensor]


def make(tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, Any]) -> Path:
    """A run of a Llama of these sizes with a checkpoint of 3 ranks."""
    folder = tmp_path_factory.mktemp("made") / "run"
    sharded.make(folder, LlamaConfig(**sizes, **HEADS, dtype="float32"), ranks=3)
    return folder


def export(src: Path, out: Path | None = None, **options: Any) -> State:
    """`accel-fsdp export` in this process, without the checks that load the model; what is in OUT."""
    assert exporter.run(exporter.ExportCommand(src, out, **{"verify": "bytes", "no_sync": True, **options})) == 0
    return load_all(out) if out else {}


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
