"""Patches for faults of PEFT, torch and transformers in training. Each is applied once.

**Untrusted checkpoints**: `torch.distributed.checkpoint` loads `.metadata` with `pickle.load`, and the values beside
tensors, such as learning rates, with `torch.load(weights_only=False)` (torch 2.13), so that an untrusted checkpoint
runs code when a run resumes from it. Both are restricted to the types that they need.

**Adapters** under FSDP: PEFT 0.21 matches an adapter's tensors by module names, and FSDP's wrappers change those names.
It fails silently in three ways: under FSDP1 (`._fsdp_wrapped_module.` in mid-name) and under FSDP activation
checkpointing (`._checkpoint_wrapped_module.`) `save_pretrained` writes a file with no tensor in it, sharded checkpoints
hold none, and under FSDP1 a resume loads none (PEFT strips `base_model.model.` where no name starts with it, and takes
the model's names from a state dict that may be empty on all ranks but the first). Besides, torch's FSDP1 loses the
frozen base of an unsharded model.

**Tensor parallelism**: transformers sums gradients of norms that it has summed before.
"""

import contextlib
import io
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from accel_fsdp.checkpoints import clean_name, dcp
from accel_fsdp.errors import UserError
from accel_fsdp.library_internals import Internal, patch

CODE = "an untrusted checkpoint would run code when a run resumes from it"
HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
EMPTY = "checkpoints and exports would lack the adapter's tensors"
WRONG = "gradients of norms between split layers would be wrong after the first micro-batch of a step"


@contextlib.contextmanager
def reading_as_data() -> Iterator[None]:
    """In the block, torch reads distributed checkpoints without running the code that they name."""
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    with (
        mock.patch.object(filesystem, "pickle", filesystem.pickle),  # type: ignore[attr-defined]
        mock.patch.object(DefaultLoadPlanner, "load_bytes", DefaultLoadPlanner.load_bytes),
    ):
        read_metadata_as_data()
        read_values_as_data()
        yield


@cache
def fix_adapters() -> None:
    """Makes PEFT find adapter tensors in wrapped models."""
    save_wrapped_adapters()
    load_through_fsdp1()
    keep_frozen_units()


@cache
def fix_tensor_parallelism() -> None:
    """Makes transformers' tensor parallelism train correctly."""
    sum_new_gradients()


def leave_casts_to_autocast(model: Any) -> None:
    """Keeps PEFT from casting a layer's input to the dtype that its adapter's weight has at that moment.

    Under FSDP1 adapters are units of their own, float32 while sharded and 16 bits while gathered: backward would
    recompute other dtypes than forward saved, and activation checkpointing stops there (torch 2.13, PEFT 0.21).
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


class _Unpickler(pickle.Unpickler):
    """Finds DCP's own types alone, for a `.metadata` file that was read as inert values before."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in dcp.ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} is not a type of DCP's metadata")
        return _format if name == "getattr" else super().find_class(module, name)


def _format(formats: Any, name: str) -> Any:
    """The memory format that `.metadata` names; the earlier check has refused any other name."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING[name]


def _load(file: IO[bytes]) -> Any:
    content = file.read()
    dcp.unpickled(content, Path(file.name))
    return _Unpickler(io.BytesIO(content)).load()


@patch(
    Internal("torch.distributed.checkpoint.filesystem:pickle"),
    Internal("torch.distributed.checkpoint.filesystem:FileSystemReader.read_metadata", "self *"),
    Internal("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING"),
    why=CODE,
)
def read_metadata_as_data() -> None:
    """torch loads `.metadata` with `pickle.load`, which calls any function that the file names."""
    from torch.distributed.checkpoint import filesystem

    filesystem.pickle = SimpleNamespace(load=_load, dump=pickle.dump)  # type: ignore[attr-defined, assignment]


@patch(
    Internal("torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes", "self read_item value"),
    Internal("torch.distributed.checkpoint._traverse:set_element", "root_dict path value"),
    why=CODE,
)
def read_values_as_data() -> None:
    """torch loads values beside tensors with `weights_only=False`, which calls any function that they name."""
    import torch
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from transformers.trainer_pt_utils import safe_globals

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        with safe_globals():
            loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]


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


@patch(
    Internal(
        "transformers.distributed.tensor_parallel:ReplicatedWithGradAllReduce.install_forward", "self module mesh"
    ),
    why=WRONG,
)
def sum_new_gradients() -> None:
    """Norms of a rank's own heads, such as Qwen3's q_norm, sum their gradients over the ranks after each micro-batch.

    transformers 5.23 sums what has been accumulated, earlier micro-batches once more with each. A hook on the gradient
    sees the new one alone.
    """
    import torch
    import torch.distributed as dist
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    def install_forward(self: Any, module: Any, mesh: Any) -> Any:
        forward, hooked = module.forward, dict[str, Any]()

        def summed(gradient: Any) -> Any:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=mesh.get_group())
            return gradient

        def with_hooks(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.requires_grad and hooked.get(name) is not parameter:
                        parameter.register_hook(summed)
                        hooked[name] = parameter
            return forward(*args, **kwargs)

        module.forward = with_hooks
        return module

    ReplicatedWithGradAllReduce.install_forward = install_forward
