"""A run with a checkpoint of several ranks, to be damaged, and the export of it."""

from pathlib import Path
from typing import Any

import pytest
import sharded
from transformers import LlamaConfig

from accel_fsdp import exporter

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "architectures": ["LlamaForCausalLM"]}
INNER = Path("checkpoint-1") / "pytorch_model_fsdp_0"


def make(tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, Any]) -> Path:
    """A run of a Llama of these sizes with a checkpoint of 3 ranks."""
    folder = tmp_path_factory.mktemp("made") / "run"
    sharded.make(folder, LlamaConfig(**sizes, **HEADS, dtype="float32"), ranks=3)
    return folder


def export(src: Path, out: Path, **options: Any) -> None:
    """`accel-fsdp export`, without the checks that load the model."""
    exporter.run(exporter.ExportCommand(src, out, **{"verify": "bytes", "no_sync": True, **options}))
