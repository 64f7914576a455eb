"""The machines of a job meet at machine 0's port before ranks start, and compare what they were started with."""

import contextlib
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from accel_fsdp import console, waiting
from accel_fsdp.command_line import field_name
from accel_fsdp.errors import UserError, versions
from accel_fsdp.hardware import host
from accel_fsdp.launch_environment import CHANGE_RESULTS
from accel_fsdp.units import first_few

REPORT_SECONDS, OPEN_SECONDS = 10.0, 30.0
"""Between two lines about missing machines; and how long a store may take to answer, or machine 0 to reach itself."""
END, PRESENT = "end", "present"
"""Keys of the store beside the ranks: how the meeting ends, and the number of machines still there."""
ADDRESS = "main_process_ip: an address of machine 0 that the others reach; hostname -I shows those of a machine"
SECRET = re.compile(r"(?i)token|(.*[._])?((hub|hf|auth|access|api)[._]?(token|key)|password|secret)")
"""Arguments with a secret of the user's."""
OWN = re.compile(
    rf"{SECRET.pattern}|(\w+_)?(out|output|log|logging|cache|tmp|scratch)_(dir|path|folder|file)"
    r"|(local|node|machine)_(rank|id)|host(_?name)?|(gpu|device)(s|_ids?)?|(\w+_)?(addr|address|ip|port)"
    r"|run_name|project|report_to|disable_tqdm|log_level(_replica)?|log_on_each_node|accelerate_config|dataset_num_proc"
    r"|dataloader_(num_workers|pin_memory|persistent_workers|prefetch_factor)|(ddp|hang)_timeout"
    r"|(?-i:[A-Z0-9_]+_(DIR|PATH|HOME|CACHE|DEBUG))"
)
"""Settings that may differ: secrets, places, logs, trackers, how fast data are read, how long to wait."""
MAY_DIFFER = "ACCEL_FSDP_MAY_DIFFER"
"""The variable that names, on any machine, other settings that may differ."""
Settings = Mapping[str, str | None]
"""Values by name; None for a value that this member doesn't know, which is not compared."""


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
    open_store = partial(TCPStore, port=port, timeout=timedelta(seconds=OPEN_SECONDS), wait_for_workers=False)
    server = None if rank else open_store("127.0.0.1", is_master=True)
    if error := _wait(partial(_not_reached, rank, address, port), seconds if rank else min(seconds, OPEN_SECONDS)):
        raise error
    store = open_store(address)
    ending = _compare(store, str(rank), machines, f"{address}:{port}", settings, seconds)
    with contextlib.suppress(DistError):  # machine 0 closes the store when all have left
        waiting.comes_true(lambda: store.add(PRESENT, 0) <= 0 and server is not None, OPEN_SECONDS)
    if ending:
        raise UserError(**ending)


def _wait(problem: Callable[[int], str], seconds: float) -> UserError | None:
    """Waits until there is no problem, which is reported every ten seconds; returns the error if one remains."""
    began, reported = time.monotonic(), 0.0
    while report := problem(int(waited := time.monotonic() - began)):
        if waited >= seconds:
            why = "a machine was not started, has another address, port or rank, or a firewall drops the port"
            return UserError(report, why=why, fix=f"start all with {ADDRESS}; --timeout SECONDS waits longer")
        if waited >= reported + REPORT_SECONDS:
            console.say(f"accel-fsdp: {report}")
            reported = waited
        time.sleep(0.2)
    return None


def _not_reached(rank: int, address: str, port: int, waited: int) -> str:
    """Why machine 0 can't be reached; empty if it listens at an address that isn't a machine's own loopback."""
    try:
        with socket.create_connection((address, port), timeout=1) as connection:
            peer = connection.getpeername()[0]
    except (OSError, UnicodeError) as error:  # a name with too long a part is not valid IDNA
        who = "machine 0 has not been reached" if rank else "this is machine 0, which has not reached itself"
        return f"{who} at {address}:{port} for {waited} s: {getattr(error, 'strerror', None) or error}"
    if peer == "::1" or peer.startswith("127."):
        why = "the others would wait until a timeout; /etc/hosts may map a machine's own name so"
        raise UserError(f"{address} is {peer} on this machine, which no other machine reaches", why=why, fix=ADDRESS)
    return ""


