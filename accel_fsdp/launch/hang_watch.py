"""Watches a job from inside each rank, and ends a job that hangs or has lost a host, with a report of where it was.

It takes two threads. One exchanges heartbeats through the job's store, which may block indefinitely if its machine is
off; the other checks every second whether the first still gets answers, and where the main thread is.
"""

import contextlib
import dataclasses
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from accel_fsdp import console, errors, time_limits
from accel_fsdp.checkpoints import completeness
from accel_fsdp.errors import UserError, in_a_line
from accel_fsdp.launch import beats, hangs, rendezvous
from accel_fsdp.launch.beats import GONE, STOPPED, Beat, RankMessages
from accel_fsdp.launch.hangs import Cause, LastSeen, Patience, PeerState
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import flight_records, hang

BEAT_SECONDS = 2.0
RANKS_PER_SECOND = 100
"""The most heartbeats per second that the store has to handle: each rank reads those of all ranks."""
LOST_BEATS = 3
"""A rank counts as gone after this many missing heartbeats, once a collective has failed."""
DISK_SECONDS = 3.0
"""Seconds to wait for the newest checkpoint's name: a hanging disk may be the cause of the hang."""
RECORDS = "hang"
"""The folder in `output_dir` for torch's flight recorder, which `torchfrtrace` reads."""


