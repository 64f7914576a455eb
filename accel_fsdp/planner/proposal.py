"""Converts a candidate to its YAML and script arguments, and collects the linter's errors about a given YAML."""

import shlex
from dataclasses import dataclass, replace
from typing import Any

from accel_fsdp import command_line
from accel_fsdp.hardware import machines
from accel_fsdp.job import Job, from_arguments
from accel_fsdp.linter.rules import Finding, Subject, run
from accel_fsdp.wizard import Answers, interview, recommended, to_yaml

OUTPUT = "fsdp.yaml"


@dataclass(frozen=True)
class Proposer:
    """Converts jobs to answers, YAML and script arguments, for one model on machines of one kind.

    `gpus` is one machine as `machines.parse` reads it, `usual_length` the tokens per row that the wizard assumes.
    `by_default`: the wizard recommends the same job by itself, as no flag of the plan counts that it doesn't know.
    """

    model: str
    gpus: str
    gpus_each: int
    usual_length: int
    by_default: bool

    def answers(self, job: Job) -> Answers:
        """The wizard's answers that write the YAML of a job.

        Raises:
            UserError: the model can't be read, or the wizard refuses an answer.
        """
        flags = self._base(job) | _decisions(job)
        return interview.answers(interview.Interview(flags, dict(flags)))

    def written(self, job: Job) -> str:
        """The YAML's text, as the wizard writes it for this model, with the whole job in its launch command.

        Raises:
            UserError: the model can't be read.
        """
        return to_yaml.to_text(self.answers(job), argument_words(job))

    def command(self, job: Job) -> str:
        """The command that writes the YAML of the recommended job, without the wizard's own defaults."""
        chosen = self._base(job) | ({} if self.by_default else _decisions(job))
        flags = [word for name, value in chosen.items() for word in (command_line.flag_of(name), value)]
        return shlex.join(["accel-fsdp", "config", "--yes", "-o", OUTPUT, *flags])

    def _base(self, job: Job) -> dict[str, str]:
        """The flags of the wizard that say which job it is: model, machines, method, precision, length."""
        number = job.layout.ranks // self.gpus_each
        flags = {"model": self.model, "gpus": f"{number}x{self.gpus}" if number > 1 else self.gpus}
        if job.method != "full":
            flags["method"] = job.method
        if job.recipe.precision != ("bf16" if machines.has_bf16(machines.parse(self.gpus)[0]) else "fp16"):
            flags["mixed_precision"] = job.recipe.precision
        if job.recipe.length != self.usual_length:
            flags["seq_len"] = str(job.recipe.length)
        return flags


def _decisions(job: Job) -> dict[str, str]:
    return {name: to_yaml.flag_text(value) for name, value in recommended.decisions(job).items()}


def arguments(job: Job) -> dict[str, Any]:
    """The script's arguments of a planned job, under Trainer's names."""
    return from_arguments.arguments_of(job.settled)


def argument_words(job: Job) -> list[str]:
    """The same as words of a command line."""
    return from_arguments.argument_words(job.settled)


DROPPED = frozenset({"AF103", "AF104", "AF105", "AF108"})
"""The rules about keys inside a section that Accelerate drops: the job runs without them."""


def errors(subject: Subject, job: Job) -> tuple[str, tuple[str, ...]]:
    """The linter's first error for a given YAML that stops the job, and those about dropped keys, as sentences.

    If the subject has no script arguments, those of the job are used.
    """
    findings = run(subject if subject.args is not None else replace(subject, args=arguments(job)))
    stops, dropped = "", []
    for finding in findings:
        if finding.severity == "error" and finding.code in DROPPED and "." in finding.key:
            dropped.append(f"{sentence(finding)}.")
        elif finding.severity == "error":
            stops = stops or sentence(finding)
    return stops, tuple(dropped)


def sentence(finding: Finding) -> str:
    """The finding in one line, with its code."""
    return f"{finding.what}: {finding.why} ({finding.code})"
