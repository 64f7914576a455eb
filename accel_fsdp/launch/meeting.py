"""The machines of a job meet at machine 0's port before ranks start, and compare what they were started with."""

import contextlib
import json
import os
import socket
import time
from datetime import timedelta
from functools import partial
from typing import Any

from accel_fsdp import console, waiting
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host
from accel_fsdp.launch.agreement import Settings, difference
from accel_fsdp.units import first_few

END, READERS = "end", "readers"
"""Keys beside those of the ranks: how the meeting ends, and the number of machines that have yet to read it."""
REPORT_SECONDS, OPEN_SECONDS = 10.0, 30.0
"""Between two lines about missing machines; and how long a store may take to answer, or machine 0 to reach itself."""
WAIT = "the machines would wait for each other until a timeout"
FIX_ADDRESS = "main_process_ip: an address of machine 0 that the others reach; hostname -I shows those of a machine"
FIX_RANKS = "--machine-rank N, another on each machine; or srun --ntasks-per-node=1, which numbers them"


def meet(rank: int, machines: int, address: str, port: int, settings: Settings, seconds: float) -> None:
    """Waits until all machines have connected and compares their settings; then the port is free for torchrun.

    Raises:
        UserError: some didn't connect in time, two have the same rank, or their numbers or settings differ.
        DistError: machine 0 closed the connection before.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    if rank == 0 and not host.can_listen(port):
        fix = f"another port on all machines: --main-process-port {port + 1}"
        raise UserError(f"port {port} is taken on this machine", why="the machines can't connect there", fix=fix)
    limit = timedelta(seconds=OPEN_SECONDS)
    open_store = partial(TCPStore, port=port, timeout=limit, wait_for_workers=False)
    server = None if rank else open_store("127.0.0.1", is_master=True)
    _reach(rank, address, port, seconds if rank else min(seconds, OPEN_SECONDS))
    store = open_store(address)
    error = _compare(store, rank, machines, f"{address}:{port}", settings, seconds)
    if server:
        waiting.comes_true(lambda: server.add(READERS, 0) <= 0, OPEN_SECONDS)
    elif not error:
        with contextlib.suppress(DistError):  # the wait ends when machine 0 closes the store
            store.wait(["nothing"], limit)
    if error:
        raise UserError(**error)


def _reach(rank: int, address: str, port: int, seconds: float) -> None:
    """Waits until machine 0 listens at an address that isn't a machine's own loopback."""
    began, reported = time.monotonic(), 0.0
    while True:
        try:
            with socket.create_connection((address, port), timeout=3) as connection:
                peer = connection.getpeername()[0]
            break
        except (OSError, UnicodeError) as error:  # a name with too long a part is not valid IDNA
            problem = getattr(error, "strerror", None) or str(error)
        waited = time.monotonic() - began
        who = "machine 0 has not been reached" if rank else "this is machine 0, which has not reached itself"
        report = f"{who} at {address}:{port} for {waited:.0f} s: {problem}"
        if waited >= seconds:
            why = "it was not started, has another address, port or rank, or a firewall drops the port"
            raise UserError(report, why=why, fix=f"{FIX_ADDRESS}; {FIX_RANKS}")
        if waited >= reported + REPORT_SECONDS:
            console.say(f"accel-fsdp: {report}")
            reported = waited
        time.sleep(0.2)
    if peer == "::1" or peer.startswith("127."):
        what = f"{address} is {peer} on this machine, which no other machine reaches"
        raise UserError(what, why=f"{WAIT}; /etc/hosts may map a machine's own name so", fix=FIX_ADDRESS)


def _compare(
    store: Any, rank: int, machines: int, place: str, settings: Settings, seconds: float
) -> dict[str, Any] | None:
    """Registers this machine, and returns the error with which the meeting ends for all; the first one counts."""

    def end(error: UserError | None) -> None:
        store.compare_set(END, "", json.dumps(error and vars(error)))

    began, ranks = time.monotonic(), [str(number) for number in range(machines)]
    own = json.dumps([socket.gethostname(), os.getpid(), settings])
    store.add(READERS, 1)
    try:
        if (other := store.compare_set(str(rank), "", own).decode()) != own:
            who = ", and ".join(sorted("{} (process {})".format(*json.loads(line)[:2]) for line in (own, other)))
            end(UserError(f"two machines were started as machine {rank}: {who}", why=WAIT, fix=FIX_RANKS))
        left = seconds
        while not waiting.comes_true(lambda: store.check([END]) or store.check(ranks), min(REPORT_SECONDS, left)):
            left = began + seconds - time.monotonic()
            missing = first_few([number for number in ranks if not store.check([number])], 8)
            status = f"of {machines} machines, these are missing after {seconds - left:.0f} s: {missing}"
            console.say(f"accel-fsdp: {status}; machine 0 waits at {place}")
            if left <= 0:
                end(UserError(status, why=WAIT, fix="start the missing ones; --timeout SECONDS waits longer"))
        if not store.check([END]):
            members = [(number, *json.loads(store.get(number))) for number in ranks]
            end(difference([(f"{number} ({name})", told) for number, name, _, told in members]))
        error: dict[str, Any] | None = json.loads(store.get(END))
        return error
    except BaseException:
        store.delete_key(str(rank))  # it may be started again
        raise
    finally:
        store.add(READERS, -1)
