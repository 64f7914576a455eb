"""Observes what a script saves: by which call, where, in which line, and which weights; the rehearsal judges it.

It reports the name, shape, dtype, sum and norm of each saved whole tensor, and the sum and norm of each rank's part of
the trained model: at its first step, at each save and at the end. It calls no collective.
"""

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import events, holding, parts, script
from accel_fsdp.ranks.holding import user_name
from accel_fsdp.ranks.observing import after, guarded
from accel_fsdp.ranks.steps import ObservedSteps, sums

if TYPE_CHECKING:
    from torch import nn


class _Call(NamedTuple):
    """A function or method that saves or loads.

    `content` is the argument that it writes; empty if another of these calls writes for it.
    """

    module: str
    name: str
    content: str = ""

    @property
    def is_method(self) -> bool:
        return "." in self.name

    @property
    def label(self) -> str:
        return self.name if self.is_method else f"{self.module}.{self.name}"


DCP = "torch.distributed.checkpoint"
CALLS = (
    _Call("accelerate.accelerator", "Accelerator.save_state"),
    _Call("accelerate.accelerator", "Accelerator.save_model"),
    _Call("accelerate.accelerator", "Accelerator.save"),
    _Call("transformers.modeling_utils", "PreTrainedModel.save_pretrained"),
    _Call("transformers.trainer", "Trainer.save_model"),
    _Call("peft.peft_model", "PeftModel.save_pretrained"),
    _Call("torch", "save", "obj"),
    _Call("safetensors.torch", "save_file", "tensors"),
    _Call("safetensors.torch", "save_model"),
    _Call(DCP, "save", "state_dict"),
    _Call(DCP, "async_save", "state_dict"),
)
LOADS = (
    _Call("torch", "load"),
    _Call("safetensors.torch", "load_file"),
    _Call("accelerate.accelerator", "Accelerator.load_state"),
    _Call("transformers.trainer", "Trainer._load_optimizer_and_scheduler"),
)
PATHS = ("output_dir", "save_directory", "input_dir", "checkpoint", "checkpoint_id", "filename", "f")
"""The arguments that name the folder or the file."""


class _Writing(threading.local):
    """The files of the call that this thread is in, if any; `async_save` writes in a separate thread."""

    files: list[dict[str, Any]] | None = None


