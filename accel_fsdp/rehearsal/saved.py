"""Judges what a script saved: shards, files of several ranks, names, shapes and values, and partial folders.

Only certain mistakes are reported. Unrecognised values count as another model's, such as an average of weights, and
pass.
"""

import math
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints import discover, file_names, tensor_names
from accel_fsdp.config import Engine, JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.ranks import Holding, RankEvent, holding
from accel_fsdp.rehearsal.blame import SCRIPT, Failure, mistake
from accel_fsdp.rehearsal.records import Records
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
EXACT = 1e-9
ROUNDING = {"float32": EXACT, "float64": EXACT, "float16": 1e-3, "bfloat16": 8e-3}
"""How far the sum and the norm of a saved weight may be off, relative to the norm, by dtype."""
NOW, FIRST = "now", "first"
"""A file with the model's values at that moment, or those from before the first step."""
Sums = dict[str, tuple[float, float]]
"""The sum and the norm of each weight."""
File = Mapping[str, Any]
"""A file that a call wrote on one rank. `tensors` holds shape, dtype, sum and norm of each whole tensor by name."""


@dataclass(frozen=True)
class _Model:
    """The one trained model. `parts`: by step and rank, start, sum and norm of the rank's part of each weight."""

    names: set[str]
    shapes: dict[str, Sequence[int]]
    parts: dict[int, dict[int, dict[str, Any]]]
    ranks: int

    @classmethod
    def of(cls, records: Records) -> "_Model":
        model = cls(set(), {}, {}, len(records.began))
        weights = list(records.of("weights"))
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

    def values_of(self, file: File) -> str:
        """`NOW` or `FIRST` by the file's weights that have changed; empty without any, or if they are others."""
        began = self.parts.get(0, {})
        by_rank = self.parts.get(file["step"], {}).items()
        parts = ((rank, name, part) for rank, held in by_rank for name, part in held.items())
        changed = {name for rank, name, part in parts if part != began.get(rank, {}).get(name, part)}
        saved = {
            name: ((total, norm), ROUNDING[dtype])
            for name, (shape, dtype, total, norm) in _by_user_name(file).items()
            if name in changed and dtype in ROUNDING and [*shape] == [*self.shapes[name]]
        }

        def holds(values: Sums) -> bool:
            pairs = [(own, values.get(name, (0.0, 0.0)), rounding) for name, (own, rounding) in saved.items()]
            return bool(saved and values) and all(
                math.dist(own, expected) <= rounding * max(own[1], expected[1]) for own, expected, rounding in pairs
            )

        if holds(self.at(file["step"])):
            return NOW
        return FIRST if holds(self.at(0)) and all(rounding <= EXACT for _, rounding in saved.values()) else ""


def _by_user_name(file: File) -> dict[str, Any]:
    return {holding.user_name(name): tensor for name, tensor in file["tensors"].items()}


def failures(events: Sequence[RankEvent], holdings: Mapping[int, Holding], job: JobConfig) -> Iterator[Failure]:
    """Yields each mistake once, the most serious first. Called if all ranks ended without an error."""
    records = Records(events)
    model = _Model.of(records)
    files = [
        {**event.content, **file, "rank": event.rank}
        for event in records.of("saved")
        for file in event.content["files"]
    ]
    checkpointed = {file["step"] for file in files if file["has_optimizer"]}
    resumed = {event.content["path"] for event in records.of("loaded")}
    resumed |= {file["path"] for file in files if file["step"] in checkpointed}
    sharing_ranks = max((unit.ranks for holding in holdings.values() for unit in holding.units), default=2)
    yield from _shards(files, sharing_ranks)
    yield from _mixed_files(files)
    yield from _partial(records, next((holding.weights for holding in holdings.values()), 0), job)
    last = {file["path"]: file for file in files if file["tensors"] and not _is_adapter(file)}.values()
    yield from _misnamed(last, model, resumed)
    yield from _untrained([file for file in last if file["step"]], model)


def _is_adapter(file: File) -> bool:
    return posixpath.basename(file["path"]).startswith("adapter_")


def _shards(files: Sequence[File], sharing_ranks: int) -> Iterator[Failure]:
    """A file per shard can be resumed on as many ranks; a single file with one shard isn't a model."""
    sharded = [file for file in files if file["shards"] and file["call"] not in FOLDERS]
    writers: dict[str, set[int]] = {}
    for file in sharded:
        writers.setdefault(file["path"], set()).add(file["rank"])
    single_writers = {rank for several in writers.values() if len(several) == 1 for rank in several}
    if sharded and len(single_writers) < sharing_ranks:
        first = sharded[0]
        tensors = f"{first['shards']} of {counted(first['count'], 'tensor')}"
        what = f"{first['call']} wrote {tensors} as the part that rank {first['rank']} holds"
        fix = "on all ranks, without no_dist, with the DTensors: {'model': model.state_dict()}"
        yield mistake(what, fix if first["call"] in DCP else GATHER, first["line"])


