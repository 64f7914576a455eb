"""Changes that would make a job fit: the smallest ones, each tried alone. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from accel_fsdp.config import Engine, Method
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction.search import (
    PlanJob,
    evaluate,
    has_room,
    host_bytes,
    layouts,
    longest_sequence,
    offloads,
)
from accel_fsdp.units import about_gib, gib_or_mib

MOST_DOUBLINGS = 10
SMALLER: dict[Method, tuple[Method, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}
"""The methods that hold less."""


def remedies(job: PlanJob, given: Layout | None) -> Iterator[str]:
    """The changes that would make it fit, each alone with one sequence per GPU and full checkpointing.

    They change the `given` layout if that helps, else the one that shards everything. Offload comes last, unless it is
    given, with its host memory.
    """
    if given and job.recipe.eval_batch and evaluate(job, replace(job.recipe, eval_batch=0), given).fits:
        yield _smaller_evaluation(job, given)
        return
    job = replace(job, recipe=replace(job.recipe, eval_batch=0))
    smallest = replace(job.recipe, checkpointing="full", rows=1)
    used = "1 sequence per GPU and activation checkpointing"
    if given and smallest != job.recipe and not given.offload and _fits(job, smallest, given):
        yield used
        return
    yield from _other_optimizer(job, smallest, given)
    layout = sharded(job, smallest, job.ranks)
    if layout is None:
        return
    if given and given != layout:
        used = f"{layout.name}, {used}"
    if _fits(job, smallest, layout):
        yield used
    elif length := longest_sequence(job, smallest, layout, job.recipe.length - 1):
        yield f"--seq-len {length}, with {used}"
    yield from _other_methods(job, smallest, given)
    yield from _more_gpus(job, smallest, given)
    if layout.is_fsdp and not (given and given.offload):
        yield from _offload(job, smallest, replace(layout, offload=True), used)


def _smaller_evaluation(job: PlanJob, layout: Layout) -> str:
    """The largest evaluation batch that fits, if the training steps do."""
    rows = job.recipe.eval_batch // 2
    while rows and not evaluate(job, replace(job.recipe, eval_batch=rows), layout).fits:
        rows //= 2
    return f"--per_device_eval_batch_size {rows}" if rows else "--eval_strategy no, as a single row runs out"


def _other_methods(job: PlanJob, smallest: Recipe, given: Layout | None) -> Iterator[str]:
    for method in SMALLER[job.recipe.method]:
        recipe = replace(smallest, method=method, dtype="bfloat16")
        layout = sharded(job, recipe, job.ranks)
        if layout and _fits(job, recipe, layout):
            size = gib_or_mib(evaluate(job, recipe, layout).device.allocated)
            yield f"--method {method}, with {_how(job, recipe, layout, given)}: {size}"


def _other_optimizer(job: PlanJob, smallest: Recipe, given: Layout | None) -> Iterator[str]:
    """Trainer's default optimizer instead of the requested one, which may allow fewer layouts or need more."""
    if smallest.optimizer == Recipe.optimizer:
        return
    recipe = replace(smallest, optimizer=Recipe.optimizer)
    layout = sharded(job, recipe, job.ranks)
    for tried in offloads(layout) if layout else ():
        if _fits(job, recipe, tried) and not (tried.offload and host_bytes(job, recipe, tried) > job.host_bytes):
            yield f"--optimizer {recipe.optimizer}, with {_how(job, recipe, tried, given)}"
            return


def _more_gpus(job: PlanJob, smallest: Recipe, given: Layout | None) -> Iterator[str]:
    """The smallest sufficient number of GPUs; else with a smaller method; else the memory that each would need."""
    least: tuple[int, str] | None = None
    for method in (job.recipe.method, *SMALLER[job.recipe.method]):
        changed = method != job.recipe.method
        recipe = replace(smallest, method=method, dtype="bfloat16") if changed else smallest
        flag = f"--method {method}" if changed else ""
        for layout in (sharded(job, recipe, job.ranks * 2**power) for power in range(1, MOST_DOUBLINGS + 1)):
            if layout is None:
                continue
            if _fits(job, recipe, layout):
                yield f"{layout.ranks} GPUs{f' and {flag}' if changed else ''}, with {_how(job, recipe, layout, given)}"
                return
            size = evaluate(job, recipe, layout).device.allocated
            least = min(least or (size, ""), (size, f"{layout.ranks:,} of these{f' with {flag}' if changed else ''}"))
    if least:
        yield f"a smaller model, or GPUs with more memory: each of {least[1]} would still hold {gib_or_mib(least[0])}"


def _offload(job: PlanJob, smallest: Recipe, layout: Layout, used: str) -> Iterator[str]:
    if not _fits(job, smallest, layout):
        return
    needs, has = host_bytes(job, smallest, layout), job.host_bytes
    slow = f"CPU offload, with {used}: several times slower, and {about_gib(needs)} of memory on each machine"
    yield slow if needs <= has else f"{slow}, where {about_gib(has)} {'are' if job.host_gib else 'are usual'}"


def _how(job: PlanJob, recipe: Recipe, layout: Layout, given: Layout | None) -> str:
    checkpointing = "activation checkpointing" + ("" if recipe.method == "full" else " in the script")
    named = f"{layout.name}, " if given != layout and layout.engine is not Engine.NONE else ""
    return f"{named}1 sequence per GPU and {checkpointing}"


def sharded(job: PlanJob, recipe: Recipe, ranks: int) -> Layout | None:
    """The first layout that works and shards everything over the ranks, or the single process."""
    together = job.ranks_per_node if ranks > job.ranks_per_node else ranks
    full = {("fsdp2", 1), ("fsdp1", 1), ("zero", 3), ("single", 1)}
    layouts_of_all = (layout for layout in layouts(ranks, together) if (layout.engine, layout.strategy) in full)
    ordered = sorted(layouts_of_all, key=lambda layout: ("fsdp2", "fsdp1", "zero", "single").index(layout.engine))
    return next((layout for layout in ordered if not job.refuses(recipe, layout)), None)


def _fits(job: PlanJob, recipe: Recipe, layout: Layout) -> bool:
    return not job.refuses(recipe, layout) and has_room(job, recipe, layout)
