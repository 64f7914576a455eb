"""The command `accel-fsdp rehearse`: the steps one after the other, a line for each, and what they prove together."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accel_fsdp import console, shipped
from accel_fsdp.checkpoints import file_names
from accel_fsdp.config import SCRIPT, JobConfig, launch_words, read_config
from accel_fsdp.errors import UserError, require
from accel_fsdp.linter import LintOptions, lint, parse_command_line
from accel_fsdp.models import catalogue
from accel_fsdp.rehearsal import janitor, rows
from accel_fsdp.rehearsal.blame import Failure
from accel_fsdp.rehearsal.flags import RehearseCommand
from accel_fsdp.rehearsal.job import Rehearsed
from accel_fsdp.rehearsal.own_script import OwnRehearsal
from accel_fsdp.rehearsal.scaled import ScaledJob, scale
from accel_fsdp.rehearsal.shrink import SmallModel, shrink
from accel_fsdp.rehearsal.small_run import small_run
from accel_fsdp.rehearsal.steps import SftRehearsal

Action = Callable[[], str]
ONLY_GPUS = ("NCCL, and the network between machines", "CUDA memory and speed", "kernels of GPUs")
"""What no rehearsal shows."""


@dataclass(frozen=True)
class Step:
    """One line: what was done, how long it took, what it proved; `key`, `line` and `fix` where it failed."""

    name: str
    passed: bool
    seconds: float
    said: str
    key: str = ""
    line: str = ""
    fix: str = ""
    output: str = ""


@dataclass
class Report:
    """All steps so far."""

    file: str
    changes: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    only_gpus: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all went well."""
        return all(step.passed for step in self.steps)


def rehearse(options: RehearseCommand, words: tuple[str, ...]) -> int:
    """Runs the job in small on this machine; returns 0 if every step passed, else 1.

    Raises:
        UserError: the file can't be read, or its job can't be rehearsed.
    """
    require("rehearsing", "torch", "accelerate", "transformers")
    job = read_config(options.file)[0]
    scaled = scale(job, options.processes)
    report = Report(str(options.file), list(scaled.changes), only_gpus=_only_gpus(job))
    with janitor.folder() as folder:
        for name, action in _steps(options, words, scaled, report, folder):
            step = _run(name, action, options.json)
            report.steps.append(step)
            _show(step, options.json)
            if not step.passed:
                break
    _conclude(report, options.json)
    return 0 if report.passed else 1


def _steps(
    options: RehearseCommand, words: tuple[str, ...], scaled: ScaledJob, report: Report, folder: Path
) -> Iterator[tuple[str, Action]]:
    yield "check", lambda: _check(options, words, folder)
    if options.script is not None:
        yield from OwnRehearsal(Rehearsed(folder, options.script, options.timeout), scaled, words).steps()
        return
    prepared: list[SmallModel] = []
    words = words or _own_words(options.file)
    yield "make the model small", lambda: _shrink(options, words, folder, prepared, report)
    small = prepared[0]
    made = rows.cut(_named(words, "dataset_name"), folder / "rows").folder
    script = shipped.source() / SCRIPT
    yield from SftRehearsal(
        Rehearsed(folder, script, options.timeout), scaled, small_run(words), small.folder, made, small.layer_classes
    ).steps()


def _check(options: RehearseCommand, words: tuple[str, ...], folder: Path) -> str:
    """The linter's errors; warnings are counted."""
    arguments = None
    if words:
        arguments = folder / "arguments.json"
        arguments.write_text(json.dumps(parse_command_line(list(words))), encoding="utf-8")
    found = lint(options.file, LintOptions(model=options.model, args=arguments, script=options.script))
    errors = [one for one in found if one.severity == "error"]
    if errors:
        first = errors[0]
        raise Failure(f"{first.code}: {first.what}; {first.why}", key=first.key, fix=first.fix)
    warnings = sum(one.severity == "warning" for one in found)
    return f"no errors, {warnings} warnings" if warnings else "no errors"


def _shrink(
    options: RehearseCommand, words: tuple[str, ...], folder: Path, prepared: list[SmallModel], report: Report
) -> str:
    """Puts the small model into `prepared`."""
    name = options.model or _named(words, "model_name_or_path")
    small = shrink(_readable(name, folder), folder / "model")
    prepared.append(small)
    report.changes += [str(change) for change in small.changed]
    return f"{small.parameters:,} weights, units of {', '.join(small.layer_classes)}, tokenizer {small.tokenizer}"


def _readable(name: str | None, folder: Path) -> str:
    """A model whose config can be read here; of a bundled one that config."""
    known = catalogue.canonical(name) if name else None
    if known is None or name is None:
        return name or ""
    place = folder / "bundled"
    place.mkdir()
    (place / file_names.CONFIG).write_text(json.dumps(catalogue.entries()[known]["config"]), encoding="utf-8")
    return str(place)


def _own_words(file: Path) -> tuple[str, ...]:
    """The arguments that the YAML's own comment gives to the script; none where it has no such line."""
    words = launch_words(file.read_text(encoding="utf-8"))
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    return tuple(words[script + 1 :])


def _named(words: tuple[str, ...], flag: str) -> str | None:
    value = parse_command_line(list(words)).get(flag)
    return value if isinstance(value, str) else None


def _run(name: str, action: Action, quiet: bool) -> Step:
    began = time.monotonic()
    try:
        with console.waiting(name):
            said = action()
    except Failure as failure:
        took = time.monotonic() - began
        return Step(name, False, took, failure.what, failure.key, failure.line, failure.fix, failure.output)
    except UserError as error:
        return Step(name, False, time.monotonic() - began, f"{error.what}: {error.why}", fix=error.fix)
    return Step(name, True, time.monotonic() - began, said)


def _show(step: Step, quiet: bool) -> None:
    if quiet:
        return
    mark, style = ("ok    ", "green") if step.passed else ("FAILED", "red")
    console.put(f"{mark} {step.name} ({step.seconds:.1f} s): {step.said}", style=style)
    if step.passed:
        return
    for title, text in (("key", step.key), ("line", step.line), ("fix", step.fix)):
        if text:
            console.put(f"       {title}: {text}")
    if step.output:
        console.say(step.output.rstrip(), style="dim")


def _conclude(report: Report, quiet: bool) -> None:
    if quiet:
        console.put(json.dumps({**asdict(report), "passed": report.passed}, indent=2))
        return
    if report.changes:
        console.put(f"in small: {', '.join(report.changes)}")
    if report.passed:
        console.put(f"proven here: {', '.join(step.name for step in report.steps)}", style="green")
    console.put(f"only a GPU can show: {', '.join(report.only_gpus)}")


def _only_gpus(job: JobConfig) -> list[str]:
    more = []
    if job.is_fsdp and job.on("fsdp_offload_params"):
        more.append("offloading to the CPU, which is off here")
    if str(job.top("mixed_precision")) in ("fp16", "fp8"):
        more.append(f"{job.top('mixed_precision')}")
    return [*ONLY_GPUS, *more]
