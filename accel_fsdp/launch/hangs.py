"""Decides from the ranks' heartbeats whether a job hangs, and writes the report.

A job ends when no rank has finished a step for the time that `Patience` allows, and one of them waited at the same
instruction for half of that: while all ranks are active, for example skipping rows, the job goes on. It ends earlier
when a rank sent no heartbeat for `Patience.silence` while all the others waited for half of that. A rank whose process
computes, as others on its host see it, isn't silent: C code may hold Python's GIL for long.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_fsdp.launch.beats import COMPUTES, DEBUGGED, GONE, STOPPED, Beat
from accel_fsdp.units import counted, first_few

SILENCE_SECONDS = 40.0
VANISHED_TOGETHER = 2 / 3
"""A rank is silent together with the longest-silent one from this share of that silence on."""
LEAST_SECONDS = 600.0
SLOWEST_STEPS = 20
"""A step may take this many times the slowest of this many last steps."""
LONGER = 3
"""Timeout factor for saves, evaluations and the export, relative to a training step."""
AFTER = "what comes after training"
"""The activity of ranks once training has ended; one of them may exit while others go on."""
SHOWN_FRAMES = 12
SHOWN_RANKS = 4
EACH_FRAME = "  File "


@dataclass
class Patience:
    """How long ranks may take; `given`: the flag's seconds for a step; None: the limit follows from the last steps.

    `collectives`: the job's own timeout of collectives, in which ranks wait for one that saves.
    """

    given: float | None = None
    collectives: float = 0.0
    longest_silence: float = SILENCE_SECONDS
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=SLOWEST_STEPS))

    def seconds(self, doing: str) -> float:
        """The longest time without a finished step: in a step (`doing` is empty), or in a save or an evaluation."""
        of_step = self.given or max(LEAST_SECONDS, SLOWEST_STEPS * max(self.steps, default=0.0))
        if not doing:
            return of_step
        return of_step * LONGER if self.given else max(of_step * LONGER, self.collectives)

    @property
    def silence(self) -> float:
        return min(self.longest_silence, self.given or self.longest_silence)


@dataclass(frozen=True)
class PeerState:
    """A rank as another one sees it; `silent` counts the seconds since its last heartbeat."""

    beat: Beat
    silent: float


@dataclass(frozen=True)
class Cause:
    """Why a job ends. If a rank raised: the `fix` of a UserError, or the `stack` of any other error."""

    what: str
    fix: str = ""
    stack: str = ""
    reported_by: int | None = None


Answers = Callable[[Beat], bool | None]
"""Tries a connection to the machine of a rank: whether it answers; None where its address is unknown."""


def verdict(peers: Mapping[int, PeerState], patience: Patience, answers: Answers = lambda beat: None) -> str:
    """Why the job has to end; empty while it should go on."""
    if silent := silent_ranks(peers, patience.silence):
        others = [peer.beat for rank, peer in peers.items() if rank not in silent]
        if others and all(min(peer.still, peer.idle) >= patience.silence / 2 for peer in others):
            return describe_silent(silent, peers, answers)
    idle = min((peer.beat.idle + peer.silent for peer in peers.values()), default=0.0)
    doing = next((peer.beat.doing for peer in peers.values() if peer.beat.doing), "")
    allowed = patience.seconds(doing)
    if idle < allowed or all(min(peer.beat.still, peer.beat.idle) < allowed / 2 for peer in peers.values()):
        return ""
    suffix = f" during {doing}" if doing else ""
    quiet = silent_ranks(peers, patience.silence / 2)
    note = f"; {describe_silent(quiet, peers, answers)}" if quiet else ""
    return f"no rank has finished a step for {idle:.0f} s{suffix}{note}"


def verdict_without_steps(
    peers: Mapping[int, PeerState], patience: Patience, answers: Answers = lambda beat: None
) -> str:
    """The verdict for a script that doesn't report steps: all ranks must be idle, and some wait in a collective.

    Without a flag they may wait for the collective's own timeout, so only a job that torch would end is ended.
    """
    silent = silent_ranks(peers, patience.silence)
    living = {rank: peer.beat for rank, peer in peers.items() if rank not in silent}
    waiting = [beat for beat in living.values() if beat.collective]
    if not waiting:
        return ""
    if silent and all(beat.seconds_still >= patience.silence / 2 for beat in living.values() if beat.doing != AFTER):
        return describe_silent(silent, peers, answers)
    allowed = patience.given or min(beat.allowed for beat in waiting)
    ended = [rank for rank, beat in living.items() if beat.doing == AFTER]
    seconds = min(peer.silent if rank in ended else peer.beat.seconds_still for rank, peer in peers.items())
    if seconds < allowed:
        return ""
    outside = [beat for rank, beat in living.items() if not beat.collective and rank not in ended]
    facts = [f"{beat} has done nothing for {beat.seconds_still:.0f} s" for beat in outside]
    facts += [f"{living[rank]} has ended its script" for rank in ended]
    waits = (
        f"{counted(len(waiting), 'rank')} of {len(peers)} {'waits' if len(waiting) == 1 else 'wait'} in a collective"
    )
    return (
        f"{first_few(facts, SHOWN_RANKS)}; {waits}"
        if facts
        else f"all ranks have waited in collectives for {seconds:.0f} s"
    )


def silent_ranks(peers: Mapping[int, PeerState], seconds: float) -> list[int]:
    """The ranks without a heartbeat for this long that no other rank on their host sees computing.

    Ranks of one host send heartbeats at different moments, so a rank that vanishes with others may be silent for less.
    """
    longest = max((peer.silent for peer in peers.values()), default=0.0)
    alive = {rank: peer for rank, peer in peers.items() if peer.beat.doing != AFTER}
    silent = [rank for rank, peer in alive.items() if longest >= seconds and peer.silent >= seconds * VANISHED_TOGETHER]
    return [rank for rank in silent if _seen_by_mates(rank, peers, seconds) not in (COMPUTES, DEBUGGED)]


def _seen_by_mates(rank: int, peers: Mapping[int, PeerState], seconds: float) -> str:
    """The state of a rank's process, as seen by the live ranks on its host."""
    states = (peer.beat.mates.get(str(rank), "") for peer in peers.values() if peer.silent < seconds)
    return next(filter(None, states), "")


