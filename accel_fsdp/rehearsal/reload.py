"""Exports a checkpoint, then loads two exported folders; writes the logits' largest difference, and the largest."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from accel_fsdp import command_line, untrusted_files
from accel_fsdp.errors import guard

if TYPE_CHECKING:
    import torch

TOKENS = 32


def main() -> None:
    """Runs `python -m accel_fsdp.rehearsal.reload RESULT ONE OTHER EXPORT-ARGUMENTS`."""
    from accel_fsdp import exporter

    if code := exporter.run(command_line.parse("accel-fsdp export", exporter.ExportCommand, sys.argv[4:])):
        sys.exit(code)
    first, second = (_logits(folder) for folder in sys.argv[2:4])
    numbers = [float((first - second).abs().max()), float(second.abs().max())]
    Path(sys.argv[1]).write_text(json.dumps(numbers), encoding="utf-8")


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


if __name__ == "__main__":
    sys.exit(guard(main))