class ObservedSaves:
    """Reports the outermost call that saves, with the files that it wrote on this rank.

    Functions count only if the script itself calls them: libraries can read their own files.
    """

    def __init__(self, records: ObservedSteps) -> None:
        self.records = records
        self.writing = _Writing()
        self.watched: set[_Call] = set()
        self.barriers = 0

    def install(self) -> None:
        import torch.distributed as dist

        after(dist, "barrier", self._count_barrier)
        self.watch()

    def _count_barrier(self, *_: Any, **__: Any) -> None:
        self.barriers += 1

    def watch(self) -> None:
        """Wraps the calls of modules that have been imported by now; imports none itself."""
        functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        for call in CALLS + LOADS:
            owner_name, _, name = call.name.rpartition(".")
            if call in self.watched or not _has_been_imported(call.module, owner_name or name):
                continue
            self.watched.add(call)
            module = sys.modules[call.module]
            owner = getattr(module, owner_name) if owner_name else module
            original = getattr(owner, name, None)
            if original is None:  # another version of the library
                continue
            wrapper = self._wrapped(call, original)
            setattr(owner, name, wrapper)
            if not call.is_method:
                functions.append((original, wrapper))
        _replace_imported(functions)

    def _wrapped(self, call: _Call, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def calling(*args: Any, **kwargs: Any) -> Any:
            is_outermost = self.writing.files is None and (call.is_method or script.is_calling(sys._getframe(1)))
            if is_outermost:
                self.writing.files = []
            files = self.writing.files
            try:
                result = original(*args, **kwargs)
            finally:
                self.writing.files = None if is_outermost else files
            if files is not None:
                arguments = signature.bind(*args, **kwargs).arguments
                guarded(self._observe)(call, arguments, result, files, is_outermost)
            return result

        return calling

    def _observe(
        self, call: _Call, arguments: Mapping[str, Any], result: Any, files: list[dict[str, Any]], is_outermost: bool
    ) -> None:
        path = _path(arguments, result)
        if call.content and path:
            by_dcp = call.module == DCP and not arguments.get("no_dist")
            files.append({"path": path, **self._content(arguments[call.content], by_dcp)})
        if is_outermost and path:
            self._report(call, path, arguments, files)

    def _report(self, call: _Call, path: str, arguments: Mapping[str, Any], files: list[dict[str, Any]]) -> None:
        line = script.line_of_stack(sys._getframe(2))
        if call in LOADS:
            events.report("loaded", path=path, line=line)
            return
        saved = next((value for value in list(arguments.values())[:2] if _is_module(value)), None)
        events.report(
            "saved",
            call=call.label,
            path=path,
            line=line,
            step=self.records.steps,
            barriers=self.barriers,
            machine=LaunchEnvironment.now().machine_rank,
            weights=None if saved is None else self._weights_of_other(saved),
            files=files,
        )
        self.records.report_weights()

    def _weights_of_other(self, saved: "nn.Module") -> int | None:
        """The number of weights of a part of the trained model, or of another model; None for the trained one."""
        for model in self.records.models:
            module = model.model()
            if module is None or holding.unwrapped(saved) is holding.unwrapped(module):
                return None
            path = next((user_name(path) for path, inner in module.named_modules() if inner is saved), None)
            if path is not None:
                return sum(prod(place.shape) for place in model.places if place.name.startswith(f"{path}."))
        return sum(parameter.numel() for parameter in saved.parameters()) if self.records.models else None

    def _content(self, saved: Any, by_dcp: bool) -> dict[str, Any]:
        """The content of a file. DCP writes a whole DTensor, each rank its part."""
        storages = self.records.shard_storages()
        tensors = list(_tensors(saved))
        places = {place.name: place for model in self.records.models for place in model.places}
        names = {name for model in self.records.models for name in model.names}
        whole: dict[str, tuple[list[int], str, float, float]] = {}
        for name, tensor in tensors:
            if name and _is_plain(tensor) and name not in whole:
                sum_and_norm = sums(tensor) if user_name(name) in names else (0.0, 0.0)
                whole[name] = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."), *sum_and_norm)
        return {
            "shards": sum(
                _is_part(places.get(user_name(name)), tensor) or _is_shard(tensor, storages, by_dcp)
                for name, tensor in tensors
            ),
            "count": len(tensors),
            "is_bare": bool(tensors) and isinstance(saved, Mapping) and all(map(_is_tensor, saved.values())),
            "has_optimizer": _has_groups(saved),
            "tensors": whole,
        }


def _has_been_imported(module: str, name: str) -> bool:
    """Whether the script's import of a module is done, so that a missing name means that the library changed."""
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None)
    return loaded is not None and (hasattr(loaded, name) or not getattr(spec, "_initializing", False))


def _replace_imported(functions: Sequence[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Replaces functions where modules have imported them by name, also as transformers has `safe_save_file`."""
    wrappers = {id(original): wrapper for original, wrapper in functions}
    wanted = {f"{prefix}{original.__name__}" for original, _ in functions for prefix in ("", "safe_")}
    for module in list(sys.modules.values()):
        members = getattr(module, "__dict__", {})
        for name in wanted & members.keys():
            if wrapper := wrappers.get(id(members[name])):
                setattr(module, name, wrapper)


def _path(arguments: Mapping[str, Any], result: Any) -> str:
    """The absolute path that a call writes or reads; empty for buffers."""
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


def _is_part(place: parts.Place | None, tensor: Any) -> bool:
    """Whether a plain tensor with a weight's name has the size of this rank's part, such as a copy of it."""
    if place is None or not _is_plain(tensor) or tuple(tensor.shape) == place.shape:
        return False
    return bool(tensor.numel() == place.now().numel() < prod(place.shape))


def _has_groups(saved: Any) -> bool:
    """Whether the state of an optimizer is saved."""
    return isinstance(saved, Mapping) and ("param_groups" in saved or any(map(_has_groups, saved.values())))


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


def _is_shard(tensor: Any, storages: set[int], by_dcp: bool) -> bool:
    from torch.distributed.tensor import DTensor

    if type(tensor).__name__ == "ShardedTensor":
        return not by_dcp
    if isinstance(tensor, DTensor):
        sizes = enumerate(tensor.placements)
        return not by_dcp and any(p.is_shard() and tensor.device_mesh.size(number) > 1 for number, p in sizes)
    return not tensor.is_meta and tensor.untyped_storage().data_ptr() in storages
