"""Judges what a script saved: shards, files of several ranks, names, shapes and values, and partial folders.

Only certain mistakes are reported. Unrecognised values count as another model's, such as an average of weights, and
pass.
"""

import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints import discover, file_names, tensor_names
from accel_fsdp.config import Engine, JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.ranks import Holding, RankEvent, holding
from accel_fsdp.rehearsal.blame import SCRIPT, Failure, mistake
from accel_fsdp.units import counted

FOLDERS = (
    "Accelerator.save_state",
    "Accelerator.save_model",
    "PreTrainedModel.save_pretrained",
    "Trainer.save_model",
    "PeftModel.save_pretrained",
)
"""The calls that write the folder of a whole model, or of an adapter."""
DCP = ("torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save")
GATHER = (
    "state = accelerator.get_state_dict(model) on all ranks, then torch.save(state, file) on rank 0; without "
    "Accelerate torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True"
)
SAVE = (
    "save on all ranks: accelerator.save_state(folder); or "
    "model.save_pretrained(folder, state_dict=accelerator.get_state_dict(model)) of the unwrapped model"
)
SAVE_OF_TRAINER = (
    "fsdp_state_dict_type: FULL_STATE_DICT, as Trainer.save_model writes nothing otherwise; "
    "or export the script's last checkpoint: accel-fsdp export"
)
SAVE_OF_ADAPTER = (
    "fsdp_version: 2 without fsdp_activation_checkpointing, as PEFT finds no adapter in modules that FSDP has wrapped; "
    "or train/sft.py, which repairs that"
)
UNWRAP = "the state dict of accelerator.unwrap_model(model), or accelerator.get_state_dict(model)"
UNPREFIXED = {
    "base_model.": "the adapter by PeftModel.save_pretrained, or the model that merge_and_unload() returns",
    "_orig_mod.": "the state dict of accelerator.unwrap_model(model, keep_torch_compile=False)",
}
"""The state to save in place of tensors whose names begin like this."""
ROUNDING = {"float32": 1e-9, "float64": 1e-9, "float16": 1e-3, "bfloat16": 8e-3}
"""How far the sum and the norm of a saved weight may be off, relative to the norm, by dtype."""
NOW, FIRST, OTHER = "now", "first", ""
"""A file with the model's values at that moment, those from before the first step, or values that aren't recognised."""
Sums = dict[str, tuple[float, float]]
"""The sum and the norm of each weight."""


@dataclass(frozen=True)
class _File:
    """A file that a call wrote on one rank. `tensors` holds shape, dtype, sum and norm of each whole tensor by name."""

    rank: int
    call: str
    path: str
    line: str
    step: int
    barriers: int
    machine: int
    shards: int
    count: int
    is_bare: bool
    has_optimizer: bool
    tensors: Mapping[str, Sequence[Any]]

    @property
    def is_adapter(self) -> bool:
        return posixpath.basename(self.path).startswith("adapter_")

    @property
    def what(self) -> str:
        return f"{self.call} wrote {self.path}"


@dataclass(frozen=True)
class _Model:
    """The one trained model. `parts`: by step and rank, start, sum and norm of the rank's part of each weight."""

    names: set[str]
    shapes: dict[str, Sequence[int]]
    parts: dict[int, dict[int, dict[str, Any]]]
    ranks: int

    @classmethod
    def of(cls, events: Sequence[RankEvent]) -> "_Model":
        model = cls(set(), {}, {}, len({event.rank for event in events if event.kind == "began"}))
        weights = [event for event in events if event.kind == "weights"]
        for event in weights if len({event.content["model"] for event in weights}) == 1 else ():
            model.names.update(event.content["names"])
            model.shapes.update(event.content["shapes"])
            model.parts.setdefault(event.content["step"], {}).setdefault(event.rank, event.content["held"])
        return model

    def at(self, step: int) -> Sums:
        """Sum and norm of the whole weights; empty where not every rank reported its part. Replicas count once."""
        by_rank = self.parts.get(step, {})
        sums: dict[str, dict[str, tuple[float, float]]] = {}
        for parts in by_rank.values() if len(by_rank) == self.ranks else ():
            for name, (start, total, norm) in parts.items():
                sums.setdefault(name, {}).setdefault(str(start), (total, norm))
        return {
            name: (sum(total for total, _ in pairs.values()), math.hypot(*(norm for _, norm in pairs.values())))
            for name, pairs in sums.items()
        }

    def moved(self, step: int) -> set[str]:
        """The weights that have changed since the start on a rank that reported then."""
        return {
            name
            for rank, parts in self.parts.get(step, {}).items()
            for name, part in parts.items()
            if part != self.parts.get(0, {}).get(rank, {}).get(name, part)
        }


