"""The store through which the machines of a job exchange values: torch's TCPStore, held by machine 0."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accel_fsdp import time_limits
from accel_fsdp.launch import rendezvous

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

PREFIX = "accel_fsdp/machines"
EVERY_SECONDS = 0.05
ANSWER_SECONDS = 3.0
"""Seconds that are added to the store's own timeout."""


@dataclass(frozen=True)
class Address:
    """Where the store is; `hosts`: this process holds it, at a free port if `port` is 0."""

    host: str
    port: int
    hosts: bool

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def open(self, seconds: float) -> "JsonStore":
        """Connects to the store, or starts it, within `seconds`.

        Raises:
            RuntimeError: nothing listens there, or another program does.
        """
        if not self.hosts and (problem := rendezvous.wait_for(self.host, self.port, seconds)):
            raise RuntimeError(problem)
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        def connect() -> TCPStore:
            limit = timedelta(seconds=seconds)
            return TCPStore(self.host, self.port, is_master=self.hosts, wait_for_workers=False, timeout=limit)

        store = time_limits.result_of(connect, seconds + ANSWER_SECONDS)  # TCPStore waits for another program's answer
        if store is None:
            cause = "another program answers there"
            raise RuntimeError("no store could be opened" if self.hosts else cause)
        return JsonStore(PrefixStore(PREFIX, store), store.port)


@dataclass(frozen=True)
class JsonStore:
    """Values by name, as JSON. Every method raises RuntimeError if machine 0 can't be reached."""

    torch_store: "Store"
    port: int = 0
    """The port of the machine that holds the store, if it was opened at an address."""

    def put(self, name: str, value: Any) -> None:
        self.torch_store.set(name, json.dumps(value))

    def agree(self, name: str, value: Any) -> Any:
        """Stores the value unless one is stored already; returns the stored one."""
        return json.loads(self.torch_store.compare_set(name, "", json.dumps(value)))

    def remove(self, name: str) -> None:
        self.torch_store.delete_key(name)

    def get(self, name: str) -> Any:
        return json.loads(self.torch_store.get(name)) if self.torch_store.check([name]) else None

    def wait(self, names: Iterable[str], seconds: float) -> dict[str, Any]:
        """Waits until all names have values, at most for `seconds`; returns the values that have arrived."""
        needed, values, deadline = list(names), dict[str, Any](), time.monotonic() + seconds
        while True:
            values |= {name: self.get(name) for name in needed if name not in values and self.torch_store.check([name])}
            if len(values) == len(needed) or time.monotonic() > deadline:
                return values
            time.sleep(EVERY_SECONDS)
