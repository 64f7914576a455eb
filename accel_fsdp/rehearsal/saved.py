"""Judges what a script saved: shards, files of several ranks, partial folders, names and values."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints import discover, tensor_names
from accel_fsdp.config import Engine, JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.ranks import Holding, RankEvent
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
File = Mapping[str, Any]
"""A file that a call wrote on one rank."""


def failures(events: Sequence[RankEvent], holdings: Mapping[int, Holding], job: JobConfig) -> Iterator[Failure]:
    """Yields each mistake once, the most serious first. Called if all ranks ended without an error."""
    records = Records(events)
    files = [
        {**event.content, **file, "rank": event.rank}
        for event in records.of("saved")
        for file in event.content["files"]
    ]
    sharing_ranks = max((unit.ranks for holding in holdings.values() for unit in holding.units), default=2)
    yield from _shards(files, sharing_ranks)
    yield from _mixed_files(files)
    yield from _partial(records, next((holding.weights for holding in holdings.values()), 0), job)
    yield from _misnamed(files)
    yield from _untrained(files)


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


def _partial(records: Records, weights: int, job: JobConfig) -> Iterator[Failure]:
    """Folders with fewer weights than the model that was saved, and empty adapters."""
    saves = {event.content["path"]: event.content for event in records.of("saved")}
    written = {event.content["path"] for event in records.of("saved") if event.content["files"]}
    names = [name for event in records.of("weights") for name in event.content["held"]]
    is_adapter = any(name.startswith(tensor_names.PEFT_PREFIX) for name in names)
    for path, content in saves.items():
        call, folder = content["call"], Path(path)
        may_be_nothing = call == "Trainer.save_model" and job.is_fsdp and not job.full_state_dict
        flaw = _flaw(folder, weights if content["is_whole"] else 0) if call in FOLDERS else ""
        if may_be_nothing and path not in written and not folder.exists():
            flaw = "without weights"
        if flaw:
            key, fix = SCRIPT, SAVE
            is_checkpointed = job.is_fsdp and job.on("fsdp_activation_checkpointing")
            if is_adapter and (is_checkpointed or job.engine is Engine.FSDP1):
                key, fix = "fsdp_activation_checkpointing" if is_checkpointed else "fsdp_version", SAVE_OF_ADAPTER
                fix = f"fsdp_state_dict_type: FULL_STATE_DICT, and {fix}" if may_be_nothing else fix
            elif may_be_nothing:
                key, fix = "fsdp_state_dict_type", SAVE_OF_TRAINER
            yield Failure(f"{call} left {folder} {flaw}", key, fix, content["line"])


def _misnamed(files: Sequence[File]) -> Iterator[Failure]:
    """Names that a wrapper adds. A file of torch passes if the script may read it, or saves more beside it."""
    saves = Counter((file["rank"], file["step"]) for file in files)
    for file in files:
        is_alone = file["is_result"] and saves[file["rank"], file["step"]] == 1
        if file["wrapped"] and (is_alone or file["call"] in FOLDERS[1:]):
            what = f"names of a wrapper, such as {file['wrapped']}, which the model itself doesn't have"
            fix = "save the state dict of accelerator.unwrap_model(model, keep_torch_compile=False)"
            yield mistake(f"{file['call']} wrote {file['path']} with {what}", fix, file["line"])
            return


def _untrained(files: Sequence[File]) -> Iterator[Failure]:
    """The weights from before training, in all files after the first step: one of several may be for comparison."""
    later = [file for file in files if file["step"] and file["count"]]
    moved = [[saved == first for first, now, saved in file["values"] if now != first] for file in later]
    if moved and all(weights and all(weights) for weights in moved):
        what = f"{later[0]['call']} wrote the weights from before training into {later[0]['path']}"
        fix = "save the trained model: unwrap_model(model), with state_dict=accelerator.get_state_dict(model)"
        yield mistake(what, fix, later[0]["line"])


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
