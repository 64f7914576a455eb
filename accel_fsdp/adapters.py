"""Adapters under FSDP: what PEFT lacks to find their tensors in a wrapped model.

PEFT 0.21 chooses an adapter's tensors by module names and strips FSDP's prefix at the start of a name only. Under FSDP1
(`._fsdp_wrapped_module.` in mid-name) and FSDP activation checkpointing (`._checkpoint_wrapped_module.`) nothing
matches: `save_pretrained` writes an adapter file with no tensor in it, sharded checkpoints hold none, and a resume
resets the adapter, all without a word. One function computes those names; `enable()` cleans its result.
"""

from typing import Any

WRAPPER_SEGMENTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """The name of a module or parameter as it was before FSDP, activation checkpointing or torch.compile wrapped it."""
    for segment in WRAPPER_SEGMENTS:
        name = name.replace(segment, "")
    return name


def enable() -> None:
    """Makes PEFT find adapter tensors in wrapped models (needed for peft 0.21.2). Idempotent."""
    from peft.tuners import tuners_utils

    original = tuners_utils._get_tuner_state_dict_key_prefixes
    if getattr(original, "cleans_names", False):
        return

    def prefixes(model: Any, adapter_name: str | None = None) -> set[str]:
        return {clean_name(prefix) for prefix in original(model, adapter_name=adapter_name)}

    prefixes.cleans_names = True  # type: ignore[attr-defined]
    tuners_utils._get_tuner_state_dict_key_prefixes = prefixes
