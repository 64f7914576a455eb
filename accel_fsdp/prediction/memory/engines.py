"""Gathers, frees and reduces each engine's units, in the order in which the CPU issues the operations. Pure.

The allocator's statistics follow that order: a block that another stream still uses counts as freed. Read in torch
2.13 and 2.15 (`_fully_shard/_fsdp_param_group.py`, `_fsdp_collectives.py`; `fsdp/_runtime_utils.py`, `_flat_param.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction.memory import shards
from accel_fsdp.prediction.memory.shards import Unit
from accel_fsdp.prediction.memory.timeline import BUFFERS, GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS, Meter


@dataclass
class EngineMemory:
    """Every rank holds everything, without gathering: one GPU, and the base of the other engines.

    `units` are in forward order; the first has the embedding, and the head as well unless the head has a unit. `counts`
    is the number of equal units that each represents. `head_unit` is the place of the head's unit, 0 for the first.
    `idle` units are held and never run. `syncs` means that this micro-batch's gradients are reduced. `nested` are the
    experts inside a unit, by its index, if they are a separate unit; in the first unit it is the tied table that is
    gathered again.
    """

    meter: Meter
    units: Sequence[Unit]
    counts: Sequence[int]
    recipe: Recipe
    layout: Layout
    idle: Sequence[Unit] = ()
    has_grads: bool = False
    syncs: bool = True
    nested: Mapping[int, Unit] = field(default_factory=dict)

    def experts_of(self, unit: int) -> int:
        """The index of the unit that is nested in this one; 0 without one."""
        return len(self.units) + unit if unit in self.nested else 0

    def unit(self, number: int) -> Unit:
        """A unit by its index, or a nested one by the index from `experts_of`."""
        return self.units[number] if number < len(self.units) else self.nested[number - len(self.units)]

    def adds(self, unit: int) -> bool:
        """Whether autograd adds each new gradient of the unit to an older one as soon as it is computed."""
        return self.has_grads

    @property
    def held_units(self) -> Sequence[tuple[Unit, int]]:
        inner = ((unit, self.counts[index]) for index, unit in self.nested.items() if index)
        return (*zip(self.units, self.counts, strict=True), *inner, *((unit, 1) for unit in self.idle))

    def total(self, size: Callable[[Unit], int]) -> int:
        return sum(size(unit) * count for unit, count in self.held_units)

    @property
    def head_unit(self) -> int:
        return len(self.units) - 1 if self.units[-1].name == "head" else 0

    def load(self) -> None:
        if not self.layout.offload:
            self.meter.add(PARAMETERS, self.total(self._at_rest))

    def make_states(self) -> None:
        """Allocates the optimizer's states, which the first step makes and which stay."""
        if not self.layout.offload:
            size = self.total(lambda unit: shards.optimizer_bytes(unit, self.recipe, self.layout))
            self.meter.add(OPTIMIZER, size)

    def _at_rest(self, unit: Unit) -> int:
        return shards.shard_bytes(unit, self.layout) + shards.quantization_bytes(unit, self.layout)

    def before_forward(self, unit: int) -> None:
        """Called before the unit's parameters are used."""

    def after_forward(self, unit: int) -> None:
        """Called after the unit's forward."""

    def end_forward(self) -> None:
        """Called once the loss is computed."""

    def before_loss_backward(self) -> None:
        """Called before backward, which begins with the loss."""

    def before_head_backward(self, unit: int) -> None:
        """Called once the logits' gradient is computed; the head is in this unit."""
        self.before_backward(unit)

    def before_backward(self, unit: int) -> None:
        """Called once the gradient of the unit's output is computed."""

    def after_backward(self, unit: int, grad_bytes: int) -> None:
        """Called after a backward; `grad_bytes` of new gradients count as GRADIENTS, unless the engine `adds`."""

    def end_backward(self) -> None:
        """Called once all gradients are computed."""
        self.has_grads = True

    def kept_gradients(self) -> int:
        """Gradients that outlive `zero_grad`."""
        return 0

    def last_gradients(self) -> int:
        return 0 if self.layout.offload else self.total(lambda unit: self._master(unit, shard=True))

    def step(self) -> None:
        """Allocates the optimizer's temporaries: foreach Adam makes one of the parameters' size (torch.optim.adam)."""
        if self.recipe.optimizer == "adamw_torch" and not self.layout.offload:
            self.meter.touch({OPTIMIZER: self.last_gradients()})

    def _master(self, unit: Unit, shard: bool) -> int:
        per_element = shards.master_bytes(self.recipe, self.layout)
        return shards.trained_bytes(unit, self.layout, per_element, shard)


