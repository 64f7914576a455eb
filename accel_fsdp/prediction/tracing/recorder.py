"""Records tapes: runs one block, or what is before or after the blocks, on fake tensors and fits its sizes exactly.

No memory and no GPU are needed; `cuda_emulation.py` describes how CUDA's choices are reproduced. Rows have no padding,
so full attention needs no mask, as transformers skips it then. Mixtures of experts run transformers' own default, which
has static shapes (`grouped_mm`, integrations/moe.py).
"""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_fsdp.models import build
from accel_fsdp.prediction.memory import At, ModelShape, Variant
from accel_fsdp.prediction.tracing.cuda_emulation import CudaRules, Watch
from accel_fsdp.prediction.tracing.model_shape import blocks_of, shape_of, text_layers
from accel_fsdp.prediction.tracing.run import RecordedRun, quiet, record_run

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STEP = 16
"""Lengths are multiples of this: CUDA's efficient attention copies masks whose rows are not."""


class _FirstBlockReached(BaseException):
    """Raised at the first block; a BaseException, so that the model's code doesn't catch it."""


class _Stage(nn.Module):
    """Replaces a block, and passes its arguments to a callback."""

    def __init__(self, layer: nn.Module, on_call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        own_names = vars(self).keys()
        plain = {k: v for k, v in vars(layer).items() if isinstance(v, str | int | float) and k not in own_names}
        self.__dict__.update(plain)  # models ask a layer for its kind of attention
        self._on_call = on_call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_call(args, kwargs)


class Recorder:
    """A model on fake tensors in one variant, with one block of each kind."""

    def __init__(self, name: str, config: Any, variant: Variant) -> None:
        self.variant = variant
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        settings = copy.deepcopy(config)
        settings.use_cache = False
        settings.get_text_config().pad_token_id = 0  # classifiers look for the last token before the padding
        with quiet():
            model = _built(name, settings, variant)
            self.shape: ModelShape = shape_of(name, settings, model)
            layers, places = blocks_of(model), text_layers(model)
            self._firsts = [block.layers[0] - places[0] for block in self.shape.blocks]  # negative or beyond: untraced
            self._text = [first for n, first in enumerate(self._firsts) if n not in self.shape.untraced]
            self._metas = [layers[index][1] for index in places[: max(self._text) + 1]]
            self._places = [layers[index][0] for index in places]
            self._axes = _axes_of(model, variant)
            parent, self._list, _ = layers[places[0]][0].rsplit(".", 2)
            del layers
            self._lists = model.get_submodule(parent)._modules
            self._lists[self._list] = nn.ModuleList()
            _use_fused_kernels(model, variant)
            if self._axes:
                self._axes.divide(model)
            with self._mode:
                self.model = model.to_empty(device="cpu").train()
                if variant.method != "full":
                    model.requires_grad_(False)
        self._layers: dict[tuple[int, int], nn.Module] = {}
        self._width: dict[int, int] = {}
        self._dtype: dict[int, torch.dtype] = {}
        reached = self._layers_for_text()
        skipped = (n for n, first in enumerate(self._firsts) if first in set(self._text) - reached)
        self.shape = replace(self.shape, untraced=tuple(sorted({*self.shape.untraced, *skipped})))
        self._text = [index for index in self._text if index in reached]

    def _layers_for_text(self) -> set[int]:
        """The layers that run for a row without images; layers that attend only to images are skipped."""
        reached: set[int] = set()

        def seen(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            reached.add(index)
            return _split(args, kwargs)[0]

        if self.shape.language:
            self._replace_blocks(max(self._text) + 1, seen)
            with self._mode, CudaRules(), self._enter_contexts(), torch.no_grad(), quiet():
                self._forward(self._ids(At(1, STEP, 0)))
        return reached or set(self._text)

    def _layer(self, index: int, rank: int) -> nn.Module:
        """A block with its adapters of one rank."""
        if (index, rank) not in self._layers:
            layer = copy.deepcopy(self._metas[index])
            _adapt(layer, self.variant, rank, self.shape.division.expert_targets)
            if self._axes:
                self._axes.divide(layer, self._places[index])
            with self._mode, quiet():
                self._layers[index, rank] = layer.to_empty(device="cpu").train()
        return self._layers[index, rank]

    def _replace_blocks(self, count: int, on_call: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        def stage_for(index: int) -> _Stage:
            return _Stage(self._metas[index], lambda args, kwargs: on_call(index, args, kwargs))

        self._lists[self._list] = nn.ModuleList([stage_for(index) for index in range(count)])

    def _as_block(self, index: int, hidden: Tensor) -> Any:
        """The hidden states as a block returns them: some return a tuple."""
        width = self._width.get(index, 0)
        return (hidden, *([None] * (width - 1))) if width else hidden

    def calls(self, at: At) -> dict[int, tuple[Tensor, tuple[Any, ...], dict[str, Any]]]:
        """The arguments with which the model calls the first block of each kind, by index: input, other arguments.

        The input has the dtype of the previous block's output, which may differ from the embedding's.
        """
        calls = {}
        layers = {index: self._layer(index, at.rank) for index in self._text if index not in self._width}

        def seen(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, others, kwarg_tensors = _split(args, kwargs)
            if index in layers:
                result = layers[index](hidden, *others, **kwarg_tensors)
                self._width[index] = len(result) if isinstance(result, tuple) else 0
                self._dtype[index] = (result[0] if isinstance(result, tuple) else result).dtype
            hidden = hidden.to(self._dtype.get(index, hidden.dtype))
            calls[index] = (hidden, others, kwarg_tensors)
            return self._as_block(index, hidden)

        self._replace_blocks(max(self._text) + 1, seen)
        with self._mode, CudaRules(), self._enter_contexts(), torch.no_grad(), quiet():
            self._forward(self._ids(at))
        return calls

    def block(self, block: int, at: At) -> RecordedRun:
        index = self._firsts[block]
        layer = self._layer(index, at.rank)
        hidden, args, kwargs = self.calls(at)[index]

        def call(watch: Watch, make_input: Callable[[], Tensor]) -> Any:
            watch.start()
            return layer(make_input(), *args, **kwargs)

        return self._run(call, hidden, layer, twice=True)

    def masked(self, block: int, at: At) -> bool:
        """Whether the model hands a mask to a kind of block at this length."""
        _, args, kwargs = self.calls(at)[self._firsts[block]]
        masks = [kwargs.get("attention_mask"), *(a for a in args if isinstance(a, Tensor) and a.dim() == 4)]
        return any(isinstance(mask, Tensor) for mask in masks)

    def embedding(self, at: At) -> RecordedRun:
        """Runs from the token ids to the first block."""
        first_input: list[Any] = []
        ids = self._ids(at)

        def seen(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            first_input.extend(_split(args, kwargs))
            raise _FirstBlockReached

        def call(watch: Watch, make_input: Callable[[], Tensor]) -> Any:
            self._replace_blocks(1, seen)
            watch.start()
            try:
                self._forward(ids)
            except _FirstBlockReached as reached:
                reached.__traceback__ = None  # its frames hold the model's temporaries
            result = tuple(first_input)
            first_input.clear()
            return result

        return self._run(call, None, self.model)

    def head(self, at: At) -> RecordedRun:
        """Runs from the last block's output to the loss as Trainer asks for it, the outputs dropped before backward."""
        hidden = self.calls(at)[self._text[0]][0]
        ids = self._ids(at)
        options = self._labels(at, ids)

        def call(watch: Watch, make_input: Callable[[], Tensor]) -> Any:
            def seen(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                watch.start()
                return self._as_block(0, make_input())

            self._replace_blocks(1, seen)
            output = self._forward(ids, **options)
            if self.variant.autocast:
                # Accelerate's `convert_outputs_to_fp32` wraps the forward wherever it runs under autocast
                output.logits.float()
            return output.loss

        return self._run(call, hidden, self.model)

    def _labels(self, at: At, ids: Tensor) -> dict[str, Any]:
        """Trainer's inputs besides the token ids: a label per token, or per row for a classifier."""
        with self._mode:
            if type(self.model).__name__.endswith("ForSequenceClassification"):
                return {"labels": torch.zeros(at.rows, dtype=torch.long)}
            return {"labels": ids, "num_items_in_batch": torch.ones((), dtype=torch.long)}

    def _forward(self, ids: Tensor, **options: Any) -> Any:
        """Runs the model around its stages.

        Without a cache transformers looks for packed rows in the positions (masking_utils.py,
        find_packed_sequence_indices). Their values don't exist here, so that it takes all rows for packed, and masks
        them: right for the variant "packed" alone.
        """
        from transformers import DynamicCache

        # the router's loss is small, and reads what no block returns
        if getattr(self.model.config, "output_router_logits", False):
            options["output_router_logits"] = False
        cache = None if self.variant.attention == "packed" else DynamicCache()
        return self.model(input_ids=ids, past_key_values=cache, use_cache=False, **options)

    def _ids(self, at: At) -> Tensor:
        with self._mode:
            return torch.zeros(at.rows, at.length, dtype=torch.long)

    @contextmanager
    def _enter_contexts(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.variant.liger:
                from accel_fsdp.prediction.tracing.fused_kernels import rotary_in_place

                stack.enter_context(rotary_in_place(self._metas))
            yield stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.variant.autocast))

    def _run(
        self,
        call: Callable[[Watch, Callable[[], Tensor]], Any],
        like: Tensor | None,
        module: nn.Module,
        twice: bool = False,
    ) -> RecordedRun:
        """Records a forward and its backward; `call` starts the watch and asks for an input like `like`."""
        with self._mode:
            return record_run(call, like, module, self._enter_contexts, twice)


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden states and the other arguments of a block's call, without the cache."""
    from transformers import Cache

    rest: dict[str, Any] = {key: None if isinstance(value, Cache) else value for key, value in kwargs.items()}
    hidden: Tensor = args[0] if args else rest.pop("hidden_states")
    return hidden, tuple(None if isinstance(value, Cache) else value for value in args[1:]), rest


def _axes_of(model: Any, variant: Variant) -> Any:
    if variant.tensor == variant.experts == 1:
        return None
    from accel_fsdp.prediction.tracing.axes import Axes  # it needs a process group

    return Axes(model, variant)


def _adapt(layer: nn.Module, variant: Variant, rank: int, frozen: Collection[str]) -> None:
    with quiet(), torch.device("meta"):
        if variant.method != "full":
            # PEFT and bitsandbytes take two seconds to import
            from accel_fsdp.prediction.tracing.lora_layers import adapt

            adapt(layer, variant, rank, frozen)
        _use_fused_kernels(layer, variant)


def _use_fused_kernels(module: nn.Module, variant: Variant) -> None:
    if variant.liger:
        from accel_fsdp.prediction.tracing.fused_kernels import fuse

        fuse(module)


def _built(name: str, config: Any, variant: Variant) -> Any:
    dtype, attention = DTYPES[variant.weights], "eager" if variant.attention == "eager" else "sdpa"
    try:
        return build(name, copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
    except (ValueError, ImportError):  # the class has no such attention: its own choice is what training gets
        return build(name, config, dtype=dtype)
