"""Runs real FSDP and DeepSpeed with gloo on machines without an accelerator, which Accelerate doesn't support.

Accelerate's `PartialState` has no branch for "FSDP, but no GPU": it trains every rank unsharded and exits 0. `enable()`
closes that gap for tests, rehearsals and laptops. It acts only if torch sees no device that Accelerate can shard on,
reports that on stderr, and changes nothing on a machine with a GPU, NPU or TPU. Only this module,
`training/patches.py` and, for scripts on CPU ranks, `gpu_as_cpu.py` patch libraries.
"""

import atexit
import contextlib
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn
from unittest import mock

from accel_fsdp.errors import is_installed
from accel_fsdp.launch_environment import OFFLOAD_DEVICES, LaunchEnvironment
from accel_fsdp.library_internals import Internal, patch
from accel_fsdp.units import counted

INIT_UTILS = "torch.distributed.fsdp._init_utils"
OPTIM_UTILS = "torch.distributed.fsdp._optim_utils"
RELIES_ON = (
    Internal("transformers.training_args:is_torch_bf16_gpu_available", ""),
    Internal("torch.distributed.distributed_c10d:_get_default_store", ""),
)
PLUGIN = "accelerate.utils:FullyShardedDataParallelPlugin"
UNSHARDED = "on CPU processes it would train every rank unsharded"
FSDP1_FAILS = "FSDP1 on CPU tensors would fail, or save wrong states"
END_SECONDS = 0.02
"""Seconds between two looks at how many ranks have ended."""
_patched = False
_at_end: list[Callable[[], None]] = []


def is_needed() -> bool:
    """True when this machine has no device type that Accelerate can run FSDP on (Apple's MPS cannot shard either)."""
    import torch
    from accelerate.utils import is_torch_xla_available

    if is_torch_xla_available():
        return False
    return not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type == "mps"  # type: ignore[union-attr]


def enable() -> bool:
    """Makes gloo on CPU the FSDP device of this process if it has no accelerator; returns whether it did.

    Call before the first `TrainingArguments`, `Accelerator` or `PartialState`, and `finish(0)` at the end: torch may
    abort a rank that leaves gloo's threads to the interpreter. Idempotent.
    """
    global _patched
    if not is_needed():
        return False
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it chose the CPU
    launch = LaunchEnvironment.now()
    if _patched or not launch.is_rank or not launch.shards:
        return True
    choose_gloo()
    _announce(launch)
    _patched = True
    if launch.uses_deepspeed:
        _prepare_deepspeed()
        return True
    let_plugin_sync()
    mend_fsdp1()
    return True


def begin_rank() -> None:
    """Prepares a process that runs any script as a rank: `enable`, bf16, and Accelerate's DDP on CPU."""
    if enable():
        if is_installed("transformers"):
            allow_bf16()
        if not LaunchEnvironment.now().shards:
            os.environ["ACCELERATE_USE_CPU"] = "true"  # Accelerate's DDP on gloo; otherwise each rank trains alone


@cache
def mend_fsdp1() -> None:
    """Makes torch's own FSDP1 work on CPU tensors, for programs that don't use Accelerate. Later calls do nothing."""
    for mend in (default_to_cpu, shard_within_machines, sync_cpu_tensors, keep_full_state, copy_full_optimizer_state):
        mend()


@patch(Internal("transformers.utils:is_torch_bf16_gpu_available", ""), why="bf16 would be refused on CPU")
def allow_bf16() -> None:
    """`TrainingArguments` refuses bf16 without a GPU, unless `use_cpu` is set; CPUs compute in it.

    The patch is for scripts that don't set it, such as TRL's, whose default is bf16. Other callers still get False.
    """
    from transformers import utils

    original = utils.is_torch_bf16_gpu_available

    def available() -> bool:
        return sys._getframe(1).f_globals.get("__name__") == "transformers.training_args" or original()

    utils.is_torch_bf16_gpu_available = available
    if "transformers.training_args" in sys.modules:
        from transformers import training_args

        training_args.is_torch_bf16_gpu_available = available


def init_process_group(timeout_seconds: float) -> None:
    """Starts gloo with the job's collective timeout, which Trainer drops on CPU (transformers 5.23, `use_cpu`)."""
    import torch.distributed as dist

    if LaunchEnvironment.now().is_rank and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))


