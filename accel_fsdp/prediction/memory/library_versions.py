"""What the libraries' versions change in the memory of a step. One row each, with its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from packaging.version import Version

from accel_fsdp.job import Recipe
from accel_fsdp.prediction.memory import losses


@dataclass(frozen=True)
class Quirks:
    """`loss` is what head and loss allocate, where that isn't what is on the tapes.

    `keeps_block_gradients`: FSDP1 over frozen layers with reentrant checkpointing holds the blocks' inputs with their
    gradients to the end of backward: its hook (`_register_post_backward_reshard_only_hook`) refers to the detached
    inputs, which are leaves there and so own a gradient.

    `checkpoints_outside`: reentrant checkpointing runs around FSDP1's wrapper instead of inside of it. The wrapper's
    forward then runs without gradients, so it leaves no hook for backward (`_register_pre_backward_hooks`), and a unit
    without one is never prefetched.

    `frees_output_late`: in forward, FSDP2 holds a unit's all-gather output until the next unit is copied out of its own
    (`wait_for_unshard` kept it in a variable of its own), else until the next all-gather is there.

    `upcasts_logits`: the model's logits are float32. `repeats_heads`: attention saves keys and values of all heads
    where the kernel could share them. `caches_keys`: checkpointing leaves the cache on.
    """

    loss: losses.Loss | None = None
    keeps_block_gradients: bool = False
    checkpoints_outside: bool = False
    frees_output_late: bool = False
    upcasts_logits: bool = False
    repeats_heads: bool = False
    caches_keys: bool = False


PLAIN_LOSS = frozenset({"gpt_bigcode"})
"""Model types whose own loss took the 16-bit logits as they were, before transformers 5 gave all of them one loss."""


SHARING = frozenset({"llama", "gemma", "gemma2", "cohere", "olmo"})
"""Model types that handed shared heads to flash attention as they were before transformers 4.48."""


def quirks_of(versions: Mapping[str, str], model_type: str, recipe: Recipe) -> Quirks:
    """The quirks of these versions; without one, transformers counts as today's, and torch as the one that holds more.

    transformers: upcasting copies the logits and shifting copies them again in 4.45 (12 bytes), where 4.48 also keeps
    the first ones in a frame (14): token slopes of PowerLM and Mistral in fms-acceleration's public runs. The retained
    gradients: exactly (L - 2) hidden states per token in all their frozen FSDP1 runs with torch 2.4.1, none without
    FSDP or when everything is trained. Since 4.53 layers checkpoint in their own `__call__` (modeling_layers.py);
    before, the constant term of all frozen and large FSDP1 runs lacks exactly one block, and so it does in those that
    name no version but torch 2.4.1. Each model had its own attention until 4.48, in which `repeat_kv` came before the
    kernel, but for some models' flash attention. FSDP2 frees outputs early since torch 2.15
    (`release_all_gather_state_for_comm_reuse`; 2.14 didn't). gpt_bigcode returned its cache with
    checkpointing on, where others turned it off (modeling_gpt_bigcode.py, `presents`).
    """
    transformers, torch = Version(versions.get("transformers", "99")), Version(versions.get("torch", "2.14"))
    old = transformers < Version("4.53") if "transformers" in versions else torch < Version("2.5")
    early = transformers < Version("4.48")
    return Quirks(
        loss=_loss(transformers, model_type, recipe),
        keeps_block_gradients=torch < Version("2.5"),
        checkpoints_outside=old,
        frees_output_late=torch < Version("2.15"),
        upcasts_logits=transformers < Version("4.46") and model_type not in PLAIN_LOSS,
        repeats_heads=early and not (recipe.attention == "flash" and model_type in SHARING),
        caches_keys=transformers < Version("5") and model_type in PLAIN_LOSS,
    )


def quirks_here(model_type: str, recipe: Recipe) -> Quirks:
    """The quirks of the torch that is installed, if one is."""
    return quirks_of(_installed(), model_type, recipe)


@cache
def _installed() -> Mapping[str, str]:
    try:
        return {"torch": metadata.version("torch")}
    except metadata.PackageNotFoundError:
        return {}


def _loss(transformers: Version, model_type: str, recipe: Recipe) -> losses.Loss | None:
    """The sequence of the loss; None where the tape has it."""
    if model_type in PLAIN_LOSS and transformers < Version("5"):
        pure, autocast = (losses.LOW, losses.LOW_AUTOCAST)
        if recipe.kernels == "foak":
            pure, autocast = losses.FOAK_LOW, losses.FOAK_LOW_AUTOCAST
        return pure if recipe.precision == "no" else autocast
    early, old = transformers < Version("4.46"), transformers < Version("5")
    if recipe.kernels == "foak":
        return losses.FOAK_UPCAST if early else losses.FOAK_UPCAST_AND_KEPT if old else losses.FOAK
    return losses.UPCAST if early else losses.UPCAST_AND_KEPT if old else None
