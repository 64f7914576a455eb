"""The command line: parse, call, render, exit code. The commands import torch and its friends, this module does not."""

import dataclasses
import os
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from accel_fsdp import __version__
from accel_fsdp.config import MigrationTarget
from accel_fsdp.errors import NotInstalled, UsageError, guard, is_installed, nearest, to_stdout
from accel_fsdp.planner import DTYPES, PlanCommand
from accel_fsdp.wizard import PRESETS, QUESTIONS, Question

EXPORT_ENDED = "OUT is as it was"


@dataclass(frozen=True)
class ConfigOptions:
    """What `accel-fsdp config` takes besides the answers."""

    output: Annotated[
        Path | None,
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
        Path | None,
        tyro.conf.arg(
            name="from",
            metavar="FILE",
            help="Re-edit this YAML: its answers, comments and other keys are kept, and a diff is shown. "
            "Without -o it is written in place.",
        ),
    ] = None
    preset: Annotated[
        str | None,
        tyro.conf.arg(metavar="NAME", help="Answers by name; flags overrule them. One of: " + ", ".join(PRESETS) + "."),
    ] = None


@dataclass(frozen=True)
class Launch:
    """Lint the YAML, then run the script with it: accel-fsdp launch [flags] FILE SCRIPT [script arguments]."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE", help="An Accelerate YAML.")]
    script: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(metavar="SCRIPT", help="The training script, for example train/sft.py."),
    ]
    dry_run: Annotated[
        bool, tyro.conf.arg(help="Print the command and the environment of the ranks; start nothing.")
    ] = False
    machine_rank: Annotated[
        int | None,
        tyro.conf.arg(metavar="N", help="Which of the YAML's machines this is, from 0.", help_behavior_hint=""),
    ] = None
    no_check: Annotated[bool, tyro.conf.arg(help="Launch although the linter finds errors; they are shown.")] = False


@dataclass(frozen=True)
class Check:
    """Lint Accelerate YAMLs against what Accelerate really reads; with --model and --args, against those too."""

    files: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="FILE", help="Accelerate YAMLs; - for stdin.", help_behavior_hint="(one or more)"),
    ] = ()
    model: Annotated[
        str | None, tyro.conf.arg(metavar="ID_OR_FOLDER", help="The model, to check layer classes and sizes.")
    ] = None
    args: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="FILE", help="The training script's arguments: a YAML or JSON mapping, or a command line."
        ),
    ] = None
    checkpoint: Annotated[
        Path | None, tyro.conf.arg(metavar="FOLDER", help="A checkpoint to resume, or an export, to look into.")
    ] = None
    script: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help="The training script, to read (it isn't run).")
    ] = None
    here: Annotated[bool, tyro.conf.arg(help="Look at this machine too: GPUs, memory, disk, port.")] = False
    strict: Annotated[bool, tyro.conf.arg(help="Warnings count as errors.")] = False
    fix: Annotated[bool, tyro.conf.arg(help="Repair what has one right answer, keep comments, show the diff.")] = False
    json: Annotated[bool, tyro.conf.arg(help="Findings as JSON.")] = False
    list_rules: Annotated[bool, tyro.conf.arg(help="Show all rules.")] = False
    explain: Annotated[str | None, tyro.conf.arg(metavar="CODE", help="Show what a rule is about.")] = None


@dataclass(frozen=True)
class Migrate:
    """Rewrite an Accelerate YAML for another engine, in place or with -o, and say what becomes of each key."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE", help="An Accelerate YAML.")]
    to: Annotated[MigrationTarget, tyro.conf.arg(help="The engine to rewrite it for.")]
    output: Annotated[
        Path | None, tyro.conf.arg(aliases=["-o"], metavar="OUT", help="Write there and leave FILE as it is.")
    ] = None
    force: Annotated[bool, tyro.conf.arg(help="Write although a meaning is lost.")] = False
    overwrite: Annotated[bool, tyro.conf.arg(help="Replace an existing OUT.")] = False
    json: Annotated[bool, tyro.conf.arg(help="The changes and the new YAML as JSON.")] = False
    dry_run: Annotated[bool, tyro.conf.arg(help="Write nothing; print the new YAML.")] = False
    layer_class: Annotated[
        str, tyro.conf.arg(metavar="NAME", help="The layer class to wrap, where FILE names none.")
    ] = ""


