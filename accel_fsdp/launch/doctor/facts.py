"""The facts of this machine, as data; torch isn't imported."""

import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from accel_fsdp import atomic_files
from accel_fsdp.errors import is_installed, versions
from accel_fsdp.hardware import host
from accel_fsdp.launch import python_child
from accel_fsdp.units import MIB

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
COMMAND_SECONDS = 60
"""Timeout for torch to find its GPUs, or for nvidia-smi to answer."""
PROBE_BYTES = 128 * MIB
"""The size of the file that measures a disk."""
SEEN_BY_TORCH = "import torch; torch.zeros(1, device='cuda'); print(torch.cuda.device_count())"
SET_HERE = "TORCH_CPP_LOG_LEVEL"
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "FI_", "PET_", "OMP_", "HF_HUB_OFFLINE", "UCX_")
"""Beginnings of variables that change how ranks communicate and compute. None of these holds a secret."""


@dataclass(frozen=True)
class Facts:
    """The facts of one machine. `*_bytes` are bytes; unknown facts are None or empty.

    `links`: between GPUs, as nvidia-smi calls them, with how many pairs have each. `infiniband`: the state of each
    port, such as `4: ACTIVE 400 Gb/sec (4X NDR)`.
    """

    name: str
    interfaces: list[str]
    system: str
    versions: dict[str, str]
    torch_cuda: str
    gpus: list[str]
    driver: str
    links: dict[str, int]
    gpu_problem: str
    cores: int
    memory_bytes: int | None
    free_memory_bytes: int | None
    shared_memory_bytes: int | None
    free_shared_memory_bytes: int | None
    open_files: int | None
    locked_bytes: int | None
    infiniband: dict[str, str]
    filesystem: str
    disk_bytes_per_second: float | None
    disk_problem: str
    folder: str
    variables: dict[str, str]


def look(folder: Path) -> Facts:
    """Looks at this machine. `folder` is where the job will write."""
    gpus, driver, problem = _gpus()
    folder = atomic_files.existing_part(folder)
    speed, disk_problem = _measure_disk(folder)
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return Facts(
        name=socket.gethostname(),
        interfaces=[name for _, name in socket.if_nameindex()],
        system=f"{platform.system()} {platform.release()}",
        versions=versions(),
        torch_cuda=_torch_cuda(),
        gpus=gpus,
        driver=driver,
        links=_links() if len(gpus) > 1 else {},
        gpu_problem=problem,
        cores=host.cores(),
        memory_bytes=host.memory_limit(),
        free_memory_bytes=host.free_memory(),
        shared_memory_bytes=shared.total if shared else None,
        free_shared_memory_bytes=shared.free if shared else None,
        open_files=_limit("RLIMIT_NOFILE"),
        locked_bytes=_limit("RLIMIT_MEMLOCK"),
        infiniband=infiniband(),
        filesystem=host.filesystem(folder),
        disk_bytes_per_second=speed,
        disk_problem=disk_problem,
        folder=str(folder),
        variables={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES) and name != SET_HERE
        },
    )


def _limit(name: str) -> int | None:
    """A limit of this process; None where there is none, such as on Windows."""
    try:
        import resource
    except ImportError:
        return None
    limit: int = resource.getrlimit(getattr(resource, name))[0] if hasattr(resource, name) else resource.RLIM_INFINITY
    return None if limit == resource.RLIM_INFINITY else limit


def _measure_disk(folder: Path) -> tuple[float | None, str]:
    """Bytes per second that a new file in a folder takes until it is on disk, or why none can be written."""
    block = os.urandom(MIB)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic()
            for _ in range(PROBE_BYTES // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return PROBE_BYTES / (time.monotonic() - began), ""
    except OSError as error:
        return None, error.strerror or str(error)


def _torch_cuda() -> str:
    """The version of CUDA that torch was built for, without importing it; empty for a build without CUDA."""
    spec = find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = version.read_text(encoding="utf-8") if version and version.is_file() else ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"](?P<version>[\d.]+)", text, flags=re.MULTILINE)
    return match["version"] if match else ""


def _gpus() -> tuple[list[str], str, str]:
    """The names of the GPUs that a process here would see, the driver's version, and what is wrong with them."""
    machine = host.listed_gpus()
    if machine.accelerator is None:
        broken = Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()
        return [], "", _output_of("nvidia-smi", "-L") or "nvidia-smi lists no GPU" if broken else ""
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    problem = _unseen_by_torch(machine.count) if is_installed("torch") else ""
    return [machine.accelerator] * machine.count, driver, problem


def _unseen_by_torch(count: int) -> str:
    """Torch's last line of output if it does not see `count` GPUs; empty if it does."""
    lines = _output_of(*python_child.command(SEEN_BY_TORCH)).strip().splitlines() or ["torch says nothing"]
    return "" if lines[-1] == str(count) else lines[-1]


def _output_of(*words: str) -> str:
    try:
        process = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} gave no answer in {COMMAND_SECONDS} seconds"
    except OSError:
        return ""
    return process.stdout


def _links() -> dict[str, int]:
    """How many pairs of GPUs have each kind of link, from the matrix of `nvidia-smi topo -m`."""
    kinds: dict[str, int] = {}
    rows = [line.split() for line in _output_of("nvidia-smi", "topo", "-m").splitlines()]
    for number, row in enumerate(row for row in rows if re.fullmatch(r"GPU\d+", row[0] if row else "") and "X" in row):
        for kind in row[1 : number + 1]:
            kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def infiniband() -> dict[str, str]:
    ports = [path.parent for path in sorted(INFINIBAND.glob("*/ports/*/state"))]
    return {f"{port.parts[-3]}:{port.name}": " ".join((_line(port / "state"), _line(port / "rate"))) for port in ports}


def _line(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
