"""Searches layouts and batches to train a model on given GPUs: keeps those that fit, ranks by predicted time. Pure."""

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
"""Two candidates differ if one has less than this share of the other's speed; real steps may be that much shorter than
predicted."""
ENOUGH = 0.95
"""The share of a strategy's highest speed that a micro-batch must reach: a larger one fills memory and gains little."""
FINE = 64
"""A limit found by replaying the allocator, which may take a second, is exact to one part in this many."""
HOST_PER_GPU = 3
"""Assumed host memory of a machine, as a multiple of its GPUs': 3.2 in a DGX H100 (2 TB), 3.6 in AWS
p4d.24xlarge (1,152 GiB), 3 in g4dn.metal (384 GiB), 4 in g5.48xlarge (768 GiB)."""


def _allowed(recipe: Recipe, layout: Layout) -> str:
    return ""


@dataclass(frozen=True)
class PlanJob:
    """The input of a search: model, recipe, GPUs. `fixed_rows` keeps the recipe's micro-batch.

    `global_rows` are the sequences of one optimizer step on all GPUs, 0 for any number with the recipe's accumulation.
    `host_gib` is one machine's memory, 0 if unknown. `refuses` returns why a layout doesn't work although it may fit.
    `ram_efficient`: one rank of a machine reads the weights. `notes` are assumptions besides those of a step.
    `remembered` caches predictions by recipe, layout and the GPU's workspace, `replays` results of the allocator.
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
        """The predicted memory, cached because a search asks for the same one several times."""
        key = (recipe, layout, capacity.workspace_bytes(self.gpu))
        if key not in self.remembered:
            self.remembered[key] = capacity.predicted(self.shape, self.tapes, recipe, layout, self.gpu)
        return self.remembered[key]

    def replay(self, recipe: Recipe, layout: Layout) -> Replay:
        """Returns a cached function that replays the allocator for one recipe and layout.

        If a GPU has room for all reserved memory, the result without a limit is reused. Expandable segments are
        replayed each time, because their addresses depend on the GPU's size.
        """
        replayed = capacity.replay_of(self.shape, self.tapes, recipe, layout, self.gpu)
        variant = (recipe, layout, capacity.workspace_bytes(self.gpu))

        def once(expandable: bool, room_bytes: int | None) -> Reservation:
            unlimited = None if expandable else self.replays.get((*variant, False, None))
            if unlimited and (room_bytes is None or unlimited.reserved <= room_bytes):
                return unlimited
            key = (*variant, expandable, room_bytes)
            if key not in self.replays:
                self.replays[key] = reservation = replayed(expandable, room_bytes)
                if not expandable and not reservation.met_limit:
                    self.replays[(*variant, False, None)] = reservation
            return self.replays[key]

        return once

    @property
    def capacity_bytes(self) -> int:
        """The memory of one GPU, as CUDA reports it."""
        return round(self.gpu.usable_gib * GIB)

    @property
    def host_bytes(self) -> int:
        """The memory of one machine, assumed if unknown."""
        return round((self.host_gib or HOST_PER_GPU * self.ranks_per_node * self.gpu.memory_gib) * GIB)


@dataclass(frozen=True)
class Candidate:
    """A recipe with a layout, its predicted memory and step time; `refused` is the reason why it can't work."""

    recipe: Recipe
    layout: Layout
    prediction: Prediction
    device: Device
    step: Step
    refused: str = ""

    @property
    def verdict(self) -> str:
        """The table's word: whether it fits, or that it fails regardless of memory."""
        return "fails" if self.refused else self.device.verdict

    @property
    def fits(self) -> bool:
        """Whether it works and fits with the margin, if necessary with expandable segments."""
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
    """Predicts memory and time; a `quick` verdict assumes usual fragmentation instead of a replay."""
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
    """One candidate per strategy, with the unchanged recipe."""
    return [evaluate(job, job.recipe, layout) for layout in layouts(job.ranks, job.ranks_per_node)]


def largest_rows(job: PlanJob, recipe: Recipe, layout: Layout, like: Candidate | None = None) -> int:
    """The largest micro-batch that fits, at least that of `like`, whose verdict it needs; 0 if no row fits."""
    return _largest(
        lambda rows: _room(job, replace(recipe, rows=rows), layout, like),
        job.capacity_bytes,
        MOST_ROWS,
        like.recipe.rows if like else 0,
    )


