"""The commands as functions, for notebooks and other tools: they return what the commands print.

Errors are raised as `accel_fsdp.errors.UserError`, with `what`, `why` and `fix`. Progress goes to stderr.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from accel_fsdp import command_line
from accel_fsdp.errors import UsageError, UserError, did_you_mean

if TYPE_CHECKING:
    from accel_fsdp.config import MigrationTarget
    from accel_fsdp.exporter import ExportReport
    from accel_fsdp.linter.rules import Finding
    from accel_fsdp.planner import Comparison, PlanCommand, PlanReport
    from accel_fsdp.wizard import Answers, Change

P = ParamSpec("P")
T = TypeVar("T")
File = str | os.PathLike[str]
WRITING = frozenset({"output", "html", "json", "force", "compare"})
"""Flags of `plan` about what the command writes or prints, which the function returns; `compare` is another one."""


@dataclass(frozen=True)
class Migrated:
    """A YAML for another engine, and the change of each key. `lost` are the changes whose meaning can't be kept."""

    text: str
    changes: tuple[Change, ...]
    lost: tuple[Change, ...]


def _checks_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Makes `function` raise a UserError for unknown keywords, as `plan` does, instead of a TypeError."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> T:
        _refuse_unknown(f"{function.__name__} has no", kwargs, parameters)
        return function(*args, **kwargs)

    return refusing


@_checks_keywords
def check(
    path: File,
    *,
    model: str | None = None,
    args: File | None = None,
    script: File | None = None,
) -> list[Finding]:
    """The findings of `accel-fsdp check` for an Accelerate YAML, in the order of its lines; empty for a faultless file.

    Raises:
        UserError: a file or the model can't be read.
    """
    from accel_fsdp import linter

    _refuse_value("model", model, str | None)
    inputs = {"args": args, "script": script}
    paths = {name: None if value is None else _path(name, value) for name, value in inputs.items()}
    options = linter.LintOptions(model, paths["args"], paths["script"])
    return linter.lint(_path("path", path), options)


def _path(name: str, path: File) -> Path:
    _refuse_value(name, path, Path)
    return Path(path)


def plan(model: str, gpus: str, **flags: Any) -> PlanReport:
    """The prediction of `accel-fsdp plan`; `flags` are the command's, such as `seq_len=4096` or `method="lora"`.

    Raises:
        UserError: the model, the GPUs or a flag are unknown, or a number is invalid.
    """
    from accel_fsdp import planner

    return planner.make_plan(_plan_command("plan", WRITING, model=model, gpus=gpus, **flags))


def compare(model: str, machines: Iterable[str], **flags: Any) -> Comparison:
    """The prediction of `accel-fsdp plan --compare` for these machines; `flags` are `plan`'s, such as `tokens="2B"`.

    Raises:
        UserError: as `plan`.
    """
    from accel_fsdp import planner

    if isinstance(machines, str) or not all(isinstance(name, str) for name in machines):
        raise UsageError(
            f"machines={machines!r}", why="each machine is a separate string", fix='machines: ["8xH100-80GB"]'
        )
    machine_names = ",".join(machines)
    return planner.compare(_plan_command("compare", WRITING - {"compare"}, model=model, compare=machine_names, **flags))


def _plan_command(function: str, left_out: Iterable[str], **flags: Any) -> PlanCommand:
    from accel_fsdp import planner

    known = get_type_hints(planner.PlanCommand)
    _refuse_unknown(f"{function} has no", flags, [name for name in known if name not in left_out])
    for name, value in flags.items():
        _refuse_value(name, value, known[name])
    return planner.PlanCommand(**flags)


@_checks_keywords
def migrate(path: File, to: MigrationTarget, *, layer_class: str = "") -> Migrated:
    """The output of `accel-fsdp migrate --dry-run`, with the change of each key; the file is not changed.

    Raises:
        UserError: the file can't be read, or its engine can't be migrated.
    """
    from accel_fsdp import wizard
    from accel_fsdp.config import MigrationTarget

    _refuse_value("to", to, MigrationTarget)
    migration = wizard.migrated(_path("path", path), to, layer_class)
    return Migrated(migration.text, migration.changes, migration.broken)


@_checks_keywords
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

    known = get_type_hints(exporter.ExportCommand)
    paths = _path("src", src), _path("out", out)
    for name, value in {"dtype": dtype, "verify": verify}.items():
        _refuse_value(name, value, known[name])
    options = exporter.ExportCommand(
        *paths, model=model, dtype=dtype, merge_adapter=merge_adapter, verify=verify, force=force
    )
    return exporter.exported(options)


def to_yaml(answers: Answers | Mapping[str, Any]) -> str:
    """The YAML that `accel-fsdp config --yes` writes for these answers, by the names of its flags.

    Missing answers take their defaults.

    Raises:
        UserError: an answer can't be used, or there is no such question.
    """
    from accel_fsdp import wizard

    if isinstance(answers, wizard.Answers):
        return wizard.to_text(answers)
    if not isinstance(answers, Mapping):
        raise UsageError(
            f"{answers!r} is not a mapping of answers",
            why="each answer needs the name of its question",
            fix='to_yaml({"model": "gpt2", "gpus": "8xH100-80GB"})',
        )
    names = {
        name: question.field
        for question in wizard.QUESTIONS
        for name in filter(None, (question.field, command_line.field_name(question.alias)))
    }
    _refuse_unknown("there is no question", answers, names)
    flags = {names[name]: wizard.to_yaml.flag_text(value) for name, value in answers.items()}
    try:
        return wizard.to_text(wizard.interview.answers(wizard.interview.interview(flags, {}, defaults=True)))
    except UserError as error:
        words = [wizard.interview.in_words(text, between="_") for text in (error.what, error.why, error.fix)]
        raise type(error)(words[0], why=words[1], fix=words[2]) from error.__cause__


def _refuse_value(name: str, value: Any, hint: Any) -> None:
    """Raises UsageError for a value that the command line refuses too; a path may be a string."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = [choice for kind in alternatives if get_origin(kind) is Literal for choice in get_args(kind)]
    types = [kind for kind in alternatives if get_origin(kind) is not Literal]
    wider = {Path: (str, os.PathLike), float: (int,)}
    if value in choices or any(type(value) is kind or _has_type(value, wider.get(kind, ())) for kind in types):
        return
    expected = " or ".join([*map(str, choices), *(kind.__name__ for kind in types if kind is not type(None))])
    raise UsageError(
        f"{name}={value!r}.{did_you_mean(str(value), choices)}", why="that value is invalid", fix=f"{name}: {expected}"
    )


def _has_type(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _refuse_unknown(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            raise UsageError(
                f"{what} {name}.{did_you_mean(str(name), known)}",
                why="an unknown flag would be ignored",
                fix="one of: " + ", ".join(known),
            )
