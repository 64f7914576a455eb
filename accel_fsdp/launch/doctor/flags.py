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
            metavar="FILE", help="An Accelerate YAML to hold against this machine.", help_behavior_hint="(optional)"
        ),
    ] = None
    folder: Annotated[Path, tyro.conf.arg(metavar="FOLDER", help="Where the job will write: its disk is measured.")] = (
        Path(".")
    )
    timeout: Annotated[int, tyro.conf.arg(metavar="SECONDS", help="How long the machines wait for each other.")] = 60
    explain: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="MESSAGE", help="Say what is often behind a pasted error; - reads it from stdin. No tests."
        ),
    ] = None
    json: Annotated[bool, tyro.conf.arg(help="The report as JSON.")] = False
    report: Annotated[
        bool, tyro.conf.arg(help="The report for a bug report: no paths, tokens, host names and addresses.")
    ] = False
