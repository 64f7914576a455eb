"""The commands as functions, for notebooks and other tools: they return what the commands print.

Errors are raised as `accel_fsdp.errors.UserError`, with `what`, `why` and `fix`, which name the commands' flags.
Progress goes to stderr.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accel_fsdp import command_line
from accel_fsdp.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from accel_fsdp.config import MigrationTarget
    from accel_fsdp.exporter import ExportReport
    from accel_fsdp.linter.rules import Finding
    from accel_fsdp.planner import Comparison, PlanReport
    from accel_fsdp.wizard import Answers, Migration

File = str | os.PathLike[str]
WRITING = frozenset({"output", "html", "json", "force"})
"""Flags of `plan` about what the command writes or prints, which the functions return."""


def _parsed(command: str, declared: type, *words: File, **flags: Any) -> Any:
    """A command's flags, checked as on the command line; None and False leave a flag out."""
    names = {flag.field: flag.name for flag in command_line.flags_of(declared).values()}
    line = [os.fspath(word) for word in words]
    for field, value in flags.items():
        name = names.get(field, command_line.flag_of(field))
        if value is not None and value is not False:
            line.append(name if value is True else f"{name}={value}")
    return command_line.parse(f"accel-fsdp {command}", declared, line)


def check(
    path: File, *, model: str | None = None, args: File | None = None, script: File | None = None
) -> list[Finding]:
    """The findings of `accel-fsdp check` for an Accelerate YAML, in the order of its lines; empty for a faultless file.

    Raises:
        UserError: a file or the model can't be read.
    """
    from accel_fsdp import linter

    return linter.lint(Path(path), _parsed("check", linter.LintOptions, model=model, args=args, script=script))


def plan(model: str, gpus: str, **flags: Any) -> PlanReport:
    """The prediction of `accel-fsdp plan`; `flags` are the command's, such as `seq_len=4096` or `method="lora"`.

    Raises:
        UserError: the model, the GPUs or a flag are unknown, or a number is invalid.
    """
    from accel_fsdp import planner

    _refuse_writing(flags)
    return planner.make_plan(_parsed("plan", planner.PlanCommand, model=model, gpus=gpus, **flags))


def compare(model: str, machines: Iterable[str], **flags: Any) -> Comparison:
    """The prediction of `accel-fsdp plan --compare` for these machines; `flags` are `plan`'s, such as `tokens="2B"`.

    Raises:
        UserError: as `plan`.
    """
    from accel_fsdp import planner

    _refuse_writing(flags)
    names = machines if isinstance(machines, str) else ",".join(machines)
    return planner.compare(_parsed("plan", planner.PlanCommand, model=model, compare=names, **flags))


def _refuse_writing(flags: Mapping[str, Any]) -> None:
    if unused := sorted(WRITING & flags.keys()):
        raise UsageError(f"{unused[0]} has no effect", why="the function writes nothing", fix="use what it returns")


def migrate(path: File, to: MigrationTarget, *, layer_class: str = "") -> Migration:
    """The `text` of `accel-fsdp migrate --dry-run`, with the `changes` of keys and those `lost`; writes nothing.

    Raises:
        UserError: the file can't be read, or its engine can't be migrated.
    """
    from accel_fsdp import wizard

    options = _parsed("migrate", wizard.MigrateCommand, path, to=to, layer_class=layer_class)
    return wizard.migrated(options.file, options.to, options.layer_class)


def export(
    src: File,
    out: File,
    *,
    model: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    merge_adapter: bool = False,
    verify: Literal["bytes", "load"] = "load",
    force: bool = False,
) -> ExportReport:
    """Writes a Hugging Face folder from a checkpoint, complete and verified or not at all, as `accel-fsdp export`.

    Raises:
        UserError: the checkpoint can't be exported as requested; `out` stays unchanged.
    """
    from accel_fsdp import exporter

    flags = {"model": model, "dtype": dtype, "merge_adapter": merge_adapter, "verify": verify, "force": force}
    return exporter.exported(_parsed("export", exporter.ExportCommand, src, out, **flags))


def to_yaml(answers: Answers | Mapping[str, Any]) -> str:
    """The YAML that `accel-fsdp config --yes` writes for these answers, by the names of its flags.

    Missing answers take their defaults.

    Raises:
        UserError: an answer can't be used, or there is no such question.
    """
    from accel_fsdp import wizard

    if isinstance(answers, wizard.Answers):
        return wizard.to_text(answers)
    names = {
        name: question.field
        for question in wizard.QUESTIONS
        for name in filter(None, (question.field, command_line.field_name(question.alias)))
    }
    if unknown := [name for name in answers if name not in names]:
        raise UsageError(
            f"there is no question {unknown[0]}.{did_you_mean(str(unknown[0]), names)}",
            why="an unknown answer would be ignored",
            fix="one of: " + ", ".join(names),
        )
    flags = {names[name]: wizard.to_yaml.flag_text(value) for name, value in answers.items()}
    return wizard.to_text(wizard.interview.answers(wizard.interview.interview(flags, {}, defaults=True)))
