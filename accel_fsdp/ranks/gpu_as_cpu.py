"""Lets scripts that were written for GPUs run on a CPU rank: CUDA devices, `torch.cuda` and NCCL mean this rank's CPU.

Questions such as `torch.cuda.is_available()` are answered as on a machine with a GPU for each rank if the user's own
script or module asks. Libraries get torch's answer, because they would otherwise use GPU kernels. A tensor's `device`
stays the CPU.
"""

import contextlib
import functools
import inspect
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import psutil

from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, imports, script
from accel_fsdp.ranks.observing import Observation, replace

NAMES_GPU = re.compile(r"^cuda\b|\bnccl\b|^flash_attention_|^kernels-community/")
MENTIONS_GPU = re.compile(r"cuda|nccl|torch\.accelerator")
THROUGH = ("torch.cuda.amp", "torch.cuda.nvtx", "contextlib")
"""Modules that ask on behalf of their callers."""

NOTHING = """
set_device set_device_index set_device_idx init synchronize ipc_collect empty_cache empty_host_cache set_stream
set_sync_debug_mode set_per_process_memory_fraction reset_peak_memory_stats reset_accumulated_memory_stats
reset_max_memory_allocated reset_max_memory_cached reset_peak_host_memory_stats reset_accumulated_host_memory_stats
set_rng_state set_rng_state_all memory._record_memory_history memory._dump_snapshot
nvtx.range_push nvtx.range_pop nvtx.range_start nvtx.range_end nvtx.mark
"""
"""Functions of `torch.cuda` and `torch.accelerator` that have nothing to do here."""
ZERO = """
memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached
utilization memory_usage temperature power_draw clock_rate device_memory_used get_sync_debug_mode
"""
TRUE = "is_available is_initialized is_bf16_supported is_tf32_supported can_device_access_peer"
TORCH = (
    Internal("torch.overrides:TorchFunctionMode.__torch_function__", "self func types args kwargs"),
    Internal("torch.overrides:_get_current_function_mode", ""),
    Internal("torch.utils._device:DeviceContext.__init__", "self device"),
    Internal("torch.cuda:device.__enter__", "self"),
    Internal("torch.accelerator:device_index.__enter__", "self"),
    Internal("torch:Generator"),
    Internal("torch:Tensor.record_stream"),
    Internal("torch.cuda:Stream"),
    Internal("torch.cuda:Event"),
    Internal("torch.nn.parallel:DistributedDataParallel._check_comm_hook", "self hook"),
    Internal("torch.distributed.fsdp:FSDPModule.set_force_sum_reduction_for_comms", "self enable"),
)
ATTENTION = Internal("transformers:PreTrainedModel._check_and_adjust_attn_implementation", "self attn_implementation *")
DEVICE_MAP = Internal("transformers.modeling_utils:check_and_set_device_map", "device_map")
RELIES_ON = (*TORCH, ATTENTION, DEVICE_MAP)
_taken: set[str] = set()
_are_translated = False


def install() -> None:
    """Puts the CPU in place of GPUs; call it before the script imports anything."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if not Observation("what the script does on GPUs", *TORCH).is_possible:
        return
    _answer_for(torch.cuda, {"get_device_capability": (8, 0)})
    _answer_for(torch.accelerator, {"current_accelerator": torch.device("cuda")})
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[misc, assignment]
    torch.cuda.device.__enter__ = torch.cuda.device.__exit__ = _do_nothing  # type: ignore[method-assign]
    torch.accelerator.device_index.__enter__ = _do_nothing  # type: ignore[method-assign]
    torch.accelerator.device_index.__exit__ = _do_nothing  # type: ignore[method-assign]
    torch.Tensor.record_stream = _do_nothing  # type: ignore[method-assign]
    torch.Generator = _on_cpu(torch.Generator)  # type: ignore[misc]
    replace(FSDPModule, "set_gradient_divide_factor", _divide_on_cpu)
    replace(DistributedDataParallel, "_check_comm_hook", _check_hook)
    replace(torch.nn.Module, "to", _move)
    replace(torch.nn.Module, "cuda", lambda _, module, *__, **___: _stay_on_cpu(module))
    _translate_arguments()
    if any(MENTIONS_GPU.search(text) for text in _texts()):
        _translate_devices()
    imports.change("transformers.modeling_utils", _translate_loading)


def _texts() -> list[str]:
    """The texts of the script, of the modules beside it that it names, and of its arguments."""
    main = Path(sys.argv[0])
    text = main.read_text(encoding="utf-8", errors="replace")
    words = set(re.findall(r"\w+", text))
    siblings = [path for path in main.parent.glob("*.py") if path.stem in words]
    return [text, *(path.read_text(encoding="utf-8", errors="replace") for path in siblings), *sys.argv[1:]]


def _report_use(what: str) -> None:
    """Reports once that the CPU stood in for a GPU feature."""
    _translate_devices()
    if what not in _taken:
        _taken.add(what)
        events.report("taken-for-cpu", what=what, line=script.line_of_stack(sys._getframe(1)))


def _is_of_user(frame: FrameType | None) -> bool:
    """Whether the code of `frame`, or the code that it was called for, is the user's own and not a library's."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(THROUGH):
        frame = frame.f_back
    return frame is not None and script.is_own(frame.f_code.co_filename)


