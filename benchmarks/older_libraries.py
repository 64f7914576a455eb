"""What published runs had that no user of this package has: older libraries, other trainers, kernels of others.

`Published` is a recipe with more fields. The functions below take the places of those of the package that they are
named after, and read these fields; a plain `Recipe` is predicted as without them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal

from packaging.version import Version

from accel_fsdp.config import Engine
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction import communication, memory, speed, trace_store, work
from accel_fsdp.prediction.memory import (
    ACTIVATIONS,
    GRADIENTS,
    ModelShape,
    Parameter,
    Tapes,
    Variant,
    engines,
    fsdp1,
    losses,
    replay,
    reservation,
    shards,
    step,
)
from accel_fsdp.prediction.memory.losses import FOAK, Loss

_LATE = "+n +g -p -n +z -g +d -z"
_WIDTHS = "l2 f4 s4 p4 n4 g4 z4 d2"
"""f: upcast copy; s: shifted copy; p: log-softmax; n, g: gradients of the loss and of log-softmax; z: unshifted."""
UPCAST = Loss("+f -l +s +p -s -f", _LATE, _WIDTHS)
"""transformers 4.45: the upcast takes the name of the logits, and shifting copies it."""
UPCAST_AND_KEPT = Loss("+f +s +p -s -f -l", _LATE, _WIDTHS)
"""transformers 4.48: the model's frame still holds the logits (`ForCausalLMLoss`)."""
FOAK_UPCAST = Loss("+f -l +s -f", "+z -s +d -z", "l2 f4 s4 z4 d2")
"""foak: no log-softmax, and the gradient takes the place of the logits that it is for."""
FOAK_UPCAST_AND_KEPT = Loss("+f +s -f -l", "+z -s +d -z", "l2 f4 s4 z4 d2")
LOW = Loss("+s +p -s -l", "+n +g -p -n +d -g", "l2 s2 p2 n2 g2 d2")
"""gpt_bigcode, pure 16 bit: nothing is upcast."""
FOAK_LOW = Loss("+s -l", "+d -s", "l2 s2 d2")
"""foak with gpt_bigcode's own loss, by the token slopes of fms-acceleration's runs."""
FOAK_LOW_AUTOCAST = Loss("+s +f -s -l", "+z -f +d -z", "l2 s2 f4 z2 d2")
LOW_AUTOCAST = Loss("+s +f +p -s -f -l", "+n +g -p -n +z -g +d -z", "l2 s2 f4 p4 n4 g4 z2 d2")
"""gpt_bigcode under autocast, which makes a float32 copy and a float32 log-softmax."""
PLAIN_LOSS = frozenset({"gpt_bigcode"})
"""Model types whose own loss took the 16-bit logits as they were, before transformers 5 gave all of them one loss."""
SHARING = frozenset({"llama", "gemma", "gemma2", "cohere", "olmo"})
"""Model types that handed shared heads to flash attention as they were before transformers 4.48."""
OLDER_ATTENTION_EFFICIENCY = 0.35
"""What the first version of flash attention reaches of what products reach; calibrated like those of `speed.py`."""
NARROW_LORA_BYTES = ((7, 12), (15, 8))
"""`work.LORA_BYTES` with adapters in half precision: nothing is cast."""
FUSED_LORA_BYTES = ((2, 6), (6, 4))
"""The same in kernels of their own: the input is read once, the output is added to."""


@dataclass(frozen=True)
class Published(Recipe):
    """A recipe with what else a published run tells.

    How it trains: a script that `keeps_logits` to the end of backward; one that `zeroes_late`, between forward and
    backward, as Lightning's Trainer does; FSDP that reduces in another dtype; PEFT without `autocast_adapter_dtype`
    ("base"); norms (TRL) or all (PEFT's `prepare_model_for_kbit_training`) in float32 beside 4-bit weights on one GPU;
    gradients that are reduced after each micro-batch.

    Its libraries' memory: `loss` is what head and loss allocate; float32 logits; attention that saves keys and values
    of all heads; a cache that checkpointing leaves on. `keeps_block_gradients`: FSDP1 over frozen layers with reentrant
    checkpointing holds the blocks' inputs with their gradients to the end of backward: its hook
    (`_register_post_backward_reshard_only_hook`) refers to the detached inputs, which are leaves there and so own a
    gradient. `checkpoints_outside`: reentrant checkpointing runs around FSDP1's wrapper instead of inside of it. The
    wrapper's forward then leaves no hook for backward (`_register_pre_backward_hooks`), and a unit without one is
    gathered a third time and never ahead of time.

    Its libraries' time: torch.compile; adapters in kernels of their own; the first version of flash attention; layer
    norms in half precision under autocast (llm-foundry's low_precision_layernorm); a launcher that doesn't leave each
    rank one thread of the host.
    """

    keeps_logits: bool = False
    zeroes_late: bool = False
    reduce: Literal["compute", "float32"] = "compute"
    lora_dtype: Literal["float32", "base"] = "float32"
    wide: Literal["none", "norms", "rest"] = "none"
    sync_each_batch: bool = False
    loss: Loss | None = None
    keeps_block_gradients: bool = False
    checkpoints_outside: bool = False
    repeats_heads: bool = False
    caches_keys: bool = False
    compiled: bool = False
    fused_lora: bool = False
    older_attention: bool = False
    narrow_norms: bool = False
    many_threads: bool = False


