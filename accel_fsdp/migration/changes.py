"""Collects a migration: Accelerate's reading of the old file, the edits, and a row for each key.

Pure. `fsdp.py` and `deepspeed.py` have the equivalents of keys in another engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accel_fsdp.config import (
    BY_NAME,
    OTHER_AXES,
    RETIRED,
    STRATEGIES,
    TORCH_STRATEGIES,
    TRUE_WORDS,
    Edit,
    Engine,
    JobConfig,
    Kind,
    full_name,
)
from accel_fsdp.units import counted

ChangeKind = Literal["kept", "renamed", "lost", "changed"]


@dataclass(frozen=True)
class Change:
    """The change of one key. `old` and `new` are values as text, empty without one.

    `breaks` marks a meaning that the new file can't carry, and `fix` is the replacement, if there is one.
    """

    key: str
    kind: ChangeKind
    old: str = ""
    new: str = ""
    new_key: str = ""
    why: str = ""
    breaks: bool = False
    fix: str = ""


@dataclass(frozen=True)
class Migration:
    """The edits that make the new file, with a row each; `note` says why there are none."""

    source: str
    target: str
    edits: tuple[Edit, ...] = ()
    changes: tuple[Change, ...] = ()
    note: str = ""

    @property
    def broken(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.breaks)


class Draft:
    """Collects edits and rows. `section` is the old engine's section, `place` the new one's."""

    def __init__(self, job: JobConfig, section: str, place: str, layer_class: str = "") -> None:
        self.job, self.section, self.place, self.layer_class = job, section, place, layer_class
        self.first: list[Edit] = []
        self.edits: list[Edit] = []
        self.changes: list[Change] = []
        self.read: dict[str, tuple[str, Any]] = {}
        self.reported: set[str] = set()
        self._prepare_place()
        for raw, value in self._content(section).items():
            self._record(str(raw), value)
        if job.values.get("mixed_precision") is False:
            self.top("mixed_precision", "changed", "without quotes it is the boolean false", value="no")

    def _content(self, section: str) -> Mapping[str, Any]:
        content = self.job.values.get(section) if section else None
        return content if isinstance(content, Mapping) else {}

    def _prepare_place(self) -> None:
        """Renames the section. An unread section of the new name must not become active."""
        if self.place == self.section or not self.place:
            return
        if self.place in self.job.values:
            self.first.append(Edit("", self.place))
            self.reported.add(self.place)
            why = f"had no effect: {self.job.engine.label} does not read it"
            self.changes.append(Change(self.place, "lost", show(self.job.values[self.place]), why=why))
        if self.section in self.job.values:
            self.first.append(Edit("", self.section, new_key=self.place))
            self.reported.add(self.section)

    def _record(self, raw: str, value: Any) -> None:
        """Records a key as read, or drops it with the reason if it had no effect: it must get none in the new file."""
        key = full_name(self.section, raw)
        why, breaks = _without_effect(self.job.engine, self.section, key, value)
        if key in self.read:  # written with and without prefix: the later one is used
            before, _ = self.read.pop(key)
            self._set_aside(before, key, "written twice, the later one is used")
        if why:
            is_known = (self.section, key) in BY_NAME or key in RETIRED
            self._set_aside(raw, key if is_known else raw, why, breaks)
        else:
            self.read[key] = (raw, value)

    def _set_aside(self, raw: str, key: str, why: str, breaks: bool = False) -> None:
        self.first.append(Edit(self.place or self.section, raw))
        old = show(self._content(self.section)[raw])
        self.changes.append(Change(f"{self.section}.{key}", "lost", old, why=why, breaks=breaks))

    def value(self, key: str) -> Any:
        """A key's value, or Accelerate's default."""
        return self.read[key][1] if key in self.read else BY_NAME[self.section, key].default

    def word(self, key: str) -> str:
        return str(self.value(key)).upper()

    def fsdp1_strategy(self) -> str:
        """The name of FSDP1's strategy, which may be written as its number."""
        text = self.word("fsdp_sharding_strategy")
        return STRATEGIES[int(text)] if text.isdecimal() else TORCH_STRATEGIES.get(text, text)

    def on(self, key: str) -> bool:
        return str(self.value(key)).lower() in TRUE_WORDS

    def row(
        self,
        key: str,
        kind: ChangeKind,
        why: str = "",
        *,
        value: Any = None,
        new_key: str = "",
        breaks: bool = False,
        fix: str = "",
    ) -> None:
        """Adds the row of a key of the section: lost, kept, or with a new value or name."""
        raw, old = self.read.get(key, ("", None))
        self.reported.add(f"{self.section}.{key}")
        if kind == "lost":
            if not raw:
                return
            self.edits.append(Edit(self.place or self.section, raw))
        elif raw and new_key:
            self.edits.append(Edit(self.place, raw, value, new_key))
        elif value is not None:
            self.edits.append(Edit(self.place, raw or new_key or key, value))
        new = "" if kind == "lost" else show(old if value is None else value)
        self.changes.append(Change(f"{self.section}.{key}", kind, show(old), new, new_key, why, breaks, fix))

    def add(self, key: str, value: Any, why: str, section: str = "", breaks: bool = False) -> None:
        self.edits.append(Edit(section or self.place, key, value))
        self.changes.append(Change(f"{section or self.place}.{key}", "changed", "", show(value), "", why, breaks))

    def top(self, key: str, kind: ChangeKind, why: str = "", value: Any = None, breaks: bool = False) -> None:
        self.reported.add(key)
        old = self.job.values.get(key)
        if kind != "lost" and value is not None:
            self.edits.append(Edit("", key, value))
        elif kind == "lost" and key in self.job.values:
            self.edits.append(Edit("", key))
        new = "" if kind == "lost" else show(old if value is None else value)
        self.changes.append(Change(key, kind, show(old), new, why=why, breaks=breaks))

    def lose_rest(self, why: str) -> None:
        """Marks the remaining keys of the section as lost."""
        for key in self.read:
            if f"{self.section}.{key}" not in self.reported:
                self.row(key, "lost", why)

    def lose_mesh(self, why: str) -> None:
        """Drops `parallelism_config`; parallelism of another kind than data can't be expressed without it."""
        if "parallelism_config" not in self.job.values:
            return
        others = [name for name in OTHER_AXES if (self.size(name) or 0) != 1]
        names = ", ".join(f"{name}_size" for name in others)
        self.top("parallelism_config", "lost", f"no {names} here" if others else why, breaks=bool(others))

    def size(self, name: str) -> int | None:
        return as_int(self.job.mesh[name])

    def migration(self, source: str, target: str) -> Migration:
        """The finished migration, with all other keys kept, in the order of the old file."""
        for key, (_, value) in self.read.items():
            if f"{self.section}.{key}" not in self.reported:
                self.changes.append(Change(f"{self.section}.{key}", "kept", show(value), show(value)))
        for key, value in self.job.values.items():
            if key not in self.reported and key != self.section:
                self.changes.append(Change(str(key), "kept", show(value), show(value)))
        written = [str(key) for key in self._content(self.section)]
        paths = [f"{self.section}.{name}" for key in written for name in (full_name(self.section, key), key)]
        order = [name for key in self.job.values for name in (str(key), *(paths if key == self.section else ()))]
        ranked = sorted(self.changes, key=lambda change: order.index(change.key) if change.key in order else len(order))
        return Migration(source, target, self._edits(), tuple(ranked))

    def _edits(self) -> tuple[Edit, ...]:
        """The edits, new values before removals, so that a section's last comment stays after its last key."""
        removals = [edit for edit in self.edits if edit.value is None and not edit.new_key]
        return tuple(self.first + [edit for edit in self.edits if edit not in removals] + removals)

    def without_section(self) -> None:
        """Turns all edits inside the section into its removal."""
        self.first = [
            edit for edit in self.first if not edit.new_key and edit.section not in (self.section, self.place)
        ]
        self.edits = [edit for edit in self.edits if edit.section not in (self.section, self.place)]
        self.edits.append(Edit("", self.section))


def _without_effect(engine: Engine, section: str, key: str, value: Any) -> tuple[str, bool]:
    """Why a key has no effect on the old engine, or stops it, in which case its meaning is unknown."""
    field = BY_NAME.get((section, key))
    if key in RETIRED and section == "fsdp_config":
        return f"had no effect: Accelerate reads {RETIRED[key]}", False
    if field is None or not field.engines:
        return "had no effect: nothing reads it", False
    if key == "fsdp_activation_checkpointing_offload" and str(value).lower() in TRUE_WORDS and engine is Engine.FSDP1:
        return "FSDP1 stops at it", True
    if engine not in field.engines and key != "fsdp_min_num_params":
        return f"had no effect: {engine.label} ignores it", False
    if value is None:
        return "had no value", section == "fsdp_config" and field.default is not None
    if field.kind in (Kind.BOOL, Kind.CHOICE) and not field.accepts(value):
        return f"Accelerate does not take {value}", True
    return "", False


def as_int(value: Any) -> int | None:
    """An integer as Accelerate would read it; None for any other value."""
    text = str(value)
    return int(text) if text.isdecimal() and not isinstance(value, bool) else None


def show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return counted(len(value), "key")
    return "" if value is None else str(value)
