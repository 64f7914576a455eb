"""One launch of a rehearsal: its ranks under `accel_fsdp.ranks`, what they tell, and how it ends. A hang is ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from accel_fsdp import ranks
from accel_fsdp.ranks import Event, Holding
from accel_fsdp.rehearsal import janitor
from accel_fsdp.rehearsal.scaled import ScaledJob

POLL_SECONDS = 0.2
TAIL_LETTERS = 4000


@dataclass(frozen=True)
class Hang:
    """Ranks that wait for each other. `waits`: for each rank the line of the script, the collective, the stack.

    `ended` are the ranks whose script came to its end meanwhile.
    """

    waits: Mapping[int, tuple[str, str, str]]
    ended: frozenset[int] = frozenset()

    def __str__(self) -> str:
        places = []
        for rank, (line, collective, _) in sorted(self.waits.items()):
            at = "has ended" if rank in self.ended else f"waits in {collective or 'no collective'} at {line}"
            places.append(f"rank {rank} {at}")
        return "; ".join(places)


@dataclass(frozen=True)
class Outcome:
    """How a launch ended; `code` is None where it was killed, before a step or for a hang."""

    code: int | None
    events: list[Event]
    output: str
    hang: Hang | None = None

    @property
    def holdings(self) -> dict[int, Holding]:
        """What each rank held."""
        return ranks.holdings(self.events)

    @property
    def failures(self) -> list[Event]:
        """What the ranks failed of, the first one first."""
        return [event for event in self.events if event.kind == "failed"]

    @property
    def ends(self) -> list[dict[str, Any]]:
        """How scripts ended by themselves, the first one first."""
        return [event.content for event in self.events if event.kind == "ended"]

    @property
    def tail(self) -> str:
        """The end of what was printed."""
        return self.output[-TAIL_LETTERS:]


@dataclass(frozen=True)
class Rehearsed:
    """What all launches of a rehearsal share. `folder` is the janitor's."""

    folder: Path
    script: Path
    seconds: float = 600
    environment: Mapping[str, str] = field(default_factory=dict)

    def launch(self, name: str, scaled: ScaledJob, words: Sequence[str], kill_before: int | None = None) -> Outcome:
        """Runs the script on the job's ranks; all processes are killed by SIGKILL before the step `kill_before`."""
        config = self.folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(dict(scaled.job.values)), encoding="utf-8")
        command = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
        given = {ranks.NODES: str(scaled.nodes)}
        if kill_before is not None:
            given[ranks.HOLD_BEFORE] = str(kill_before)
        ours = ["-m", "accel_fsdp.ranks", str(self.script)]
        return self._run(name, [*command, *ours, *words], given, scaled.processes)

    def command(self, name: str, words: Sequence[str]) -> Outcome:
        """Runs a command of accel-fsdp."""
        return self.python(name, ["-m", "accel_fsdp", *words])

    def python(self, name: str, words: Sequence[str]) -> Outcome:
        """Runs Python with these words, in a process of its own."""
        return self._run(name, list(words), {})

    def _run(
        self,
        name: str,
        words: list[str],
        given: Mapping[str, str],
        processes: int = 1,
    ) -> Outcome:
        told, output = self.folder / f"{name}.events", self.folder / f"{name}.log"
        told.mkdir()
        environment = {
            **os.environ,
            **self.environment,
            **given,
            janitor.FOLDER: str(self.folder),
            ranks.EVENTS: str(told),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with open(output, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, *words], env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code, hang = self._wait(process, told, processes)
            finally:
                _kill(process)
        return Outcome(code, ranks.read(told), output.read_text(encoding="utf-8", errors="replace"), hang)

    def _wait(self, process: "subprocess.Popen[bytes]", told: Path, processes: int) -> tuple[int | None, Hang | None]:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_SECONDS), None
            events = ranks.read(told)
            if sum(event.kind == "held" for event in events) == processes:
                return None, None
            if hang := hang_in(events, processes):
                return None, hang
        return None, Hang({})


def hang_in(events: Sequence[Event], processes: int) -> Hang | None:
    """Whether every rank that has not ended stands still, and one of them in a collective."""
    last: dict[int, Event] = {}
    for event in events:
        last[event.rank] = event
    waiting = {rank: event.content for rank, event in last.items() if event.kind == "still"}
    ended = sum(event.kind == "ended" for event in last.values())
    if len(waiting) + ended < processes or not any(one["collective"] for one in waiting.values()):
        return None
    waits = {rank: (one["line"], one["collective"], one["stack"]) for rank, one in waiting.items()}
    return Hang(waits, frozenset(event.rank for event in events if event.kind == "ended"))


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kills the launcher and its ranks, which have groups of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        for one in (*launcher.children(recursive=True), launcher):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
    process.wait()
