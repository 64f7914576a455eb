"""A job to plan for a model on given GPUs, and the prediction for one job: memory, verdict, time. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from accel_fsdp.config import Engine
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import Gpu
from accel_fsdp.job import Job, Layout, Recipe, combinations
from accel_fsdp.prediction import capacity
from accel_fsdp.prediction.capacity import Device, Host
from accel_fsdp.prediction.memory import ModelShape, Prediction, Tapes
from accel_fsdp.prediction.speed import Step, step_time
from accel_fsdp.units import GIB, about_gib, distinguishable, gib_of

HOST_PER_GPU = 3
"""Assumed host memory of a machine, as a multiple of its GPUs': 3.2 in a DGX H100 (2 TB), 3.6 in AWS
p4d.24xlarge (1,152 GiB), 3 in g4dn.metal (384 GiB), 4 in g5.48xlarge (768 GiB)."""


@dataclass(frozen=True)
class Problem:
    """The input of a search: a model, its GPUs, and a job to begin with, of which a search keeps the number of ranks.

    `fixed_rows` keeps the job's micro-batch. `global_rows` are the sequences of one optimizer step on all GPUs, 0 for
    any number with the job's accumulation. `host_gib` is one machine's memory, 0 if unknown. `ram_efficient`: one rank
    of a machine reads the weights. `notes` are assumptions besides those of a step. `fault` is why the job of a
    YAML doesn't work.
    """

    shape: ModelShape
    tapes: Mapping[str, Tapes]
    gpu: Gpu
    job: Job
    fixed_rows: bool = False
    ram_efficient: bool = True
    notes: tuple[str, ...] = ()
    global_rows: int = 0
    host_gib: float = 0
    fault: str = ""

    def refuses(self, job: Job) -> str:
        """Why a job doesn't work although it may fit; empty if it does."""
        return self.fault or combinations.why_not(job.settled, mended=self.is_written)

    @property
    def is_written(self) -> bool:
        """Whether the job is that of a YAML, rather than one to search."""
        return self.job.model != ""

    def predicted(self, job: Job) -> Prediction:
        return capacity.predicted(self.shape, self.tapes, job, self.gpu)

    def step(self, job: Job) -> Step:
        """The time of a step; not under tensor or expert parallelism."""
        return step_time(self.shape, job.recipe, job.layout, self.gpu)

    def host(self, job: Job) -> Host:
        return capacity.host(self.shape, job, self.ram_efficient)

    def evaluate(self, job: Job) -> "Candidate":
        step = None if job.layout.is_by_transformers else self.step(job)
        return Candidate(job, self.predicted(job), self.device(job), step, self.refuses(job))

    def judged(self, job: Job) -> "Candidate":
        """As `evaluate`; refused also if a job would fit but a machine's memory isn't enough."""
        candidate = self.evaluate(job)
        return replace(candidate, refused=self.host_lack(job)) if candidate.fits else candidate

    def assumptions(self, candidate: "Candidate") -> tuple[str, ...]:
        """The assumptions of a prediction, as sentences: those of the job, of its memory, and of its time."""
        of_time = candidate.step.assumptions if candidate.step else ()
        silent = sum(len(self.shape.blocks[index].layers) for index in self.shape.untraced)
        text_only = f"Rows hold text only: the {silent} layers for images are held and not run."
        return (*self.notes, *([text_only] if silent else []), *of_time)

    def device(self, job: Job) -> Device:
        return capacity.device(self.predicted(job), job.layout, self.capacity_bytes, self.gpu)

    def has_room(self, job: Job) -> bool:
        return self.device(job).fits

    def is_hosted(self, job: Job) -> bool:
        """Whether a machine has the memory to load the model, and for the offload."""
        return self.host(job).training <= self.host_bytes

    def host_lack(self, job: Job) -> str:
        """Why a machine's memory isn't enough to load the model, or for the offload; empty if it is."""
        if self.is_hosted(job):
            return ""
        host = self.host(job)
        what, needed = ("Loading", host.loading) if host.loading > self.host_bytes else ("CPU offload", host.offload)
        return f"{what} takes {self.host_need(needed)}"

    def host_need(self, needed: int) -> str:
        """A need of host memory in words, with the available memory if that is less."""
        need, host = distinguishable(about_gib, needed, self.host_bytes)
        note = f", which {'has' if self.host_gib else 'usually has'} {host}" if needed > self.host_bytes else ""
        return f"{need} of memory on each machine{note}"

    @property
    def ranks(self) -> int:
        return self.job.layout.ranks

    @property
    def capacity_bytes(self) -> int:
        """The memory of one GPU, as CUDA reports it."""
        return round(self.gpu.usable_gib * GIB)

    @property
    def host_bytes(self) -> int:
        """The memory of one machine, assumed if unknown."""
        return round((self.host_gib or HOST_PER_GPU * self.job.layout.ranks_per_node * self.gpu.memory_gib) * GIB)