@dataclass(frozen=True)
class Export:
    """Write a checkpoint as a verified Hugging Face folder, in bounded memory: accel-fsdp export SRC OUT."""

    src: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(metavar="SRC", help="A run's folder, a checkpoint in it, or a file or folder of its weights."),
    ]
    out: Annotated[
        tyro.conf.Positional[Path | None],
        tyro.conf.arg(metavar="OUT", help="The folder to write.", help_behavior_hint="(not with --list or --check)"),
    ] = None
    list: Annotated[bool, tyro.conf.arg(help="Show which checkpoints SRC holds, and what they lack.")] = False
    check: Annotated[bool, tyro.conf.arg(help="Verify SRC, a folder that was exported.")] = False
    model: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="ID_OR_FOLDER",
            help="The model that was trained: its config, tokenizer and dtype.",
            help_behavior_hint="(default: what the run's folder or the adapter says)",
        ),
    ] = None
    dtype: Annotated[
        str | None,  # tyro would offer None beside the names of a Literal
        tyro.conf.arg(
            metavar="{" + ",".join(DTYPES) + "}",
            help="Dtype of the weights.",
            help_behavior_hint="(default: the model's that was trained)",
        ),
    ] = None
    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE", help="Largest file, such as 5GB.")] = "50GB"
    merge_adapter: Annotated[bool, tyro.conf.arg(help="Merge LoRA or DoRA into the base model.")] = False
    adapter: Annotated[
        str | None,
        tyro.conf.arg(metavar="NAME", help="Which adapter, where SRC holds several, as PEFT calls them: default, ..."),
    ] = None
    format: Annotated[
        Literal["safetensors", "pth"], tyro.conf.arg(help="pth: a single file for torch.load, model.pth.")
    ] = "safetensors"
    with_optimizer: Annotated[bool, tyro.conf.arg(help="Also write the optimizer's state: optimizer.safetensors.")] = (
        False
    )
    verify: Annotated[
        Literal["bytes", "load", "logits"],
        tyro.conf.arg(
            help="bytes: names, files and hashes; load: from_pretrained too; "
            "logits: against the checkpoint loaded by torch, whole."
        ),
    ] = "load"
    allow_non_finite: Annotated[bool, tyro.conf.arg(help="Accept weights that are NaN or infinite; count them.")] = (
        False
    )
    no_sync: Annotated[bool, tyro.conf.arg(help="Don't wait until the disk has it all.")] = False
    force: Annotated[bool, tyro.conf.arg(help="Replace an existing model in OUT.")] = False
    json: Annotated[bool, tyro.conf.arg(help="The report, or the list, as JSON.")] = False
    push_to_hub: Annotated[str | None, tyro.conf.arg(metavar="REPO", help="Upload OUT to this repository.")] = None
    private: Annotated[bool, tyro.conf.arg(help="Make that repository private.")] = False


