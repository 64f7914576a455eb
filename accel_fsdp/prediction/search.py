"""Searches the ways to train a model on given GPUs: keeps what fits, ranks it by predicted time, says why. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from accel_fsdp.config import Engine
from accel_fsdp.hardware import Gpu
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction import capacity
from accel_fsdp.prediction.capacity import Device, Replay
from accel_fsdp.prediction.memory import ModelShape, Prediction, Reservation, Tapes
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
FINE = 64
"""A limit that the allocator's replay tells, which takes a second for some, is as fine as this part of it."""
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
    those of a step. `remembered`: what was predicted of this model so far, by recipe, layout and the GPU's
    workspace; `replays` what its allocator did.
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
    remembered: dict[tuple[Recipe, Layout, int], Prediction] = field(default_factory=dict, repr=False, compare=False)
    replays: dict[tuple[object, ...], Reservation] = field(default_factory=dict, repr=False, compare=False)

    def predicted(self, recipe: Recipe, layout: Layout) -> Prediction:
        """The memory of one way; a search asks for the same one several times."""
        key = (recipe, layout, capacity.workspace_bytes(self.gpu))
        if key not in self.remembered:
            self.remembered[key] = capacity.predicted(self.shape, self.tapes, recipe, layout, self.gpu)
        return self.remembered[key]

    def replay(self, recipe: Recipe, layout: Layout) -> Replay:
        """What replays the allocator for one way, each time of a kind once.

        On a GPU with room for all that is reserved the allocator does what it does without a limit; expandable
        segments have addresses after the GPU's size, so that is said of the others alone.
        """
        replayed = capacity.replay_of(self.shape, self.tapes, recipe, layout, self.gpu)
        way = (recipe, layout, capacity.workspace_bytes(self.gpu))

        def once(expandable: bool, room_bytes: int | None) -> Reservation:
            unlimited = None if expandable else self.replays.get((*way, False, None))
            if unlimited and (room_bytes is None or unlimited.reserved <= room_bytes):
                return unlimited
            key = (*way, expandable, room_bytes)
            if key not in self.replays:
                self.replays[key] = found = replayed(expandable, room_bytes)
                if not expandable and not found.met_limit:
                    self.replays[(*way, False, None)] = found
            return self.replays[key]

        return once

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
        """Whether it works, and fits with the margin, if need be with expandable segments."""
        return not self.refused and self.device.fits

    @property
    def tokens_per_s(self) -> float:
        return self.step.tokens_per_s_per_gpu


def layouts(ranks: int, ranks_per_node: int) -> Iterator[Layout]:
    """All strategies that make sense for so many ranks, in the order of the table."""
    if ranks == 1:
        yield Layout(Engine.NONE, 1, 1, 1)
        return
    yield Layout(Engine.DDP, 1, ranks, ranks_per_node)
    numbers = (1, 2, 4, 5) if ranks > ranks_per_node > 1 else (1, 2)
    for engine in (Engine.FSDP2, Engine.FSDP1):
        for number in numbers:
            yield Layout(engine, number, ranks, ranks_per_node)
    for stage in (1, 2, 3):
        yield Layout(Engine.DEEPSPEED, stage, ranks, ranks_per_node)


def evaluate(job: PlanJob, recipe: Recipe, layout: Layout, quick: bool = False) -> Candidate:
    """Predicts memory and time of one way; a `quick` verdict takes the allocator to waste what is usual."""
    prediction, device = _memory(job, recipe, layout, quick)
    step = step_time(job.shape, recipe, layout, job.gpu)
    return Candidate(recipe, layout, prediction, device, step, job.refuses(recipe, layout))


def _memory(job: PlanJob, recipe: Recipe, layout: Layout, quick: bool) -> tuple[Prediction, Device]:
    prediction = job.predicted(recipe, layout)
    replay = None if quick else job.replay(recipe, layout)
    return prediction, capacity.device(
        prediction, layout, job.capacity_bytes, job.gpu, replay, unusual=recipe.eval_batch > 0 or recipe.varied
    )


def table(job: PlanJob) -> list[Candidate]:
    """One candidate per strategy, with the recipe as it is."""
    return [evaluate(job, job.recipe, layout) for layout in layouts(job.ranks, job.ranks_per_node)]


