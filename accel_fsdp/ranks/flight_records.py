"""Reads torch's flight recorder, its record of the collectives that this rank has called."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

NCCL_BACKENDS = ("nccl", "nccl2", "nccl-lazy")
"""The names of torch 2.15's backends for NCCL."""


def newest(form: str, load: Callable[[bytes], Any]) -> tuple[bytes, dict[str, Any]]:
    """The dump with the latest collective, and that collective; both empty if none was recorded.

    The dumps are pickled or, with the form "_json", JSON.
    """
    latest: tuple[bytes, dict[str, Any]] = b"", {}
    for dump in _dumps(form):
        entries = load(dump).get("entries")
        if entries and entries[-1]["time_created_ns"] > latest[1].get("time_created_ns", 0):
            latest = dump, entries[-1]
    return latest


def _dumps(form: str) -> Iterator[bytes]:
    """A CUDA build has a recorder for NCCL and one for all other backends; torch 2.15 has one for each backend."""
    from torch._C import _distributed_c10d as recorders

    others = f"_dump_fr_trace{form}"
    calls = [(f"_dump_nccl_trace{form}", {}), (others, {}), *((others, {"backend": name}) for name in NCCL_BACKENDS)]
    for function, words in calls:
        with contextlib.suppress(AttributeError, TypeError):  # builds without NCCL; torch before 2.15
            yield getattr(recorders, function)(**words)
