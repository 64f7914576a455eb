"""Changes of a job that lower its memory, in words and as a job, and those with which it would fit. Pure."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from accel_fsdp.config import Engine, Method
from accel_fsdp.errors import UserError
from accel_fsdp.job import Job, Recipe, recompute_by
from accel_fsdp.prediction.problem import Problem
from accel_fsdp.prediction.search import largest, variants
from accel_fsdp.units import GIB, about_gib, counted

MOST_DOUBLINGS = 10
"""The most times that the number of GPUs is doubled until a job fits."""
MOST_SHOWN = 4
SMALLER: dict[Method, tuple[Method, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}
"""The methods that hold less."""
SHARDS_ALL = {Engine.FSDP2: 1, Engine.FSDP1: 1, Engine.DEEPSPEED: 3}
"""The strategy of each engine that shards everything."""


@dataclass(frozen=True)
class Change:
    """A changed job, and what to type for it: in a YAML and its script's arguments, or as `flags` of this tool."""

    words: str
    job: Job
    flags: str

    def then(self, other: "Change") -> "Change":
        """Both changes; `other` starts from this one's job."""
        return Change(f"{self.words}, {other.words}", other.job, f"{self.flags} {other.flags}") if self.words else other


def changes(job: Job, loss_first: bool = False) -> Iterator[Change]:
    """The single changes of a job that keep the rows of a step, those first that cost least.

    `loss_first`: memory runs out in the loss, where a fused kernel keeps all rows.
    """
    ways: list[Callable[[Job], Iterator[Change]]] = [
        *(_recomputed, _fused, _in_halves, _inputs_on_host),
        *(_without_mask, _in_bf16, _sharded),
    ]
    if loss_first:
        ways.insert(0, ways.pop(1))
    for way in ways:
        yield from way(job)


def others(job: Job) -> Iterator[Change]:
    """The single changes of optimizer and method, to shorter rows, and those that take memory of the host."""
    recipe = job.recipe
    if recipe.optimizer != Recipe.optimizer:
        changed = replace(job.with_recipe(optimizer=Recipe.optimizer), optimizer=Recipe.optimizer)
        yield Change(f"--optim {Recipe.optimizer}", changed, f"--optimizer {Recipe.optimizer}")
    for method in SMALLER[recipe.method]:
        words = {"lora": "--use_peft true", "qlora": "--use_peft true --load_in_4bit true"}[method]
        adapter = job.with_recipe(method=method, dtype="bfloat16", lora_dropout=True)
        yield Change(words, replace(adapter, recompute="none").settled, f"--method {method}")
    if recipe.length > 1:
        half = recipe.length // 2
        yield Change(f"--max_length {half}", job.with_recipe(length=half), f"--seq-len {half}")
    if job.layout.is_fsdp and not job.layout.offload:
        yield Change("fsdp_offload_params: true", job.with_layout(offload=True), "--cpu-offload true")


def _fused(job: Job) -> Iterator[Change]:
    if not job.recipe.liger:
        words = "--use_liger_kernel true (pip install liger-kernel)"
        yield Change(words, job.with_recipe(liger=True), words)


def _recomputed(job: Job) -> Iterator[Change]:
    if job.recipe.checkpointing == "none":
        by_engine = recompute_by(job.engine, job.method) == "engine"
        words = "fsdp_activation_checkpointing: true" if by_engine else "--gradient_checkpointing true"
        flags = "--activation-checkpointing true" if by_engine else words
        yield Change(words, job.with_recipe(checkpointing="full").settled, flags)