def largest_rows(job: PlanJob, recipe: Recipe, layout: Layout, like: Candidate | None = None) -> int:
    """The largest micro-batch that fits, in the way of `like` at least as many rows; 0 if not even one does."""
    return _largest(
        lambda rows: _room(job, replace(recipe, rows=rows), layout, like),
        job.capacity_bytes,
        MOST_ROWS,
        like.recipe.rows if like else 0,
    )


def longest_sequence(job: PlanJob, recipe: Recipe, layout: Layout, most: int, like: Candidate | None = None) -> int:
    """The longest sequence up to `most` that fits, in the way of `like` at least as long; 0 if no token does."""
    return _largest(
        lambda length: _room(job, replace(recipe, length=length), layout, like),
        job.capacity_bytes,
        most,
        like.recipe.length if like else 0,
    )


def _room(job: PlanJob, recipe: Recipe, layout: Layout, like: Candidate | None) -> Device:
    """What a recipe needs, and whether it fits: with what the allocator usually wastes, or by its replay as `like`."""
    device = _memory(job, recipe, layout, quick=True)[1]
    if like is None or device.verdict == "no":
        return device
    spared = capacity.spared_bytes(job.capacity_bytes) - device.outside
    if device.allocated > spared:
        return device
    found = job.replay(recipe, layout)(like.verdict == "expandable", spared)
    wasted = found.failed_at or (like.verdict == "yes" and found.thrashes)
    return replace(device, verdict="tight" if wasted else "yes")


def _replayed(job: PlanJob, one: Candidate) -> Candidate | None:
    """A way that fits by the allocator's replay alone, which then tells its limits; None for what fits anyhow."""
    return None if one.verdict == "yes" and has_room(job, one.recipe, one.layout) else one


def has_room(job: PlanJob, recipe: Recipe, layout: Layout) -> bool:
    """Whether a GPU has the memory, with the margin, if the allocator wastes what is usual."""
    return _memory(job, recipe, layout, quick=True)[1].verdict == "yes"


