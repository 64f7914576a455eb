"""The machines of a job meet before ranks start: each reads who the others are, and what they were started with.

Machine 0 opens torch's store at the job's port, and closes it for torchrun's rendezvous when all have read it.
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from accel_fsdp import console, waiting
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host
from accel_fsdp.launch import agreement
from accel_fsdp.launch.agreement import Settings
from accel_fsdp.units import counted, first_few

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

MACHINES, END, READ = "machines", "end", "read"
"""Keys: lines of machines that came (+) or left (-), how the meeting ends, and how many have read that."""
REPORT_SECONDS, OPEN_SECONDS = 10.0, 30.0
"""Between two lines about missing machines; and the most that a store takes to answer, that machine 0 takes to reach
itself, and that it waits for readers."""
WAIT = "the machines would wait for each other until a timeout"
FIX_ADDRESS = "main_process_ip: an address of machine 0 that the others reach; hostname -I shows those of a machine"
FIX_MISSING = "start the missing ones; --timeout SECONDS waits longer"
FIX_RANKS = "--machine-rank N, another on each machine; or srun --ntasks-per-node=1, which numbers them"


@dataclass(frozen=True)
class Machine:
    """A machine with the numbers that it was given, and the digest of its settings."""

    rank: int
    machines: int
    digest: str
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)


def meet(rank: int, machines: int, address: str, port: int, settings: Settings, seconds: float) -> None:
    """Waits until all machines have come and compares their settings; then the port is free again.

    Raises:
        UserError: some didn't come in time, two have the same rank, or their numbers or settings differ.
    """
    check_place(address, port, rank)
    deadline, place, text = time.monotonic() + seconds, f"{address}:{port}", json.dumps(settings)
    server = None if rank else _open("127.0.0.1", port, is_master=True)
    try:
        with _reach(rank, address, port, seconds if rank else min(seconds, OPEN_SECONDS)) as connection:
            own, store = Machine(rank, machines, agreement.digest_of(text.encode())), _open(address, port)
            store.set(own.digest, text)
            _wait_for_all(store, own, place, seconds, deadline)
            try:
                _compare(store)
            finally:
                with contextlib.suppress(RuntimeError):
                    store.add(READ, 1)
                    if rank == 0:
                        waiting.comes_true(lambda: store.add(READ, 0) >= len(_come(store)), OPEN_SECONDS)
            del server
            if rank:
                with contextlib.suppress(OSError):
                    connection.settimeout(OPEN_SECONDS)
                    connection.recv(1)  # returns when machine 0 has closed the store
    except RuntimeError as error:  # torch's DistError is one
        raise UserError(
            f"machine 0 at {place} closed the connection before all machines had connected",
            why="it ended, the network broke, or another program uses the port",
            fix=f"look at its output; another port on all machines: --main-process-port {port + 1}",
        ) from error


def check_place(address: str, port: int, rank: int) -> None:
    """Raises a UserError if the machines can't connect at this address and port of machine 0."""
    try:
        infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name with too long a part is not valid IDNA
        why = getattr(error, "strerror", None) or "it is not the name of a host"
        raise UserError(f"the name {address} is unknown on this machine: {why}", why=WAIT, fix=FIX_ADDRESS) from error
    if all(ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in infos):
        raise UserError(
            f"{address} is {infos[0][4][0]} on this machine, which no other machine reaches",
            why=f"{WAIT}; /etc/hosts may map a machine's own name so",
            fix=FIX_ADDRESS,
        )
    if rank == 0 and port and not host.can_listen(port):
        raise UserError(
            f"port {port} is taken on this machine",
            why="the machines of the job can't connect there",
            fix=f"another one on all machines: accel-fsdp launch --main-process-port {host.free_port()} FILE SCRIPT",
        )


def _open(address: str, port: int, is_master: bool = False) -> "Store":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=OPEN_SECONDS)
    return TCPStore(address, port, is_master=is_master, timeout=limit, wait_for_workers=False)


def _reach(rank: int, address: str, port: int, seconds: float) -> socket.socket:
    """Connects when machine 0 listens; machine 0 itself checks so that the address is its own."""
    began = reported = time.monotonic()
    while True:
        try:
            return socket.create_connection((address, port), timeout=3)
        except OSError as error:
            problem, now = error.strerror or str(error), time.monotonic()
        report = f"machine 0 at {address}:{port} has not been reached for {now - began:.0f} s: {problem}"
        if now - began >= seconds and rank == 0:
            what = f"this is machine 0, and it doesn't reach itself at {address}:{port}: {problem}"
            raise UserError(what, why="the others look for machine 0 at that address", fix=FIX_ADDRESS)
        if now - began >= seconds:
            why = "it was not started, has another address, port or rank, or a firewall drops the port"
            raise UserError(report, why=why, fix=f"look at the output of machine 0; {FIX_RANKS}")
        if now - reported >= REPORT_SECONDS:
            console.say(f"accel-fsdp: {report}")
            reported = now
        time.sleep(0.2)


def _wait_for_all(store: "Store", own: Machine, place: str, seconds: float, deadline: float) -> None:
    """Registers this machine, and waits until the meeting ends: all have come, or two contradict each other."""
    began, line = time.monotonic(), json.dumps(asdict(own))
    store.append(MACHINES, f"+{line}\n")  # type: ignore[attr-defined]
    come = _come(store)
    same = [machine for machine in come if machine.rank == own.rank]
    if len(same) > 1:
        who = ", and ".join(f"{machine.host} (process {machine.process})" for machine in same)
        _end(store, f"two machines were started as machine {own.rank}: {who}", FIX_RANKS)
    elif len(come) == own.machines or len({machine.machines for machine in come}) > 1:
        _end(store)
    try:
        while not waiting.comes_true(lambda: store.check([END]), min(REPORT_SECONDS, deadline - time.monotonic())):
            come = _come(store)
            missing = sorted({*range(own.machines)} - {machine.rank for machine in come})
            names = first_few([str(rank) for rank in missing], 8)
            who = f"machine {names} is" if len(missing) == 1 else f"machines {names} are"
            status = f"{len(come)} of {counted(own.machines, 'machine')} connected; {who} missing"
            if time.monotonic() < deadline:
                console.say(f"accel-fsdp: {status}, {time.monotonic() - began:.0f} s; machine 0 waits at {place}")
            elif own.rank:
                raise UserError(f"{status}, after {seconds:.0f} s", why=WAIT, fix=FIX_MISSING)
            else:
                _end(store, f"{status}, after {seconds:.0f} s", FIX_MISSING)
    except BaseException:
        store.append(MACHINES, f"-{line}\n")  # type: ignore[attr-defined]  # it may be started again
        raise


def _come(store: "Store") -> list[Machine]:
    """The machines that have come and not left, by rank."""
    lines = store.get(MACHINES).decode().splitlines()
    left = {line[1:] for line in lines if line[0] == "-"}
    come = (Machine(**json.loads(line[1:])) for line in lines if line[1:] not in left)
    return sorted(come, key=lambda machine: machine.rank)


def _end(store: "Store", what: str = "", fix: str = "") -> None:
    """Ends the wait of all machines; the first end counts."""
    store.compare_set(END, "", json.dumps([what, fix]))


def _compare(store: "Store") -> None:
    """Raises the UserError with which the meeting ended, or with the settings that differ."""
    what, fix = json.loads(store.get(END))
    if what:
        raise UserError(what, why=WAIT, fix=fix)
    come = _come(store)
    settings = {machine.digest: json.loads(store.get(machine.digest)) for machine in come}
    agreement.compare([(f"{machine.rank} ({machine.host})", settings[machine.digest]) for machine in come])
