"""Changes that would make a job fit: the smallest ones, each tried alone. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from accel_fsdp.config import Engine, Method
from accel_fsdp.job import Job, Layout, Recipe
from accel_fsdp.prediction.capacity import predicted
from accel_fsdp.prediction.memory import ModelShape, Tapes
from accel_fsdp.prediction.problem import Problem, layouts, offloads
from accel_fsdp.prediction.search import largest
from accel_fsdp.units import GIB, about_gib, gib_or_mib

MOST_DOUBLINGS = 10
SMALLER: dict[Method, tuple[Method, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}
"""The methods that hold less."""
SHARDS_ALL = {Engine.FSDP2: 1, Engine.FSDP1: 1, Engine.DEEPSPEED: 3, Engine.NONE: 1}
"""The strategy of each engine that shards everything, the preferred engine first."""


def remedies(problem: Problem, given: Layout | None) -> Iterator[str]:
    """The changes that would make it fit, each alone with one sequence per GPU and full checkpointing.

    They change the `given` layout if that helps, else the one that shards everything. Offload comes last, with its host
    memory, unless the job has it already.
    """
    requested = replace(problem.job, layout=given or problem.job.layout)
    if given and not problem.is_hosted(requested) and problem.evaluate(requested).fits:
        yield from _other_loading(problem, requested)
        return
    trained = problem.job.with_recipe(eval_batch=0)
    if given and trained != problem.job and problem.evaluate(replace(trained, layout=given)).fits:
        yield _smaller_evaluation(problem, replace(problem.job, layout=given))
        return
    smallest = trained.with_recipe(checkpointing="full", rows=1)
    used = "1 sequence per GPU and activation checkpointing"
    if given and smallest != trained and not given.offload and _fits(problem, replace(smallest, layout=given)):
        yield used
        return
    yield from _other_optimizer(problem, smallest, given)
    job = _sharded(problem, smallest)
    if job is None:
        return
    if given and given != job.layout:
        used = f"{job.layout.name}, {used}"
    if _has_room(problem, job):
        yield used + _to_load(problem, job)
    elif length := largest(problem, job, "length", job.recipe.length - 1):
        yield f"--seq-len {length}, with {used}"
    yield from _other_methods(problem, smallest, given)
    yield from _more_gpus(problem, smallest, given)
    offloaded = job.with_layout(offload=True)
    if job.layout.is_fsdp and not (given and given.offload) and _has_room(problem, offloaded):
        need = problem.host_need(problem.host(offloaded).training)
        yield f"CPU offload, with {used}: several times slower, and {need}"


def _other_loading(problem: Problem, job: Job) -> Iterator[str]:
    """Changes that let hosts load a job that fits its GPUs: one rank that reads, a smaller method, or more memory."""
    once, key = replace(problem, ram_efficient=True), "fsdp_cpu_ram_efficient_loading: true"
    sharded = job if job.layout.is_fsdp else job.with_layout(engine=Engine.FSDP2, strategy=1, offload=False)
    if once.is_hosted(sharded) and once.evaluate(sharded).fits:
        change = "" if sharded == job else f"{sharded.layout.name} (accel-fsdp migrate FILE --to fsdp2) and "
        yield f"{change}{key}, so that one rank of a machine reads the model: {about_gib(once.host(sharded).training)}"
    smallest = job.with_recipe(checkpointing="full", rows=1)
    yield from (change for change in _other_methods(problem, smallest, job.layout) if "; loading takes" not in change)
    need = problem.host(job).training
    flag = "" if problem.host_gib else f": if they have it, --host-memory {math.ceil(need / GIB)}"
    yield f"machines with {about_gib(need)} of memory{flag}"


def _smaller_evaluation(problem: Problem, job: Job) -> str:
    """The largest evaluation batch that fits, if the training steps do."""
    rows = job.recipe.eval_batch // 2
    while rows and not problem.evaluate(job.with_recipe(eval_batch=rows)).fits:
        rows //= 2
    return f"--per_device_eval_batch_size {rows}" if rows else "--eval_strategy no, as a single row runs out"


def _other_methods(problem: Problem, smallest: Job, given: Layout | None) -> Iterator[str]:
    for method in SMALLER[smallest.method]:
        job = _sharded(problem, smallest.with_recipe(method=method, dtype="bfloat16"))
        if job and _has_room(problem, job):
            size = gib_or_mib(problem.predicted(job).peak.total)
            yield f"--method {method}, with {_job_text(job, given)}: {size}{_to_load(problem, job)}"


def _other_optimizer(problem: Problem, smallest: Job, given: Layout | None) -> Iterator[str]:
    """Trainer's default optimizer instead of the requested one, which may allow fewer layouts or need more."""
    if smallest.recipe.optimizer == Recipe.optimizer:
        return
    job = _sharded(problem, smallest.with_recipe(optimizer=Recipe.optimizer))
    if job:
        for offloaded in offloads(job):
            if _fits(problem, offloaded):
                yield f"--optimizer {offloaded.recipe.optimizer}, with {_job_text(offloaded, given)}"
                return