def _largest(needs: Callable[[int], Device], has: int, most: int, fitting: int = 0) -> int:
    """The largest number from 1 up to `most` that fits; `fitting` is known to, and then one within 2 % will do.

    Memory grows about evenly, so the line through the two numbers around the limit tells which one to try next; every
    third time, in case it misleads, it is the one in the middle.
    """
    low, high, step = fitting, max(most, fitting) + 1, 1 + fitting // FINE
    known = {number: needs(number).needed for number in {1 + fitting // 2, fitting} if fitting > 1}
    while high - low > step:
        tries = len(known)
        number = tries + 1 if tries < 2 else (low + high) // 2 if tries % 3 == 1 else _meets(known, low, high, has)
        number = min(max(number, low + 1), high - 1)
        device = needs(number)
        known[number] = device.needed
        low, high = (number, high) if device.fits else (low, number)
    return low


def _meets(known: Mapping[int, int], low: int, high: int, has: int) -> int:
    """Where a line meets what there is: the one through `low` and `high`, or through the two highest that fit."""
    first, second = (low, high) if low in known and high in known else sorted(known)[-2:]
    slope = (known[second] - known[first]) / (second - first)
    return first + int((has / (1 + capacity.MARGIN) - known[first]) / slope) if slope > 0 else high - 1


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
    found = list(_search(job))
    choice = _sure(job, found)
    if choice is None:
        return Plan(rows, None, None, (), "", Longest())
    bests: dict[Layout, Candidate] = {choice.layout: choice}  # of each layout the fastest
    for one in sorted(found, key=lambda one: -one.tokens_per_s):
        bests.setdefault(one.layout, one)
    others = [one for one in bests.values() if one is not choice]
    ties = tuple(one for one in others if one.tokens_per_s >= TIE * max(each.tokens_per_s for each in bests.values()))
    second = next((one for one in others if one not in ties), None)
    return Plan(rows, choice, second, ties, _reason(job, choice, alone=not ties), _longest(job, choice))


def best(job: PlanJob) -> Candidate | None:
    """What `make_plan` would choose, without what it says of the others; None where nothing fits."""
    return _sure(job, list(_search(job, all_ways=False)))


def _sure(job: PlanJob, found: list[Candidate]) -> Candidate | None:
    """The simplest of the fastest ways, for which the allocator was asked; those that it wastes too much for shrink."""
    asked: list[Candidate] = []
    while found:
        choice = min(_equal(found), key=_burden)
        if any(choice is one for one in asked):
            return choice
        place = found.index(choice)
        found[place] = sure = evaluate(job, choice.recipe, choice.layout)
        if sure.fits:
            asked.append(sure)
            continue
        smaller = _best(job, choice.recipe, choice.layout, below=choice.recipe.rows)
        found[place : place + 1] = [smaller] if smaller else []
    return None


def _equal(found: Iterable[Candidate]) -> list[Candidate]:
    """The ways that are as fast as the fastest, as far as a prediction can tell; fastest first."""
    ordered = sorted(found, key=lambda one: -one.tokens_per_s)
    return [one for one in ordered if one.tokens_per_s >= TIE * ordered[0].tokens_per_s]


def least(job: PlanJob) -> Candidate:
    """The way that needs least of a GPU, of those that work where any does; with offload where machines allow it."""
    smallest = replace(job.recipe, checkpointing="full", rows=job.recipe.rows if job.fixed_rows else 1)
    tried = (evaluate(job, smallest, one) for one in _hosted_ways(job, smallest))
    return min(tried, key=lambda one: (bool(one.refused), one.device.needed))


def judge(job: PlanJob, layout: Layout) -> Plan:
    """One given layout: whether it fits, and the largest micro-batch and sequence that would."""
    one = evaluate(job, job.recipe, layout)
    if not one.fits:
        return Plan((one,), None, None, (), "", Longest())
    most = replace(job.recipe, rows=largest_rows(job, job.recipe, layout, _replayed(job, one)))
    return Plan((one,), one, None, (), f"It fits, up to {rows_in(most)} per GPU.", _longest(job, one))


def _longest(job: PlanJob, one: Candidate) -> Longest:
    most, like = job.shape.positions or MOST_TOKENS, _replayed(job, one)
    chosen, alone = (
        longest_sequence(job, recipe, one.layout, most, like) for recipe in (one.recipe, replace(one.recipe, rows=1))
    )
    return Longest(chosen, max(chosen, alone))


def _is_hosted(job: PlanJob, recipe: Recipe, layout: Layout) -> bool:
    """Whether machines have the memory for what it offloads."""
    return not layout.offload or host_bytes(job, recipe, layout) <= job.host_bytes


def _hosted_ways(job: PlanJob, recipe: Recipe) -> Iterator[Layout]:
    """Every layout, with offload too where machines allow it."""
    ways = (tried for layout in layouts(job.ranks, job.ranks_per_node) for tried in offloads(layout))
    return (one for one in ways if _is_hosted(job, recipe, one))


def _smallest_way(job: PlanJob, recipe: Recipe, layout: Layout) -> Candidate | None:
    """The smallest micro-batch where it doesn't fit with what the allocator usually wastes, but by its replay."""
    smallest = _smallest(job, recipe)
    if job.refuses(smallest, layout) or not _is_hosted(job, smallest, layout):
        return None
    found = evaluate(job, smallest, layout)
    return found if found.fits else None


def _search(job: PlanJob, all_ways: bool = True) -> Iterator[Candidate]:
    """The best micro-batch of each strategy and checkpointing that works and fits.

    Without `all_ways` those are left out that can't be as fast as one that was found before.
    """
    fastest = 0.0
    for layout in layouts(job.ranks, job.ranks_per_node):
        for kind in dict.fromkeys((job.recipe.checkpointing, "full")):
            recipe = replace(job.recipe, checkpointing=kind)
            if not all_ways and _at_most(job, recipe, layout) < TIE * fastest:
                continue
            for tried in offloads(layout):
                if found := _best(job, recipe, tried) or _smallest_way(job, recipe, tried):
                    fastest = max(fastest, found.tokens_per_s)
                    yield found
                    break  # offload only where nothing fits without


def _at_most(job: PlanJob, recipe: Recipe, layout: Layout) -> float:
    """The speed that no micro-batch exceeds: a larger one shares what a step does once among more tokens."""
    if job.fixed_rows:
        return _speed(job, recipe, layout)
    return max(_speed(job, one, layout) for one in (_split(job, recipe) or [replace(recipe, rows=MOST_ROWS)]))


def _speed(job: PlanJob, recipe: Recipe, layout: Layout) -> float:
    return step_time(job.shape, recipe, layout, job.gpu).tokens_per_s_per_gpu


def offloads(layout: Layout) -> tuple[Layout, ...]:
    """The layout, and with FSDP's offload."""
    return (layout, replace(layout, offload=True)) if layout.is_fsdp else (layout,)


def _best(job: PlanJob, recipe: Recipe, layout: Layout, below: int = MOST_TOKENS) -> Candidate | None:
    """The smallest micro-batch that is about as fast as the fastest; None where none `below` that number fits."""
    if job.refuses(recipe, layout) or not _is_hosted(job, recipe, layout):
        return None
    found = [(one, _speed(job, one, layout)) for one in _batches(job, recipe, layout) if one.rows < below]
    if found:
        enough = ENOUGH * max(speed for _, speed in found)
        return evaluate(job, next(one for one, speed in found if speed >= enough), layout, quick=True)
    return None


def _smallest(job: PlanJob, recipe: Recipe) -> Recipe:
    """With the smallest micro-batch that there is."""
    if job.fixed_rows:
        return recipe
    return (_split(job, recipe) or [recipe])[0] if job.global_rows else replace(recipe, rows=1)


def _batches(job: PlanJob, recipe: Recipe, layout: Layout) -> list[Recipe]:
    """The micro-batches to try, smallest first: all fit."""
    if job.fixed_rows:
        return [recipe] if has_room(job, recipe, layout) else []
    if job.global_rows:
        return [one for one in _split(job, recipe) if has_room(job, one, layout)]
    most = largest_rows(job, recipe, layout)
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return [replace(recipe, rows=rows) for rows in dict.fromkeys((*powers, *([most] if most else [])))]


def _split(job: PlanJob, recipe: Recipe) -> list[Recipe]:
    """The micro-batches that a global batch can be split into, smallest first."""
    each = job.global_rows // job.ranks
    split = [replace(recipe, rows=n, accumulation=each // n) for n in range(1, min(each, MOST_ROWS) + 1)]
    return [one for one in split if one.rows * one.accumulation == each]


BURDENS = (
    "needs no offload",
    "resumes exactly and needs no other package",
    "computes nothing twice",
    "needs no expandable segments",
    "leaves more memory free",
)
"""What decides among equals, in this order."""
OLDER = {"fsdp1": 1, "zero": 2}


def _burden(one: Candidate) -> tuple[bool, int, bool, bool, int]:
    """One candidate's share of each of `BURDENS`."""
    older = OLDER.get(one.layout.engine, 0)
    checkpoints, gaps = one.recipe.checkpointing != "none", one.verdict == "expandable"
    return one.layout.offload, older, checkpoints, gaps, one.device.needed


def advantages(choice: Candidate, ties: Iterable[Candidate]) -> list[str]:
    """Why the choice was preferred to each of its equals, without repeating."""
    own, found = _burden(choice), set()
    for other in ties:
        differ = (place for place, (one, two) in enumerate(zip(own, _burden(other), strict=True)) if one != two)
        found.add(next(differ, len(BURDENS)))
    return [words for place, words in enumerate(BURDENS) if place in found]


def _reason(job: PlanJob, choice: Candidate, alone: bool) -> str:
    used = gib_of(choice.device.allocated, job.capacity_bytes)
    return (
        f"{_contest(choice.layout, alone)}: {used} at its peak, "
        f"about {choice.tokens_per_s:,.0f} tokens/s per GPU, bound by {choice.step.bound}."
    )


def _contest(layout: Layout, alone: bool) -> str:
    """Of what the choice is the best."""
    if layout.engine is Engine.NONE:
        return "It fits"
    return "It is the fastest that fits" if alone else "Nothing that fits is clearly faster"


def checkpointing_in(recipe: Recipe) -> str:
    """The recipe's activation checkpointing in words."""
    kinds = {"none": "no checkpointing", "selective": "selective checkpointing"}
    return kinds.get(recipe.checkpointing, "activation checkpointing")


def rows_in(recipe: Recipe) -> str:
    """The recipe's micro-batch in words."""
    return "1 sequence" if recipe.rows == 1 else f"{recipe.rows} sequences"
