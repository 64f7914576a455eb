"""Observes a rank's weights: their first values, the number of optimizer steps, and whether any weight changed.

It computes sums and checksums on each rank, without communication, so it can't hang a script.
"""

import functools
import math
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, parts, script
from accel_fsdp.ranks.holding import FLAT, user_name
from accel_fsdp.ranks.observing import Observation, after, guarded

if TYPE_CHECKING:
    import torch
    from torch import nn

HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
SHARDED = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
SETTINGS = ("lr", "weight_decay", "betas", "momentum")
"""The settings with which an optimizer updates a group of parameters; they must be equal on all ranks."""
OPTIMIZERS = Observation(
    "optimizers that are made",
    Internal("torch.optim:Optimizer.__init__", "self params defaults"),
    Internal("torch.optim:Optimizer.add_param_group", "self param_group"),
    Internal(f"{FLAT}._shapes"),
)
FSDP1 = Observation(
    "weights before FSDP1 shards them",
    Internal(f"{HANDLE}.shard", "self"),
    Internal(f"{HANDLE}.uses_sharded_strategy"),
    Internal(f"{FLAT}._numels_with_padding"),
    Internal(f"{FLAT}._is_padding_mask"),
)
FSDP2 = Observation("weights before FSDP2 shards them", Internal(f"{SHARDED}._init_sharded_param", "self param *"))
RELIES_ON = tuple(internal for observation in (OPTIMIZERS, FSDP1, FSDP2) for internal in observation.relies_on)


@dataclass(frozen=True)
class _Begun:
    """A unit of FSDP: sum and norm of each weight before sharding, and the checksum of this rank's part after it."""

    of: Callable[[], Any]
    whole: Sequence[tuple[float, float]]
    part: int


