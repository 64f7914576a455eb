"""The steps of a rehearsal with a script of the user's own, which nothing here knows: run it, measure it, watch it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accel_fsdp.rehearsal import mistakes, saved, verdict
from accel_fsdp.rehearsal.blame import Failure, of_outcome
from accel_fsdp.rehearsal.job import Outcome, Rehearsed
from accel_fsdp.rehearsal.scaled import ScaledJob
from accel_fsdp.rehearsal.steps import summary


@dataclass(frozen=True)
class OwnRehearsal:
    """What its step goes by."""

    launcher: Rehearsed
    scaled: ScaledJob
    words: tuple[str, ...]

    def steps(self) -> Iterator[tuple[str, Any]]:
        """The one step: the script, unchanged, on several ranks."""
        yield f"run {self.launcher.script.name}", self.run

    def run(self) -> str:
        """To its end; then what the ranks held is compared with what the YAML asks for."""
        outcome = self.launcher.launch("script", self.scaled, self.words)
        self._judge(outcome)
        for mistake in mistakes.found(outcome.events):  # which may be what it failed of
            raise mistake
        if outcome.hang or outcome.code:
            raise of_outcome(outcome, self.launcher.script)
        if not outcome.holdings:
            raise Failure("the script trained no model", key=mistakes.SCRIPT, output=outcome.tail)
        for bad in saved.bad(self.scaled.job, outcome.events, outcome.holdings[0].weights):
            raise Failure(bad.what, bad.key, bad.fix, bad.line)
        losses = [event.content["value"] for event in outcome.events if event.kind == "loss"]
        if not all(math.isfinite(one) for one in losses):
            raise Failure("a loss is NaN or infinite", key=mistakes.SCRIPT, output=outcome.tail)
        return summary(outcome)

    def _judge(self, outcome: Outcome) -> None:
        if outcome.holdings:
            classes = tuple(verdict.repeated(next(iter(outcome.holdings.values()))))
            for wrong in verdict.differences(verdict.of_job(self.scaled, classes), outcome.holdings):
                raise Failure(wrong.what, key=wrong.key, fix="see what accel-fsdp check says of it")
