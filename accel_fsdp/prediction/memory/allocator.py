"""PyTorch's caching allocator for CUDA, without CUDA: it reserves, splits, merges, and runs out of memory. Pure.

The rules are those of c10/cuda/CUDACachingAllocator.cpp; each method names its function. The caller reports the GPU's
progress: `complete` means that the GPU has caught up with the CPU.
"""

from bisect import bisect_left, insort
from collections import defaultdict

from accel_fsdp.prediction.memory.traces import ROUND_BYTES
from accel_fsdp.units import MIB

SMALL_BYTES = MIB
"""Up to here a request comes from the small pool (kSmallSize)."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""The segment that requests below `OWN_SEGMENT_BYTES` share (kLargeBuffer), and a large expandable segment's page."""
OWN_SEGMENT_BYTES = 10 * MIB
"""From this size a request without a free block gets a separate segment (kMinLargeAlloc), rounded up (kRoundLarge)."""
SEGMENT_ROUND_BYTES = 2 * MIB
ADDRESS_SPACE = LARGE_SEGMENT_BYTES << 20
"""The addresses that one segment may take here, in whole pages: more than any GPU has memory."""


NO_STREAM: frozenset[int] = frozenset()


class Block:
    """A stretch of a segment: in use, cached, or address space of an expandable segment that isn't mapped.

    It `is_free` when it is not in use, also not by another stream of its `uses`.
    """

    __slots__ = ("address", "before", "is_free", "mapped", "next", "pool", "size", "stream", "uses")

    def __init__(
        self, pool: "_Pool", stream: int, address: int, size: int, mapped: bool = True, before: "Block | None" = None
    ) -> None:
        self.pool, self.stream, self.address, self.size = pool, stream, address, size
        self.is_free, self.mapped, self.before = True, mapped, before
        self.next: Block | None = None
        self.uses = NO_STREAM

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.before is not None or self.next is not None


class _Pool:
    """The cached blocks for small or for large requests, by stream, in order of size and address.

    A block is split where at least `least_rest` bytes are left over (`should_split`).
    """

    def __init__(self, small: bool, expandable: bool) -> None:
        self.small = small
        self.least_rest = ROUND_BYTES if small or expandable else SMALL_BYTES + 1
        self.blocks: defaultdict[int, list[tuple[int, int, Block]]] = defaultdict(list)
        self.unmapped: defaultdict[int, list[tuple[int, Block]]] = defaultdict(list)

    def insert(self, block: Block) -> None:
        """Caches a block, or remembers address space."""
        if block.mapped:
            insort(self.blocks[block.stream], (block.size, block.address, block))
        else:
            insort(self.unmapped[block.stream], (block.address, block))

    def remove(self, block: Block) -> None:
        """Removes a block from the cache."""
        if block.mapped:
            blocks = self.blocks[block.stream]
            del blocks[bisect_left(blocks, (block.size, block.address))]
        else:
            spaces = self.unmapped[block.stream]
            del spaces[bisect_left(spaces, (block.address,))]


