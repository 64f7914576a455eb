"""The reference against facts about PyTorch's allocator: its documentation, its own tests, and what others measured."""

import re
from pathlib import Path

import allocator_reference
import pytest
import torch
from allocator_reference import FREE, KIB, MIB, USED, WAITING, Reference


def card(capacity: int | None = None, *, expandable: bool = False) -> Reference:
    return Reference(expandable, capacity)


def sizes_of_segments(allocator: Reference) -> list[int]:
    return [size for _, size, _ in allocator.segments()]


@pytest.mark.parametrize(
    ("name", "header", "size"),
    [
        ("kMinBlockSize", "AllocatorConfig.h", allocator_reference.SMALLEST),
        ("kSmallSize", "AllocatorConfig.h", allocator_reference.LARGEST_SMALL),
        ("kSmallBuffer", "AllocatorConfig.h", allocator_reference.SMALL_SEGMENT),
        ("large_segment_size_", "AllocatorConfig.h", allocator_reference.LARGE_SEGMENT),
        ("kMinLargeAlloc", "AllocatorConfig.h", allocator_reference.OWN_SEGMENT),
        ("kRoundLarge", "AllocatorConfig.h", allocator_reference.SEGMENT_STEP),
    ],
)
def test_sizes_are_those_of_the_installed_torch(name: str, header: str, size: int) -> None:
    text = (Path(torch.__file__).parent / "include" / "c10" / "core" / header).read_text()
    match = re.search(rf"\b{name}\s*(?:=\s*|\{{)(\d+)", text)
    assert match, f"{header} no longer defines {name}"
    assert int(match[1]) == size


@pytest.mark.parametrize(
    ("size", "takes", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (20 * MIB, 20 * MIB, 20 * MIB),
    ],
)
def test_a_request_rounds_to_512_bytes_and_its_segment_to_a_step(size: int, takes: int, segment: int) -> None:
    """The comments beside kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc and kRoundLarge; PR 17120."""
    allocator = card()
    allocator.malloc(size)
    assert (allocator.allocated, allocator.active) == (takes, takes)
    assert allocator.reserved == segment


def test_what_is_left_of_a_small_segment_is_split_down_to_512_bytes_and_of_a_large_one_above_1_mib() -> None:
    """should_split: 512 bytes are enough in the small pool; in the large pool the rest must exceed 1 MiB."""
    allocator = card()
    allocator.malloc(1 * MIB)
    allocator.malloc(1 * MIB - 512)
    assert allocator.segments() == [(0, 2 * MIB, [(1 * MIB, USED), (1 * MIB - 512, USED), (512, FREE)])]
    for size, blocks in [(19 * MIB, [(20 * MIB, USED)]), (19 * MIB - 512, [(19 * MIB - 512, USED), (MIB + 512, FREE)])]:
        large = card()
        large.free(large.malloc(20 * MIB))
        large.malloc(size)
        assert large.segments() == [(0, 20 * MIB, blocks)]


def test_two_requests_of_1_mib_share_a_segment_and_a_third_opens_another() -> None:
    """test_mempool_with_allocator in PyTorch's test/test_cuda.py."""
    allocator = card()
    counts = []
    for _ in range(3):
        allocator.malloc(1 * MIB)
        counts.append(len(allocator.segments()))
    assert counts == [1, 1, 2]


def test_the_smallest_block_that_fits_is_reused_the_lower_one_of_two() -> None:
    """BlockComparatorSize orders by stream, size and address; get_free_block takes the lower bound."""
    allocator = card()
    handles = [allocator.malloc(size * MIB) for size in (30, 24, 40, 24)]
    first, second = handles[1], handles[3]
    blocks = {handle: allocator.handles[handle] for handle in handles}
    for handle in handles:
        allocator.free(handle)
    assert allocator.handles[allocator.malloc(23 * MIB)] is blocks[first]
    assert allocator.handles[allocator.malloc(23 * MIB)] is blocks[second]
    assert allocator.handles[allocator.malloc(25 * MIB)] is blocks[handles[0]]
    assert allocator.reserved == allocator.reserved_peak == 118 * MIB