class Ddp(EngineMemory):
    """Buckets of all gradients beside the gradients themselves: Accelerate leaves `gradient_as_bucket_view` off."""

    def load(self) -> None:
        """Allocates the buckets in addition to the tensors of plain training."""
        super().load()
        self.meter.add(BUFFERS, self.total(lambda unit: self._master(unit, shard=False)))


@dataclass
class Fsdp(EngineMemory, ABC):
    """The common part of both versions: gathering, freeing, and one unit prefetched in backward.

    `waiting` are the bytes of whole gradients by unit: Trainer accumulates under `no_sync`, which reduces nothing.
    """

    gathered: set[int] = field(default_factory=set)
    waiting: dict[int, int] = field(default_factory=dict)

    def end_backward(self) -> None:
        """Counts whole gradients, not shards, while they wait for the last micro-batch."""
        self.has_grads = self.has_grads or self.syncs

    def before_forward(self, unit: int) -> None:
        if unit not in self.gathered:
            self._gather(unit)

    def after_forward(self, unit: int) -> None:
        if self._reshards(unit):
            self._free(unit)

    def _reshards(self, unit: int) -> bool:
        """The unit of the head stays gathered: it is the root under FSDP1, and Accelerate's tail unit under FSDP2."""
        return self.layout.strategy in (1, 4) and unit != self.head_unit

    def _size(self, unit: int) -> int:
        return shards.gathered_bytes(self.unit(unit), self.layout)

    def _cast_and_gather(self, unit: int, gathered_bytes: int) -> None:
        """Gathers from a cast copy of the shard, which lives until the all-gather ends."""
        cast = shards.cast_bytes(self.unit(unit), self.layout)
        self.meter.add(GATHERED, cast)
        self.meter.add(GATHERED, gathered_bytes)
        self.meter.add(GATHERED, -cast)

    @abstractmethod
    def _gather(self, unit: int) -> None: ...

    def _free(self, unit: int) -> None:
        if unit in self.gathered:
            self.gathered.remove(unit)
            self.meter.add(GATHERED, -self._size(unit))

    def _reduction_bytes(self, unit: int) -> tuple[int, int]:
        """The bytes of the input and of the output of the unit's reduction."""
        width = shards.reduce_bytes(self.recipe, self.layout)
        unsharded, shard = (shards.trained_bytes(self.unit(unit), self.layout, width, part) for part in (False, True))
        return unsharded, shard

    def _keep(self, unit: int, reduced_bytes: int) -> None:
        """Makes the reduced shard the gradient: cast, added to an older one, or moved to the host."""
        new_bytes = self._master(self.unit(unit), shard=True)
        if new_bytes != reduced_bytes:
            self.meter.add(GRADIENTS, new_bytes)
            self.meter.add(GRADIENTS, -reduced_bytes)
        if self.has_grads or self.layout.offload:
            self.meter.add(GRADIENTS, -new_bytes)


