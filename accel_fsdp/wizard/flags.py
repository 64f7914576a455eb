"""The flags of `accel-fsdp config`, one for each question and others besides the answers, and of `migrate`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from accel_fsdp.command_line import arg, positional
from accel_fsdp.config import MigrationTarget
from accel_fsdp.job import Recipe
from accel_fsdp.wizard.presets import PRESETS
from accel_fsdp.wizard.questions import QUESTIONS, Question

SeqLen = Annotated[
    int | None, arg("Tokens per sequence.", "TOKENS", default=f"{Recipe.length}, or the model's positions if fewer")
]
"""The length that memory is predicted for, here and in `accel-fsdp plan`."""
LONGEST = 29
"""Characters of choices that `--help` lists; it calls longer ones TYPE."""


@dataclass(frozen=True)
class WizardOptions:
    """The flags of the command besides the answers. `output` None: the file of `from_file`, or Accelerate's default."""

    output: Annotated[
        Path | None,
        arg("Where to write the YAML; - for stdout.", "FILE", default="Accelerate's default config file", alias="-o"),
    ] = None
    yes: Annotated[bool, arg("Ask nothing: defaults for every question without a flag.", alias="-y")] = False
    force: Annotated[bool, arg("Overwrite an existing file.")] = False
    from_file: Annotated[
        Path | None,
        arg("Re-edit this YAML, in place without -o: answers, comments and other keys are kept.", "FILE", name="from"),
    ] = None
    preset: Annotated[
        Literal[tuple(PRESETS)] | None,  # type: ignore[valid-type]
        arg("Answers by name; flags overrule them. One of: " + ", ".join(PRESETS) + ".", "NAME"),
    ] = None


def _flag(question: Question) -> tuple[str, Any, Any]:
    words = "|".join(str(value).lower() for value in question.meanings if value not in question.hidden)
    metavar = ("TYPE" if len(words) > LONGEST else words) or question.metavar
    argument = arg(question.prompt, metavar, hint="(asked)", alias=question.alias)
    return question.field, Annotated[str | None, argument], dataclasses.field(default=None)


ConfigCommand = dataclasses.make_dataclass("ConfigCommand", map(_flag, QUESTIONS), bases=(WizardOptions,), frozen=True)


@dataclass(frozen=True)
class MigrateCommand:
    """The whole command. `overwrite` is separate from `force`, which the report asks for where a meaning is lost."""

    file: Annotated[Path, positional("An Accelerate YAML.", "FILE")]
    to: Annotated[MigrationTarget, arg("The engine to rewrite it for.")]
    output: Annotated[Path | None, arg("Write there and leave FILE as it is.", "OUT", alias="-o")] = None
    force: Annotated[bool, arg("Write although a meaning is lost.")] = False
    overwrite: Annotated[bool, arg("Replace an existing OUT.")] = False
    json: Annotated[bool, arg("The changes and the new file as JSON.")] = False
    dry_run: Annotated[bool, arg("Write nothing; print the new file.")] = False
    layer_class: Annotated[str, arg("The layer class to wrap, where FILE names none.", "NAME")] = ""
