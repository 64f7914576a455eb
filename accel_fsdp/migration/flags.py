"""The flags of `accel-fsdp migrate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from accel_fsdp.command_line import arg, positional
from accel_fsdp.config import MigrationTarget


@dataclass(frozen=True)
class MigrateCommand:
    """The whole command.

    `force` accepts a lost meaning, and `overwrite` replaces an existing OUT. They are separate, because the report asks
    for the first, and users may not expect the second.
    """

    file: Annotated[Path, positional("An Accelerate YAML, or the JSON of `--to native`.", "FILE")]
    to: Annotated[MigrationTarget, arg("The engine to rewrite it for.")]
    output: Annotated[Path | None, arg("Write there and leave FILE as it is.", "OUT", alias="-o")] = None
    force: Annotated[bool, arg("Write although a meaning is lost.")] = False
    overwrite: Annotated[bool, arg("Replace an existing OUT.")] = False
    json: Annotated[bool, arg("The changes and the new file as JSON.")] = False
    dry_run: Annotated[bool, arg("Write nothing; print the new file.")] = False
    expert_parallel_size: Annotated[
        int | None, arg("Ranks that share the experts, --to native.", "N", default="that of FILE's launch line")
    ] = None
    layer_class: Annotated[str, arg("The layer class to wrap, where FILE names none.", "NAME")] = ""
