"""One launch of a rehearsal: starts its ranks under `ranks`, reads their events, and ends a hang."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from accel_fsdp import ranks
from accel_fsdp.config import Engine, JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host
from accel_fsdp.launch import child_process, launcher, python_child
from accel_fsdp.ranks import Holding, Location, RankEvent
from accel_fsdp.rehearsal import warm
from accel_fsdp.rehearsal.scaled import machines_of
from accel_fsdp.waiting import comes_true

Process: TypeAlias = "subprocess.Popen[bytes] | BaseProcess"
Answer = TypeVar("Answer")
RANK = "accel_fsdp.ranks"
POLL_SECONDS = 0.1
GRACE_SECONDS = 1.0
ATTEMPTS = 3
"""Starts of a launch, each on another port, if its port is taken."""
PLACES_SECONDS = 8.0
"""Seconds that the ranks may take to report where they are and which collectives they called."""
TAIL_LETTERS = 4000
CONSEQUENCE = re.compile(r"Connection (closed|reset) by peer|Broken pipe|Socket closed")
"""The errors of the other ranks once one of them is gone."""


@dataclass(frozen=True)
class Hang:
    """Ranks that wait for each other.

    `ended`: the ranks whose script has ended. `in_time`: false if the launch reached its time limit.
    """

    waits: Mapping[int, Location]
    ended: frozenset[int] = frozenset()
    in_time: bool = True

    def __str__(self) -> str:
        places = {**self.waits, **dict.fromkeys(self.ended, "has ended")}
        return "; ".join(f"rank {rank} {places[rank]}" for rank in sorted(places))

    @property
    def stacks(self) -> str:
        return "\n".join(
            f"rank {rank}:\n{location.stack}" for rank, location in sorted(self.waits.items()) if location.stack
        )


@dataclass(frozen=True)
class Outcome:
    """How a launch ended; `code` is None if it was killed, after a checkpoint or for a hang.

    `output` holds what all ranks printed, `printed` the stdout of rank 0, for a script of the user.
    """

    code: int | None
    events: list[RankEvent]
    output: str
    hang: Hang | None = None
    printed: str = ""

    @property
    def holdings(self) -> dict[int, Holding]:
        return ranks.holdings(self.events)

    def of(self, kind: str) -> list[RankEvent]:
        return [event for event in self.events if event.kind == kind]

    @property
    def tail(self) -> str:
        """The last lines of the output."""
        tail = self.output[-TAIL_LETTERS:]
        return tail.partition("\n")[2] or tail if len(self.output) > TAIL_LETTERS else tail


class CallFailed(Exception):
    """A function in a process of its own didn't return; the `outcome` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.tail)
        self.outcome = outcome


