"""Searches the ways to train a model on given GPUs: keeps what fits, ranks it by predicted time, says why. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from accel_fsdp import overheads
from accel_fsdp.gpus import Gpu
from accel_fsdp.memory import Prediction, predict
from accel_fsdp.overheads import GIB, Device
from accel_fsdp.speed import Step, step_time
from accel_fsdp.tapes import Tapes, variant_of
from accel_fsdp.types import STRATEGIES, Layout, ModelShape, Recipe

MOST_ROWS = 256
"""Beyond this a larger micro-batch gains no speed on any GPU."""
MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class Job:
    """What is given: the model, how to train it, on what. `fixed_rows` keeps the micro-batch of the recipe.

    `ram_efficient`: one rank of a machine reads the weights. `notes` are assumptions besides those of a step.
    """

    shape: ModelShape
    tapes: Mapping[str, Tapes]
    recipe: Recipe
    gpu: Gpu
    ranks: int
    ranks_per_node: int
    fixed_rows: bool = False
    ram_efficient: bool = True
    notes: tuple[str, ...] = ()

    @property
    def capacity_bytes(self) -> int:
        """The memory of one GPU."""
        return round(self.gpu.usable_gib * GIB)


@dataclass(frozen=True)
class Candidate:
    """One way to train, with what it would need and how long a step would take."""

    recipe: Recipe
    layout: Layout
    prediction: Prediction
    device: Device
    step: Step

    @property
    def fits(self) -> bool:
        """Whether it fits with the margin."""
        return self.device.verdict == "yes"

    @property
    def tokens_per_s(self) -> float:
        """What it is ranked by."""
        return self.step.tokens_per_s_per_gpu


def layouts(ranks: int, ranks_per_node: int) -> Iterator[Layout]:
    """All strategies that make sense for so many ranks, in the order of the table."""
    if ranks == 1:
        yield Layout("single", 1, 1, 1)
        return
    yield Layout("ddp", 1, ranks, ranks_per_node)
    numbers = (1, 2, 4, 5) if ranks > ranks_per_node > 1 else (1, 2)
    for engine in ("fsdp2", "fsdp1"):
        for number in numbers:
            yield Layout(engine, number, ranks, ranks_per_node)
    for stage in (1, 2, 3):
        yield Layout("zero", stage, ranks, ranks_per_node)


def evaluate(job: Job, recipe: Recipe, layout: Layout) -> Candidate:
    """Predicts memory and time of one way."""
    prediction, device = _memory(job, recipe, layout)
    return Candidate(recipe, layout, prediction, device, step_time(job.shape, recipe, layout, job.gpu))


def _memory(job: Job, recipe: Recipe, layout: Layout) -> tuple[Prediction, Device]:
    tapes = job.tapes[variant_of(recipe, layout.engine)]
    prediction = predict(job.shape, tapes, recipe, layout, workspace_bytes(job.gpu))
    return prediction, overheads.device(prediction, layout, job.capacity_bytes)


def workspace_bytes(gpu: Gpu) -> int:
    """What cuBLAS holds on this GPU."""
    hopper = gpu.name.startswith(("H100", "H200", "GH200"))
    return overheads.HOPPER_WORKSPACE_BYTES if hopper else overheads.WORKSPACE_BYTES


def table(job: Job) -> list[Candidate]:
    """One candidate per strategy, with the recipe as it is."""
    return [evaluate(job, job.recipe, layout) for layout in layouts(job.ranks, job.ranks_per_node)]


def largest_rows(job: Job, recipe: Recipe, layout: Layout) -> int:
    """The largest micro-batch that fits; 0 if not even one row does."""
    return _largest(lambda rows: _fits(job, replace(recipe, rows=rows), layout), MOST_ROWS)


def longest_sequence(job: Job, recipe: Recipe, layout: Layout, most: int) -> int:
    """The longest sequence up to `most` that fits; 0 if not even one token does."""
    return _largest(lambda length: _fits(job, replace(recipe, length=length), layout), most)


def _fits(job: Job, recipe: Recipe, layout: Layout) -> bool:
    return _memory(job, recipe, layout)[1].verdict == "yes"


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 up that fits, found by doubling and halving."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high - 1, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Plan:
    """The table, what to take, and why. `choice` is None where nothing fits; then `changes` say what would."""

    rows: tuple[Candidate, ...]
    choice: Candidate | None
    runner_up: Candidate | None
    reason: str
    longest: int
    changes: tuple[str, ...]


def make_plan(job: Job) -> Plan:
    """Searches strategy, checkpointing, micro-batch and offload; the fastest that fits wins."""
    rows = tuple(table(job))
    found = sorted(_search(job), key=lambda one: -one.tokens_per_s)
    if not found:
        return Plan(rows, None, None, "", 0, tuple(_changes(job, None)))
    choice = found[0]
    more = tuple(_changes(job, choice.layout)) if choice.layout.offload else ()
    second = next((one for one in found if one.layout != choice.layout), None)
    longest = longest_sequence(job, choice.recipe, choice.layout, job.shape.positions or MOST_TOKENS)
    return Plan(rows, choice, second, _reason(job, choice), longest, more)


def judge(job: Job, layout: Layout) -> Plan:
    """One given layout: whether it fits, and the largest micro-batch and sequence that would."""
    one = evaluate(job, job.recipe, layout)
    if not one.fits:
        return Plan((one,), None, None, "", 0, tuple(_changes(job, layout)))
    longest = longest_sequence(job, job.recipe, layout, job.shape.positions or MOST_TOKENS)
    most = replace(job.recipe, rows=largest_rows(job, job.recipe, layout))
    return Plan((one,), one, None, f"It fits, up to {rows_in(most)} per GPU.", longest, ())


def _search(job: Job) -> Iterator[Candidate]:
    for layout in layouts(job.ranks, job.ranks_per_node):
        if layout.engine in ("fsdp1", "zero"):
            continue  # shown, not proposed: FSDP2 does the same without their defects, and needs no other package
        for recipe in _recipes(job.recipe):
            yield from _best(job, recipe, layout)


def _recipes(recipe: Recipe) -> Iterable[Recipe]:
    kinds = dict.fromkeys((recipe.checkpointing, "full"))
    return [replace(recipe, checkpointing=kind) for kind in kinds]


def _best(job: Job, recipe: Recipe, layout: Layout) -> Iterator[Candidate]:
    """The largest micro-batch that fits; offload only where nothing does without."""
    for offload in (False, True):
        if offload and layout.engine != "fsdp2":
            return
        tried = replace(layout, offload=offload)
        rows = recipe.rows if job.fixed_rows else largest_rows(job, recipe, tried)
        if rows and (one := evaluate(job, replace(recipe, rows=rows), tried)).fits:
            yield one
            return


def _reason(job: Job, choice: Candidate) -> str:
    used = choice.device.allocated / GIB
    return (
        f"{_contest(choice.layout)}: {used:.1f} of {job.gpu.usable_gib:.1f} GiB at its peak, "
        f"about {choice.tokens_per_s:,.0f} tokens/s per GPU, bound by {choice.step.bound}."
    )


def _contest(layout: Layout) -> str:
    """Of what the choice is the best: FSDP1 and ZeRO are shown and not proposed."""
    return "It fits" if layout.engine == "single" else "It is the fastest of DDP and FSDP2 that fits"


def _changes(job: Job, given: Layout | None) -> Iterator[str]:
    """The smallest changes that would make it fit, each tried alone with one row and full checkpointing.

    They are changes of the `given` layout where that helps, else of the one that shards all; offload is the last one,
    unless it is given.
    """
    layout = next(one for one in layouts(job.ranks, job.ranks_per_node) if one.engine in ("fsdp2", "single"))
    smallest = replace(job.recipe, checkpointing="full", rows=1)
    used = "1 row per GPU and activation checkpointing"
    if given and smallest != job.recipe and not given.offload and _fits(job, smallest, given):
        yield used
        return
    if given and given != layout:
        used = f"{name_of(layout)}, {used}"
    if _fits(job, smallest, layout):
        yield used
    elif length := longest_sequence(job, smallest, layout, job.recipe.length - 1):
        yield f"--seq-len {length}, with {used}"
    more = (Layout("fsdp2", 1, job.ranks * 2**power, job.ranks_per_node) for power in range(1, 11))
    if enough := next((one for one in more if _fits(job, smallest, one)), None):
        yield f"{enough.ranks} GPUs, with {used}"
    if job.recipe.method == "full" and _fits(job, replace(smallest, method="lora", dtype="bfloat16"), layout):
        yield f"--method lora, with {used}"
    offloads = given is not None and given.offload
    if layout.engine == "fsdp2" and not offloads and _fits(job, smallest, replace(layout, offload=True)):
        yield f"CPU offload, with {used}: several times slower"


def name_of(layout: Layout) -> str:
    """How people call a layout."""
    if layout.engine == "zero":
        return f"ZeRO-{layout.strategy}" + (" offload" if layout.offload else "")
    if layout.engine in ("ddp", "single"):
        return {"ddp": "DDP", "single": "one GPU"}[layout.engine]
    return f"{layout.engine.upper()} {STRATEGIES[layout.strategy]}" + (" offload" if layout.offload else "")


def checkpointing_in(recipe: Recipe) -> str:
    """The recipe's activation checkpointing in words."""
    kinds = {"none": "no checkpointing", "selective": "selective checkpointing"}
    return kinds.get(recipe.checkpointing, "activation checkpointing")


def rows_in(recipe: Recipe) -> str:
    """The recipe's micro-batch in words."""
    return "1 row" if recipe.rows == 1 else f"{recipe.rows} rows"
