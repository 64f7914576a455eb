"""Watches a job from inside each rank, and ends one that hangs or has lost a host, with a report of where.

Two threads do it. One talks to the job's store, which may block for ever if its machine is off; the other checks
every second whether the first one still gets answers, and where the main thread is.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from accel_fsdp import console, errors
from accel_fsdp.checkpoints import completeness
from accel_fsdp.errors import UserError, in_a_line
from accel_fsdp.launch import hangs, rendezvous
from accel_fsdp.launch.beats import GONE, STOPPED, Beat, Board, Mates, own_beat
from accel_fsdp.launch.hangs import LastSeen, Patience, Seen
from accel_fsdp.launch.ranks import hang
from accel_fsdp.launch_environment import LaunchEnvironment

BEAT_SECONDS = 2.0
RANKS_PER_SECOND = 100
"""Signs of life that the store has to handle: each rank reads those of all."""
LOST_BEATS = 3
"""A rank counts as gone after this many missing signs, once a collective has failed."""
DISK_SECONDS = 3.0
"""How long to wait for the disk to name the newest checkpoint: a hanging disk may be the cause of the hang."""
RECORDS = "hang"
"""The folder in `output_dir` for torch's flight recorder, which `torchfrtrace` reads."""
NCCL_BACKENDS = ("nccl", "nccl2", "nccl-lazy")
"""The names of torch 2.15's backends for NCCL."""


