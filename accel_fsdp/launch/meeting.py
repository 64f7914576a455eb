"""The machines of a job meet before ranks start: each reads who the others are, and what they were started with.

Machine 0 opens torch's store at the job's port, and closes it for torchrun's rendezvous when all have read it.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from accel_fsdp import console, time_limits
from accel_fsdp.errors import UserError
from accel_fsdp.launch import agreement, rendezvous
from accel_fsdp.launch.agreement import Member, Settings
from accel_fsdp.units import counted, first_few

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

PREFIX, REFUSED, READ = "accel_fsdp/machines", "refused", "read"
REPORT_SECONDS, POLL_SECONDS = 10.0, 0.2
"""Between two lines about missing machines, and between two looks into the store."""
OPEN_SECONDS = 60.0
"""The most that a listening store takes to answer, and that a machine waits for a store at its own address."""
READ_SECONDS = 10.0
"""The most that machine 0 keeps the store open so that the others read why the job ends."""
FIX_REACH = "start machine 0, or look at its output; accel-fsdp doctor on both says what is wrong with them"
FIX_RANKS = "--machine-rank N, another on each machine; or srun --ntasks-per-node=1, which numbers them"


@dataclass(frozen=True)
class Machine:
    """A machine with the numbers that it was given, and the digest of its settings."""

    rank: int
    machines: int
    processes: int | None
    digest: str = ""
    may_differ: Sequence[str] = field(default_factory=agreement.may_differ)
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"machine {self.rank} ({self.host})"


def meet(own: Machine, address: str, port: int, settings: Settings, seconds: float) -> None:
    """Waits until all machines have come and compares their settings; then the port is free again.

    Raises:
        UserError: some didn't come in time, two have the same rank, or their numbers or settings differ.
    """
    rendezvous.check_place(address, port, own.rank)
    place, deadline = f"{address}:{port}", time.monotonic() + seconds
    server = _open("127.0.0.1", port, hosts=True) if own.rank == 0 else None
    _reach(own, address, port, seconds)
    try:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store = PrefixStore(PREFIX, _open(address, port))
        with _kept_open(store, own):
            store.set(own.digest, json.dumps(settings))
            others = _wait_for_all(store, own, place, seconds, deadline)
            of_all = {machine.digest: json.loads(store.get(machine.digest)) for machine in others.values()}
            agreement.compare(
                (Member(rank, rank, machine.host, machine.may_differ), of_all[machine.digest])
                for rank, machine in others.items()
            )
            _close(store, own)
        del server
    except RuntimeError as error:  # torch's DistError is one
        raise UserError(
            f"machine 0 at {place} closed the connection before all machines had connected",
            why="it ended, the network broke, or another program uses the port",
            fix=f"look at its output; another port on all machines: --main-process-port {port + 1}",
        ) from error


def _open(address: str, port: int, hosts: bool = False) -> "Store":
    """Connects to the store, or starts it; raises RuntimeError if another program listens there, which says nothing."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=OPEN_SECONDS)
    store = time_limits.result_of(
        lambda: TCPStore(address, port, is_master=hosts, timeout=limit, wait_for_workers=False), OPEN_SECONDS
    )
    if store is None:
        raise RuntimeError("no store answers")
    return store  # type: ignore[no-any-return]


def _reach(own: Machine, address: str, port: int, seconds: float) -> None:
    """Waits until machine 0 listens; machine 0 itself checks that the address is its own."""
    began, place, is_first = time.monotonic(), f"{address}:{port}", own.rank == 0
    is_here = not is_first and rendezvous.is_own(address)
    limit = min(seconds, OPEN_SECONDS / 2 if is_first else OPEN_SECONDS) if is_first or is_here else seconds
    note = f"; {address} is this machine, which was started as machine {own.rank}" if is_here else ""
    while problem := rendezvous.wait_for(address, port, min(REPORT_SECONDS, began + limit - time.monotonic())):
        waited = time.monotonic() - began
        report = f"machine 0 at {place} has not been reached for {waited:.0f} s: {problem}{note}"
        if waited >= limit and is_first:
            why = f"no interface of it has the address of {address}, at which the others look for machine 0"
            what = f"this is machine 0, and it doesn't reach itself at {place}: {problem}"
            raise UserError(what, why=why, fix=rendezvous.FIX_ADDRESS)
        if waited >= limit:
            why = "no process with machine rank 0 listens there" if is_here else rendezvous.why_unreached(problem)
            raise UserError(report, why=why, fix=FIX_RANKS if is_here else FIX_REACH)
        console.say(f"accel-fsdp: {report}{'; machine 0 may use another port' if 'refused' in problem else ''}")


