"""Judges one machine, from its facts."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from accel_fsdp.errors import TESTED
from accel_fsdp.launch.doctor.facts import PROBE_BYTES, Facts
from accel_fsdp.units import MIB, about_gib, counted, gib_or_mib, kib_or_mib, per_second

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

Verdict = Literal["ok", "unknown", "warning", "error"]
LITTLE_SHARED = 64 * MIB
"""Containers have this much shared memory by default."""
LEAST_FREE_SHARED = 16 * MIB
FEW_FILES = 4096
"""Open files at a time: a rank holds sockets to other ranks, shards, and what its data loaders open."""
SLOW_DISK = 100e6
"""Bytes per second: a checkpoint of 100 GB takes 17 minutes."""
SHM = "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"
NO_JOB = "no job can be started here"
ON = ("1", "true", "yes", "on", "detail")


@dataclass(frozen=True)
class Row:
    """The result `what` of a check of `subject`; for a problem also `why` it matters, and the `fix` to type."""

    subject: str
    verdict: Verdict
    what: str
    why: str = ""
    fix: str = ""


def judge(facts: Facts) -> list[Row]:
    checks = (_gpus, _memory, _shared_memory, _limits, _disk, _interfaces, _infiniband, _variables)
    system = Row("system", "ok", f"{facts.system}, {counted(facts.cores, 'core')}")
    return [system, *_libraries(facts), *(row for check in checks for row in check(facts))]


def _libraries(facts: Facts) -> Iterator[Row]:
    yield Row("libraries", "ok", ", ".join(f"{name} {version}" for name, version in facts.versions.items()))
    for name in ("torch", "accelerate", "transformers"):
        if name not in facts.versions:
            yield Row(name, "error", "isn't installed", NO_JOB, "pip install 'accel-fsdp[train]'")
    for name, allowed in _ranges().items():
        installed = facts.versions.get(name)
        if installed and not allowed.contains(installed, prereleases=True):
            oldest, newest = TESTED[name]
            what, why = f"{installed} is outside of {allowed}", "this version is incompatible or untested"
            yield Row(name, "error", what, why, f"pip install '{name}>={oldest},<={newest}', which is tested")


def _ranges() -> dict[str, "SpecifierSet"]:
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("accel-fsdp") or []]
    except metadata.PackageNotFoundError:  # run from its sources
        return {}
    return {requirement.name: requirement.specifier for requirement in requirements if requirement.name in TESTED}


def _gpus(facts: Facts) -> Iterator[Row]:
    if facts.gpu_problem:
        fix = "nvidia-smi; a restart of the machine, if it says the same"
        yield Row("GPUs", "error", facts.gpu_problem, NO_JOB, fix)
    elif not facts.gpus:
        why = "every rank would train the whole model alone, unless the script is train/sft.py"
        fix = "CUDA_VISIBLE_DEVICES, if there is one; accel-fsdp launch --cpu FILE SCRIPT tries a job here"
        yield Row("GPUs", "warning", "this machine has no usable GPU of NVIDIA's", why, fix)
    else:
        links = ", ".join(f"{kind} x {count}" for kind, count in sorted(facts.links.items()))
        yield Row(
            "GPUs", "ok", f"{len(facts.gpus)} x {facts.gpus[0]}, driver {facts.driver}{links and f', links {links}'}"
        )
    if facts.gpus and "torch" in facts.versions and not facts.torch_cuda:
        what, why = f"torch {facts.versions['torch']} is built without CUDA", "it can't use the GPUs"
        yield Row("torch", "error", what, why, "pip install torch, from the index that pytorch.org names for your CUDA")


def _memory(facts: Facts) -> Iterator[Row]:
    if facts.memory_bytes is None:
        yield Row("memory", "unknown", "this system doesn't report it")
        return
    free = f", {about_gib(facts.free_memory_bytes)} free" if facts.free_memory_bytes is not None else ""
    yield Row("memory", "ok", f"{about_gib(facts.memory_bytes)}{free}")


def _shared_memory(facts: Facts) -> Iterator[Row]:
    size, free = facts.shared_memory_bytes, facts.free_shared_memory_bytes
    if size is None or free is None:
        yield Row("/dev/shm", "unknown", "there is none")
        return
    what = f"{gib_or_mib(free)} free of {gib_or_mib(size)}"
    if free < min(LEAST_FREE_SHARED, size):
        why = "ranks of one machine and workers of data loaders exchange data through it, and fail when it is full"
        yield Row("/dev/shm", "error", what, why, f"ls -l /dev/shm, and remove what ended jobs have left; or {SHM}")
    elif size <= LITTLE_SHARED:
        why = "NCCL and the workers of data loaders run out of it"
        yield Row("/dev/shm", "error" if len(facts.gpus) > 1 else "warning", what, why, SHM)
    else:
        yield Row("/dev/shm", "ok", what)


def _limits(facts: Facts) -> Iterator[Row]:
    locked = "unlimited" if facts.locked_bytes is None else gib_or_mib(facts.locked_bytes)
    is_low = facts.open_files is not None and facts.open_files < FEW_FILES
    files = "unlimited" if facts.open_files is None else f"{facts.open_files:,}"
    if is_low:
        what, why = f"{facts.open_files} open files", "a rank fails with: Too many open files"
        yield Row("limits", "warning", what, why, "ulimit -n 65536")
    if facts.infiniband and facts.locked_bytes is not None:
        what, why = f"{locked} of locked memory", "InfiniBand fails with: ibv_reg_mr ... Cannot allocate memory"
        yield Row("limits", "error", what, why, "ulimit -l unlimited; docker run --ulimit memlock=-1")
    elif not is_low:
        yield Row("limits", "ok", f"{files} open files, {locked} of locked memory")


def _disk(facts: Facts) -> Iterator[Row]:
    speed, place = facts.disk_bytes_per_second, f"on {facts.filesystem}" if facts.filesystem else ""
    if speed is None:
        what, fix = f"{facts.disk_problem} {place}".strip(), "make room or get the right to write there"
        yield Row("disk", "error", what, "no checkpoint can be written", f"{fix}; --folder tests another one")
        return
    place = f"{place} in {facts.folder}".strip()
    what = f"{per_second(speed)} {place}" + f" ({kib_or_mib(PROBE_BYTES)} written and synced)"
    if speed < SLOW_DISK:
        why = f"a checkpoint of 100 GB takes {100e9 / speed / 60:,.0f} minutes"
        yield Row("disk", "warning", what, why, "write to a faster disk: --folder measures another one")
    else:
        yield Row("disk", "ok", what)


def _interfaces(facts: Facts) -> Iterator[Row]:
    """NCCL takes all interfaces that begin with the name, unless the value begins with =. A ^ names those to leave out.

    A port may follow a name after a colon.
    """
    existing, rows = ", ".join(facts.interfaces), list[Row]()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = facts.variables.get(variable, "")
        is_prefix = variable.startswith("NCCL") and not value.startswith("=")
        for name in (word.partition(":")[0] for word in value.removeprefix("=").split(",")):
            is_here = any(at.startswith(name) if is_prefix else at == name for at in facts.interfaces)
            if name and not value.startswith("^") and not is_here:
                what = f"{variable}={value}: this machine has no interface {name}"
                fix = f"unset {variable}, or name an interface that each machine has"
                rows.append(Row("interfaces", "error", what, f"it has {existing}", fix))
    yield from rows or [Row("interfaces", "ok", existing)]


def _infiniband(facts: Facts) -> Iterator[Row]:
    port_list = ", ".join(f"{port} {state}" for port, state in facts.infiniband.items())
    if "ACTIVE" in port_list:
        yield Row("InfiniBand", "ok", port_list)
    elif port_list:
        why = "NCCL falls back to TCP, which is slow"
        yield Row("InfiniBand", "warning", port_list, why, "ibstat; ask the administrator of the network")


def _variables(facts: Facts) -> Iterator[Row]:
    is_odd = False
    for name, (values, why) in ODD.items():
        if (value := facts.variables.get(name, "")).lower() in values:
            is_odd = True
            yield Row("variables", "warning", f"{name}={value}", why, f"unset {name}, unless you know what it is for")
    if not is_odd:
        settings = [f"{name}={value}" for name, value in facts.variables.items() if not name.startswith("PET_")]
        yield Row("variables", "ok", ", ".join(settings) or "none that matter")


ODD: dict[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (ON, "each kernel waits for the previous one: only useful to debug errors"),
    "TORCH_DISTRIBUTED_DEBUG": (("detail",), "each collective is compared between ranks first, which is slow"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (("0",), "after the loss of a rank the others hang for ever"),
    "TORCH_NCCL_BLOCKING_WAIT": (ON, "the CPU waits for each collective, which is slow"),
    "NCCL_P2P_DISABLE": (ON, "GPUs of this machine don't use the links between them"),
    "NCCL_SHM_DISABLE": (ON, "GPUs of this machine communicate through the network"),
    "NCCL_IB_DISABLE": (ON, "machines communicate by TCP even with InfiniBand"),
}
"""Variables with values that slow a job down or hide errors; each is a workaround for some problem."""
