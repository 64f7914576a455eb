"""The command line: parse, call, render, exit code. A command's modules are imported when it is called."""

import gc
import math
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from accel_fsdp import __version__, command_line
from accel_fsdp.errors import INTERRUPTED, NotInstalled, UsageError, did_you_mean, guard, is_installed, to_stdout

BEFORE_ARGS = {"launch": 2, "script": 3}
"""The number of positional words before the arguments of a script: FILE SCRIPT, and SCHEDULER before them."""


RARE_COLLECTIONS = (100_000, 100, 100)
"""Thresholds of the garbage collector; with Python's own, it takes a fifth of the time of importing transformers."""


def main() -> None:
    if isinstance(sys.stdout, TextIOWrapper):  # as stderr has it: a pipe's encoding may lack a letter of the output
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:]
    launches, code = words[:1] == ["launch"], 0
    if not launches and words[:1] != ["export"] and hasattr(signal, "SIGPIPE"):  # export uploads through sockets
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `accel-fsdp check --list-rules | head` ends quietly
    gc.set_threshold(*RARE_COLLECTIONS)

    def run() -> None:
        nonlocal code
        if words == ["--version"]:
            with to_stdout():
                sys.stdout.write(f"{__version__}\n")
            return
        code = call(words)

    command = COMMANDS.get(words[0] if words else "")

    def interrupted() -> str:
        outcome = command.left() if command else "nothing written"
        return f"interrupted, {outcome}" if outcome else "interrupted"

    code = guard(run, interrupted) or code
    if code == INTERRUPTED:  # a thread that Ctrl-C has met at its start would be waited for without end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def call(words: list[str]) -> int:
    """Runs a command, given in words, and returns its exit code.

    Raises:
        UserError: the command failed. SystemExit: help was asked for, or a flag is wrong.
    """
    command, flags, script_args = _parse(words)
    if command.cleaned:
        _end_as_ctrl_c_does(command.left)
    run = _import(command.run) if isinstance(command.run, str) else command.run
    code: int = run(flags, script_args) if command.has_script else run(flags)
    return code


def _parse(words: list[str]) -> tuple["Command", Any, tuple[str, ...]]:
    own_words, script_args = _split_script_args(words)
    name, *rest = own_words or ["--help"]
    with to_stdout():  # --help
        if name in ("-h", "--help"):
            sys.stdout.write(_overview())
            raise SystemExit(0)
        if name not in COMMANDS:
            raise UsageError(
                f"unknown command: {name}.{did_you_mean(name, COMMANDS)}",
                why="nothing was done",
                fix=f"one of {', '.join(COMMANDS)}; accel-fsdp --help says what each does",
            )
        command = COMMANDS[name]
        flags = command_line.parse(f"accel-fsdp {name}", command.flags(), rest, command.summary)
    return command, flags, script_args


def _overview() -> str:
    lines = [
        "usage: accel-fsdp COMMAND [-h] ...\n",
        "From a model and GPUs to a trained, exported model with FSDP.\n",
    ]
    for name, command in COMMANDS.items():
        lines += textwrap.wrap(command.summary, 79, initial_indent=f"  {name:13}", subsequent_indent=" " * 15)
    return "\n".join(lines) + "\n"


def _config(options: Any) -> int:
    from accel_fsdp import wizard

    values = {question.field: getattr(options, question.field) for question in wizard.QUESTIONS}
    flags = {name: str(value) for name, value in values.items() if value is not None}
    return wizard.configure(options, flags)


def _plan(options: Any) -> int:
    from accel_fsdp import planner

    return planner.show_comparison(options) if options.compare else planner.show_plan(options)


def _check(options: Any) -> int:
    from accel_fsdp import linter

    if options.list_rules or options.explain:
        return linter.show_rules(options.explain)
    options = linter.with_folders(options)
    code = linter.lint_all(options)
    from accel_fsdp import console
    from accel_fsdp.planner import verdicts

    for line in verdicts.warnings(options):
        console.say(line, style="yellow", wrap=True)
    return code


def _doctor(options: Any) -> int:
    from accel_fsdp.launch import doctor

    return _launch(doctor.of_links(options), ()) if options.bandwidth else doctor.examine(options)


