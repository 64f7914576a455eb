"""A meter that passes everything it counts to an allocator, tensor by tensor. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from accel_fsdp.prediction.memory import shards
from accel_fsdp.prediction.memory.allocator import Block, CachingAllocator
from accel_fsdp.prediction.memory.shards import Unit
from accel_fsdp.prediction.memory.timeline import BUFFERS, COMPUTE, GATHERED, OPTIMIZER, PARAMETERS, Meter
from accel_fsdp.units import MIB

BUCKET_BYTES = 25 * MIB
"""DDP's buckets (`bucket_cap_mb`)."""
IN_FLIGHT = 2
"""All-gathers that FSDP1 lets the CPU issue ahead of the GPU (`_limiter_utils.py`)."""
HOW: Mapping[str, shards.Width] = {PARAMETERS: "stored", GATHERED: "gathered"}


class Group(NamedTuple):
    """The blocks allocated under one name at once."""

    size: int
    blocks: list[Block]


@dataclass
class AllocatingMeter(Meter):
    """Splits each buffer into its tensors, and allocates and frees those."""

    sees_each = True
    allocator: CachingAllocator = field(default_factory=CachingAllocator)
    named: dict[object, list[Group]] = field(default_factory=dict)
    per_parameter: int = 1
    flat: bool = False
    marks: list[int] = field(default_factory=list)

    def add(
        self,
        kind: str,
        size: int,
        name: object = None,
        unit: Unit | None = None,
        stream: int = COMPUTE,
        used_on: int = COMPUTE,
    ) -> None:
        """Allocates the tensors, or frees those of that name and size."""
        if size > 0:
            sizes = self._sizes(kind, size, unit)
            if kind == PARAMETERS and unit is not None:
                blocks = self._load_shards(unit, sizes)
            else:
                blocks = [self.allocator.malloc(tensor_size, stream) for tensor_size in sizes]
            self.named.setdefault((kind, name), []).append(Group(size, blocks))
        elif size < 0:
            for block in self._take_blocks((kind, name), -size):
                self.release(block, used_on)

    def add_each(self, kind: str, sizes: Iterable[tuple[int, Unit]], name: object = None) -> None:
        """Allocates a kind for each unit, one after the other."""
        for size, unit in sizes:
            self.add(kind, size, name, unit=unit)

    def _load_shards(self, unit: Unit, sizes: Sequence[int]) -> list[Block]:
        """Allocates the sharded tensors of a unit, each made from temporary tensors on the GPU.

        FSDP1 flattens a unit's parameters there before it cuts them (`_init_flat_param_and_metadata`); Accelerate gives
        FSDP2's shards one whole parameter after the other (`fsdp2_load_full_state_dict`); bitsandbytes packs 16 bits.
        """
        malloc, free = self.allocator.malloc, self.allocator.free
        if self.flat:
            loaded = [malloc(size) for size in shards.loaded_sizes(unit)]
            joined = [malloc(sum(shards.loaded_sizes(unit)))]
            blocks = [malloc(size) for size in sizes]
            for block in (*loaded, *joined):
                free(block)
            return blocks
        blocks = []
        for before, size in zip(shards.loaded_sizes(unit), sizes, strict=True):
            larger = [malloc(before)] if before > size else []
            blocks.append(malloc(size))
            for block in larger:
                free(block)
        return blocks

    def release(self, block: Block, used_on: int = COMPUTE) -> None:
        """Frees one tensor."""
        if self.flat:  # FSDP2 makes streams wait for events instead
            self.allocator.record_stream(block, used_on)
        self.allocator.free(block)

    def throttle(self) -> None:
        """Completes the GPU's work up to two units ago."""
        self.marks.append(self.allocator.issued)
        if len(self.marks) > IN_FLIGHT:
            self.allocator.complete(self.marks.pop(0))

    def drop(self, kind: str) -> None:
        """Frees all of a kind."""
        for name in [name for name in self.named if name[0] == kind]:  # type: ignore[index]
            for group in self.named.pop(name):
                for block in group.blocks:
                    self.allocator.free(block)

    def _take_blocks(self, name: object, size: int) -> list[Block]:
        """Removes the oldest group of that size, or several groups that add up to it."""
        groups = self.named.get(name, [])
        for index, group in enumerate(groups):
            if group.size == size:
                return groups.pop(index).blocks
        assert sum(group.size for group in groups) == size, (name, size, [group.size for group in groups])
        del self.named[name]
        return [block for group in groups for block in group.blocks]

    def _sizes(self, kind: str, size: int, unit: Unit | None) -> Sequence[int]:
        if kind == BUFFERS and size > BUCKET_BYTES:
            count = -(-size // BUCKET_BYTES)
            return [size // count] * count
        if unit is None:
            return [size]
        weights = shards.tensor_weights(unit, HOW.get(kind, "trained"), self.flat)
        weights = weights * (self.per_parameter if kind == OPTIMIZER else 1)
        total = sum(weights) or 1
        return [max(round(size * weight / total), 1) for weight in weights]
