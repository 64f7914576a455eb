"""The step of a rehearsal with any script of the user: run, measure and watch it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from accel_fsdp.config import JobConfig
from accel_fsdp.ranks import RankEvent
from accel_fsdp.rehearsal import mistakes, repeated, saved, verdict
from accel_fsdp.rehearsal.blame import SCRIPT, Failure, judge, of_no_training, of_outcome
from accel_fsdp.rehearsal.job import Rehearsed
from accel_fsdp.rehearsal.report import Proof

LAST_LINES, LINE_LETTERS = 5, 160


@dataclass(frozen=True)
class OwnRehearsal:
    """`changes` gets what the ranks made small, unless the script keeps its sizes."""

    launcher: Rehearsed
    job: JobConfig
    words: tuple[str, ...]
    experts: int = 1
    is_small: bool = True
    changes: list[str] = field(default_factory=list)

    def run(self) -> Proof:
        """Runs the unchanged script on several ranks to its end; then compares the ranks' shards with the YAML."""
        outcome = self.launcher.launch("script", self.job, self.words, is_small=self.is_small)
        self.changes.extend(with_lines([event for event in outcome.events if event.rank == 0], "made-small"))
        if outcome.holdings:
            classes = tuple(verdict.repeated(next(iter(outcome.holdings.values()))))
            judge(self.job, classes, outcome, self.experts)
        for mistake in mistakes.find(outcome.events):  # first, as it may have caused the failure
            raise mistake
        if outcome.hang or outcome.code:
            failure = of_outcome(outcome)
            if outcome.of("stepped"):
                failure.what += f"; until then it trained: {verdict.summary(outcome.holdings)}"
            raise failure
        unwatched = [event.content for event in outcome.of("unwatched") if event.rank == 0]
        if not outcome.holdings:
            if not unwatched:
                raise of_no_training(outcome)
            what = f"the ranks' weights can't be measured: {unwatched[0]['why']}"
            raise Failure(what, SCRIPT, "the versions that README names as tested")
        for failure in saved.failures(outcome.events, outcome.holdings, self.job):
            raise failure
        note = "".join(f"; not watched: {event['what']} ({event['why']})" for event in unwatched)
        repeated_steps = repeated.summary(outcome.events)
        gpu_calls = ", ".join(with_lines(outcome.events, "taken-for-cpu"))
        of_gpus = f"; taken for the CPU: {gpu_calls}" if gpu_calls else ""
        return Proof(verdict.summary(outcome.holdings) + repeated_steps + note + of_gpus, last_lines(outcome.printed))


def with_lines(events: Sequence[RankEvent], kind: str) -> list[str]:
    """What the ranks made small, or took for the CPU, each with the script's first line that asked for it."""
    lines: dict[str, str] = {}
    for event in (event for event in events if event.kind == kind):
        lines.setdefault(event.content["what"], os.path.basename(event.content["line"]))
    return [f"{what} ({line})" if line else what for what, line in lines.items()]


def last_lines(printed: str) -> str:
    """The last lines that the script printed, such as its losses; of a progress bar, the last state."""
    lines = [line.strip().rpartition("\r")[2] for line in printed.split("\n")]
    return "\n".join(line[:LINE_LETTERS] for line in [line for line in lines if line][-LAST_LINES:])
