"""Learning rates over a run: which schedules a rehearsal takes for a mistake, and which it leaves alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import get_cosine_schedule_with_warmup, get_cosine_with_hard_restarts_schedule_with_warmup

from accel_fsdp.ranks import RankEvent, read
from accel_fsdp.ranks.steps import ObservedSteps
from accel_fsdp.rehearsal import schedules
from accel_fsdp.rehearsal.records import Records

STEPS = 8
"""Steps of the optimizer in each case."""


def warmed(optimizer: Any) -> Any:
    rising = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [rising, lr_scheduler.CosineAnnealingLR(optimizer, 6)], [2])


Makes = Callable[[Any], Any]
WRONG: dict[str, tuple[Makes, int]] = {
    "moved with each of four micro-batches": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10), 4),
    "of transformers, moved by two ranks": (lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 2, STEPS), 2),
    "of transformers, too short": (lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 1, 4), 1),
}
RIGHT: dict[str, tuple[Makes, int]] = {
    "a cosine": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS), 1),
    "a cosine for two ranks": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS), 2),
    "a last batch that is filled": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 13), 2),
    "a floor": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=5e-4), 1),
    "waves of torch's cosine": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 2), 1),
    "warm restarts": (lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3), 1),
    "hard restarts": (
        lambda optimizer: get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 1, STEPS, num_cycles=2),
        1,
    ),
    "warm-up and a cosine": (lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 2, STEPS), 1),
    "warm-up and a cosine of torch": (warmed, 1),
    "one cycle": (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1), 1),
    "a triangle": (
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-3, step_size_up=2, cycle_momentum=False),
        1,
    ),
    "a function": (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 3)), 1),
}


def mistakes_of(make: Makes, moves: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("ACCEL_FSDP_EVENTS", str(folder))
    for name in ("__init__", "step"):
        monkeypatch.setattr(lr_scheduler.LRScheduler, name, getattr(lr_scheduler.LRScheduler, name))
    observed = ObservedSteps()
    observed.schedules.install()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(STEPS):
        observed.before_step(optimizer)
        optimizer.step()
        for _ in range(moves):
            scheduler.step()
    observed.report_end([], (0, 0))
    return [mistake.what for mistake in schedules.find(Records(read(folder)))]


@pytest.mark.parametrize("name", WRONG)
def test_a_schedule_that_moves_too_often(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = mistakes_of(*WRONG[name], tmp_path, monkeypatch)[-1]
    assert mistake.startswith("the learning rate's schedule for ")


@pytest.mark.parametrize("name", RIGHT)
def test_a_schedule_may_rise(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not mistakes_of(*RIGHT[name], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("batches", "planned", "moves", "steps", "is_mistake"),
    [
        ([12, 6], 24, 12, 12, True),
        ([12, 6], 12, 12, 12, False),
        ([12, 6], 24, 24, 12, False),  # Accelerate moves it once for each rank
        ([12, 6], 24, 6, 6, True),  # two micro-batches in a step
        ([12, 6], 12, 6, 6, True),
        ([12, 6], 6, 6, 6, False),
        ([12, 6], 100, 12, 12, False),  # a run that is cut short on purpose
        ([3, 2], 9, 12, 6, False),  # three epochs, each filled up for both ranks
        ([4, 2], 12, 18, 6, True),
        ([4, 4], 12, 18, 6, True),  # rows that the ranks don't share
        ([1, 1], 3, 6, 3, False),  # epochs of one batch, which is filled up for the other rank
    ],
)
def test_a_schedule_for_the_batches_of_all_ranks(
    batches: list[int], planned: int, moves: int, steps: int, is_mistake: bool
) -> None:
    """Epochs of batches for two ranks together, and for each of them."""
    schedule = {"optimizers": [0], "made_at": "", "moved_at": "", "is_by_script": True, "may_rise": True}
    schedule |= {"planned": planned, "moves": moves}
    step = {"optimizer": 0, "groups": [{"lr": [0.1]}]}
    ended = {"batches": batches, "backwards": 12, "schedules": [schedule]}
    events = [RankEvent(rank, 0.0, "step", step) for rank in range(2) for _ in range(steps)]
    events += [RankEvent(rank, 1.0, "trained", ended) for rank in range(2)]
    assert bool(list(schedules.find(Records(events)))) is is_mistake