def _more_gpus(problem: Problem, smallest: Job, given: Layout | None) -> Iterator[str]:
    """The smallest sufficient number of GPUs; else with a smaller method; else the memory that each would need."""
    least: tuple[int, str] | None = None
    ranks = smallest.layout.ranks
    for method in (smallest.method, *SMALLER[smallest.method]):
        flag = f"--method {method}" if method != smallest.method else ""
        base = smallest.with_recipe(method=method, dtype="bfloat16") if flag else smallest
        for job in (_sharded(problem, base, ranks * 2**power) for power in range(1, MOST_DOUBLINGS + 1)):
            if job is None:
                continue
            if _has_room(problem, job):
                how = _job_text(job, given) + _to_load(problem, job)
                yield f"{job.layout.ranks} GPUs{f' and {flag}' if flag else ''}, with {how}"
                return
            size = problem.predicted(job).peak.total
            least = min(least or (size, ""), (size, f"{job.layout.ranks:,} of these{f' with {flag}' if flag else ''}"))
    if least:
        yield f"a smaller model, or GPUs with more memory: each of {least[1]} would still hold {gib_or_mib(least[0])}"


def _job_text(job: Job, given: Layout | None) -> str:
    checkpointing = "activation checkpointing" + ("" if job.method == "full" else " in the script")
    layout_name = f"{job.layout.name}, " if given != job.layout and job.engine is not Engine.NONE else ""
    return f"{layout_name}1 sequence per GPU and {checkpointing}"


def _to_load(problem: Problem, job: Job) -> str:
    """A note on the memory for loading, if machines usually have less."""
    return "" if problem.is_hosted(job) else f"; loading takes {problem.host_need(problem.host(job).loading)}"


def _sharded(problem: Problem, job: Job, ranks: int = 0) -> Job | None:
    """The job in the first layout that works and shards everything over the ranks, or the single process."""
    ranks, per_node = ranks or job.layout.ranks, job.layout.ranks_per_node
    spread = job.with_layout(ranks=ranks, ranks_per_node=min(per_node, ranks))
    fully_sharded = [job for job in layouts(spread) if SHARDS_ALL.get(job.engine) == job.layout.strategy]
    fully_sharded.sort(key=lambda job: list(SHARDS_ALL).index(job.engine))
    return next((job for job in fully_sharded if not problem.refuses(job)), None)


def _fits(problem: Problem, job: Job) -> bool:
    return _has_room(problem, job) and problem.is_hosted(job)


def _has_room(problem: Problem, job: Job) -> bool:
    return not problem.refuses(job) and problem.has_room(job)


@dataclass(frozen=True)
class Saving:
    """One change, as the flag or key to type, and the bytes by which it lowers the peak."""

    change: str
    freed_bytes: int


def savings(shape: ModelShape, tapes: Mapping[str, Tapes], job: Job) -> list[Saving]:
    """All single changes that free memory, each tried alone, the largest first."""
    now = predicted(shape, tapes, job, None).peak.total
    gains = (Saving(change, now - predicted(shape, tapes, smaller, None).peak.total) for change, smaller in _tries(job))
    return sorted((saving for saving in gains if saving.freed_bytes > 0), key=lambda saving: -saving.freed_bytes)


def _tries(job: Job) -> Iterator[tuple[str, Job]]:
    yield from _recipes(job)
    layout = job.layout
    if layout.is_fsdp:
        if layout.strategy != 1:
            yield f"{_full_shard(layout)} in the YAML", job.with_layout(strategy=1)
        if not layout.offload:
            yield "fsdp_offload_params: true in the YAML, several times slower", job.with_layout(offload=True)
    elif layout.engine is Engine.DEEPSPEED and layout.strategy < 3:
        yield "zero_stage: 3 in the YAML", job.with_layout(strategy=3)
    elif layout.engine is Engine.DDP:
        sharded = job.with_layout(engine=Engine.FSDP2, strategy=1)
        yield "sharding instead of DDP: accel-fsdp migrate FILE --to fsdp2", sharded


def _recipes(job: Job) -> Iterator[tuple[str, Job]]:
    recipe = job.recipe
    if recipe.rows > 1:  # in halves, so that the global batch can stay as it is
        rows, steps = -(-recipe.rows // 2), recipe.accumulation * 2
        flags = f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {steps}"
        yield flags, job.with_recipe(rows=rows, accumulation=steps)
    if recipe.length > 1:
        half = recipe.length // 2
        yield f"--max_length {half}", job.with_recipe(length=half)
    if recipe.checkpointing == "none":
        in_yaml = job.layout.is_fsdp and recipe.method == "full"  # PEFT loses adapters under it
        word = "fsdp_activation_checkpointing: true in the YAML" if in_yaml else "--gradient_checkpointing true"
        yield word, job.with_recipe(checkpointing="full")
    if recipe.precision == "no" and recipe.dtype == "float32":
        yield "mixed_precision: bf16 in the YAML", job.with_recipe(precision="bf16")
    if recipe.method == "full":
        yield "--use_peft, which trains an adapter only", job.with_recipe(method="lora", dtype="bfloat16")
    if recipe.masks_documents:
        flag = "--attn_implementation flash_attention_2, which needs no mask for packed rows"
        yield flag, job.with_recipe(attention="flash")
    if not recipe.chunked_loss and recipe.kernels == "none":
        yield "--use_liger_kernel true, with pip install liger-kernel", job.with_recipe(chunked_loss=True)


def _full_shard(layout: Layout) -> str:
    """Full sharding under each version; FSDP2's hybrid sharding is disabled by removing its mesh."""
    if layout.engine is Engine.FSDP1:
        return "fsdp_sharding_strategy: FULL_SHARD"
    return "no parallelism_config" if layout.strategy in (4, 5) else "fsdp_reshard_after_forward: true"
