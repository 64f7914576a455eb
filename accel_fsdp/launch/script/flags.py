"""The flags of `accel-fsdp script`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

import tyro

EngineWord = Literal["slurm", "kubernetes", "skypilot", "dstack", "ray", "torchrun"]
KubernetesApi = Literal["trainjob", "pytorchjob"]
LEAST_GRACE = 30


@dataclass(frozen=True)
class ScriptCommand:
    """Those before the script; what follows it is the script's."""

    engine: Annotated[
        tyro.conf.Positional[EngineWord],
        tyro.conf.arg(metavar="ENGINE", help="slurm, kubernetes, skypilot, dstack, ray or torchrun."),
    ]
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE", help="An Accelerate YAML.")]
    script: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(metavar="SCRIPT", help="The training script, for example train/sft.py."),
    ]
    output: Annotated[
        Optional[Path],
        tyro.conf.arg(
            aliases=["-o"],
            metavar="FILE",
            help="The job file to write.",
            help_behavior_hint="(default: it is printed)",
        ),
    ] = None
    force: Annotated[bool, tyro.conf.arg(help="Overwrite an existing job file.")] = False
    name: Annotated[
        Optional[str],
        tyro.conf.arg(metavar="NAME", help="Of the job.", help_behavior_hint="(default: that of the YAML's file)"),
    ] = None
    gpus: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="NxNAME[-MEMORYGB]",
            help="8xH100-80GB; 2x8xA100-40GB: two machines.",
            help_behavior_hint="(default: what the YAML and the comment at its top say)",
        ),
    ] = None
    time: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="TIME",
            help="The longest that the job may take: 90m, 36h, 2d12h or 36:00:00.",
            help_behavior_hint="(default: under SLURM predicted, else 24h; no limit elsewhere)",
        ),
    ] = None
    grace: Annotated[
        int,
        tyro.conf.arg(metavar="SECONDS", help="Time between the signal to stop and the end: a checkpoint's, and more."),
    ] = 120
    cpus: Annotated[
        Optional[int],
        tyro.conf.arg(metavar="N", help="CPU cores of one machine.", help_behavior_hint="(default: 4 for each GPU)"),
    ] = None
    host_memory: Annotated[
        Optional[int],
        tyro.conf.arg(
            metavar="GIB",
            help="Memory of one machine.",
            help_behavior_hint="(default: all of it under SLURM, else what the engine gives)",
        ),
    ] = None
    shared: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="FOLDER",
            help="An absolute path at which all machines see the same files.",
            help_behavior_hint="(default: where the job is submitted under SLURM and torchrun, else /shared)",
        ),
    ] = None
    image: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="IMAGE",
            help="The container's image; kubernetes, skypilot and dstack.",
            help_behavior_hint="(default: the engine's)",
        ),
    ] = None
    api: Annotated[
        KubernetesApi,
        tyro.conf.arg(help="Of kubernetes: Kubeflow Trainer's TrainJob, or the older operator's PyTorchJob."),
    ] = "trainjob"
    spot: Annotated[
        bool, tyro.conf.arg(help="Machines that are cheaper, and may be taken away; skypilot and dstack.")
    ] = False
    no_check: Annotated[bool, tyro.conf.arg(help="Write it although the linter finds errors; they are shown.")] = False
