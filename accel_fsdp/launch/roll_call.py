"""Waits for all machines of a job before ranks start, and reports which have connected and which are missing.

Machine 0 holds a store at the job's port, and closes it when all have connected: torchrun's launchers then meet there.
"""

import contextlib
import os
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import NoReturn

from accel_fsdp import console
from accel_fsdp.errors import UserError
from accel_fsdp.launch import agreement, rendezvous
from accel_fsdp.launch.agreement import Member, Settings
from accel_fsdp.launch.store import Address, JsonStore
from accel_fsdp.units import counted, first_few

REPORT_SECONDS = 10.0
"""Seconds between two lines about missing machines."""
POLL_SECONDS = 0.2
OPEN_SECONDS = 60.0
"""Timeout for opening a store, and for a connected machine to confirm that all have connected."""
OWN_SECONDS = 60.0
"""Seconds that a machine with another rank waits for machine 0 at its own address."""
OTHER_SECONDS = 30.0
"""The most seconds that machine 0 tries to reach itself at an address that none of its interfaces has."""
READ_SECONDS = 2.0
"""Seconds that machine 0 keeps the store open, so that the others can read its message."""
REFUSED, NONE = "refused", list[str]()
"""The key of the value that ends the wait, and its content if machine 0 lets the ranks start."""
FIX_REACH = "start machine 0, or look at its output; accel-fsdp doctor on both tests their connection"
FIX_RANKS = "--machine-rank N, another on each machine; or srun --ntasks-per-node=1, which numbers them"


@dataclass(frozen=True)
class LauncherInfo:
    """The launcher of a machine, with the numbers that it was given."""

    rank: int
    machines: int
    processes: int | None
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"machine {self.rank} ({self.host})"


def wait_for_machines(machine: LauncherInfo, address: Address, seconds: float, settings: Settings) -> None:
    """Waits until all machines have connected at `address` and compared their settings, and its port is free again.

    Raises:
        UserError: some didn't connect in time, two have the same rank, or their settings differ.
    """
    deadline = time.monotonic() + seconds
    try:
        store = _open_store(machine, address, seconds) if machine.rank == 0 else _connect(machine, address, seconds)
    except RuntimeError as error:
        raise UserError(
            f"the machines can't connect at {address}: {error}",
            why="another program uses the port",
            fix=f"another one on all machines: --main-process-port {address.port + 1}",
        ) from error
    try:
        _register(store, machine, address, seconds, deadline)
        agreement.compare(
            store.torch_store, "settings", Member(machine.rank, machine.rank), machine.machines, settings, OPEN_SECONDS
        )
        _confirm(store, machine)
    except RuntimeError as error:  # a DistError is one
        raise UserError(
            f"machine 0 at {address} closed the connection before all machines had connected",
            why="it ended, or the network broke",
            fix="look at its output",
        ) from error


# Reaching machine 0


def _open_store(machine: LauncherInfo, address: Address, seconds: float) -> JsonStore:
    """Opens the store on this machine, if others reach this machine at the address."""
    store = replace(address, host="127.0.0.1", hosts=True).open(OPEN_SECONDS)
    if rendezvous.is_own(address.host):
        return store
    store.put("holder", asdict(machine))
    if problem := rendezvous.wait_for(address.host, address.port, min(seconds, OTHER_SECONDS)):
        raise UserError(
            f"this is machine 0, and it doesn't reach itself at {address}: {problem}",
            why=f"no interface of it has the address of {address.host}, at which the others look for machine 0",
            fix=rendezvous.FIX_ADDRESS,
        )
    existing = address.open(OPEN_SECONDS)
    if existing.get("holder") != asdict(machine):
        _refuse(existing, f"two machines were started as machine 0: the one at {address.host}, and {machine.host}")
    return store


def _connect(machine: LauncherInfo, address: Address, seconds: float) -> JsonStore:
    """Connects to the store of machine 0 as soon as it listens."""
    began, is_own = time.monotonic(), rendezvous.is_own(address.host)
    limit = min(seconds, OWN_SECONDS) if is_own else seconds
    note = f"; {address.host} is this machine, which was started as machine {machine.rank}" if is_own else ""
    while True:
        remaining = began + limit - time.monotonic()
        problem = rendezvous.wait_for(address.host, address.port, max(min(REPORT_SECONDS, remaining), 0.0))
        if not problem:
            return address.open(OPEN_SECONDS)
        waited = time.monotonic() - began
        report = f"machine 0 at {address} has not been reached for {waited:.0f} s: {problem}{note}"
        if waited < limit:
            port = "; machine 0 may use another port" if "refused" in problem else ""
            console.say(f"accel-fsdp: {report}{port}")
        elif is_own:
            raise UserError(report, why="no process with machine rank 0 listens there", fix=FIX_RANKS)
        else:
            raise UserError(report, why=rendezvous.why_unreached(problem), fix=FIX_REACH)


