"""The flags of `accel-fsdp script`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import tyro

from accel_fsdp.config import CLUSTER_ENGINES, ClusterWord, engines_taking
from accel_fsdp.units import listed

KubernetesApi = Literal["trainjob", "pytorchjob"]
LEAST_GRACE = 30


def _optional(metavar: str, text: str, default: str) -> Any:
    """An optional flag; without it the job has this `default`."""
    return tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True)
class ScriptCommand:
    """The flags before the script; the script's own arguments follow it."""

    engine: Annotated[
        tyro.conf.Positional[ClusterWord],
        tyro.conf.arg(metavar="ENGINE", help=f"{listed(CLUSTER_ENGINES, 'or')}."),
    ]
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE", help="An Accelerate YAML.")]
    script: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(metavar="SCRIPT", help="The training script, for example train/sft.py."),
    ]
    output: Annotated[
        Optional[Path],
        tyro.conf.arg(aliases=["-o"]),
        _optional("FILE", "The job file to write.", "it is printed"),
    ] = None
    force: Annotated[bool, tyro.conf.arg(help="Overwrite an existing job file.")] = False
    name: Annotated[Optional[str], _optional("NAME", "Name of the job.", "from the YAML's file name")] = None
    gpus: Annotated[
        Optional[str],
        _optional(
            "NxNAME[-MEMORYGB]",
            "GPUs of a machine, such as 8xH100-80GB; 2x8xA100-40GB means two machines.",
            "from the YAML and the comment at its top",
        ),
    ] = None
    time: Annotated[
        Optional[str],
        _optional(
            "TIME",
            "Time limit of the job: 90m, 36h, 2d12h or 36:00:00.",
            "under SLURM a prediction, or 24h without one; elsewhere no limit",
        ),
    ] = None
    grace: Annotated[
        int, tyro.conf.arg(metavar="SECONDS", help="Time to save a checkpoint, between the signal to stop and the end.")
    ] = 120
    cpus: Annotated[Optional[int], _optional("N", "CPU cores of one machine.", "4 for each GPU")] = None
    host_memory: Annotated[
        Optional[int], _optional("GIB", "Memory of one machine.", "under SLURM all of it, else the engine's default")
    ] = None
    shared: Annotated[
        Optional[str],
        _optional(
            "FOLDER",
            "Absolute path of a folder that all machines share.",
            "under SLURM and torchrun where the job is submitted, else /shared",
        ),
    ] = None
    image: Annotated[
        Optional[str],
        _optional("IMAGE", f"Container image, for {listed(engines_taking('--image'), 'and')}.", "the engine's"),
    ] = None
    api: Annotated[
        KubernetesApi,
        tyro.conf.arg(help="Kind of Kubernetes job: Kubeflow Trainer's TrainJob, or the older operator's PyTorchJob."),
    ] = "trainjob"
    spot: Annotated[
        bool,
        tyro.conf.arg(
            help=f"Use cheaper machines that may be taken away, for {listed(engines_taking('--spot'), 'and')}."
        ),
    ] = False
    no_check: Annotated[
        bool, tyro.conf.arg(help="Write the file even if the linter finds errors; they are still shown.")
    ] = False
