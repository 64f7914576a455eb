"""The flags of `accel-fsdp launch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

FOUND = "(default: what SLURM, Kubernetes, SkyPilot or dstack say, else the YAML)"


@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """Which machine of how many this is, where nothing else says it."""

    num_machines: Annotated[
        Optional[int],
        tyro.conf.arg(metavar="N", help="How many machines take part.", help_behavior_hint=FOUND),
    ] = None
    num_processes: Annotated[
        Optional[int],
        tyro.conf.arg(metavar="N", help="Processes of all machines together.", help_behavior_hint=FOUND),
    ] = None
    machine_rank: Annotated[
        Optional[int],
        tyro.conf.arg(metavar="N", help="Which of the machines this is, from 0.", help_behavior_hint=FOUND),
    ] = None
    main_process_ip: Annotated[
        Optional[str],
        tyro.conf.arg(metavar="ADDRESS", help="Address of machine 0.", help_behavior_hint=FOUND),
    ] = None
    main_process_port: Annotated[
        Optional[int],
        tyro.conf.arg(metavar="PORT", help="Port of machine 0 at which all meet.", help_behavior_hint=FOUND),
    ] = None


@dataclass(frozen=True)
class LaunchCommand(PlaceFlags):
    """Those before the script; what follows it is the script's."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE", help="An Accelerate YAML.")]
    script: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(metavar="SCRIPT", help="The training script, for example train/sft.py."),
    ]
    dry_run: Annotated[
        bool, tyro.conf.arg(help="Print the command and the environment of the ranks; start nothing.")
    ] = False
    cpu: Annotated[
        bool,
        tyro.conf.arg(help="Run any script on CPU processes (gloo), then show what each rank held."),
    ] = False
    timeout: Annotated[
        int, tyro.conf.arg(metavar="SECONDS", help="How long several machines wait for each other before ranks start.")
    ] = 600
    hang_timeout: Annotated[
        Optional[float],
        tyro.conf.arg(
            metavar="SECONDS",
            help="End a job, and say where its ranks are, when all of them have done nothing for so long and some wait "
            "in a collective; 0: never.",
            help_behavior_hint="(default: 0.9 of what its process group gives a collective)",
        ),
    ] = None
    no_check: Annotated[bool, tyro.conf.arg(help="Launch although the linter finds errors; they are shown.")] = False
