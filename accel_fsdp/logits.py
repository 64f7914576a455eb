"""An export against its checkpoint, loaded by the library that wrote it: the same logits for the same tokens.

This route shares no code with the export. It holds two models in memory, and runs in the process of `describing`, after
the export has read all of the checkpoint's pickles with its own unpicklers and found nothing but tensors in them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.adapters import clean_name
from accel_fsdp.checkpoint import Found
from accel_fsdp.facts import model_class, read_config
from accel_fsdp.papers import Papers
from accel_fsdp.sources import MODEL_KEYS

if TYPE_CHECKING:
    import torch
    from torch import nn

TOKENS = 16


def difference(folder: Path, found: Found, papers: Papers) -> tuple[float, float]:
    """The largest difference of logits, and the largest logit."""
    import torch

    config = read_config(str(folder))
    kind = model_class(config)
    exported = kind.from_pretrained(folder, trust_remote_code=False)
    tokens = torch.arange(1, TOKENS + 1).remainder(config.get_text_config().vocab_size)[None]
    with torch.inference_mode():
        ours = exported.eval()(tokens).logits.float()
        original = _original(found, papers, kind, config, exported.dtype)
        theirs = _cast(original, exported.dtype).eval()(tokens).logits.float()
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def _cast(model: "nn.Module", dtype: "torch.dtype") -> "nn.Module":
    """Weights alone: models keep buffers, such as rotary frequencies, in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _original(found: Found, papers: Papers, kind: Any, config: Any, dtype: "torch.dtype") -> "nn.Module":
    if found.kind == "safetensors":
        return kind.from_pretrained(found.folder, config=config, trust_remote_code=False)  # type: ignore[no-any-return]
    if papers.adapter is not None:
        return _with_adapter(found, papers, kind, dtype)
    model = kind(config)
    state = _state(found)
    if model.state_dict().keys() <= state.keys() or not _tied(model):
        model.load_state_dict(state, strict=False)
    else:
        model.load_state_dict({**state, **_copies(model, state)}, strict=False)
    return model  # type: ignore[no-any-return]


def _tied(model: "nn.Module") -> bool:
    return len(list(model.parameters())) < len(model.state_dict())


def _copies(model: "nn.Module", state: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    held = {key: next(state[name] for name in names if name in state) for key, names in groups.items()}
    return {name: held[key] for key, names in groups.items() for name in names}


def _with_adapter(found: Found, papers: Papers, kind: Any, dtype: "torch.dtype") -> "nn.Module":
    """Merged as wide as the export is, or as the base is."""
    import torch
    from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict

    wide = dtype if dtype is torch.float32 else "auto"
    base = kind.from_pretrained(papers.folder, dtype=wide, trust_remote_code=False)
    if found.kind == "adapter":
        return PeftModel.from_pretrained(base, str(found.folder)).merge_and_unload()  # type: ignore[no-any-return]
    model = get_peft_model(base, PeftConfig.from_pretrained(str(papers.adapter)))
    set_peft_model_state_dict(model, _state(found))
    return model.merge_and_unload()  # type: ignore[no-any-return]


def _state(found: Found) -> "dict[str, torch.Tensor]":
    import torch

    if found.kind == "ZeRO":
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(str(found.folder), tag=found.weights.name)  # type: ignore[no-any-return]
    state: dict[str, Any] = {}
    if found.kind == "sharded (DCP)":
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
        _load_state_dict(state, storage_reader=FileSystemReader(found.weights), planner=planner, no_dist=True)
    else:
        state = torch.load(found.weights, weights_only=True)
    while inner := next((key for key in state if key in MODEL_KEYS), None):
        state = state[inner]
    return {clean_name(name).removeprefix("module."): tensor for name, tensor in state.items()}
