"""Searches the ways to train a model on given GPUs: keeps what fits, ranks it by predicted time, says why. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from accel_fsdp.config import PLANNED, STRATEGIES, Engine, zero_name
from accel_fsdp.hardware import Gpu
from accel_fsdp.prediction import capacity
from accel_fsdp.prediction.capacity import Device
from accel_fsdp.prediction.memory import Layout, ModelShape, Prediction, Recipe, Tapes
from accel_fsdp.prediction.speed import RANGE, Step, step_time
from accel_fsdp.units import GIB, gib_of

MOST_ROWS = 256
"""Beyond this a larger micro-batch gains no speed on any GPU."""
MOST_TOKENS = 1 << 20
TIE = RANGE[0]
"""Two ways are told apart where one has less than this share of the other's speed: a real step may be as much shorter
than its prediction."""
ENOUGH = 0.95
"""The share of a strategy's highest speed that a micro-batch must reach: a larger one fills memory and gains little."""
HOST_PER_GPU = 3
"""Host memory that a machine is taken to have, as a multiple of its GPUs': 3.2 in a DGX H100 (2 TB), 3.6 in AWS
p4d.24xlarge (1,152 GiB), 3 in g4dn.metal (384 GiB), 4 in g5.48xlarge (768 GiB)."""


def _allowed(recipe: Recipe, layout: Layout) -> str:
    return ""


@dataclass(frozen=True)
class PlanJob:
    """What is given: the model, how to train it, on what. `fixed_rows` keeps the micro-batch of the recipe.

    `global_rows` are the sequences of one optimizer step on all GPUs, 0 where any number will do; then the recipe's
    accumulation is kept. `host_gib` is one machine's memory, 0 where it isn't known. `refuses` says why a way doesn't
    work although it may fit. `ram_efficient`: one rank of a machine reads the weights. `notes` are assumptions besides
    those of a step.
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
    global_rows: int = 0
    host_gib: float = 0
    refuses: Callable[[Recipe, Layout], str] = _allowed
    _known: dict[tuple[Recipe, Layout], Prediction] = field(default_factory=dict, init=False, repr=False, compare=False)

    def predicted(self, recipe: Recipe, layout: Layout) -> Prediction:
        """The memory of one way; a search asks for the same one several times."""
        if (recipe, layout) not in self._known:
            self._known[recipe, layout] = capacity.predicted(self.shape, self.tapes, recipe, layout, self.gpu)
        return self._known[recipe, layout]

    @property
    def capacity_bytes(self) -> int:
        """The memory of one GPU, as CUDA reports it."""
        return round(self.gpu.usable_gib * GIB)

    @property
    def host_bytes(self) -> int:
        """The memory of one machine, assumed where it wasn't told."""
        return round((self.host_gib or HOST_PER_GPU * self.ranks_per_node * self.gpu.memory_gib) * GIB)


@dataclass(frozen=True)
class Candidate:
    """One way to train, with what it would need and how long a step would take; `refused` is why it can't work."""

    recipe: Recipe
    layout: Layout
    prediction: Prediction
    device: Device
    step: Step
    refused: str = ""

    @property
    def verdict(self) -> str:
        """What the table says: whether it fits, or that it fails however much memory there is."""
        return "fails" if self.refused else self.device.verdict

    @property
    def fits(self) -> bool:
        """Whether it works, and fits with the margin."""
        return self.verdict == "yes"

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


def evaluate(job: PlanJob, recipe: Recipe, layout: Layout) -> Candidate:
    """Predicts memory and time of one way."""
    prediction, device = _memory(job, recipe, layout)
    step = step_time(job.shape, recipe, layout, job.gpu)
    return Candidate(recipe, layout, prediction, device, step, job.refuses(recipe, layout))


def _memory(job: PlanJob, recipe: Recipe, layout: Layout) -> tuple[Prediction, Device]:
    prediction = job.predicted(recipe, layout)
    return prediction, capacity.device(prediction, layout, job.capacity_bytes)