PLAIN = Published()


def with_versions(recipe: Published, versions: Mapping[str, str], model_type: str) -> Published:
    """The recipe with what these versions do; without one, transformers counts as today's.

    transformers: upcasting copies the logits and shifting copies them again in 4.45 (12 bytes), where 4.48 also keeps
    the first ones in a frame (14): token slopes of PowerLM and Mistral in fms-acceleration's public runs. The retained
    gradients: exactly (L - 2) hidden states per token in all their frozen FSDP1 runs with torch 2.4.1, none without
    FSDP or when everything is trained. Since 4.53 layers checkpoint in their own `__call__` (modeling_layers.py);
    before, the constant term of all frozen and large FSDP1 runs lacks exactly one block, and so it does in those that
    name no version but torch 2.4.1. Each model had its own attention until 4.48, in which `repeat_kv` came before the
    kernel, but for some models' flash attention. gpt_bigcode returned its cache with checkpointing on, where others
    turned it off (modeling_gpt_bigcode.py, `presents`).
    """
    transformers, torch = Version(versions.get("transformers", "99")), Version(versions.get("torch", "2.14"))
    old = transformers < Version("4.53") if "transformers" in versions else torch < Version("2.5")
    early = transformers < Version("4.48")
    return replace(
        recipe,
        loss=_loss(transformers, model_type, recipe),
        keeps_block_gradients=torch < Version("2.5"),
        checkpoints_outside=old,
        repeats_heads=early and not (recipe.attention == "flash" and model_type in SHARING),
        caches_keys=transformers < Version("5") and model_type in PLAIN_LOSS,
    )


def _loss(transformers: Version, model_type: str, recipe: Recipe) -> Loss | None:
    """The sequence of the loss; None where the tape has it."""
    foak = recipe.kernels == "foak"
    if model_type in PLAIN_LOSS and transformers < Version("5"):
        pure, autocast = (FOAK_LOW, FOAK_LOW_AUTOCAST) if foak else (LOW, LOW_AUTOCAST)
        return pure if recipe.precision == "no" else autocast
    if transformers < Version("4.46"):
        return FOAK_UPCAST if foak else UPCAST
    if transformers < Version("5"):
        return FOAK_UPCAST_AND_KEPT if foak else UPCAST_AND_KEPT
    return FOAK if foak else None


def variant_of(recipe: Published, engine: Engine) -> str:
    """As the package names it, with adapters in the dtype of the base where PEFT left them so."""
    name = memory.variant_of(recipe, engine)
    variant = Variant.of(name)
    narrow = recipe.method != "full" and recipe.lora_dtype == "base"
    return variant._replace(adapters=variant.weights).name if narrow else name


def tapes_of(name: str, config: Any, variant: str, wide: str = "none") -> tuple[ModelShape, Tapes]:
    """The shape of a config's model and its tapes in one variant, from the cache if they were recorded before."""
    key = variant if wide == "none" else f"{variant}+{wide}32"

    def anew() -> trace_store.TraceRecord:
        from accel_fsdp.prediction.tracing import fit, recorder

        known = recorder._use_fused_kernels

        def widened(model: Any, variant: Variant) -> None:
            _widen(model, wide)
            known(model, variant)

        with changed(recorder, _use_fused_kernels=known if wide == "none" else widened):
            shape, tapes = fit.record_model(name, config, (variant,))
        return shape, {key: tapes[variant]}

    shape, tapes = trace_store.cached_or_recorded(config.to_dict(), key, anew)
    return replace(shape, name=name), tapes


