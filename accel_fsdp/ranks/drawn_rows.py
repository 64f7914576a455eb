"""Observes which rows a rank trains on: their indices in the data set, and checksums of their content."""

import contextlib
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from accel_fsdp.job import from_run
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, script
from accel_fsdp.ranks.observing import Observation, after, guarded, replace

if TYPE_CHECKING:
    import torch


ITERATOR = "torch.utils.data.dataloader:_BaseDataLoaderIter"
LOADERS = Observation(
    "rows that loaders give",
    Internal(f"{ITERATOR}._next_index", "self"),
    Internal(f"{ITERATOR}.__next__", "self"),
)
MOST_ROWS = 2048
"""The number of rows of an epoch that are recorded."""
MOST_EPOCHS = 3
"""The number of epochs of a loader that are recorded."""
PREPARED = "accelerator.prepare"


@dataclass(eq=False)
class _Pass:
    """One iteration over a loader, identified by the id of its sampler's iterator, `indices`.

    It counts batches: those `given` by now, and those given before the last backward pass. `is_left_out`: their rows
    aren't recorded, as of a stream.
    """

    indices: int
    facts: dict[str, Any]
    places: list[list[int]] = field(default_factory=list)
    hashes: list[list[int] | None] = field(default_factory=list)
    given: int = 0
    trained: int = 0
    is_over: bool = False
    is_left_out: bool = False


class ObservedRows:
    """Records the rows of each loader that was the last to give a batch before a backward pass."""

    def __init__(self) -> None:
        self.made_at: dict[int, str] = {}
        self.loaders: weakref.WeakKeyDictionary[Any, list[_Pass]] = weakref.WeakKeyDictionary()
        self.passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self.all: list[list[_Pass]] = []
        self.last: _Pass | None = None
        self.trained: _Pass | None = None

    def install(self) -> None:
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        after(DataLoader, "__init__", self._on_loader)
        replace(_BaseDataLoaderIter, "_next_index", self._drawing)
        replace(_BaseDataLoaderIter, "__next__", self._giving)

    def _drawing(self, original: Callable[..., Any], iterator: Any) -> Any:
        index = original(iterator)
        guarded(self._on_index)(iterator, index)
        return index

    def _giving(self, original: Callable[..., Any], iterator: Any) -> Any:
        try:
            batch = original(iterator)
        except StopIteration:
            if finished := self.passes.get(iterator):
                finished.is_over = True
            raise
        guarded(self._on_batch)(iterator, batch)
        return batch

    def ran_backward(self) -> None:
        if self.last:
            self.trained = self.last
            self.trained.trained = self.last.given

    @property
    def batches(self) -> tuple[int, int]:
        """The batches of an epoch of training, of all ranks and of this one; 0 if the script left the last one."""
        return self.trained.facts["batches"] if self.trained and self.trained.is_over else (0, 0)

    def report_end(self) -> None:
        """Reports the rows of each pass: their indices in the data set, each with a checksum of the content.

        It is None where the rows of a batch can't be distinguished. The last batch is left out: it may be filled with
        the epoch's first rows, or not be trained on yet.
        """
        numbers: Counter[str] = Counter()
        for passes in self.all if not from_run.ranks_may_share_rows() else ():
            trained = [drawn for drawn in passes if drawn.trained and not drawn.is_left_out]
            for epoch, drawn in enumerate(trained, 1):
                batches = list(zip(drawn.places, drawn.hashes, strict=False))[: drawn.trained - 1]
                rows = [row for places, hashes in batches for row in zip_longest(places, hashes or ())]
                number = numbers[drawn.facts["line"]]
                events.report("drawn", epoch=epoch, loader=number, rows=rows, **drawn.facts)
            numbers.update(drawn.facts["line"] for drawn in trained[:1])

    def _on_loader(self, _: Any, dataset: Any, *__: Any, **___: Any) -> None:
        if script.is_calling(sys._getframe(2)):  # a library makes another loader of the same data set
            self.made_at[id(dataset)] = script.line_of_stack(sys._getframe(2))

    def _on_index(self, iterator: Any, index: Any) -> None:
        drawn = self.passes.get(iterator)
        if drawn is None or drawn.indices != id(iterator._sampler_iter):
            try:
                passes = self.loaders.setdefault(iterator._index_sampler, [])
            except TypeError:  # indices in a list, which has no weak references
                return
            drawn = self.passes[iterator] = self._begin(iterator, passes)
        places = index if isinstance(index, list | tuple) else [index]
        drawn.is_left_out |= not all(isinstance(place, int) for place in places)
        if not drawn.is_left_out and sum(map(len, drawn.places)) < MOST_ROWS:
            drawn.places.append([int(place) for place in places])

    def _begin(self, iterator: Any, passes: list[_Pass]) -> _Pass:
        loop = script.line_of_stack(sys._getframe(3))
        facts = {"line": self.made_at.get(id(iterator._dataset), loop), "loop": loop, "script": sys.argv[0]}
        facts |= _facts(iterator._index_sampler, iterator._dataset)
        if not passes:
            self.all.append(passes)
        passes[:] = [earlier for earlier in passes if earlier.trained]
        passes.append(_Pass(id(iterator._sampler_iter), facts, is_left_out=len(passes) >= MOST_EPOCHS))
        return passes[-1]

    def _on_batch(self, iterator: Any, batch: Any) -> None:
        self.last = drawn = self.passes.get(iterator)
        if drawn is None:
            return
        drawn.given += 1
        if len(drawn.hashes) < len(drawn.places):
            drawn.hashes.append(hashes_of(batch, len(drawn.places[len(drawn.hashes)])))


