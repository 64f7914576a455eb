"""The script of `accel-fsdp doctor --bandwidth FILE`: an all-reduce and an all-gather of all ranks, beside the link."""

import os
import re
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from accel_fsdp.errors import UserError
from accel_fsdp.hardware import find
from accel_fsdp.launch.doctor import facts
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import cpu
from accel_fsdp.units import MIB, any_time, counted, kib_or_mib, per_second

SIZES_ON_CPU, SIZES_ON_GPU = (MIB // 4, 4 * MIB, 32 * MIB), (MIB, 32 * MIB, 1024 * MIB)
REPEATS = 5
LIMIT = timedelta(seconds=120)
"""The longest that ranks wait for each other."""


def expected(machines: int) -> tuple[float, str]:
    """Bytes per second that the slowest link between the ranks should give, with its name; 0 if it is unknown."""
    if machines == 1:
        try:
            gpu = find(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        except UserError:  # a GPU that isn't in the table
            gpu = None
        return (gpu.link_bytes_per_s, f"the link of {gpu.name}") if gpu else (0.0, "this machine's memory")
    rates = [re.search(r"ACTIVE ([\d.]+) Gb", port) for port in facts.infiniband().values()]
    if gigabits := [float(rate[1]) for rate in rates if rate]:
        return sum(gigabits) * 1e9 / 8, f"{counted(len(gigabits), 'port')} of InfiniBand"
    name = _interface()
    speed = Path("/sys/class/net", name, "speed")
    try:
        megabits = int(speed.read_text())
    except (OSError, ValueError):  # of a virtual one
        megabits = 0
    return max(megabits, 0) * 1e6 / 8, f"the interface {name or '(unknown)'}"


def _interface() -> str:
    """The interface of the default route, unless a variable names one."""
    rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()]
    default = next((row[0] for row in rows if row[1:2] == ["00000000"]), "")
    named = os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or default
    return named.lstrip("=^").partition(",")[0]


def measure(name: str, size: int, device: torch.device) -> tuple[float, float]:
    """Median seconds of a collective over `size` bytes, and its bus bandwidth as nccl-tests defines it.

    Raises:
        RuntimeError: the result is wrong.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    part = torch.full((size // 4 // world,), rank + 1.0, device=device)
    whole, durations = torch.zeros(len(part) * world, device=device), []
    for _ in range(REPEATS + 1):
        whole.fill_(rank + 1)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(whole) if name == "all-reduce" else dist.all_gather_into_tensor(whole, part)
        if whole.is_cuda:
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - began)
    if float(whole.double().sum()) != len(part) * world * (world + 1) / 2 * (world if name == "all-reduce" else 1):
        raise RuntimeError(f"the {name} of {kib_or_mib(size)} gives a wrong result on rank {rank}")
    seconds = statistics.median(durations[1:])
    return seconds, (2 if name == "all-reduce" else 1) * (world - 1) / world * size / seconds


def main() -> None:
    launched, on_gpus = LaunchEnvironment.now(), not cpu.is_needed()
    if launched.world_size < 2:
        sys.exit("accel-fsdp: one rank has no link to measure: num_processes of the YAML is 1")
    device = torch.device("cuda", launched.local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=LIMIT, device_id=device if on_gpus else None)
    link, source = expected(launched.machines)
    show = print if dist.get_rank() == 0 else lambda _: None
    should = per_second(link) if link else "an unknown speed"
    show(f"{launched.world_size} ranks on {counted(launched.machines, 'machine')}: {source} should give {should}")
    for name in ("all-reduce", "all-gather"):
        for size in SIZES_ON_GPU if on_gpus else SIZES_ON_CPU:
            seconds, bandwidth = measure(name, size, device)
            share = f"  {bandwidth / link:4.0%} of the link" if link else ""
            show(f"{name}  {kib_or_mib(size):>9}  {any_time(seconds):>10}  {per_second(bandwidth):>12}{share}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