class Watch:
    """Its threads run from `begin` to `end`. Without an `output_dir`, reports name no checkpoint."""

    advice = ""
    """The flag that sets how long ranks may take."""
    prefix = "accel_fsdp/hang"
    """The prefix of this watch's keys in the job's store."""

    def __init__(self, patience: Patience, output_dir: Path | None = None) -> None:
        self.patience, self.output_dir = patience, output_dir
        self.rank, self.seen = LaunchEnvironment.now().rank, dict[int, Seen]()
        self.board: Board | None = None
        self._over = threading.Event()
        self._doing, self._since = "the start", time.monotonic()
        self._step: int | None = None
        self._place: hang.Place = ()
        self._place_since = self._last_round = self._since
        self._rounds, self._store_is_gone, self._failed_since = 0, False, 0.0
        self._changed: dict[int, tuple[int, float]] = {}
        self._mates = Mates()
        self._threads: list[threading.Thread] = []

    def begin(self, main: int | None = None) -> None:
        """Begins to watch a thread of this process, by default the calling one. Call on all ranks."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.board, self._main = Board(self.rank, ranks, self.prefix), main or threading.get_ident()
        self.every = max(BEAT_SECONDS, ranks / RANKS_PER_SECOND)
        self._first = own_beat(self.rank)
        self._since = self._place_since = self._last_round = time.monotonic()
        self.board.put(self._first, "")
        self._threads = [
            threading.Thread(target=run, name=hang.WATCHES, daemon=True) for run in (self._talk, self._look)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Ends the watch: from here on it doesn't end this process."""
        self._over.set()

    def trained(self) -> None:
        """Reports to the other ranks that this one may end at any time."""
        self._doing, self._since = hangs.AFTER, time.monotonic()
        if self.board is not None:
            with contextlib.suppress(RuntimeError, OSError):
                self.board.put(*self._own())

    def verdict(self) -> str:
        """Why the job has to end, as far as this rank sees; empty where it goes on."""
        return hangs.verdict(self.seen, self.patience, machine_answers)

    # The two threads

    def _talk(self) -> None:
        board = self.board
        assert board is not None
        while not self._over.wait(self.every if self.seen else self.every / 10):  # soon, to know all by name
            try:
                self._round(board)
            except (RuntimeError, OSError):  # a DistError is one
                self._store_is_gone = True
                return
            self._rounds += 1

    def _round(self, board: Board) -> None:
        began, before = time.monotonic(), self._last_round
        longest = max(self.patience.silence / 2, LOST_BEATS * self.every)
        if began - before > longest:  # this process was stopped or cut off, so what it knows is old
            self._forget()
        self._last_round = began
        board.put(*self._own())
        self._read(board, began)
        failure = board.agreed("failure")
        if failure and failure["rank"] != self.rank:
            self._failed_since = self._failed_since or began
            if began - self._failed_since > self._grace:
                self._stop(failure["what"])
        if agreed := board.agreed("verdict"):
            self._stop(agreed["what"])
        if verdict := self.verdict():
            self._stop(verdict)

    @property
    def _grace(self) -> float:
        """Seconds for the main thread to notice by itself that another rank has gone."""
        return 2 * LOST_BEATS * self.every

    def _own(self) -> tuple[Beat, str]:
        stand = hang.stand_of(self._main)
        now = time.monotonic()
        beat = dataclasses.replace(
            self._first,
            number=self._rounds + 1,
            step=self._step,
            doing=self._doing,
            idle=now - self._since,
            still=now - self._place_since,
            collective=stand.collective if stand else "",
            caller=stand.caller if stand else "",
            mates=self._looks(),
        )
        return beat, stand.stack if stand else ""

    def _looks(self) -> dict[str, str]:
        """The states of the silent ranks' processes on this machine."""
        silent = (peer.beat for peer in self.seen.values() if peer.silent > self.patience.silence / 2)
        return {str(beat.rank): self._mates.look(beat.pid) for beat in silent if beat.machine == self._first.machine}

    def _read(self, board: Board, now: float) -> None:
        changed, seen = self._changed, dict[int, Seen]()
        for beat in board.beats():
            number, since = changed.get(beat.rank, (-1, now))
            if number != beat.number:
                changed[beat.rank] = beat.number, (since := now)
            seen[beat.rank] = Seen(beat, now - since)
        self.seen = seen

    def _forget(self) -> None:
        now = time.monotonic()
        self._since = self._place_since = now
        self._changed, self.seen = {}, {}  # new ones: the other thread may be reading the old

    def _look(self) -> None:
        rounds, waited, before = 0, 0.0, time.monotonic()
        while not self._over.wait(1.0):
            now, place = time.monotonic(), hang.place_of(self._main)
            if now - before > self.patience.silence / 2 or hang.is_debugged(place):  # or the process was stopped
                self._forget()
            before = now
            if place != self._place:
                self._place, self._place_since = place, now
            rounds, waited = self._rounds, (waited + 1.0 if rounds == self._rounds else 0.0)
            still = min(now - self._place_since, now - self._since)
            own = self._first.has_store  # in a launcher here, which a user may have stopped for a while
            longest = self.patience.seconds(self._doing) if own else self.patience.silence
            self._looked(now)
            if waited >= longest and still >= self.patience.silence / 2 and self._needs_others():
                self._stop_alone(f"no sign of {self._of_store()}, for {waited:.0f} s{self._why_no_sign(own)}")

    def _looked(self, now: float) -> None:
        """Called every second, after a look at the main thread."""

    def _needs_others(self) -> bool:
        """Whether this rank can't go on without the others."""
        return True

    def _why_no_sign(self, own: bool) -> str:
        """The state of the machine with the store, or of the launcher here that holds it."""
        if not own:
            launched = LaunchEnvironment.now()
            return hangs.describe_machine(rendezvous.answers(launched.main_address, launched.main_port))
        stopped = Mates().look(os.getppid()) == STOPPED
        return ": a signal has stopped the launcher here" if stopped else ": the launcher here doesn't answer"

    def _of_store(self) -> str:
        """The host of the job's store, with its ranks."""
        has = next((peer.beat for peer in self.seen.values() if peer.beat.has_store), None)
        if has is None:
            return f"{LaunchEnvironment.now().main_address}, where the job's store is"
        ranks = [rank for rank, peer in self.seen.items() if peer.beat.machine == has.machine]
        return f"{has.host} ({hangs.ranks_words(ranks)}), where the job's store is"

    # The main thread, when its work has failed

    def tell(self, error: BaseException) -> None:
        """Reports to the other ranks that this one has failed, and ends the watch."""
        if self.board is not None and not self._over.is_set():
            stack = "".join(traceback.format_tb(error.__traceback__))
            reason = in_a_line(error)
            with contextlib.suppress(RuntimeError, OSError):
                beat = dataclasses.replace(self._own()[0], collective="", caller=hang.caller_of_error(error))
                self.board.put_words({"record": "", "beat": dataclasses.asdict(beat), "stack": stack, "failed": True})
            self._blame(f"rank {self.rank} of {self._first.host} failed: {reason}", stack)
        self.end()

    def _blame(self, what: str, stack: str = "") -> None:
        assert self.board is not None
        with contextlib.suppress(RuntimeError, OSError):
            self.board.agree("failure", {"rank": self.rank, "what": what, "stack": stack})

    def culprit(self) -> tuple[str, str]:
        """Returns which rank or host has gone, and the stack if it failed; empty where unknown. Waits some seconds.

        Call after a failed collective. A rank that raised has reported it; a lost one gives no more signs. Ends the
        watch.
        """
        if self.board is None:
            return "", ""
        until, culprit = time.monotonic() + self._grace, ("", "")
        while not any(culprit) and time.monotonic() < until:
            culprit = self._known()
            time.sleep(0.2)
        if culprit[0]:
            self._blame(*culprit)
        self.end()
        return culprit

    def _known(self) -> tuple[str, str]:
        assert self.board is not None
        try:
            if failure := self.board.agreed("failure"):
                return failure["what"], failure["stack"]
        except (RuntimeError, OSError):
            self._store_is_gone = True
        if self._store_is_gone:
            return f"no connection to {self._of_store()}", ""
        seen = dict(self.seen)
        for rank, peer in seen.items():
            if rank != self.rank and peer.beat.machine == self._first.machine:
                state = Mates().look(peer.beat.pid)
                if state in (GONE, STOPPED):
                    return hangs.describe_process(peer, state), ""
        gone = hangs.silent_ranks(seen, LOST_BEATS * self.every)
        return (hangs.describe_silent(gone, seen, machine_answers) if gone else ""), ""

    # The end

    def _stop(self, what: str) -> NoReturn:
        """Ends this rank, as all others do; the lowest that still gives signs collects and prints their reports."""
        board = self.board
        assert board is not None
        if self._over.is_set():
            sys.exit()  # ends this thread: the main one has noticed by itself
        states: dict[int, LastSeen] = {}
        speaks = late = False
        try:
            late = board.agreed("said") is not None
            what = board.agree("verdict", {"what": what})["what"]
            board.put_words({"record": _record(), "beat": dataclasses.asdict(self._own()[0]), "stack": self._own()[1]})
            in_time(self._keep_record)
            silent = set(hangs.silent_ranks(self.seen, self.patience.silence / 2))
            living = {rank for rank in self.seen if rank not in silent} | {self.rank}
            self._wait_for(lambda: living <= board.words().keys())
            states = self._collected(board)
            speaks = self.rank == min(living) and not late
            if not speaks:
                self._wait_for(lambda: board.agreed("said") is not None)
        except (RuntimeError, OSError):
            pass
        self._wake_stopped()
        self._leave(what, states, speaks, silently=late)

    def _wake_stopped(self) -> None:
        """Wakes ranks of this machine that a signal stopped, so that they end too: their launcher waits for them."""
        for peer in self.seen.values():
            here = peer.beat.machine == self._first.machine and peer.beat.pid != os.getpid()
            if here and peer.silent and Mates().look(peer.beat.pid) == STOPPED:
                with contextlib.suppress(OSError):
                    os.kill(peer.beat.pid, signal.SIGCONT)

    def _wait_for(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + 2 * self.every + DISK_SECONDS
        while not done() and time.monotonic() < until:
            time.sleep(0.1)

    def _collected(self, board: Board) -> dict[int, LastSeen]:
        last, reports = board.stacks(), board.words()
        states = {}
        for rank, peer in sorted(self.seen.items()):
            if own := reports.get(rank):
                states[rank] = LastSeen(**{**own, "beat": Beat(**own["beat"])})
            else:
                states[rank] = LastSeen(peer.beat, last.get(rank, ""), ago=peer.silent)
        return states

    def _stop_alone(self, what: str) -> NoReturn:
        """Ends this rank when the store doesn't answer. The lowest rank of each machine reports."""
        beat, stack = self._own()
        here = [peer.beat for peer in self.seen.values() if peer.beat.machine == self._first.machine]
        speaker = min(here, key=lambda neighbour: neighbour.rank, default=self._first)
        if speaker.rank != self.rank:
            self._wait_for(lambda: Mates().look(speaker.pid) == GONE)
        silently = speaker.rank != self.rank and Mates().look(speaker.pid) == GONE
        self._leave(what, {self.rank: LastSeen(beat, stack, _record())}, speaks=not silently, silently=silently)

    def _leave(self, what: str, states: dict[int, LastSeen], speaks: bool, silently: bool = False) -> NoReturn:
        error = self._error(what, states)
        errors.tell_launcher(error)
        ranks_here = [rank for rank, state in states.items() if self._is_here(state)]
        first_here = min(ranks_here, default=self.rank) == self.rank
        if (speaks or first_here) and not silently:
            console.say(f"{error}\n{hangs.stacks(states)}" if speaks else str(error), lines=True)
        if speaks and self.board is not None and len(states) > 1:
            with contextlib.suppress(RuntimeError, OSError):
                self.board.agree("said", {})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)

    def _is_here(self, state: LastSeen) -> bool:
        return state.beat.machine == self._first.machine and state.ago is None

    def _error(self, what: str, states: dict[int, LastSeen]) -> UserError:
        folder = self.output_dir
        newest: Path | None = in_time(lambda: completeness.choose(folder).newest) if folder else None
        kept = f"; {newest} is the newest complete checkpoint" if newest else ""
        resume = "the same command with --resume_from_checkpoint true" if newest else "start again"
        return UserError(
            what,
            why=f"{hangs.differences(states) or 'no rank can go on'}{kept}",
            fix=f"mend the cause, then {resume}; {self.advice}",
        )

    def _keep_record(self) -> None:
        """Writes torch's record of this rank's collectives, for `torchfrtrace`."""
        dump, _ = newest_record("", pickle.loads) if self.output_dir else (b"", {})
        if dump and self.output_dir:
            folder = self.output_dir / RECORDS
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank_{self.rank}").write_bytes(dump)


