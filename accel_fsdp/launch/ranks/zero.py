"""Records the first updates of a script under DeepSpeed, so that one plain process can repeat them.

DeepSpeed's engine reduces, clips and clears gradients, and steps. Under ZeRO its optimizer has flat float32 copies of
the trained weights, and each rank holds a part of them.
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from accel_fsdp.launch.ranks import copies, events, script
from accel_fsdp.launch.ranks.observing import Observation, after, before
from accel_fsdp.launch.ranks.parts import Parts, Place
from accel_fsdp.launch.ranks.recording import Recorder
from accel_fsdp.launch.ranks.records import Clip, Update
from accel_fsdp.library_internals import Internal

if TYPE_CHECKING:
    import torch
    from torch import nn

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PARTS = "deepspeed.utils.tensor_fragment:tensor_fragment"
STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
RELIES_ON = (
    Internal(f"{ENGINE}._backward_epilogue", "self"),
    Internal(f"{ENGINE}._take_model_step", "self lr_kwargs"),
    Internal("accelerate.utils:DeepSpeedOptimizerWrapper.step", "self"),
    Internal("accelerate:Accelerator.clip_grad_norm_", "self parameters max_norm *"),
    Internal(f"{PARTS}.lp_fragment_address"),
    Internal(f"{PARTS}.hp_fragment_address"),
    Internal(f"{PARTS}.param_group_index"),
    Internal(f"{PARTS}.get_lp_grad_fragment", "self index_in_param_group"),
    Internal(f"{STAGE3}.get_local_fp32_grad_for_param", "self param"),
    Internal(f"{STAGE3}.get_param_id", "self param"),
)
UPDATES = Observation("updates under DeepSpeed, to repeat them in one process", *RELIES_ON)


class ZeroRecorder(Recorder):
    """Reads weights and gradients from DeepSpeed's engine, where other recorders read them from the model."""

    taken = asked = 0
    asked_at = ""
    clips_by_config = has_compared_norms = False

    @cached_property
    def has_hooked_engine(self) -> bool:
        """Installs the hooks on the engine when a script first prepares a model, and so has imported DeepSpeed."""
        if not UPDATES.is_possible:
            return False
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedOptimizerWrapper
        from deepspeed.runtime.engine import DeepSpeedEngine

        after(DeepSpeedEngine, "__init__", lambda engine, *_, **__: self.prepare(engine))
        after(DeepSpeedEngine, "_backward_epilogue", self._read_reduced)
        before(DeepSpeedEngine, "_take_model_step", self._record_step)
        before(DeepSpeedOptimizerWrapper, "step", self._count_accelerate_step)
        before(Accelerator, "clip_grad_norm_", self._check_clipping)
        return True

    def keep_all(self, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        if self.has_hooked_engine:
            if not self.copies:  # before prepare replaces "auto" by a number
                config = accelerator.deepspeed_plugin.deepspeed_config
                self.clips_by_config = config.get("gradient_clipping", "auto") != "auto"
            super().keep_all(accelerator, *args, **kwargs)

    def keep(self, root: "nn.Module") -> None:
        with _gather_weights(root) as is_split:
            super().keep(root)
        if is_split and (plain := self.copies[-1].plain) is not None:
            from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

            plain.float()  # DeepSpeed may have made it in 16 bits
            for weight in plain.parameters():  # TRL's forward reads it
                vars(weight)["ds_status"] = ZeroParamStatus.AVAILABLE

    def begin_update(self) -> Update:
        from torch.optim import Optimizer

        update = super().begin_update()
        (engine,) = self._engines() or (None,)
        if engine is None:
            return update
        update.trained = [name for name, weight in engine.module.named_parameters() if weight.requires_grad]
        update.cast, update.accumulation = update.precision, engine.gradient_accumulation_steps()
        if update.precision == "fp16":
            update.why = update.why or "DeepSpeed scales the losses of fp16"
        if not _splits(engine) and not isinstance(engine.optimizer, Optimizer):
            update.why = update.why or f"{type(engine.optimizer).__name__} of DeepSpeed keeps gradients elsewhere"
        if any(weight._backward_hooks for weight in engine.module.parameters()):
            update.why = update.why or "weights have hooks"
        if name := next((place.name for place in self.places if _is_behind(place, engine)), ""):
            line = script.line_of_stack(sys._getframe(2))
            events.report("otherwise", what="behind-deepspeed", name=name, update=self.written + 1, line=line)
        return update

    def end(self) -> None:
        """Reports a script that accumulates gradients by itself: the engine steps after each backward pass."""
        super().end()
        if self.asked and self.taken >= 2 * self.asked:
            events.report("otherwise", what="more-steps", taken=self.taken, asked=self.asked, line=self.asked_at)

    def places_of(self, model: Any) -> Iterator[Place]:
        if not _splits(model):
            yield from super().places_of(model)
            return
        for name, weight in model.module.named_parameters():
            place = _in_stage3(model, name, weight) if hasattr(weight, "ds_id") else _in_states(model, name, weight)
            if place is not None:
                yield place

    def check_kept(self, update: Update) -> None:
        """Does nothing: the engine clears gradients itself, before a script can."""

    def _engines(self) -> list[Any]:
        return [model for model_ref in self.prepared.values() if hasattr(model := model_ref(), "zero_optimization")]

    def _read_reduced(self, engine: Any, *_: Any) -> None:
        """Reads the gradients that the engine has averaged over ranks, after the last backward pass of a step."""
        if self.update is not None and engine.is_gradient_accumulation_boundary():
            self.update.reduced = self._gradients_of(engine)

    def _count_accelerate_step(self, *_: Any) -> None:
        """Called at Accelerate's `optimizer.step()`, which does nothing under DeepSpeed."""
        self.asked += 1
        self.asked_at = script.line_of_stack(sys._getframe(2))

    def _check_clipping(self, _: Any, parameters: Any, max_norm: Any, *__: Any, **___: Any) -> None:
        """Reports a finite norm to which only Accelerate is asked to clip: it leaves clipping to DeepSpeed."""
        if self.has_compared_norms or not script.is_calling(sys._getframe(2)):
            return
        for limit in (float(engine.gradient_clipping()) for engine in self._engines()):
            self.has_compared_norms = True
            if max_norm and math.isfinite(max_norm) and max_norm != limit and not (limit and self.clips_by_config):
                line = script.line_of_stack(sys._getframe(2))
                events.report("otherwise", what="clipped-by-engine", norms=[float(max_norm), limit], line=line)

    def _record_step(self, engine: Any, *_: Any) -> None:
        self.taken += 1
        if self.update is None:
            return
        limit, line = float(engine.gradient_clipping()), script.line_of_stack(sys._getframe(2))
        self.update.by_engine = True
        self.update.clips = [Clip(limit, 2.0, self.update.backwards, line)] if limit else []

    def _gradients_of(self, engine: Any) -> Parts:
        if not _splits(engine):
            return self._gradients()
        weights = dict(engine.module.named_parameters())
        known = [place for place in self.places if _has_copy(engine, weights[place.name])]
        return {place.name: (place.start, _gradient(engine, place, weights[place.name])) for place in known}


def _splits(engine: Any) -> bool:
    """Whether the optimizer is ZeRO's: that of stages 1 and 2, or that of stage 3."""
    kept = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    return any(hasattr(engine.optimizer, name) for name in kept)


def _in_states(engine: Any, name: str, weight: Any) -> Place | None:
    """The location of a weight in stages 1 and 2: each rank has all of it, and a part of its float32 copy."""
    if not hasattr(weight, "_hp_mapping"):
        return Place(name, weight, [0] * weight.dim(), tuple(weight.shape))
    if (part := weight._hp_mapping) is None:
        return None
    flat = engine.optimizer.single_partition_of_fp32_groups[part.param_group_index]
    at = part.hp_fragment_address
    return Place(name, flat, part.lp_fragment_address.start, tuple(weight.shape), slice(at.start, at.start + at.numel))


def _in_stage3(engine: Any, name: str, weight: Any) -> Place | None:
    """The location of a weight in stage 3, whose parts have one size on all ranks, so that the last may be padding."""
    import torch.distributed as dist

    size = weight.ds_tensor.ds_numel
    start = dist.get_rank(weight.ds_process_group) * size
    length = min(size, weight.ds_numel - start)
    if length <= 0:
        return None
    if not _has_copy(engine, weight):
        part = weight.ds_tensor.detach().requires_grad_(weight.requires_grad)
        return Place(name, part, start, tuple(weight.ds_shape), slice(0, length))
    group, offset, _ = engine.optimizer.grad_position[engine.optimizer.get_param_id(weight)]
    flat = engine.optimizer.fp32_partitioned_groups_flat[group]
    return Place(name, flat, start, tuple(weight.ds_shape), slice(offset, offset + length))


def _has_copy(engine: Any, weight: Any) -> bool:
    """Whether the optimizer has a float32 copy of this rank's part of a weight; frozen weights have none."""
    if hasattr(weight, "ds_id"):
        return engine.optimizer.get_param_id(weight) in engine.optimizer.grad_position
    return getattr(weight, "_hp_mapping", None) is not None


def _gradient(engine: Any, place: Place, weight: Any) -> "torch.Tensor":
    """This rank's part of a gradient, between backward and step."""
    if hasattr(weight, "ds_id"):
        own = engine.optimizer.get_local_fp32_grad_for_param(weight)
    else:
        own = weight._hp_mapping.get_lp_grad_fragment(weight._index_in_param_group)
    part: torch.Tensor = own.detach().flatten()[: place.now().numel()].float().cpu().clone()
    return part


def _is_behind(place: Place, engine: Any) -> bool:
    """Whether the model's values differ from the optimizer's float32 copy, which the next step writes over them."""
    weight = engine.module.get_parameter(place.name)
    if not _has_copy(engine, weight):
        return False
    kept = place.now()
    part = weight.ds_tensor if hasattr(weight, "ds_id") else weight.detach().flatten()[place.start :]
    return not part.detach()[: kept.numel()].cpu().equal(kept.to(part.dtype))


@contextlib.contextmanager
def _gather_weights(model: Any) -> Iterator[bool]:
    """Gathers the weights of a model that was created under ZeRO-3, unless it is too large to be copied."""
    split = [weight for weight in model.parameters() if copies.is_split(weight)]
    size_bytes = sum(weight.ds_numel * weight.element_size() for weight in split)
    if not split or size_bytes > copies.MOST_BYTES:
        yield False
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(split):
        yield True
