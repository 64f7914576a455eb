"""Patches PEFT and torch to save and load adapters in a model that FSDP wraps.

PEFT 0.21 matches an adapter's tensors by module names, and FSDP's wrappers change those names. It fails silently in
three ways: under FSDP1 (`._fsdp_wrapped_module.` in mid-name) and under FSDP activation checkpointing
(`._checkpoint_wrapped_module.`) `save_pretrained` writes a file with no tensor in it, sharded checkpoints hold none,
and under FSDP1 a resume loads none (PEFT strips `base_model.model.` where no name starts with it, and takes the model's
names from a state dict that may be empty on all ranks but the first). Besides, torch's FSDP1 loses the frozen base of
an unsharded model. `enable()` fixes all of these. Only this module, `dcp_patches.py` and `cpu.py` patch a library.
"""

from functools import cache
from typing import Any

from accel_fsdp.checkpoints import clean_name
from accel_fsdp.errors import UserError
from accel_fsdp.library_internals import Internal, patch

HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
EMPTY = "checkpoints and exports would lack the adapter's tensors"


@cache
def enable() -> None:
    """Makes PEFT find adapter tensors in wrapped models. Idempotent."""
    save_wrapped_adapters()
    load_through_fsdp1()
    keep_frozen_units()


@patch(
    Internal("peft.tuners.tuners_utils:_get_tuner_state_dict_key_prefixes", "model adapter_name"),
    why=EMPTY,
)
def save_wrapped_adapters() -> None:
    """State dict keys have no wrapper names, so the prefixes that select them must have none either."""
    from peft.tuners import tuners_utils

    original = tuners_utils._get_tuner_state_dict_key_prefixes

    def prefixes(model: Any, adapter_name: str | None = None) -> set[str]:
        return {clean_name(prefix) for prefix in original(model, adapter_name=adapter_name)}

    tuners_utils._get_tuner_state_dict_key_prefixes = prefixes


@patch(
    Internal("torch.distributed.fsdp._runtime_utils:_catch_all_reshard", "state"),
    Internal(f"{HANDLE}._use_sharded_views", "self"),
    Internal(f"{HANDLE}.uses_sharded_strategy"),
    why=EMPTY,
)
def keep_frozen_units() -> None:
    """After backward, FSDP1 leaves the frozen units of NO_SHARD without parameters.

    A unit whose inputs need no gradient, such as the first layer, isn't resharded by a hook, and the fallback regards
    it as resharded, because under NO_SHARD a whole parameter and its shard share memory. Its weights stay plain
    tensors, and the next state dict stops at the first missing parameter.
    """
    import torch.distributed.fsdp._runtime_utils as runtime

    original = runtime._catch_all_reshard

    def catch_all(state: Any) -> None:
        original(state)
        if state._handle is not None and not state._handle.uses_sharded_strategy:
            state._handle._use_sharded_views()

    runtime._catch_all_reshard = catch_all


@patch(
    Internal("peft:set_peft_model_state_dict", "model peft_model_state_dict adapter_name *"),
    Internal(
        "peft.tuners.tuners_utils:BaseTuner._remap_adapter_state_dict_for_load",
        "* model config adapter_name state_dict",
    ),
    Internal("peft.utils.save_and_load:PEFT_TYPE_TO_TUNER_MAPPING"),
    why=EMPTY,
)
def load_through_fsdp1() -> None:
    """Loads into the wrapped model, whose state dicts have the names of files."""
    import peft

    original = peft.set_peft_model_state_dict

    def set_state_dict(model: Any, state_dict: dict[str, Any], adapter_name: str = "default", **options: Any) -> Any:
        from accelerate.utils import broadcast_object_list
        from peft.utils.save_and_load import PEFT_TYPE_TO_TUNER_MAPPING
        from torch.distributed.fsdp import FullyShardedDataParallel

        if not isinstance(model, FullyShardedDataParallel):
            return original(model, state_dict, adapter_name=adapter_name, **options)
        config = model.peft_config[adapter_name]
        tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
        renamed = tuner._remap_adapter_state_dict_for_load(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict
        )
        names = broadcast_object_list([list(renamed)])[0]  # for full state dicts only rank 0 knows the model's names
        result = model.load_state_dict(dict(zip(names, state_dict.values(), strict=True)), strict=False)
        if result.unexpected_keys:
            raise UserError(
                f"{len(result.unexpected_keys)} adapter tensors match no module, first {result.unexpected_keys[0]}",
                why="training would go on from a partly new adapter",
                fix="resume with the model and the LoRA flags of the run that wrote this checkpoint, or use FSDP2",
            )
        return result

    peft.set_peft_model_state_dict = set_state_dict