def _widen(model: Any, wide: str) -> None:
    from torch import nn

    for path, module in model.named_modules():
        if wide == "rest" or "norm" in path or isinstance(module, nn.LayerNorm):
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=parameter.requires_grad)


@contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    """Gives names of a module other values for a while."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def instead_of(*places: Any) -> Callable[[Callable[..., Any]], None]:
    """Puts a function in the place of the one of its name, which it is given first, in modules or a class."""

    def put(function: Callable[..., Any]) -> None:
        known = getattr(places[0], function.__name__)

        @wraps(known)
        def called(*given: Any) -> Any:
            return function(known, *given)

        for place in places:
            setattr(place, function.__name__, called)

    return put


def of(recipe: Recipe) -> Published:
    """The further fields of a recipe."""
    return recipe if isinstance(recipe, Published) else PLAIN


# memory


@instead_of(losses)
def loss_of(known: Any, recipe: Recipe) -> Loss | None:
    """Where the caller keeps logits, they are what the loss has upcast, or the model's where its frame keeps those."""
    if not isinstance(recipe, Published):
        return known(recipe)
    loss, kept = recipe.loss, "l" if recipe.loss is UPCAST_AND_KEPT else "f"
    if loss and recipe.keeps_logits:
        return loss._replace(forward=loss.forward.replace(f" -{kept}", ""), after=f"-{kept}")
    return loss


@instead_of(shards, communication, speed)
def master_bytes(known: Any, recipe: Recipe, layout: Layout) -> int:
    """Adapters may have the dtype of the base."""
    narrow = recipe.method != "full" and of(recipe).lora_dtype == "base"
    return state_bytes.DTYPE_BYTES[recipe.dtype] if narrow else known(recipe, layout)


@instead_of(shards)
def _held_parameters(
    known: Any, parameters: Iterable[Parameter], recipe: Recipe, layout: Layout, inside: bool
) -> Iterator[Any]:
    wide = of(recipe).wide if recipe.method == "qlora" and layout.engine in (Engine.NONE, Engine.DDP) else "none"
    for parameter in parameters:
        widened = wide == "rest" or (wide == "norms" and parameter.kind == "norm")
        for param in known((parameter,), recipe, layout, inside):
            as_is = not widened or param.quantized or param.adapter
            yield param if as_is else replace(param, stored=state_bytes.MASTER)


@instead_of(engines.Fsdp)
def _reduction_bytes(known: Any, engine: engines.Fsdp, unit: int) -> tuple[int, int]:
    if of(engine.recipe).reduce != "float32":
        return known(engine, unit)
    sizes = (
        shards.trained_bytes(engine.units[unit], engine.layout, state_bytes.MASTER, shard) for shard in (False, True)
    )
    return tuple(sizes)


@instead_of(fsdp1.Fsdp1)
def before_backward(known: Any, engine: fsdp1.Fsdp1, unit: int) -> None:
    """A unit that is checkpointed outside isn't prefetched."""
    if not (of(engine.recipe).checkpoints_outside and engine.recipe.checkpointing == "reentrant"):
        known(engine, unit)
    elif unit < len(engine.units) and unit not in engine.gathered:
        engine._gather(unit)


def before_loss_backward(known: Any, engine: engines.EngineMemory) -> None:
    """Clears the last step's gradients."""
    if clear := vars(engine).pop("clear", None):
        clear()
    known(engine)


instead_of(fsdp1.Fsdp1)(before_loss_backward)
instead_of(engines.EngineMemory)(before_loss_backward)


def replay_model(known: Any, shape: ModelShape, tapes: Tapes, recipe: Recipe, layout: Layout) -> replay.ReplayedModel:
    """With repeated heads, after which a block is at its highest in forward, cached keys, and logits that are kept."""
    replayed: replay.ReplayedModel = known(shape, tapes, recipe, layout)
    repeated = [repeated_bytes(shape, tapes, recipe, kind) for kind in range(len(shape.blocks))]
    blocks = tuple(
        block._replace(forward_peak=block.forward_peak + more, forward_end=block.forward_end + more)
        for block, more in zip(replayed.blocks, repeated, strict=True)
    )
    cached = (cached_bytes(block.parameters, recipe) for block in shape.blocks)
    until = tuple(cast + keys for cast, keys in zip(replayed.until_loss, cached, strict=True))
    loss, backward = replayed.more_logits
    if of(recipe).keeps_logits and not of(recipe).loss and not recipe.chunked_loss:  # `loss_of` has the other losses
        width = shards.compute_bytes(recipe) if recipe.precision == "no" else state_bytes.MASTER
        backward += width * shape.vocab * recipe.rows * recipe.length
    return replace(replayed, blocks=blocks, until_loss=until, more_logits=(loss, backward))


