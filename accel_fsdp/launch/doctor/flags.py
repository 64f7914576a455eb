"""The flags of `accel-fsdp doctor`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

from accel_fsdp.launch import PlaceFlags


@dataclass(frozen=True)
class DoctorCommand(PlaceFlags):
    file: Annotated[
        tyro.conf.Positional[Optional[Path]],
        tyro.conf.arg(
            metavar="FILE", help="An Accelerate YAML to compare with this machine.", help_behavior_hint="(optional)"
        ),
    ] = None
    folder: Annotated[
        Path, tyro.conf.arg(metavar="FOLDER", help="Folder of the job's output, whose disk is measured.")
    ] = Path(".")
    timeout: Annotated[int, tyro.conf.arg(metavar="SECONDS", help="How long machines wait for each other.")] = 60
    explain: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="MESSAGE",
            help="Print the usual cause of an error message, and test nothing; - reads it from stdin.",
            help_behavior_hint="(optional)",
        ),
    ] = None
    json: Annotated[bool, tyro.conf.arg(help="Print the report as JSON.")] = False
    report: Annotated[
        bool, tyro.conf.arg(help="Print the report for a bug report, without paths, tokens, host names and addresses.")
    ] = False
