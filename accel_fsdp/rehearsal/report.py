"""What a rehearsal says: a line for each step while it runs, and at the end what they prove and what they can't."""

import json
import linecache
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from accel_fsdp import console
from accel_fsdp.config import JobConfig

ONLY_GPUS = ("NCCL and the network between machines", "CUDA memory", "speed", "kernels of GPUs such as FlashAttention")


@dataclass(frozen=True)
class StepResult:
    """What was done, how long it took, and what it proved; where it failed `key`, `line` and `fix` say of what.

    `key` is the YAML's key or the script's argument behind it, `line` that of the script, `output` what was printed:
    by all ranks, or where a script of the user's own passed, the last lines of rank 0.
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
    """What a step proved, and lines that the user's own script printed meanwhile."""

    said: str
    output: str = ""


@dataclass
class Report:
    """All steps so far. `changes` say what is smaller than in the real job.

    What no step here shows: `left_out` takes GPUs, `of_real_model` the real model and its data. `error` is why the job
    can't be rehearsed.
    """

    file: str
    changes: list[str] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    of_real_model: list[str] = field(default_factory=list)
    forecast: str = ""
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether all went well."""
        return bool(self.steps) and not self.error and all(step.passed for step in self.steps)

    def as_json(self) -> str:
        """All of it."""
        return json.dumps({**asdict(self), "passed": self.passed}, indent=2)


def show(step: StepResult) -> None:
    """The line of a step, and what is known of its failure."""
    mark, style = ("ok    ", "green") if step.passed else ("FAILED", "red")
    console.put(f"{mark} {step.name} ({step.seconds:.1f} s): {step.said}", style=style)
    if step.passed:
        for line in step.output.splitlines():
            console.say(f"       {line}", style="dim")
        return
    for title, text in (("key", step.key), ("line", with_source(step.line)), ("fix", step.fix)):
        if text:
            console.put(f"       {title}: {text}")
    if step.output:
        console.say(step.output.rstrip(), style="dim", lines=True)


def with_source(line: str) -> str:
    """A file:line and what it says; Python's own words for an error may be as short as the name of a member."""
    file, _, number = line.rpartition(":")
    source = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    return f"{line}: {source}" if source else line


def conclude(report: Report) -> None:
    """What was proven, in which size, and what is left for GPUs to show."""
    if report.changes:
        console.put(f"in small: {'; '.join(report.changes)}", wrap=True)
    if not report.passed:
        return
    console.put(f"proven here: {', '.join(step.name for step in report.steps)}", style="green", wrap=True)
    console.put(f"only a GPU can show: {'; '.join(report.left_out)}", wrap=True)
    if report.of_real_model:
        console.put(f"only the real model can show: {'; '.join(report.of_real_model)}", wrap=True)
    if report.forecast:
        console.put(report.forecast, wrap=True)


def left_out(job: JobConfig) -> Iterator[str]:
    """What only the real job on GPUs can show."""
    yield from ONLY_GPUS
    if job.is_fsdp and job.on("fsdp_offload_params"):
        yield "offloading to the CPU"
    if (precision := str(job.top("mixed_precision"))) in ("fp16", "fp8"):
        yield f"mixed_precision {precision}"
