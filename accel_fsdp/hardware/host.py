"""Facts about this machine for `check --here`, without importing torch."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from accel_fsdp import atomic_files
from accel_fsdp.errors import is_installed
from accel_fsdp.hardware import gpus
from accel_fsdp.hardware.machines import CPU, MachineFacts
from accel_fsdp.units import GIB

NVIDIA_SMI_SECONDS = 20
OTHER_ACCELERATORS = ("kfd", "accel*", "davinci*", "hl*", "neuron*")
"""Device files of AMD, TPU, Ascend, Habana, Neuron: a machine with one of them has an accelerator besides NVIDIA's."""
UNLIMITED = 1 << 60


@dataclass(frozen=True)
class HereFacts:
    """The facts of this machine for `check --here`, read without importing torch; sizes are in bytes.

    `gpus` counts NVIDIA GPUs, None on a machine with another kind of accelerator. `visible` is
    CUDA_VISIBLE_DEVICES, None if it isn't set. `memory` is the host's or the container's limit, `free_disk` and
    `filesystem` are the output folder's, None and empty without one. `default_config` is the path of Accelerate's own
    config file where there is one. `port_in_use` is about the file's port. `others_may_read` is what the umask allows.
    """

    gpus: int | None = None
    visible: str | None = None
    memory: int | None = None
    free_disk: int | None = None
    filesystem: str = ""
    torch_xla: bool = False
    default_config: str = ""
    port_in_use: bool = False
    others_may_read: bool = True

    @property
    def usable_gpus(self) -> int | None:
        if self.gpus is None or self.visible is None:
            return self.gpus
        count, numbers = 0, [word.strip() for word in self.visible.split(",")]
        if len(set(numbers)) < len(numbers):
            return 0  # CUDA offers no GPU if one is named twice
        for entry in numbers:
            if not entry or (entry.lstrip("-").isdecimal() and not 0 <= int(entry) < self.gpus):
                break  # CUDA drops the first bad entry and all after it
            count += 1
        return count


def read_here(port: int, output: str | None) -> HereFacts:
    """Looks at GPUs, memory, disk, port and environment. `output` is the folder that the run will write to."""
    folder = None if output is None else atomic_files.existing_part(Path(output))
    xla_enabled = os.environ.get("USE_TORCH_XLA", "true").lower() not in ("false", "0", "no", "off", "n", "f")
    configs = [atomic_files.default_config().with_suffix(suffix) for suffix in (".yaml", ".json")]
    return HereFacts(
        gpus=count_gpus(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        memory=memory_limit(),
        free_disk=None if folder is None else shutil.disk_usage(folder).free,
        filesystem="" if folder is None else filesystem(folder),
        torch_xla=xla_enabled and importlib.util.find_spec("torch_xla") is not None,
        default_config=next((str(path) for path in configs if path.is_file()), ""),
        port_in_use=port > 0 and port_in_use(port),
        others_may_read=bool(atomic_files.file_mode() & 0o044),
    )


def count_gpus() -> int | None:
    """The number of NVIDIA GPUs; None if there is only another accelerator's device file."""
    try:
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
        count = sum(line.startswith("GPU ") for line in result.stdout.splitlines())
    except (OSError, subprocess.TimeoutExpired):
        proc = Path("/proc/driver/nvidia/gpus")
        count = len(list(proc.iterdir())) if proc.is_dir() else 0
    has_others = any(any(Path("/dev").glob(pattern)) for pattern in OTHER_ACCELERATORS)
    return None if count == 0 and has_others else count


def listed_gpus() -> MachineFacts:
    """The NVIDIA GPUs visible to a process started here, with the driver's name and memory."""
    words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(words, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return CPU
    cards = [(name.strip(), mib.strip()) for name, _, mib in (line.rpartition(",") for line in lines) if name]
    count = HereFacts(len(cards), os.environ.get("CUDA_VISIBLE_DEVICES")).usable_gpus
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


def port_in_use(port: int) -> bool:
    """Whether something on this machine listens on `port`: the launcher's own test."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def can_listen(port: int) -> bool:
    """Whether a store can listen on `port` of all addresses, as torch's does. Stricter than `port_in_use`."""
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