@dataclass(frozen=True)
class Rehearsed:
    """The settings of all launches of a rehearsal. `folder` is the janitor's, and a launch may take `seconds`.

    `cold`: libraries aren't imported beforehand, because the script may set variables that they read.
    """

    folder: Path
    script: Path
    seconds: float = 600
    cold: bool = False

    def launch(
        self,
        name: str,
        job: JobConfig,
        words: Sequence[str],
        kill_after: Path | None = None,
        is_small: bool = False,
    ) -> Outcome:
        """Runs the script on the job's ranks; SIGKILL ends all of them in a step after the checkpoint `kill_after`.

        With `is_small` the ranks make its model, rows and steps small.

        The updates of several ranks are recorded and repeated, unless they are killed.

        Accelerate's functions turn the YAML into its launcher's variables, and the ranks start as under torchrun,
        because loading the launcher itself takes as long as a rank.
        """
        hold = {ranks.HOLD_AFTER: str(kill_after)} if kill_after is not None else self._record_variables(name, job)
        hold |= {ranks.SMALL: str(self.folder / f"{name}.models")} if is_small else {}
        for attempt in range(ATTEMPTS):
            attempt_name = f"{name}-{attempt}" if attempt else name
            variables_of = environments(job, self.folder / f"{name}.yaml", self.script)
            outcome = self._run(attempt_name, [str(self.script), *words], [hold | place for place in variables_of])
            if not _is_port_taken(outcome, variables_of[0].get("MASTER_PORT", "")):
                break
        return outcome

    def _record_variables(self, name: str, job: JobConfig) -> dict[str, str]:
        """The variable that makes the ranks record their updates, for jobs that can be repeated in one process."""
        if job.engine is Engine.NONE or job.number("num_processes") == 1:
            return {}
        folder = self.folder / f"{name}.records"
        folder.mkdir()
        return {ranks.RECORDS: str(folder)}

    def call(self, name: str, function: Callable[..., Answer], *arguments: Any, **environment: str) -> Answer:
        """What a function of a module returns in a new process.

        Raises:
            UserError: that of the function. CallFailed: it raised another error, ended its process, or took too long.
        """
        log = self.folder / f"{name}.log"
        log.touch()
        process, answers = warm.call(function, arguments, {**os.environ, **environment}, log)
        try:
            if not answers.poll(self.seconds):
                raise CallFailed(Outcome(None, [], log.read_text(errors="replace"), Hang({}, in_time=False)))
            answer: Answer | UserError = answers.recv()
        except EOFError:
            process.join()
            raise CallFailed(Outcome(process.exitcode, [], log.read_text(errors="replace"))) from None
        finally:
            _kill([process])
        if isinstance(answer, UserError):
            raise answer
        return answer

    def _run(self, name: str, words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> Outcome:
        folder, output = self.folder / f"{name}.events", self.folder / f"{name}.log"
        stdout = self.folder / f"{name}.stdout" if self.cold else output
        folder.mkdir()
        common = {**os.environ, ranks.EVENTS: str(folder)}
        started: list[Process] = []
        try:
            for number, environment in enumerate(environments):
                started.append(self._start(words, {**common, **environment}, output, output if number else stdout))
            code, hang = self._wait(started, folder)
        finally:
            _kill(started)
        text = output.read_text(encoding="utf-8", errors="replace")
        printed = stdout.read_text(encoding="utf-8", errors="replace") if self.cold else ""
        events = [*ranks.read(folder), *ranks.aborted(folder, self.script)]
        return Outcome(code, events, printed + text, hang, printed)

    def _start(self, words: Sequence[str], environment: Mapping[str, str], output: Path, stdout: Path) -> Process:
        if not self.cold:
            return warm.start(RANK, words, environment, output)
        with open(stdout, "ab") as printed, open(output, "ab") as log:
            return subprocess.Popen(
                python_child.module(RANK, *words),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, started: Sequence[Process], folder: Path) -> tuple[int | None, Hang | None]:
        end = time.monotonic() + self.seconds
        reader, events = ranks.EventReader(folder), []
        while time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            codes = [_code(process) for process in started]
            if any(codes):
                if -signal.SIGABRT in codes:
                    self._places(started, folder)
                time.sleep(GRACE_SECONDS)  # in which the other ranks report their failures
                return next(child_process.exit_code(code) for code in codes if code), None
            if None not in codes:
                return 0, None
            if not (new := reader.new()):
                continue
            events += new
            if any(event.kind == "held" for event in new):
                return None, None
            if hang := hang_in(events, len(started)):
                self._places(started, folder)
                return None, hang
        return None, dataclasses.replace(hang_of(self._places(started, folder)), in_time=False)

    @staticmethod
    def _places(started: Sequence[Process], folder: Path) -> list[RankEvent]:
        """Asks the ranks where they are; returns the events once all running ranks have answered, or on timeout."""
        ranks.ask(folder)
        running = sum(_code(process) is None for process in started)
        comes_true(
            lambda: sum(event.kind == "calls" for event in ranks.read(folder)) >= running, PLACES_SECONDS, POLL_SECONDS
        )
        return ranks.read(folder)


def environments(job: JobConfig, config: Path, script: Path) -> list[dict[str, str]]:
    """The variables of each rank: its place, and those of the YAML, which is written to `config` for Accelerate."""
    config.write_text(yaml.safe_dump(dict(job.values)), encoding="utf-8")
    common = launcher.rank_environment(config, script)
    if job.engine is Engine.NONE:
        return [common]
    return [common | place for place in places(job.number("num_processes"), machines_of(job))]


def _is_port_taken(outcome: Outcome, port: str) -> bool:
    """Whether another program took the free port between its choice and the first rank's start."""
    taken = re.compile(rf"\bport: {port}\b.*EADDRINUSE")
    return any(taken.search(event.content["error"]) for event in outcome.of("failed"))


def _code(process: Process) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def places(ranks: int, machines: int = 1) -> list[dict[str, str]]:
    """Each rank's variables as torchrun sets them, on several machines if the ranks represent several."""
    per_node = ranks // machines
    numbers = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": per_node, "MASTER_PORT": host.free_port()}
    common = {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    return [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "GROUP_RANK": str(rank // per_node)}
        for rank in range(ranks)
    ]


def hang_in(events: Sequence[RankEvent], processes: int) -> Hang | None:
    """A hang, if every live rank is stuck, and one of them in a collective; else None.

    Ranks that all wait in collectives are stuck for ever if some ranks have ended, or if the collectives differ.
    """
    last = {event.rank: event for event in events}
    ended = {event.rank for event in events if event.kind == "ended"}
    waiting = {rank: event.content for rank, event in last.items() if event.kind == "still" and rank not in ended}
    collectives = {(location["collective"], location["line"]) for location in waiting.values()}
    if len(waiting) + len(ended) < processes or not any(name for name, _ in collectives):
        return None
    is_sure = all(name for name, _ in collectives) and (ended or len(collectives) > 1)
    if not is_sure and not all(location["long"] for location in waiting.values()):
        return None
    return hang_of(events)


def hang_of(events: Sequence[RankEvent]) -> Hang:
    """The last places of all ranks that have not ended, as far as they reported them."""
    ended = frozenset(event.rank for event in events if event.kind == "ended")
    places = {event.rank: event.content for event in events if event.kind in ("still", "at")}
    waits = {rank: Location(p["line"], p["collective"], p["stack"]) for rank, p in places.items() if rank not in ended}
    return Hang(waits, ended)


def left_alone(events: Sequence[RankEvent]) -> Hang | None:
    """A hang that gloo ended: ranks whose script ended well have closed their connections, and the others failed."""
    failed = [event for event in events if event.kind == "failed"]
    ended = frozenset(event.rank for event in events if event.kind == "ended" and event.content["code"] == 0)
    if not failed or not ended or not all(CONSEQUENCE.search(event.content["error"]) for event in failed):
        return None
    places = {event.rank: event.content for event in failed}
    waits = {rank: Location(place["line"], place["collective"] or "a collective", "") for rank, place in places.items()}
    return Hang(waits, ended)


def _kill(started: Sequence[Process]) -> None:
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()  # it may not lead its group yet
        process.wait() if isinstance(process, subprocess.Popen) else process.join()
