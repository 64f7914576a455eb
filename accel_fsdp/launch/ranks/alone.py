"""Runs code of a model in one process, without other ranks."""

import contextlib
from collections.abc import Iterator
from typing import Any


class Unrepeatable(Exception):
    """Why an update can't be repeated, as a sentence."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Raises `Unrepeatable` where code communicates with other ranks, which have ended their scripts."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class RefusedCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
                raise Unrepeatable("the model's forward communicates with other ranks")
            return func(*args, **(kwargs or {}))

    with RefusedCommunication():  # type: ignore[no-untyped-call]
        yield