def describe_silent(
    silent: Collection[int], peers: Mapping[int, PeerState], answers: Answers = lambda beat: None
) -> str:
    """Names the hosts whose ranks are all silent, else the silent ranks, with the state of their processes."""
    hosts = {peers[rank].beat.machine: peers[rank].beat.host for rank in silent}
    parts = []
    for machine, host in hosts.items():
        ranks = [rank for rank, peer in peers.items() if peer.beat.machine == machine]
        quiet = [rank for rank in ranks if rank in silent]
        seconds = max(peers[rank].silent for rank in quiet)
        if quiet == ranks and len({peer.beat.machine for peer in peers.values()}) > 1:
            machine_words = describe_machine(answers(peers[ranks[0]].beat))
            parts.append(f"no heartbeat of {host} ({ranks_words(ranks)}) for {seconds:.0f} s{machine_words}")
        else:
            parts += [describe_process(peers[rank], _seen_by_mates(rank, peers, seconds)) for rank in quiet]
    return "; ".join(parts)


def describe_machine(answers: bool | None) -> str:
    """The end of a sentence about a machine whose ranks are all silent."""
    if answers is None:
        return ""
    if answers:
        return "; the machine itself answers: its processes have ended, or were stopped"
    return "; the machine doesn't answer either: switched off or unreachable"


def describe_process(peer: PeerState, state: str) -> str:
    """One line about a silent rank."""
    beat = peer.beat
    if state == STOPPED:
        return f"{beat} has been stopped by a signal for {peer.silent:.0f} s; kill -CONT {beat.pid} lets it go on"
    if state == GONE:
        return f"{beat} is gone: killed, or ended by itself"
    return f"no heartbeat of {beat} for {peer.silent:.0f} s"


def ranks_words(ranks: Iterable[int]) -> str:
    """`rank 2`, or `ranks 2, 3, 5`."""
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