def _in_halves(job: Job) -> Iterator[Change]:
    """Fewer rows at a time and more micro-batches, so that a step trains the same rows."""
    rows, steps = job.recipe.rows, job.recipe.accumulation
    while rows > 1:
        rows, steps = -(-rows // 2), steps * 2
        words = f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {steps}"
        yield Change(words, job.with_recipe(rows=rows, accumulation=steps), f"--batch {rows}")


def _inputs_on_host(job: Job) -> Iterator[Change]:
    if job.engine is Engine.FSDP2 and job.recompute == "engine" and not job.recipe.offloads_inputs:
        changed = job.with_recipe(offloads_inputs=True)
        yield Change("fsdp_activation_checkpointing_offload: true", changed, "--activation-offload true")


def _without_mask(job: Job) -> Iterator[Change]:
    if job.recipe.masks_documents:
        words = "--attn_implementation flash_attention_2"
        yield Change(words, job.with_recipe(attention="flash"), words)


def _in_bf16(job: Job) -> Iterator[Change]:
    if job.recipe.precision == "no" and job.recipe.dtype == "float32":
        yield Change("mixed_precision: bf16", job.with_recipe(precision="bf16"), "--mixed-precision bf16")


def _sharded(job: Job) -> Iterator[Change]:
    layout = job.layout
    if layout.engine is Engine.DDP:
        sharded = job.with_layout(engine=Engine.FSDP2, strategy=1)
        yield Change("accel-fsdp migrate FILE --to fsdp2", sharded, "--engine fsdp --fsdp-version 2 --strategy 1")
    elif layout.engine in SHARDS_ALL and layout.strategy != SHARDS_ALL[layout.engine]:
        words = {
            Engine.FSDP1: "fsdp_sharding_strategy: FULL_SHARD",
            Engine.FSDP2: "no parallelism_config" if layout.strategy in (4, 5) else "fsdp_reshard_after_forward: true",
            Engine.DEEPSPEED: "zero_stage: 3",
        }[layout.engine]
        flags = "--zero-stage 3" if layout.engine is Engine.DEEPSPEED else "--strategy 1"
        yield Change(words, job.with_layout(strategy=SHARDS_ALL[layout.engine]), flags)


def fits(problem: Problem, job: Job) -> bool:
    """Whether a job works, fits the GPUs, and can be loaded; not if what it allocates can't be recorded here."""
    try:
        return not problem.refuses(job) and problem.has_room(job) and problem.is_hosted(job)
    except (UserError, KeyError):
        return False


def _fitting(problem: Problem, change: Change) -> Change | None:
    """The change if its job fits. A search tries checkpointing and offload itself: there also with them."""
    tried = sorted(variants([change.job]), key=lambda job: job.layout.offload)
    jobs = [change.job] if problem.is_written else tried
    return next((replace(change, job=job) for job in jobs if fits(problem, job)), None)


def remedies(problem: Problem, job: Job) -> list[Change]:
    """The changes with which a job would fit, the nearest first: single ones, else several together.

    In a search, which tries strategies, micro-batches and checkpointing itself, the words leave them out.
    """
    if problem.has_room(job):  # and can't be loaded
        return _other_loading(problem, job)
    runs_out = problem.device(job).runs_out
    tried = (*changes(job, runs_out.startswith("loss")), *others(job))
    if runs_out == "evaluation":
        tried = (*_smaller_evaluation(job), *tried)
    if single := [fitting for change in tried if (fitting := _fitting(problem, change))]:
        return single[:MOST_SHOWN]
    smallest = _smallest(job)
    if fitting := _fitting(problem, smallest):
        return [fitting]
    smallest = smallest if problem.is_written else Change("", smallest.job, "")
    length = largest(problem, smallest.job, "length", smallest.job.recipe.length - 1)
    shorter = smallest.job.with_recipe(length=length)
    several = [smallest.then(Change(f"--max_length {length}", shorter, f"--seq-len {length}"))] if length else []
    several += [smallest.then(other) for other in others(smallest.job) if "length" not in other.words]
    found = [fitting for change in several if (fitting := _fitting(problem, change))]
    adapters = [smallest.then(other) for other in others(smallest.job) if other.job.method != job.method]
    more = (change for way in (smallest, *adapters) for change in _more_gpus(way) if fits(problem, change.job))
    return [*found, *itertools.islice(more, 1)][:MOST_SHOWN]


def _smaller_evaluation(job: Job) -> Iterator[Change]:
    rows = job.recipe.eval_batch // 2
    while rows:
        words = f"--per_device_eval_batch_size {rows}"
        yield Change(words, job.with_recipe(eval_batch=rows), words)
        rows //= 2
    yield Change("--eval_strategy no", job.with_recipe(eval_batch=0), "--eval_strategy no")


def _other_loading(problem: Problem, job: Job) -> list[Change]:
    """Changes that let hosts load a job that fits its GPUs: one rank that reads, a smaller method, or more memory."""
    once, key = replace(problem, ram_efficient=True), "fsdp_cpu_ram_efficient_loading: true"
    sharded = job if job.layout.is_fsdp else job.with_layout(engine=Engine.FSDP2, strategy=1, offload=False)
    ways = []
    if fits(once, sharded):
        words = key if sharded == job else f"accel-fsdp migrate FILE --to fsdp2 and {key}"
        ways.append(Change(words, sharded, words))
    ways += [other for other in others(job) if other.job.method != job.method and fits(problem, other.job)]
    need = problem.host(job).training
    flag = "" if problem.host_gib else f" (if they have it: --host-memory {math.ceil(need / GIB)})"
    words = f"machines with {about_gib(need)} of memory{flag}"
    return [*ways, Change(words, job, words)]


def _smallest(job: Job) -> Change:
    """All changes together that keep the rows of a step, each way's last."""
    result = Change("", job, "")
    for way in (_sharded, _recomputed, _in_halves, _in_bf16):
        if options := list(way(result.job)):
            result = result.then(options[-1])
    return result


def _more_gpus(way: Change) -> Iterator[Change]:
    """The changed job on more GPUs, in doublings."""
    layout = way.job.layout
    for ranks in (layout.ranks * 2**power for power in range(1, MOST_DOUBLINGS + 1)):
        per_node = layout.ranks_per_node if layout.ranks > 1 else ranks
        words = counted(ranks, "GPU")
        yield way.then(Change(words, way.job.with_layout(ranks=ranks, ranks_per_node=per_node), f"with {words}"))