def _end_as_ctrl_c_does(outcome: Callable[[], str]) -> None:
    """Lets SIGTERM and SIGHUP raise, so that half-written files are removed; `outcome` is printed."""

    def terminate(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not stop the clean-up
        os.write(sys.stderr.fileno(), f"\nended by {signal.Signals(number).name}, {outcome()}\n".encode())
        raise SystemExit(128 + number)

    for name in {"SIGTERM", "SIGHUP"} & signal.Signals.__members__.keys():
        if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN:  # nohup's
            signal.signal(signal.Signals[name], terminate)


def _split_script_args(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Splits off a script's arguments: all after SCRIPT for `launch` and `script`; all after -- for `rehearse`."""
    if words[:1] == ["rehearse"] and "--" in words:
        return words[: words.index("--")], tuple(words[words.index("--") + 1 :])
    if not words or words[0] not in BEFORE_ARGS:
        return words, ()
    flags = command_line.flags_of(COMMANDS[words[0]].flags())
    with_value = {name for name, flag in flags.items() if not flag.is_switch}
    end, left, is_value = 1, BEFORE_ARGS[words[0]], False
    while end < len(words) and left:
        word = words[end]
        if not (is_value or word.startswith("-")):
            left -= 1
        is_value = word.replace("_", "-") in with_value
        end += 1
    script_args = tuple(words[end:])
    own_flags = {"--dry-run", "--no-check", "--cpu"} & set(script_args)
    if words[0] == "launch" and own_flags:
        raise UsageError(
            f"{min(own_flags)} after SCRIPT would be the script's",
            why="the job would really start" if "--dry-run" in own_flags else "the file would be checked",
            fix=f"accel-fsdp launch {min(own_flags)} FILE SCRIPT [script arguments]",
        )
    return words[:end], script_args


def _memory_warning(script: Any, words: tuple[str, ...], config: Any) -> str:
    """That a job of train/sft.py is predicted not to fit; empty if it fits or is unknown."""
    from accel_fsdp import linter
    from accel_fsdp.prediction import verdict
    from accel_fsdp.prediction.tracing import by_name

    subject = linter.read_launch(script, words)
    return verdict(config, subject.args or {}, by_name.read_shape) if subject.uses_sft else ""


def _launch(options: Any, script_args: tuple[str, ...]) -> int:
    from accel_fsdp import console, linter
    from accel_fsdp.config import header, read_config
    from accel_fsdp.launch import launcher, place

    if options.timeout < 1:
        raise UsageError(
            f"--timeout {options.timeout}",
            why="machines need time to connect",
            fix="accel-fsdp launch --timeout SECONDS FILE SCRIPT",
        )
    if options.hang_timeout is not None and not 0 <= options.hang_timeout < math.inf:
        raise UsageError(
            f"--hang-timeout {options.hang_timeout}",
            why="it is how many seconds a step, or the wait for other ranks, may take; 0 sets no limit",
            fix="accel-fsdp launch --hang-timeout SECONDS FILE SCRIPT",
        )
    job, document = read_config(options.file)
    script_args = linter.completed(options.file, job.source, options.script, script_args)
    if note := header.missing_here(script_args):
        console.say(note, style="yellow", wrap=True)
    flags = {name: getattr(options, name) for name in place.FLAGS}
    here = place.settle(place.now(), flags, job.values, str(options.file))
    read = here.applied(job), document
    if linter.stops(options.file, read, options.script, script_args, options.no_check, here.sources(job.values)):
        return 1
    if warning := _memory_warning(options.script, script_args, read[0]):
        console.say(f"warning: {warning}", style="yellow", wrap=True)
    parses = is_installed("accelerate") or not options.dry_run
    words = launcher.launcher_words(options.file, options.script, script_args, options.cpu, here, job.values)
    args = launcher.parse(options.file, words, here) if parses else None
    if not options.dry_run:
        if options.cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return launcher.launch(args, options.timeout, options.hang_timeout)
    if is_installed("transformers") and script_args and linter.read_launch(options.script, ()).uses_sft:
        from accel_fsdp.training import arguments

        arguments.refuse_wrong(script_args)
    if here.engine:
        console.put(f"# {here.engine}: {here}")
    console.put(shlex.join(["accelerate", "launch", *words]), lines=True)
    if parses:
        for name, value in sorted(launcher.environment(args).items()):
            console.put(f"{name}={shlex.quote(value)}", lines=True)
    else:
        library = NotInstalled.of("accelerate", "Accelerate's parser was skipped, since it")
        unknown = "the environment of the ranks is unknown too"
        console.say(f"note: {library.what}; {unknown}: {library.fix}", style="yellow", wrap=True)
    return 0


@dataclass(frozen=True)
class Command:
    """`summary` is its line in the help, `place` the class of its flags, `run` the function that takes them.

    `cleaned`: the message of a command that cleans up when Ctrl-C, SIGTERM or SIGHUP ends it; `outcome`: the message of
    the others at Ctrl-C.
    """

    summary: str
    place: str
    run: str | Callable[..., int]
    outcome: str = "nothing written"
    cleaned: str = ""
    has_script: bool = False

    def left(self) -> str:
        """A sentence on the files that remain if the command is ended now."""
        return self.cleaned or self.outcome

    def flags(self) -> type:
        flags_class: type = _import(self.place)
        return flags_class


def _import(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


COMMANDS = {
    "config": Command(
        "Ask, then write an Accelerate YAML. Every question has a flag; Escape goes back to the one before.",
        "accel_fsdp.wizard:ConfigCommand",
        _config,
    ),
    "plan": Command(
        "Predict memory, traffic, step time and cost before a GPU is rented; recommend a strategy and say why.",
        "accel_fsdp.planner:PlanCommand",
        _plan,
    ),
    "check": Command(
        "Lint Accelerate YAMLs against what Accelerate really reads; with --model and --args, against those too.",
        "accel_fsdp.linter:CheckCommand",
        _check,
    ),
    "migrate": Command(
        "Rewrite an Accelerate YAML for another engine, in place or with -o, and say what becomes of each key.",
        "accel_fsdp.wizard:MigrateCommand",
        "accel_fsdp.wizard:migrate",
    ),
    "launch": Command(
        "Lint the YAML, then run the script with it: accel-fsdp launch [flags] FILE SCRIPT [script arguments].",
        "accel_fsdp.launch:LaunchCommand",
        _launch,
        outcome="",
        has_script=True,
    ),
    "script": Command(
        "Write the job file of a cluster: accel-fsdp script SCHEDULER [flags] FILE SCRIPT [script arguments].",
        "accel_fsdp.launch.script:ScriptCommand",
        "accel_fsdp.launch.script:write",
        has_script=True,
    ),
    "rehearse": Command(
        "Run the job in small on this machine, on CPU: train, save, kill, resume, export, reload; compare each.",
        "accel_fsdp.rehearsal:RehearseCommand",
        "accel_fsdp.rehearsal:rehearse",
        cleaned="nothing is left of the rehearsal",
        has_script=True,
    ),
    "export": Command(
        "Write a checkpoint as a verified Hugging Face folder, tensor by tensor: accel-fsdp export SRC OUT.",
        "accel_fsdp.exporter:ExportCommand",
        "accel_fsdp.exporter:run",
        cleaned="OUT is as it was, or the whole new export",
    ),
    "checkpoints": Command(
        "List a run's checkpoints with their losses; delete some.",
        "accel_fsdp.checkpoints.command:CheckpointsCommand",
        "accel_fsdp.checkpoints.command:show",
        outcome="what is half moved or deleted doesn't look like a checkpoint",
    ),
    "convert": Command(
        "Rewrite a checkpoint for another engine or number of ranks, with the optimizer: accel-fsdp convert SRC OUT.",
        "accel_fsdp.conversion:ConvertCommand",
        "accel_fsdp.conversion:convert",
        cleaned="nothing is left of OUT",
    ),
    "init": Command(
        "Copy the training script, a YAML and a short README into a project of your own; nothing is overwritten.",
        "accel_fsdp.launch:InitCommand",
        "accel_fsdp.launch:init",
    ),
    "doctor": Command(
        "Show what this machine has and what is wrong with it; with --bandwidth FILE, measure the links of a job.",
        "accel_fsdp.launch.doctor:DoctorCommand",
        _doctor,
        outcome="",
    ),
}
