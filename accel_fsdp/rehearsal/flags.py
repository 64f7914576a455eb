"""The flags of `accel-fsdp rehearse`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

from accel_fsdp.command_line import arg, positional


@dataclass(frozen=True)
class RehearseCommand:
    """The command's flags, before `--`; the training script's arguments follow."""

    file: Annotated[Path, positional("An Accelerate YAML.", "FILE")]
    model: Annotated[
        Optional[str],
        arg(
            "The model; its config and tokenizer are read, never its weights.",
            "ID_OR_FOLDER",
            default="what the arguments or the YAML's own comment name",
        ),
    ] = None
    processes: Annotated[Optional[int], arg("Ranks on this machine.", "N", default="2; 4 for a mesh")] = None
    script: Annotated[Optional[Path], arg("A training script of your own.", "FILE", default="train/sft.py")] = None
    full_size: Annotated[
        bool, arg("Keep all sizes of a script of your own: its model, rows, lengths, batches and steps.")
    ] = False
    timeout: Annotated[int, arg("How long a launch may take.", "SECONDS")] = 600
    debug: Annotated[bool, arg("Show the ranks' output where a step fails, with its traceback.")] = False
    json: Annotated[bool, arg("The report as JSON.")] = False
