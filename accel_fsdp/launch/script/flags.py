"""The flags of `accel-fsdp script`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

from accel_fsdp.command_line import arg, positional
from accel_fsdp.config import SCHEDULERS, SchedulerWord, schedulers_taking
from accel_fsdp.units import listed


@dataclass(frozen=True)
class ScriptCommand:
    """The flags before the script; the script's own arguments follow it."""

    scheduler: Annotated[SchedulerWord, positional(f"{listed(SCHEDULERS, 'or')}.", "SCHEDULER")]
    file: Annotated[Path, positional("An Accelerate YAML.", "FILE")]
    script: Annotated[Path, positional("The training script, for example train/sft.py.", "SCRIPT")]
    output: Annotated[Optional[Path], arg("The job file to write.", "FILE", default="it is printed", alias="-o")] = None
    force: Annotated[bool, arg("Overwrite an existing job file.")] = False
    name: Annotated[Optional[str], arg("Name of the job.", "NAME", default="from the YAML's file name")] = None
    gpus: Annotated[
        Optional[str],
        arg("GPUs of a machine; 2x8xA100-40GB means two machines.", "NxNAME[-MEMORYGB]", default="from the YAML"),
    ] = None
    time: Annotated[
        Optional[str],
        arg("Time limit, as SLURM reads it: 90 (minutes), 36:00:00 or 2-12 (days).", "TIME", default="24 h in SLURM"),
    ] = None
    grace: Annotated[int, arg("Time to save a checkpoint, between the signal to stop and the end.", "SECONDS")] = 120
    cpus: Annotated[Optional[int], arg("CPU cores of one machine.", "N", default="4 for each GPU")] = None
    host_memory: Annotated[
        Optional[int],
        arg("Memory of one machine.", "GIB", default="under SLURM all of it, else its own default"),
    ] = None
    shared: Annotated[
        Optional[str],
        arg("Absolute path of a folder that all machines share.", "FOLDER", default="/shared in containers"),
    ] = None
    image: Annotated[
        Optional[str], arg(f"Container image, for {listed(schedulers_taking('--image'), 'and')}.", "IMAGE")
    ] = None
    spot: Annotated[
        bool, arg(f"Use cheaper machines that may be taken away, for {listed(schedulers_taking('--spot'), 'and')}.")
    ] = False
    no_check: Annotated[bool, arg("Write the file even if the linter finds errors; they are still shown.")] = False
