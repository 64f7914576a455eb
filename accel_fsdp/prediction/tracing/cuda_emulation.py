"""Records each allocation and release of a PyTorch run as on a CUDA device, without memory or GPU.

`Watch` records creations and releases of storages. `CudaRules` makes attention and autocast choose on fake CPU tensors
as on CUDA; a build without CUDA can't run backward on fake CUDA tensors (torch 2.13: no device guard).
"""

import itertools
import weakref
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_fsdp import library_internals
from accel_fsdp.library_internals import Internal

KERNELS = "torch:ops.aten._scaled_dot_product"
RELIES_ON = (
    Internal("torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__", "self func types args kwargs"),
    Internal("torch.utils._pytree:tree_leaves", "tree *"),
    Internal("torch._subclasses.fake_tensor:FakeTensorMode"),
    Internal(f"{KERNELS}_flash_attention.default"),
    Internal(f"{KERNELS}_flash_attention_backward.default"),
    Internal(f"{KERNELS}_efficient_attention.default"),
    Internal(f"{KERNELS}_efficient_attention_backward.default"),
    Internal(f"{KERNELS}_attention_math.default"),
    Internal("torch:_grouped_mm"),
)
library_internals.check(*RELIES_ON, why="what a model allocates is recorded with it")

LOW = (torch.bfloat16, torch.float16)
_ATEN = torch.ops.aten
_FLASH_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_EFFICIENT_BACKWARD = _ATEN._scaled_dot_product_efficient_attention_backward.default

