"""Observes what a script saves: by which call, where, in which line, which shards, names and values.

The rehearsal judges it. It calls no collective.
"""

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_fsdp.checkpoints import tensor_names
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import events, imports, parts, script
from accel_fsdp.ranks.holding import unwrapped, user_name
from accel_fsdp.ranks.observing import after, guarded, replace
from accel_fsdp.ranks.steps import ObservedSteps, sums

if TYPE_CHECKING:
    from torch import nn


class _Call(NamedTuple):
    """A function or method that saves.

    `content` is the argument that it writes; empty if another of these calls writes for it.
    """

    module: str
    name: str
    content: str = ""

    @property
    def label(self) -> str:
        return self.name if "." in self.name else f"{self.module}.{self.name}"


DCP = "torch.distributed.checkpoint"
CALLS = (
    _Call("accelerate.accelerator", "Accelerator.save_state"),
    _Call("accelerate.accelerator", "Accelerator.save_model"),
    _Call("accelerate.accelerator", "Accelerator.save"),
    _Call("accelerate.utils.other", "safe_save_file", "tensors"),
    _Call("transformers.modeling_utils", "PreTrainedModel.save_pretrained"),
    _Call("transformers.trainer", "Trainer.save_model"),
    _Call("peft.peft_model", "PeftModel.save_pretrained"),
    _Call("torch", "save", "obj"),
    _Call("safetensors.torch", "save_file", "tensors"),
    _Call("safetensors.torch", "save_model"),
    _Call(DCP, "save", "state_dict"),
    _Call(DCP, "async_save", "state_dict"),
)
LOADS = ("load_state", "torch.load", "load_file")
"""Words of the lines in which a script may read a saved file."""
PATHS = ("output_dir", "save_directory", "checkpoint_id", "filename", "f")
"""The arguments that name the folder or the file."""


