"""Judges one machine, from its own facts."""

import ipaddress
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from accel_fsdp.errors import TESTED, UserError
from accel_fsdp.launch import rendezvous
from accel_fsdp.launch.doctor.facts import PROBE_BYTES, Facts
from accel_fsdp.launch.doctor.rows import Row, of_error
from accel_fsdp.units import MIB, about_gib, counted, gib_or_mib, kib_or_mib, per_second

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

LITTLE_SHARED = 64 * MIB
"""Containers have this much shared memory by default."""
LEAST_FREE_SHARED = 16 * MIB
FEW_FILES = 4096
"""Open files at a time: a rank holds sockets to other ranks, shards, and what its data loaders open."""
SLOW_DISK = 100e6
"""Bytes per second: a checkpoint of 100 GB takes 17 minutes."""
SHM = "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"
BRIDGES = ("docker", "veth", "virbr", "br-", "cni", "flannel")
"""Beginnings of the names of interfaces that lead to containers of the same machine."""
NO_JOB = "no job can be started here"
ON = ("1", "true", "yes", "on", "detail")


def judge(facts: Facts, several: bool, communicated: bool = False) -> list[Row]:
    """All rows of one machine. `several`: the job has other machines; `communicated`: data was exchanged with them."""
    return [
        Row("system", "ok", f"{facts.system}, Python {facts.python}, {counted(facts.cores, 'core')}"),
        *_libraries(facts),
        *_gpus(facts),
        *_memory(facts),
        *_shared_memory(facts),
        *_limits(facts),
        *_disk(facts),
        *_host_name(facts, several, communicated),
        *_interfaces(facts, several),
        *_infiniband(facts),
        *_variables(facts),
    ]


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
        yield Row("GPUs", "ok", "none: ranks compute on the CPU and communicate by gloo")
    else:
        links = ", ".join(f"{kind} x {count}" for kind, count in sorted(facts.links.items()))
        yield Row("GPUs", "ok", f"{facts.gpus_in_words}, driver {facts.driver}{links and f', links {links}'}")
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


def _host_name(facts: Facts, several: bool, communicated: bool) -> Iterator[Row]:
    addresses, own_addresses = facts.name_addresses, set().union(*facts.addresses.values())
    reachable = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if reachable and (not own_addresses or own_addresses & set(reachable)):  # without psutil no address is known
        yield Row("host name", "ok", f"{facts.name} is {', '.join(addresses)}")
        return
    what = f"{facts.name} is {', '.join(addresses)}, its own alone" if addresses else f"{facts.name} is unknown here"
    if reachable:
        what = f"{facts.name} is {', '.join(reachable)}, an address that none of its interfaces has"
    if not several or "GLOO_SOCKET_IFNAME" in facts.variables:
        yield Row("host name", "ok", f"{what}; a job on one machine doesn't need it" if not several else what)
        return
    interface = next((name for name, own_addresses in facts.addresses.items() if _leads_away(own_addresses)), "eth0")
    fix = f"the machine's own address beside its name in /etc/hosts; or export GLOO_SOCKET_IFNAME={interface}"
    if communicated:
        why = "the ranks communicated anyway; a library that resolves the name would connect to another host"
        yield Row("host name", "warning", what, why, fix)
        return
    why = "ranks pass it to those of other machines, which then connect to themselves, or nowhere"
    yield Row("host name", "error", what, why, fix)


def _leads_away(addresses: list[str]) -> bool:
    parsed = [ipaddress.ip_address(address) for address in addresses]
    return any(not address.is_loopback and not address.is_link_local for address in parsed)


def _interfaces(facts: Facts, several: bool) -> Iterator[Row]:
    interface_list = ", ".join(f"{name} {' '.join(ips)}".strip() for name, ips in facts.addresses.items() if ips)
    try:
        rendezvous.check_interfaces(facts.variables, list(facts.addresses))
    except UserError as error:
        yield of_error("interfaces", error)
        return
    wrong_interfaces = list(_wrong_interfaces(facts)) if several else []
    yield from wrong_interfaces or [Row("interfaces", "ok", interface_list or ", ".join(facts.addresses))]


def _wrong_interfaces(facts: Facts) -> Iterator[Row]:
    """Reports interfaces named in variables that exist but don't lead to another machine."""
    for variable, _, names in rendezvous.named_interfaces(facts.variables, list(facts.addresses)):
        for name in names:
            is_internal = name == "lo" or name.startswith(BRIDGES)
            if not is_internal and (facts.addresses[name] or not any(facts.addresses.values())):
                continue  # without psutil no address is known
            why = "it leads to no other machine: Connection refused" if is_internal else "it has no IP address"
            leading = [interface for interface, addresses in facts.addresses.items() if _leads_away(addresses)]
            others = [interface for interface in leading if not interface.startswith(BRIDGES)]
            fix = f"export {variable}={others[0]}" if others else f"unset {variable}"
            yield Row("interfaces", "error", f"{variable}={facts.variables[variable]}: {name}", why, fix)


def _infiniband(facts: Facts) -> Iterator[Row]:
    port_list = ", ".join(f"{port} {state}" for port, state in facts.infiniband.items())
    if "ACTIVE" in facts.infiniband.values():
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
