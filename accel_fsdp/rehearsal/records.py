"""What the ranks of a launch reported, as the judges read it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from accel_fsdp.config import Engine
from accel_fsdp.ranks import Holding, RankEvent, holdings

Content = Mapping[str, Any]


class Records:
    """`steps` are the records of each rank's steps, `ends` those of its end."""

    def __init__(self, events: Sequence[RankEvent]) -> None:
        self.events = events
        self.began = {event.rank for event in self.of("began")}
        self.ends: dict[int, Content] = {event.rank: event.content for event in self.of("trained")}
        self.steps: dict[int, list[Content]] = {}
        for event in self.of("step"):
            self.steps.setdefault(event.rank, []).append(event.content)

    @cached_property
    def holdings(self) -> dict[int, Holding]:
        return holdings(self.events)

    def of(self, kind: str) -> Iterator[RankEvent]:
        return (event for event in self.events if event.kind == kind)

    def first(self, kind: str) -> Content | None:
        return next((event.content for event in self.of(kind)), None)

    def engine_is(self, engine: Engine) -> bool:
        return any(holding.engine.startswith(engine.label) for holding in self.holdings.values())

    @property
    def all_ended(self) -> bool:
        return bool(self.ends) and self.began == self.ends.keys()

    @property
    def combines(self) -> bool:
        """Whether the script itself combines the ranks' tensors, as where it averages gradients or weights."""
        return self.first("combines") is not None

    def common_steps(self) -> dict[int, list[Content]]:
        """The steps that all ranks must take alike, as they update shards or copies of a model."""
        return {rank: [step for step in steps if step["is_common"]] for rank, steps in self.steps.items()}
