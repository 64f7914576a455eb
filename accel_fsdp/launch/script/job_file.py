"""The content of a job file for any engine, and the parts that all job files share."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from accel_fsdp import __version__, flag_words
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import MachineFacts
from accel_fsdp.launch.script.flags import ScriptCommand
from accel_fsdp.launch_environment import EXPANDABLE_SEGMENTS
from accel_fsdp.units import counted

SHARED = "/shared"
"""The path in containers of the folder that all machines share, unless a flag gives another."""
LAUNCHER_SECONDS = 10
"""Seconds of the grace period that the launcher needs after the ranks have ended."""
RESUMES = "resume_from_checkpoint"
RESTARTS = 3
"""How many times an engine starts a failed job again."""
INSTALL = "pip install --quiet 'accel-fsdp[train]'"
STOPPED = (75, 138)
"""Exit codes of `accel-fsdp launch` after a saved checkpoint: its ranks got the signal, or it got SIGUSR1 itself."""
ENDED_BY_SIGTERM = 143
TOKENS = {"HF_TOKEN": "gated models and --push_to_hub", "WANDB_API_KEY": "--report_to wandb"}
"""Variables that hold a secret, which no job file should, and what they are for."""
NCCL_DEBUG = "NCCL's log says which network it takes"


@dataclass(frozen=True)
class JobFile:
    """One job.

    `gpus` and `cpus` are those of each machine, `minutes` the time limit, if a flag gives it. `uses_sft`: the script is train/sft.py or made of its
    parts.
    """

    flags: ScriptCommand
    words: tuple[str, ...]
    name: str
    machines: int
    gpus: int
    kind: MachineFacts | None
    cpus: int
    minutes: int | None
    uses_sft: bool

    @property
    def variables(self) -> Mapping[str, str]:
        """The allocator's variable, on GPUs that can have it."""
        return EXPANDABLE_SEGMENTS if self.kind is None or self.kind.has_expandable_segments else {}

    @property
    def resumes(self) -> bool:
        """Whether the job file, submitted again, continues the stopped run."""
        return self.uses_sft and flag_words.parse_command_line(self.words).get(RESUMES) in ("auto", "true")

    @property
    def folder(self) -> str:
        return self.flags.shared or SHARED

    @property
    def shutdown(self) -> int:
        """Seconds that torch's launcher gives the ranks between the signal and SIGKILL."""
        return self.flags.grace - LAUNCHER_SECONDS

    def heading(self, *notes: str) -> list[str]:
        """The comments at the top of a job file."""
        machines = f"{counted(self.machines, 'machine')} of {counted(self.gpus, 'GPU')}"
        title = f"{self.flags.script} with {self.flags.file} on {machines}."
        made_by = f"Made by accel-fsdp {__version__}. Lines with <- are yours to edit."
        return [f"# {line}" for line in (title, made_by, *notes)]

    def command(self, indent: str = "") -> str:
        unchecked = ["--no-check"] if self.flags.no_check else []
        words = ["accel-fsdp", "launch", *unchecked, str(self.flags.file), str(self.flags.script)]
        return in_lines(words, self.words, indent)

    def under_timeout(self, command: str) -> str:
        """A shell command that enforces the time limit itself, and then exits with 124, which isn't restarted."""
        return f"timeout --foreground --signal=USR1 {self.minutes}m {command}" if self.minutes else command


def shell_variables(job: JobFile) -> list[str]:
    """Lines with a bash script's variables: the allocator's; tokens from a private file and NCCL's log, to edit."""
    return [
        *(f"export {name}={value}" for name, value in job.variables.items()),
        f"# source ~/.tokens    # <- export {' and '.join(f'{name}=...' for name in TOKENS)}, in a file for you alone",
        f"# export NCCL_DEBUG=INFO    # <- {NCCL_DEBUG}",
    ]


def in_lines(words: list[str], arguments: tuple[str, ...], indent: str) -> str:
    """A command for bash: its words, then each flag of a script with its values on a separate line."""
    lines = [shlex.join(words)]
    for word in arguments:
        quoted = shlex.quote(word)
        if word.startswith("--"):
            lines.append(f"{indent}    {quoted}")
        else:
            lines[-1] += f" {quoted}"
    return " \\\n".join(lines)


def indented(text: str, indent: str) -> str:
    """Indents a text inside a YAML block; YAML removes the indent again, also in the lines of a quoted word."""
    return "\n".join(f"{indent}{line}" if line else line for line in text.split("\n"))


def refuse_own_disk(job: JobFile, disks: str) -> None:
    """Refuses an output folder that other machines, or a later start, won't find; `disks` describes these disks."""
    output = flag_words.parse_command_line(job.words).get("output_dir", "")
    if job.uses_sft and isinstance(output, str) and not f"{output}/".startswith(f"{job.folder}/"):
        raise UsageError(
            f"--output_dir {output or 'is missing'}, and {disks}",
            why="a later start would find no checkpoint, and other machines not the shards of this one",
            fix=f"train/sft.py --output_dir {job.folder}/{output.lstrip('/') or 'runs/first'}; "
            "or accel-fsdp script --shared FOLDER with a folder that contains it",
        )
