"""The report of a rehearsal: a line for each step while it runs, and at the end what was proven and what wasn't."""

import json
import linecache
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from accel_fsdp import console
from accel_fsdp.config import JobConfig
from accel_fsdp.rehearsal import repeated

ONLY_GPUS = ("NCCL and the network between machines", "CUDA memory", "speed", "kernels of GPUs such as FlashAttention")


@dataclass(frozen=True)
class StepResult:
    """A step, its time, and the proven sentence; `key`, `line` and `fix` name the cause of a failure.

    `key` is the YAML's key or the script's argument, `line` the script's line, `output` the output of all ranks, or the
    last lines of rank 0 if the user's own script passed.
    """

    name: str
    passed: bool
    seconds: float
    said: str
    key: str = ""
    line: str = ""
    fix: str = ""
    output: str = ""


@dataclass(frozen=True)
class Proof:
    """The sentence that a step proved, and the lines that the user's script printed."""

    sentence: str
    output: str = ""


@dataclass
class Report:
    """All steps so far. `changes`: what is smaller than in the real job. `error`: why the job can't be rehearsed.

    Not covered by the steps: `left_out` needs GPUs, `of_real_model` the real model and its data.
    """

    file: str
    changes: list[str] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    of_real_model: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.steps) and not self.error and all(step.passed for step in self.steps)

    def as_json(self) -> str:
        return json.dumps({**asdict(self), "passed": self.passed}, indent=2)


def show(step: StepResult, debug: bool = False) -> None:
    """Prints the line of a step, and the cause of its failure; what the ranks printed if no cause is known."""
    mark, style = ("ok    ", "green") if step.passed else ("FAILED", "red")
    console.put(f"{mark} {step.name} ({step.seconds:.1f} s): {step.said}", style=style)
    if step.passed:
        for line in step.output.splitlines():
            console.say(f"       {line}", style="dim")
        return
    for title, text in (("key", step.key), ("line", with_source(step.line)), ("fix", step.fix)):
        if text:
            console.put(f"       {title}: {text}")
    if step.output and (debug or not (step.line or step.fix)):
        console.say(step.output.rstrip(), style="dim", lines=True)
    elif step.output:
        console.say("       --debug shows what the ranks printed", style="dim")


def with_source(line: str) -> str:
    """A file:line with its source line, because Python's message may be as short as an attribute's name."""
    file, _, number = line.rpartition(":")
    source = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    return f"{line}: {source}" if source else line


def conclude(report: Report) -> None:
    """Prints what the steps proved, at which size, and what only GPUs can show."""
    if report.changes:
        console.put(f"in small: {'; '.join(report.changes)}", wrap=True)
    if not report.passed:
        return
    ran_alone = [step.name for step in report.steps if repeated.UNCOMPARED in step.said]
    proven = [step.name for step in report.steps if step.name not in ran_alone]
    console.put(f"proven here: {', '.join(proven)}", style="green", wrap=True)
    if ran_alone:
        console.put(f"only ran, not compared with one process: {', '.join(ran_alone)}", style="yellow", wrap=True)
    console.put(f"only a GPU can show: {'; '.join(report.left_out)}", wrap=True)
    if report.of_real_model:
        console.put(f"only the real model can show: {'; '.join(report.of_real_model)}", wrap=True)


def left_out(job: JobConfig) -> Iterator[str]:
    yield from ONLY_GPUS
    if job.is_fsdp and job.on("fsdp_offload_params"):
        yield "offloading to the CPU"
    if (precision := str(job.top("mixed_precision"))) in ("fp16", "fp8"):
        yield f"mixed_precision {precision}"