def machine_answers(beat: Beat) -> bool | None:
    """Whether the machine of a rank takes a connection; None if its address is unknown."""
    return rendezvous.answers(beat.address, LaunchEnvironment.now().main_port) if beat.address else None


def in_time(act: Callable[[], Any]) -> Any:
    """Returns the result of `act`; None if the disk takes too long or refuses."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DISK_SECONDS)
    return next(iter(results), None)


def _records(form: str) -> Iterator[bytes]:
    """The dumps of torch's flight recorders, pickled or, with the form "_json", as JSON.

    A CUDA build has a recorder for NCCL and one for all other backends; torch 2.15 has one for each backend.
    """
    from torch._C import _distributed_c10d as recorders

    others = f"_dump_fr_trace{form}"
    calls = [(f"_dump_nccl_trace{form}", {}), (others, {}), *((others, {"backend": name}) for name in NCCL_BACKENDS)]
    for function, words in calls:
        with contextlib.suppress(AttributeError, TypeError):  # builds without NCCL; torch before 2.15
            yield getattr(recorders, function)(**words)


def newest_record(form: str, load: Callable[[bytes], Any]) -> tuple[bytes, dict[str, Any]]:
    """The record with the latest collective, and that collective; both empty if none was recorded."""
    newest: tuple[bytes, dict[str, Any]] = b"", {}
    for dump in _records(form):
        entries = load(dump).get("entries")
        if entries and entries[-1]["time_created_ns"] > newest[1].get("time_created_ns", 0):
            newest = dump, entries[-1]
    return newest


def _record() -> str:
    """The last collective that torch has recorded, as the end of a sentence; empty if it records none."""
    with contextlib.suppress(Exception):
        _, last = newest_record("_json", json.loads)
        if last:
            name = f"{last['profiling_name']} number {last['collective_seq_id']}"
            return f" (its last collective: {name} of group {last['process_group'][0]})"
    return ""
