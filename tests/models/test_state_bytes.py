"""How many bytes training keeps on disk, against the optimizers that Trainer makes and the files that it writes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter
from transformers import Trainer, TrainingArguments

from accel_fsdp.models import optimizers

BITSANDBYTES = (
    *("adamw_8bit", "adamw_bnb_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
SHAPES = ((64, 48), (96, 80), (4096,), (7,), (3, 40, 50))
"""A small matrix and a large one, vectors, and the stacked matrices of experts."""
MOST_MORE = 0.02
"""Of the moments: what 8 bits take for the scale of each block."""
QUANTISATION_MAP = 256 * 4
"""Bytes that each moment of 8 bits has beside, of whatever size."""


def arguments(folder: Path, optim: str, **more: object) -> TrainingArguments:
    return TrainingArguments(str(folder), optim=optim, use_cpu=True, report_to="none", **more)  # type: ignore[arg-type]


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (
            tensor for tensor in state.values() if torch.is_tensor(tensor) and tensor.numel() > 1
        )  # not the step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adagrad", "rmsprop", *BITSANDBYTES]
)
def test_an_optimizer_keeps_what_is_counted(optim: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if optim in BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim))
    for shape in SHAPES:
        weight = Parameter(torch.ones(shape, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        optimizer = kind([weight], **options)
        optimizer.step()
        tensors = list(state_tensors(optimizer))
        maps = sum(finding.numel() == QUANTISATION_MAP // 4 for finding in tensors) if optim.endswith("_8bit") else 0
        kept = sum(finding.numel() * finding.element_size() for finding in tensors) - maps * QUANTISATION_MAP
        counted = optimizers.tensor_bytes(optim, shape, weight.element_size())
        assert counted <= kept <= counted * (1 + MOST_MORE), shape
        if weight.dim() > 1 and weight.numel() >= optimizers.EIGHT_BIT_FROM and optim != "adafactor":
            assert counted == weight.numel() * optimizers.element_bytes(optim, weight.element_size())
