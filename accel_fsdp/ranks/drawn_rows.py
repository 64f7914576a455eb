"""Observes which rows a rank trains on: their indices in the data set, and checksums of their content."""

import contextlib
import hashlib
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
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


@dataclass
class DrawnRows:
    """The rows of one epoch of a loader on a rank, batch by batch.

    `start` is a checksum of the data set's first row, where it can be read without side effects; `is_whole`: all rows
    of the epoch are recorded. `places` are the rows' indices in the data set; `hashes` are checksums
    of their content, None where the rows of a batch can't be distinguished. `once`: the sampler gives each row of the
    data set once in an epoch, on all ranks together; `planned` is the largest
    number of rows that this rank takes in an epoch, `batches` those of an epoch before Accelerate gives each rank its
    part, and in this part. `sharders` name the loader or sampler that gives the rank its part. `sampler_epoch`: the
    last argument of the sampler's `set_epoch`, if it has one.
    """

    line: str
    loop: str
    script: str
    loader: int = 0
    epoch: int = 0
    places: list[list[int]] = field(default_factory=list)
    hashes: list[list[int] | None] = field(default_factory=list)
    is_whole: bool = False
    length: int | None = None
    fingerprint: str | None = None
    start: int | None = None
    once: bool = False
    planned: int | None = None
    batches: tuple[int, int] | None = None
    batch: int | None = None
    sharders: list[str] = field(default_factory=list)
    sampler_epoch: int | None = None


@dataclass
class _Loader:
    """A loader, identified by the object that gives it indices."""

    number: int = -1
    noted: int = 0
    now: "_Pass | None" = None


@dataclass
class _Pass:
    """One iteration over a loader."""

    loader: _Loader
    indices: "weakref.ref[Any]"
    rows: DrawnRows
    is_over: bool = False
    is_stream: bool = False
    given: int = 0
    trained: int = 0


class ObservedRows:
    """Records the rows of each loader that was the last to give a batch before a backward pass."""

    def __init__(self) -> None:
        self.made_at: dict[int, str] = {}
        self.counted: weakref.WeakSet[Any] = weakref.WeakSet()
        self.loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self.passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self.unfinished: list[_Pass] = []
        self.last: _Pass | None = None
        self.at_line: Counter[str] = Counter()

    def install(self) -> None:
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        after(DataLoader, "__init__", self._on_loader)
        after(DataLoader, "__len__", self._on_length)
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
            self.last.trained = self.last.given

    @property
    def batches(self) -> tuple[int, int]:
        """The batches of an epoch, of all ranks and of this one, if the script asked for the former.

        They are 0 if it didn't, or left the last epoch before its end.
        """
        ended = self.last
        return ended.rows.batches if ended and ended.is_over and ended.rows.batches else (0, 0)

    def report_end(self) -> None:
        for unfinished in self.unfinished:
            self._report(unfinished)

    def _on_loader(self, _: Any, dataset: Any, *__: Any, **___: Any) -> None:
        if script.is_calling(sys._getframe(2)):  # a library makes another loader of the same data set
            self.made_at[id(dataset)] = script.line_of_stack(sys._getframe(2))

    def _on_length(self, loader: Any) -> None:
        """Notes that the script asked for the batches of an epoch before Accelerate gave each rank its part."""
        from torch.utils.data import DataLoader

        if type(loader) is DataLoader and loader.batch_sampler is not None and script.is_calling(sys._getframe(2)):
            self.counted.add(loader.batch_sampler)

    def _on_index(self, iterator: Any, index: Any) -> None:
        drawn = self.passes.get(iterator)
        if drawn is None or drawn.indices() is not iterator._sampler_iter:
            try:
                drawn = self.passes[iterator] = self._begin(iterator)
            except TypeError:  # indices in a list, which has no weak references
                return
        places = index if isinstance(index, list | tuple) else [index]
        drawn.is_stream |= not all(isinstance(place, int) for place in places)
        if not drawn.is_stream and sum(map(len, drawn.rows.places)) < MOST_ROWS:
            drawn.rows.places.append([int(place) for place in places])

    def _begin(self, iterator: Any) -> _Pass:
        loader = self.loaders.setdefault(iterator._index_sampler, _Loader())
        if loader.now:
            self._report(loader.now)
            self.unfinished.remove(loader.now)
        loop = script.line_of_stack(sys._getframe(3))
        line = self.made_at.get(id(iterator._dataset), loop)
        rows = DrawnRows(line, loop, sys.argv[0], **_facts(iterator._index_sampler, iterator._dataset))
        if getattr(iterator._index_sampler, "batch_sampler", None) not in self.counted:
            rows.batches = None
        loader.now = _Pass(loader, weakref.ref(iterator._sampler_iter), rows)
        self.unfinished.append(loader.now)
        return loader.now

    def _on_batch(self, iterator: Any, batch: Any) -> None:
        self.last = drawn = self.passes.get(iterator)
        if drawn is None:
            return
        drawn.given += 1
        if drawn.loader.noted < MOST_EPOCHS and sum(len(hashes or [0]) for hashes in drawn.rows.hashes) < MOST_ROWS:
            rows = drawn.rows.places and drawn.rows.places[len(drawn.rows.hashes) :]
            count = len(rows[0]) if rows else None
            drawn.rows.hashes.append(hashes_of(batch, count))

    def _report(self, ended: _Pass) -> None:
        loader, rows = ended.loader, ended.rows
        if not ended.trained or ended.is_stream or from_run.ranks_may_share_rows() or loader.noted >= MOST_EPOCHS:
            return
        if loader.number < 0:
            loader.number = self.at_line[rows.line]
            self.at_line[rows.line] += 1
        loader.noted += 1
        rows.is_whole = ended.is_over and sum(map(len, rows.places)) < MOST_ROWS
        if not rows.is_whole:  # the loaders of Accelerate take a batch before they give the last one
            trained = max(1, ended.trained - bool(rows.sharders[:1] == [PREPARED]))
            rows.places, rows.hashes = rows.places[:trained], rows.hashes[:trained]
        rows.loader, rows.epoch = loader.number, loader.noted
        events.report("drawn", **asdict(rows))