def test_free_neighbours_join() -> None:
    """try_merge_blocks joins both sides."""
    allocator = card()
    left, middle, right = (allocator.malloc(6 * MIB) for _ in range(3))
    allocator.free(left)
    allocator.free(right)
    assert allocator.segments() == [(0, 20 * MIB, [(6 * MIB, FREE), (6 * MIB, USED), (8 * MIB, FREE)])]
    allocator.free(middle)
    assert allocator.segments() == [(0, 20 * MIB, [(20 * MIB, FREE)])]
    assert (allocator.allocated, allocator.allocated_peak) == (0, 18 * MIB)


def test_a_stream_does_not_reuse_the_blocks_of_another() -> None:
    """The comment at the top of CUDACachingAllocator.cpp."""
    allocator = card()
    allocator.free(allocator.malloc(30 * MIB, stream=1))
    allocator.malloc(30 * MIB, stream=2)
    assert allocator.segments() == [(1, 30 * MIB, [(30 * MIB, FREE)]), (2, 30 * MIB, [(30 * MIB, USED)])]


def test_a_freed_block_waits_for_the_other_streams_that_used_it() -> None:
    """test_record_stream in test/test_cuda.py; a use on its own stream delays nothing (recordStream)."""
    allocator = card()
    handle = allocator.malloc(30 * MIB, stream=1)
    allocator.record_stream(handle, 1)
    allocator.record_stream(handle, 2)
    allocator.free(handle)
    assert (allocator.allocated, allocator.active) == (0, 30 * MIB)
    assert allocator.segments() == [(1, 30 * MIB, [(30 * MIB, WAITING)])]
    too_early = allocator.malloc(30 * MIB, stream=1)
    assert allocator.reserved == 60 * MIB
    allocator.complete()
    assert allocator.active == 60 * MIB  # until the next request asks for events
    allocator.malloc(30 * MIB, stream=1)
    assert (allocator.active, allocator.reserved) == (60 * MIB, 60 * MIB)
    allocator.free(too_early)
    own = card()
    handle = own.malloc(30 * MIB, stream=1)
    own.record_stream(handle, 1)
    own.free(handle)
    assert own.active == 0


def test_half_a_card_fits_once_and_again_after_it_was_freed() -> None:
    """test_out_of_memory_retry in test/test_cuda.py, on a card whose half is not a multiple of 2 MiB."""
    total = 16 * KIB * MIB + 5 * 512
    allocator = card(total)
    half = total // 2
    first = allocator.malloc(half)
    with pytest.raises(MemoryError):
        allocator.malloc(half)
    allocator.free(first)
    allocator.malloc(half)
    assert allocator.allocated == 8 * KIB * MIB + 3 * 512


@pytest.mark.parametrize("expandable", [False, True])
def test_freed_segments_make_room_for_a_larger_one(expandable: bool) -> None:
    """test_max_split_expandable in test/test_cuda.py, on 120 MiB."""
    allocator = card(120 * MIB, expandable=expandable)
    handles = [allocator.malloc(40 * MIB) for _ in range(3)]
    with pytest.raises(MemoryError):
        allocator.malloc(40 * MIB)
    for handle in handles:
        allocator.free(handle)
    allocator.malloc(120 * MIB)
    assert allocator.reserved == allocator.reserved_peak == 120 * MIB


def test_memory_can_run_out_though_a_block_that_waited_for_a_stream_would_fit() -> None:
    """Issue 189504: events are awaited, but the cache is not searched again. The same request then succeeds."""
    allocator = card(20 * MIB)
    waiting, _ = (allocator.malloc(9 * MIB) for _ in range(2))
    allocator.record_stream(waiting, 1)
    allocator.free(waiting)
    with pytest.raises(MemoryError):
        allocator.malloc(9 * MIB)
    allocator.malloc(9 * MIB)
    assert allocator.reserved_peak == 20 * MIB


