"""Counts live bytes on one rank, by kind, and records the peak of each phase. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered units", "gradients", "optimizer state"
ACTIVATIONS, LOSS, BUFFERS, WORKSPACE = "activations", "logits and loss", "buffers", "workspace"
KINDS = (PARAMETERS, OPTIMIZER, GRADIENTS, GATHERED, ACTIVATIONS, LOSS, BUFFERS, WORKSPACE)
LETTERS: Mapping[str, str] = dict(zip(KINDS, "POGUALBW", strict=True))
"""Abbreviations of the kinds in figures."""


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
    """Live bytes, and the peak of each phase so far. `total` is the sum of `live`."""

    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    moments: list[Moment] = field(default_factory=list)
    phase: str = ""
    total: int = 0
    _highest: int = -1

    def enter(self, phase: str) -> None:
        """Begins a phase; its peak starts at the current bytes."""
        self.phase, self._highest = phase, -1
        self.add(PARAMETERS, 0)

    def add(self, kind: str, size: int) -> None:
        """Allocates, or frees if `size` is negative."""
        self.live[kind] += size
        self.total += size
        self._update_peak()

    def change(self, sizes: Mapping[str, int]) -> None:
        """Allocates and frees by kind at once, without a peak in between."""
        for kind, size in sizes.items():
            self.live[kind] += size
            self.total += size
        self._update_peak()

    def repeat(self, before: Mapping[str, int], times: int) -> None:
        """Repeats the changes since `before`, without a higher peak than the following events."""
        for kind, size in before.items():
            growth = (self.live[kind] - size) * times
            self.live[kind] += growth
            self.total += growth

    def touch(self, rises: Mapping[str, int]) -> None:
        """Counts a peak that ends at once: `rises` by kind above the live bytes."""
        self.change(rises)
        for kind, size in rises.items():
            self.live[kind] -= size
            self.total -= size

    def mark(self) -> None:
        """Called after each unit; only a `Trace` uses it."""

    def _update_peak(self) -> None:
        if self.total > self._highest:
            if self._highest >= 0:
                self.moments.pop()
            self.moments.append(Moment(self.phase, dict(self.live)))
            self._highest = self.total


@dataclass
class Trace(Meter):
    """Records the peak of each unit and the bytes after it."""

    samples: list[Moment] = field(default_factory=list)
    _top: Moment | None = None

    def enter(self, phase: str) -> None:
        """Begins a phase; the rest of the phase before it counts as a unit."""
        self.mark()
        super().enter(phase)

    def mark(self) -> None:
        if self._top:
            self.samples += [self._top, Moment(self.phase, dict(self.live))]
        self._top = None

    def _update_peak(self) -> None:
        super()._update_peak()
        if self._top is None or self.total > self._top.total:
            self._top = Moment(self.phase, dict(self.live))
