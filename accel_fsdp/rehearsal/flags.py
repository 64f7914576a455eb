"""The flags of `accel-fsdp rehearse`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro


@dataclass(frozen=True)
class RehearseCommand:
    """The command's flags, before `--`; the training script's arguments follow."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE", help="An Accelerate YAML.")]
    model: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="ID_OR_FOLDER",
            help="The model; its config and tokenizer are read, never its weights.",
            help_behavior_hint="(default: what the arguments or the YAML's own comment name)",
        ),
    ] = None
    processes: Annotated[
        Optional[int],
        tyro.conf.arg(metavar="N", help="Ranks on this machine.", help_behavior_hint="(default: 2; 4 for a mesh)"),
    ] = None
    script: Annotated[
        Optional[Path],
        tyro.conf.arg(
            metavar="FILE", help="A training script of your own.", help_behavior_hint="(default: train/sft.py)"
        ),
    ] = None
    timeout: Annotated[int, tyro.conf.arg(metavar="SECONDS", help="How long a launch may take.")] = 600
    json: Annotated[bool, tyro.conf.arg(help="The report as JSON.")] = False