class CachingAllocator:
    """The allocator of one device. `capacity_bytes` is the driver's memory; None is without a limit.

    `expandable` is PYTORCH_ALLOC_CONF's expandable_segments; its other settings are left at their defaults.
    """

    def __init__(self, expandable: bool = False, capacity_bytes: int | None = None) -> None:
        self.expandable = expandable
        self.capacity_bytes = capacity_bytes
        self.active = self.reserved = 0
        self.allocated_peak = self.active_peak = self.reserved_peak = 0
        self.retries, self.met_limit = 0, False
        self._small, self._large = _Pool(True, expandable), _Pool(False, expandable)
        self._waiting: list[Block] = []
        self._waiting_bytes = 0
        self._completed = self._done = 0
        self._segments = 0

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocates on a stream (`malloc`).

        Raises:
            MemoryError: there isn't enough memory, even after all cached blocks have been released.
        """
        size, pool, blocks, index = self._look_up(size, stream)
        block = self._new(pool, stream, size) if index is None else blocks.pop(index)[2]
        if block.size - size >= pool.least_rest:
            remainder = self._cut(block, size)
            insort(blocks, (remainder.size, remainder.address, remainder))
        block.is_free = False
        self.active += block.size
        self._update_peaks(self.active)
        return block

    def touch(self, size: int, stream: int = 0) -> None:
        """Allocates and frees at once: the cached blocks stay as they are, so only the peaks may change.

        Raises:
            MemoryError: as `malloc`.
        """
        rounded, pool, blocks, index = self._look_up(size, stream)
        if index is None:
            self.free(self.malloc(size, stream))
            return
        size_there = blocks[index][0]
        self._update_peaks(self.active + (rounded if size_there - rounded >= pool.least_rest else size_there))

    def _look_up(self, size: int, stream: int) -> tuple[int, _Pool, list[tuple[int, int, Block]], int | None]:
        """The rounded size of a request, its pool, the cached blocks of its stream, and the place of one that fits."""
        if self._completed:
            self._process_events()
        size = -(-size // ROUND_BYTES) * ROUND_BYTES or ROUND_BYTES
        pool = self._small if size <= SMALL_BYTES else self._large
        blocks = pool.blocks[stream]
        return size, pool, blocks, self._fitting(blocks, size)

    def _update_peaks(self, active: int) -> None:
        """Updates the peaks."""
        if active > self.active_peak:
            self.active_peak = active
        if active - self._waiting_bytes > self.allocated_peak:
            self.allocated_peak = active - self._waiting_bytes

    @property
    def allocated(self) -> int:
        """The bytes in use, without blocks that wait for other streams."""
        return self.active - self._waiting_bytes

    def free(self, block: Block) -> None:
        """Frees a block, or lets it wait for the other streams that use it (`free`, `insert_events`)."""
        if block.uses:
            block.uses = NO_STREAM
            self._waiting.append(block)
            self._waiting_bytes += block.size
        else:
            self._free(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Records that another stream uses the block too (`recordStream`)."""
        if stream != block.stream:
            block.uses |= {stream}

    @property
    def issued(self) -> int:
        """The number of blocks that have waited or are waiting for other streams."""
        return self._done + len(self._waiting)

    def complete(self, issued: int | None = None) -> None:
        """Declares all of the GPU's work so far finished, or the work up to `issued`; the next `malloc` takes note."""
        self._completed = max(self._completed, (self.issued if issued is None else issued) - self._done)

    def _process_events(self) -> None:
        """Frees blocks that waited for finished streams (`process_events`)."""
        finished, self._waiting = self._waiting[: self._completed], self._waiting[self._completed :]
        self._completed = 0
        self._done += len(finished)
        for block in finished:
            self._waiting_bytes -= block.size
            self._free(block)

    def _free(self, block: Block) -> None:
        """Merges a block with free neighbours and caches it (`free_block`)."""
        self.active -= block.size
        block.is_free = True
        self._merge(block)
        insort(block.pool.blocks[block.stream], (block.size, block.address, block))

    def _merge(self, block: Block) -> None:
        """Takes over free neighbours (`try_merge_blocks`)."""
        before, following = block.before, block.next
        if before is not None and before.is_free and before.mapped == block.mapped:
            before.pool.remove(before)
            block.address, block.before = before.address, before.before
            if before.before is not None:
                before.before.next = block
            block.size += before.size
        if following is not None and following.is_free and following.mapped == block.mapped:
            following.pool.remove(following)
            block.next = following.next
            if following.next is not None:
                following.next.before = block
            block.size += following.size

    def _fitting(self, blocks: list[tuple[int, int, Block]], size: int) -> int | None:
        """The place of the smallest cached block that is large enough (`get_free_block`)."""
        index = bisect_left(blocks, (size,))
        if index == len(blocks):
            return None
        if self.expandable:
            while index + 1 < len(blocks) and _largest_size(blocks[index + 1][2]) < _largest_size(blocks[index][2]):
                index += 1
        return index

    def _new(self, pool: _Pool, stream: int, size: int) -> Block:
        """Gets memory from the driver, if necessary after releasing cached blocks (`malloc`)."""
        block = self._from_driver(pool, stream, size)
        if block is not None:
            return block
        self.met_limit = True
        self.retries += 1
        self._release_cached()
        block = self._from_driver(pool, stream, size)
        if block is None:
            raise MemoryError(size)
        return block

    def _from_driver(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """A new block, or more of an expandable segment; None if the device is out of memory (`alloc_block`)."""
        if self.expandable:
            return self._expand(pool, stream, size)
        segment_bytes = _segment_bytes(size)
        if not self._has(segment_bytes):
            return None
        self._reserve(segment_bytes)
        return Block(pool, stream, self._address(), segment_bytes)

    def _has(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved + size <= self.capacity_bytes

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _address(self) -> int:
        self._segments += 1
        return self._segments * ADDRESS_SPACE

    def _cut(self, block: Block, size: int) -> Block:
        """Shortens a block to its beginning, and returns the rest, which follows it (`alloc_found_block`)."""
        following = block.next
        remainder = Block(block.pool, block.stream, block.address + size, block.size - size, block.mapped, block)
        remainder.next = following
        if following is not None:
            following.before = remainder
        block.next, block.size = remainder, size
        return remainder

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
        """A large enough run of free and unmapped space, else a new one (`find_expandable_block`)."""
        for _, block in pool.unmapped[stream]:
            first = block.before if block.before is not None and block.before.is_free else block
            if _free_space(first) >= size:
                return first
        block = Block(pool, stream, self._address(), self._space(pool))
        block.mapped = False
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
        if mapped < block.size:
            block.pool.insert(self._cut(block, mapped))
        block.mapped = True
        self._merge(block)
        block.pool.insert(block)
        self._reserve(mapped)
        return True

    def _release_cached(self) -> None:
        """Waits for the GPU, then releases all free memory (`release_cached_blocks`)."""
        self._completed = len(self._waiting)
        self._process_events()
        for pool in (self._large, self._small):
            for blocks in pool.blocks.values():
                for _, _, block in list(blocks):
                    if self.expandable:
                        self._unmap(block)
                    elif not block.is_split:
                        self._release(block)

    def _release(self, block: Block) -> None:
        """Releases a whole segment (`release_block`)."""
        block.pool.remove(block)
        self.reserved -= block.size

    def _unmap(self, block: Block) -> None:
        """Releases the whole pages of a free block of an expandable segment (`unmap_block`)."""
        page = _page(block.pool)
        first, last = -(-block.address // page) * page, (block.address + block.size) // page * page
        if last <= first:
            return
        block.pool.remove(block)
        if block.address < first:
            head, block = block, self._cut(block, first - block.address)
            head.pool.insert(head)
        if block.size > last - first:
            block.pool.insert(self._cut(block, last - first))
        block.mapped = False
        self.reserved -= block.size
        self._merge(block)
        block.pool.insert(block)


def _segment_bytes(size: int) -> int:
    """The size of the driver's allocation for a request (`get_allocation_size`)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


def _page(pool: _Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES


def _largest_size(block: Block) -> int:
    """The largest size that a block of an expandable segment can grow to."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _free_space(block: Block | None) -> int:
    """The free and unmapped space from this block onwards."""
    size = 0
    while block is not None and block.is_free:
        size += block.size
        block = block.next
    return size