def _mixed_files(files: Sequence[File]) -> Iterator[Failure]:
    """Two ranks of a machine that write one file, with no barrier in between, may leave a mixture of both."""
    writers: dict[tuple[Any, ...], set[int]] = {}
    for file in files:
        if file["call"] not in (*DCP, FOLDERS[0]) and not file["path"].startswith("/dev/"):
            ranks = writers.setdefault(tuple(file[key] for key in ("path", "step", "barriers", "machine")), set())
            ranks.add(file["rank"])
            if len(ranks) > 1:
                listed = " and ".join(map(str, sorted(ranks)))
                yield mistake(
                    f"ranks {listed} write one file at the same time, by {file['call']}: {file['path']} may be torn",
                    "if accelerator.is_main_process: before it, with what all ranks gather outside of that; or "
                    "save_pretrained(..., is_main_process=accelerator.is_main_process)",
                    file["line"],
                )
                return


def _misnamed(files: Iterable[File], model: _Model, resumed: set[str]) -> Iterator[Failure]:
    """Names that begin with those of wrappers, which the model without wrappers doesn't have.

    A wrapped model never reads a folder of `save_pretrained`. Other files pass if the script reads them, saves an
    optimizer beside them, or if their values differ from the model's.
    """
    if any("module" in name.split(".") for name in model.names):
        return
    for file in files:
        names = file["tensors"]
        strange = [name for name in names if name not in model.names and holding.user_name(name) in model.names]
        if file["call"] == "PreTrainedModel.save_pretrained":
            strange += [name for name in names if name.startswith(tensor_names.PEFT_PREFIX)]
        is_model = file["is_bare"] and _by_user_name(file).keys() <= model.names and model.values_of(file) == NOW
        if strange and (file["call"] in FOLDERS[1:] or (is_model and file["path"] not in resumed)):
            prefix = next((prefix for prefix in UNPREFIXED if strange[0].startswith(prefix)), "")
            what = f"names of a wrapper, such as {strange[0]}, which the model itself doesn't have"
            fix = f"save {UNPREFIXED.get(prefix, UNWRAP)}"
            yield mistake(f"{file['call']} wrote {file['path']} with {what}", fix, file["line"])
            return


def _untrained(files: Sequence[File], model: _Model) -> Iterator[Failure]:
    """Saves that all hold the values before training."""
    if files and all(model.values_of(file) == FIRST for file in files):
        file = files[-1]
        when = f"after {counted(file['step'], 'step')} with the weights from before the first one"
        fix = "take the state dict when you save it: state = accelerator.get_state_dict(model) after the last step"
        yield mistake(f"{file['call']} wrote {file['path']} {when}", fix, file["line"])


def _partial(records: Records, weights: int, job: JobConfig) -> Iterator[Failure]:
    """Folders with fewer weights than the model that was saved, and empty adapters."""
    saves = {event.content["path"]: event.content for event in records.of("saved")}
    for path, content in saves.items():
        call, folder = content["call"], Path(path)
        if call in FOLDERS and (flaw := _flaw(folder, weights if content["is_model"] else 0)):
            key, fix = SCRIPT, SAVE
            is_checkpointed = job.is_fsdp and job.on("fsdp_activation_checkpointing")
            is_adapter = (folder / file_names.ADAPTER_CONFIG).is_file()
            if is_adapter and (is_checkpointed or job.engine is Engine.FSDP1):
                key, fix = "fsdp_activation_checkpointing" if is_checkpointed else "fsdp_version", SAVE_OF_ADAPTER
            elif call == "Trainer.save_model" and job.is_fsdp and not job.full_state_dict:
                key, fix = "fsdp_state_dict_type", SAVE_OF_TRAINER
            yield Failure(f"{call} left {folder} {flaw}", key, fix, content["line"])


def _flaw(folder: Path, weights: int) -> str:
    from accel_fsdp.checkpoints import open_checkpoint  # it imports torch

    if not folder.is_dir():
        return "as a file" if folder.exists() else ""
    try:
        checkpoint = discover.look(folder)
        content = open_checkpoint.read(checkpoint) if checkpoint else None
    except UserError as error:
        return f"unreadable: {error.what}"
    if content is None:
        return "without weights"
    saved = sum(math.prod(tensor.shape) for tensor in content.tensors.values())
    return f"with {saved:,} of {weights:,} weights" if saved < weights and not content.adapter else ""
