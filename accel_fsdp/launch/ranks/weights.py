"""What becomes of a rank's weights: with which values it began, how many steps its optimizers took, if any changed.

Sums and checksums alone: no rank sends another one anything, so a script can't hang of it.
"""

import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_fsdp.launch.ranks import events, script
from accel_fsdp.launch.ranks.holding import FLAT, user_name
from accel_fsdp.launch.ranks.observing import Observation
from accel_fsdp.library_internals import Internal

if TYPE_CHECKING:
    import torch
    from torch import nn

HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
SHARDED = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
OPTIMIZERS = Observation(
    "optimizers that are made", (Internal("torch.optim:Optimizer.__init__", "self params defaults"),)
)
FSDP1 = Observation(
    "weights before FSDP1 shards them",
    (
        Internal(f"{HANDLE}.shard", "self"),
        Internal(f"{HANDLE}.uses_sharded_strategy"),
        Internal(f"{FLAT}._numels_with_padding"),
        Internal(f"{FLAT}._is_padding_mask"),
    ),
)
FSDP2 = Observation("weights before FSDP2 shards them", (Internal(f"{SHARDED}._init_sharded_param", "self param *"),))
RELIES_ON = tuple(internal for one in (OPTIMIZERS, FSDP1, FSDP2) for internal in one.relies_on)


@dataclass(frozen=True)
class _Begun:
    """What FSDP sharded together: sum and norm of each weight before, and the checksum of this rank's part after it."""

    of: Callable[[], Any]
    whole: Sequence[tuple[float, float]]
    part: int