def _names_gpu(value: Any) -> bool:
    """Whether a device, a backend or a collection of these names a GPU; a number is the index of one."""
    if isinstance(value, str):
        return bool(NAMES_GPU.search(value))
    if isinstance(value, dict | list | tuple):
        return any(map(_names_gpu, value.values() if isinstance(value, dict) else value))
    return getattr(value, "type", "") == "cuda" or (isinstance(value, int) and not isinstance(value, bool))


def _device_text(value: Any) -> str:
    """A device as in a script, without the index, which differs between ranks."""
    if isinstance(value, dict | list | tuple):
        return _device_text(next(filter(_names_gpu, value.values() if isinstance(value, dict) else value)))
    text = value if isinstance(value, str) else getattr(value, "type", "")
    return f'"{re.sub(r"^cuda:.*", "cuda", text)}"' if text else "local_rank"


def _answer_for(module: Any, of_module: dict[str, Any]) -> None:
    """Replaces functions of `torch.cuda` or `torch.accelerator` where the user's own code calls them."""
    import torch

    launch, memory = LaunchEnvironment.now(), psutil.virtual_memory()
    properties = {"name": "CPU", "total_memory": memory.total, "major": 8, "minor": 0}
    answers: dict[str, Any] = {
        **dict.fromkeys(NOTHING.split()),
        **dict.fromkeys(ZERO.split(), 0),
        **dict.fromkeys(TRUE.split(), True),
        **dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), launch.local_rank),
        **dict.fromkeys(("mem_get_info", "get_memory_info"), (memory.available, memory.total)),
        **dict.fromkeys(("memory_summary", "list_gpu_processes"), ""),
        **dict.fromkeys(("current_stream", "default_stream"), Stream),
        "device_count": launch.local_world_size,
        "nccl.version": (2, 27, 0),
        "get_device_properties": SimpleNamespace(**properties, multi_processor_count=os.cpu_count()),
        "get_device_name": "CPU",
        "get_rng_state": torch.get_rng_state,
        "initial_seed": torch.initial_seed,
        "stream": contextlib.nullcontext,
        "memory_stats": lambda: defaultdict(int),
        "memory_snapshot": list,
        **of_module,
    }
    for path, answer in answers.items():
        part, _, name = path.rpartition(".")
        owner = getattr(module, part, None) if part else module
        if hasattr(owner, name):
            replace(owner, name, functools.partial(_answer, f"{module.__name__}.{path}", answer))


def _answer(what: str, answer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _is_of_user(sys._getframe(2)):
        return original(*args, **kwargs)
    _report_use(what)
    return answer() if callable(answer) else answer


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


class _Finished:
    """What streams and events have in common on a CPU: earlier calls have ended, so there is nothing to wait for."""

    cuda_stream, priority, seconds = 0, 0, 0.0

    def __init__(self, *_: Any, **__: Any) -> None:
        _report_use(f"torch.cuda.{type(self).__name__}")

    def __enter__(self) -> "_Finished":
        return self

    __exit__ = synchronize = wait = wait_event = wait_stream = _do_nothing

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def record_event(self, event: "_Finished | None" = None) -> "_Finished":
        event = event or Event()
        event.record()
        return event

    def elapsed_time(self, end: "_Finished") -> float:
        """Milliseconds, as on GPUs."""
        return (end.seconds - self.seconds) * 1e3


Stream, Event = type("Stream", (_Finished,), {}), type("Event", (_Finished,), {})


def _on_cpu(generator: Any) -> Any:
    """A class that makes CPU generators; an instance of torch's own class counts as its instance."""

    class OnCpu(type):
        def __call__(cls, device: Any = "cpu") -> Any:
            if _names_gpu(device):
                _report_use(f"Generator({_device_text(device)})")
                device = "cpu"
            return generator(device)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, generator)

    return OnCpu(generator.__name__, (), {"__module__": generator.__module__})


