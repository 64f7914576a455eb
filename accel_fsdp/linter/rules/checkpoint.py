"""Rules about a checkpoint or export folder (`--checkpoint`)."""

from collections.abc import Iterator
from pathlib import Path

from accel_fsdp.checkpoints import file_names
from accel_fsdp.job import UNLESS_SFT
from accel_fsdp.linter.rules.engine import Finding, Subject, rule
from accel_fsdp.units import counted


@rule("AF801", pains=("P21",))
def checkpoint_of_another_kind(subject: Subject) -> Iterator[Finding]:
    """A sharded checkpoint and FULL_STATE_DICT in the file, or the other way round: resuming finds no weights.

    train/sft.py resumes either kind; Trainer alone doesn't.
    """
    saved = subject.checkpoint
    if saved is None or not subject.is_fsdp or subject.uses_sft:
        return
    for stored, expected, kind in (
        (saved.sharded, subject.sharded_state_dict, "SHARDED_STATE_DICT"),
        (saved.full, subject.full_state_dict, "FULL_STATE_DICT"),
    ):
        if stored and not expected and saved.sharded != saved.full:
            yield Finding(
                "fsdp_config.fsdp_state_dict_type",
                f"{saved.name} was written with {kind}",
                f"resuming stops: FileNotFoundError{UNLESS_SFT}",
                f"fsdp_state_dict_type: {kind}",
            )


@rule("AF802", pains=("P22",))
def checkpoint_without_optimizer(subject: Subject) -> Iterator[Finding]:
    """A checkpoint without optimizer state or `scheduler.pt`.

    If one is missing, Trainer silently loads neither: learning rate and moments restart.
    """
    saved = subject.checkpoint
    if saved is None or not (saved.sharded or saved.full) or not saved.trainer_state:
        return
    if saved.missing_state:
        yield Finding(
            "",
            f"{saved.name} lacks {' and '.join(saved.missing_state)}",
            "resuming silently restarts learning rate and moments",
            "resume an older checkpoint, or start again from the weights",
        )


@rule("AF803", pains=("P23", "P55"))
def checkpoint_is_cut_short(subject: Subject) -> Iterator[Finding]:
    """A half-written checkpoint.

    Trainer writes `trainer_state.json` last, torch the `.metadata` of a sharded folder, which on several machines
    without a shared disk is only on one of them. Trainer resumes the highest number, complete or not. train/sft.py
    keeps `complete.json`, which lists the missing parts and the size of each file.

    The pickles that a resume loads (`.metadata`, schedule, random states, DeepSpeed's files) are read without running
    anything. A damaged pickle, or one that names code, is an error: train/sft.py refuses it, while Trainer may run it.
    """
    saved = subject.checkpoint
    if saved is None:
        return
    for error in (*([saved.refused] if saved.refused else []), *saved.broken):
        yield Finding("", error.what, error.why, error.fix)
    if saved.unfinished:
        yield Finding(
            "",
            f"{saved.name} is not complete: {saved.unfinished}",
            "Trainer resumes it anyway; train/sft.py and export skip it",
            "resume an older checkpoint",
        )
    missing = [f"{folder}/{file_names.DCP_METADATA}" for folder in saved.without_metadata]
    if saved.is_cut_short:
        missing.append(file_names.TRAINER_STATE)
    for name in missing:
        yield Finding(
            "",
            f"{saved.name} lacks {name}",
            "it is half-written, or its other half is on another machine; resuming stops",
            "resume an older checkpoint; on several machines write to a shared disk",
        )


@rule("AF804", "warning", pains=("P57",))
def checkpoint_of_other_ranks(subject: Subject) -> Iterator[Finding]:
    """A checkpoint of a different number of processes.

    Sharded weights load on any number. The random states don't, and with a different global batch the same step is at a
    different position in the data.
    """
    saved, processes = subject.checkpoint, subject.number("num_processes")
    if saved and saved.trainer_state and saved.rng_states and processes and saved.rng_states != processes:
        yield Finding(
            "num_processes",
            f"{saved.name} was written by {counted(saved.rng_states, 'process', 'processes')}, "
            f"the file starts {processes}",
            "random states are lost, and a step is at other rows unless the global batch stays the same",
            f"num_processes: {saved.rng_states}, or keep the global batch",
        )


@rule("AF805", pains=("P01", "P02"))
def adapter_is_empty(subject: Subject) -> Iterator[Finding]:
    """An adapter file without a single tensor, as PEFT 0.21 writes it under FSDP1 and under FSDP's checkpointing."""
    saved = subject.checkpoint
    if saved is not None and saved.adapter_tensors == 0:
        yield Finding(
            "",
            f"{saved.name}/{file_names.ADAPTER} holds no tensor",
            "the adapter is lost; loading it gives the base model",
            "take it from a FULL_STATE_DICT checkpoint if there is one; train with fsdp_version: 2",
        )