def hashes_of(batch: Any, rows: int | None = None) -> list[int] | None:
    """A checksum for each row of a batch, of its input_ids if it has some; None if a batch has no such rows."""
    import torch

    mask = None
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        batch = [batch["input_ids"]] if "input_ids" in batch else list(batch.values())
    parts = batch if isinstance(batch, list | tuple) else [batch]
    tensors = [tensor for tensor in parts if isinstance(tensor, torch.Tensor) and tensor.dim() and not tensor.is_meta]
    tensors = [tensor for tensor in tensors if len(tensor) == (rows or len(tensors[0]))]
    if not tensors:
        return None
    if len(tensors) == 1 and isinstance(mask, torch.Tensor) and mask.shape == tensors[0].shape:
        return [_hash([ids[real.bool()]]) for ids, real in zip(tensors[0], mask, strict=True)]  # without padding
    return [_hash([tensor[row] for tensor in tensors]) for row in range(len(tensors[0]))]


def _hash(parts: "list[torch.Tensor]") -> int:
    import torch

    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        values = part.detach().as_subclass(torch.Tensor).cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _facts(indices: Any, dataset: Any) -> dict[str, Any]:
    """The known facts about a loader's data set and its batches."""
    from torch.utils.data import BatchSampler
    from torch.utils.data.distributed import DistributedSampler

    facts: dict[str, Any] = {"length": None, "fingerprint": getattr(dataset, "_fingerprint", None)}
    with contextlib.suppress(Exception):  # a data set's own code may raise any error
        facts["length"] = len(dataset)
    facts["start"] = _start(dataset)
    is_shard = type(indices).__name__ == "BatchSamplerShard"
    batches = indices.batch_sampler if is_shard else indices
    if type(batches) is not BatchSampler:
        return facts
    sampler: Any = batches.sampler
    facts |= {"batch": batches.batch_size, "sharders": [PREPARED] * is_shard}
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        facts["sharders"].append("a DistributedSampler")
    if isinstance(epoch := getattr(sampler, "epoch", None), int) and hasattr(sampler, "set_epoch"):
        facts["sampler_epoch"] = epoch
    if facts["length"] is not None and _gives_once(sampler, facts["length"]):
        batch_size = (
            indices.batch_size // indices.num_processes if is_shard and indices.split_batches else batches.batch_size
        )
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
