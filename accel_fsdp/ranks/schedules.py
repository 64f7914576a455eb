"""Observes learning rates' schedulers: which optimizers they move, how often, and for how many moves they were made."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_fsdp.ranks import script
from accel_fsdp.ranks.observing import after


@dataclass
class _Scheduled:
    """An optimizer with a scheduler, the line that created it, and that of the last move.

    `is_by_script`: the script moves it itself; Accelerate moves what it prepared once for each rank. `latest` is the
    scheduler that moved last, one of several in a row, and `moves` are its own.
    """

    optimizer: Any
    made_at: str
    moved_at: str = ""
    moves: int = 0
    is_by_script: bool = False
    latest: Any = None

    def content(self) -> dict[str, Any]:
        """`planned`: the moves for which a schedule of transformers was made, or torch's cosine; 0 for others.

        `may_rise`: whether the rate may rise after them, as torch's cosine does by its formula.
        """
        from torch.optim.lr_scheduler import CosineAnnealingLR

        # only those of transformers have keywords
        own = getattr(next(iter(getattr(self.latest, "lr_lambdas", ())), None), "keywords", {})
        is_cosine = type(self.latest) is CosineAnnealingLR
        planned = self.latest.T_max if is_cosine else own.get("num_training_steps", 0)
        values = {name: value for name, value in vars(self).items() if name not in ("optimizer", "latest")}
        return {**values, "planned": int(planned), "may_rise": own.get("num_cycles", 1) != 0.5}


class ObservedSchedules:
    def __init__(self) -> None:
        self.scheduled: list[_Scheduled] = []

    def install(self) -> None:
        from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

        for kind in (LRScheduler, ReduceLROnPlateau):  # which has methods of its own
            after(kind, "__init__", self._on_created)
            after(kind, "step", self._on_moved)

    def _on_created(self, scheduler: Any, *_: Any, **__: Any) -> None:
        if self._of(scheduler.optimizer) is None:
            self.scheduled.append(_Scheduled(scheduler.optimizer, script.line_of_stack(sys._getframe(2))))

    def _on_moved(self, scheduler: Any, *_: Any, **__: Any) -> None:
        if known := self._of(scheduler.optimizer):  # None in `__init__`, which moves it once
            known.moved_at = script.line_of_stack(sys._getframe(2))
            known.is_by_script |= script.is_calling(sys._getframe(1))
            known.moves = 1 + (known.moves if known.latest is scheduler else 0)
            known.latest = scheduler

    def _of(self, optimizer: Any) -> _Scheduled | None:
        """What is known of an optimizer, also if given a wrapper of it, such as Accelerate's."""
        matches = (known for known in self.scheduled if known.optimizer.param_groups is optimizer.param_groups)
        return next(matches, None)

    def moved_at(self, optimizer: Any) -> str:
        """The script's line that moved a scheduler of an optimizer last; empty if there is none."""
        known = self._of(optimizer)
        return known.moved_at if known else ""

    def content(self, optimizers: Mapping[Any, Any]) -> list[dict[str, Any]]:
        """All schedules at the end of the script, with the numbers of their optimizers: one may wrap another."""
        pairs = [(optimizer.param_groups, of_steps.number) for optimizer, of_steps in optimizers.items()]
        return [
            {"optimizers": [number for groups, number in pairs if groups is known.optimizer.param_groups]}
            | known.content()
            for known in self.scheduled
        ]
