"""Converts a candidate to its YAML and script arguments, and collects the linter's errors about a given YAML."""

import shlex
from dataclasses import dataclass, field, replace
from typing import Any

from accel_fsdp import flag_words
from accel_fsdp.config import (
    ENGINE_NAMES,
    THIS_FILE,
    Engine,
    header,
    yaml_file,
)
from accel_fsdp.hardware import machines
from accel_fsdp.job import Job, from_arguments, recompute_by
from accel_fsdp.linter.rules import Finding, Subject, run
from accel_fsdp.models import catalogue
from accel_fsdp.wizard import MODEL as PRESET_MODEL
from accel_fsdp.wizard import Answers, interview, to_yaml

OUTPUT = "fsdp.yaml"


@dataclass
class Proposer:
    """Converts jobs to answers, YAML and script arguments, for one model on machines of one kind.

    `gpus` is one machine as `machines.parse` reads it, `layer_class` the class to wrap, `usual_length` the tokens per
    row that the wizard assumes without `--seq-len`.
    """

    model: str
    gpus: str
    gpus_each: int
    layer_class: tuple[str, ...]
    usual_length: int
    _answers: dict[tuple[Any, ...], Answers] = field(default_factory=dict)

    def answers(self, job: Job) -> Answers:
        """The wizard's answers that write the YAML of a job.

        A model outside of the catalogue isn't built, because that takes torch and seconds: its layer class is known.

        Raises:
            UserError: the wizard refuses one of them.
        """
        layout = job.layout
        key = (layout.engine, layout.ranks, layout.ranks_per_node, job.method, job.recipe.precision)
        if key not in self._answers:
            preset = self._required_answers(job)
            if catalogue_name := catalogue.canonical(self.model):
                self._answers[key] = _settled_answers({**preset, "model": catalogue_name})
            else:
                settled = _settled_answers({**preset, "model": PRESET_MODEL})
                self._answers[key] = replace(settled, model=self.model, layer_class=self.layer_class)
        base, sharded = self._answers[key], layout.is_fsdp
        return replace(
            base,
            strategy=layout.strategy if sharded else base.strategy,
            zero_stage=layout.strategy if layout.engine is Engine.DEEPSPEED else base.zero_stage,
            cpu_offload=layout.offload,
            activation_checkpointing=in_yaml(job),
            seq_len=None if job.recipe.length == self.usual_length else job.recipe.length,
        )

    def written(self, job: Job) -> str:
        """The YAML's text, as the wizard writes it for this model, with the whole job in its launch command.

        Raises:
            UserError: the model can't be read.
        """
        if job.engine is Engine.NONE:
            return self._yaml_for_one_process(job)
        answers, words = _settled_answers(self._flags(job)), _argument_words(job)
        script = [to_yaml.OWN_SCRIPT, *words] if answers.own_script else header.example_run(answers.model, words)
        line = header.engine_line if answers.needs_engine else header.launch_line
        return to_yaml.to_text(answers, line(THIS_FILE, script, expandable=self._expandable))

    @property
    def _expandable(self) -> bool:
        return machines.parse(self.gpus)[0].has_expandable_segments

    def _yaml_for_one_process(self, job: Job) -> str:
        """The YAML for one GPU, without an engine; the wizard would write FSDP."""
        values = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO",
            "mixed_precision": job.recipe.precision,
            "num_processes": 1,
            "num_machines": 1,
        }
        title = f"{self.model}, {job.method} training with one process, which has nothing to shard."
        script = header.example_run(self.model, _argument_words(job))
        launch = header.launch_line(THIS_FILE, script, expandable=self._expandable)
        return "\n".join([*header.comment(title, "accel-fsdp plan", launch), yaml_file.dump(values)])

    def command(self, job: Job) -> str:
        """The command that writes the YAML, with only the flags that differ from the wizard's defaults."""
        chosen = self._flags(job).items()
        flags = [word for name, value in chosen for word in (flag_words.flag_of(name), value)]
        return shlex.join(["accel-fsdp", "config", "--yes", "-o", OUTPUT, *flags])

    def _flags(self, job: Job) -> dict[str, str]:
        """The wizard's flags, by the names of its questions."""
        answers = self.answers(job)
        names = [*self._required_answers(job), *(["strategy"] if job.layout.is_fsdp else [])]
        names += ["seq_len"] if answers.seq_len else []
        return {name: to_yaml.flag_text(getattr(answers, name)) for name in names}

    def _required_answers(self, job: Job) -> dict[str, str]:
        layout, machines = job.layout, max(job.layout.ranks // self.gpus_each, 1)
        words = {"model": self.model, "method": job.method, "gpus": self.gpus, "num_machines": str(machines)}
        words["mixed_precision"] = job.recipe.precision
        if layout.is_fsdp:
            words |= {"engine": "fsdp", "fsdp_version": layout.engine.removeprefix("fsdp")}
            words |= {"cpu_offload": "false", "activation_checkpointing": "false"}
        else:
            words["engine"] = ENGINE_NAMES[layout.engine]
        if layout.engine is Engine.DEEPSPEED:
            words |= {"zero_stage": str(layout.strategy), "cpu_offload": "false"}
        return words


def _settled_answers(flags: dict[str, str]) -> Answers:
    return interview.answers(interview.Interview(flags, dict(flags), quiet=True))


def in_yaml(job: Job) -> bool:
    """Whether the YAML turns on activation checkpointing; with an adapter, and outside of FSDP, the script does."""
    return job.recipe.checkpointing == "full" and recompute_by(job.engine, job.method) == "engine"


def arguments(job: Job) -> dict[str, Any]:
    """The script's arguments of a planned job, under Trainer's names."""
    return from_arguments.arguments_of(job.settled)


def argument_line(job: Job) -> str:
    """The arguments of a planned job as a command line."""
    return shlex.join(_argument_words(job))


def _argument_words(job: Job) -> list[str]:
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
