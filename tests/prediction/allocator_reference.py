"""The rules of PyTorch's CUDA caching allocator, written to be read: slow, and nothing kept that a scan can find.

The independent route that the tests compare `accel_fsdp.prediction.memory.allocator` with. It was written from
PyTorch's source alone, and has no code of accel_fsdp.

Where each rule stands in c10/cuda/CUDACachingAllocator.cpp, class DeviceCachingAllocator. Two stages were read: commit
eb42ad6 of 2024, and a text of 2026 with `large_segment_size_mb` that is older than `throw_on_cudamalloc_oom` (PR
179473). Where they differ, the later one counts. A test compares the sizes with the headers of the installed torch.

- sizes are multiples of 512 bytes -> round_size
- up to 1 MiB is small; small and large never share a segment -> get_pool
- a segment has 2 MiB, 20 MiB or a multiple of 2 MiB -> get_allocation_size
- best fit within stream and pool by size, then by address -> get_free_block, BlockComparatorSize
- what is left of a block is split off -> should_split, alloc_found_block
- free neighbours become one block -> free_block, try_merge_blocks
- other streams' uses delay a free until their events are complete -> recordStream, free, insert_events, process_events
- the order of attempts for new memory -> malloc
- new memory -> alloc_block
- all events are awaited and all free segments go -> release_cached_blocks, synchronize_and_free_events, release_blocks
- an expandable segment grows at the lowest address with room -> find_expandable_block, try_allocate_expandable_block,
  map_block, ExpandableSegment::map
- its whole free pages go -> unmap_block, ExpandableSegment::unmap, release_expandable_segment
- what a snapshot shows -> snapshot; the names of states are those of torch/csrc/cuda/Module.cpp

What the source leaves to the driver is settled here: each segment's addresses are above those of all earlier ones.
"""

from dataclasses import dataclass, field

KIB = 1 << 10
MIB = 1 << 20
SMALLEST = 512
LARGEST_SMALL = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
"""From this size a request gets a segment of its own."""
SEGMENT_STEP = 2 * MIB
ENDLESS = 1 << 60
"""Addresses that an expandable segment reserves if the card's memory is not known."""

USED, WAITING, FREE, UNMAPPED = "active_allocated", "active_pending_free", "inactive", "unmapped"


@dataclass(eq=False)
class Block:
    address: int
    size: int
    state: str
    other_streams: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(eq=False)
class Segment:
    stream: int
    small: bool
    expandable: bool
    blocks: list[Block]
    """In the order of their addresses, without gaps."""


@dataclass(eq=False)
class Event:
    block: Block
    completed: bool = False


