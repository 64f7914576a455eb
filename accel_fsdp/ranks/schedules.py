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
    """An optimizer with a scheduler, the line that created it, and that of the last move.

    `is_by_script`: the script moves it itself; Accelerate moves what it prepared once for each rank. `latest` is the
    scheduler that moved last, one of several in a row, and `latest_moves` its own moves.
    """

    optimizer: Any
    made_at: str
    moved_at: str = ""
    moves: int = 0
    is_by_script: bool = False
    latest: Any = None
    latest_moves: int = 0


def planned_moves(scheduler: Any) -> int:
    """The moves for which a schedule of transformers was made, or torch's cosine, which then falls once; else 0."""
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
            known.latest_moves = 1 + (known.latest_moves if known.latest is scheduler else 0)
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
            {
                "optimizers": [number for groups, number in pairs if groups is known.optimizer.param_groups],
                "made_at": known.made_at,
                "moved_at": known.moved_at,
                "moves": known.moves,
                "is_by_script": known.is_by_script,
                "latest_moves": known.latest_moves,
                "planned": planned_moves(known.latest),
                "may_rise": may_rise(known.latest),
            }
            for known in self.scheduled
        ]
