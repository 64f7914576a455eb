"""Predicts the memory of one rank over one training step, event by event. Pure: no torch, a millisecond per layout.

The walk is the same for all engines: embedding, blocks, head and loss, backward, optimizer. `engines.py` gathers,
frees and reduces each unit's parameters; a block's allocations are recorded on its tape. Bytes are those that
`torch.cuda.max_memory_allocated` counts, on the rank with the largest shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from accel_fsdp.config import Engine
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction.memory import shards
from accel_fsdp.prediction.memory.deepspeed import Zero
from accel_fsdp.prediction.memory.engines import Ddp, EngineMemory, Fsdp2
from accel_fsdp.prediction.memory.fsdp1 import Fsdp1
from accel_fsdp.prediction.memory.replay import ReplayedModel, forward_peaks, replay_model
from accel_fsdp.prediction.memory.shape import ModelShape
from accel_fsdp.prediction.memory.shards import Unit
from accel_fsdp.prediction.memory.timeline import ACTIVATIONS, BUFFERS, GRADIENTS, LOSS, WORKSPACE, Meter, Moment, Trace
from accel_fsdp.prediction.memory.traces import Replay, SplitReplay, Tapes, Variant, variant_for

if TYPE_CHECKING:
    from typing_extensions import Self

ENGINES: Mapping[str, type[EngineMemory]] = {
    "single": EngineMemory,
    "ddp": Ddp,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
    "zero": Zero,
}
ID_BYTES = 8


@dataclass(frozen=True)
class Prediction:
    """One rank's memory over the second step, when the optimizer's state exists. All sizes are bytes.

    `moments` are the peaks of the phases in order, `steady` is the memory allocated between steps.
    """

    moments: tuple[Moment, ...]
    steady: int

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def predict(shape: ModelShape, tapes: Tapes, recipe: Recipe, layout: Layout, workspace_bytes: int = 0) -> Prediction:
    """Walks through one step. `workspace_bytes` is the memory of the math libraries' workspaces."""
    walk = Walk.of(Meter(), shape, tapes, recipe, layout)
    steady = walk.step(shape.buffers_bytes, workspace_bytes)
    moments = [*walk.meter.moments]
    if recipe.eval_batch:
        moments.append(_evaluation(shape, tapes, recipe, layout, workspace_bytes))
    return Prediction(tuple(moments), steady)


def _evaluation(shape: ModelShape, tapes: Tapes, recipe: Recipe, layout: Layout, workspace_bytes: int) -> Moment:
    """The peak of an evaluation, which comes between steps: a forward of its rows that saves nothing."""
    evaluated = replace(recipe, rows=recipe.eval_batch)
    walk = Walk.of(Meter(), shape, tapes, evaluated, layout)
    walk.rest(shape.buffers_bytes, workspace_bytes)
    walk.evaluate(forward_peaks(shape, tapes, evaluated))
    return walk.meter.moments[-1]


def timeline(shape: ModelShape, tapes: Tapes, recipe: Recipe, layout: Layout, workspace_bytes: int = 0) -> list[Moment]:
    """The step that `predict` walks through, in the order of events: each unit's peak, then the memory after it."""
    trace = Trace()
    Walk.of(trace, shape, tapes, recipe, layout).step(shape.buffers_bytes, workspace_bytes)
    trace.mark()
    return trace.samples


class Layers(NamedTuple):
    """The layers of a walk: their `places`, the number of layers each represents, and the `middle` units, with several.

    A walk needs the first two layers, because every later layer starts like the second; one layer for all in between;
    and the last two, for the same reason in backward. Where kinds of layers alternate, these are periods of layers.
    """

    places: Sequence[int]
    counts: Sequence[int]
    middle: range

    @staticmethod
    def whole(order: Sequence[int]) -> "Layers":
        return Layers(range(len(order)), [1] * len(order), range(0))

    @staticmethod
    def shortened(order: Sequence[int]) -> "Layers":
        """The fewest layers that give the same result."""
        period = next((size for size in range(1, len(order)) if order[size:] == order[:-size]), len(order))
        repeats = len(order) // period - 4
        if repeats < 2:
            return Layers.whole(order)
        first, left_out = 2 * period, (repeats - 1) * period
        places = [*range(first + period), *range(first + period + left_out, len(order))]
        counts = [1] * first + [repeats] * period + [1] * (len(places) - first - period)
        return Layers(places, counts, range(first + 1, first + period + 1))


