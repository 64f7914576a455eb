"""The flags of `accel-fsdp doctor`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

from accel_fsdp.flag_words import arg
from accel_fsdp.launch import PlaceFlags


@dataclass(frozen=True)
class DoctorCommand(PlaceFlags):
    file: Annotated[
        tyro.conf.Positional[Optional[Path]],
        arg("An Accelerate YAML to compare with this machine.", "FILE", hint="(optional)"),
    ] = None
    folder: Annotated[Path, arg("Folder of the job's output, whose disk is measured.", "FOLDER")] = Path(".")
    timeout: Annotated[int, arg("How long machines wait for each other.", "SECONDS")] = 60
    json: Annotated[bool, arg("Print the report as JSON.")] = False
    report: Annotated[
        bool, arg("Print the report for a bug report, without paths, tokens, host names and addresses.")
    ] = False
