"""Whether a job hangs, judged by its ranks' signs of life, and what a person is told of it.

The rule is this. A job ends when no rank has finished a step for the time that `Patience` allows, and one of them
waited at the same instruction for half of that: where all do something, such as skipping rows, nothing hangs. It ends
earlier when a rank gave no sign of life for `Patience.silence` while all the others waited for half of that.
A rank whose process computes, as others on its host see it, isn't silent: C code may hold Python's lock for long.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_fsdp.launch.beats import COMPUTES, DEBUGGED, GONE, STOPPED, Beat
from accel_fsdp.units import counted

SILENCE_SECONDS = 40.0
VANISHED_TOGETHER = 2 / 3
"""How much of the longest silence another rank's has to last to be part of it."""
LEAST_SECONDS = 600.0
SLOWEST_STEPS = 20
"""How many of the slowest of so many last steps the next one may take."""
LONGER = 3
"""How many times as long may take what is no step."""
AFTER = "what comes after training"
"""What ranks do from its end on; one of them may end while others go on."""
SHOWN_FRAMES = 12
SHOWN_RANKS = 4
EACH_FRAME = "  File "


@dataclass
class Patience:
    """How long ranks may take; `given` is the flag's number of seconds for a step, None for one that fits the run.

    `collectives`: the job's own limit for them, in which ranks wait for one that saves.
    """

    given: float | None = None
    collectives: float = 0.0
    longest_silence: float = SILENCE_SECONDS
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=SLOWEST_STEPS))

    def seconds(self, doing: str) -> float:
        """Without a finished step: in a step, or in what else the ranks are `doing`."""
        of_step = self.given or max(LEAST_SECONDS, SLOWEST_STEPS * max(self.steps, default=0.0))
        if not doing:
            return of_step
        return of_step * LONGER if self.given else max(of_step * LONGER, self.collectives)

    @property
    def silence(self) -> float:
        return min(self.longest_silence, self.given or self.longest_silence)


@dataclass(frozen=True)
class Seen:
    """A rank as another one sees it; `silent` counts the seconds since its last sign."""

    beat: Beat
    silent: float


Answers = Callable[[Beat], bool | None]
"""Whether the machine of a rank answers a connection, as just tried; None where that isn't known."""


def verdict(seen: Mapping[int, Seen], patience: Patience, answers: Answers = lambda beat: None) -> str:
    """Why the job has to end; empty where it goes on."""
    if gone := silent_ranks(seen, patience.silence):
        others = [one.beat for rank, one in seen.items() if rank not in gone]
        if others and all(min(one.still, one.idle) >= patience.silence / 2 for one in others):
            return said_of_silent(gone, seen, answers)
    idle = min((one.beat.idle + one.silent for one in seen.values()), default=0.0)
    doing = next((one.beat.doing for one in seen.values() if one.beat.doing), "")
    allowed = patience.seconds(doing)
    if idle < allowed or all(min(one.beat.still, one.beat.idle) < allowed / 2 for one in seen.values()):
        return ""
    during = f" during {doing}" if doing else ""
    quiet = silent_ranks(seen, patience.silence / 2)
    silent = f"; {said_of_silent(quiet, seen, answers)}" if quiet else ""
    return f"no rank has finished a step for {idle:.0f} s{during}{silent}"