def table(job: PlanJob) -> list[Candidate]:
    """One candidate per strategy, with the recipe as it is."""
    return [evaluate(job, job.recipe, layout) for layout in layouts(job.ranks, job.ranks_per_node)]


def largest_rows(job: PlanJob, recipe: Recipe, layout: Layout) -> int:
    """The largest micro-batch that fits; 0 if not even one row does."""
    return _largest(lambda rows: has_room(job, replace(recipe, rows=rows), layout), MOST_ROWS)


def longest_sequence(job: PlanJob, recipe: Recipe, layout: Layout, most: int) -> int:
    """The longest sequence up to `most` that fits; 0 if not even one token does."""
    return _largest(lambda length: has_room(job, replace(recipe, length=length), layout), most)


def has_room(job: PlanJob, recipe: Recipe, layout: Layout) -> bool:
    """Whether a GPU has the memory, with the margin."""
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


def host_bytes(job: PlanJob, recipe: Recipe, layout: Layout) -> int:
    """What one machine's memory must hold at its fullest."""
    host = capacity.host(job.shape, recipe, layout, job.ram_efficient)
    return max(host.loading, host.offload)


@dataclass(frozen=True)
class Longest:
    """The longest sequences that fit: in the micro-batch that is recommended, and alone."""

    chosen: int = 0
    alone: int = 0


@dataclass(frozen=True)
class Plan:
    """The table, what to take, and why. `choice` is None where nothing fits; then `remedies` say what would.

    `ties` are the best ways of other layouts that the prediction can't tell from the choice, `runner_up` the next one
    that it can.
    """

    rows: tuple[Candidate, ...]
    choice: Candidate | None
    runner_up: Candidate | None
    ties: tuple[Candidate, ...]
    reason: str
    longest: Longest


def make_plan(job: PlanJob) -> Plan:
    """Searches strategy, checkpointing, micro-batch and offload; of the fastest that fit the simplest wins."""
    rows = tuple(table(job))
    found = sorted(_search(job), key=lambda one: -one.tokens_per_s)
    if not found:
        return Plan(rows, None, None, (), "", Longest())
    equal = [one for one in found if one.tokens_per_s >= TIE * found[0].tokens_per_s]
    choice = min(equal, key=_burden)
    others = {one.layout: one for one in reversed(found) if one.layout != choice.layout}  # the best of each
    ties = tuple(others[one.layout] for one in equal if others.get(one.layout) is one)
    second = next((one for one in found if others.get(one.layout) is one and one not in ties), None)
    return Plan(rows, choice, second, ties, _reason(job, choice, alone=not ties), _longest(job, choice))


def judge(job: PlanJob, layout: Layout) -> Plan:
    """One given layout: whether it fits, and the largest micro-batch and sequence that would."""
    one = evaluate(job, job.recipe, layout)
    if not one.fits:
        return Plan((one,), None, None, (), "", Longest())
    most = replace(job.recipe, rows=largest_rows(job, job.recipe, layout))
    return Plan((one,), one, None, (), f"It fits, up to {rows_in(most)} per GPU.", _longest(job, one))


def _longest(job: PlanJob, one: Candidate) -> Longest:
    most = job.shape.positions or MOST_TOKENS
    chosen, alone = (
        longest_sequence(job, recipe, one.layout, most) for recipe in (one.recipe, replace(one.recipe, rows=1))
    )
    return Longest(chosen, alone)


def _search(job: PlanJob) -> Iterator[Candidate]:
    """The best micro-batch of each strategy and checkpointing that works and fits."""
    for layout in layouts(job.ranks, job.ranks_per_node):
        for kind in dict.fromkeys((job.recipe.checkpointing, "full")):
            recipe = replace(job.recipe, checkpointing=kind)
            for tried in offloads(layout):
                if best := _best(job, recipe, tried):
                    yield best
                    break  # offload only where nothing fits without