def at_end(function: Callable[[], None]) -> None:
    """Registers a function that `finish(0)` calls first."""
    _at_end.append(function)


def finish(exit_code: int) -> None:
    """Ends a CPU rank without running interpreter teardown; returns where there is an accelerator or no process group.

    3 of 20 runs on torch 2.13 aborted (SIGABRT, "terminate called without an active exception") while gloo's threads
    were torn down after all work was done. Leaving by `os._exit` after a barrier: 0 of 12.
    """
    if not is_needed():
        return
    while _at_end and exit_code == 0:
        _at_end.pop()()
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if exit_code == 0:
        wait_for_others("ended")
        dist.destroy_process_group()
    _exit(exit_code)


def leave(exit_code: int) -> NoReturn:
    """Ends this process as Python does, but for the interpreter's teardown: threads end, then `atexit` runs."""
    threading._shutdown()  # type: ignore[attr-defined]  # which ends thread pools too
    atexit._run_exitfuncs()
    _exit(exit_code)


def _exit(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def wait_for_others(end: str) -> None:
    """Returns once all ranks have reached this point: connections closed earlier would break the collectives of others.

    The ranks count themselves in the store, because a barrier could be mistaken for one in which another rank still
    waits.
    """
    import torch.distributed as dist

    with contextlib.suppress(dist.DistError):  # rank 0 saw the last rank first, and has closed the store
        store = dist.distributed_c10d._get_default_store()
        finished = store.add(f"accel_fsdp/{end}", 1)
        while finished < dist.get_world_size():
            time.sleep(END_SECONDS)
            finished = store.add(f"accel_fsdp/{end}", 0)


def _announce(launch: LaunchEnvironment) -> None:
    if launch.local_rank != 0:
        return
    engine = "DeepSpeed" if launch.uses_deepspeed else "FSDP"
    offload = "; CPU offload has no meaning here and is off" if launch.offloads else ""
    processes = counted(launch.world_size, "CPU process", "CPU processes")
    print(f"accel-fsdp: no accelerator found, running real {engine} on {processes} (gloo){offload}", file=sys.stderr)


def _prepare_deepspeed() -> None:
    """Sets DeepSpeed's device before its import, and turns off offload, which would be compiled to copy CPU to CPU.

    DeepSpeed's reductions through shared memory would be compiled too (0.19): that takes a minute and a compiler, and
    if the build is killed, later jobs wait for it indefinitely. Without them DeepSpeed reduces by gloo.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.update(dict.fromkeys(OFFLOAD_DEVICES, "none"))
    with contextlib.suppress(ModuleNotFoundError):  # Accelerate reports a missing DeepSpeed
        from deepspeed.ops import __compatible_ops__ as compatible

        compatible["deepspeed_shm_comm"] = False


@patch(Internal("torch.distributed.fsdp:FullyShardedDataParallel.__init__", "self module *"), why=FSDP1_FAILS)
def default_to_cpu() -> None:
    """FSDP1 assumes an accelerator for modules on the CPU, unless it gets a `device_id`."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    original = FullyShardedDataParallel.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind_partial(self, *args, **kwargs)
        bound.arguments["device_id"] = bound.arguments.get("device_id") or torch.device("cpu")
        original(*bound.args, **bound.kwargs)

    FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]


