"""The flags of `accel-fsdp config`: one for each question, and others besides the answers."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import tyro

from accel_fsdp.job import Recipe
from accel_fsdp.wizard.presets import PRESETS
from accel_fsdp.wizard.question import Question
from accel_fsdp.wizard.questions import QUESTIONS

SeqLen = Annotated[
    Optional[int],
    tyro.conf.arg(
        metavar="TOKENS",
        help="Tokens per sequence.",
        help_behavior_hint=f"(default: {Recipe.length}, or the model's positions if fewer)",
    ),
]
"""The length that memory is predicted for, here and in `accel-fsdp plan`."""


@dataclass(frozen=True)
class WizardOptions:
    """The flags of the command besides the answers. `output` None: the file of `from_file`, or Accelerate's default."""

    output: Annotated[
        Optional[Path],
        tyro.conf.arg(
            aliases=["-o"],
            metavar="FILE",
            help="Where to write the YAML; - for stdout.",
            help_behavior_hint="(default: Accelerate's own default config file)",
        ),
    ] = None
    yes: Annotated[
        bool, tyro.conf.arg(aliases=["-y"], help="Ask nothing: defaults for every question without a flag.")
    ] = False
    force: Annotated[bool, tyro.conf.arg(help="Overwrite an existing file.")] = False
    from_file: Annotated[
        Optional[Path],
        tyro.conf.arg(
            name="from",
            metavar="FILE",
            help="Re-edit this YAML: its answers, comments and other keys are kept, and a diff is shown. "
            "Without -o it is written in place.",
        ),
    ] = None
    preset: Annotated[
        Optional[str],
        tyro.conf.arg(metavar="NAME", help="Answers by name; flags overrule them. One of: " + ", ".join(PRESETS) + "."),
    ] = None


def _flag_field(question: Question) -> tuple[str, Any, Any]:
    help_text = tyro.conf.arg(
        metavar=question.metavar,
        help=question.prompt,
        help_behavior_hint="(asked)",
        aliases=list(question.aliases) or None,
    )
    return question.field, Annotated[Optional[str], help_text], dataclasses.field(default=None)


ConfigCommand = dataclasses.make_dataclass(
    "ConfigCommand",
    [*(_flag_field(q) for q in QUESTIONS), ("seq_len", SeqLen, dataclasses.field(default=None))],
    bases=(WizardOptions,),
    frozen=True,
)
"""The whole command."""
