"""Observes learning rates over the whole run, and which optimizers the schedulers move."""

import sys
from dataclasses import dataclass
from typing import Any

from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, script
from accel_fsdp.ranks.observing import Observation, after

SCHEDULES = Observation(
    "learning rates and their schedules",
    Internal("torch.optim.lr_scheduler:LRScheduler.__init__", "self optimizer *"),
    Internal("torch.optim.lr_scheduler:LRScheduler.step", "self *"),
    Internal("torch.optim.lr_scheduler:ReduceLROnPlateau.__init__", "self optimizer *"),
    Internal("torch.optim.lr_scheduler:ReduceLROnPlateau.step", "self metrics *"),
)
RELIES_ON = SCHEDULES.relies_on


@dataclass
class _Scheduled:
    """An optimizer with a scheduler, the line that created it, and the line that moves it more often than steps.

    `last_moved_at` is the line of the last move, `planned` the number of moves for which a scheduler was made that the
    script moves itself; Accelerate moves what it prepared once for each rank.
    `cosine` is the latest scheduler with a length, `most` the highest rate of a step and `least` the lowest one after
    it; `risen` is how far the rate rose again after the cosine's length, as a share of the way from `least` to `most`.
    """

    optimizer: Any
    made_at: str
    moved_at: str = ""
    last_moved_at: str = ""
    moves: int = 0
    planned: int = 0
    steps: int = 0
    cosine: Any = None
    cosine_moves: int = 0
    most: float = 0.0
    least: float = 0.0
    risen: float = 0.0

    def step(self, rate: float) -> None:
        self.steps += 1
        if rate > self.most * 1.001:
            self.most = self.least = rate
        self.least = min(self.least, rate)
        if self.cosine_moves > length(self.cosine):
            self.risen = max(self.risen, (rate - self.least) / (self.most - self.least or 1.0))

    @property
    def waves(self) -> bool:
        """Whether the rate may rise on purpose: under torch's cosine, if the optimizer takes more steps than it."""
        return hasattr(self.cosine, "T_max") and self.steps > length(self.cosine)


def length(scheduler: Any) -> int:
    """The number of moves in which a cosine falls once; 0 for other schedules, and for one of several waves."""
    from torch.optim.lr_scheduler import CosineAnnealingLR

    if type(scheduler) is CosineAnnealingLR:
        return int(scheduler.T_max)
    settings = _settings(scheduler)
    return int(settings.get("num_training_steps", 0)) if settings.get("num_cycles") == 0.5 else 0


def _settings(scheduler: Any) -> dict[str, Any]:
    """The settings of transformers' own schedules; empty for others."""
    settings: dict[str, Any] = getattr(next(iter(getattr(scheduler, "lr_lambdas", ())), None), "keywords", {})
    return settings


class ObservedSchedules:
    """Counts the steps with a rate of 0 since the last one with another rate, and the moves of each scheduler."""

    def __init__(self) -> None:
        self.scheduled: list[_Scheduled] = []
        self.trained = self.idle = 0

    def install(self) -> None:
        if SCHEDULES.is_possible:
            from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

            for kind in (LRScheduler, ReduceLROnPlateau):  # which has methods of its own
                after(kind, "__init__", self._on_created)
                after(kind, "step", self._on_moved)

    def _on_created(self, scheduler: Any, *_: Any, **__: Any) -> None:
        if self._counts_of(scheduler.optimizer) is None:
            self.scheduled.append(_Scheduled(scheduler.optimizer, script.line_of_stack(sys._getframe(2))))

    def line_of_move(self, optimizer: Any) -> str:
        """The script's line that moved a scheduler of an optimizer last; empty if there is none."""
        known = self._counts_of(optimizer)
        return known.last_moved_at if known else ""

    def _on_moved(self, scheduler: Any, *_: Any, **__: Any) -> None:
        if known := self._counts_of(scheduler.optimizer):  # None in `__init__`, which moves it once
            known.moves += 1
            known.last_moved_at = script.line_of_stack(sys._getframe(2))
            if length(scheduler):
                known.cosine_moves = 1 + (known.cosine_moves if known.cosine is scheduler else 0)
                known.cosine = scheduler
            if script.is_calling(sys._getframe(2)):
                known.planned = int(_settings(scheduler).get("num_training_steps", 0)) or length(scheduler)
                if known.moves > known.steps:
                    known.moved_at = known.last_moved_at

    def _counts_of(self, optimizer: Any) -> _Scheduled | None:
        """The counts of an optimizer, also if given a wrapper of it, such as Accelerate's."""
        matches = (known for known in self.scheduled if known.optimizer.param_groups is optimizer.param_groups)
        return next(matches, None)

    def before_step(self, optimizer: Any) -> None:
        """Called before each step of an optimizer."""
        if known := self._counts_of(optimizer):
            known.step(float(optimizer.param_groups[0].get("lr", 1.0)))
        is_idle = all(not float(group.get("lr", 1.0)) for group in optimizer.param_groups)
        self.idle = self.idle + 1 if is_idle else 0
        self.trained += not is_idle

    def report_end(self, batches: tuple[int, int]) -> None:
        """Called at the end of the script with an epoch's `batches`: of all ranks, and of this one."""
        astray = [known.made_at for known in self.scheduled if known.moves > 1 and not known.steps]
        empty = _Scheduled(None, "")
        first = max(self.scheduled, key=lambda known: known.steps, default=empty)
        steps = {"trained": self.trained, "idle": self.idle, "moves": first.moves}
        rising = (known for known in self.scheduled if not known.waves)
        risen = max(rising, key=lambda known: known.risen, default=empty)
        events.report(
            "schedules",
            **steps,
            line=first.moved_at or first.made_at,
            astray=astray if self.trained + self.idle else [],
            risen={"share": risen.risen, "moves": risen.cosine_moves, "length": length(risen.cosine)},
            risen_at=risen.moved_at or risen.made_at,
            planned=first.planned,
            made_at=first.made_at,
            batches=batches,
        )
