"""The command `accel-fsdp script`: check the YAML as a launch would, determine the job's needs, write the file."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from accel_fsdp import atomic_files, console, flag_words
from accel_fsdp.config import (
    CLUSTER_ENGINES,
    ClusterWord,
    Engine,
    JobConfig,
    engines_taking,
    read_config,
    yaml_file,
)
from accel_fsdp.errors import LONGEST_SHOWN, UNPRINTABLE, UsageError
from accel_fsdp.hardware import MachineFacts, machines
from accel_fsdp.job import from_yaml
from accel_fsdp.launch import launcher, place
from accel_fsdp.launch.script import kubernetes, skypilot, slurm, torchrun
from accel_fsdp.launch.script.flags import LEAST_GRACE, ScriptCommand
from accel_fsdp.launch.script.job_file import RESUMES, SHARED, TOKENS, JobFile
from accel_fsdp.linter import completed, read_launch, stops
from accel_fsdp.prediction import verdict
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.units import counted

CPUS_PER_GPU = 4
FIRST_MACHINE = "machine-0"
"""A placeholder for the address that the engine provides, because the linter requires one."""
LONGEST_NAME = 40
TIME = re.compile(r"(?=.)(?:(?P<days>\d+)d)?(?:(?P<hours>\d+)h)?(?:(?P<minutes>\d+)m)?", re.ASCII)
CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d\d)(?::\d\d)?", re.ASCII)
PATH = re.compile(r"/[\w./+-]*", re.ASCII)
"""A folder that needs no quotes in any of the files."""

SECRET_FLAG = re.compile(r"token|(.*_)?(hub|hf|auth|access|api)_?(token|key)|(.*_)?(password|secret)")
SECRET_VALUE = re.compile(r"(hf|sk|gh[a-z]|glpat)[_-]\w{8,}")
"""Arguments that hold a secret, by their names and by their values."""
IMAGE = re.compile(r"[a-zA-Z0-9](?:[\w./:@+-]*\w)?", re.ASCII)
"""The name of a container image, registry/name:tag@digest, which needs no quotes either."""


@dataclass(frozen=True)
class EngineKind:
    """`text` returns the job file's lines; `submit` is the command to type next, with FILE for the job file's name."""

    text: Callable[[JobFile], list[str]]
    submit: str
    each: str = ""
    """The text after it where each of several machines is started by hand."""


ENGINES: Mapping[ClusterWord, EngineKind] = {
    "slurm": EngineKind(slurm.text, "sbatch FILE"),
    "kubernetes": EngineKind(kubernetes.text, "kubectl create -f FILE"),
    "skypilot": EngineKind(skypilot.text, "sky jobs launch FILE"),
    "torchrun": EngineKind(torchrun.text, "bash FILE", " NUMBER ADDRESS, on each machine"),
}


def write(options: ScriptCommand, script_args: tuple[str, ...]) -> int:
    """Writes the job file, or prints it; returns 0, or 1 where the linter finds errors.

    Raises:
        UserError: the job could not run as it is, or the file exists.
        UsageError: a flag has an invalid value, or the YAML can't be read.
    """
    if options.output and not options.force:
        atomic_files.refuse_existing(options.output, "it may be the file of another job")
    _check_words(options, script_args)
    _refuse_unread(options)
    _check_numbers(options)
    _warn_of_secrets(script_args)
    kind = ENGINES[options.engine]
    job, document = read_config(options.file)
    script_args = completed(options.file, job.source, options.script, script_args)
    job_file = _job_file(options, job, script_args)
    if job_file.uses_sft:
        _refuse_own_flags(script_args)
    machine_0 = _place(CLUSTER_ENGINES[options.engine].title, job_file)
    settled = place.settle(machine_0, {}, job.values, str(options.file))
    launcher.launcher_words(options.file, options.script, job_file.words, place=settled, values=job.values)
    config_and_document = settled.applied(job), document
    nothing = "no job file was written; --no-check writes it as it is"
    if stops(options.file, config_and_document, options.script, job_file.words, options.no_check, stopped=nothing):
        return 1
    arguments = flag_words.parse_command_line(job_file.words)
    if job_file.uses_sft and (
        warning := verdict(settled.applied(job), arguments, by_name.read_shape, options.gpus or "")
    ):
        console.say(f"warning: {warning}", style="yellow", wrap=True)
    text = "\n".join(kind.text(job_file))
    if options.output is None:
        console.put(text, lines=True)
        return 0
    atomic_files.write_text(options.output, f"{text}\n")
    console.say(f"written: {options.output}", style="green")
    by_hand = kind.each if job_file.machines > 1 else ""
    console.say(f"next: {kind.submit.replace('FILE', shlex.quote(str(options.output)))}{by_hand}")
    return 0


def _check_words(options: ScriptCommand, script_args: tuple[str, ...]) -> None:
    if str(options.file) == yaml_file.STDIN:
        raise UsageError(
            "script - reads the YAML from stdin",
            why="the machines of the job would have no file to read",
            fix="accel-fsdp script ENGINE FILE SCRIPT, with a file that the machines see",
        )
    names = (str(options.file), str(options.script))  # the job file's first line contains both
    for word in (*names, *script_args):
        if UNPRINTABLE.search(word) or "\r" in word or ("\n" in word and word in names):
            raise UsageError(
                f"{word[:LONGEST_NAME]!r} holds a character that can't be printed",
                why="the job file would change it, or be invalid",
                fix="leave the character out",
            )
    if options.shared is not None and not PATH.fullmatch(options.shared):
        raise UsageError(
            f"--shared {options.shared} is not an absolute path of letters, digits and . _ + -",
            why="each machine looks there, wherever it starts",
            fix=f"--shared {SHARED}",
        )
    if options.image is not None and not IMAGE.fullmatch(options.image):
        raise UsageError(
            f"--image {options.image[:LONGEST_SHOWN]} is not the name of an image: letters, digits, . _ / : @ + -",
            why="the job file would be misread, or invalid",
            fix="--image REGISTRY/NAME:TAG, or NAME@DIGEST",
        )


def _warn_of_secrets(script_args: tuple[str, ...]) -> None:
    """Warns about a token in the job file, which others can read."""
    arguments = flag_words.parse_command_line(script_args)
    for name, value in arguments.items():
        if (SECRET_FLAG.fullmatch(name) and isinstance(value, str)) or SECRET_VALUE.match(str(value)):
            console.say(
                f"warning: the job file holds the secret of --{name}, and others may read it: leave the flag out, and "
                f"set {' or '.join(TOKENS)} on the machines, as a comment in the job file shows",
                style="yellow",
            )


def _refuse_unread(options: ScriptCommand) -> None:
    """Raises if a flag has no effect on this engine's job file."""
    used = {"--image": options.image is not None, "--spot": options.spot}
    for flag in used:
        engines = engines_taking(flag)
        if used[flag] and options.engine not in engines:
            raise UsageError(
                f"{flag} for {options.engine}",
                why="its job file has no place for it",
                fix=f"leave out {flag}; it is for {' and '.join(engines)}",
            )