@dataclass
class Fsdp2(Fsdp):
    """Per-parameter shards. All-gather outputs are copied out; in forward the last one lives until the next.

    `frees_output_late`: forward holds a unit's all-gather output until the next unit is copied out of its own. Torch
    before 2.15 does, in a variable of `wait_for_unshard`; since then it is freed when the next all-gather has ended
    (`release_all_gather_state_for_comm_reuse`). The cluster's torch is unknown, so the larger of both is counted.
    """

    frees_output_late: ClassVar[bool] = True
    kept_output: int = 0
    prefetched: int | None = None
    reducing: int = 0

    def before_forward(self, unit: int) -> None:
        """Gathers the unit; before the first one also the tied table a second time, which stays gathered too."""
        if not unit and 0 in self.nested:
            super().before_forward(self.experts_of(0))
        super().before_forward(unit)

    def _gather(self, unit: int) -> None:
        if self.prefetched != unit:
            self._all_gather(unit)
        self.prefetched = None
        if not self.frees_output_late:
            self._drop_output()
        self.meter.add(GATHERED, self._size(unit))
        self._drop_output()
        self.gathered.add(unit)
        self.kept_output = self._output(unit)

    def _drop_output(self) -> None:
        self.meter.add(GATHERED, -self.kept_output)
        self.kept_output = 0

    def _output(self, unit: int) -> int:
        sharded = self.layout.sharers(of_experts=self.unit(unit).nested) > 1
        return self._size(unit) if sharded else 0

    def _all_gather(self, unit: int) -> None:
        self._cast_and_gather(unit, self._output(unit))

    def adds(self, unit: int) -> bool:
        """Waiting gradients stay with their parameters (`to_accumulated_grad_if_needed`)."""
        return unit in self.waiting

    def end_forward(self) -> None:
        """Frees the last all-gather's output, as the root's post-forward does."""
        self._drop_output()

    def before_backward(self, unit: int) -> None:
        """Gathers the unit if need be, and prefetches the one before it."""
        if unit not in self.gathered:
            if self.prefetched != unit:
                self._all_gather(unit)
            self.meter.add(GATHERED, self._size(unit))
            self.meter.add(GATHERED, -self._output(unit))
            self.gathered.add(unit)
            self.prefetched = None
        self._prefetch(self._unit_before(unit))

    def _unit_before(self, unit: int) -> int:
        """The unit whose forward ended before this one's: nested ones end first."""
        return unit - len(self.units) - 1 if unit >= len(self.units) else self.experts_of(unit) or unit - 1

    def before_head_backward(self, unit: int) -> None:
        """Prefetches the last block, also with tied embeddings: the unit of the head is the last in forward."""
        self._prefetch((unit or len(self.units)) - 1)

    def _prefetch(self, unit: int) -> None:
        if unit >= 0 and unit not in self.gathered and self.prefetched != unit:
            self._all_gather(unit)
            self.prefetched = unit

    def after_backward(self, unit: int, grad_bytes: int) -> None:
        """Frees the unit and reduces its gradients; those of the tied head are reduced before the first unit's."""
        if not unit and 0 in self.nested:
            tied_table = self.experts_of(0)
            self._free(tied_table)
            self._drop_input()
            if grad_bytes and self.syncs:
                self._reduce(tied_table, 0)
        self._free(unit)
        self._drop_input()
        if not grad_bytes:
            return
        ready = self.waiting.pop(unit, 0) or grad_bytes
        if not self.syncs:
            cast = ready * shards.reduce_bytes(self.recipe, self.layout) // shards.compute_bytes(self.recipe)
            if unit not in self.waiting and cast != ready:
                self.meter.add(GRADIENTS, cast)
                self.meter.add(GRADIENTS, -ready)
                ready = cast
            self.waiting[unit] = ready
            return
        self._reduce(unit, ready)

    def _reduce(self, unit: int, ready: int) -> None:
        """Reduces a unit's gradients over the ranks, and frees those that are `ready`."""
        unsharded, shard = self._reduction_bytes(unit)
        self.meter.add(GRADIENTS, unsharded)
        self.meter.add(GRADIENTS, -ready)
        self.reducing = unsharded
        self.meter.add(GRADIENTS, shard)
        if self.unit(unit).nested and not self._output(unit):
            self.meter.touch({GRADIENTS: unsharded})  # a single rank divides without sending
        self._keep(unit, shard)

    def _drop_input(self) -> None:
        self.meter.add(GRADIENTS, -self.reducing)
        self.reducing = 0

    def end_backward(self) -> None:
        """Frees the input of the last reduction."""
        self._drop_input()
        super().end_backward()
