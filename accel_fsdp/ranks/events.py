"""The events that a rank reports to the process that watches it: one line of JSON each, in one file per rank."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp.launch_environment import LaunchEnvironment

EVENTS = "ACCEL_FSDP_EVENTS"
"""The variable that names the folder of events; if it isn't set, nothing is written."""
ABORTED = ".aborted"
"""The end of the name of the file into which Python writes a rank's stack if a library aborts the process."""
ASKED = "asked"
"""The file in the folder of events that asks the ranks where they are."""


@dataclass(frozen=True)
class RankEvent:
    """`content` depends on the `kind`; `seconds` is the machine's monotonic clock."""

    rank: int
    seconds: float
    kind: str
    content: dict[str, Any]


def report(kind: str, **content: Any) -> None:
    """Appends an event of this rank. A reader skips a line until it is complete."""
    folder = os.environ.get(EVENTS)
    if not folder:
        return
    rank = LaunchEnvironment.now().rank
    line = json.dumps({"seconds": time.monotonic(), "kind": kind, **content}, default=_plain)
    with open(Path(folder) / f"{rank}.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")


def _plain(value: Any) -> Any:
    """A value without a JSON type, such as a rate in a tensor, as a number or a text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def ask(folder: Path) -> None:
    """Asks each rank for its place and its collectives."""
    (folder / ASKED).touch()


def is_asked() -> bool:
    return (Path(os.environ[EVENTS]) / ASKED).exists()


class EventReader:
    """Reads the events of all ranks while they are written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read_bytes: dict[Path, int] = {}

    def new(self) -> list[RankEvent]:
        """The events since the last call, in order of time."""
        events = []
        for path in self.folder.glob("*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                lines = [line for line in file if line.endswith(b"\n")]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + sum(map(len, lines))
            for line in lines:
                content = json.loads(line)
                events.append(RankEvent(int(path.stem), content.pop("seconds"), content.pop("kind"), content))
        return sorted(events, key=lambda event: event.seconds)


def read(folder: Path) -> list[RankEvent]:
    """All events so far, in order of time."""
    return EventReader(folder).new()