class Watchdog:
    """Watches in threads that run from `begin` to `end`. Without an `output_dir`, reports name no checkpoint."""

    advice = ""
    """The flag that sets how long ranks may take."""
    prefix = "accel_fsdp/hang"
    """The prefix of this watch's keys in the job's store."""

    def __init__(self, patience: Patience, output_dir: Path | None = None) -> None:
        self.patience, self.output_dir = patience, output_dir
        self.rank, self.seen = LaunchEnvironment.now().rank, dict[int, PeerState]()
        self.messages: RankMessages | None = None
        self._over = threading.Event()
        self._doing, self._since = "the start", time.monotonic()
        self._step: int | None = None
        self._place: hang.Instructions = ()
        self._place_since = self._last_round = self._since
        self._rounds, self._store_is_gone, self._failed_since = 0, False, 0.0
        self._changed: dict[int, tuple[int, float]] = {}
        self._computed: dict[int, float] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, main: int | None = None) -> None:
        """Begins to watch a thread of this process, by default the calling one. Call on all ranks."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.messages, self._main = RankMessages.of_job(self.prefix, ranks), main or threading.get_ident()
        self.every = max(BEAT_SECONDS, ranks / RANKS_PER_SECOND)
        self._first = beats.first_of(self.rank)
        self._since = self._place_since = self._last_round = time.monotonic()
        self._publish(self._first, "")
        for run in (self._exchange_beats, self._watch_main):
            thread = threading.Thread(target=run, name=hang.WATCHES, daemon=True)
            thread.start()
            self._threads.append(thread)  # started, as the main thread may wait for its end at any time

    def end(self) -> None:
        """Ends the watch, which then no longer ends this process."""
        self._over.set()

    def trained(self) -> None:
        """Reports to the other ranks that this rank may end at any time."""
        self._doing, self._since = hangs.AFTER, time.monotonic()
        if self.messages is not None:
            with contextlib.suppress(RuntimeError, OSError):
                self._publish(*self._own_beat())

    def verdict(self) -> str:
        """Why the job has to end, as far as this rank sees; empty while it should go on."""
        return hangs.verdict(self.seen, self.patience, machine_answers)

    @property
    def _messages(self) -> RankMessages:
        """The messages of all ranks, which exist only after `begin`."""
        assert self.messages is not None
        return self.messages

    # The two threads

    def _exchange_beats(self) -> None:
        while not self._over.wait(self.every if self.seen else self.every / 10):  # first beats soon: they name hosts
            try:
                self._run_round()
            except (RuntimeError, OSError):  # a DistError is one
                self._store_is_gone = True
                return
            self._rounds += 1

    def _run_round(self) -> None:
        began, before = time.monotonic(), self._last_round
        longest = max(self.patience.silence / 2, LOST_BEATS * self.every)
        if began - before > longest:  # this process was stopped or cut off, so its knowledge is old
            self._forget()
        self._last_round = began
        self._publish(*self._own_beat())
        self._read(began)
        cause = self._reported_cause()
        if cause and cause.reported_by != self.rank:
            self._failed_since = self._failed_since or began
            if began - self._failed_since > self._grace:
                self._stop(cause)
        if agreed := self._messages.get("verdict"):
            self._stop(Cause(**agreed))
        if verdict := self.verdict():
            self._stop(Cause(verdict))

    def _publish(self, beat: Beat, stack: str) -> None:
        self._messages.put(f"stack/{self.rank}", stack)
        self._messages.put(f"beat/{self.rank}", dataclasses.asdict(beat))

    def _reported_cause(self) -> Cause | None:
        """The failure that a rank has reported, if one has."""
        content = self._messages.get("failure")
        return Cause(**content) if content else None

    @property
    def _grace(self) -> float:
        """The seconds in which the main thread may notice by itself that another rank was lost."""
        return 2 * LOST_BEATS * self.every

    def _own_beat(self) -> tuple[Beat, str]:
        location = hang.location_of(self._main)
        self._note_place()  # after the location was read: a rank that has just arrived there has not waited there
        now = time.monotonic()
        beat = dataclasses.replace(
            self._first,
            number=self._rounds + 1,
            step=self._step,
            doing=self._doing,
            idle=now - self._since,
            still=now - self._place_since,
            collective=location.collective if location else "",
            caller=location.caller if location else "",
            mates=self._mates(),
        )
        return beat, location.stack if location else ""

    def _note_place(self) -> hang.Instructions:
        """The main thread's location; also records the time at which the thread reached it."""
        place = hang.place_of(self._main)
        if place != self._place:
            self._place_since, self._place = time.monotonic(), place  # in this order: another thread may read both
        return place

    def _mates(self) -> dict[str, str]:
        """The states of the silent ranks' processes on this machine."""
        silent = (peer.beat for peer in self._peers_here() if peer.silent > self.patience.silence / 2)
        return {str(beat.rank): beats.state_of(beat.pid, self._computed) for beat in silent}

    def _peers_here(self) -> list[PeerState]:
        """The ranks of this machine."""
        return [peer for peer in self.seen.values() if peer.beat.machine == self._first.machine]

    def _read(self, now: float) -> None:
        changed, peers = self._changed, dict[int, PeerState]()
        for beat in self._messages.beats():
            number, since = changed.get(beat.rank, (-1, now))
            if number != beat.number:
                changed[beat.rank] = beat.number, (since := now)
            peers[beat.rank] = PeerState(beat, now - since)
        self.seen = peers

    def _forget(self) -> None:
        now = time.monotonic()
        self._since = self._place_since = now
        self._changed, self.seen = {}, {}  # new dicts: the other thread may be reading the old ones

    def _watch_main(self) -> None:
        rounds, waited, before = 0, 0.0, time.monotonic()
        while not self._over.wait(1.0):
            now, place = time.monotonic(), self._note_place()
            if now - before > self.patience.silence / 2 or hang.is_debugged(place):  # or the process was stopped
                self._forget()
            before = now
            rounds, waited = self._rounds, (waited + 1.0 if rounds == self._rounds else 0.0)
            still_seconds = min(now - self._place_since, now - self._since)
            is_own_store = self._first.has_store  # in a launcher here, which a user may have stopped for a while
            longest = self.patience.seconds(self._doing) if is_own_store else self.patience.silence
            self._measure_others(now)
            if waited >= longest and still_seconds >= self.patience.silence / 2 and self._needs_others():
                why = self._why_no_sign(is_own_store)
                self._stop_alone(f"no heartbeat of {self._store_host()}, for {waited:.0f} s{why}")

    def _measure_others(self, now: float) -> None:
        """Called every second, after reading the main thread's stack."""

    def _needs_others(self) -> bool:
        """Whether this rank can't go on without the others."""
        return True

    def _why_no_sign(self, is_own_store: bool) -> str:
        """The state of the machine with the store, or of the launcher here that holds it."""
        if not is_own_store:
            launched = LaunchEnvironment.now()
            return hangs.describe_machine(rendezvous.answers(launched.main_address, launched.main_port))
        stopped = beats.state_of(os.getppid()) == STOPPED
        return ": a signal has stopped the launcher here" if stopped else ": the launcher here doesn't answer"

    def _store_host(self) -> str:
        """The host of the job's store, with its ranks."""
        holder = next((peer.beat for peer in self.seen.values() if peer.beat.has_store), None)
        if holder is None:
            return f"{LaunchEnvironment.now().main_address}, where the job's store is"
        ranks = [rank for rank, peer in self.seen.items() if peer.beat.machine == holder.machine]
        return f"{holder.host} ({hangs.ranks_words(ranks)}), where the job's store is"

    # The main thread, when its work has failed

    def report(self, error: BaseException) -> None:
        """Reports to the other ranks that this one has failed, and ends the watch."""
        if self.messages is not None and not self._over.is_set():
            stack = "".join(traceback.format_tb(error.__traceback__))
            with contextlib.suppress(RuntimeError, OSError):
                beat = dataclasses.replace(self._own_beat()[0], collective="", caller=hang.caller_of_error(error))
                self._report(LastSeen(beat, stack, failed=True))
            what = f"rank {self.rank} of {self._first.host} failed: {in_a_line(error)}"
            self._blame(Cause(what, error.fix) if isinstance(error, UserError) else Cause(what, stack=stack))
        self.end()

    def _report(self, state: LastSeen) -> None:
        """Publishes where this rank ends."""
        self._messages.put(f"report/{self.rank}", dataclasses.asdict(state))

    def _blame(self, cause: Cause) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            self._messages.agree("failure", dataclasses.asdict(dataclasses.replace(cause, reported_by=self.rank)))

    def culprit(self) -> Cause | None:
        """Names the rank or host that was lost, and how; None if unknown.

        Waits some seconds. Call after a failed collective. A rank that raised has reported it; a lost one sends no more
        heartbeats. Ends the watch.
        """
        if self.messages is None:
            return None
        deadline, cause = time.monotonic() + self._grace, None
        while cause is None and time.monotonic() < deadline:
            cause = self._known_cause()
            time.sleep(0.2)
        if cause is not None:
            self._blame(cause)
        self.end()
        return cause

    def _known_cause(self) -> Cause | None:
        try:
            if cause := self._reported_cause():
                return cause
        except (RuntimeError, OSError):
            self._store_is_gone = True
        if self._store_is_gone:
            return Cause(f"no connection to {self._store_host()}")
        for peer in self._peers_here():
            if peer.beat.rank != self.rank and (state := beats.state_of(peer.beat.pid)) in (GONE, STOPPED):
                return Cause(hangs.describe_process(peer, state))
        peers = self.seen
        silent = hangs.silent_ranks(peers, LOST_BEATS * self.every)
        return Cause(hangs.describe_silent(silent, peers, machine_answers)) if silent else None

    # The end

    def _stop(self, cause: Cause) -> NoReturn:
        """Ends this rank, as all others do; the lowest live rank collects and prints their reports."""
        if self._over.is_set():
            sys.exit()  # ends this thread: the main one has noticed by itself
        messages, states = self._messages, dict[int, LastSeen]()
        is_reporter = is_late = False
        try:
            is_late = messages.get("reported") is not None
            cause = Cause(**messages.agree("verdict", dataclasses.asdict(cause)))
            self._report(LastSeen(*self._own_beat(), _last_collective()))
            in_time(self._keep_record)
            silent = set(hangs.silent_ranks(self.seen, self.patience.silence / 2))
            living = {rank for rank in self.seen if rank not in silent} | {self.rank}
            self._wait_for(lambda: living <= messages.of_ranks("report").keys())
            states = self._last_states()
            is_reporter = self.rank == min(living) and not is_late
            if not is_reporter:
                self._wait_for(lambda: messages.get("reported") is not None)
        except (RuntimeError, OSError):
            pass
        self._wake_stopped()
        self._leave(cause, states, is_reporter, silently=is_late)

    def _wake_stopped(self) -> None:
        """Wakes ranks of this machine that a signal stopped, so that they end too: their launcher waits for them."""
        for peer in self._peers_here():
            if peer.beat.rank != self.rank and peer.silent and beats.state_of(peer.beat.pid) == STOPPED:
                with contextlib.suppress(OSError):
                    os.kill(peer.beat.pid, signal.SIGCONT)

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 2 * self.every + DISK_SECONDS
        while not is_done() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _last_states(self) -> dict[int, LastSeen]:
        """The last report of each rank, or its last heartbeat if it hasn't reported."""
        stacks, reports = self._messages.of_ranks("stack"), self._messages.of_ranks("report")
        states = {}
        for rank, peer in sorted(self.seen.items()):
            if report := reports.get(rank):
                states[rank] = LastSeen(**{**report, "beat": Beat(**report["beat"])})
            else:
                states[rank] = LastSeen(peer.beat, stacks.get(rank, ""), ago=peer.silent)
        return states

    def _stop_alone(self, what: str) -> NoReturn:
        """Ends this rank when the store doesn't answer. The lowest rank of each machine reports."""
        speaker = min((peer.beat for peer in self._peers_here()), key=lambda beat: beat.rank, default=self._first)
        silently = False
        if speaker.rank != self.rank:
            self._wait_for(lambda: beats.state_of(speaker.pid) == GONE)
            silently = beats.state_of(speaker.pid) == GONE
        states = {self.rank: LastSeen(*self._own_beat(), _last_collective())}
        self._leave(Cause(what), states, reports=not silently, silently=silently)

    def _leave(self, cause: Cause, states: dict[int, LastSeen], reports: bool, silently: bool) -> NoReturn:
        """Ends this process; the cause and its fix are printed last."""
        error = self._error(cause, states)
        errors.report_to_launcher(error)
        ranks_here = [peer.beat.rank for peer in self._peers_here() if peer.beat.rank in states]
        is_first_here = min((rank for rank in ranks_here if states[rank].ago is None), default=self.rank) == self.rank
        if (reports or is_first_here) and not silently:
            console.say(f"{hangs.stacks(states)}\n{error}" if reports else str(error), lines=True)
        if reports and self.messages is not None and len(states) > 1:
            with contextlib.suppress(RuntimeError, OSError):
                self.messages.agree("reported", True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)

    def _error(self, cause: Cause, states: dict[int, LastSeen]) -> UserError:
        folder = self.output_dir
        newest: Path | None = in_time(lambda: completeness.choose(folder).newest) if folder else None
        checkpoint_note = f"; {newest} is the newest complete checkpoint" if newest else ""
        resume = "the same command with --resume_from_checkpoint true" if newest else "start again"
        return UserError(
            cause.what,
            why=f"{hangs.differences(states) or 'no rank can go on'}{checkpoint_note}",
            fix=f"{cause.fix or 'fix the cause'}, then {resume}; {self.advice}",
        )

    def _keep_record(self) -> None:
        """Writes torch's record of this rank's collectives, for `torchfrtrace`."""
        dump, _ = flight_records.newest("", pickle.loads) if self.output_dir else (b"", {})
        if dump and self.output_dir:
            folder = self.output_dir / RECORDS
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank_{self.rank}").write_bytes(dump)


def _last_collective() -> str:
    """The last collective that torch has recorded, as the end of a sentence; empty without a record."""
    with contextlib.suppress(LookupError):
        last = flight_records.last_collective()
        name = f"{last['profiling_name']} number {last['collective_seq_id']}"
        return f" (its last collective: {name} of group {last['process_group'][0]})"
    return ""


def machine_answers(beat: Beat) -> bool | None:
    """Whether the machine of a rank takes a connection; None if its address is unknown."""
    return rendezvous.answers(beat.address, LaunchEnvironment.now().main_port) if beat.address else None


def in_time(function: Callable[[], Any]) -> Any:
    """Returns the result of `function`; None if the disk takes too long or refuses."""
    return time_limits.result_of(function, DISK_SECONDS)