def _move(original: Callable[..., Any], moved: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `to` of a module or tensor."""
    if args and _names_gpu(args[0]):
        _report_use(f".to({_device_text(args[0])})")
        args = ("cpu", *args[1:])
    elif _names_gpu(kwargs.get("device")):
        _report_use(f".to({_device_text(kwargs['device'])})")
        kwargs = {**kwargs, "device": "cpu"}
    return original(moved, *args, **kwargs)


def _divide_on_cpu(original: Callable[..., Any], module: Any, factor: float) -> None:
    """Gloo can't divide by a script's factor while it reduces, so FSDP2 divides before."""
    original(module, factor)
    if _is_of_user(sys._getframe(2)):
        module.set_force_sum_reduction_for_comms(True)


def _check_hook(original: Callable[..., Any], model: Any, hook: Any) -> None:
    """DDP asks NCCL whether it reduces bf16; gloo does."""
    if not getattr(hook, "__name__", "").startswith("bf16_compress"):
        original(model, hook)


def _make_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A number alone is the index of a GPU, which torch refuses without one."""
    return original("cuda", *args) if args and isinstance(args[0], int) else original(*args, **kwargs)


def _stay_on_cpu(moved: Any) -> Any:
    _report_use(".cuda()")
    return moved


def _translate_devices() -> None:
    """Has torch's functions and the methods of tensors take CUDA devices for the CPU, from now on.

    Not within another mode, such as a device's: at its end that would take this one from torch's stack, and stay there.
    """
    import torch

    global _are_translated
    if _are_translated or torch.overrides._get_current_function_mode():  # type: ignore[no-untyped-call]
        return
    _are_translated = True
    replacements: dict[Any, Callable[..., Any]] = {
        torch.Tensor.to: _move,
        torch.Tensor.cuda: lambda _, tensor, *__, **___: _stay_on_cpu(tensor),
        torch.Tensor.pin_memory: lambda _, tensor, *__, **___: tensor,
        torch.device: _make_device,
    }

    class Devices(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in replacements:
                return replacements[func](func, *args, **kwargs)
            if kwargs:
                if _names_gpu(kwargs.get("device")):
                    _report_use(f"device={_device_text(kwargs['device'])}")
                    kwargs = {**kwargs, "device": "cpu"}
                if kwargs.get("pin_memory"):
                    kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)

    Devices().__enter__()  # type: ignore[no-untyped-call]


def _translate_arguments() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d, fsdp
    from torch.utils import _device

    for module in (dist, distributed_c10d):
        _translate(module, "init_process_group", backend="gloo", device_id=None)
        _translate(module, "new_group", backend="gloo", device_id=None)
    replace(dist, "is_nccl_available", functools.partial(_answer, "is_nccl_available", True))
    _translate(device_mesh.DeviceMesh, "__init__", device_type="cpu")
    _translate(_device.DeviceContext, "__init__", called="torch.device", device="cpu")
    _translate(torch.nn.parallel.DistributedDataParallel, "__init__", device_ids=None, output_device=None)
    _translate(fsdp.FullyShardedDataParallel, "__init__", device_id=torch.device("cpu"))
    _translate(torch, "load", called="torch.load", map_location="cpu")
    replace(torch.amp.GradScaler, "__init__", _init_scaler)
    replace(torch.autocast, "__init__", _autocast_on_cpu)


def _translate_loading(module: ModuleType) -> None:
    """Lets transformers choose the attention itself if a script asks for a GPU kernel."""
    if Observation("models that are loaded for GPUs", ATTENTION, DEVICE_MAP).is_possible:
        method = ATTENTION.path.rpartition(".")[2]
        _translate(module.PreTrainedModel, method, called="from_pretrained", attn_implementation=None)
        _translate(module, "check_and_set_device_map", called="from_pretrained", device_map="cpu")


def _autocast_on_cpu(
    original: Callable[..., Any], self: Any, device_type: str, dtype: Any = None, *more: Any, **options: Any
) -> None:
    """Maps CUDA to the CPU in the user's own calls: activation checkpointing enters contexts for both devices."""
    import torch

    if _names_gpu(device_type) and _is_of_user(sys._getframe(2)):
        _report_use('autocast("cuda")')
        device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
    original(self, device_type, dtype, *more, **options)


def _init_scaler(original: Callable[..., Any], self: Any, device: str = "cuda", *more: Any, **options: Any) -> None:
    """Begins with a factor of 1, so that no step is skipped, and gradients are unscaled for the comparison."""
    if _names_gpu(device):
        _report_use('GradScaler("cuda")')
        device, more, options = "cpu", (1.0, *more[1:]), {**options}
        options.pop("init_scale", None)
    original(self, device, *more, **options)


def _translate(owner: Any, name: str, called: str = "", **instead: Any) -> None:
    """Replaces GPUs in the arguments of a function or class; `called`: its name in reports, if it has another one."""
    signature = inspect.signature(getattr(owner, name))
    called = called or (owner.__name__ if name == "__init__" else name)

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the function itself reports it
            return original(*args, **kwargs)
        bound.apply_defaults()
        of_gpus = [parameter for parameter in instead if _names_gpu(bound.arguments[parameter])]
        for parameter in of_gpus:
            _report_use(f"{called}({parameter}={_device_text(bound.arguments[parameter])})")
            bound.arguments[parameter] = instead[parameter]
        return original(*bound.args, **bound.kwargs) if of_gpus else original(*args, **kwargs)

    replace(owner, name, call)