def offloads(layout: Layout) -> tuple[Layout, ...]:
    """The layout, and with FSDP's offload."""
    return (layout, replace(layout, offload=True)) if layout.is_fsdp else (layout,)


def _best(job: PlanJob, recipe: Recipe, layout: Layout) -> Candidate | None:
    """The smallest micro-batch that is about as fast as the fastest; None where none fits."""
    if job.refuses(recipe, layout) or (layout.offload and host_bytes(job, recipe, layout) > job.host_bytes):
        return None
    found = [evaluate(job, one, layout) for one in _batches(job, recipe, layout)]
    enough = ENOUGH * max((one.tokens_per_s for one in found), default=0)
    return next((one for one in found if one.tokens_per_s >= enough), None)


def _batches(job: PlanJob, recipe: Recipe, layout: Layout) -> list[Recipe]:
    """The micro-batches to try, smallest first: all fit."""
    if job.fixed_rows:
        return [recipe] if has_room(job, recipe, layout) else []
    if job.global_rows:
        each = job.global_rows // job.ranks
        split = [replace(recipe, rows=n, accumulation=each // n) for n in range(1, min(each, MOST_ROWS) + 1)]
        return [one for one in split if one.rows * one.accumulation == each and has_room(job, one, layout)]
    most = largest_rows(job, recipe, layout)
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return [replace(recipe, rows=rows) for rows in dict.fromkeys((*powers, *([most] if most else [])))]


BURDENS = (
    "needs no offload",
    "resumes exactly and needs no other package",
    "computes nothing twice",
    "leaves more memory free",
)
"""What decides among equals, in this order."""
OLDER = {"fsdp1": 1, "zero": 2}


def _burden(one: Candidate) -> tuple[bool, int, bool, int]:
    """One candidate's share of each of `BURDENS`."""
    older = OLDER.get(one.layout.engine, 0)
    return one.layout.offload, older, one.recipe.checkpointing != "none", one.device.needed


def advantages(choice: Candidate, ties: Iterable[Candidate]) -> list[str]:
    """Why the choice was preferred to each of its equals, without repeating."""
    own, found = _burden(choice), set()
    for other in ties:
        found.add(next(place for place, (one, two) in enumerate(zip(own, _burden(other), strict=True)) if one != two))
    return [words for place, words in enumerate(BURDENS) if place in found]


def _reason(job: PlanJob, choice: Candidate, alone: bool) -> str:
    used = gib_of(choice.device.allocated, job.capacity_bytes)
    return (
        f"{_contest(choice.layout, alone)}: {used} at its peak, "
        f"about {choice.tokens_per_s:,.0f} tokens/s per GPU, bound by {choice.step.bound}."
    )


def _contest(layout: Layout, alone: bool) -> str:
    """Of what the choice is the best."""
    if layout.engine == "single":
        return "It fits"
    return "It is the fastest that fits" if alone else "Nothing that fits is clearly faster"


def name_of(layout: Layout) -> str:
    """How people call a layout."""
    if layout.engine == "zero":
        return zero_name(layout.strategy) + (" offload" if layout.offload else "")
    if layout.engine == "single":
        return "one GPU"
    if layout.engine == "ddp":
        return Engine.DDP.value
    name = f"{PLANNED[layout.engine].value} {STRATEGIES[layout.strategy]}"
    return name + (" offload" if layout.offload else "")


def checkpointing_in(recipe: Recipe) -> str:
    """The recipe's activation checkpointing in words."""
    kinds = {"none": "no checkpointing", "selective": "selective checkpointing"}
    return kinds.get(recipe.checkpointing, "activation checkpointing")


def rows_in(recipe: Recipe) -> str:
    """The recipe's micro-batch in words."""
    return "1 sequence" if recipe.rows == 1 else f"{recipe.rows} sequences"