@dataclass(frozen=True)
class Init:
    """Copy the training script, a YAML and a short README into a project of your own; nothing is overwritten."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR", help="The project; made if need be.")]
    config: Annotated[
        str, tyro.conf.arg(metavar="NAME", help="Which of the ready-made YAMLs: fsdp2, fsdp2_lora, zero3, ddp, ...")
    ] = "fsdp2"
    native: Annotated[bool, tyro.conf.arg(help="Also native.py, the same job in plain PyTorch.")] = False


def _flag_field(question: Question) -> tuple[str, Any, Any]:
    help_text = tyro.conf.arg(
        metavar=question.metavar,
        help=question.prompt,
        help_behavior_hint="(asked)",
        aliases=list(question.aliases) or None,
    )
    return question.field, Annotated[str | None, help_text], dataclasses.field(default=None)


Config = dataclasses.make_dataclass("Config", [_flag_field(q) for q in QUESTIONS], bases=(ConfigOptions,), frozen=True)
Config.__doc__ = "Ask, then write an Accelerate YAML. Every question has a flag; Escape goes back to the one before."


def main() -> None:
    """Entry point of `accel-fsdp`."""
    words = sys.argv[1:]
    launches, code = words[:1] == ["launch"], 0
    if not launches and words[:1] != ["export"] and hasattr(signal, "SIGPIPE"):  # export has pipes and sockets itself
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `accel-fsdp check --list-rules | head` ends quietly

    def run() -> None:
        nonlocal code
        if words == ["--version"]:
            with to_stdout():
                sys.stdout.write(f"{__version__}\n")
            return
        code = _run(*_parse(words))

    ends = {"launch": "interrupted", "export": f"interrupted, {EXPORT_ENDED}"}
    sys.exit(guard(run, ends.get(words[0] if words else "", "interrupted, nothing written")) or code)


def _parse(words: list[str]) -> tuple[Any, tuple[str, ...]]:
    own, script_args = _split_script_args(words)
    with to_stdout():  # --help
        command = tyro.extras.subcommand_cli_from_dict(
            {
                **{"config": Config, "plan": PlanCommand, "check": Check, "migrate": Migrate, "launch": Launch},
                **{"export": Export, "init": Init},
            },
            prog="accel-fsdp",
            description=f"accel-fsdp {__version__}: from a model and GPUs to a trained, exported model with FSDP. "
            "accel-fsdp --version prints the version.",
            args=own,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    return command, script_args


def _run(command: Any, script_args: tuple[str, ...]) -> int:
    if isinstance(command, Launch):
        return _launch(command, script_args)
    if isinstance(command, Check):
        from accel_fsdp import linter

        if command.list_rules or command.explain:
            return linter.show_rules(command.explain)
        asked = {field.name: getattr(command, field.name) for field in dataclasses.fields(linter.LintOptions)}
        options = linter.LintOptions(**asked)
        return linter.lint_all(command.files, options)
    if isinstance(command, Migrate):
        from accel_fsdp import migration

        given = (command.output, command.force, command.overwrite, command.json, command.dry_run, command.layer_class)
        return migration.migrate(command.file, command.to, migration.MigrateOptions(*given))
    if isinstance(command, PlanCommand):
        from accel_fsdp import planner

        return planner.show_plan(planner.options_of(command))
    if isinstance(command, Export):
        return _export(command)
    if isinstance(command, Init):
        from accel_fsdp import init_command

        return init_command.init(command.folder, command.config, command.native)
    return _config(command)


def _export(command: Export) -> int:
    from accel_fsdp import exporter
    from accel_fsdp.exporter import companion_files

    if command.dtype is not None and command.dtype not in DTYPES:
        raise UsageError(
            f"--dtype {command.dtype} is no dtype of an export",
            why="weights are written in one of " + ", ".join(DTYPES),
            fix=f"--dtype {nearest(command.dtype.replace('fp', 'float'), DTYPES) or 'bfloat16'}",
        )
    for name in {"SIGTERM", "SIGHUP"} & signal.Signals.__members__.keys():
        if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN:  # nohup's
            signal.signal(signal.Signals[name], _terminate)
    asked = {field.name: getattr(command, field.name) for field in dataclasses.fields(exporter.ExportOptions)}
    asked["dtype"] = companion_files.DTYPES.get(command.dtype or "")
    return exporter.run(exporter.ExportOptions(**asked))


def _terminate(number: int, _: object) -> None:
    """Ends as Ctrl-C does, so that nothing half-written stays; a second signal doesn't stop the cleaning."""
    signal.signal(number, signal.SIG_IGN)
    os.write(sys.stderr.fileno(), f"\nended by {signal.Signals(number).name}, {EXPORT_ENDED}\n".encode())
    raise SystemExit(128 + number)


def _split_script_args(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Everything after the script of `launch` belongs to the script, as with `accelerate launch`."""
    if words[:1] != ["launch"]:
        return words, ()
    values = {i + 1 for i, word in enumerate(words) if word.replace("-", "_") == "__machine_rank"}
    positions = [i for i, word in enumerate(words) if i > 0 and not word.startswith("-") and i not in values]
    end = positions[1] + 1 if len(positions) > 1 else len(words)
    script_args = tuple(words[end:])
    if ours := {"--dry-run", "--no-check"} & set(script_args):  # tyro's usage line puts flags last
        raise UsageError(
            f"{min(ours)} after SCRIPT would be the script's",
            why="the job would really start" if "--dry-run" in ours else "the file would be checked",
            fix=f"accel-fsdp launch {min(ours)} FILE SCRIPT [script arguments]",
        )
    return words[:end], script_args


def _launch(command: Launch, script_args: tuple[str, ...]) -> int:
    from accel_fsdp import console, linter
    from accel_fsdp.config import yaml_file
    from accel_fsdp.launch import launcher

    if linter.stops(command.file, command.script, script_args, command.no_check):
        return 1
    parses = is_installed("accelerate") or not command.dry_run
    read = launcher.launcher_args if parses else launcher.unparsed_args
    args = read(command.file, command.script, script_args)
    launcher.take_machine_rank(args, yaml_file.load(command.file), command.machine_rank)
    if not command.dry_run:
        return launcher.launch(args)
    for name, value in sorted(launcher.environment(args).items()) if parses else ():
        console.put(f"{name}={shlex.quote(value)}")
    console.put(shlex.join(launcher.command(args)))
    if not parses:
        shown = NotInstalled.of("accelerate", "the environment of the ranks")
        console.say(f"note: {shown.what}: {shown.fix}", style="yellow", wrap=True)
    return 0


def _config(command: Any) -> int:
    from accel_fsdp import wizard

    flags = {q.field: getattr(command, q.field) for q in QUESTIONS if getattr(command, q.field) is not None}
    options = wizard.WizardOptions(command.output, command.yes, command.force, command.from_file, command.preset)
    return wizard.configure(options, flags)
