"""The flags of `accel-fsdp migrate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

from accel_fsdp.config import MigrationTarget


@dataclass(frozen=True)
class MigrateCommand:
    """The whole command.

    `force` accepts a lost meaning, and `overwrite` replaces an existing OUT. They are separate, because the report asks
    for the first, and users may not expect the second.
    """

    file: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(metavar="FILE", help="An Accelerate YAML, or the JSON of `--to native`."),
    ]
    to: Annotated[MigrationTarget, tyro.conf.arg(help="The engine to rewrite it for.")]
    output: Annotated[
        Optional[Path], tyro.conf.arg(aliases=["-o"], metavar="OUT", help="Write there and leave FILE as it is.")
    ] = None
    force: Annotated[bool, tyro.conf.arg(help="Write although a meaning is lost.")] = False
    overwrite: Annotated[bool, tyro.conf.arg(help="Replace an existing OUT.")] = False
    json: Annotated[bool, tyro.conf.arg(help="The changes and the new file as JSON.")] = False
    dry_run: Annotated[bool, tyro.conf.arg(help="Write nothing; print the new file.")] = False
    expert_parallel_size: Annotated[
        Optional[int],
        tyro.conf.arg(
            metavar="N",
            help="Ranks that share the experts, --to native.",
            help_behavior_hint="(default: that of FILE's launch line)",
        ),
    ] = None
    layer_class: Annotated[
        str, tyro.conf.arg(metavar="NAME", help="The layer class to wrap, where FILE names none.")
    ] = ""