def _refuse_own_flags(script_args: tuple[str, ...]) -> None:
    """Raises if a flag of this command is among the script's arguments, where it has no effect."""
    own_flags = flag_words.flags_of(ScriptCommand)
    flag = next((word for word in script_args if word.partition("=")[0] in own_flags), None)
    if flag is not None:
        raise UsageError(
            f"{flag} after SCRIPT would be the script's",
            why="the job would end when it starts",
            fix=f"accel-fsdp script ENGINE {flag.partition('=')[0]} ... FILE SCRIPT [script arguments]",
        )


def _job_file(options: ScriptCommand, config: JobConfig, script_args: tuple[str, ...]) -> JobFile:
    count, gpus, kind = _machines(options, config)
    uses_sft = read_launch(options.script, script_args).uses_sft
    arguments = flag_words.parse_command_line(script_args)
    is_resumed = RESUMES in arguments
    return JobFile(
        flags=options,
        words=(*script_args, f"--{RESUMES}", "auto") if uses_sft and not is_resumed else script_args,
        name=_name(options),
        machines=count,
        gpus=gpus,
        kind=kind,
        cpus=options.cpus or CPUS_PER_GPU * gpus,
        minutes=None if options.time is None else _minutes(options.time, options.grace),
        uses_sft=uses_sft,
    )


LEAST = {"cpus": 1, "host_memory": 1, "grace": LEAST_GRACE}


def _check_numbers(options: ScriptCommand) -> None:
    for name, least in LEAST.items():
        value, flag = getattr(options, name), flag_words.flag_of(name)
        if value is not None and value < least:
            raise UsageError(f"{flag} {value}", why=f"it takes {least} or more", fix=f"{flag} {least}, or leave it out")


def _machines(options: ScriptCommand, config: JobConfig) -> tuple[int, int, MachineFacts | None]:
    """The number of machines, their GPUs, and the kind of GPU: from the YAML, else from the flag.

    Raises:
        UsageError: neither gives them, the two contradict each other, or the job isn't for GPUs.
    """
    if config.off_gpus:
        on_tpu = "start it on the TPU's own machine: accel-fsdp launch FILE SCRIPT"
        command = "accel-fsdp launch" if config.off_gpus == "CPUs" else "accelerate launch --config_file"
        hint = f"start it there: {command} FILE SCRIPT"
        raise UsageError(
            f"{options.file} is for {config.off_gpus}",
            why="a job file asks for GPUs, and starts FSDP, DDP, DeepSpeed or one process on them",
            fix=on_tpu if config.engine is Engine.TPU else hint,
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


def _place(title: str, job: JobFile) -> place.Place:
    """Machine 0's place in the job, with the address that the engine will provide."""
    statements = {
        "num_machines": job.machines,
        "num_processes": job.machines * job.gpus,
        "machine_rank": 0,
        **({"main_process_ip": FIRST_MACHINE} if job.machines > 1 else {}),
    }
    return place.Place(
        title, {name: place.SourcedValue(value, f"machine 0 of {title}") for name, value in statements.items()}
    )


def _name(options: ScriptCommand) -> str:
    if options.name is None:
        word = re.sub(r"[^a-z0-9]+", "-", options.file.stem.lower()).strip("-")
        return f"{'' if word[:1].isalpha() else 'job-'}{word}"[:LONGEST_NAME].strip("-")
    if not re.fullmatch(rf"[a-z](?:[a-z0-9-]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?", options.name):
        raise UsageError(
            f"--name {options.name}",
            why=f"the engines take small letters, digits and -, a letter first, {LONGEST_NAME} at most",
            fix="--name llama-lora, for example",
        )
    return options.name


def _minutes(text: str, grace: int) -> int:
    match = TIME.fullmatch(text) or CLOCK.fullmatch(text)
    parts = {name: int(part or 0) for name, part in match.groupdict().items()} if match else {}
    minutes = (parts["days"] * 24 + parts["hours"]) * 60 + parts["minutes"] if parts else 0
    if not minutes:
        raise UsageError(
            f"--time {text} is not a time", why="it bounds how long the job may take", fix="--time 36h, 90m or 2d12h"
        )
    if minutes * 60 <= grace:
        raise UsageError(
            f"--time {text} is no longer than the {grace} seconds of --grace",
            why="the job would get the signal to stop when it starts",
            fix=f"a longer --time, or --grace {LEAST_GRACE}",
        )
    return minutes