@patch(Internal("accelerate:PartialState._prepare_backend", "self cpu sagemaker_dp backend"), why=UNSHARDED)
def choose_gloo() -> None:
    """`_prepare_backend` offers FSDP only to device types on its list, and CPU is not on it.

    `MULTI_GPU` is the name under which Accelerate then turns FSDP on; the device comes from `ACCELERATE_TORCH_DEVICE`.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    def gloo_on_cpu(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str, DistributedType]:
        seconds = LaunchEnvironment.now().hang_timeout or 1800  # Trainer's and torch's default
        init_process_group(timeout_seconds=seconds)  # unless we have set another one before
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = gloo_on_cpu


@patch(
    Internal(f"{PLUGIN}.__post_init__", "self"),
    Internal(f"{PLUGIN}.sync_module_states"),
    Internal(f"{PLUGIN}.cpu_ram_efficient_loading"),
    Internal(f"{PLUGIN}.param_init_fn"),
    why=UNSHARDED,
)
def let_plugin_sync() -> None:
    """The plugin refuses `sync_module_states` without a GPU, and torch refuses CPU offload.

    Syncing from rank 0 works on gloo once the plugin is past its device look-up. Offload would move CPU tensors to the
    CPU, so it is turned off.
    """
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin as Plugin

    original = Plugin.__post_init__

    def post_init(self: Any) -> None:
        os.environ["FSDP_OFFLOAD_PARAMS"] = "false"
        launch = LaunchEnvironment.now()
        sync = launch.syncs_module_states if self.sync_module_states is None else self.sync_module_states
        fsdp1 = int(self.fsdp_version) == 1 if self.fsdp_version else launch.uses_fsdp1
        if not (fsdp1 and sync):
            original(self)
            return
        off = {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
        with mock.patch.dict(os.environ, off):
            self.sync_module_states = False
            original(self)
        self.sync_module_states, self.cpu_ram_efficient_loading = True, launch.loads_on_rank_zero
        self.param_init_fn = lambda module: module.to_empty(device=torch.device("cpu"), recurse=False)

    Plugin.__post_init__ = post_init


@patch(
    Internal(f"{INIT_UTILS}:_init_intra_and_inter_node_groups", "global_process_group num_devices_per_node"),
    why=FSDP1_FAILS,
)
def shard_within_machines() -> None:
    """FSDP1 takes ranks per node from `torch.cpu.device_count()`, always 1: hybrid would shard nothing."""
    import torch.distributed.fsdp._init_utils as init_utils

    original = init_utils._init_intra_and_inter_node_groups

    def groups(global_process_group: Any, num_devices_per_node: int) -> Any:
        return original(global_process_group, LaunchEnvironment.now().local_world_size)

    init_utils._init_intra_and_inter_node_groups = groups


@patch(Internal(f"{INIT_UTILS}:_check_module_states_for_sync_module_states", "module_states"), why=FSDP1_FAILS)
def sync_cpu_tensors() -> None:
    """FSDP1 rejects CPU tensors under `sync_module_states` because NCCL could not broadcast them."""
    import torch.distributed.fsdp._init_utils as init_utils

    init_utils._check_module_states_for_sync_module_states = lambda module_states: None


@patch(Internal("torch.distributed.fsdp._flat_param:FlatParamHandle.to_cpu", "self"), why=FSDP1_FAILS, until="2.14")
def keep_full_state() -> None:
    """FSDP1's full state dict with `offload_to_cpu` segfaults on CPU.

    `FlatParamHandle.to_cpu` frees the unsharded parameter after copying it to the CPU; on CPU the "copy" is the same
    storage. The parameter is where it should be already, so there is nothing to do.
    """
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    original = FlatParamHandle.to_cpu

    def to_cpu(self: Any) -> contextlib.AbstractContextManager[None]:
        on_cpu = self.flat_param.device.type == "cpu"
        return contextlib.nullcontext() if on_cpu else original(self)

    FlatParamHandle.to_cpu = to_cpu  # type: ignore[method-assign, assignment]


@patch(
    Internal(f"{OPTIM_UTILS}:_unflatten_orig_param_states", "fsdp_param_info output_states state_name *"),
    why=FSDP1_FAILS,
)
def copy_full_optimizer_state() -> None:
    """On CPU, FSDP1's full optimizer state holds the last gathered tensor under every name.

    `_unflatten_orig_param_states` hands out views of one gather buffer, relying on `.cpu()` to copy them before the
    next state is gathered into it. On CPU `.cpu()` copies nothing, so `exp_avg` turns into `exp_avg_sq`, silently.
    """
    import torch
    import torch.distributed.fsdp._optim_utils as optim_utils

    original = optim_utils._unflatten_orig_param_states

    def unflatten(info: Any, output_states: dict[str, dict[str, Any]], state_name: str, *args: Any) -> None:
        original(info, output_states, state_name, *args)
        for state in output_states.values():
            if isinstance(state.get(state_name), torch.Tensor):
                state[state_name] = state[state_name].clone()

    optim_utils._unflatten_orig_param_states = unflatten  # type: ignore[assignment]
