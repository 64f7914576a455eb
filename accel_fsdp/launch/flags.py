"""The flags of `accel-fsdp launch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro


@dataclass(frozen=True)
class LaunchCommand:
    """Those before the script; what follows it is the script's."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE", help="An Accelerate YAML.")]
    script: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(metavar="SCRIPT", help="The training script, for example train/sft.py."),
    ]
    dry_run: Annotated[
        bool, tyro.conf.arg(help="Print the command and the environment of the ranks; start nothing.")
    ] = False
    machine_rank: Annotated[
        Optional[int],
        tyro.conf.arg(metavar="N", help="Which of the YAML's machines this is, from 0.", help_behavior_hint=""),
    ] = None
    cpu: Annotated[
        bool,
        tyro.conf.arg(help="Run any script on CPU processes (gloo), then show what each rank held."),
    ] = False
    no_check: Annotated[bool, tyro.conf.arg(help="Launch although the linter finds errors; they are shown.")] = False