# Which machines have connected


def _register(store: JsonStore, machine: LauncherInfo, address: Address, seconds: float, deadline: float) -> None:
    first = LauncherInfo(**store.agree(f"machine/{machine.rank}", asdict(machine)))
    if first != machine:
        addresses = f"{first.host} (process {first.process}) and {machine.host} (process {machine.process})"
        _refuse(store, f"two machines were started as machine {machine.rank}: {addresses}")
    try:
        _wait_for_all(store, machine, address, seconds, deadline)
    except BaseException:
        with contextlib.suppress(RuntimeError):
            store.remove(f"machine/{machine.rank}")
        raise


def _wait_for_all(store: JsonStore, machine: LauncherInfo, address: Address, seconds: float, deadline: float) -> None:
    began = last_report = time.monotonic()
    while True:
        if refusal := store.get(REFUSED):
            if machine.rank == 0:
                time.sleep(READ_SECONDS)
            raise _refusal(*refusal)
        infos = {rank: store.get(f"machine/{rank}") for rank in range(machine.machines)}
        present = {rank: LauncherInfo(**info) for rank, info in infos.items() if info}
        if difference := _difference(present.values()):
            _refuse(store, difference, "the same YAML and flags on all machines")
        if len(present) == machine.machines:
            return
        now = time.monotonic()
        if now >= deadline:
            late = f"{_connection_status(present, machine.machines)}, after {seconds:.0f} s"
            fix = "start the missing ones; --timeout SECONDS waits longer"
            if machine.rank == 0:
                _refuse(store, late, fix)
            raise _refusal(late, fix)
        if now - last_report >= REPORT_SECONDS:
            last_report = now
            place = f"; machine 0 waits at {address}" if machine.rank == 0 else ""
            console.say(f"accel-fsdp: {_connection_status(present, machine.machines)}, {now - began:.0f} s{place}")
        time.sleep(POLL_SECONDS)


def _confirm(store: JsonStore, machine: LauncherInfo) -> None:
    """Machine 0 keeps the store open until all machines have confirmed; the others wait until it is closed."""
    if machine.rank:
        store.put(f"complete/{machine.rank}", True)
        with contextlib.suppress(RuntimeError):
            while not (refusal := store.get(REFUSED)):
                time.sleep(POLL_SECONDS / 4)
            raise _refusal(*refusal)
        return
    others = {f"complete/{rank}": rank for rank in range(1, machine.machines)}
    answered = store.wait(others, OPEN_SECONDS)
    if quiet := [rank for key, rank in others.items() if key not in answered]:
        missing = LauncherInfo(**store.get(f"machine/{quiet[0]}"))
        _refuse(store, f"{missing} has connected, and has not answered for {OPEN_SECONDS:.0f} s", "look at its log")
    if refusal := store.agree(REFUSED, NONE):  # refused meanwhile; a later refusal ends its sender alone
        time.sleep(READ_SECONDS)
        raise _refusal(*refusal)


def _connection_status(present: Mapping[int, LauncherInfo], machines: int) -> str:
    missing = [str(rank) for rank in range(machines) if rank not in present]
    missing_list = first_few(missing, 8)
    names = f"machine {missing_list} is" if len(missing) == 1 else f"machines {missing_list} are"
    return f"{len(present)} of {counted(machines, 'machine')} connected; {names} missing"


def _difference(present: Collection[LauncherInfo]) -> str:
    """A sentence about the first setting that differs between two machines; empty if none does."""
    for name in ("machines", "processes"):
        machine_by_number = {number: machine for machine in present if (number := getattr(machine, name)) is not None}
        if len(machine_by_number) > 1:
            return f"num_{name} is " + ", and ".join(
                f"{number} on {machine}" for number, machine in machine_by_number.items()
            )
    return ""


def _refuse(store: JsonStore, what: str, fix: str = FIX_RANKS) -> NoReturn:
    """Ends the wait of this machine and of all machines that still wait."""
    refusal = store.agree(REFUSED, [what, fix]) or [what, fix]
    time.sleep(READ_SECONDS)
    raise _refusal(*refusal)


def _refusal(what: str, fix: str) -> UserError:
    return UserError(what, why=rendezvous.WAIT, fix=fix)