@dataclass
class Walk:
    """One micro-batch, unit by unit. `order` is the block of each layer, `middle` the units that represent several.

    `summed` is the second gradient of a tied embedding: autograd adds it to the head's gradient in a new tensor
    (torch's profiler shows `aten::add` in `EmbeddingBackward0`, not `add_`). The gradient of a head that is a unit is
    reduced before the blocks' gradients are computed.
    """

    meter: Meter
    engine: EngineMemory
    recipe: Recipe
    order: Sequence[int]
    middle: range
    blocks: tuple[Replay, ...]
    embedding: Replay
    head: Replay
    until_loss: tuple[int, ...]
    splits: tuple[SplitReplay, ...]
    summed: int

    @classmethod
    def of(cls, meter: Meter, shape: ModelShape, tapes: Tapes, recipe: Recipe, layout: Layout) -> "Self":
        """Prepares the engine, the blocks' replays and the layers to walk through."""
        order = block_order(shape)
        units = units_of(shape, recipe, layout)
        layers = Layers.whole(order) if isinstance(meter, Trace) else Layers.shortened(order)
        first, last = units[:1], units[len(order) + 1 :]
        walked = [*first, *(units[index + 1] for index in layers.places), *last]
        counts = [1, *layers.counts, *(1 for _ in last)]
        distinct = shards.distinct_units(shape, recipe, layout)
        idle = [distinct.blocks[index] for index in shape.untraced for _ in shape.blocks[index].layers]
        engine = ENGINES[layout.wrapper](meter, walked, counts, recipe, layout, idle)
        nested = {unit: distinct.experts[order[index]] for unit, index in enumerate(layers.places, start=1)}
        nested[0] = distinct.again if layout.wrapper is Engine.FSDP2 else None
        engine.nested = {unit: inner for unit, inner in nested.items() if inner}
        replay = replay_model(shape, tapes, recipe, layout)
        return cls(
            *(meter, engine, recipe, [order[index] for index in layers.places], layers.middle),
            *(replay.blocks, replay.embedding, replay.head, replay.until_loss, replay.splits),
            summed=_summed_bytes(shape, recipe, layout, replay) if shape.tied else 0,
        )

    def step(self, buffers_bytes: int, workspace_bytes: int) -> int:
        """Walks through the whole step; returns the memory allocated between steps."""
        self.rest(buffers_bytes, workspace_bytes)
        steady = self.meter.total + self.engine.kept_gradients()
        self.micro_batches()
        self.meter.enter("optimizer step")
        self.engine.step()
        return steady

    def rest(self, buffers_bytes: int, workspace_bytes: int) -> None:
        """Allocates what lives between steps."""
        self.meter.enter("between steps")
        self.meter.add(BUFFERS, buffers_bytes)
        self.meter.add(WORKSPACE, workspace_bytes)
        self.engine.load()
        self.engine.make_states()

    def evaluate(self, peaks: Sequence[int]) -> None:
        """Walks through a forward that saves nothing; a block's input is freed after the block."""
        self.meter.enter("evaluation")
        self.meter.add(ACTIVATIONS, self.recipe.rows * self.recipe.length * 3 * ID_BYTES + self.embedding.forward_end)
        self.engine.before_forward(0)
        self.engine.after_forward(0)
        for unit in self._units_repeated(range(1, len(self.order) + 1)):
            block = self.order[unit - 1]
            self.engine.before_forward(unit)
            self._rise_with_experts(unit, peaks[block])
            self.meter.add(ACTIVATIONS, self.blocks[block].output - self._output_before(unit))
            self.engine.after_forward(unit)
        self.engine.before_forward(self.engine.head_unit)
        self.meter.touch({LOSS: peaks[-1]})
        self.engine.after_forward(self.engine.head_unit)

    def micro_batches(self) -> None:
        last = self.recipe.accumulation
        for number in sorted({1, min(2, last), last}):  # those in between are like the second
            self.engine.syncs = number == last
            name = f" of micro-batch {number}" if last > 1 else ""
            self.micro_batch(name)

    def micro_batch(self, name: str) -> None:
        tokens = self.recipe.rows * self.recipe.length
        self.meter.add(ACTIVATIONS, 3 * ID_BYTES * tokens)  # input ids, labels, attention mask
        self.meter.enter(f"forward{name}")
        self._forward()
        self.meter.enter(f"loss{name}")
        self._loss()
        self.meter.enter(f"backward{name}")
        self._backward()
        self.meter.add(ACTIVATIONS, -3 * ID_BYTES * tokens)

    def _forward(self) -> None:
        self.engine.before_forward(0)
        self.meter.touch({ACTIVATIONS: self.embedding.forward_peak})
        self.meter.add(ACTIVATIONS, self.embedding.forward_end)
        self.engine.after_forward(0)
        self.meter.mark()
        for unit in self._units_repeated(range(1, len(self.order) + 1)):
            block = self.order[unit - 1]
            replay = self.blocks[block]
            self.engine.before_forward(unit)
            self._rise_with_experts(unit, replay.forward_peak)
            kept = replay.output if self.recipe.recomputes else replay.forward_end  # the output: the next block's input
            self.meter.add(ACTIVATIONS, kept + self.until_loss[block])
            if not self._holds_input(replay) or self.recipe.has_inputs_on_host:
                self.meter.add(ACTIVATIONS, -self._output_before(unit))
            self.engine.after_forward(unit)
            self.meter.mark()

    def _units_repeated(self, units: range) -> Iterator[int]:
        """Yields the units, in order or backwards; multiplies the memory that the middle units leave after them.

        Equal layers change the memory by equal amounts, so the peak is at the first or the last of them.
        """
        middle = [unit for unit in units if unit in self.middle]
        before: Mapping[str, int] = {}
        for unit in units:
            if unit in middle[:1]:
                before = dict(self.meter.live)
            yield unit
            if unit in middle[-1:]:
                self.meter.repeat(before, self.engine.counts[unit] - 1)

    def _rise_with_experts(self, unit: int, peak: int, again: bool = False) -> None:
        """Counts a block's forward with experts in a separate unit, which are gathered at its peak.

        `again`: the recomputation in backward, after which they stay gathered, and which counts as a forward of only
        the experts.
        """
        experts = self.engine.experts_of(unit)
        if experts:
            self.engine.before_forward(experts)
        if again:
            self.engine.end_forward()
        self.meter.touch({ACTIVATIONS: peak})
        if experts and not again:
            self.engine.after_forward(experts)

    def _holds_input(self, replay: Replay) -> bool:
        """Whether a block's input is kept until its backward: as a saved tensor, or for recomputation."""
        return replay.keeps_input or self.recipe.recomputes

    def _output_before(self, unit: int) -> int:
        return self.blocks[self.order[unit - 2]].output if unit > 1 else self.embedding.output

    def _loss(self) -> None:
        self.engine.before_forward(self.engine.head_unit)
        self.meter.touch({LOSS: self.head.forward_peak})
        self.meter.add(LOSS, self.head.forward_end)
        self.engine.after_forward(self.engine.head_unit)
        self.engine.end_forward()
        counted = zip(self.order, self.engine.counts[1:], strict=False)  # the layers that each of these represents
        self.meter.add(ACTIVATIONS, -sum(self.until_loss[block] * count for block, count in counted))
        self.meter.mark()
        self.engine.before_loss_backward()
        hidden = self.blocks[self.order[-1]].output
        if not self.head.keeps_input:
            self.meter.add(ACTIVATIONS, -hidden)
        self.meter.touch({LOSS: self.head.early_peak})
        self.engine.before_head_backward(self.engine.head_unit)
        self.meter.touch({LOSS: self.head.late_peak - self.head.late_grad_bytes, GRADIENTS: self.head.late_grad_bytes})
        # kept hidden states are freed when their gradient, of the same size, is allocated
        gradient = 0 if self.head.keeps_input else hidden
        # a tied head's gradient waits for the embedding's, which belongs to the same parameter
        new = 0 if self.engine.adds(self.engine.head_unit) and not self.summed else self.head.grad_bytes
        self.meter.change({GRADIENTS: new, LOSS: -self.head.forward_end, ACTIVATIONS: gradient})
        if self.engine.head_unit:
            self.engine.after_backward(self.engine.head_unit, self.head.grad_bytes)

    def _add_backward_peak(self, replay: Replay, unit: int) -> None:
        """Counts the peak of a backward.

        Its tape starts with the output, which the next block's backward has freed. The copy of reentrant checkpointing
        stays to the end.
        """
        peak, grad_bytes = (replay.adding_peak, 0) if self.engine.adds(unit) else replay.backward_peak
        self.meter.touch({ACTIVATIONS: replay.output + peak - grad_bytes, GRADIENTS: grad_bytes})

    def _experts_backward(self, unit: int, released: int) -> int:
        """The backward of a block whose experts are a separate unit: they are reduced before the block's backward ends.

        Returns the bytes of their gradients, 0 without such experts.
        """
        experts = self.engine.experts_of(unit)
        if not experts:
            return 0
        self.engine.before_backward(experts)
        split = self.splits[self.order[unit - 1]]
        self.meter.touch({ACTIVATIONS: released + split.peak - split.peak_grad_bytes, GRADIENTS: split.peak_grad_bytes})
        grad_bytes = 0 if self.engine.adds(experts) else split.grad_bytes
        self.meter.change({ACTIVATIONS: released + split.level, GRADIENTS: grad_bytes})
        self.engine.after_backward(experts, split.grad_bytes)
        rise = split.later_peak - split.later_grad_bytes - split.level
        self.meter.touch({ACTIVATIONS: rise, GRADIENTS: split.later_grad_bytes})
        self.meter.add(ACTIVATIONS, -released - split.level)
        return split.grad_bytes

    def _backward(self) -> None:
        """Frees the saved tensors and the input of each block; the next block has freed its output."""
        for unit in self._units_repeated(range(len(self.order), 0, -1)):
            replay = self.blocks[self.order[unit - 1]]
            input_bytes = self._output_before(unit) if self._holds_input(replay) else 0
            self.engine.before_backward(unit)
            if self.recipe.has_inputs_on_host:
                self.meter.add(ACTIVATIONS, input_bytes)  # copied back from the host
            saved = replay.forward_end - replay.output
            if self.recipe.recomputes:
                self._rise_with_experts(unit, replay.forward_peak, again=True)
                saved += replay.output if self.recipe.checkpointing == "reentrant" else 0
                self.meter.add(ACTIVATIONS, saved)
            grad_bytes = replay.grad_bytes - self._experts_backward(unit, replay.output)
            if grad_bytes == replay.grad_bytes:
                self._add_backward_peak(replay, unit)
            new = 0 if self.engine.adds(unit) else grad_bytes
            self.meter.change({GRADIENTS: new, ACTIVATIONS: -input_bytes - saved})
            self.engine.after_backward(unit, grad_bytes)
            self.meter.mark()
        self.engine.before_backward(0)
        self._add_backward_peak(self.embedding, 0)
        new = 0 if self.engine.adds(0) else self.embedding.grad_bytes
        self.meter.change({GRADIENTS: new, ACTIVATIONS: -self.embedding.forward_end})
        grad_bytes = self.embedding.grad_bytes + (0 if self.engine.head_unit else self.head.grad_bytes) - self.summed
        self.meter.touch({GRADIENTS: self.summed})
        self.meter.add(GRADIENTS, -self.summed)  # with `adds` this is the head's gradient, of the same size
        self.engine.after_backward(0, grad_bytes)
        self.engine.end_backward()


