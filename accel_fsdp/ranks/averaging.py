"""Finds models outside of DDP and FSDP whose gradients or weights the script averages over ranks itself. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_fsdp.config import Engine
from accel_fsdp.ranks.events import RankEvent

GRADIENTS = "the script averages gradients itself"
WEIGHTS = "the script averages the ranks' weights itself, at intervals"


def is_alone(event: RankEvent) -> bool:
    """Whether a measured model is in no wrapper that averages its gradients."""
    return bool(event.content["holding"]["engine"] == Engine.NONE.label)


def by_script(events: Sequence[RankEvent]) -> dict[str, str]:
    """The classes of these models, and what the script averages.

    Their first step has the same gradients on all ranks, or their weights part and become equal again. A model that
    trains alone has equal gradients too where all ranks take the same rows, unlike beside a wrapped model.
    """
    stepped = [event for event in events if event.kind == "stepped"]
    by_class: dict[str, list[int]] = {}
    for event in filter(is_alone, stepped):
        by_class.setdefault(event.content["holding"]["model"], []).append(event.content.get("gradients", 0))
    ranks = {event.rank for event in stepped}
    if not by_class or len(ranks) < 2:
        return {}
    if averages_weights(events):
        return dict.fromkeys(by_class, WEIGHTS)
    if all(map(is_alone, stepped)) and not _takes_different_rows(events):
        return {}
    equal = (name for name, found in by_class.items() if len(found) == len(ranks) and {*found} == {found[0]} != {0})
    return dict.fromkeys(equal, GRADIENTS)


def _takes_different_rows(events: Sequence[RankEvent]) -> bool:
    rows = [event.content["hashes"] for event in events if event.kind == "rows"]
    return any(hashes != rows[0] for hashes in rows)


def averages_weights(events: Sequence[RankEvent]) -> bool:
    """Whether copies that parted become equal after a step, with values that no rank had before.

    Otherwise all take the weights of one rank, or of a file that it wrote.
    """
    settings = [event.content for event in events if event.kind == "settings" and "before" in event.content]
    had = {content["before"] if content["since"] is None else content["since"] for content in settings}
    had |= {_sum(event.content["last"]) for event in events if event.kind == "copies"}
    return any(_becomes_equal(reports) and reports[0][1] not in had for reports in _after_steps(events))


def _becomes_equal(reports: Sequence[tuple[float, float]]) -> bool:
    """Whether the sums of all ranks' weights differ after a step, and are equal later."""
    (last, now), *others = reports
    return all(_near(now, total) for _, total in others) and not all(_near(last, total) for total, _ in others)


def _after_steps(events: Sequence[RankEvent]) -> Iterator[list[tuple[float, float]]]:
    """For each step the sum of each rank's weights after it, and before the next one or at the end."""
    ranks = {event.rank for event in events if event.kind == "began"}
    moments: dict[Any, dict[int, tuple[float, float]]] = {}
    for event in events:
        content = event.content
        if event.kind == "settings" and content.get("since") is not None:
            moments.setdefault(content["step"], {})[event.rank] = content["since"], content["before"]
        elif event.kind == "copies" and content["last"]:
            moments.setdefault(("end", content["number"]), {})[event.rank] = _sum(content["last"]), _sum(content["end"])
    yield from (list(reports.values()) for reports in moments.values() if len(ranks) > 1 and reports.keys() == ranks)


def _sum(weights: Mapping[str, Sequence[float]]) -> float:
    return sum(total for total, _ in weights.values())


def _near(total: float, other: float) -> bool:
    return math.isclose(total, other, rel_tol=1e-9)
