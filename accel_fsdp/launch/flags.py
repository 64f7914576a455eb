"""The flags of `accel-fsdp launch`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

from accel_fsdp.command_line import arg, positional
from accel_fsdp.config import PLACING
from accel_fsdp.units import listed

_known = partial(arg, default=f"from {listed(PLACING, 'or')}, else from the YAML")


@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """Flags for this machine's number and the number of machines, where nothing else gives them."""

    num_machines: Annotated[Optional[int], _known("Number of machines.", "N")] = None
    num_processes: Annotated[Optional[int], _known("Number of processes on all machines.", "N")] = None
    machine_rank: Annotated[Optional[int], _known("Rank of this machine, from 0.", "N")] = None
    main_process_ip: Annotated[Optional[str], _known("Address of machine 0.", "ADDRESS")] = None
    main_process_port: Annotated[Optional[int], _known("Port of machine 0, at which the machines meet.", "PORT")] = None


@dataclass(frozen=True)
class LaunchCommand(PlaceFlags):
    """The flags before the script; the script's own arguments follow it."""

    file: Annotated[Path, positional("An Accelerate YAML.", "FILE")]
    script: Annotated[Path, positional("The training script, for example train/sft.py.", "SCRIPT")]
    dry_run: Annotated[bool, arg("Print the command and the environment of the ranks, and start nothing.")] = False
    cpu: Annotated[bool, arg("Run any script on CPU processes: real FSDP on gloo.")] = False
    timeout: Annotated[int, arg("How long machines wait for each other before ranks start.", "SECONDS")] = 600
    hang_timeout: Annotated[
        Optional[float],
        arg(
            "How long a rank may wait for others in a collective, and a step of train/sft.py may take; then the job "
            "ends, and the last lines say where the ranks were. 0: as the script says.",
            "SECONDS",
            default="as the script says",
        ),
    ] = None
    no_check: Annotated[bool, arg("Launch even if the linter finds errors; they are still shown.")] = False
