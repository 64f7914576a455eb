"""Exports a checkpoint, and compares what two exported folders compute."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_fsdp import command_line, exporter, untrusted_files

if TYPE_CHECKING:
    import torch

TOKENS = 32


def difference(words: Sequence[str], one: Path, other: Path) -> tuple[float, float]:
    """Runs `accel-fsdp export WORDS`; returns the largest difference of the logits of both folders, and the largest.

    Raises:
        SystemExit: the export failed, which has printed why.
    """
    if code := exporter.run(command_line.parse("accel-fsdp export", exporter.ExportCommand, [*words])):
        sys.exit(code)
    first, second = _logits(str(one)), _logits(str(other))
    return float((first - second).abs().max()), float(second.abs().max())


def _logits(folder: str) -> "torch.Tensor":
    import torch

    from accel_fsdp.checkpoints import file_names
    from accel_fsdp.models import model_class, read_config

    base = untrusted_files.read_json(Path(folder, file_names.ADAPTER_CONFIG)).get("base_model_name_or_path", folder)
    model = model_class(read_config(base)).from_pretrained(folder, trust_remote_code=False).eval()
    tokens = torch.arange(1, TOKENS + 1).remainder(model.config.get_text_config().vocab_size)[None]
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens).logits
    return logits.float()