class Reference:
    """An allocator for one card.

    `expandable` is the setting expandable_segments; all others are as PyTorch has them without PYTORCH_ALLOC_CONF.
    `capacity_bytes` is what the card can give.
    """

    def __init__(self, expandable: bool = False, capacity_bytes: int | None = None) -> None:
        self.expandable = expandable
        self.capacity = capacity_bytes
        self.all_segments: list[Segment] = []
        self.events: list[Event] = []
        self.handles: dict[int, Block] = {}
        self.next_address = 0
        self.next_handle = 1
        self.allocated_peak = self.active_peak = self.reserved_peak = 0

    # What it tells

    @property
    def allocated(self) -> int:
        return self.sum_of(USED)

    @property
    def active(self) -> int:
        return self.sum_of(USED, WAITING)

    @property
    def reserved(self) -> int:
        return self.sum_of(USED, WAITING, FREE)

    def segments(self) -> list[tuple[int, int, list[tuple[int, str]]]]:
        """Stream, size and blocks of each range of mapped memory; sorted, since addresses are the driver's choice."""
        ranges = []
        for segment in self.all_segments:
            mapped: list[tuple[int, str]] = []
            for block in [*segment.blocks, Block(0, 0, UNMAPPED)]:
                if block.state != UNMAPPED:
                    mapped.append((block.size, block.state))
                elif mapped:
                    ranges.append((segment.stream, sum(size for size, _ in mapped), mapped))
                    mapped = []
        return sorted(ranges)

    # What a program does

    def malloc(self, size: int, stream: int = 0) -> int:
        self.notice_completed_events()
        size = self.rounded(size)
        small = size <= LARGEST_SMALL
        block = self.best_fit(size, stream, small)
        if block is None:
            block = self.new_block(size, stream, small)
        if block is None:
            self.release_everything_free()
            block = self.new_block(size, stream, small)
        if block is None:
            raise MemoryError(f"{size} bytes")
        self.split(block, size, small)
        block.state = USED
        self.note_peaks()
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.handles[handle] = block
        return handle

    def free(self, handle: int) -> None:
        block = self.handles.pop(handle)
        if block.other_streams:
            block.state = WAITING
            self.events += [Event(block) for _ in block.other_streams]
            block.other_streams = set()
        else:
            self.put_into_cache(block)

    def record_stream(self, handle: int, stream: int) -> None:
        block = self.handles[handle]
        if stream != self.segment_of(block).stream:
            block.other_streams.add(stream)

    def complete(self) -> None:
        for event in self.events:
            event.completed = True

    # Sizes

    def rounded(self, size: int) -> int:
        if size < SMALLEST:
            return SMALLEST
        return up_to_multiple(size, SMALLEST)

    @staticmethod
    def segment_size(size: int) -> int:
        if size <= LARGEST_SMALL:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < OWN_SEGMENT else up_to_multiple(size, SEGMENT_STEP)

    # The cache

    def best_fit(self, size: int, stream: int, small: bool) -> Block | None:
        fitting = [block for block in self.cached(small, stream) if block.size >= size]
        if not fitting:
            return None
        best = fitting.pop(0)
        if self.expandable:
            while fitting and self.size_it_could_grow_to(fitting[0]) < self.size_it_could_grow_to(best):
                best = fitting.pop(0)
        return best

    def size_it_could_grow_to(self, block: Block) -> int:
        following = self.neighbour(block, 1)
        return block.size + (following.size if following and following.state == UNMAPPED else 0)

    def split(self, block: Block, size: int, small: bool) -> None:
        left = block.size - size
        if left >= SMALLEST if small or self.expandable else left > LARGEST_SMALL:
            self.cut(block, size)

    def put_into_cache(self, block: Block) -> None:
        block.state = FREE
        self.merge_neighbours(self.segment_of(block))

    def cached(self, small: bool, stream: int | None = None) -> list[Block]:
        """Free blocks by stream, size and address."""
        blocks = [
            (segment.stream, block.size, block.address, block)
            for segment in self.all_segments
            for block in segment.blocks
            if segment.small == small and block.state == FREE and stream in (None, segment.stream)
        ]
        return [block for *_, block in sorted(blocks, key=lambda entry: entry[:3])]

    # Events

    def notice_completed_events(self) -> None:
        completed = [event for event in self.events if event.completed]
        self.events = [event for event in self.events if not event.completed]
        awaited = [event.block for event in self.events]
        for block in {event.block for event in completed}:
            if block not in awaited:
                self.put_into_cache(block)

    # New memory

    def new_block(self, size: int, stream: int, small: bool) -> Block | None:
        needed = self.segment_size(size)
        if self.expandable:
            return self.expand(size, stream, small)
        if not self.fits(needed):
            return None
        segment = self.new_segment(stream, small, needed, FREE)
        self.note_peaks()
        return segment.blocks[0]

    def expand(self, size: int, stream: int, small: bool) -> Block | None:
        segment, address = self.lowest_with_room(size, stream, small)
        while True:
            block = next(block for block in segment.blocks if block.address == address)
            if block.state == FREE and block.size >= size:
                return block
            missing = size - (block.size if block.state == FREE else 0)
            unmapped = block if block.state == UNMAPPED else self.neighbour(block, 1)
            assert unmapped is not None
            assert unmapped.state == UNMAPPED
            mapped = min(up_to_multiple(missing, self.page(small)), unmapped.size)
            if not self.fits(mapped):
                return None
            self.cut(unmapped, mapped)
            unmapped.state = FREE
            self.merge_neighbours(segment)
            self.note_peaks()

    def lowest_with_room(self, size: int, stream: int, small: bool) -> tuple[Segment, int]:
        for segment in self.all_segments:
            if (segment.stream, segment.small) != (stream, small):
                continue
            for block in segment.blocks:
                if block.state != UNMAPPED:
                    continue
                before = self.neighbour(block, -1)
                start = before if before and before.state == FREE else block
                if self.room_from(start) >= size:
                    return segment, start.address
        segment = self.new_segment(stream, small, self.addresses_to_reserve(small), UNMAPPED)
        return segment, segment.blocks[0].address

    def room_from(self, start: Block) -> int:
        room = 0
        blocks = self.segment_of(start).blocks
        for block in blocks[blocks.index(start) :]:
            if block.state not in (FREE, UNMAPPED):
                break
            room += block.size
        return room

    def addresses_to_reserve(self, small: bool) -> int:
        if self.capacity is None:
            return ENDLESS // self.page(small) * self.page(small)
        return up_to_multiple(self.capacity + self.capacity // 8, self.page(small))

    def fits(self, more: int) -> bool:
        return self.capacity is None or self.reserved + more <= self.capacity

    @staticmethod
    def page(small: bool) -> int:
        return SMALL_SEGMENT if small else LARGE_SEGMENT

    # Making room

    def release_everything_free(self) -> None:
        self.complete()
        self.notice_completed_events()
        for block in self.cached(small=False) + self.cached(small=True):
            segment = self.segment_of(block)
            if segment.expandable:
                self.unmap_whole_pages(block, segment)
            if len(segment.blocks) == 1:
                self.drop(segment)

    def unmap_whole_pages(self, block: Block, segment: Segment) -> None:
        page = self.page(segment.small)
        start, end = segment.blocks[0].address, block.end
        first = start + up_to_multiple(block.address - start, page)
        last = start + (end - start) // page * page
        if first >= last:
            return
        if first > block.address:
            block = self.cut(block, first - block.address)
        self.cut(block, last - first)
        block.state = UNMAPPED
        self.merge_neighbours(segment)

    # Blocks within segments

    def new_segment(self, stream: int, small: bool, size: int, state: str) -> Segment:
        block = Block(self.next_address, size, state)
        self.next_address += size
        segment = Segment(stream, small, self.expandable, [block])
        self.all_segments.append(segment)
        return segment

    def drop(self, segment: Segment) -> None:
        self.all_segments.remove(segment)

    def segment_of(self, block: Block) -> Segment:
        return next(segment for segment in self.all_segments if block in segment.blocks)

    def neighbour(self, block: Block, step: int) -> Block | None:
        blocks = self.segment_of(block).blocks
        position = blocks.index(block) + step
        return blocks[position] if 0 <= position < len(blocks) else None

    def cut(self, block: Block, size: int) -> Block:
        """Shortens a block to `size`; what is left becomes a block of the same state, if anything is."""
        if size == block.size:
            return block
        segment = self.segment_of(block)
        rest = Block(block.address + size, block.size - size, block.state)
        block.size = size
        segment.blocks.insert(segment.blocks.index(block) + 1, rest)
        return rest

    def merge_neighbours(self, segment: Segment) -> None:
        """Joins what just became free, or unmapped, with what was."""
        joined: list[Block] = []
        for block in segment.blocks:
            if joined and joined[-1].state == block.state and block.state in (FREE, UNMAPPED):
                joined[-1].size += block.size
            else:
                joined.append(block)
        segment.blocks[:] = joined

    def sum_of(self, *states: str) -> int:
        return sum(block.size for segment in self.all_segments for block in segment.blocks if block.state in states)

    def note_peaks(self) -> None:
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.active_peak = max(self.active_peak, self.active)
        self.reserved_peak = max(self.reserved_peak, self.reserved)


def up_to_multiple(size: int, of: int) -> int:
    return -(-size // of) * of
