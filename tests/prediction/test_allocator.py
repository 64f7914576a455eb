"""The fast allocator against the slow reference: after each step of any program both tell the same."""

import random
from collections.abc import Iterable
from typing import Any, Literal

import pytest
from allocator_reference import KIB, MIB, Reference
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp.prediction.memory import CachingAllocator

Step = tuple[Literal["malloc", "free", "record_stream", "complete"], int, int]
"""What happens, to which of the live tensors or in how many bytes, and on which stream."""

LIMITS = [512, 2 * KIB, 4 * KIB, 1 * MIB, 2 * MIB, 10 * MIB, 20 * MIB, 30 * MIB, 128 * MIB]
NEARBY = [-513, -512, -511, -1, 0, 1, 511, 512, 513]
STREAMS = 3


def near_limits() -> st.SearchStrategy[int]:
    return st.builds(lambda limit, by: max(1, limit + by), st.sampled_from(LIMITS), st.sampled_from(NEARBY))


SIZES = st.one_of(
    near_limits(),
    st.integers(1, 40).map(lambda n: n * MIB),
    st.integers(1, 2200).map(lambda n: n * KIB),
    st.sampled_from([50, 91, 100, 150, 270, 400]).map(lambda n: n * MIB),
    st.integers(20, 130).map(lambda n: n * MIB),
    st.integers(1, 64 * MIB),
)
STEPS = st.one_of(
    st.tuples(st.just("malloc"), SIZES, st.sampled_from([0, 1, 2])),
    st.tuples(st.just("malloc"), SIZES, st.just(0)),
    st.tuples(st.just("malloc"), SIZES, st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("record_stream"), st.integers(0, 40), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("complete"), st.just(0), st.just(0)),
)
EXPANDABLE = st.booleans()
CAPACITIES = st.none() | st.one_of(
    st.integers(1, 600).map(lambda n: n * MIB),
    st.integers(1 * MIB, 600 * MIB),
    st.sampled_from([40, 120, 200, 300]).map(lambda n: n * MIB),
)


def observed(simulation: Any) -> tuple[Any, ...]:
    figures = (simulation.allocated, simulation.active, simulation.reserved)
    peaks = (simulation.allocated_peak, simulation.active_peak, simulation.reserved_peak)
    return figures, peaks


def attempt(simulation: Any, size: int, stream: int) -> int | None:
    try:
        handle: int = simulation.malloc(size, stream)
    except MemoryError:
        return None
    return handle


def compare(expandable: bool, capacity: int | None, steps: Iterable[Step]) -> None:
    """Takes the steps on both; a step without a live tensor to take it on does nothing."""
    fast, slow = CachingAllocator(expandable, capacity), Reference(expandable, capacity)
    live: list[tuple[int, int]] = []
    for number, (action, which, stream) in enumerate(steps):
        if action == "malloc":
            handles = attempt(fast, which, stream), attempt(slow, which, stream)
            assert (handles[0] is None) == (handles[1] is None), f"step {number}: only one of the two ran out"
            if handles[0] is not None and handles[1] is not None:
                live.append((handles[0], handles[1]))
        elif action == "complete":
            fast.complete()
            slow.complete()
        elif live:
            ours, theirs = live[which % len(live)]
            if action == "free":
                live.remove((ours, theirs))
                fast.free(ours)
                slow.free(theirs)
            else:
                fast.record_stream(ours, stream)
                slow.record_stream(theirs, stream)
        assert observed(fast) == observed(slow), f"after step {number}, {action}"


@settings(max_examples=300)
@given(expandable=EXPANDABLE, capacity=CAPACITIES, steps=st.lists(STEPS, min_size=10, max_size=120))
def test_any_short_program_is_simulated_as_the_reference_does(
    expandable: bool, capacity: int | None, steps: list[Step]
) -> None:
    compare(expandable, capacity, steps)


def long_program(seed: int, length: int) -> list[Step]:
    """Tensors of a few recurring sizes and now and then of another, on two streams that at times share one."""
    draw = random.Random(seed)
    usual = [700, 3 * KIB, 300 * KIB, MIB, 3 * MIB, 9 * MIB, 14 * MIB, 30 * MIB, 45 * MIB, 60 * MIB, 110 * MIB]
    recurring = draw.sample(usual, 6)
    steps: list[Step] = []
    for _ in range(length):
        chance = draw.random()
        if chance < 0.48:
            size = draw.choice(recurring) + draw.choice([0, 0, 0, 512, 100 * KIB, 7 * MIB])
            steps.append(("malloc", size, draw.choice([0, 0, 0, 1])))
        elif chance < 0.92:
            steps.append(("free", draw.randrange(1000), 0))
        elif chance < 0.97:
            steps.append(("record_stream", draw.randrange(1000), draw.randrange(STREAMS)))
        else:
            steps.append(("complete", 0, 0))
    return steps


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [None, 500 * MIB, 150 * MIB])
@pytest.mark.parametrize("expandable", [False, True])
def test_a_long_program_is_simulated_as_the_reference_does(expandable: bool, capacity: int | None, seed: int) -> None:
    compare(expandable, capacity, long_program(seed, 400))
