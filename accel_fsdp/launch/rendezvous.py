"""Where the machines of a job meet: advice on names, ports and interfaces before ranks wait for each other."""

import os
import socket
from collections.abc import Mapping
from contextlib import closing
from ipaddress import ip_address

from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host

WAIT = "the machines would wait for each other until a timeout"
FIX_ADDRESS = "main_process_ip: an address of machine 0 that the others reach; hostname -I shows those of a machine"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check(address: str, port: int, rank: int) -> None:
    """Looks from this machine at the place where all of them meet, that of machine 0.

    Raises:
        UserError: its name can't be resolved, or is this machine's own for all; its port is taken; there is no such
            network interface as a variable names.
    """
    _check_interfaces(os.environ)
    own = _resolved(address)
    if all(ip_address(one).is_loopback for one in own):
        raise UserError(
            f"{address} is {own[0]} on this machine, which no other machine reaches",
            why=f"{WAIT}; /etc/hosts may map a machine's own name so",
            fix=FIX_ADDRESS,
        )
    if rank == 0 and port and not host.can_listen(port):
        raise UserError(
            f"port {port} is taken on this machine",
            why="the machines of the job can't meet there",
            fix=f"another one on all machines: accel-fsdp launch --main-process-port {host.free_port()} FILE SCRIPT",
        )


def own_address(towards: str) -> str:
    """The address with which this machine reaches another; empty where it doesn't. Nothing is sent."""
    for family, kind, number, _, place in _look_up(towards):
        with closing(socket.socket(family, kind, number)) as probe:
            try:
                probe.connect(place)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def _look_up(address: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]:
    return socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)  # type: ignore[return-value]


def _resolved(address: str) -> list[str]:
    try:
        return [str(found[4][0]).partition("%")[0] for found in _look_up(address)]
    except OSError as error:
        raise UserError(
            f"the name {address} is unknown on this machine: {error.strerror or error}", why=WAIT, fix=FIX_ADDRESS
        ) from error


def _check_interfaces(variables: Mapping[str, str]) -> None:
    there = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        for wanted in _wanted(variable, variables.get(variable, "")):
            begins = variable.startswith("NCCL") and not wanted.startswith("=")  # NCCL takes all that begin so
            name = wanted.removeprefix("=")
            if not any(one.startswith(name) if begins else one == name for one in there):
                raise UserError(
                    f"{variable}={variables[variable]}: this machine has no interface {name}",
                    why=f"it has {', '.join(there)}",
                    fix=f"unset {variable}, or name an interface that each machine has",
                )


def _wanted(variable: str, value: str) -> list[str]:
    """The interfaces that must be there: a ^ names those to leave out, and a name may have a port behind a colon."""
    if value.startswith("^"):
        return []
    exact = "=" if value.startswith("=") and variable.startswith("NCCL") else ""
    names = value.removeprefix("=").split(",") if exact else value.split(",")
    return [f"{exact}{name.partition(':')[0]}" for name in names if name]