def test_events_are_awaited_before_memory_runs_out() -> None:
    """PR 19222: a block that other streams use becomes free, and its segment goes."""
    allocator = card(100 * MIB)
    handle = allocator.malloc(60 * MIB)
    allocator.record_stream(handle, 1)
    allocator.free(handle)
    allocator.malloc(70 * MIB)
    assert sizes_of_segments(allocator) == [70 * MIB]


@pytest.mark.parametrize(("size", "page"), [(MIB, 2 * MIB), (2 * MIB, 20 * MIB), (50 * MIB, 60 * MIB)])
def test_an_expandable_segment_grows_by_pages(size: int, page: int) -> None:
    """Note [Expandable Segments] in CUDACachingAllocator.cpp: pages of 2 and 20 MiB."""
    allocator = card(expandable=True)
    allocator.malloc(size)
    assert allocator.reserved == page


def test_expandable_segments_leave_no_slivers() -> None:
    """The rationale in that note: a request a little larger than the cached block grows the segment by the rest."""
    reserved = {}
    for expandable in (False, True):
        allocator = card(expandable=expandable)
        for size in (100, 110, 120):
            allocator.free(allocator.malloc(size * MIB))
        reserved[expandable] = allocator.reserved
    assert reserved == {False: 330 * MIB, True: 120 * MIB}


def test_the_end_that_can_grow_counts_as_the_largest_block() -> None:
    """The comment in get_free_block: best fit takes a block for as large as it can become."""
    allocator = card(expandable=True)
    inside, _ = (allocator.malloc(size * MIB) for size in (40, 10))
    allocator.free(inside)
    allocator.malloc(5 * MIB)
    blocks = [(5 * MIB, USED), (35 * MIB, FREE), (10 * MIB, USED), (10 * MIB, FREE)]
    assert allocator.segments() == [(0, 60 * MIB, blocks)]


def test_pages_that_are_free_as_a_whole_move_to_where_they_are_needed() -> None:
    """The same note: out of memory, empty pages go and serve "another address in the segment" or another stream."""
    allocator = card(100 * MIB, expandable=True)
    first, _ = (allocator.malloc(size * MIB, stream=1) for size in (50, 10))
    allocator.free(first)
    other = allocator.malloc(60 * MIB, stream=2)
    stayed = (1, 20 * MIB, [(10 * MIB, FREE), (10 * MIB, USED)])
    assert allocator.segments() == [stayed, (2, 60 * MIB, [(60 * MIB, USED)])]
    with pytest.raises(MemoryError):
        allocator.malloc(30 * MIB, stream=1)  # two pages, though 20 MiB would do with the 10 that stayed
    low = allocator.malloc(15 * MIB, stream=1)  # the lowest page, not beside what stayed
    assert allocator.segments()[:2] == [stayed, (1, 20 * MIB, [(15 * MIB, USED), (5 * MIB, FREE)])]
    allocator.free(low)
    allocator.free(other)
    allocator.malloc(45 * MIB, stream=1)
    assert allocator.segments()[0] == (1, 60 * MIB, [(45 * MIB, USED), (5 * MIB, FREE), (10 * MIB, USED)])


def fenced_cycles(allocator: Reference, cycles: int) -> list[int]:
    """What is reserved after each cycle of the program of issue 123548, in MiB."""
    allocator.malloc(64 * MIB)
    reserved = []
    for _ in range(cycles):
        first, second = allocator.malloc(91 * MIB), allocator.malloc(45 * MIB + 512 * KIB)
        allocator.malloc(2 * MIB)
        allocator.free(first)
        allocator.free(second)
        reserved.append(allocator.reserved // MIB)
    return reserved


@pytest.mark.parametrize("expandable", [False, True])
def test_a_program_that_fragments_stays_low_as_measured_on_a_card(expandable: bool) -> None:
    """Issue 123548 and PR 193400 measured under 500 MiB on 16 GiB, with torch 2.12 and alike with 2.13."""
    assert max(fenced_cycles(card(16304 * MIB, expandable=expandable), 101)) < 500