@dataclass(frozen=True)
class Candidate:
    """A job with its predicted memory and step time; `refused` is the reason why it can't work.

    `step` is None under tensor and expert parallelism, whose time is not predicted.
    """

    job: Job
    prediction: Prediction
    device: Device
    step: Step | None
    refused: str = ""

    @property
    def layout(self) -> Layout:
        return self.job.layout

    @property
    def recipe(self) -> Recipe:
        return self.job.recipe

    @property
    def verdict(self) -> str:
        """The table's word: whether it fits, or that it fails regardless of memory."""
        return "fails" if self.refused else self.device.verdict

    @property
    def fits(self) -> bool:
        """Whether the job works and fits with the margin."""
        return not self.refused and self.device.fits

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one GPU, of a job whose time is predicted."""
        assert self.step is not None
        return self.step.tokens_per_s_per_gpu

    @property
    def pace(self) -> tuple[str, str]:
        """Seconds per step and tokens/s per GPU as cells of a table."""
        return (f"{self.step.step_seconds:.2f}", f"{self.tokens_per_s:,.0f}") if self.step else ("-", "-")

    @property
    def words(self) -> str:
        """The verdict in words, such as: needs 63.7 of 39.4 GiB with 1 x 2,048 tokens per GPU."""
        memory = gib_of(self.device.needed, self.device.capacity)
        return f"needs {memory} with {self.recipe.rows} x {self.recipe.length:,} tokens per GPU"


def length_of(shape: ModelShape, seq_len: int | None, flag: str = "--seq-len") -> int:
    """The tokens per row: `seq_len`, or without it the default, at most the model's positions.

    Raises:
        UsageError: the model has fewer positions than `seq_len`.
    """
    if seq_len is None:
        return min(Recipe.length, shape.positions or Recipe.length)
    if shape.positions and seq_len > shape.positions:
        raise UsageError(
            f"{flag} {seq_len} is longer than the {shape.positions} positions of {shape.name}",
            why=f"the model has no positions beyond {shape.positions}",
            fix=f"{flag} {shape.positions} or less",
        )
    return seq_len


def layouts(job: Job) -> Iterator[Job]:
    """The job in all strategies that make sense for its ranks, in the order of the table."""
    ranks, per_node = job.layout.ranks, job.layout.ranks_per_node
    if ranks == 1:
        yield replace(job, layout=Layout.alone())
        return
    numbers: tuple[int, ...] = (1, 2, 4, 5) if ranks > per_node > 1 else (1, 2)
    strategies = {Engine.DDP: (1,), Engine.FSDP2: numbers, Engine.FSDP1: numbers, Engine.DEEPSPEED: (1, 2, 3)}
    for engine in strategies:
        for strategy in strategies[engine]:
            yield job.with_layout(engine=engine, strategy=strategy, offload=False)


def offloads(job: Job) -> tuple[Job, ...]:
    """The job, then the job with FSDP's offload, which wasn't tried on transformers' meshes."""
    plain = job.layout.is_fsdp and not job.layout.is_by_transformers
    return (job, job.with_layout(offload=True)) if plain else (job,)


def checkpointing_in(recipe: Recipe) -> str:
    return "activation checkpointing" if recipe.recomputes else "no checkpointing"


def rows_in(recipe: Recipe) -> str:
    return "1 sequence" if recipe.rows == 1 else f"{recipe.rows} sequences"