class ObservedSaves:
    """Reports the outermost call that saves, with the files that it wrote on this rank.

    Functions count only if the script itself calls them: libraries can read their own files.
    """

    def __init__(self, records: ObservedSteps) -> None:
        self.records = records
        self.writing = threading.local()  # `async_save` writes in a separate thread
        self.barriers = 0

    def install(self) -> None:
        import torch.distributed as dist

        after(dist, "barrier", self._count_barrier)
        for call in CALLS:
            imports.change(call.module, functools.partial(guarded(self._watch), call))

    def _count_barrier(self, *_: Any, **__: Any) -> None:
        self.barriers += 1

    def _watch(self, call: _Call, module: ModuleType) -> None:
        owner_name, _, name = call.name.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        if hasattr(owner, name):  # else another version of the library
            signature = inspect.signature(getattr(owner, name))
            replace(owner, name, functools.partial(self._call, call, signature))

    def _call(
        self, call: _Call, signature: inspect.Signature, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        files: list[dict[str, Any]] | None = getattr(self.writing, "files", None)
        is_outermost = files is None and ("." in call.name or script.is_calling(sys._getframe(1)))
        if is_outermost:
            files = self.writing.files = []
        try:
            result = original(*args, **kwargs)
        finally:
            if is_outermost:
                self.writing.files = None
        if files is not None:
            arguments = signature.bind(*args, **kwargs).arguments
            guarded(self._observe)(call, arguments, result, files, is_outermost)
        return result

    def _observe(
        self, call: _Call, arguments: Mapping[str, Any], result: Any, files: list[dict[str, Any]], is_outermost: bool
    ) -> None:
        path = _path(arguments, result)
        if call.content and path:
            by_dcp = call.module == DCP and not arguments.get("no_dist")
            files.append({"path": path, **self._content(arguments[call.content], by_dcp)})
        if is_outermost and path:
            events.report(
                "saved",
                call=call.label,
                path=path,
                line=script.line_of_stack(sys._getframe(2)),
                step=self.records.steps,
                barriers=self.barriers,
                machine=LaunchEnvironment.now().machine_rank,
                is_whole=self._is_whole(next(filter(_is_module, arguments.values()), None)),
                files=files,
            )

    def _is_whole(self, saved: Any) -> bool:
        """Whether a call saves the whole trained model; it may also save a part of it, or another model."""
        models = self._modules()
        return saved is None or not models or any(unwrapped(saved) is unwrapped(module) for module in models)

    def _modules(self) -> "list[nn.Module]":
        return [module for model in self.records.models if (module := model.model()) is not None]

    def _content(self, saved: Any, by_dcp: bool) -> dict[str, Any]:
        """The content of a file. DCP writes a whole DTensor, each rank its part.

        `values`: the sums of this rank's part of each weight, before the first step, now, and in the file. `wrapped`:
        the first name that only a wrapper gives. `is_result`: it has the model alone, and no line of the project loads.
        """
        tensors = list(_tensors(saved))
        places = {place.name: place for model in self.records.models for place in model.places}
        sharded = {name: place for name, place in places.items() if place.now().numel() < prod(place.shape)}
        names = [user_name(name) for module in self._modules() for name, _ in module.named_parameters()]
        # FSDP1 may have all of a weight on other ranks
        elsewhere = {name for name in names if name not in places and "_flat_param" not in name}
        parted = (place for place in places.values() if not parts.is_whole(place))
        states = self._states_of({id(place.parameter) for place in parted} if sharded or elsewhere else set())
        shards = [
            _is_shard(tensor, sharded.get(user_name(name)), states, by_dcp)
            or (user_name(name) in elsewhere and _is_plain(tensor) and not tensor.numel())
            for name, tensor in tensors
        ]
        began = self.records.began if self.records.wrapped == 1 else {}  # several models may have the same names
        values = [
            (began[place.name], sums(place.now()), sums(place.part_of(tensor)))
            for name, tensor in tensors
            if (place := places.get(user_name(name))) and place.name in began
            if _is_plain(tensor) and tuple(tensor.shape) == place.shape
        ]
        modules = [unwrapped(module) for module in self._modules()]
        kinds = [kind for module in modules for kind in (module.named_parameters, module.named_buffers)]
        own = {tensor_names.clean_name(name) for kind in kinds for name, _ in kind(remove_duplicate=False)}
        wrapped = next((name for name, _ in tensors if name not in own and user_name(name) in own), "")
        is_model = bool(wrapped) and isinstance(saved, Mapping) and {user_name(str(key)) for key in saved} <= own
        content = {"shards": sum(shards), "count": len(tensors), "values": values, "wrapped": wrapped}
        return content | {"is_result": is_model and not script.has_line_with(*LOADS)}

    def _states_of(self, sharded: set[int]) -> set[int]:
        """The addresses of the optimizers' states of sharded parameters."""
        pairs = (pair for optimizer in self.records.stepped for pair in optimizer.state.items())
        states = (state for parameter, state in pairs if id(parameter) in sharded)
        values = (value for state in states for value in state.values() if _is_tensor(value) and value.dim())
        return {_address(value) for value in values} - {0}


def _path(arguments: Mapping[str, Any], result: Any) -> str:
    """The absolute path that a call writes; empty for buffers."""
    of_writer = getattr(arguments.get("storage_writer"), "path", None)
    of_trainer = getattr(getattr(arguments.get("self"), "args", None), "output_dir", None)
    values = [arguments.get(name) for name in PATHS]
    for value in (*values, *(getattr(value, "name", None) for value in values), of_writer, result, of_trainer):
        if isinstance(value, str | os.PathLike) and value:
            return os.path.abspath(value)
    return ""


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) or type(value).__name__ == "ShardedTensor"


def _is_plain(tensor: Any) -> bool:
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta


def _address(tensor: Any) -> int:
    return int(parts.local(tensor).untyped_storage().data_ptr())


def _is_shard(tensor: Any, place: parts.Place | None, states: set[int], by_dcp: bool) -> bool:
    """Whether a tensor is a rank's part of a whole one, of an optimizer's state, or of the weight with its name."""
    if not _is_plain(tensor):
        is_divided = type(tensor).__name__ == "ShardedTensor" or parts.local(tensor).numel() < tensor.numel()
        return is_divided and not by_dcp
    is_part = place is not None and tuple(tensor.shape) != place.shape and tensor.numel() == place.now().numel()
    return is_part or _address(tensor) in states


def _tensors(saved: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in dicts, lists and modules, with their names in these."""
    if _is_tensor(saved):
        yield name, saved
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            yield from _tensors(value, key if isinstance(key, str) else "")
    elif isinstance(saved, list | tuple) or _is_module(saved):
        for value in saved.parameters() if _is_module(saved) else saved:
            yield from _tensors(value)
