"""Counts what is alive on one rank, by kind, and remembers the highest point of each phase. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from accel_fsdp.prediction.memory.shards import Unit

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered units", "gradients", "optimizer state"
ACTIVATIONS, LOSS, BUFFERS, WORKSPACE = "activations", "logits and loss", "buffers", "workspace"
KINDS = (PARAMETERS, OPTIMIZER, GRADIENTS, GATHERED, ACTIVATIONS, LOSS, BUFFERS, WORKSPACE)
LETTERS: Mapping[str, str] = dict(zip(KINDS, "POGUALBW", strict=True))
"""What figures write where there is no room for the kind."""


COMPUTE, CAST, GATHER, REDUCE = range(4)
"""The streams of a rank: the allocator keeps memory for each apart."""


@dataclass(frozen=True)
class Moment:
    """The highest point of one phase of the step: bytes by kind."""

    phase: str
    live: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.live.values())


@dataclass
class Meter:
    """What is alive, and the highest point of each phase so far. `total` is the sum of `live`.

    `sees_each` layer: to know the highest point it is enough to see the first and the last of many that are equal.
    """

    sees_each: ClassVar[bool] = False
    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    moments: list[Moment] = field(default_factory=list)
    phase: str = ""
    total: int = 0
    _highest: int = -1

    def enter(self, phase: str) -> None:
        """Begins a phase; its highest point so far is where it begins."""
        self.phase, self._highest = phase, -1
        self.add(PARAMETERS, 0)

    def add(
        self,
        kind: str,
        size: int,
        name: object = None,
        of: "Unit | None" = None,
        stream: int = COMPUTE,
        used_on: int = COMPUTE,
    ) -> None:
        """Allocates, or frees where `size` is negative. Only an allocator cares for the rest.

        `name` is what frees it; `of` is the unit whose tensors it is made of, None where it is one tensor. `stream` is
        the one that it is allocated on, `used_on` another one that may still use it when it is freed.
        """
        self.live[kind] += size
        self.total += size
        self._look()

    def add_each(self, kind: str, sizes: "Iterable[tuple[int, Unit]]", name: object = None) -> None:
        """Allocates what each unit has of a kind."""
        self.add(kind, sum(size for size, _ in sizes), name)

    def change(self, sizes: Mapping[str, int]) -> None:
        """Allocates and frees by kind, with nothing to see in between."""
        for kind, size in sizes.items():
            self.live[kind] += size
            self.total += size
        self._look()

    def repeat(self, before: Mapping[str, int], times: int) -> None:
        """What has happened since `before` happens so many more times, with no higher point than what follows."""
        for kind, size in before.items():
            more = (self.live[kind] - size) * times
            self.live[kind] += more
            self.total += more

    def touch(self, rises: Mapping[str, int]) -> None:
        """A peak that is gone again before anything else happens: `rises` by kind above what is alive."""
        self.change(rises)
        for kind, size in rises.items():
            self.live[kind] -= size
            self.total -= size

    def mark(self) -> None:
        """A unit is done. Only a `Trace` cares."""

    def throttle(self) -> None:
        """The CPU waits here for what the GPU does two units behind. Only an allocator cares."""

    def _look(self) -> None:
        if self.total > self._highest:
            if self._highest >= 0:
                self.moments.pop()
            self.moments.append(Moment(self.phase, dict(self.live)))
            self._highest = self.total


@dataclass
class Trace(Meter):
    """Keeps of each unit its highest point and what it leaves behind, and of each kind the most there ever was."""

    sees_each = True
    samples: list[Moment] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    _top: Moment | None = None

    def enter(self, phase: str) -> None:
        """As without, and what is left of the phase before is a unit."""
        self.mark()
        super().enter(phase)

    def mark(self) -> None:
        """Keeps the unit that is done."""
        if self._top:
            self.samples += [self._top, Moment(self.phase, dict(self.live))]
        self._top = None

    def _look(self) -> None:
        super()._look()
        now = Moment(self.phase, dict(self.live))
        self.most = {kind: max(size, self.most[kind]) for kind, size in now.live.items()}
        if self._top is None or now.total > self._top.total:
            self._top = now
