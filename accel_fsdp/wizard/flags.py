"""The flags of `accel-fsdp config`: one for each question, and others besides the answers."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from accel_fsdp.command_line import arg
from accel_fsdp.job import Recipe
from accel_fsdp.wizard.presets import PRESETS
from accel_fsdp.wizard.questions import QUESTIONS, Question

SeqLen = Annotated[
    int | None, arg("Tokens per sequence.", "TOKENS", default=f"{Recipe.length}, or the model's positions if fewer")
]
"""The length that memory is predicted for, here and in `accel-fsdp plan`."""


@dataclass(frozen=True)
class WizardOptions:
    """The flags of the command besides the answers. `output` None: the file of `from_file`, or Accelerate's default."""

    output: Annotated[
        Path | None,
        arg(
            "Where to write the YAML; - for stdout.", "FILE", default="Accelerate's own default config file", alias="-o"
        ),
    ] = None
    yes: Annotated[bool, arg("Ask nothing: defaults for every question without a flag.", alias="-y")] = False
    force: Annotated[bool, arg("Overwrite an existing file.")] = False
    from_file: Annotated[
        Path | None,
        arg(
            "Re-edit this YAML: its answers, comments and other keys are kept, and a diff is shown. "
            "Without -o it is written in place.",
            "FILE",
            name="from",
        ),
    ] = None
    preset: Annotated[
        str | None, arg("Answers by name; flags overrule them. One of: " + ", ".join(PRESETS) + ".", "NAME")
    ] = None


def _flag_field(question: Question) -> tuple[str, Any, Any]:
    help_text = arg(question.prompt, question.metavar, hint="(asked)", alias=question.alias)
    return question.field, Annotated[str | None, help_text], dataclasses.field(default=None)


ConfigCommand = dataclasses.make_dataclass(
    "ConfigCommand",
    [_flag_field(question) for question in QUESTIONS],
    bases=(WizardOptions,),
    frozen=True,
)
"""The whole command."""