def _compare(store: Any, rank: str, machines: int, place: str, settings: Settings, seconds: float) -> Any:
    """Waits for all machines; returns the error with which all end, the first that one of them found."""
    ranks = [str(number) for number in range(machines)]

    def missing(waited: int) -> str:
        if store.check(ranks) or store.check([END]):
            return ""
        names = first_few([number for number in ranks if not store.check([number])], 8)
        return f"of {machines} machines, these are missing after {waited} s: {names}; machine 0 waits at {place}"

    own = json.dumps([socket.gethostname(), os.getpid(), settings])
    store.add(PRESENT, 1)
    try:
        if (other := store.compare_set(rank, "", own).decode()) != own:
            who = ", and ".join(sorted("{} (process {})".format(*json.loads(text)) for text in (own, other)))
            why, fix = "a machine would be missing", "--machine-rank N, another on each; or srun --ntasks-per-node=1"
            error: UserError | None = UserError(f"two machines were started as machine {rank}: {who}", why=why, fix=fix)
        elif not (error := _wait(missing, seconds)) and not store.check([END]):
            members = zip(ranks, map(json.loads, store.multi_get(ranks)), strict=True)
            error = difference([(f"{number} ({name})", told) for number, (name, _, told) in members])
        return json.loads(store.compare_set(END, "", json.dumps(error and vars(error))))
    except BaseException:
        store.delete_key(rank)  # it may be started again
        raise
    finally:
        store.add(PRESENT, -1)


def of_job(variables: Mapping[str, str], arguments: Mapping[str, object], script: Path) -> Settings:
    """The settings of a job on this machine, where its ranks have these variables and its script these arguments."""
    named = {name: variables[name] for name in sorted(variables) if name.startswith(CHANGE_RESULTS)} | {**arguments}
    return {
        **{name: _text(name, value) for name, value in named.items() if not OWN.fullmatch(name)},
        "script": digest_of(script),
        **versions(),
        MAY_DIFFER: variables.get(MAY_DIFFER, ""),
    }


def digest_of(content: Path | bytes) -> str:
    """A short hash of bytes or of a file's content, which is empty for a missing file."""
    if isinstance(content, Path):
        content = content.read_bytes() if content.is_file() else b""
    return hashlib.sha256(content).hexdigest()[:16]


def _text(name: str, value: object) -> str:
    """A value without this machine's folders; a digest in place of a secret or a config file."""
    if re.fullmatch(r"(?i).*(token|key|secret|password)", name):
        return f"digest {digest_of(str(value).encode())}"
    if name.endswith("_CONFIG_FILE"):
        return digest_of(Path(str(value)))
    return re.sub(r"(?<![^\s,])(~|\.{0,2})/([^\s,]*/)?(?=[^\s,])", "", str(value))


def difference(members: Sequence[tuple[str, Settings]]) -> UserError | None:
    """The error of members, each a machine's rank and name, whose settings differ and may not."""
    words = " ".join(settings.get(MAY_DIFFER) or "" for _, settings in members).replace(",", " ").split()
    allowed, rows = {MAY_DIFFER, *map(field_name, words)}, [("what", "value", "machine")]
    for name in dict.fromkeys(name for _, settings in members for name in settings if name not in allowed):
        holders: dict[str, dict[str, None]] = {}
        for machine, settings in members:
            if (value := settings.get(name, "not set")) is not None:
                holders.setdefault(value, {})[machine] = None
        if len(holders) > 1:
            rows += zip_longest([name], holders, (first_few([*names], 4) for names in holders.values()), fillvalue="")
    if len(rows) == 1:
        return None
    name_width, value_width, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    fix, names = "use the same files, arguments, versions and environment on all machines", [row[0] for row in rows[1:]]
    if not {"num_machines", "num_processes"} & {*names}:
        fix += f"; {MAY_DIFFER}={','.join(filter(None, names))} on one of them if they should differ"
    return UserError(
        "the machines of this job have different settings",
        why="the ranks would train parts of one model with different settings, and the result would look complete",
        fix=fix,
        table=[f"{name:{name_width}}  {value:{value_width}}  {machines}" for name, value, machines in rows],
    )