def hashes_of(batch: Any, rows: int) -> list[int] | None:
    """A checksum for each row of a batch, of its input_ids if it has some; None if a batch has no such rows."""
    import torch

    mask = None
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        batch = [batch["input_ids"]] if "input_ids" in batch else list(batch.values())
    parts = batch if isinstance(batch, list | tuple) else [batch]
    tensors = [tensor for tensor in parts if isinstance(tensor, torch.Tensor) and tensor.dim() and not tensor.is_meta]
    tensors = [tensor for tensor in tensors if len(tensor) == rows]
    if not tensors:
        return None
    if len(tensors) == 1 and isinstance(mask, torch.Tensor) and mask.shape == tensors[0].shape:
        return [_hash([ids[real.bool()]]) for ids, real in zip(tensors[0], mask, strict=True)]  # without padding
    return [_hash([tensor[row] for tensor in tensors]) for row in range(len(tensors[0]))]


def _hash(parts: "list[torch.Tensor]") -> int:
    import torch

    plain = (part.detach().as_subclass(torch.Tensor).cpu().contiguous().reshape(-1) for part in parts)
    return zlib.crc32(b"".join(values.view(torch.uint8).numpy().tobytes() for values in plain))


def _facts(indices: Any, dataset: Any) -> dict[str, Any]:
    """What is known of a loader's data set and its batches.

    `once`: the sampler gives each row of the data set once in an epoch, on all ranks together; `planned` is the largest
    number of rows that this rank takes in an epoch, `batches` those of an epoch before Accelerate gives each rank its
    part, and in this part. `sharders` name the loader or sampler that gives the rank its part. `sampler_epoch`: the
    last argument of the sampler's `set_epoch`, if it has one.
    """
    from torch.utils.data import BatchSampler
    from torch.utils.data.distributed import DistributedSampler

    is_shard = type(indices).__name__ == "BatchSamplerShard"
    batches = indices.batch_sampler if is_shard else indices
    facts = {"length": None, "fingerprint": getattr(dataset, "_fingerprint", None), "start": _start(dataset)}
    facts |= {"once": False, "planned": None, "batches": (0, 0), "sharders": [], "sampler_epoch": None}
    with contextlib.suppress(Exception):  # a data set's own code may raise any error
        facts["length"] = len(dataset)
    if type(batches) is not BatchSampler:
        return facts
    sampler: Any = batches.sampler
    is_distributed = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
    facts["sharders"] = [PREPARED] * is_shard + ["a DistributedSampler"] * is_distributed
    if isinstance(epoch := getattr(sampler, "epoch", None), int) and hasattr(sampler, "set_epoch"):
        facts["sampler_epoch"] = epoch
    if facts["length"] is not None and _gives_once(sampler, facts["length"]):
        is_split = is_shard and indices.split_batches
        batch_size = indices.batch_size // indices.num_processes if is_split else batches.batch_size
        facts |= {"once": True, "planned": len(indices) * batch_size, "batches": (len(batches), len(indices))}
    return facts


def _start(dataset: Any) -> int | None:
    """The checksum of a data set's first row; None if reading it would run the data set's own code.

    Of an own data set that of the first rows of its attributes, such as a list of texts.
    """
    import torch
    from torch.utils.data import Subset, TensorDataset

    index = 0
    while isinstance(dataset, Subset) and len(dataset):
        dataset, index = dataset.dataset, dataset.indices[index]
    is_plain = type(dataset) in (list, tuple, torch.Tensor, TensorDataset)
    values = [dataset] if is_plain else getattr(dataset, "__dict__", {}).values()
    kinds = (list, tuple, torch.Tensor, TensorDataset)
    text = repr([value[index if is_plain else 0] for value in values if isinstance(value, kinds) and len(value)])
    return None if text == "[]" or " at 0x" in text else zlib.crc32(text.encode())


def _gives_once(sampler: Any, rows: int) -> bool:
    from torch.utils.data import RandomSampler, SequentialSampler
    from torch.utils.data.distributed import DistributedSampler

    if type(sampler) is DistributedSampler:
        return sampler.num_replicas in (1, LaunchEnvironment.now().world_size)
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == rows
    return type(sampler) is SequentialSampler
