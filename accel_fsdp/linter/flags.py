"""The flags of `accel-fsdp check`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro


@dataclass(frozen=True)
class Sources:
    """Inputs of the check besides the YAML. Only the given ones are read; this machine only with `--here`."""

    model: Annotated[
        Optional[str], tyro.conf.arg(metavar="ID_OR_FOLDER", help="The model, to check layer classes and sizes.")
    ] = None
    args: Annotated[
        Optional[Path],
        tyro.conf.arg(
            metavar="FILE",
            help="A file with the training script's arguments: a YAML or JSON mapping, or a command line.",
        ),
    ] = None
    checkpoint: Annotated[
        Optional[Path], tyro.conf.arg(metavar="FOLDER", help="A checkpoint to resume, or an export, to look into.")
    ] = None
    script: Annotated[
        Optional[Path], tyro.conf.arg(metavar="FILE", help="The training script, to read (it isn't run).")
    ] = None
    here: Annotated[bool, tyro.conf.arg(help="Look at this machine too: GPUs, memory, disk, port.")] = False


@dataclass(frozen=True)
class LintOptions(Sources):
    strict: Annotated[bool, tyro.conf.arg(help="Warnings count as errors.")] = False
    fix: Annotated[bool, tyro.conf.arg(help="Repair what has one right answer, keep comments, show the diff.")] = False
    json: Annotated[bool, tyro.conf.arg(help="Findings as JSON.")] = False


@dataclass(frozen=True)
class CheckCommand(LintOptions):
    files: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="FILE", help="Accelerate YAMLs; - for stdin.", help_behavior_hint="(one or more)"),
    ] = ()
    list_rules: Annotated[bool, tyro.conf.arg(help="Show all rules.")] = False
    explain: Annotated[Optional[str], tyro.conf.arg(metavar="CODE", help="Show what a rule is about.")] = None