def failures(events: Sequence[RankEvent], holdings: Mapping[int, Holding], job: JobConfig) -> Iterator[Failure]:
    """Yields each mistake once, the most serious first. Called if all ranks ended without an error."""
    files, model = list(_files(events)), _Model.of(events)
    checkpointed = {file.step for file in files if file.has_optimizer}
    resumed = {event.content["path"] for event in events if event.kind == "loaded"}
    resumed |= {file.path for file in files if file.step in checkpointed}
    sharing_ranks = max((unit.ranks for holding in holdings.values() for unit in holding.units), default=2)
    yield from _shards(files, sharing_ranks)
    yield from _mixed_files(files)
    yield from _partial(events, next((holding.weights for holding in holdings.values()), 0), model, job)
    last = list({file.path: file for file in files if file.tensors and not file.is_adapter}.values())
    yield from _misnamed(last, model, resumed)
    yield from _untrained([file for file in last if file.step], model)


def _files(events: Sequence[RankEvent]) -> Iterator[_File]:
    for event in (event for event in events if event.kind == "saved"):
        call = {key: event.content[key] for key in ("call", "line", "step", "barriers", "machine")}
        yield from (_File(event.rank, **call, **file) for file in event.content["files"])


def _shards(files: Sequence[_File], sharing_ranks: int) -> Iterator[Failure]:
    """A file per shard can be resumed on as many ranks; a single file with one shard isn't a model."""
    sharded = [file for file in files if file.shards and file.call not in FOLDERS]
    writers: dict[str, set[int]] = {}
    for file in sharded:
        writers.setdefault(file.path, set()).add(file.rank)
    single_writers = {rank for several in writers.values() if len(several) == 1 for rank in several}
    if sharded and len(single_writers) < sharing_ranks:
        first = sharded[0]
        what = (
            f"{first.call} wrote {first.shards} of {counted(first.count, 'tensor')} as the part that rank "
            f"{first.rank} holds"
        )
        fix = "on all ranks, without no_dist, with the DTensors: {'model': model.state_dict()}"
        yield mistake(what, fix if first.call in DCP else GATHER, first.line)


def _mixed_files(files: Sequence[_File]) -> Iterator[Failure]:
    """Two ranks of a machine that write one file, with no barrier in between, may leave a mixture of both."""
    writers: dict[tuple[str, int, int, int], dict[int, _File]] = {}
    for file in files:
        if file.call not in (*DCP, FOLDERS[0]) and not file.path.startswith("/dev/"):
            key = (file.path, file.step, file.barriers, file.machine)
            writers.setdefault(key, {}).setdefault(file.rank, file)
    for ranks in writers.values():
        if len(ranks) > 1:
            listed = " and ".join(str(rank) for rank in sorted(ranks))
            first = ranks[min(ranks)]
            yield mistake(
                f"ranks {listed} write one file at the same time, by {first.call}: {first.path} may be torn",
                "if accelerator.is_main_process: before it, with what all ranks gather outside of that; or "
                "save_pretrained(..., is_main_process=accelerator.is_main_process)",
                first.line,
            )
            return


def _misnamed(files: Sequence[_File], model: _Model, resumed: set[str]) -> Iterator[Failure]:
    """Names that begin with those of wrappers, which the model without wrappers doesn't have.

    A wrapped model never reads a folder of `save_pretrained`. Other files pass if the script reads them, saves an
    optimizer beside them, or if their values differ from the model's.
    """
    if any("module" in name.split(".") for name in model.names):
        return
    for file in files:
        strange = [name for name in file.tensors if name not in model.names and holding.user_name(name) in model.names]
        if file.call == "PreTrainedModel.save_pretrained":
            strange += [name for name in file.tensors if name.startswith(tensor_names.PEFT_PREFIX)]
        is_model = (
            file.is_bare
            and {holding.user_name(name) for name in file.tensors} <= model.names
            and _kind_of_values(file, model) == NOW
        )
        if strange and (file.call in FOLDERS[1:] or (is_model and file.path not in resumed)):
            prefix = next((prefix for prefix in UNPREFIXED if strange[0].startswith(prefix)), "")
            yield mistake(
                f"{file.what} with names of a wrapper, such as {strange[0]}, which the model itself doesn't have",
                "save " + UNPREFIXED.get(prefix, UNWRAP),
                file.line,
            )
            return


