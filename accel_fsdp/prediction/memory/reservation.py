"""Simulates the allocator's reserved memory: a rank's first steps as single tensors on streams. Pure.

The walk and the engines are those of `step.py`; here each buffer is split into its tensors, and each event of a tape
is one request. Reserved memory depends on the history: loading, the first step, which allocates the optimizer's
states among the leftovers of the first backward, and the steps after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from accel_fsdp.config import Engine
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction.memory import shards
from accel_fsdp.prediction.memory.allocating_meter import AllocatingMeter, Group
from accel_fsdp.prediction.memory.allocator import Block, CachingAllocator
from accel_fsdp.prediction.memory.scripts import UPSTREAM, ModelScripts, Request
from accel_fsdp.prediction.memory.shape import ModelShape
from accel_fsdp.prediction.memory.step import Walk
from accel_fsdp.prediction.memory.timeline import (
    ACTIVATIONS,
    BUFFERS,
    GATHER,
    GRADIENTS,
    LOSS,
    WORKSPACE,
)
from accel_fsdp.prediction.memory.traces import Tapes

STEPS = 2
"""After this many steps nothing new is reserved: a third one changed none of 208 published runs by 0.5 %."""
GROWING = (1 / 2, 3 / 4, 7 / 8)
"""Lengths of rows that vary, in shares of the longest: each new longest one halves what was missing, as it does on
average where lengths are spread evenly. A longer batch finds no room in what shorter ones have left; 100 steps of
random lengths reserve as much as these, within a fifth."""


@dataclass(frozen=True)
class Reservation:
    """The peaks of an allocator's reserved and used memory over some steps.

    `failed_at` is the phase in which it ran out of memory. `thrashes` is the last step if the allocator had to release
    its cache there: it then does so in each step, which takes time. `met_limit`: without the limit it would have
    reserved more.
    """

    reserved: int
    active: int
    allocated: int
    failed_at: str = ""
    thrashes: str = ""
    met_limit: bool = False


def reserve(
    shape: ModelShape,
    tapes: Tapes,
    recipe: Recipe,
    layout: Layout,
    workspace_bytes: int = 0,
    expandable: bool = False,
    capacity_bytes: int | None = None,
    exports: bool = True,
) -> Reservation:
    """Simulates loading, the first steps, an evaluation if the recipe has one, and a full state dict if it `exports`.

    `expandable`: with expandable segments. `capacity_bytes` is the allocator's limit; None is without one.
    """
    allocator = CachingAllocator(expandable, capacity_bytes)
    meter = AllocatingMeter(allocator=allocator, flat=layout.engine is Engine.FSDP1)
    meter.per_parameter = 2 if recipe.optimizer.startswith("adamw") else 1

    def walk_of(recipe: Recipe) -> _AllocatingWalk:
        walk = _AllocatingWalk.of(meter, shape, tapes, recipe, layout)
        walk.prepare(shape, tapes)
        return walk

    walk = walk_of(recipe)
    lengths = [round(share * recipe.length) for share in GROWING] if recipe.varied else []
    walk.shorter = tuple(walk_of(replace(recipe, length=max(length, 1))) for length in lengths)
    failed_at = ""
    try:
        walk.run(shape.buffers_bytes, workspace_bytes, exports)
    except MemoryError:
        failed_at = meter.phase
    return Reservation(
        *(allocator.reserved_peak, allocator.active_peak, allocator.allocated_peak),
        *(failed_at, walk.thrashes, allocator.met_limit),
    )


class _AllocatingWalk(Walk):
    """The walk, tensor by tensor. `shorter` are walks with shorter rows before it."""

    meter: AllocatingMeter
    scripts: ModelScripts
    evaluated: ModelScripts | None = None
    shorter: "tuple[_AllocatingWalk, ...]" = ()
    thrashes: str = ""

    def prepare(self, shape: ModelShape, tapes: Tapes) -> None:
        """Turns the tapes into scripts."""
        recipe = self.recipe
        self.scripts = ModelScripts.of(shape, tapes, recipe)
        if self.scripts.has_loss:
            self.more_logits = (0, 0)
        if recipe.eval_batch:
            self.evaluated = ModelScripts.of(shape, tapes, replace(recipe, rows=recipe.eval_batch))

    def run(self, buffers_bytes: int, workspace_bytes: int, exports: bool) -> None:
        """Simulates all phases."""
        self.meter.enter("loading")
        self.meter.add(BUFFERS, buffers_bytes)
        self.engine.load()
        self.meter.add(WORKSPACE, workspace_bytes)
        walks = (*self.shorter, *[self] * STEPS)
        for step, walk in enumerate(walks, start=1):
            retries = self.meter.allocator.retries
            walk.engine = self.engine
            walk.one_step(step)
        if self.meter.allocator.retries > retries:
            self.thrashes = f"step {len(walks)}"
        if self.evaluated:
            self.meter.enter("evaluation")
            self._evaluate(self.evaluated)
        if exports and self.engine.layout.is_fsdp and self.engine.layout.is_sharded:
            self.meter.enter("export")
            self._gather_all()

    def one_step(self, step: int) -> None:
        """Simulates the micro-batches and the optimizer's step."""
        self.engine.has_grads = False
        self.micro_batches(f" of step {step}")
        self.meter.enter(f"optimizer of step {step}")
        if step == 1:
            self.engine.make_states()
        self.engine.step()
        self.meter.drop(GRADIENTS)
        self.meter.allocator.complete()

    def _evaluate(self, scripts: ModelScripts) -> None:
        """Simulates one forward without saved tensors; the logits of the loss exist at the same time."""
        slots: dict[int, Block] = {}
        self.engine.before_forward(0)
        self._issue(scripts.embedding.forward, slots, 0)
        self.engine.after_forward(0)
        for unit, kind in enumerate(self.order, start=1):
            self.engine.before_forward(unit)
            self._issue(scripts.blocks[kind].first, slots, unit)
            self.engine.after_forward(unit)
        self.engine.before_forward(self.head_unit)
        if scripts.head:
            self._issue(scripts.head.forward, slots, self.head_unit)
        self.engine.after_forward(self.head_unit)
        self.engine.end_forward()
        for block in slots.values():
            self.meter.allocator.free(block)

    def _gather_all(self) -> None:
        """Gathers a full state dict: one unit after the other under FSDP1, one parameter after the other under FSDP2.

        (`_full_pre_state_dict_hook`; `DTensor.full_tensor` in torch.distributed.checkpoint's `state_dict.py`.)
        Gathering a full optimizer state takes no more: one state of a unit at a time (`_allgather_orig_param_states`).
        """
        allocator = self.meter.allocator
        for unit, _ in self.engine.held_units:
            sizes = [round(size) for size in shards.tensor_weights(unit, "stored", flat=False)]
            gathered = [sum(sizes)] if self.meter.flat else sizes
            for size in gathered:
                allocator.touch(max(size, 1), GATHER)

    def _issue(self, requests: Iterable[Request], slots: dict[int, Block], unit: int) -> None:
        allocator = self.meter.allocator
        malloc, free, touch = allocator.malloc, allocator.free, allocator.touch
        for slot, size, grad, brief in requests:
            if brief:
                touch(size)
            elif not size:
                freed = slots.pop(slot, None)
                if freed is not None:
                    free(freed)
            elif not grad:
                slots[slot] = malloc(size)
            elif self.engine.adds(unit):
                touch(size)
            else:
                group = Group(size, [malloc(size)])
                self.meter.named.setdefault((GRADIENTS, ("new", unit)), []).append(group)

    def _forward(self) -> None:
        self.slots: list[dict[int, Block]] = [{} for _ in range(len(self.order) + 2)]
        self.outputs: list[Block | None] = [None] * (len(self.order) + 2)
        self.engine.before_forward(0)
        self._issue(self.scripts.embedding.forward, self.slots[0], 0)
        self.outputs[0] = self.slots[0].pop(self.scripts.embedding.output, None)
        self.engine.after_forward(0)
        for unit, block in enumerate(self.order, start=1):
            script, replay = self.scripts.blocks[block], self.blocks[block]
            self.engine.before_forward(unit)
            slots: dict[int, Block] = {}
            if self.recipe.recomputes:
                self._issue(script.first, slots, unit)
                self.outputs[unit] = self._free_all_but(slots, script.first_output)
            else:
                self._issue(script.forward, slots, unit)
                self.outputs[unit] = slots.pop(script.output, None)
            self.slots[unit] = slots
            if self.until_loss[block]:
                self.meter.add(ACTIVATIONS, self.until_loss[block], "until loss")
            if not self._holds_input(replay):
                self._drop_output(unit - 1)
            self.engine.after_forward(unit)

    def _drop_output(self, unit: int) -> None:
        block, self.outputs[unit] = self.outputs[unit], None
        if block is not None:
            self.meter.allocator.free(block)

    def _loss(self) -> None:
        head: dict[int, Block] = {}
        self.engine.before_forward(self.head_unit)
        self._head_forward(head)
        self.engine.after_forward(self.head_unit)
        self.engine.end_forward()
        self.meter.add(ACTIVATIONS, -sum(self.until_loss[block] for block in self.order), "until loss")
        self.engine.before_loss_backward()
        if not self.head.keeps_input:
            self._drop_output(len(self.order))
        self._head_backward(head)
        if self.head.keeps_input:
            self._drop_output(len(self.order))
        if self.head_unit:
            self.engine.after_backward(self.head_unit, self.head.grad_bytes)

    def _head_forward(self, slots: dict[int, Block]) -> None:
        """Runs the head and the loss; fused kernels reach their peak at once, and leave gradients."""
        meter, more_bytes = self.meter, max(self.more_logits[0], 0)
        if self.scripts.head is None:
            meter.add(LOSS, self.head.forward_peak, "loss")
            meter.add(LOSS, -self.head.forward_peak, "loss")
            meter.add(LOSS, self.head.forward_end, "loss")
            return
        meter.add(LOSS, more_bytes, "more logits")
        self._issue(self.scripts.head.forward, slots, self.head_unit)
        meter.add(LOSS, -more_bytes, "more logits")

    def _head_backward(self, slots: dict[int, Block]) -> None:
        """Gathers the head after the backward of the loss, which precedes every parameter's gradient."""
        meter, more_bytes, script = self.meter, max(self.more_logits[1], 0), self.scripts.head
        if script is None:
            self.engine.before_head_backward(self.head_unit)
            self.gradient = meter.allocator.malloc(max(self.blocks[self.order[-1]].output, 1))
            meter.add(LOSS, -self.head.forward_end, "loss")
            meter.add(GRADIENTS, self.head.grad_bytes, ("new", self.head_unit))
            return
        first = next((index for index, request in enumerate(script.backward) if request.grad), len(script.backward))
        cut = 0 if self.recipe.chunked_loss else first
        meter.add(LOSS, more_bytes, "more logits")
        self._issue(script.backward[:cut], slots, self.head_unit)
        self.engine.before_head_backward(self.head_unit)
        self._issue(script.backward[cut:], slots, self.head_unit)
        meter.add(LOSS, -more_bytes, "more logits")
        self.gradient = self._free_all_but(slots, script.left)

    def _free_all_but(self, slots: dict[int, Block], left: int | None) -> Block:
        """Returns the gradient of the input; frees the rest."""
        last_block = slots.pop(left, None) if left is not None else None
        for block in slots.values():
            self.meter.allocator.free(block)
        slots.clear()
        return last_block or self.meter.allocator.malloc(max(self.blocks[self.order[-1]].output, 1))

    def _backward(self) -> None:
        allocator = self.meter.allocator
        for unit in range(len(self.order), 0, -1):
            index = self.order[unit - 1]
            script, replay = self.scripts.blocks[index], self.blocks[index]
            self.engine.before_backward(unit)
            slots = self.slots[unit]
            if self.recipe.recomputes:
                self._issue(script.forward, slots, unit)
                if self.recipe.checkpointing != "reentrant" and script.output in slots:
                    allocator.free(slots.pop(script.output))
            slots[UPSTREAM] = self.gradient
            self._issue(script.backward, slots, unit)
            self.gradient = self._free_all_but(slots, script.left)
            if self._holds_input(replay):
                self._drop_output(unit - 1)
            self.engine.after_backward(unit, replay.grad_bytes)
        self.engine.before_backward(0)
        slots = {**self.slots[0], UPSTREAM: self.gradient}
        self._issue(self.scripts.embedding.backward, slots, 0)
        for block in slots.values():
            allocator.free(block)
        for unit in range(len(self.order)):
            self._drop_output(unit)
        grad_bytes = self.embedding.grad_bytes + (0 if self.head_unit else self.head.grad_bytes) - self.summed
        if self.summed and not self.engine.adds(0):
            self.meter.add(GRADIENTS, -grad_bytes - self.summed, ("new", 0))
            self.meter.add(GRADIENTS, grad_bytes, ("new", 0), unit=self.engine.units[0])
        self.engine.after_backward(0, grad_bytes)
        self.engine.end_backward()