instead_of(step)(replay_model)


def repeated_bytes(shape: ModelShape, tapes: Tapes, recipe: Recipe, kind: int) -> int:
    """Keys and values of all heads instead of those that are; a mask excludes the kernels that share heads."""
    if not of(recipe).repeats_heads or replay.tape_of_block(shape, tapes, recipe, kind) is not tapes.blocks[kind]:
        return 0
    named = (parameter for parameter in shape.blocks[kind].parameters if parameter.name.endswith("k_proj.weight"))
    keys = next((name.shape[0] for name in named), 0)
    more = shape.heads * shape.head_dim - keys if keys else 0
    return 2 * more * shards.compute_bytes(recipe) * recipe.rows * recipe.length


def cached_bytes(parameters: Iterable[Parameter], recipe: Recipe) -> int:
    """The cache of a block's keys and values, a view of what its projection put out.

    Float32 with 4-bit weights under autocast: layer norm returns that, and `Linear4bit` what it was given.
    """
    wide = recipe.method == "qlora" and recipe.precision != "no"
    width = state_bytes.MASTER if wide else shards.compute_bytes(recipe)
    columns = next((parameter.shape[0] for parameter in parameters if parameter.name.endswith("c_attn.weight")), 0)
    return columns * width * recipe.rows * recipe.length * of(recipe).caches_keys


class OlderWalk(step.Walk):
    """The walk through a step with what a `Published` recipe has besides."""

    def _retained(self) -> int:
        """The bytes that FSDP1 holds of each frozen block to the end of backward."""
        recipe, layout = of(self.recipe), self.engine.layout
        retains = recipe.keeps_block_gradients and layout.engine is Engine.FSDP1 and layout.shard_ranks > 1
        retains = retains and recipe.method != "full" and recipe.checkpointing == "reentrant"
        return self.blocks[-1].output if retains else 0

    @classmethod
    def of(cls, meter: Any, shape: ModelShape, tapes: Tapes, recipe: Recipe, layout: Layout) -> "OlderWalk":
        """No published run had a torch that frees gathered outputs early."""
        walk = super().of(meter, shape, tapes, recipe, layout)
        if isinstance(recipe, Published) and isinstance(walk.engine, engines.Fsdp2):
            walk.engine.frees_output_late = True
        return walk

    def micro_batches(self, more: str = "") -> None:
        """With the last step's gradients to begin with, where the trainer clears them late."""
        self._keep_gradients(more)
        super().micro_batches(more)

    def _keep_gradients(self, more: str) -> None:
        late = self.engine.last_gradients() if of(self.recipe).zeroes_late else 0
        self.meter.add(GRADIENTS, late)
        vars(self.engine)["clear"] = lambda: self.meter.add(GRADIENTS, -late)

    def micro_batch(self, name: str) -> None:
        """Reduces gradients where the trainer does so each time."""
        self.engine.syncs = self.engine.syncs or of(self.recipe).sync_each_batch
        super().micro_batch(name)

    def _output_before(self, unit: int) -> int:
        """What a block's backward frees of its input: nothing where it stays with its gradient."""
        retained = self._retained()
        return super()._output_before(unit) if not retained else -retained if unit > 2 else 0

    def _backward(self) -> None:
        super()._backward()
        layers = sum(count for _, count in self._blocks_with_counts())
        self.meter.add(ACTIVATIONS, -self._retained() * (2 * layers - 2))