def longest_sequence(job: PlanJob, recipe: Recipe, layout: Layout, most: int, like: Candidate | None = None) -> int:
    """The longest sequence up to `most` that fits, at least that of `like`, whose verdict it needs; 0 if none fits."""
    return _largest(
        lambda length: _room(job, replace(recipe, length=length), layout, like),
        job.capacity_bytes,
        most,
        like.recipe.length if like else 0,
    )


def _room(job: PlanJob, recipe: Recipe, layout: Layout, like: Candidate | None) -> Device:
    """Memory and verdict of a recipe: with the usual fragmentation, or with `like` by replaying the allocator."""
    device = _memory(job, recipe, layout, quick=True)[1]
    if like is None or device.verdict == "no":
        return device
    spared = capacity.spared_bytes(job.capacity_bytes) - device.outside
    if device.allocated > spared:
        return device
    reservation = job.replay(recipe, layout)(like.verdict == "expandable", spared)
    wasted = reservation.failed_at or (like.verdict == "yes" and reservation.thrashes)
    return replace(device, verdict="tight" if wasted else "yes")


def _replayed(job: PlanJob, candidate: Candidate) -> Candidate | None:
    """The candidate if it fits only by the allocator's replay, which then decides its limits; else None."""
    return None if candidate.verdict == "yes" and has_room(job, candidate.recipe, candidate.layout) else candidate


def has_room(job: PlanJob, recipe: Recipe, layout: Layout) -> bool:
    """Whether a GPU has the memory, with the margin, at the usual fragmentation."""
    return _memory(job, recipe, layout, quick=True)[1].verdict == "yes"


def _largest(needs: Callable[[int], Device], has: int, most: int, fitting: int = 0) -> int:
    """The largest number from 1 to `most` that fits; if `fitting` is known to fit, a result within 2 % is enough.

    Memory grows about linearly, so the next number tried is where the line through the two numbers around the limit
    meets it; every third time it is the middle, in case the line misleads.
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
    """Where a line meets the limit: the one through `low` and `high`, or through the two highest known numbers."""
    first, second = (low, high) if low in known and high in known else sorted(known)[-2:]
    slope = (known[second] - known[first]) / (second - first)
    return first + int((has / (1 + capacity.MARGIN) - known[first]) / slope) if slope > 0 else high - 1


def host_bytes(job: PlanJob, recipe: Recipe, layout: Layout) -> int:
    """The peak of one machine's host memory."""
    host = capacity.host(job.shape, recipe, layout, job.ram_efficient)
    return max(host.loading, host.offload)


@dataclass(frozen=True)
class Longest:
    """The longest sequences that fit: in the recommended micro-batch, and alone."""

    chosen: int = 0
    alone: int = 0


@dataclass(frozen=True)
class Plan:
    """The table, the choice, and its reason. `choice` is None if nothing fits; then `remedies` lists changes.

    `ties` are the best candidates of other layouts that are as fast as the choice, within the prediction's error;
    `runner_up` is the next slower one.
    """

    rows: tuple[Candidate, ...]
    choice: Candidate | None
    runner_up: Candidate | None
    ties: tuple[Candidate, ...]
    reason: str
    longest: Longest


def make_plan(job: PlanJob) -> Plan:
    """Searches strategy, checkpointing, micro-batch and offload; chooses the simplest of the fastest that fit."""
    rows = tuple(table(job))
    candidates = list(_search(job))
    choice = _sure(job, candidates)
    if choice is None:
        return Plan(rows, None, None, (), "", Longest())
    bests: dict[Layout, Candidate] = {choice.layout: choice}  # the fastest of each layout
    for candidate in sorted(candidates, key=lambda candidate: -candidate.tokens_per_s):
        bests.setdefault(candidate.layout, candidate)
    others = [candidate for candidate in bests.values() if candidate is not choice]
    fastest = max(candidate.tokens_per_s for candidate in bests.values())
    ties = tuple(candidate for candidate in others if candidate.tokens_per_s >= TIE * fastest)
    second = next((candidate for candidate in others if candidate not in ties), None)
    return Plan(rows, choice, second, ties, _reason(job, choice, alone=not ties), _longest(job, choice))