@rule("AF806", pains=("P18",))
def weights_of_one_rank(subject: Subject) -> Iterator[Finding]:
    """A tensor without elements in the weights: one rank's shard was saved as if it were the model."""
    saved = subject.checkpoint
    if saved is not None and saved.empty_tensor:
        yield Finding(
            "",
            f"{saved.empty_tensor} in {saved.name} has no elements",
            "one rank's shard was saved; the rest of the weights is not in the file",
            "export again with save_pretrained(..., state_dict=accelerator.get_state_dict(model)) on all ranks",
        )


@rule("AF807", pains=("P21",))
def checkpoint_of_weights_only(subject: Subject) -> Iterator[Finding]:
    """A checkpoint with Hugging Face weights alone, as `--save_only_model` writes it: FSDP can't resume from it."""
    saved = subject.checkpoint
    has_weights_only = saved is not None and saved.trainer_state and saved.hub and not (saved.sharded or saved.full)
    if saved is not None and subject.is_fsdp and saved.zero:
        yield Finding(
            "",
            f"{saved.name} was written by DeepSpeed",
            "FSDP can't resume from it",
            f"accel-fsdp convert {saved.name} NEW_RUN/{Path(saved.name).name} --to fsdp2",
        )
    elif saved is not None and subject.is_fsdp and has_weights_only:
        yield Finding(
            "",
            f"{saved.name} holds weights only, no FSDP checkpoint",
            "resuming stops: FileNotFoundError",
            f"start again with --model_name_or_path {saved.name}",
        )


@rule("AF808", "note", pains=("P77",))
def export_without_cache(subject: Subject) -> Iterator[Finding]:
    """An export whose config says `use_cache: false`, which Trainer set for checkpointing: generation is slow."""
    saved = subject.checkpoint
    if saved is not None and saved.cache_off and not saved.is_checkpoint:
        yield Finding(
            "", f"{saved.name}/config.json says use_cache: false", "generation is slow", "set it to true in that file"
        )


@rule("AF809", "note", pains=("P75",))
def export_stores_embeddings_twice(subject: Subject) -> Iterator[Finding]:
    """An export of a tied model that stores embedding and head: they are equal, and tied again when loaded."""
    saved = subject.checkpoint
    if saved is not None and saved.tied_twice and not saved.is_checkpoint:
        yield Finding(
            "",
            f"{saved.name} stores the tied embedding twice",
            "it takes more disk than it needs",
            "load it and save_pretrained it once more",
        )


@rule("AF810", "warning", pains=("P97",))
def export_of_the_wrapper(subject: Subject) -> Iterator[Finding]:
    """A config whose architecture is FSDP's wrapper class, as older transformers wrote it: loaders don't know it."""
    saved = subject.checkpoint
    if saved is not None and saved.architecture.startswith("FSDP"):
        yield Finding(
            "",
            f"{saved.name}/config.json names {saved.architecture}",
            "serving software doesn't know such an architecture",
            f"architectures: [{saved.architecture.removeprefix('FSDP')}] in that file",
        )


@rule("AF812", pains=("P03",))
def folder_without_weights(subject: Subject) -> Iterator[Finding]:
    """A folder of `--checkpoint` that holds neither a checkpoint nor weights.

    `save_model()` under SHARDED_STATE_DICT writes such a folder, with only a config and a tokenizer.
    """
    saved = subject.checkpoint
    if saved is None or saved.is_checkpoint or saved.hub or saved.broken:
        return
    parts = (saved.by_accelerator, saved.rng_states, saved.without_metadata)
    if saved.has_config:
        yield Finding(
            "",
            f"{saved.name} holds no weights",
            "save_model writes none under SHARDED_STATE_DICT",
            "set_state_dict_type('FULL_STATE_DICT') before save_model, on all ranks",
        )
    elif not any(parts) and saved.adapter_tensors is None:
        yield Finding(
            "",
            f"{saved.name} holds no checkpoint",
            "there is nothing to resume or to load",
            "--checkpoint RUN/checkpoint-N, or the folder of an export",
        )


@rule("AF813", "note", pains=("P62",))
def exports_are_private(subject: Subject) -> Iterator[Finding]:
    """Weights that only their owner may read: safetensors 0.8.0 sets that mode regardless of the umask.

    Reported if that version is installed (`--here`), or for such an export (`--checkpoint`). train/sft.py sets the
    mode; most scripts don't.
    """
    saved = subject.checkpoint
    if saved is not None and saved.private and not saved.is_checkpoint:
        yield Finding(
            "",
            f"{saved.name}/{saved.private} can be read by its owner only",
            "other users and serving containers can't load it",
            f"chmod a+r {saved.name}/*.safetensors",
        )
    if subject.versions.get("safetensors") == "0.8.0" and subject.here is not None and subject.here.others_may_read:
        yield Finding(
            "",
            "safetensors 0.8.0 makes its files private",
            f"others can't read an export{UNLESS_SFT}",
            "chmod a+r on the export",
        )