class Weights:
    """Counts what optimizers do, and remembers what their weights were."""

    def __init__(self) -> None:
        self.begun: list[_Begun] = []
        self.optimizers = self.backwards = self.steps = self.sharded_steps = 0
        self.first = 0
        self.has_told = False
        self.backward_line = self.sharded_at = ""
        self.made_at: dict[int, str] = {}

    def install(self) -> None:
        """Looks at each weight at the last moment before FSDP shards it: after FSDP1 has sent it to all ranks."""
        if OPTIMIZERS.is_possible:
            self._watch_optimizers()
        if FSDP1.is_possible:
            self._watch_fsdp1()
        if FSDP2.is_possible:
            self._watch_fsdp2()

    def _watch_optimizers(self) -> None:
        from torch.optim import Optimizer

        original = Optimizer.__init__

        @functools.wraps(original)
        def made(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self.optimizers += 1
            self.made_at[id(args[0])] = script.line_of_stack(sys._getframe())

        Optimizer.__init__ = made  # type: ignore[method-assign]

    def _watch_fsdp1(self) -> None:
        from torch.distributed.fsdp._flat_param import FlatParamHandle

        original = FlatParamHandle.shard

        @functools.wraps(original)
        def shard(handle: Any) -> None:
            whole = _sums_of_flat(handle.flat_param)
            original(handle)  # type: ignore[no-untyped-call]
            if whole:
                self.sharded_at = self.sharded_at or script.line_of_stack(sys._getframe())
                self.begun.append(_Begun(weakref.ref(handle), whole, checksum(_part(handle))))

        FlatParamHandle.shard = shard  # type: ignore[method-assign]

    def _watch_fsdp2(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

        original = FSDPParam._init_sharded_param

        @functools.wraps(original)
        def init(one: Any, param: Any, *args: Any, **kwargs: Any) -> None:
            whole = [_sums(param)] if _is_plain(param) else []
            original(one, param, *args, **kwargs)
            if whole:
                self.sharded_at = self.sharded_at or script.line_of_stack(sys._getframe())
                self.begun.append(_Begun(weakref.ref(one), whole, checksum(_part(one))))

        FSDPParam._init_sharded_param = init  # type: ignore[method-assign, assignment]

    def ran_backward(self, models: Iterable["nn.Module"]) -> None:
        """After a backward of the script or of a trainer; `models` are the outermost that ran."""
        if self.backwards == 0:
            self.backward_line = script.line_of_stack(sys._getframe(2))
            self._tell_begun(models)
            self.first = _all(models) if self.steps == 0 else 0
        self.backwards += 1

    def steps_now(self, optimizer: Any, models: Iterable["nn.Module"]) -> None:
        """Before a step of an optimizer."""
        if self.steps == 0:
            events.tell("first-step", line=script.line_of_stack(sys._getframe(2)))
            self._tell_begun(models)
        self.steps += 1
        self.sharded_steps += any(is_sharded(one) for group in optimizer.param_groups for one in group["params"])

    def tell_end(self, models: Iterable["nn.Module"]) -> None:
        """At the end of the script: `models` are those that it still has, as long as no optimizer has stepped."""
        kept = self.steps == 0 and self.first != 0 and self.first == _all(models)
        events.tell(
            "trained",
            optimizers=self.optimizers,
            backwards=self.backwards,
            steps=self.steps,
            sharded_steps=self.sharded_steps,
            kept=kept,
            backward_line=self.backward_line,
        )

    def shard_storages(self) -> set[int]:
        """Where FSDP1 keeps this rank's parts, which its views with the names of whole weights show."""
        handles = [one for begun in self.begun if hasattr(one := begun.of(), "flat_param")]
        flats = [one.flat_param for one in handles if one.uses_sharded_strategy]
        return {getattr(flat, "_local_shard", flat).untyped_storage().data_ptr() for flat in flats} - {0}

    def _tell_begun(self, models: Iterable["nn.Module"]) -> None:
        """Those whose part is still what it was when it was sharded: others were loaded or sent since then."""
        if self.has_told:
            return
        self.has_told = True
        names = {id(module): user_name(path) for model in models for path, module in model.named_modules()}
        found = []
        for begun in self.begun:
            one = begun.of()
            if one is None:
                continue
            same = begun.part == checksum(_part(one))
            of = [".".join(filter(None, (names.get(id(module), ""), name))) for module, name in _own(one)]
            weights = [[name, whole if same else None] for name, whole in zip(of, begun.whole, strict=False)]
            found.append({"ranks": _ranks(one), "weights": weights})
        if found:
            events.tell("begun", units=found, line=self.sharded_at)
        self.begun = [one for one in self.begun if hasattr(one.of(), "flat_param")]


def checksum(values: "torch.Tensor") -> int:
    """The same in float32 and in what was cast to it. Of a copy: NumPy would pin a storage that FSDP1 resizes."""
    import torch

    plain = values.detach().as_subclass(torch.Tensor)
    plain = plain.to("cpu", torch.float32 if plain.is_floating_point() else plain.dtype, copy=True)
    return zlib.crc32(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def is_sharded(parameter: Any) -> bool:
    """Whether FSDP keeps a part of it on each rank."""
    from torch.distributed.fsdp._flat_param import FlatParameter
    from torch.distributed.tensor import DTensor

    kinds = (DTensor, FlatParameter)
    return isinstance(parameter, kinds) or bool(getattr(parameter, "_fsdp_flattened", False))


def _is_plain(parameter: Any) -> bool:
    """Neither quantized, nor parted already, nor without values."""
    import torch

    return type(parameter) in (torch.Tensor, torch.nn.Parameter) and not parameter.is_meta


def _sums(values: "torch.Tensor") -> tuple[float, float]:
    """Sum and norm, which rounding leaves alone. Other random values change the sum by about as much as the norm is."""
    import torch

    plain = values.detach().as_subclass(torch.Tensor)
    if plain.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):  # packed ones
        return 0.0, 0.0
    return float(plain.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(plain, dtype=torch.float64))


def _sums_of_flat(flat: Any) -> list[tuple[float, float]]:
    """Of each weight that FSDP1 has laid into a flat one."""
    if flat.is_meta:
        return []
    views = flat.detach().split(flat._numels_with_padding)
    return [_sums(one) for one, padding in zip(views, flat._is_padding_mask, strict=True) if not padding]


def _part(one: Any) -> Any:
    """This rank's, of what either version of FSDP calls so."""
    if hasattr(one, "flat_param"):
        return getattr(one.flat_param, "_local_shard", one.flat_param)
    return one.sharded_param.to_local()


def _own(one: Any) -> list[tuple["nn.Module", str]]:
    """The module and the name of each weight."""
    if hasattr(one, "flat_param"):
        return [(info.module, info.param_name) for info in one.flat_param._param_infos]
    return [(one._module_info.module, one._module_info.param_name)]


def _ranks(one: Any) -> list[int]:
    """Those that must have had the same weights."""
    import torch.distributed as dist

    if hasattr(one, "flat_param"):
        return dist.get_process_group_ranks(one.process_group)
    return sorted(one.mesh_info.mesh.mesh.flatten().tolist())


def _all(models: Iterable["nn.Module"]) -> int:
    """One checksum of what is trained on this rank; 0 where that is nothing."""
    from torch.distributed.tensor import DTensor

    total = 0
    for model in models:
        for one in model.parameters():
            if one.requires_grad and not one.is_meta:
                local = one.to_local() if isinstance(one, DTensor) else one
                total = zlib.crc32(checksum(local).to_bytes(4, "little"), total)
    return total


def shards_in(saved: Any, storages: set[int]) -> tuple[int, int]:
    """How many tensors of what is saved are a rank's part of one, and how many it has; looks into dicts and lists."""
    import torch

    if isinstance(saved, torch.nn.Module):
        saved = list(saved.parameters())
    if isinstance(saved, Mapping):
        saved = list(saved.values())
    if isinstance(saved, list | tuple):
        found = [shards_in(one, storages) for one in saved]
        return sum(parts for parts, _ in found), sum(several for _, several in found)
    if type(saved).__name__ == "ShardedTensor":
        return 1, 1
    return (int(_is_part(saved, storages)), 1) if isinstance(saved, torch.Tensor) else (0, 0)


def _is_part(tensor: Any, storages: set[int]) -> bool:
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return any(
            not place.is_replicate() and tensor.device_mesh.size(dimension) > 1
            for dimension, place in enumerate(tensor.placements)
        )
    return not tensor.is_meta and tensor.untyped_storage().data_ptr() in storages
