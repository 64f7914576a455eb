"""A job file: a template of `templates/` with the values of one job."""

import shlex
from dataclasses import dataclass
from importlib import resources
from string import Template

from accel_fsdp import __version__, command_line
from accel_fsdp.hardware import MachineFacts
from accel_fsdp.launch.script.flags import ScriptCommand
from accel_fsdp.units import counted

RESUMES = "resume_from_checkpoint"
TWICE_THE_MEMORY = {("A100", 80.0): "A100-80GB", ("V100", 32.0): "V100-32GB"}
"""GPUs of one name that come with more memory, as SkyPilot calls them."""


class JobTemplate(Template):
    delimiter = "@"  # bash has the usual one


@dataclass(frozen=True)
class JobFile:
    """One job: `machines` with so many `gpus` of a `kind`, if it is known, and a limit of `seconds`, if there is one.

    `uses_sft`: the script is train/sft.py or made of its parts. `words` are its arguments.
    """

    flags: ScriptCommand
    words: tuple[str, ...]
    machines: int
    gpus: int
    kind: MachineFacts | None
    seconds: int | None
    uses_sft: bool

    @property
    def folder(self) -> str:
        return self.flags.shared or "/shared"

    def text(self) -> str:
        """The template without the lines that name a missing value; an `if_` is empty or missing."""
        is_yaml = self.flags.scheduler in ("kubernetes", "skypilot")
        folder = resources.files(__package__).joinpath("templates")
        template = folder.joinpath(f"{self.flags.scheduler}.{'yaml' if is_yaml else 'sh'}").read_text(encoding="utf-8")
        values, lines = self._values(), []
        for line in template.splitlines():
            names = [match["named"] or match["braced"] for match in JobTemplate.pattern.finditer(line)]
            if all(values[name] is not None for name in names):
                indent = line[: len(line) - len(line.lstrip())] if is_yaml else ""  # which YAML takes away again
                lines.append(JobTemplate(line).substitute(values).replace("\n", f"\n{indent}"))
        return "\n".join(lines)

    def _values(self) -> dict[str, object]:
        flags = self.flags
        resumes = self.uses_sft and command_line.parse_command_line(self.words).get(RESUMES) in ("auto", "true")
        conditions = {
            "several": self.machines > 1,
            "alone": self.machines == 1,
            "resumes": resumes,
            "spot": flags.spot,
            "no_image": flags.image is None,
            "no_time": flags.time is None,
            "expandable": self.kind is None or self.kind.has_expandable_segments,
        }
        return {
            **{f"if_{name}": "" if holds else None for name, holds in conditions.items()},
            "version": __version__,
            "file": flags.file,
            "script": flags.script,
            "size": f"{counted(self.machines, 'machine')} of {counted(self.gpus, 'GPU')}",
            "name": flags.name,
            "machines": self.machines,
            "gpus": self.gpus,
            "accelerator": self._skypilots_gpu(),
            "cpus": flags.cpus,
            "memory": flags.host_memory,
            "mem": f"{flags.host_memory}G" if flags.host_memory else 0,  # SLURM's word for all
            "image": flags.image,
            "shared": flags.shared,
            "folder": self.folder,
            "time": flags.time or "1-00:00:00",
            "seconds": self.seconds,
            "timeout": f"timeout --foreground --signal=USR1 {self.seconds} " if self.seconds else "",
            "grace": flags.grace,
            "shutdown": flags.grace - 10 if self.uses_sft else None,  # the launcher ends after its ranks
            "signal": f"USR1@{flags.grace}" if self.uses_sft else None,
            "requeue": "requeue" if resumes else "no-requeue",
            # Our ranks end together, and the first code counts; with a user's own, only a failure ends the others.
            "early_end": "--kill-on-bad-exit=0 --wait=60" if self.uses_sft else "--kill-on-bad-exit=1",
            "command": self._command(),
        }

    def _command(self) -> str:
        """The words that start the script, for bash; each flag of the script is on a line with its values."""
        script, unchecked = str(self.flags.script), ["--no-check"] if self.flags.no_check else []
        words = ["accel-fsdp", "launch", *unchecked, str(self.flags.file), script]
        if self.flags.scheduler == "torchrun":
            words = [script, "--accelerate_config", str(self.flags.file)]
        lines = [shlex.join(words)]
        for word in self.words:
            before = "        " if word.startswith("--") else f"{lines.pop()} "
            lines.append(f"{before}{shlex.quote(word)}")
        text = " \\\n".join(lines)
        return text.replace("$", "$$") if self.flags.scheduler == "kubernetes" else text  # it makes $ of $$

    def _skypilots_gpu(self) -> str | None:
        if not (self.kind and self.kind.accelerator):
            return None
        name = self.kind.accelerator.upper().replace(" ", "")
        return TWICE_THE_MEMORY.get((name, self.kind.memory_gib or 0.0), name)
