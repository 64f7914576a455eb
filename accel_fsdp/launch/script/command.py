"""The command `accel-fsdp script`: check the YAML as a launch would, determine the job's needs, write the file."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from accel_fsdp import atomic_files, command_line, console
from accel_fsdp.config import SCHEDULERS, JobConfig, header, read_config, schedulers_taking, yaml_file
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import MachineFacts, machines
from accel_fsdp.job import from_yaml
from accel_fsdp.launch import launcher, meeting, place
from accel_fsdp.launch.script.flags import ScriptCommand
from accel_fsdp.launch.script.job_file import RESUMES, JobFile
from accel_fsdp.linter import completed, read_launch, stops
from accel_fsdp.prediction import verdict
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.units import counted

CPUS_PER_GPU = 4
FIRST_MACHINE = "machine-0"
"""A placeholder for the address that the scheduler provides, because the linter requires one."""
FORMS = {
    "name": (r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "small letters, digits and -, a letter first, 40 at most"),
    "shared": (r"/[\w./+-]*", "an absolute path of letters, digits and . _ + -"),
    "image": (r"[a-zA-Z0-9]([\w./:@+-]*\w)?", "the name of an image: letters, digits, . _ / : @ + -"),
    "time": (
        r"(\d+-)?\d+(:\d+){0,2}",
        "a time as SLURM reads it: 90 (minutes), 36:00:00 (hours), 2-12 (days and hours)",
    ),
    "grace": (r"[3-9]\d|\d{3,}", "30 or more"),
    "cpus": (r"[1-9]\d*", "1 or more"),
    "host_memory": (r"[1-9]\d*", "1 or more"),
}
"""What flags must be, as the files hold them without quotes."""


def write(options: ScriptCommand, script_args: tuple[str, ...]) -> int:
    """Writes the job file, or prints it; returns 0, or 1 where the linter finds errors."""
    if options.output and not options.force:
        atomic_files.refuse_existing(options.output, "it may be the file of another job")
    _check_flags(options)
    config, document = read_config(options.file)
    script_args = completed(options.file, config.source, options.script, script_args)
    if note := header.missing_here(script_args):
        console.say(note, style="yellow", wrap=True)
    job = _job_file(options, config, script_args)
    arguments = command_line.parse_command_line(job.words)
    _check_script(job, script_args, arguments)
    settled = place.settle(_machine_0(job), {}, config.values, str(options.file))
    launcher.launcher_words(options.file, options.script, job.words, place=settled, values=config.values)
    config = settled.applied(config)
    nothing = "no job file was written; --no-check writes it as it is"
    if stops(options.file, (config, document), options.script, job.words, options.no_check, stopped=nothing):
        return 1
    if job.uses_sft and (warning := verdict(config, arguments, by_name.read_shape, options.gpus or "")):
        console.say(f"warning: {warning}", style="yellow", wrap=True)
    if options.output is None:
        console.put(job.text(), lines=True)
        return 0
    atomic_files.write_text(options.output, f"{job.text()}\n")
    console.say(f"written: {options.output}", style="green")
    by_hand = " NUMBER ADDRESS, on each machine" if options.scheduler == "torchrun" and job.machines > 1 else ""
    console.say(f"next: {SCHEDULERS[options.scheduler].submit} {shlex.quote(str(options.output))}{by_hand}")
    if job.seconds:
        console.say(f"time limit: {timedelta(seconds=job.seconds)} (hours:minutes:seconds)")
    return 0


def _check_flags(options: ScriptCommand) -> None:
    if str(options.file) == yaml_file.STDIN:
        raise UsageError(
            "script - reads the YAML from stdin",
            why="the machines of the job would have no file to read",
            fix="accel-fsdp script SCHEDULER FILE SCRIPT, with a file that the machines see",
        )
    for flag, is_used in {"--image": options.image, "--spot": options.spot}.items():
        if is_used and options.scheduler not in (takers := schedulers_taking(flag)):
            why, fix = "its job file has no place for it", f"leave out {flag}; it is for {' and '.join(takers)}"
            raise UsageError(f"{flag} for {options.scheduler}", why=why, fix=fix)
    for name, (pattern, form) in FORMS.items():
        value, flag = getattr(options, name), command_line.flag_of(name)
        if value is not None and not re.fullmatch(pattern, str(value), re.ASCII):
            why = "the job file would be misread, or the job would not start"
            raise UsageError(f"{flag} {value} is not {form}", why=why, fix=f"{flag}: {form}; or leave it out")


def _check_script(job: JobFile, script_args: tuple[str, ...], arguments: Mapping[str, object]) -> None:
    """Raises if the job could not run this script with these arguments; warns about a token that others can read."""
    for name in filter(meeting.SECRET.fullmatch, arguments):
        warning = f"warning: the job file holds the secret of --{name}, and others may read it: leave the flag out, and"
        console.say(f"{warning} set HF_TOKEN or WANDB_API_KEY, as a comment in the job file shows", style="yellow")
    if not job.uses_sft and job.flags.scheduler == "torchrun":
        raise UsageError(
            f"torchrun reads no Accelerate YAML, and {job.flags.script} doesn't either",
            why="the script would train without FSDP",
            fix="accel-fsdp launch --machine-rank N --main-process-ip ADDRESS FILE SCRIPT, on each machine",
        )
    own_flags = command_line.flags_of(ScriptCommand)
    if job.uses_sft and (flag := next((word for word in script_args if word.partition("=")[0] in own_flags), "")):
        raise UsageError(
            f"{flag} after SCRIPT would be the script's",
            why="the job would end when it starts",
            fix=f"accel-fsdp script SCHEDULER {flag.partition('=')[0]} ... FILE SCRIPT [script arguments]",
        )
    output = str(arguments.get("output_dir", ""))
    if job.uses_sft and job.flags.scheduler == "skypilot" and not f"{output}/".startswith(f"{job.folder}/"):
        raise UsageError(
            f"--output_dir {output or 'is missing'}, and SkyPilot gives each start a separate disk",
            why="a later start would find no checkpoint, and other machines not the shards of this one",
            fix=f"train/sft.py --output_dir {job.folder}/{output.lstrip('/') or 'runs/first'}; "
            "or accel-fsdp script --shared FOLDER with a folder that contains it",
        )


def _job_file(options: ScriptCommand, config: JobConfig, script_args: tuple[str, ...]) -> JobFile:
    count, gpus, kind = _machines(options, config)
    if options.scheduler == "skypilot" and (kind is None or kind.accelerator is None):
        raise UsageError(
            f"{options.file} doesn't say which GPU",
            why="SkyPilot looks for machines that have it",
            fix=f"accel-fsdp script --gpus {f'{count}x' if count > 1 else ''}{gpus}xH100-80GB",
        )
    uses_sft = read_launch(options.script, script_args).uses_sft
    if uses_sft and RESUMES not in command_line.parse_command_line(script_args):
        script_args = (*script_args, f"--{RESUMES}", "auto")
    name = re.sub(r"^(?![a-z])", "job-", re.sub(r"[^a-z0-9]+", "-", options.file.stem.lower()).strip("-"))
    flags = replace(options, name=options.name or name[:40].strip("-"), cpus=options.cpus or CPUS_PER_GPU * gpus)
    return JobFile(flags, script_args, count, gpus, kind, _seconds(options), uses_sft)


def _machines(options: ScriptCommand, config: JobConfig) -> tuple[int, int, MachineFacts | None]:
    """The number of machines, their GPUs, and the kind of GPU: from the YAML and the flag, which must agree."""
    if config.off_gpus:
        raise UsageError(
            f"{options.file} is for {config.off_gpus}",
            why="a job file asks for GPUs, and starts FSDP, DDP, DeepSpeed or one process on them",
            fix="start it on its own machine: accelerate launch --config_file FILE SCRIPT",
        )
    processes = config.processes
    stated = config.number("num_machines") if "num_machines" in config.values else 0  # not Accelerate's default
    text = options.gpus or from_yaml.gpus_in_header(config)
    if not text:
        if not processes:
            raise UsageError(
                f"{options.file} has no num_processes",
                why="the job file asks for that many GPUs",
                fix="num_processes in the YAML, or accel-fsdp script --gpus 2x8xH100-80GB for two machines",
            )
        number = stated or 1
        return number, place.ranks_per_machine(number, processes, " in the YAML"), None
    machine, number = machines.parse(text)
    in_file = (stated or number, processes or number * machine.count)
    if in_file != (number, number * machine.count) or not machine.count:
        in_yaml = f"says num_machines {in_file[0]}, num_processes {in_file[1]}"
        raise UsageError(
            f"--gpus {text} is {counted(number, 'machine')} with {counted(machine.count, 'GPU')} each, and "
            f"{options.file} {'starts one process' if config.is_alone else in_yaml}",
            why="some GPUs would stay idle, or some ranks have none",
            fix="make them agree",
        )
    return number, machine.count, machine


def _machine_0(job: JobFile) -> place.Place:
    """Machine 0's place in the job, with the address that the scheduler will provide."""
    title = SCHEDULERS[job.flags.scheduler].title
    values: dict[str, object] = {"num_machines": job.machines, "num_processes": job.machines * job.gpus}
    values |= {"machine_rank": 0, **({"main_process_ip": FIRST_MACHINE} if job.machines > 1 else {})}
    return place.Place(title, {name: place.SourcedValue(values[name], f"machine 0 of {title}") for name in values})


def _seconds(options: ScriptCommand) -> int | None:
    """The seconds of a time limit as SLURM reads it: a number alone is minutes, and hours after days."""
    if options.time is None:
        return None
    days, _, clock = options.time.rpartition("-")
    numbers = list(map(int, clock.split(":")))
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    seconds = int(days or 0) * 86400 + sum(a * b for a, b in zip(numbers, units, strict=False))
    if seconds <= options.grace:
        what = f"--time {options.time} is no longer than the {options.grace} seconds of --grace"
        raise UsageError(what, why="the job would stop at its start", fix="a longer --time, or --grace 30")
    return seconds
