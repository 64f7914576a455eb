"""The watch against hangs for any script: it checks whether ranks are active, and whether some wait.

A rank is active as long as its main thread moves, or its processes compute, read or write. Its stack shows whether it
waits in a collective, or torch's record of collectives if C++ or a GPU waits.
"""

import contextlib
import dataclasses
import threading
import time
from pathlib import Path

from torch.distributed import distributed_c10d

from accel_fsdp import console
from accel_fsdp.launch import hangs
from accel_fsdp.launch.beats import Beat
from accel_fsdp.launch.hang_watch import DISK_SECONDS, Watchdog, in_time, machine_answers
from accel_fsdp.launch.hangs import Patience
from accel_fsdp.library_internals import Internal, flaw
from accel_fsdp.ranks import flight_records, hang

RELIES_ON = (
    Internal("torch.distributed.distributed_c10d:_get_default_store", ""),
    Internal("torch.distributed.distributed_c10d:_get_default_group", ""),
)
SILENCE_SECONDS = 300.0
"""Seconds without a heartbeat: C code of an unknown script may hold Python's lock for long."""
PART_OF_TIMEOUT = 0.9
"""The share of the process group's own timeout, after which torch ends the job without naming a rank."""
TORCHS_SECONDS = 1800.0
"""torch's default timeout for gloo."""
MEASURE_SECONDS = 10.0
"""Seconds between two measurements of a rank that doesn't move. Each reads all processes of the machine."""
BUSY, BYTES_PER_SECOND = 0.05, 16_384
"""The share of a core, and the bytes read and written, above which a rank counts as busy."""


class ScriptWatch(Watchdog):
    """Ends a job shortly before torch would: without `seconds`, after 0.9 of the timeout of collectives."""

    advice = "accel-fsdp launch --hang-timeout SECONDS ends a job sooner or later, 0 never"
    prefix = "accel_fsdp/script"

    def __init__(self, seconds: float | None) -> None:
        super().__init__(Patience(seconds, longest_silence=SILENCE_SECONDS))
        self._doing = ""
        self._quiet_since = self._measured_at = time.monotonic()
        self._measured: tuple[float, float] | None = None
        self._timeouts: dict[str, float] = {}

    def try_to_begin(self, main: int) -> None:
        """Begins to watch the script's thread; logs why if that isn't possible."""
        problem = next(filter(None, map(flaw, RELIES_ON)), "")
        if not problem:
            try:
                self._timeouts = _timeouts()
                self.begin(main)
            except (RuntimeError, OSError, ValueError) as error:
                problem = str(error).partition("\n")[0]
        if problem and self.rank == 0:
            console.say(f"accel-fsdp: the watch against hangs is off: {problem}")

    def failed(self, error: BaseException) -> None:
        """Reports to the other ranks why this rank ends: exiting may take long, and they may be on other machines."""
        in_time(lambda: self.report(error))

    def leave(self) -> None:
        """Ends the watch with the script, and reports that to the other ranks."""
        if self.messages is not None and not self._over.is_set():
            in_time(self.trained)
        self.end()
        for thread in self._threads:  # a thread in C++ code may abort the process while Python ends
            thread.join(DISK_SECONDS)

    def verdict(self) -> str:
        """Why the job has to end, as far as this rank sees; empty where it goes on."""
        return hangs.verdict_without_steps(self.seen, self.patience, machine_answers)

    def _own_beat(self) -> tuple[Beat, str]:
        beat, stack = super()._own_beat()
        name = _pending_collective(beat.still) if beat.still >= self.patience.silence / 2 else ""
        backend, _, collective = name.partition(":")
        longest = max(self._timeouts.values(), default=TORCHS_SECONDS)
        return (
            dataclasses.replace(
                beat,
                collective=beat.collective or collective,
                quiet=time.monotonic() - self._quiet_since,
                allowed=PART_OF_TIMEOUT * self._timeouts.get(backend, longest),
            ),
            stack,
        )

    def _needs_others(self) -> bool:
        return bool(self._own_beat()[0].collective)

    def _forget(self) -> None:
        super()._forget()
        self._quiet_since = time.monotonic()

    def _measure_others(self, now: float) -> None:
        """Measures the activity of this rank's other threads and processes while its main thread doesn't move."""
        interval = min(MEASURE_SECONDS, self.patience.silence / 8)
        if now - self._place_since < interval:
            self._measured, self._quiet_since = None, now
        elif self._measured is None or now - self._measured_at >= interval:
            self._measured_at, work = now, self._work()
            quiet_seconds = now - self._quiet_since
            previous = self._measured
            if (
                previous is None
                or work[0] - previous[0] > BUSY * quiet_seconds
                or work[1] - previous[1] > BYTES_PER_SECOND * quiet_seconds
            ):
                self._quiet_since, self._measured = now, work

    def _work(self) -> tuple[float, float]:
        """The seconds that this rank has computed and the bytes that it has moved, without the cost of measuring."""
        computed = hang.computed_seconds() - time.thread_time()
        return computed, _moved_bytes()


def _timeouts() -> dict[str, float]:
    """The timeout of collectives for each backend of the script's process group, in seconds."""
    timeouts: dict[str, float] = {}
    with contextlib.suppress(AttributeError, RuntimeError):
        group = distributed_c10d._get_default_group()
        for device in group._device_types:
            backend = group._get_backend(device)
            timeouts[backend.name()] = backend.options._timeout.total_seconds()
    return timeouts


def _pending_collective(still: float) -> str:
    """The last collective in torch's record, such as `gloo:all_reduce`, if it is pending since this rank stopped."""
    last = flight_records.last_collective()
    if last.get("retired", True) or time.time() - last["time_created_ns"] / 1e9 < still / 2:
        return ""
    return str(last["profiling_name"])


def _moved_bytes() -> float:
    """The bytes that the script's threads have read and written; 0 on other systems than Linux."""
    watches = {thread.native_id for thread in threading.enumerate() if thread.name == hang.WATCHES}
    moved = 0
    for task in Path("/proc/self/task").glob("*"):
        if int(task.name) not in watches:
            with contextlib.suppress(OSError):  # the thread has ended
                counts = dict(line.split(": ") for line in (task / "io").read_text().splitlines())
                moved += int(counts["rchar"]) + int(counts["wchar"])
    return float(moved)