# The report of all ranks


@dataclass(frozen=True)
class LastSeen:
    """Where a rank was seen last: its step, its pending collective, its stack, and torch's record of its collectives.

    `ago`: seconds since its last heartbeat, None if it reported when the job ended. `failed`: it raised there.
    """

    beat: Beat
    stack: str
    record: str = ""
    ago: float | None = None
    failed: bool = False

    @property
    def where(self) -> tuple[Any, ...]:
        """A key for the location in Python, equal for ranks that wait at the same one."""
        return self.ago is None, not self.failed, self.beat.step, self.beat.collective, self.beat.caller

    @property
    def verb(self) -> str:
        """The verb for the report, which states only what was seen."""
        if self.failed:
            return "failed"
        if self.ago is not None:
            return "was last seen"
        return "is" if self.beat.step is None and not self.beat.collective else "waits"

    def __str__(self) -> str:
        beat = self.beat
        waits = f" in {beat.collective}" if beat.collective else ""
        doing = f", {beat.doing}" if beat.doing else ""
        place = f" at {beat.caller}" if beat.caller else ""
        ago = f", {self.ago:.0f} s ago" if self.ago is not None else ""
        if beat.step is None:
            return (" after the end of its script" if beat.doing == AFTER else f"{waits}{place}")[1:] + ago
        return f"after step {beat.step}{doing}{waits}{place}{ago}"


SEVERAL = {"waits": "wait", "was last seen": "were last seen", "is": "are"}


def differences(states: Mapping[int, LastSeen]) -> str:
    """Names the ranks that are, or were last seen, at another location than most, and says where the others wait."""
    groups = _groups(states)
    if not groups:
        return ""
    main = groups[-1]
    others = "all ranks" if len(main) == len(states) > 1 else "the others" if len(main) > 1 and len(groups) > 1 else ""
    return "; ".join(_sentence(ranks, states, others if ranks is main else "") for ranks in groups)


def _sentence(ranks: list[int], states: Mapping[int, LastSeen], subject: str) -> str:
    first = states[ranks[0]]
    verb = SEVERAL.get(first.verb, first.verb) if len(ranks) > 1 else first.verb
    return f"{subject or _with_hosts(ranks, states)} {verb} {first}"


def stacks(states: Mapping[int, LastSeen]) -> str:
    """The stacks of all ranks, the unusual ones first; equal stacks once."""
    sections = []
    for ranks in _groups(states):
        for stack in dict.fromkeys(states[rank].stack for rank in ranks):
            same = [rank for rank in ranks if states[rank].stack == stack]
            first = states[same[0]]
            verb = {"waits": "", "is": "", "failed": "failed "}.get(first.verb, "last seen ")
            sections.append(f"--- {_with_hosts(same, states)}, {verb}{first}{first.record}\n{_last_frames(stack)}")
    return "\n".join(sections)


def _groups(states: Mapping[int, LastSeen]) -> list[list[int]]:
    """Groups ranks by location: failed ones first, then silent ones, and small groups before large ones."""
    places: dict[Any, list[int]] = {}
    for rank, state in sorted(states.items()):
        places.setdefault(state.where, []).append(rank)
    order = ("failed", "was last seen", "is", "waits")
    return sorted(places.values(), key=lambda ranks: (order.index(states[ranks[0]].verb), len(ranks), -ranks[0]))


def _with_hosts(ranks: list[int], states: Mapping[int, LastSeen]) -> str:
    hosts = list(dict.fromkeys(states[rank].beat.host for rank in ranks))
    host_list = ", ".join(hosts) if len(hosts) <= 2 else counted(len(hosts), "host")
    return f"{ranks_words(ranks)} of {host_list}"


def _last_frames(stack: str) -> str:
    frames = stack.rstrip().split(f"\n{EACH_FRAME}")
    if len(frames) <= SHOWN_FRAMES:
        return stack.rstrip()
    return "  ...\n" + EACH_FRAME + f"\n{EACH_FRAME}".join(frames[-SHOWN_FRAMES:])
