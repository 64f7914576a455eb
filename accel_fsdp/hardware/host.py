"""Facts about this machine, without importing torch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from accel_fsdp.errors import is_installed
from accel_fsdp.hardware import gpus
from accel_fsdp.hardware.machines import CPU, MachineFacts
from accel_fsdp.units import GIB

NVIDIA_SMI_SECONDS = 20
UNLIMITED = 1 << 60


def visible_gpus(gpus: int, visible: str | None) -> int:
    """How many of a machine's GPUs a process sees under CUDA_VISIBLE_DEVICES, None if it isn't set."""
    if visible is None:
        return gpus
    count, numbers = 0, [word.strip() for word in visible.split(",")]
    if len(set(numbers)) < len(numbers):
        return 0  # CUDA offers no GPU if one is named twice
    for entry in numbers:
        if not entry or (entry.lstrip("-").isdecimal() and not 0 <= int(entry) < gpus):
            break  # CUDA drops the first bad entry and all after it
        count += 1
    return count


def listed_gpus() -> MachineFacts:
    """The NVIDIA GPUs visible to a process started here, with the driver's name and memory."""
    words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(words, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return CPU
    cards = [(name.strip(), mib.strip()) for name, _, mib in (line.rpartition(",") for line in lines) if name]
    count = visible_gpus(len(cards), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not count:
        return CPU
    name, mib = cards[0]
    return MachineFacts(name, count, gpus.sold_gib(name, int(mib) / 1024) if mib.isdecimal() else None)


def read_machine() -> MachineFacts:
    """Counts the accelerators that torch sees on this machine; without torch, the GPUs that NVIDIA's driver lists."""
    if not is_installed("torch"):
        return listed_gpus()
    import torch

    if not torch.accelerator.is_available():
        return CPU
    if torch.cuda.is_available():
        name, total_bytes = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
        return MachineFacts(name, torch.cuda.device_count(), gpus.sold_gib(name, total_bytes / GIB))
    return MachineFacts(str(torch.accelerator.current_accelerator()), torch.accelerator.device_count())


def memory_limit() -> int | None:
    """The host's memory in bytes, or the control group's limit if that is lower; None off Linux."""
    total = _field(Path("/proc/meminfo"), "MemTotal:")
    if total is None:
        return None
    limits = (_number(path) for path in _limit_files())
    return min([total * 1024, *(limit for limit in limits if limit is not None)])


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int | None:
    """Free bytes of host memory: the machine's, or its control group's if less; None off Linux.

    A control group's page cache counts as free, because the kernel reclaims it first.
    """
    available = _field(Path("/proc/meminfo"), "MemAvailable:")
    if available is None:
        return None
    candidates = [available * 1024]
    for path in _limit_files():
        limit, used = _number(path), _number(path.with_name("memory.current"))
        if limit is not None and used is not None:
            candidates.append(max(limit - used + (_field(path.with_name("memory.stat"), "inactive_file") or 0), 0))
    return min(candidates)


def peak_memory() -> int:
    """The most bytes of host memory that this process had at any time so far, files that it mapped included."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


def _limit_files() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    try:
        cgroup_lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    control_group = next((line.removeprefix("0::/") for line in cgroup_lines if line.startswith("0::/")), "")
    groups = [root / control_group, *(root / control_group).parents]
    files = [group / "memory.max" for group in groups if group.is_relative_to(root)]
    return [*files, root / "memory" / "memory.limit_in_bytes"]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < UNLIMITED else None


def filesystem(folder: Path) -> str:
    """The type of the file system that a folder is on, such as ext4 or nfs4; empty off Linux."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    parents = [(mount[1], mount[2]) for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return max(parents, key=lambda mount: len(mount[0]), default=("", ""))[1]


def can_listen(port: int) -> bool:
    """Whether a store can listen on `port` of all addresses, as torch's does. Stricter than the launcher's own test."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
