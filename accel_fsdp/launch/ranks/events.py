"""What a rank tells the process that watches it: one line of JSON for each event, in a file of its own."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp.launch_environment import LaunchEnvironment

EVENTS = "ACCEL_FSDP_EVENTS"
"""The variable that names the folder; where it isn't set, nothing is written."""


@dataclass(frozen=True)
class Event:
    """`kind` names it, `content` is what belongs to that kind; `seconds` is the machine's monotonic clock."""

    rank: int
    seconds: float
    kind: str
    content: dict[str, Any]


def tell(kind: str, **content: Any) -> None:
    """Appends an event of this rank; a line is written as a whole, so that a reader sees all of it or nothing."""
    folder = os.environ.get(EVENTS)
    if not folder:
        return
    rank = LaunchEnvironment.now().rank
    line = json.dumps({"seconds": time.monotonic(), "kind": kind, **content})
    with open(Path(folder) / f"{rank}.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")


class EventReader:
    """Reads what the ranks tell while they tell it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read_bytes: dict[Path, int] = {}

    def new(self) -> list[Event]:
        """What they have told since the last call, in the order in which it happened."""
        events = []
        for path in self.folder.glob("*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                lines = [line for line in file if line.endswith(b"\n")]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + sum(map(len, lines))
            for line in lines:
                content = json.loads(line)
                events.append(Event(int(path.stem), content.pop("seconds"), content.pop("kind"), content))
        return sorted(events, key=lambda event: event.seconds)


def read(folder: Path) -> list[Event]:
    """All that the ranks have told so far, in the order in which it happened."""
    return EventReader(folder).new()