class OlderAllocatingWalk(OlderWalk, reservation._AllocatingWalk):
    """The same tensor by tensor."""

    def prepare(self, shape: ModelShape, tapes: Tapes) -> None:
        """Sizes of repeated heads too."""
        super().prepare(shape, tapes)
        self.repeated = [repeated_bytes(shape, tapes, self.recipe, kind) for kind in range(len(shape.blocks))]
        self.kept: list[Any] = []
        self.ending = False

    def _keep_gradients(self, more: str) -> None:
        """They are there from the second step on."""
        if of(self.recipe).zeroes_late and more != " of step 1":
            vars(self.engine)["clear"] = lambda: type(self.meter).drop(self.meter, GRADIENTS)

    def one_step(self, step: int) -> None:
        """Trainers that clear gradients late don't do it at its end."""
        drop = self.meter.drop
        with changed(self.meter, drop=lambda kind: None if of(self.recipe).zeroes_late else drop(kind)):
            super().one_step(step)

    def _issue(self, requests: Any, slots: dict[int, Any], unit: int) -> None:
        """Keys and values of all heads come first where older attention saves them."""
        kind = self.order[unit - 1] if 0 < unit <= len(self.order) else None
        script = None if kind is None else self.scripts.blocks[kind]
        if script and self.repeated[kind] and (requests is script.forward or requests is script.first):
            slots[-2] = self.meter.allocator.malloc(self.repeated[kind])
        super()._issue(requests, slots, unit)

    def _drop_output(self, unit: int) -> None:
        """Inputs that stay with their gradients go at the end of backward, before what else is left."""
        retained, allocator = self._retained(), self.meter.allocator
        if not retained or not self.meter.phase.startswith("backward"):
            super()._drop_output(unit)
        elif not self.ending:
            self.kept += [allocator.malloc(retained)] if unit > 1 else []
            self.ending = unit == 0
        else:
            while self.kept:
                allocator.free(self.kept.pop(0))
            super()._drop_output(unit)
            self.ending = unit < len(self.order) - 1

    def _backward(self) -> None:
        super(OlderWalk, self)._backward()


step.Walk = OlderWalk
reservation._AllocatingWalk = OlderAllocatingWalk


# time


@instead_of(work)
def _is_fused(known: Any, recipe: Recipe) -> bool:
    return of(recipe).compiled or known(recipe)


@instead_of(work)
def _fuses_gates(known: Any, recipe: Recipe) -> bool:
    return of(recipe).compiled or known(recipe)


@instead_of(work)
def _casts_norms(known: Any, block: Any, recipe: Recipe) -> bool:
    return not of(recipe).compiled and not of(recipe).narrow_norms and known(block, recipe)


@instead_of(work)
def _has_wide_norms(known: Any, block: Any, recipe: Recipe) -> bool:
    return of(recipe).wide != "none" or known(block, recipe)


@instead_of(work)
def _between_products(known: Any, block: Any, shape: ModelShape, recipe: Recipe) -> tuple[work.Work, work.Work]:
    """torch.compile fuses the kernels between products."""
    forward, backward = known(block, shape, recipe)
    return (replace(forward, kernels=2), replace(backward, kernels=4)) if of(recipe).compiled else (forward, backward)


@instead_of(work)
def _adapters(known: Any, block: Any, recipe: Recipe) -> tuple[work.Work, work.Work]:
    """Without casts no product is in float32."""
    fused, narrow = of(recipe).fused_lora, of(recipe).lora_dtype == "base"
    if not fused and not narrow:
        return known(block, recipe)
    kernels = {**work.KERNELS, "lora": 2} if fused else work.KERNELS
    with changed(work, LORA_BYTES=FUSED_LORA_BYTES if fused else NARROW_LORA_BYTES, KERNELS=kernels):
        return known(block, replace(recipe, precision="bf16"))


@instead_of(speed)
def work_seconds(known: Any, done: work.Work, recipe: Recipe, gpu: Any) -> float:
    """As if attention computed more, where it is less efficient."""
    more = speed.ATTENTION_EFFICIENCY / OLDER_ATTENTION_EFFICIENCY if of(recipe).older_attention else 1
    return known(replace(done, attention_flops=done.attention_flops * more), recipe, gpu)


@instead_of(speed)
def _pieces(known: Any, shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[speed.Stretch]:
    outside = of(recipe).checkpoints_outside and layout.engine is Engine.FSDP1
    for piece in known(shape, recipe, layout):
        again = outside and piece.recompute.flops > 0
        yield replace(piece, gathers=piece.gathers + 1, hidden=False) if again else piece


@instead_of(speed)
def _update(known: Any, shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Any) -> Iterator[Any]:
    fastest = math.inf if of(recipe).many_threads else speed.THREAD_BYTES_PER_S
    with changed(speed, THREAD_BYTES_PER_S=fastest):
        yield from known(shape, recipe, layout, gpu)