def _untrained(files: Sequence[_File], model: _Model) -> Iterator[Failure]:
    """Saves that all hold the values before training."""
    if files and all(_kind_of_values(file, model) == FIRST for file in files):
        file = files[-1]
        yield mistake(
            f"{file.what} after {counted(file.step, 'step')} with the weights from before the first one",
            "take the state dict when you save it: state = accelerator.get_state_dict(model) after the last step",
            file.line,
        )


def _kind_of_values(file: _File, model: _Model) -> str | None:
    """The values in a file, by its weights that have changed; None without any."""
    now, moved = model.at(file.step), model.moved(file.step)
    saved = {
        holding.user_name(name): ((total, norm), ROUNDING[dtype])
        for name, (shape, dtype, total, norm) in file.tensors.items()
        if holding.user_name(name) in moved
        and dtype in ROUNDING
        and list(shape) == list(model.shapes[holding.user_name(name)])
    }
    if not saved:
        return None

    def holds(values: Sums) -> bool:
        pairs = [(own, values.get(name, (0.0, 0.0)), rounding) for name, (own, rounding) in saved.items()]
        return bool(values) and all(
            math.dist(own, expected) <= rounding * max(own[1], expected[1]) for own, expected, rounding in pairs
        )

    if holds(now):
        return NOW
    if holds(model.at(0)) and all(rounding <= ROUNDING["float32"] for _, rounding in saved.values()):
        return FIRST
    return OTHER


def _partial(events: Sequence[RankEvent], weights: int, model: _Model, job: JobConfig) -> Iterator[Failure]:
    """Folders with fewer weights than the model that was saved, and empty adapters."""
    saves = {event.content["path"]: event.content for event in events if event.kind == "saved"}
    written = {event.content["path"] for event in events if event.kind == "saved" and event.content["files"]}
    for path, content in saves.items():
        call, folder = content["call"], Path(path)
        may_be_nothing = call == "Trainer.save_model" and job.is_fsdp and not job.full_state_dict
        flaw = _flaw(folder, weights if content["weights"] is None else content["weights"]) if call in FOLDERS else ""
        if may_be_nothing and path not in written and not folder.exists():
            flaw = "without weights"
        if flaw:
            key, fix = SCRIPT, SAVE
            is_checkpointed = job.is_fsdp and job.on("fsdp_activation_checkpointing")
            is_adapter = any(name.startswith(tensor_names.PEFT_PREFIX) for name in model.names)
            is_adapter |= (folder / file_names.ADAPTER_CONFIG).is_file()
            if is_adapter and (is_checkpointed or job.engine is Engine.FSDP1):
                key, fix = "fsdp_activation_checkpointing" if is_checkpointed else "fsdp_version", SAVE_OF_ADAPTER
                fix = f"fsdp_state_dict_type: FULL_STATE_DICT, and {fix}" if may_be_nothing else fix
            elif may_be_nothing:
                key, fix = "fsdp_state_dict_type", SAVE_OF_TRAINER
            yield Failure(f"{call} left {folder} {flaw}", key, fix, content["line"])


def _flaw(folder: Path, weights: int) -> str:
    if not folder.is_dir():
        return "" if not folder.exists() else "as a file"
    try:
        checkpoint = discover.look(folder)
        if checkpoint is None:
            return "without weights"
        weights_there, is_adapter = _elements(checkpoint)
    except UserError as error:
        return f"unreadable: {error.what}"
    if weights_there == 0:
        return "with 0 tensors"
    if not is_adapter and weights_there < weights:
        return f"with {weights_there:,} of {weights:,} weights"
    return ""


def _elements(checkpoint: discover.CheckpointLocation) -> tuple[int, bool]:
    """The number of weights in a checkpoint, and whether they are an adapter's, which is saved without its base."""
    from accel_fsdp.checkpoints import open_checkpoint, safetensors_files  # they import torch

    if checkpoint.kind in discover.EXPORTED:
        count = sum(math.prod(tensor.shape) for tensor in safetensors_files.of_place(checkpoint.weights).values())
        return count, checkpoint.kind == "adapter"
    content = open_checkpoint.read(checkpoint)
    count = sum(math.prod(tensor.shape) for part in (content.tensors, content.adapter) for tensor in part.values())
    return count, bool(content.adapter)
