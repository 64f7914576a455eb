"""PyTorch's caching allocator for CUDA, without CUDA: what it reserves, splits and merges, and when it runs out. Pure.

The rules are those of c10/cuda/CUDACachingAllocator.cpp; each method names the function that it follows. The clock of
the GPU isn't here: `complete` says that the GPU has come as far as the CPU.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from accel_fsdp.prediction.memory.traces import ROUND_BYTES
from accel_fsdp.units import MIB

SMALL_BYTES = MIB
"""Up to here a request comes from the small pool (kSmallSize)."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""What requests below `OWN_SEGMENT_BYTES` share (kLargeBuffer), and the page of a large expandable segment."""
OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a request without a free block gets a segment of its own (kMinLargeAlloc), rounded up (kRoundLarge)."""
SEGMENT_ROUND_BYTES = 2 * MIB
NON_SPLIT_ROUNDING_BYTES = 20 * MIB
ADDRESS_SPACE = LARGE_SEGMENT_BYTES << 20
"""The addresses that one segment may take here, in whole pages: more than any GPU has memory."""


@dataclass(frozen=True)
class AllocatorSettings:
    """What PYTORCH_ALLOC_CONF says.

    PyTorch collects garbage only where `set_per_process_memory_fraction` was called: the capacity is then what it
    allows, and an ordinary job has no threshold.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    roundup_power2_divisions: int = 0
    garbage_collection_threshold: float = 0.0


NO_STREAM: frozenset[int] = frozenset()


class Block:
    """A stretch of a segment: in use, cached, or address space of an expandable segment that isn't mapped.

    It `is_free` when nothing uses it, and no other stream of its `uses` may still use it.
    """

    __slots__ = (
        "address",
        "allocated",
        "before",
        "born",
        "is_free",
        "mapped",
        "next",
        "pool",
        "size",
        "stream",
        "uses",
    )

    def __init__(self, pool: "_Pool", stream: int, address: int, size: int) -> None:
        self.pool, self.stream, self.address, self.size = pool, stream, address, size
        self.allocated, self.is_free, self.mapped, self.born = False, True, True, 0
        self.before: Block | None = None
        self.next: Block | None = None
        self.uses: frozenset[int] = NO_STREAM

    @property
    def is_split(self) -> bool:
        """Whether it is a part of its segment."""
        return self.before is not None or self.next is not None

    @property
    def state(self) -> str:
        """As `torch.cuda.memory_snapshot` calls it."""
        return "active_allocated" if self.allocated else "inactive" if self.is_free else "active_pending_free"


