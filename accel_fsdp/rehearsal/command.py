"""The command `accel-fsdp rehearse`: the steps, one after the other, until one fails."""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from accel_fsdp import command_line, console
from accel_fsdp.config import EXPERT_FLAG, SCRIPT, JobConfig, header, read_config
from accel_fsdp.errors import UsageError, UserError, joined, require
from accel_fsdp.job import from_arguments
from accel_fsdp.linter import LintOptions, completed, lint, read_launch
from accel_fsdp.rehearsal import janitor, prepare, scaled, warm
from accel_fsdp.rehearsal.blame import Failure, of_outcome
from accel_fsdp.rehearsal.flags import RehearseCommand
from accel_fsdp.rehearsal.job import CallFailed, Rehearsed
from accel_fsdp.rehearsal.own_script import OwnRehearsal
from accel_fsdp.rehearsal.report import Proof, Report, StepResult, conclude, left_out, show
from accel_fsdp.rehearsal.steps import SftRehearsal
from accel_fsdp.units import counted

Action = Callable[[], str | Proof]
OF_HEADS = "AF513"
"""The rule about shared embeddings. A script of the user's own may load the model with another head, and its run shows
whether Accelerate shards it."""


def rehearse(options: RehearseCommand, words: tuple[str, ...]) -> int:
    """Runs a small version of the job on this machine; returns 0 if every step passes, else 1.

    `words` are the script's arguments; for train/sft.py, arguments in the YAML's comment complete them.

    A UserError, such as for a job that can't be rehearsed, is in the JSON report too.
    """
    report = Report(str(options.file))
    try:
        _run(options, words, report)
    except UserError as error:
        report.error = str(error)
        if options.json:
            console.put(report.as_json(), lines=True)
        raise
    if options.json:
        console.put(report.as_json(), lines=True)
    else:
        conclude(report)
    return 0 if report.passed else 1


def _run(options: RehearseCommand, words: tuple[str, ...], report: Report) -> None:
    """Runs the steps, and adds each to the report."""
    require("rehearsing", "torch", "accelerate", "transformers")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise an installed DeepSpeed warns that it chose the CPU
    if options.processes is not None:
        scaled.check_processes(options.processes)
    if options.timeout < 1:
        raise UsageError(f"--timeout {options.timeout}", why="a launch takes longer", fix="--timeout 600")
    if options.script is not None and not options.script.is_file():
        raise UsageError(
            f"script {options.script} does not exist",
            why="there is nothing to rehearse",
            fix="accel-fsdp rehearse FILE --script SCRIPT, with the path of a training script",
        )
    job = read_config(options.file)[0]
    if options.script is None:
        words = completed(options.file, job.source, header.shipped() / SCRIPT, words)
    model = prepare.model_of(options.model, words)
    report.left_out = list(left_out(job))
    with janitor.folder() as folder:
        for name, action in _steps(options, words, model, job, report, folder):
            step = _step_result(name, action)
            report.steps.append(step)
            if not options.json:
                show(step, options.debug)
            if not step.passed:
                break


def _steps(
    options: RehearseCommand,
    words: tuple[str, ...],
    model: str | None,
    job: JobConfig,
    report: Report,
    folder: Path,
) -> Iterator[tuple[str, Action]]:
    script = options.script or header.shipped() / SCRIPT
    launcher = Rehearsed(folder, script, options.timeout, cold=options.script is not None)
    os.environ |= {
        janitor.FOLDER: str(folder),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # which torch makes when it is imported
    }
    if not launcher.cold:
        warm.start_server(folder)
    yield "check", lambda: _check(options, launcher, words, model)
    uses_sft = read_launch(script, words).uses_sft
    experts = from_arguments.expert_parallel_size(command_line.parse_command_line(words)) if uses_sft else 1
    small_job, report.changes = scaled.scale(job, options.processes, experts)
    if not uses_sft:
        scaled.check_own(small_job, script.name)
    real, layout = scaled.layout_of(job, experts), scaled.small_layout(job, small_job, experts)
    if options.script is not None:
        words = (*words, EXPERT_FLAG, str(layout.experts)) if experts > 1 else words
        of_job = len(report.changes)
        own = OwnRehearsal(launcher, small_job, words, layout.experts, not options.full_size, report.changes)
        yield f"run {script.name}", own.run
        report.of_real_model += ["how the loss falls, and long texts"] if len(report.changes) > of_job else []
        return
    prepared_jobs: list[prepare.Prepared] = []

    def shrink() -> str:
        prepared_jobs.append(prepare.prepare(small_job, model, words, launcher, real, layout))
        return prepared_jobs[0].sentence

    yield "make the model small", shrink
    (prepared,) = prepared_jobs
    report.changes += [*prepared.changes, *map(str, prepared.model.changed)]
    report.left_out += [f"--{name}" for name in prepared.run.left_out]
    report.of_real_model += prepared.model.not_shown
    report.of_real_model += ["the rows of the data set: made-up ones take their place"] if prepared.not_read else []
    yield from SftRehearsal(launcher, prepared, words).steps()


def _check(options: RehearseCommand, launcher: Rehearsed, words: tuple[str, ...], model: str | None) -> str:
    """Ends the rehearsal at errors of the linter, and shows its first warning.

    A model that only the script's arguments name may be readable only for the script; then the YAML is checked without
    it.
    """
    file = options.file
    arguments = launcher.folder / "arguments.json"
    arguments.write_text(json.dumps(command_line.parse_command_line(words)), encoding="utf-8")
    inputs = LintOptions(model=model, args=arguments if words else None, script=launcher.script)
    try:
        findings = lint(file, inputs)
    except UserError:
        if options.model or not model:
            raise
        model = None
        findings = lint(file, replace(inputs, model=None))
    if options.script is not None:
        findings = [finding for finding in findings if finding.code != OF_HEADS]
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first, *others = errors
        note = f" (and {counted(len(others), 'error')} more: accel-fsdp check {file})" if others else ""
        raise Failure(f"{first.code}: {joined(first.what, first.why)}{note}", key=first.key, fix=first.fix)
    warnings = [finding for finding in findings if finding.severity == "warning"]
    if not warnings:
        return "no errors"
    script_flags = ["--script", str(options.script)] if options.script is not None else []
    command = shlex.join(["accel-fsdp", "check", *(["--model", model] if model else []), *script_flags, str(file)])
    shown = f"{warnings[0].code}: {joined(warnings[0].what, warnings[0].why)}"
    return f"no errors, {counted(len(warnings), 'warning')}: {shown} ({command})"


def _step_result(name: str, action: Action) -> StepResult:
    began = time.monotonic()
    console.say(f"       {name} ...", style="dim")
    try:
        with console.waiting(name):
            proof = action()
        proof = Proof(proof) if isinstance(proof, str) else proof
        return StepResult(name, True, time.monotonic() - began, proof.sentence, output=proof.output)
    except UserError as error:
        failure = Failure(f"{error.what}: {error.why}", fix=error.fix)
    except CallFailed as error:
        failure = of_outcome(error.outcome)
    except Failure as error:
        failure = error
    took = time.monotonic() - began
    return StepResult(name, False, took, failure.what, failure.key, failure.line, failure.fix, failure.output)
