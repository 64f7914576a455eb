"""The flags of `accel-fsdp doctor`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

from accel_fsdp.command_line import arg
from accel_fsdp.launch import PlaceFlags


@dataclass(frozen=True)
class DoctorCommand(PlaceFlags):
    bandwidth: Annotated[
        Optional[Path],
        arg(
            "Start the ranks of this YAML, as accel-fsdp launch does on each of its machines, and measure their links.",
            "FILE",
            hint="(optional)",
        ),
    ] = None
    folder: Annotated[Path, arg("Folder of the job's output, whose disk is measured.", "FOLDER")] = Path(".")
    json: Annotated[bool, arg("Print the report as JSON.")] = False
    report: Annotated[
        bool, arg("Print the report for a bug report, without paths, tokens, host names and addresses.")
    ] = False
