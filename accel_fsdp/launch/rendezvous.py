"""Checks the rendezvous address of a job's machines: names, ports and interfaces, before ranks wait for each other."""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from ipaddress import ip_address

from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host

WAIT = "the machines would wait for each other until a timeout"
FIX_ADDRESS = "main_process_ip: an address of machine 0 that the others reach; hostname -I shows those of a machine"
ANSWER_SECONDS, AGAIN_SECONDS = 3.0, 0.2
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_place(address: str, port: int, rank: int) -> None:
    """Raises a UserError if the machines can't connect at this address and port of machine 0."""
    try:
        resolved = addresses_of(address)
    except (OSError, UnicodeError) as error:  # a name with too long a part is not valid IDNA
        why = getattr(error, "strerror", None) or "it is not the name of a host"
        raise UserError(f"the name {address} is unknown on this machine: {why}", why=WAIT, fix=FIX_ADDRESS) from error
    if all(ip_address(ip).is_loopback for ip in resolved):
        raise UserError(
            f"{address} is {resolved[0]} on this machine, which no other machine reaches",
            why=f"{WAIT}; /etc/hosts may map a machine's own name so",
            fix=FIX_ADDRESS,
        )
    if rank == 0 and port and not host.can_listen(port):
        raise UserError(
            f"port {port} is taken on this machine",
            why="the machines of the job can't connect there",
            fix=f"another one on all machines: accel-fsdp launch --main-process-port {host.free_port()} FILE SCRIPT",
        )


def why_unreached(problem: str) -> str:
    """The usual causes of an endpoint that can't be reached."""
    if "refused" in problem:
        return "the machine with that address answers, and nothing listens at the port: machine 0 may have another one"
    return "nothing answers: often a firewall drops the port, or the address is another machine's"


def is_own(address: str) -> bool:
    """Whether the address is one of this machine's, so that a socket can be bound to it."""
    try:
        infos = _look_up(address)
    except (OSError, UnicodeError):
        return False
    for family, kind, number, _, place in infos:
        with closing(socket.socket(family, kind, number)) as probe:
            try:
                probe.bind((place[0], 0))
            except OSError:
                continue
            return True
    return False


def wait_for(address: str, port: int, seconds: float) -> str:
    """Waits until the port takes a connection; returns why it didn't, empty if it did."""
    deadline, last = time.monotonic() + seconds, ""
    while True:
        try:
            with closing(socket.create_connection((address, port), timeout=ANSWER_SECONDS)):
                return ""
        except OSError as error:
            last = error.strerror or str(error)
        if time.monotonic() > deadline:
            return last
        time.sleep(AGAIN_SECONDS)


def _look_up(address: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]:
    return socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)  # type: ignore[return-value]


def addresses_of(name: str) -> list[str]:
    """The addresses to which this machine resolves a name; raises OSError, or UnicodeError for an invalid one."""
    return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in _look_up(name)))


def check_interfaces(variables: Mapping[str, str], existing: Sequence[str]) -> None:
    """Raises a UserError if a variable names a network interface that this machine doesn't have.

    NCCL takes all interfaces that begin with the name, unless the value begins with =. A ^ names those to leave out.
    A port may follow a name after a colon.
    """
    for variable in INTERFACES:
        value = variables.get(variable, "")
        is_prefix = variable.startswith("NCCL") and not value.startswith("=")
        for name in (word.partition(":")[0] for word in value.removeprefix("=").split(",")):
            is_here = any(at.startswith(name) if is_prefix else at == name for at in existing)
            if name and not value.startswith("^") and not is_here:
                raise UserError(
                    f"{variable}={value}: this machine has no interface {name}",
                    why=f"it has {', '.join(existing)}",
                    fix=f"unset {variable}, or name an interface that each machine has",
                )
