"""Observes learning rates' schedulers: which optimizers they move, how often, and for how many moves they were made."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_fsdp.ranks import script
from accel_fsdp.ranks.observing import after

STEPS = "num_training_steps"


@dataclass
class _Scheduled:
    """An optimizer with a scheduler, the line that created it, and its last move.

    `planned`: the moves for which the scheduler that moved last was made, where that is known. `is_by_script`: the
    script moves it itself; Accelerate moves what it prepared once for each rank.
    """

    optimizer: Any
    made_at: str
    moved_at: str = ""
    moves: int = 0
    is_by_script: bool = False
    planned: int = 0
    may_rise: bool = True


def planned_moves(scheduler: Any) -> int:
    """The moves of transformers' schedules, and those in which torch's cosine falls once; 0 for others."""
    from torch.optim.lr_scheduler import CosineAnnealingLR

    return int(scheduler.T_max) if type(scheduler) is CosineAnnealingLR else int(_settings(scheduler).get(STEPS, 0))


def may_rise(scheduler: Any) -> bool:
    """Whether the rate may rise after the planned moves, as torch's cosine does by its formula."""
    return bool(_settings(scheduler).get("num_cycles", 1) != 0.5)


def _settings(scheduler: Any) -> dict[str, Any]:
    """The settings of transformers' own schedules; empty for others."""
    settings: dict[str, Any] = getattr(next(iter(getattr(scheduler, "lr_lambdas", ())), None), "keywords", {})
    return settings


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
            known.moves += 1
            known.moved_at = script.line_of_stack(sys._getframe(2))
            known.is_by_script |= script.is_calling(sys._getframe(1))
            known.planned, known.may_rise = planned_moves(scheduler), may_rise(scheduler)

    def _of(self, optimizer: Any) -> _Scheduled | None:
        """What is known of an optimizer, also if given a wrapper of it, such as Accelerate's."""
        matches = (known for known in self.scheduled if known.optimizer.param_groups is optimizer.param_groups)
        return next(matches, None)

    def moved_at(self, optimizer: Any) -> str:
        """The script's line that moved a scheduler of an optimizer last; empty if there is none."""
        known = self._of(optimizer)
        return known.moved_at if known else ""

    def content(self, numbers: Mapping[int, int]) -> list[dict[str, Any]]:
        """All schedules at the end of the script; `numbers` are those of optimizers, by the id of their groups."""
        return [
            {
                "optimizer": numbers.get(id(known.optimizer.param_groups)),
                "made_at": known.made_at,
                "moved_at": known.moved_at,
                "moves": known.moves,
                "is_by_script": known.is_by_script,
                "planned": known.planned,
                "may_rise": known.may_rise,
            }
            for known in self.scheduled
        ]
