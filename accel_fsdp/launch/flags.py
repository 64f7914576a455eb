"""The flags of `accel-fsdp launch`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import tyro

from accel_fsdp.config import LAUNCH_PLACES
from accel_fsdp.units import listed

_known = partial(tyro.conf.arg, help_behavior_hint=f"(default: from {listed(LAUNCH_PLACES, 'or')}, else from the YAML)")


@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """Flags for this machine's number and the number of machines, where nothing else gives them."""

    num_machines: Annotated[Optional[int], _known(metavar="N", help="Number of machines.")] = None
    num_processes: Annotated[Optional[int], _known(metavar="N", help="Number of processes on all machines.")] = None
    machine_rank: Annotated[Optional[int], _known(metavar="N", help="Rank of this machine, from 0.")] = None
    main_process_ip: Annotated[Optional[str], _known(metavar="ADDRESS", help="Address of machine 0.")] = None
    main_process_port: Annotated[
        Optional[int], _known(metavar="PORT", help="Port of machine 0, at which the machines meet.")
    ] = None


@dataclass(frozen=True)
class LaunchCommand(PlaceFlags):
    """The flags before the script; the script's own arguments follow it."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE", help="An Accelerate YAML.")]
    script: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(metavar="SCRIPT", help="The training script, for example train/sft.py."),
    ]
    dry_run: Annotated[
        bool, tyro.conf.arg(help="Print the command and the environment of the ranks, and start nothing.")
    ] = False
    cpu: Annotated[
        bool, tyro.conf.arg(help="Run any script on CPU processes (gloo), then show what each rank held.")
    ] = False
    timeout: Annotated[
        int, tyro.conf.arg(metavar="SECONDS", help="How long machines wait for each other before ranks start.")
    ] = 600
    hang_timeout: Annotated[
        Optional[float],
        tyro.conf.arg(
            metavar="SECONDS",
            help="End a job whose ranks have all been inactive for this long while some of them wait in a collective, "
            "and report where each one is; 0: never.",
            help_behavior_hint="(default: 0.9 of the collectives' own timeout)",
        ),
    ] = None
    no_check: Annotated[bool, tyro.conf.arg(help="Launch even if the linter finds errors; they are still shown.")] = (
        False
    )
