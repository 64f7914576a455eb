"""Records one forward and its backward: the creation and release of each storage, as a `Tape`."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_fsdp import waiting
from accel_fsdp.prediction.tracing.cuda_emulation import (
    Begin,
    CudaRules,
    End,
    StorageEvent,
    Watch,
    in_order_of_creation,
    summed_in_place,
)


class RecordedRun(NamedTuple):
    """One run: its events by sign and bytes, and in the same order the operation that created each storage.

    The conventions are those of `Tape`.
    """

    forward: list[tuple[int, int]]
    backward: list[tuple[int, int]]
    names: list[str]
    output: int
    keeps_input: bool
    first: tuple[tuple[int, int], ...] = ()


def record_run(
    call: Callable[[Watch, Callable[[], Tensor]], Any],
    like: Tensor | None,
    module: nn.Module,
    around: Callable[[], Any] = nullcontext,
    twice: bool = False,
) -> RecordedRun:
    """Records a forward and its backward; `call` starts the watch and asks for an input like `like`.

    `twice` also records a forward that saves nothing.
    """
    watch = Watch()
    caught: list[Tensor] = []
    module.zero_grad()
    with CudaRules(), _undisturbed(), quiet():
        switch = torch.ones((), requires_grad=True)

        def make_input() -> Tensor:
            tensor: Tensor = Begin.apply(switch, watch, like, caught)  # type: ignore[no-untyped-call]
            return tensor

        with watch:
            with around():
                result = call(watch, make_input)
                used = len(watch.events)
            watch.events[used:] = in_order_of_creation(watch.events[used:])  # autocast's cache ends
            out, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
            del result
            output, split = out.untyped_storage().nbytes(), len(watch.events)
            loss = out
            if out.dim() and out.requires_grad:
                loss = End.apply(out, watch)  # type: ignore[no-untyped-call]
            del out
            if loss.requires_grad:
                loss.backward()
            del loss, rest
            watch.stop()
            backward, replaced = summed_in_place(watch.events[split:])
            held = (p.grad for p in module.parameters() if p.grad is not None)
            grads = {watch.key_of(grad.to_local() if isinstance(grad, DTensor) else grad) for grad in held}
            alive = [watch.key_of(grad) for grad in caught]
            module.zero_grad()
    first = _without_saving(call, like, around) if twice and like is not None else []
    return _recorded_run(
        first,
        watch.events[:split],
        backward,
        {replaced.get(key, key) for key in grads},
        [replaced.get(key, key) for key in alive],
        output,
    )


def _without_saving(
    call: Callable[[Watch, Callable[[], Tensor]], Any], like: Tensor, around: Callable[[], Any]
) -> list[StorageEvent]:
    """A forward that saves nothing for backward, as the first one under checkpointing."""
    watch = Watch()

    def make_input() -> Tensor:
        with watch.from_caller():
            return torch.empty(like.shape, dtype=like.dtype)

    with CudaRules(), _undisturbed(), quiet(), torch.no_grad(), watch:
        with around():
            result = call(watch, make_input)
        watch.stop()
        del result
    return in_order_of_creation([event for event in watch.events if event.sign])


def _recorded_run(
    first: list[StorageEvent],
    forward: list[StorageEvent],
    backward: list[StorageEvent],
    grads: set[int],
    alive: list[int],
    output: int,
) -> RecordedRun:
    """Converts the events to a `Tape`, and checks that no event remains.

    Raises:
        RuntimeError: a storage outlives backward.
    """
    saved = {e.key: e for e in (*forward, *backward) if e.sign == 0}
    freed = {e.key for e in forward if e.sign < 0}
    sides: list[list[tuple[int, int]]] = []
    names: list[str] = []
    for events in (forward, backward):
        changes = [e for e in events if e.sign]
        reused = [saved[e.key] for e in changes if e.key in saved]
        if events is backward:
            reused += [saved[key] for key in alive if key in saved and saved[key] not in reused]
        lasting = {e.key for e in changes if e.sign > 0} & grads
        sides.append([(0 if e.key in lasting else e.sign, e.size) for e in changes] + [(1, e.size) for e in reused])
        names += [e.by for e in (*changes, *reused)]
    left = {e.key: e.by for e in (*forward, *backward) if e.sign > 0 and e.key not in grads}
    for event in (*forward, *backward):
        if event.sign < 0:
            left.pop(event.key, None)
    leaked = [operation for key, operation in left.items() if key not in alive]
    if leaked:
        raise RuntimeError(f"backward leaves behind what these made: {', '.join(leaked)}")
    inputs = [e.key for e in forward if e.sign == 0]
    plain = [event for event in first if event.key not in saved]
    names += [event.by for event in plain]
    keeps = not freed.intersection(inputs) if inputs else False
    return RecordedRun(sides[0], sides[1], names, output, keeps, tuple((event.sign, event.size) for event in plain))


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A context in which only the run itself releases storages: no garbage collector and no frames in threads."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with waiting.unseen():
            yield
    finally:
        if was_enabled:
            gc.enable()