def _summed_bytes(shape: ModelShape, recipe: Recipe, layout: Layout, replay: ReplayedModel) -> int:
    """The bytes of a tied table's second gradient, which is added to the head's, in the dtype of the computation.

    Without FSDP, tensor parallelism adds this rank's part of a gradient of all rows. FSDP by transformers reduces both
    gradients, one after the other.
    """
    if layout.is_by_transformers:
        return replay.embedding.grad_bytes if layout.wrapper is Engine.NONE else 0
    width = Variant.of(variant_for(recipe, layout)).weight_bytes
    return min(shape.vocab * shape.hidden * width, replay.embedding.grad_bytes, replay.head.grad_bytes)


def block_order(shape: ModelShape) -> list[int]:
    """The index of each layer's block, in forward order, without the layers that text rows skip."""
    traced = ((index, block) for index, block in enumerate(shape.blocks) if index not in shape.untraced)
    places = {layer: index for index, block in traced for layer in block.layers}
    return [places[layer] for layer in sorted(places)]


def units_of(shape: ModelShape, recipe: Recipe, layout: Layout) -> list[Unit]:
    """The units in forward order, as Accelerate wraps them by the blocks' classes, without nested ones."""
    blocks, first, last, *_ = shards.distinct_units(shape, recipe, layout)
    inner = [blocks[index] for index in block_order(shape)]
    return [first, *inner, last] if last else [first, *inner]