FLOAT32_OPS = {
    *(F.layer_norm, F.group_norm, F.cross_entropy, F.nll_loss, F.mse_loss, F.softplus, F.cosine_similarity),
    *(torch.pow, Tensor.pow, Tensor.__pow__, torch.rsqrt, Tensor.rsqrt, torch.exp, Tensor.exp, torch.log, Tensor.log),
    *(torch.norm, Tensor.norm, torch.reciprocal, Tensor.reciprocal, torch.layer_norm),
}
"""Autocast's float32 list for CUDA as far as language models use it (aten/src/ATen/autocast_mode.h); CPU's differs."""
FLOAT32_RESULTS = {
    *(F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    *(torch.sum, Tensor.sum, torch.prod, Tensor.prod, torch.cumsum, Tensor.cumsum),
}
"""Autocast's list of operations that compute and return float32 without a given dtype, from the same place."""


class CudaRules(TorchFunctionMode):
    """Chooses attention kernels and, inside autocast, dtypes as CUDA does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout and (kwargs.get("training") or args[2:3] == (True,)):
            share = args[1] if len(args) > 1 else kwargs["p"]
            return torch.native_dropout(args[0], share, True)[0] if share else args[0]
        if func is torch._grouped_mm and args[0].dtype != torch.bfloat16:
            return _GroupedProduct.apply(args[0], args[1])  # type: ignore[no-untyped-call]
        if torch.is_autocast_enabled("cpu") and args and isinstance(args[0], Tensor) and args[0].dtype in LOW:
            if func in FLOAT32_OPS:
                args = tuple(a.float() if isinstance(a, Tensor) and a.dtype in LOW else a for a in args)
            elif func in FLOAT32_RESULTS and not any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
                kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


class _GroupedProduct(torch.autograd.Function):
    """`grouped_mm` in dtypes other than bfloat16, which work on GPUs although the shape function refuses them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Tensors that the operation allocates and saves."""
        ctx.save_for_backward(x, weight)
        return x.new_empty(x.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both gradients, the weight's only if it is trained."""
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that `scaled_dot_product_attention` takes on CUDA (sdp_utils.cpp): flash, efficient, else plain math.

    Flash needs 16 bits, no mask and heads up to 256 wide, with equal widths for keys and values, unlike DeepSeek's; the
    efficient one can't share key heads among query heads.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    width = query.shape[-1]
    if attn_mask is None and query.dtype in LOW and value.shape[-1] == width <= 256:
        padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value)]
        out: Tensor = _ATEN._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    if query.shape[1] == key.shape[1]:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        output: Tensor = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
        return output
    plain: Tensor = _ATEN._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return plain


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as floats, made again by every layer's attention, in rows of a multiple of 16 (attention.cpp)."""
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    width = bias.shape[-1]
    if width % 16:
        bias = F.pad(bias, (0, -width % 16))[..., :width]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class StorageEvent(NamedTuple):
    """The creation (`sign` 1) or release (-1) of a storage; `key` is the same for both, `by` the creating operation.

    `sign` 0 is the creation of a tensor that the module's caller holds: its input, and the gradient of its output.
    """

    sign: int
    size: int
    key: int
    by: str


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records creations and releases of storages from `start` on, without earlier storages.

    The workspaces inside CUDA's attention kernels, which no dispatcher sees, are added.
    """

    _blind = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[StorageEvent] = []
        self._keys: dict[int, int] = {}
        self._refs: list[weakref.ref[Any]] = []
        self._next = 0
        self._on = False
        self._sign = 1

    def start(self) -> None:
        self._on = True

    def stop(self) -> None:
        self._on = False

    @classmethod
    def blind(cls) -> AbstractContextManager[bool]:
        return patch.object(cls, "_blind", True)

    def from_caller(self) -> AbstractContextManager[int]:
        """Marks storages created in the block as the caller's."""
        return patch.object(self, "_sign", 0)

    def key_of(self, tensor: Tensor) -> int:
        """The key of a tensor's storage, -1 if its creation was not recorded."""
        return self._keys.get(tensor.untyped_storage()._cdata, -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again with the rank's part
        if not self._on or self._blind:
            return func(*args, **kwargs)
        if func is _WAIT:
            return args[0]  # the shape function makes another tensor
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self._keys and storage.nbytes():
                    self._record_creation(storage, str(func))
        if func in (_FLASH_BACKWARD, _EFFICIENT_BACKWARD):
            self._add_workspaces(func, args)
        return result

    def _record_creation(self, storage: torch.UntypedStorage, by: str) -> None:
        key, size, address = self._next, storage.nbytes(), storage._cdata
        self._next += 1
        self._keys[address] = key
        self.events.append(StorageEvent(self._sign, size, key, by))

        def died(_: object) -> None:
            self._keys.pop(address, None)
            if self._on:
                self.events.append(StorageEvent(-1, size, key, by))

        self._refs.append(weakref.ref(storage, died))

    def _add_workspaces(self, func: Any, args: tuple[Any, ...]) -> None:
        """Float32 sums of both kernels' backward, sizes before they are rounded to the kernels' tiles.

        flash_api.cpp (mha_bwd): dq_accum and softmax_d; dk and dv of each query head where key heads are shared.
        attention_backward.cu: an accumulator for the query's gradient if it has 16 bits, and delta.
        """
        query, key = args[1], args[2]
        rows, heads, length, width = query.shape
        float32 = torch.float32.itemsize
        sizes = [rows * heads * length * float32]
        if func is _FLASH_BACKWARD:
            sizes.append(rows * heads * length * -(-width // 32) * 32 * float32)
            if key.shape[1] != heads:
                sizes += [rows * heads * length * width * query.element_size()] * 2
        elif query.dtype in LOW:
            sizes.append(rows * heads * length * width * float32)
        created = [StorageEvent(1, size, self._next + number, str(func)) for number, size in enumerate(sizes)]
        self._next += len(created)
        self.events += [*created, *(StorageEvent(-1, event.size, event.key, event.by) for event in reversed(created))]


def summed_in_place(events: list[StorageEvent]) -> tuple[list[StorageEvent], dict[int, int]]:
    """Removes the second buffer of autograd's gradient sums, and returns which keys replace which.

    Autograd sums in place if the first term, or else the second, has no other owner, but not while a dispatch mode is
    on (`accumulate` in input_buffer.cpp). Such a sum is an addition after which one term is released at once.
    """
    summed: list[StorageEvent] = []
    replaced: dict[int, int] = {}
    skip: set[int] = set()
    for number, event in enumerate(events):
        if number in skip:
            continue
        if event.sign == 1 and event.by == "aten.add.Tensor":
            release = _released_after(events, number)
            if release is not None:
                skip.add(release)
                replaced[event.key] = replaced.get(events[release].key, events[release].key)
                continue
        summed.append(event._replace(key=replaced.get(event.key, event.key)))
    return summed, replaced


def _released_after(events: list[StorageEvent], created: int) -> int | None:
    for number in range(created + 1, len(events)):
        if events[number].sign >= 0:
            return None
        if events[number].size == events[created].size:
            return number
    return None


def in_order_of_creation(events: list[StorageEvent]) -> list[StorageEvent]:
    """Sorts each run of releases among the events; the peaks stay the same.

    Autocast's cache is a hash map: it releases 16-bit copies of adapters in any order if nothing keeps them for
    backward.
    """
    runs = itertools.groupby(events, key=lambda event: event.sign < 0)
    return [event for freed, run in runs for event in (sorted(run, key=lambda event: event.key) if freed else run)]


class Begin(torch.autograd.Function):
    """Gives a module an input that only the module holds, and catches the input's gradient."""

    @staticmethod
    def forward(ctx: Any, switch: Tensor, watch: Watch, like: Tensor, caught: list[Tensor]) -> Tensor:
        """A fresh tensor of the shape and dtype of `like`, which requires a gradient because `switch` does."""
        ctx.caught = caught
        with watch.from_caller():
            return torch.empty(like.shape, dtype=like.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.caught.extend(grads)
        return None, None, None, None


class End(torch.autograd.Function):
    """Ends a module with a gradient that has no other owner, as the next module's backward would give it.

    Autograd can't reuse a gradient that Python holds, which would look like memory that training doesn't take.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, watch: Watch) -> Tensor:
        """A scalar that depends on `out`."""
        ctx.like, ctx.watch = (out.shape, out.dtype), watch
        watch.stop()
        loss = out.new_empty(())
        watch.start()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with ctx.watch.from_caller():
            return torch.empty(ctx.like[0], dtype=ctx.like[1]), None