def verdict_without_steps(seen: Mapping[int, Seen], patience: Patience, answers: Answers = lambda beat: None) -> str:
    """The same for a script of which nothing is known: all ranks do nothing, and some wait in a collective.

    How long they may is what the collective itself allows, where nothing is given: no job ends that would have gone on.
    """
    gone = silent_ranks(seen, patience.silence)
    living = {rank: one.beat for rank, one in seen.items() if rank not in gone}
    waiting = [beat for beat in living.values() if beat.collective]
    if not waiting:
        return ""
    if gone and all(beat.standing >= patience.silence / 2 for beat in living.values() if beat.doing != AFTER):
        return said_of_silent(gone, seen, answers)
    allowed = patience.given or min(beat.allowed for beat in waiting)
    ended = [rank for rank, beat in living.items() if beat.doing == AFTER]
    seconds = min(one.silent if rank in ended else one.beat.standing for rank, one in seen.items())
    if seconds < allowed:
        return ""
    odd = [beat for rank, beat in living.items() if not beat.collective and rank not in ended]
    said = [f"{beat} has done nothing for {beat.standing:.0f} s" for beat in odd]
    said += [f"{living[rank]} has ended its script" for rank in ended]
    named = ", ".join(said[:SHOWN_RANKS]) + (f" and {len(said) - SHOWN_RANKS} more" if said[SHOWN_RANKS:] else "")
    waits = f"{counted(len(waiting), 'rank')} of {len(seen)} {'waits' if len(waiting) == 1 else 'wait'} in a collective"
    return f"{named}; {waits}" if said else f"all ranks have waited in collectives for {seconds:.0f} s"


def silent_ranks(seen: Mapping[int, Seen], seconds: float) -> list[int]:
    """Those without a sign for so long, and without a neighbour that sees them compute.

    Ranks of one host give their signs at different moments, so one that vanishes with others may be missed less long.
    """
    longest = max((one.silent for one in seen.values()), default=0.0)
    watched = {rank: one for rank, one in seen.items() if one.beat.doing != AFTER}
    silent = [rank for rank, one in watched.items() if longest >= seconds and one.silent >= seconds * VANISHED_TOGETHER]
    return [rank for rank in silent if _seen_by_mates(rank, seen, seconds) not in (COMPUTES, DEBUGGED)]


def _seen_by_mates(rank: int, seen: Mapping[int, Seen], seconds: float) -> str:
    """What the others on its host, who still give signs, see of its process."""
    looks = (one.beat.mates.get(str(rank), "") for one in seen.values() if one.silent < seconds)
    return next(filter(None, looks), "")


def said_of_silent(gone: Collection[int], seen: Mapping[int, Seen], answers: Answers = lambda beat: None) -> str:
    """The hosts that have vanished as a whole, else the ranks; and what is known of their processes."""
    hosts = {seen[rank].beat.machine: seen[rank].beat.host for rank in gone}
    parts = []
    for machine, host in hosts.items():
        ranks = [rank for rank, one in seen.items() if one.beat.machine == machine]
        quiet = [rank for rank in ranks if rank in gone]
        seconds = max(seen[rank].silent for rank in quiet)
        if quiet == ranks and len({one.beat.machine for one in seen.values()}) > 1:
            said = said_of_machine(answers(seen[ranks[0]].beat))
            parts.append(f"no sign of {host} ({ranks_words(ranks)}) for {seconds:.0f} s{said}")
        else:
            parts += [said_of_process(seen[rank], _seen_by_mates(rank, seen, seconds)) for rank in quiet]
    return "; ".join(parts)


def said_of_machine(answers: bool | None) -> str:
    """The end of a sentence about a machine whose ranks are all silent."""
    if answers is None:
        return ""
    if answers:
        return "; the machine itself answers: its processes have ended, or were stopped"
    return "; the machine doesn't answer either: switched off or unreachable"


def said_of_process(one: Seen, state: str) -> str:
    """One line about a rank that is silent."""
    beat = one.beat
    if state == STOPPED:
        return f"{beat} has been stopped by a signal for {one.silent:.0f} s; kill -CONT {beat.pid} lets it go on"
    if state == GONE:
        return f"{beat} is gone: killed, or ended by itself"
    return f"no sign of {beat} for {one.silent:.0f} s"


def ranks_words(ranks: Iterable[int]) -> str:
    """`rank 2`, or `ranks 2, 3, 5`."""
    named = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(named) > 1 else ''} {', '.join(named)}"


# What is told of all ranks


