"""The machines of a job meet before ranks start, and compare what they were started with.

Machine 0 opens torch's store at the job's port, and closes it for torchrun's rendezvous when all have read the outcome.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from accel_fsdp import console, waiting
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host
from accel_fsdp.launch.agreement import Differs, Settings, difference
from accel_fsdp.units import counted, first_few

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

END, READERS = "end", "readers"
"""Keys beside those of the ranks: how the meeting ends, and the number of machines that have yet to read it."""
REPORT_SECONDS, OPEN_SECONDS = 10.0, 30.0
"""Between two lines about missing machines; and how long a store may take to answer, or machine 0 to reach itself."""
WAIT = "the machines would wait for each other until a timeout"
FIX_ADDRESS = "main_process_ip: an address of machine 0 that the others reach; hostname -I shows those of a machine"
FIX_RANKS = "--machine-rank N, another on each machine; or srun --ntasks-per-node=1, which numbers them"


def meet(rank: int, machines: int, address: str, port: int, settings: Settings, seconds: float) -> None:
    """Waits until all machines have come and compares their settings; then the port is free again.

    Raises:
        UserError: some didn't come in time, two have the same rank, or their numbers or settings differ.
    """
    deadline, another = time.monotonic() + seconds, f"another port on all machines: --main-process-port {port + 1}"
    if rank == 0 and not host.can_listen(port):
        raise UserError(f"port {port} is taken on this machine", why="the machines can't connect there", fix=another)
    try:
        server = None if rank else _open("127.0.0.1", port, is_master=True)
        with _reach(rank, address, port, seconds if rank else min(seconds, OPEN_SECONDS)) as connection:
            outcome = _outcome(_open(address, port), rank, machines, f"{address}:{port}", settings, deadline)
            if server:
                waiting.comes_true(lambda: server.add(READERS, 0) <= 0, OPEN_SECONDS)
            elif not outcome:
                connection.settimeout(OPEN_SECONDS)
                with contextlib.suppress(OSError):
                    connection.recv(1)  # returns when machine 0 has closed the store
    except RuntimeError as error:  # torch's DistError is one
        raise UserError(
            f"machine 0 at {address}:{port} closed the connection before all machines had connected",
            why="it ended, the network broke, or another program uses the port",
            fix=f"look at its output; {another}",
        ) from error
    if outcome:
        raise Differs(**outcome)


def _open(address: str, port: int, is_master: bool = False) -> "Store":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=OPEN_SECONDS)
    return TCPStore(address, port, is_master=is_master, timeout=limit, wait_for_workers=False)


def _reach(rank: int, address: str, port: int, seconds: float) -> socket.socket:
    """Connects when machine 0 listens. Machine 0 checks that the address is its own, and not its loopback."""
    began = reported = time.monotonic()
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=3)
            break
        except (OSError, UnicodeError) as error:  # a name with too long a part is not valid IDNA
            problem = getattr(error, "strerror", None) or str(error)
        now = time.monotonic()
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
    peer = connection.getpeername()[0]
    if ip_address(peer.partition("%")[0]).is_loopback:
        connection.close()
        what = f"{address} is {peer} on this machine, which no other machine reaches"
        raise UserError(what, why=f"{WAIT}; /etc/hosts may map a machine's own name so", fix=FIX_ADDRESS)
    return connection


def _outcome(
    store: "Store", rank: int, machines: int, place: str, settings: Settings, deadline: float
) -> Mapping[str, Any] | None:
    """Registers this machine, and returns the error with which the meeting ends for all; the first one counts."""

    def end(error: Differs | None) -> None:
        store.compare_set(END, "", json.dumps(error and vars(error)))

    began, ranks = time.monotonic(), [str(number) for number in range(machines)]
    own = json.dumps([socket.gethostname(), os.getpid(), settings])
    store.add(READERS, 1)
    try:
        if (other := store.compare_set(str(rank), "", own).decode()) != own:
            who = ", and ".join(sorted("{} (process {})".format(*json.loads(line)[:2]) for line in (own, other)))
            end(Differs(f"two machines were started as machine {rank}: {who}", why=WAIT, fix=FIX_RANKS))
        while not store.check([END]):
            waited, left = time.monotonic() - began, deadline - time.monotonic()
            missing = [] if store.check(ranks) else [number for number in ranks if not store.check([number])]
            names = first_few(missing, 8)
            who = f"machine {names} is" if len(missing) == 1 else f"machines {names} are"
            status = f"{machines - len(missing)} of {counted(machines, 'machine')} connected; {who} missing"
            if not missing:
                come = {number: json.loads(store.get(number)) for number in ranks}
                end(difference([(f"{number} ({name})", told) for number, (name, _, told) in come.items()]))
            elif left <= 0:
                fix = "start the missing ones; --timeout SECONDS waits longer"
                end(Differs(f"{status}, after {waited:.0f} s", why=WAIT, fix=fix))
            else:
                if waited >= REPORT_SECONDS:
                    console.say(f"accel-fsdp: {status}, {waited:.0f} s; machine 0 waits at {place}")
                waiting.comes_true(lambda: store.check([END]), min(REPORT_SECONDS, left))
        outcome: Mapping[str, Any] | None = json.loads(store.get(END))
        return outcome
    except BaseException:
        store.delete_key(str(rank))  # it may be started again
        raise
    finally:
        store.add(READERS, -1)