@contextlib.contextmanager
def _kept_open(store: "Store", own: Machine) -> Iterator[None]:
    """Registers this machine; if the meeting fails, machine 0 waits until the others have read why."""
    key = f"machine/{own.rank}"
    first = _read(store.compare_set(key, "", json.dumps(asdict(own))))
    if first != own:
        ends = f"{first.host} (process {first.process}) and {own.host} (process {own.process})"
        if own.rank == 0:
            ends = f"the one at {first.host}, and {own.host}"
        _refuse(store, f"two machines were started as machine {own.rank}: {ends}")
    try:
        yield
    except UserError:
        with contextlib.suppress(RuntimeError):
            read, come = store.add(READ, 1), sum(store.check([f"machine/{rank}"]) for rank in range(own.machines))
            if own.rank == 0 and read < come:
                time_limits.comes_true(lambda: store.add(READ, 0) >= come, READ_SECONDS)
        raise
    except BaseException:
        with contextlib.suppress(RuntimeError):
            store.delete_key(key)  # it was interrupted, and may be started again
        raise


def _close(store: "Store", own: Machine) -> None:
    """Machine 0 waits until all have read the settings; the others, until it has closed the store."""
    store.add(READ, 1)
    if own.rank == 0:
        time_limits.comes_true(lambda: store.add(READ, 0) >= own.machines, OPEN_SECONDS)
        return
    with contextlib.suppress(RuntimeError):
        while store.check([READ]):
            time.sleep(POLL_SECONDS)


def _read(text: bytes) -> Machine:
    return Machine(**json.loads(text))


def _wait_for_all(store: "Store", own: Machine, place: str, seconds: float, deadline: float) -> dict[int, Machine]:
    began = reported = time.monotonic()
    while True:
        if store.check([REFUSED]):
            raise _refusal(*json.loads(store.get(REFUSED)))
        names = {rank: f"machine/{rank}" for rank in range(own.machines)}
        come = {rank: _read(store.get(name)) for rank, name in names.items() if store.check([name])}
        if difference := _difference(come):
            raise _refusal(difference, "the same YAML and flags on all machines")
        if len(come) == own.machines:
            return come
        now = time.monotonic()
        missing = [str(rank) for rank in names if rank not in come]
        who = f"machine {missing[0]} is" if len(missing) == 1 else f"machines {first_few(missing, 8)} are"
        status = f"{len(come)} of {counted(own.machines, 'machine')} connected; {who} missing"
        if now >= deadline:
            late = f"{status}, after {seconds:.0f} s", "start the missing ones; --timeout SECONDS waits longer"
            if own.rank == 0:
                _refuse(store, *late)
            store.delete_key(names[own.rank])
            raise _refusal(*late)
        if now - reported >= REPORT_SECONDS:
            reported = now
            console.say(f"accel-fsdp: {status}, {now - began:.0f} s; machine 0 waits at {place}")
        time.sleep(POLL_SECONDS)


def _difference(come: Mapping[int, Machine]) -> str:
    """A sentence about the first number that differs between two machines; empty if none does."""
    for name in ("machines", "processes"):
        holders: dict[Any, Machine] = {}
        for machine in come.values():
            holders.setdefault(getattr(machine, name), machine)
        holders.pop(None, None)
        if len(holders) > 1:
            return f"num_{name} is " + ", and ".join(f"{number} on {machine}" for number, machine in holders.items())
    return ""


def _refuse(store: "Store", what: str, fix: str = FIX_RANKS) -> NoReturn:
    """Ends the wait of all machines."""
    raise _refusal(*json.loads(store.compare_set(REFUSED, "", json.dumps([what, fix]))))


def _refusal(what: str, fix: str) -> UserError:
    return UserError(what, why=rendezvous.WAIT, fix=fix)