class _Pool:
    """The cached blocks for small or for large requests, by stream, in order of size and address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.blocks: defaultdict[int, list[tuple[int, int, Block]]] = defaultdict(list)
        self.unmapped: defaultdict[int, list[tuple[int, Block]]] = defaultdict(list)
        self.calls = 0

    def insert(self, block: Block) -> None:
        """Caches a block, or remembers address space."""
        if block.mapped:
            block.born = self.calls
            insort(self.blocks[block.stream], (block.size, block.address, block))
        else:
            insort(self.unmapped[block.stream], (block.address, block))

    def remove(self, block: Block) -> None:
        """Takes it out."""
        if block.mapped:
            blocks = self.blocks[block.stream]
            del blocks[bisect_left(blocks, (block.size, block.address))]
        else:
            spaces = self.unmapped[block.stream]
            del spaces[bisect_left(spaces, (block.address,))]


class Segment(NamedTuple):
    """What one cudaMalloc gave, or a mapped range of an expandable segment: sizes and states of its blocks in order."""

    stream: int
    size: int
    blocks: tuple[tuple[int, str], ...]


class CachingAllocator:
    """The allocator of one device. `capacity_bytes` is what it can get from the driver; None is without a limit."""

    def __init__(self, settings: AllocatorSettings | None = None, capacity_bytes: int | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity_bytes = capacity_bytes
        self.allocated = self.active = self.reserved = 0
        self.allocated_peak = self.active_peak = self.reserved_peak = 0
        self.retries, self.met_limit = 0, False
        self._small, self._large = _Pool(True), _Pool(False)
        self._heads: dict[int, Block] = {}
        self._waiting: list[Block] = []
        self._completed = self._done = 0
        self._segments = 0
        self._max_split = self.settings.max_split_size_bytes or ADDRESS_SPACE
        self._rounding = self.settings.max_non_split_rounding_bytes or NON_SPLIT_ROUNDING_BYTES

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocates on a stream (`malloc`).

        Raises:
            MemoryError: there isn't as much, also after all that is cached has been given back.
        """
        if self._completed:
            self._process_events()
        if size % ROUND_BYTES or self.settings.roundup_power2_divisions:
            size = self.rounded(size)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._cached(pool, stream, size) or self._new(pool, stream, size)
        if block.size > size and self._should_split(block, size):
            block = self._split(block, size)
        block.allocated, block.is_free = True, False
        self.allocated += block.size
        self.active += block.size
        if self.active > self.active_peak:
            self.active_peak = self.active
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Frees a block, or lets it wait for the other streams that use it (`free`, `insert_events`)."""
        block.allocated = False
        self.allocated -= block.size
        if block.uses:
            block.uses = NO_STREAM
            self._waiting.append(block)
        else:
            self._free(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Says that another stream uses the block too (`recordStream`)."""
        if stream != block.stream:
            block.uses |= {stream}

    @property
    def issued(self) -> int:
        """How many blocks have waited for other streams so far, or do."""
        return self._done + len(self._waiting)

    def complete(self, issued: int | None = None) -> None:
        """The GPU has done all that was given to it so far, or what was `issued` then; the next `malloc` finds out."""
        self._completed = max(self._completed, (self.issued if issued is None else issued) - self._done)

    def rounded(self, size: int) -> int:
        """What a request is rounded up to (`round_size`, `roundup_power2_next_division`)."""
        if size < ROUND_BYTES:
            return ROUND_BYTES
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and size > ROUND_BYTES * divisions:
            step = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
            return -(-size // step) * step
        return -(-size // ROUND_BYTES) * ROUND_BYTES

    def segments(self) -> list[Segment]:
        """All of them."""
        found: list[Segment] = []
        for head in self._heads.values():
            blocks: list[tuple[int, str]] = []
            block: Block | None = head
            while block is not None:
                if block.mapped:
                    blocks.append((block.size, block.state))
                block = block.next
                if blocks and (block is None or not block.mapped):
                    found.append(Segment(head.stream, sum(size for size, _ in blocks), tuple(blocks)))
                    blocks = []
        return sorted(found)

    def _process_events(self) -> None:
        """Frees what waited for streams that are done (`process_events`)."""
        done, self._waiting = self._waiting[: self._completed], self._waiting[self._completed :]
        self._completed = 0
        self._done += len(done)
        for block in done:
            self._free(block)

    def _free(self, block: Block) -> None:
        """Merges a block with free neighbours and caches it (`free_block`)."""
        self.active -= block.size
        block.is_free = True
        self._merge(block)
        block.pool.insert(block)

    def _merge(self, block: Block) -> None:
        """Takes over free neighbours (`try_merge_blocks`)."""
        before, following = block.before, block.next
        if before is not None and before.is_free and before.mapped == block.mapped:
            before.pool.remove(before)
            block.address, block.before = before.address, before.before
            if before.before is not None:
                before.before.next = block
            else:
                self._heads[block.address] = block
            block.size += before.size
        if following is not None and following.is_free and following.mapped == block.mapped:
            following.pool.remove(following)
            block.next = following.next
            if following.next is not None:
                following.next.before = block
            block.size += following.size

    def _cached(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """The smallest cached block of the stream that is large enough (`get_free_block`)."""
        pool.calls += 1
        blocks = pool.blocks[stream]
        place = bisect_left(blocks, (size,))
        if place == len(blocks):
            return None
        if self.settings.expandable_segments:
            while place + 1 < len(blocks) and _grown(blocks[place + 1][2]) < _grown(blocks[place][2]):
                place += 1
        found = blocks[place][2]
        if size < self._max_split <= found.size or (size >= self._max_split and found.size >= size + self._rounding):
            return None
        del blocks[place]
        return found

    def _new(self, pool: _Pool, stream: int, size: int) -> Block:
        """Gets memory from the driver, if need be after giving back what is cached (`malloc`)."""
        if self.settings.garbage_collection_threshold and self.capacity_bytes is not None:
            self._collect_garbage(int(self.settings.garbage_collection_threshold * self.capacity_bytes))
        block = self._from_driver(pool, stream, size)
        if block is not None:
            return block
        self.met_limit = True
        if self._release_oversized(pool, stream, size):
            block = self._from_driver(pool, stream, size)
        if block is None:
            self.retries += 1
            self._release_cached()
            block = self._from_driver(pool, stream, size)
        if block is None:
            raise MemoryError(size)
        return block

    def _from_driver(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """A new block, or more of an expandable segment; None where the device has no more (`alloc_block`)."""
        if self.settings.expandable_segments:
            return self._expand(pool, stream, size)
        whole = _segment_bytes(size)
        if not self._has(whole):
            return None
        block = Block(pool, stream, self._address(), whole)
        self._heads[block.address] = block
        self._reserve(whole)
        return block

    def _has(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved + size <= self.capacity_bytes

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _address(self) -> int:
        self._segments += 1
        return self._segments * ADDRESS_SPACE

    def _should_split(self, block: Block, size: int) -> bool:
        """Whether what is left over is worth a block (`should_split`)."""
        rest = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= ROUND_BYTES
        return size < self._max_split and rest > SMALL_BYTES

    def _split(self, rest: Block, size: int) -> Block:
        """Cuts a block off the beginning; the rest is cached (`alloc_found_block`)."""
        block = Block(rest.pool, rest.stream, rest.address, size)
        block.before, block.next = rest.before, rest
        if rest.before is not None:
            rest.before.next = block
        else:
            self._heads[block.address] = block
        rest.before = block
        rest.address += size
        rest.size -= size
        rest.pool.insert(rest)
        return block

    def _expand(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """Maps more of an expandable segment (`try_allocate_expandable_block`)."""
        block = self._expandable(pool, stream, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if following is None or not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _expandable(self, pool: _Pool, stream: int, size: int) -> Block:
        """Where free and unmapped space follow each other, large enough; else a new one (`find_expandable_block`)."""
        for _, block in pool.unmapped[stream]:
            first = block.before if block.before is not None and block.before.is_free else block
            if _room(first) >= size:
                return first
        block = Block(pool, stream, self._address(), self._space(pool))
        block.mapped = False
        self._heads[block.address] = block
        pool.insert(block)
        return block

    def _space(self, pool: _Pool) -> int:
        """The addresses of an expandable segment: an eighth more than the device has memory, in whole pages."""
        if self.capacity_bytes is None:
            return ADDRESS_SPACE // 2
        page = _page(pool)
        return -(-(self.capacity_bytes + self.capacity_bytes // 8) // page) * page

    def _map(self, block: Block, size: int) -> bool:
        """Maps the beginning of unmapped space, in whole pages (`map_block`, `ExpandableSegment::map`)."""
        page = _page(block.pool)
        mapped = -(-size // page) * page
        if not self._has(mapped):
            return False
        block.pool.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(block.pool, block.stream, block.address + mapped, block.size - mapped)
            rest.mapped = False
            rest.before, rest.next = block, block.next
            if block.next is not None:
                block.next.before = rest
            block.next = rest
            block.size = mapped
            block.pool.insert(rest)
        self._merge(block)
        block.pool.insert(block)
        self._reserve(mapped)
        return True

    def _release_oversized(self, pool: _Pool, stream: int, size: int) -> bool:
        """Gives back blocks that are never split, as many as are needed (`release_available_cached_blocks`)."""
        if self.settings.max_split_size_bytes is None or self.settings.expandable_segments:
            return False
        needed = max(size, self._max_split)
        blocks = pool.blocks[stream]
        place = bisect_left(blocks, (needed,))
        if place < len(blocks):
            self._release(blocks[place][2])
            return True
        released = 0
        for block_size, _, block in reversed(blocks[:place]):
            if released >= needed or block_size < self._max_split:
                break
            self._release(block)
            released += block_size
        return released >= needed

    def _release_cached(self) -> None:
        """Waits for the GPU, then gives back all that is free (`release_cached_blocks`)."""
        self._completed = len(self._waiting)
        self._process_events()
        for pool in (self._large, self._small):
            for blocks in pool.blocks.values():
                for _, _, block in list(blocks):
                    if self.settings.expandable_segments:
                        self._unmap(block)
                    elif not block.is_split:
                        self._release(block)

    def _release(self, block: Block) -> None:
        """Gives a whole segment back (`release_block`)."""
        block.pool.remove(block)
        del self._heads[block.address]
        self.reserved -= block.size

    def _unmap(self, block: Block) -> None:
        """Gives back the whole pages of a free block of an expandable segment (`unmap_block`)."""
        page = _page(block.pool)
        first, last = -(-block.address // page) * page, (block.address + block.size) // page * page
        if last <= first:
            return
        block.pool.remove(block)
        begin, end = block.address, block.address + block.size
        block.address, block.size, block.mapped = first, last - first, False
        if begin < first:
            self._beside(block, begin, first - begin, before=True)
        if last < end:
            self._beside(block, last, end - last, before=False)
        if block.before is None:
            self._heads.pop(begin, None)
            self._heads[block.address] = block
        self.reserved -= block.size
        self._merge(block)
        block.pool.insert(block)

    def _beside(self, block: Block, address: int, size: int, before: bool) -> None:
        """Puts a cached block beside another."""
        new = Block(block.pool, block.stream, address, size)
        if before:
            new.before, new.next = block.before, block
            if block.before is not None:
                block.before.next = new
            else:
                self._heads[address] = new
            block.before = new
        else:
            new.before, new.next = block, block.next
            if block.next is not None:
                block.next.before = new
            block.next = new
        block.pool.insert(new)

    def _collect_garbage(self, most_bytes: int) -> None:
        """Gives back whole segments that were not used for longest (`garbage_collect_cached_blocks`)."""
        excess = self.reserved - most_bytes
        blocks = (block for cached in self._large.blocks.values() for _, _, block in cached)
        whole = [block for block in blocks if not block.is_split and not self.settings.expandable_segments]
        while excess > 0 and whole:
            calls = self._large.calls
            average = sum(calls - block.born for block in whole) / len(whole)
            for block in [block for block in whole if calls - block.born >= average]:
                whole.remove(block)
                self._release(block)
                excess -= block.size


def _segment_bytes(size: int) -> int:
    """What is asked of the driver for a request (`get_allocation_size`)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


def _page(pool: _Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES


def _grown(block: Block) -> int:
    """What a block of an expandable segment can become."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _room(block: Block | None) -> int:
    """The free and unmapped space from a block on."""
    size = 0
    while block is not None and block.is_free:
        size += block.size
        block = block.next
    return size
