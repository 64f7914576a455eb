"""The flags of `accel-fsdp check`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

from accel_fsdp.command_line import arg, positional

Format = Literal["text", "json", "github", "sarif"]


@dataclass(frozen=True)
class Sources:
    """Inputs of the check besides the YAML. Only the given ones are read."""

    model: Annotated[Optional[str], arg("The model, to check layer classes and sizes.", "ID_OR_FOLDER")] = None
    args: Annotated[
        Optional[Path],
        arg("A file with the training script's arguments: a YAML or JSON mapping, or a command line.", "FILE"),
    ] = None
    script: Annotated[Optional[Path], arg("The training script, to read (it isn't run).", "FILE")] = None


@dataclass(frozen=True)
class LintOptions(Sources):
    strict: Annotated[bool, arg("Warnings count as errors.")] = False
    ignore: Annotated[Optional[str], arg("Rules to leave out, joined by commas.", "CODES")] = None
    fix: Annotated[bool, arg("Repair what has one right answer, keep comments, show the diff.")] = False
    json: Annotated[bool, arg("Findings as JSON: short for --format json.")] = False
    format: Annotated[
        Optional[Format],
        arg(
            "The format of the findings; github: annotations of GitHub Actions, sarif: SARIF 2.1.0 for code scanning.",
            "{text,json,github,sarif}",
            default="text",
        ),
    ] = None


@dataclass(frozen=True)
class CheckCommand(LintOptions):
    files: Annotated[
        tuple[Path, ...],
        positional("Accelerate YAMLs, or folders of them; - for stdin.", "FILE", hint="(one or more)"),
    ] = ()
    stdin_filename: Annotated[
        Optional[Path], arg("The name to show for what is read from stdin, such as an editor's unsaved text.", "FILE")
    ] = None
    list_rules: Annotated[bool, arg("Show all rules.")] = False
    explain: Annotated[Optional[str], arg("Show what a rule is about.", "CODE")] = None