@dataclass(frozen=True)
class Told:
    """The last of a rank: its step, what it waits in and where, its stack, and torch's record of its collectives.

    `ago`: the seconds since its last sign, for one that hasn't told where it is now. `failed`: it raised there.
    """

    beat: Beat
    stack: str
    record: str = ""
    ago: float | None = None
    failed: bool = False

    @property
    def where(self) -> tuple[Any, ...]:
        """Ranks with the same one wait for the same, as far as Python sees."""
        return self.ago is None, not self.failed, self.beat.step, self.beat.collective, self.beat.caller

    @property
    def verb(self) -> str:
        """What it does there, as far as this was seen."""
        if self.failed:
            return "failed"
        if self.ago is not None:
            return "was last seen"
        return "is" if self.beat.step is None and not self.beat.collective else "waits"

    def __str__(self) -> str:
        beat = self.beat
        waits = f" in {beat.collective}" if beat.collective else ""
        doing = f", {beat.doing}" if beat.doing else ""
        at = f" at {beat.caller}" if beat.caller else ""
        ago = f", {self.ago:.0f} s ago" if self.ago is not None else ""
        if beat.step is None:
            return (" after the end of its script" if beat.doing == AFTER else f"{waits}{at}")[1:] + ago
        return f"after step {beat.step}{doing}{waits}{at}{ago}"


SEVERAL = {"waits": "wait", "was last seen": "were last seen", "is": "are"}


def differences(told: Mapping[int, Told]) -> str:
    """Which ranks are elsewhere than most, or were when they were last seen, and where the others wait."""
    groups = _groups(told)
    if not groups:
        return ""
    most = groups[-1]
    others = "all ranks" if len(most) == len(told) > 1 else "the others" if len(most) > 1 and len(groups) > 1 else ""
    return "; ".join(_sentence(ranks, told, others if ranks is most else "") for ranks in groups)


def _sentence(ranks: list[int], told: Mapping[int, Told], named: str) -> str:
    verb = told[ranks[0]].verb
    return f"{named or _named(ranks, told)} {SEVERAL.get(verb, verb) if len(ranks) > 1 else verb} {told[ranks[0]]}"


def stacks(told: Mapping[int, Told]) -> str:
    """Those of all ranks, the odd ones first; equal ones once."""
    found = []
    for ranks in _groups(told):
        for stack in dict.fromkeys(told[rank].stack for rank in ranks):
            same = [rank for rank in ranks if told[rank].stack == stack]
            verb = {"waits": "", "is": "", "failed": "failed "}.get(told[same[0]].verb, "last seen ")
            found.append(f"--- {_named(same, told)}, {verb}{told[same[0]]}{told[same[0]].record}\n{_end_of(stack)}")
    return "\n".join(found)


def _groups(told: Mapping[int, Told]) -> list[list[int]]:
    """Ranks at one place, the smallest group first; before all those that failed, and those that were last seen."""
    places: dict[Any, list[int]] = {}
    for rank, one in sorted(told.items()):
        places.setdefault(one.where, []).append(rank)
    odd = ("failed", "was last seen", "is", "waits")
    return sorted(places.values(), key=lambda ranks: (odd.index(told[ranks[0]].verb), len(ranks), -ranks[0]))


def _named(ranks: list[int], told: Mapping[int, Told]) -> str:
    hosts = list(dict.fromkeys(told[rank].beat.host for rank in ranks))
    shown = ", ".join(hosts) if len(hosts) <= 2 else counted(len(hosts), "host")
    return f"{ranks_words(ranks)} of {shown}"


def _end_of(stack: str) -> str:
    frames = stack.rstrip().split(f"\n{EACH_FRAME}")
    if len(frames) <= SHOWN_FRAMES:
        return stack.rstrip()
    return "  ...\n" + EACH_FRAME + f"\n{EACH_FRAME}".join(frames[-SHOWN_FRAMES:])