class ObservedWeights:
    """Counts backward passes and steps of optimizers, and records the weights' first values."""

    def __init__(self) -> None:
        self.begun: list[_Begun] = []
        self.optimizers = self.backwards = self.steps = self.common_steps = 0
        self.first = 0
        self.has_reported = False
        self.backward_line = self.sharded_at = self.added_at = ""
        self.made_at: dict[int, str] = {}
        self.stepped: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        """Reads each weight at the last moment before FSDP shards it: after FSDP1 has sent it to all ranks."""
        if OPTIMIZERS.is_possible:
            from torch.optim import Optimizer

            after(Optimizer, "__init__", self._count_optimizer)
            after(Optimizer, "add_param_group", self._note_group)
        if FSDP1.is_possible:
            from torch.distributed.fsdp._flat_param import FlatParamHandle

            self._watch_sharding(FlatParamHandle, "shard", lambda handle: _sums_of_flat(handle.flat_param))
        if FSDP2.is_possible:
            from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

            self._watch_sharding(FSDPParam, "_init_sharded_param", lambda _, param, *__: _sums_of_plain(param))

    def _count_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.optimizers += 1
        self.made_at[id(optimizer)] = script.line_of_stack(sys._getframe(2))
        self._report_flat_groups(optimizer, self.made_at[id(optimizer)])

    def _note_group(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if id(optimizer) in self.made_at:  # not in its `__init__`
            self.added_at = script.line_of_stack(sys._getframe(2))

    def _report_flat_groups(self, optimizer: Any, line: str) -> None:
        """Reports an optimizer whose weights all have one decay, as FSDP1 took the dimensions by which they differ.

        A group without decay may be meant, so the script's lines above must ask for dimensions.
        """
        groups, default = optimizer.param_groups, optimizer.defaults.get("weight_decay")
        weights = [weight for group in groups for weight in group["params"]]
        decays = {group.get("weight_decay") for group in groups if group["params"]}
        if len(decays) > 1 or any(weight.dim() > 1 or not is_sharded(weight) for weight in weights):
            return
        flats = [begun.of().flat_param for begun in self.begun if hasattr(begun.of(), "flat_param")]
        dimensions = {len(shape) for flat in flats for shape in flat._shapes}
        asked_at = next((at for word in (".dim()", ".ndim") if (at := script.line_above(line, word)) != line), "")
        others = {group.get("weight_decay") for group in groups} | {default}
        is_meant = decays != {0.0} and len(groups) == 1
        if asked_at and len(dimensions) > 1 and others != decays and not is_meant:
            events.report("flat-groups", count=len(weights), decay=decays.pop(), line=asked_at)

    def _watch_sharding(self, owner: Any, name: str, sums: Callable[..., Sequence[tuple[float, float]]]) -> None:
        """Records the weights of each unit before a method shards them, and this rank's part afterwards."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def shard(unit: Any, *args: Any, **kwargs: Any) -> None:
            whole = guarded(sums)(unit, *args)
            original(unit, *args, **kwargs)
            if whole:
                guarded(self._note_sharding)(unit, whole)

        setattr(owner, name, shard)

    def _note_sharding(self, unit: Any, whole: Sequence[tuple[float, float]]) -> None:
        self.sharded_at = self.sharded_at or script.line_of_stack(sys._getframe())
        self.begun.append(_Begun(weakref.ref(unit), whole, checksum(_local_part(unit))))

    def ran_backward(self, models: Iterable["nn.Module"]) -> None:
        """Called after each backward pass; `models` are the outermost that ran."""
        if self.backwards == 0:
            self.backward_line = script.line_of_stack(sys._getframe(2))
            self._report_begun(models)
            self.first = _checksum_of_all(models) if self.steps == 0 else 0
        self.backwards += 1

    def before_step(
        self, optimizer: Any, models: Iterable["nn.Module"], moved_at: str, shared: Mapping[str, Any]
    ) -> None:
        """Called before each step of an optimizer; `moved_at` is the line that moved its schedule last.

        `shared` describes the step if all ranks have copies of its weights.
        """
        if self.steps == 0:
            events.report("first-step", line=script.line_of_stack(sys._getframe(2)))
            self._report_begun(models)
        self.steps += 1
        self.stepped.add(optimizer)
        if shared or any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
            self.common_steps += 1
            self._report_settings(optimizer, moved_at, shared)

    def _report_settings(self, optimizer: Any, moved_at: str, shared: Mapping[str, Any]) -> None:
        """Reports the settings with which all ranks must update their shards or copies."""
        groups = [
            {name: _numbers_in(group[name]) for name in SETTINGS if name in group} for group in optimizer.param_groups
        ]
        line = self.made_at.get(id(optimizer), "")
        events.report("settings", step=self.common_steps, groups=groups, line=line, moved_at=moved_at, **shared)

    def report_end(self, models: Iterable["nn.Module"]) -> None:
        """Called at the end of the script; `models` are those that it still has, if no optimizer has stepped."""
        is_unchanged = self.steps == 0 and self.first != 0 and self.first == _checksum_of_all(models)
        events.report(
            "trained",
            optimizers=self.optimizers,
            backwards=self.backwards,
            steps=self.steps,
            common_steps=self.common_steps,
            kept=is_unchanged,
            backward_line=self.backward_line,
            not_numbers=self._not_numbers(),
            hidden_at=script.line_above(self.backward_line, "nan_to_num"),
        )

    def _not_numbers(self) -> int:
        """The weights of which this rank holds NaN, of those that an optimizer has updated."""
        groups = [group for optimizer in self.stepped for group in optimizer.param_groups]
        tensors = [parts.local(weight) for group in groups for weight in group["params"] if not weight.is_meta]
        return sum(math.isnan(sums(weight)[0]) for weight in tensors)

    def shard_storages(self) -> set[int]:
        """The addresses of FSDP1's shards on this rank, and of the optimizer's states of them.

        Its views with the names of whole weights point there.
        """
        handles = [handle for unit in self.begun if hasattr(handle := unit.of(), "flat_param")]
        flats = [handle.flat_param for handle in handles if handle.uses_sharded_strategy]
        shards = [getattr(flat, "_local_shard", flat) for flat in flats]
        optimizers = self.stepped if flats else ()
        states = [(p, state) for optimizer in optimizers for p, state in optimizer.state.items() if is_sharded(p)]
        shards += [v for p, state in states for v in state.values() if getattr(v, "shape", None) == p.shape and v.dim()]
        return {parts.local(shard).untyped_storage().data_ptr() for shard in shards} - {0}

    def _report_begun(self, models: Iterable["nn.Module"]) -> None:
        """Reports the first values of all units; None for a unit whose part was loaded or sent after sharding."""
        if self.has_reported:
            return
        self.has_reported = True
        names = {id(module): user_name(path) for model in models for path, module in model.named_modules()}
        units = []
        for begun in self.begun:
            sharded = begun.of()
            if sharded is None:
                continue
            is_same = begun.part == checksum(_local_part(sharded))
            own_names = [".".join(filter(None, (names.get(id(module), ""), name))) for module, name in _params(sharded)]
            weights = [[name, whole if is_same else None] for name, whole in zip(own_names, begun.whole, strict=False)]
            units.append({"ranks": _ranks_of_unit(sharded), "weights": weights})
        if units:
            events.report("begun", units=units, line=self.sharded_at)
        self.begun = [sharded for sharded in self.begun if hasattr(sharded.of(), "flat_param")]


def _numbers_in(value: Any) -> list[float]:
    """The numbers in an optimizer's setting, without values such as None."""
    items = value if isinstance(value, tuple | list) else [value]
    return [float(number) for number in items if isinstance(number, int | float) or hasattr(number, "item")]


def checksum(values: "torch.Tensor") -> int:
    """A checksum unchanged by a cast to float32. It reads a copy: NumPy would pin a storage that FSDP1 resizes."""
    import torch

    plain = values.detach().as_subclass(torch.Tensor)
    plain = plain.to("cpu", torch.float32 if plain.is_floating_point() else plain.dtype, copy=True)
    return zlib.crc32(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def is_sharded(parameter: Any) -> bool:
    """Whether FSDP keeps only a part of a parameter on each rank."""
    from torch.distributed.fsdp._flat_param import FlatParameter
    from torch.distributed.tensor import DTensor

    kinds = (DTensor, FlatParameter)
    return isinstance(parameter, kinds) or bool(getattr(parameter, "_fsdp_flattened", False))


def _sums_of_plain(parameter: Any) -> list[tuple[float, float]]:
    """Sum and norm of a weight; empty if it is quantized or sharded, or has no values."""
    import torch

    is_plain = type(parameter) in (torch.Tensor, torch.nn.Parameter) and not parameter.is_meta
    return [sums(parameter)] if is_plain else []


def sums(values: "torch.Tensor") -> tuple[float, float]:
    """The sum and the norm. Rounding hardly changes them; other random values change the sum by about the norm."""
    import torch

    plain = values.detach().as_subclass(torch.Tensor)
    if plain.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):  # packed ones
        return 0.0, 0.0
    return float(plain.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(plain, dtype=torch.float64))


def _sums_of_flat(flat: Any) -> list[tuple[float, float]]:
    """Sum and norm of each weight in one of FSDP1's flat parameters."""
    if flat.is_meta:
        return []
    views = flat.detach().split(flat._numels_with_padding)
    return [sums(view) for view, padding in zip(views, flat._is_padding_mask, strict=True) if not padding]


def _local_part(unit: Any) -> Any:
    """This rank's part of a unit of FSDP1 or FSDP2."""
    if hasattr(unit, "flat_param"):
        return getattr(unit.flat_param, "_local_shard", unit.flat_param)
    return unit.sharded_param.to_local()


def _params(unit: Any) -> list[tuple["nn.Module", str]]:
    """The module and the name of each weight of a unit."""
    if hasattr(unit, "flat_param"):
        return [(info.module, info.param_name) for info in unit.flat_param._param_infos]
    return [(unit._module_info.module, unit._module_info.param_name)]


def _ranks_of_unit(unit: Any) -> list[int]:
    """The ranks that share the unit, which must begin with the same weights."""
    import torch.distributed as dist

    if hasattr(unit, "flat_param"):
        return dist.get_process_group_ranks(unit.process_group)
    return sorted(unit.mesh_info.mesh.mesh.flatten().tolist())


def _checksum_of_all(models: Iterable["nn.Module"]) -> int:
    """One checksum of all trained weights on this rank; 0 if there are none."""
    total = 0
    for model in models:
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.is_meta:
                total = zlib.crc32(checksum(parts.local(parameter)).to_bytes(4, "little"), total)
    return total