def best(job: PlanJob) -> Candidate | None:
    """The choice of `make_plan` alone; None if nothing fits."""
    return _sure(job, list(_search(job, all_ways=False)))


def _sure(job: PlanJob, candidates: list[Candidate]) -> Candidate | None:
    """The simplest of the fastest candidates, confirmed by the allocator's replay; those that fail it are shrunk."""
    asked: list[Candidate] = []
    while candidates:
        choice = min(_equal(candidates), key=_burden)
        if any(choice is known for known in asked):
            return choice
        place = candidates.index(choice)
        candidates[place] = sure = evaluate(job, choice.recipe, choice.layout)
        if sure.fits:
            asked.append(sure)
            continue
        smaller = _best(job, choice.recipe, choice.layout, below=choice.recipe.rows)
        candidates[place : place + 1] = [smaller] if smaller else []
    return None


def _equal(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates as fast as the fastest, within the prediction's error; fastest first."""
    ordered = sorted(candidates, key=lambda candidate: -candidate.tokens_per_s)
    return [candidate for candidate in ordered if candidate.tokens_per_s >= TIE * ordered[0].tokens_per_s]


def least(job: PlanJob) -> Candidate:
    """The candidate with the least GPU memory, one that works if any does; offload where host memory allows it."""
    smallest = replace(job.recipe, checkpointing="full", rows=job.recipe.rows if job.fixed_rows else 1)
    tried = (evaluate(job, smallest, layout) for layout in _hosted_ways(job, smallest))
    return min(tried, key=lambda candidate: (bool(candidate.refused), candidate.device.needed))


def judge(job: PlanJob, layout: Layout) -> Plan:
    """Judges a given layout: whether it fits, and the largest micro-batch and sequence that do."""
    candidate = evaluate(job, job.recipe, layout)
    if not candidate.fits:
        return Plan((candidate,), None, None, (), "", Longest())
    most = replace(job.recipe, rows=largest_rows(job, job.recipe, layout, _replayed(job, candidate)))
    return Plan((candidate,), candidate, None, (), f"It fits, up to {rows_in(most)} per GPU.", _longest(job, candidate))


def _longest(job: PlanJob, candidate: Candidate) -> Longest:
    most, like = job.shape.positions or MOST_TOKENS, _replayed(job, candidate)
    single = replace(candidate.recipe, rows=1)
    chosen, alone = (
        longest_sequence(job, recipe, candidate.layout, most, like) for recipe in (candidate.recipe, single)
    )
    return Longest(chosen, max(chosen, alone))


def _is_hosted(job: PlanJob, recipe: Recipe, layout: Layout) -> bool:
    """Whether the machines have enough host memory for the offload."""
    return not layout.offload or host_bytes(job, recipe, layout) <= job.host_bytes


def _hosted_ways(job: PlanJob, recipe: Recipe) -> Iterator[Layout]:
    """Every layout, also with offload where host memory allows it."""
    variants = (variant for layout in layouts(job.ranks, job.ranks_per_node) for variant in offloads(layout))
    return (layout for layout in variants if _is_hosted(job, recipe, layout))


def _smallest_way(job: PlanJob, recipe: Recipe, layout: Layout) -> Candidate | None:
    """The smallest micro-batch, if it fits by the allocator's replay rather than at usual fragmentation."""
    smallest = _smallest(job, recipe)
    if job.refuses(smallest, layout) or not _is_hosted(job, smallest, layout):
        return None
    candidate = evaluate(job, smallest, layout)
    return candidate if candidate.fits else None


def _search(job: PlanJob, all_ways: bool = True) -> Iterator[Candidate]:
    """Yields the best micro-batch of each strategy and checkpointing that works and fits.

    Without `all_ways`, candidates are skipped that can't be as fast as an earlier one.
    """
    fastest = 0.0
    for layout in layouts(job.ranks, job.ranks_per_node):
        for kind in dict.fromkeys((job.recipe.checkpointing, "full")):
            recipe = replace(job.recipe, checkpointing=kind)
            if not all_ways and _at_most(job, recipe, layout) < TIE * fastest:
                continue
            for tried in offloads(layout):
                if candidate := _best(job, recipe, tried) or _smallest_way(job, recipe, tried):
                    fastest = max(fastest, candidate.tokens_per_s)
                    yield candidate
                    break  # offload only where nothing fits without


def _at_most(job: PlanJob, recipe: Recipe, layout: Layout) -> float:
    """An upper bound of the speed: larger micro-batches share a step's fixed costs among more tokens."""
    if job.fixed_rows:
        return _speed(job, recipe, layout)
    return max(_speed(job, batch, layout) for batch in (_split(job, recipe) or [replace(recipe, rows=MOST_ROWS)]))


def _speed(job: PlanJob, recipe: Recipe, layout: Layout) -> float:
    return step_time(job.shape, recipe, layout, job.gpu).tokens_per_s_per_gpu


def offloads(layout: Layout) -> tuple[Layout, ...]:
    """The layout, and with FSDP's offload."""
    return (layout, replace(layout, offload=True)) if layout.is_fsdp else (layout,)


def _best(job: PlanJob, recipe: Recipe, layout: Layout, below: int = MOST_TOKENS) -> Candidate | None:
    """The smallest micro-batch that is about as fast as the fastest; None if none `below` that number fits."""
    if job.refuses(recipe, layout) or not _is_hosted(job, recipe, layout):
        return None
    speeds = [(batch, _speed(job, batch, layout)) for batch in _batches(job, recipe, layout) if batch.rows < below]
    if speeds:
        enough = ENOUGH * max(speed for _, speed in speeds)
        return evaluate(job, next(batch for batch, speed in speeds if speed >= enough), layout, quick=True)
    return None


def _smallest(job: PlanJob, recipe: Recipe) -> Recipe:
    """The recipe with its smallest possible micro-batch."""
    if job.fixed_rows:
        return recipe
    return (_split(job, recipe) or [recipe])[0] if job.global_rows else replace(recipe, rows=1)


def _batches(job: PlanJob, recipe: Recipe, layout: Layout) -> list[Recipe]:
    """The micro-batches that fit, of those worth trying, smallest first."""
    if job.fixed_rows:
        return [recipe] if has_room(job, recipe, layout) else []
    if job.global_rows:
        return [batch for batch in _split(job, recipe) if has_room(job, batch, layout)]
    most = largest_rows(job, recipe, layout)
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return [replace(recipe, rows=rows) for rows in dict.fromkeys((*powers, *([most] if most else [])))]


def _split(job: PlanJob, recipe: Recipe) -> list[Recipe]:
    """The micro-batches that a global batch can be split into, smallest first."""
    rows = job.global_rows // job.ranks
    split = [replace(recipe, rows=size, accumulation=rows // size) for size in range(1, min(rows, MOST_ROWS) + 1)]
    return [batch for batch in split if batch.rows * batch.accumulation == rows]


BURDENS = (
    "needs no offload",
    "resumes exactly and needs no other package",
    "computes nothing twice",
    "needs no expandable segments",
    "leaves more memory free",
)
"""The criteria that decide among equals, in this order."""
OLDER = {"fsdp1": 1, "zero": 2}


def _burden(candidate: Candidate) -> tuple[bool, int, bool, bool, int]:
    """The candidate's value for each of `BURDENS`; lower is better."""
    older = OLDER.get(candidate.layout.engine, 0)
    checkpoints, gaps = candidate.recipe.checkpointing != "none", candidate.verdict == "expandable"
    return candidate.layout.offload, older, checkpoints, gaps, candidate.device.needed


def advantages(choice: Candidate, ties: Iterable[Candidate]) -> list[str]:
    """The reasons why the choice was preferred to its equals, each once."""
    own, deciding = _burden(choice), set()
    for equal in ties:
        pairs = enumerate(zip(own, _burden(equal), strict=True))
        differ = (place for place, (better, worse) in pairs if better != worse)
        deciding.add(next(differ, len(BURDENS)))
    return [words for place, words in enumerate(BURDENS) if place in deciding]


def _reason(job: PlanJob, choice: Candidate, alone: bool) -> str:
    used = gib_of(choice.device.allocated, job.capacity_bytes)
    return (
        f"{_contest(choice.layout, alone)}: {used} at its peak, "
        f"about {choice.tokens_per_s:,.0f} tokens/s per GPU, bound by {choice.step.bound}."
    )


def _contest(layout: Layout, alone: bool) -> str:
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
