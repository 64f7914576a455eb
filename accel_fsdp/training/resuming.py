"""Chooses the checkpoint that a run resumes, and checks before loading that its settings fit."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from accel_fsdp import console, untrusted_files
from accel_fsdp.checkpoints import (
    LORA,
    Origin,
    completeness,
    file_names,
    marker,
    open_checkpoint,
    safetensors_header,
    saved_files,
    tensor_names,
)
from accel_fsdp.config import ANY_FSDP, ANY_ZERO, Engine
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.training import stored
from accel_fsdp.units import counted

if TYPE_CHECKING:
    from transformers import TrainingArguments


def chosen(training: "TrainingArguments") -> str | None:
    """Resolves `--resume_from_checkpoint`: a folder, true for the newest in `output_dir`, auto for that or a new run.

    Call on all ranks. The checkpoint's hashes are verified: each rank reads a share of its bytes.

    Raises:
        UserError: there is no checkpoint, its steps have another size, or `output_dir` holds a different run, which
        would be mixed with this one.
    """
    checkpoint = newest(training)
    if checkpoint is None:
        return None
    keep_batch_size(checkpoint, training)
    origin = marker.origin_of(checkpoint)
    if origin and LaunchEnvironment.now().may_restart and not training.ignore_data_skip:
        _keep_rows(origin, training)
    _check_rows(checkpoint, origin, _rows_per_step(training), training.ignore_data_skip)
    return str(checkpoint)


def _keep_rows(origin: Origin, training: "TrainingArguments") -> None:
    """Adapts the micro-batches per step of an elastic job, so that its steps train as many rows as the checkpoint's.

    With fewer machines than before, each rank takes more micro-batches.
    """
    rows = origin.rows_per_step * training.gradient_accumulation_steps
    micro_batches, remainder = divmod(rows, max(_rows_per_step(training), 1))
    if remainder or micro_batches < 1 or micro_batches == training.gradient_accumulation_steps:
        return
    if training.process_index == 0:
        console.say(
            f"elastic: {counted(training.world_size, 'rank')} instead of {origin.ranks}, so "
            f"--gradient_accumulation_steps {micro_batches} instead of {training.gradient_accumulation_steps}: "
            f"steps of {origin.rows_per_step} rows as before",
            style="yellow",
        )
    training.gradient_accumulation_steps = micro_batches


def keep_batch_size(checkpoint: Path, training: "TrainingArguments") -> None:
    """Takes the batch size that `--auto_find_batch_size` had arrived at, as Trainer does, before steps are compared."""
    rows = untrusted_files.read_json(checkpoint / file_names.TRAINER_STATE).get("train_batch_size")
    if not training.auto_find_batch_size or not isinstance(rows, int) or rows in (0, training.train_batch_size):
        return
    training.per_device_train_batch_size = rows // max(training.n_gpu, 1)
    if training.process_index == 0:
        console.say(f"--auto_find_batch_size goes on with {rows} rows per device, as in {checkpoint}", style="cyan")


def newest(training: Any) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` asks for, from the store if it is newer there; else None."""
    output, resume_from = Path(training.output_dir), training.resume_from_checkpoint
    if resume_from is None or str(resume_from).lower() == "false":
        stored.check_unused(training)
        if any(output.glob(f"{file_names.CHECKPOINT}*")) or (output / file_names.FINAL).exists():
            raise UserError(
                f"{output} already holds a run",
                why="its checkpoints and this run's would be mixed up",
                fix="--resume_from_checkpoint true to go on with it, or another --output_dir",
            )
        return None
    if str(resume_from).lower() not in ("true", "auto"):
        return _refuse_flawed(Path(resume_from), training)
    if training.should_save:
        completeness.put_back(output)
    stored.fetch_newer(training)
    choice = completeness.choose(
        output, gather_object([file_names.checkpoints(output)])[0], lambda folder: _flaw(folder, training)
    )
    if training.process_index == 0:
        for folder, flaw in choice.skipped.items():
            console.say(f"skipped: {folder}: {flaw}", style="yellow")
    if choice.newest is None and str(resume_from).lower() == "true":
        raise UserError(
            f"no complete checkpoint-N folder in {output}",
            why="there is nothing to resume from",
            fix="--resume_from_checkpoint auto to start from the beginning in that case, or correct --output_dir",
        )
    return choice.newest


def _refuse_flawed(checkpoint: Path, training: "TrainingArguments") -> Path:
    flaw = _flaw(checkpoint, training)
    if flaw:
        newest = completeness.choose(Path(training.output_dir)).newest
        raise UserError(
            f"{checkpoint} is not a complete checkpoint",
            why=flaw,
            fix=f"--resume_from_checkpoint {newest if newest not in (None, checkpoint) else 'FOLDER/checkpoint-N'}",
        )
    return checkpoint


def _rows_per_step(training: "TrainingArguments") -> int:
    """The rows of all ranks; ranks that share rows count once."""
    ranks = LaunchEnvironment.now().with_rows(range(training.world_size))
    return int(training.train_batch_size * training.gradient_accumulation_steps * len(ranks))


def _check_rows(checkpoint: Path, origin: Origin | None, rows_per_step: int, ignores_data_position: bool) -> None:
    """Refuses a step of another size, before anything is loaded."""
    if origin and origin.rows_per_step and origin.rows_per_step != rows_per_step and not ignores_data_position:
        raise UserError(
            f"{checkpoint} counts steps of {origin.rows_per_step} rows, this run steps of {rows_per_step}",
            why="some rows would be trained twice or not at all, and the learning-rate schedule would change length",
            fix="the same --per_device_train_batch_size x --gradient_accumulation_steps x processes; or "
            "--ignore_data_skip true to start the data from the beginning",
        )


def _flaw(checkpoint: Path, training: "TrainingArguments") -> str:
    """The flaw of a checkpoint on any rank. Each rank checks all sizes and its share of the bytes and pickles."""
    is_separate = training.save_on_each_node  # then each machine has its own checkpoint and checks all of it
    part, parts = (
        (training.local_process_index, LaunchEnvironment.now().local_world_size)
        if is_separate
        else (training.process_index, training.world_size)
    )
    try:
        problem = completeness.flaw(checkpoint) if checkpoint.is_dir() else "there is no such folder"
        problem = problem or marker.damage(checkpoint, part=part, of=parts)
        if not problem and (refused := open_checkpoint.refusal(checkpoint, part, parts)):
            raise refused
    except (OSError, UserError) as error:
        problem = getattr(error, "what", "") or str(error)
    return next(filter(None, gather_object([problem])), "")


def check(checkpoint: Path, here: Origin, order_depends_on_ranks: bool = False, skips_data: bool = True) -> None:
    """Checks that the run's settings fit the checkpoint that it resumes.

    FSDP's sharded and full checkpoints move between its versions, strategies and numbers of ranks. `skips_data` is
    false under `--ignore_data_skip`, where the data start from the beginning and their position needs no check.

    Raises:
        UserError: a part is missing (Trainer would silently restart that part), the checkpoint is from another engine
        or number of ranks in a format that can't change them, or the same step would be at another position in the
        data.
    """
    origin = marker.origin_of(checkpoint)
    stored = origin.engine if origin else _engine(checkpoint)
    if absent := completeness.lacking_to_resume(checkpoint):
        raise UserError(
            f"{checkpoint} holds no {' and no '.join(absent)}",
            why="Trainer would silently restart them",
            fix="an older checkpoint-N; or a new run from its weights: accel-fsdp export, then "
            "train/sft.py --model_name_or_path",
        )
    if stored.partition("-")[0] != here.engine.partition("-")[0] or ("-" in stored and stored != here.engine):
        raise UserError(
            f"{checkpoint} was written under {stored}, this run is under {here.engine}",
            why="the two store weights and optimizer differently",
            fix=_how_to_convert(checkpoint, {stored, here.engine}, here)
            or f"a YAML for {stored}; or a new run from its "
            "weights: accel-fsdp export, then train/sft.py --model_name_or_path",
        )
    _check_ranks(checkpoint, origin, here, order_depends_on_ranks and skips_data)
    _check_precision(checkpoint, here)
    _check_rows(checkpoint, origin, here.rows_per_step, not skips_data)


def _how_to_convert(checkpoint: Path, engines: set[str], here: Origin) -> str:
    """How a checkpoint becomes one of this run's engine; empty if one of the engines can't be converted."""
    if not all(engine.partition("-")[0] in (ANY_FSDP, ANY_ZERO) for engine in engines):
        return ""
    stage = here.engine.partition("-")[2]
    target = f"zero{stage} --ranks {here.ranks} --mixed-precision {_own_precision()}" if stage else "fsdp2"
    converted = f"accel-fsdp convert {checkpoint} NEW_RUN/{checkpoint.name} --to {target}"
    return f"{converted}, then --output_dir NEW_RUN --resume_from_checkpoint true"


def _own_precision() -> str:
    """This run's precision, as far as the names of DeepSpeed's files depend on it."""
    return "bf16" if LaunchEnvironment.now().mixed_precision == "bf16" else "no"


def check_adapter(checkpoint: Path, names: Iterable[str]) -> None:
    """Raises a UserError if an adapter's file differs from the model's adapter: FSDP2 and PEFT load what matches.

    `names` are those of the trained parameters. torch itself compares sharded checkpoints. Without patches, PEFT writes
    empty files under FSDP1 and activation checkpointing.
    """
    full, adapter_only = checkpoint / file_names.FULL_MODEL, checkpoint / file_names.ADAPTER
    if full.is_file():
        path = full
        stored = set(map(tensor_names.filed, saved_files.load(path)))
    elif adapter_only.is_file():
        path, stored = adapter_only, set(safetensors_header.read(adapter_only))
    else:
        return
    needed = set(map(tensor_names.filed, names))
    if not tensor_names.is_adapted(needed):
        return  # an adapter other than LoRA: its tensors have other names in files
    missing = tensor_names.lacking(stored, needed)
    extra = min((name for name in stored - needed if LORA.search(name)), default="")
    if missing or extra:
        raise UserError(
            f"{path} holds {len(stored & needed)} of the adapter's {counted(len(needed), 'tensor')}; "
            + (f"it lacks {missing}" if missing else f"it has {extra}"),
            why="training would go on from a partly new adapter",
            fix="resume with the model and the LoRA flags of that run, or from an older checkpoint-N",
        )


def _engine(checkpoint: Path) -> str:
    if completeness.by_deepspeed(checkpoint):
        return ANY_ZERO
    return ANY_FSDP if completeness.state_dict_type(checkpoint) else Engine.DDP.label


def _check_precision(checkpoint: Path, here: Origin) -> None:
    """Refuses DeepSpeed's files of another precision: under bf16 it looks for other names."""
    names = [path.name for path in checkpoint.glob(f"*/{file_names.ZERO_PARTITIONS}")]
    if not here.engine.startswith(ANY_ZERO) or not names:
        return
    stored, own = "bf16" if names[0].startswith(file_names.BF16) else "no", _own_precision()
    if stored != own:
        raise UserError(
            f"{checkpoint} was written under mixed_precision: {stored}, this run is under {own}",
            why="DeepSpeed gives its files other names under bf16, and wouldn't find these",
            fix=f"mixed_precision: {stored} in the YAML; or {_how_to_convert(checkpoint, {here.engine}, here)}",
        )


def _check_ranks(checkpoint: Path, origin: Origin | None, here: Origin, order_depends_on_ranks: bool) -> None:
    """Checks the formats, and the orders of the data, that are valid for only one number of ranks."""
    by_zero = len(list(checkpoint.glob(f"*/{file_names.ZERO_PARTITIONS}")))
    partitions = by_zero or len(list(checkpoint.glob(file_names.LOCAL_MODELS)))
    ranks = origin.ranks if origin and order_depends_on_ranks else partitions
    if ranks and ranks != here.ranks:
        is_zero = here.engine.startswith(ANY_ZERO) and not order_depends_on_ranks
        converted = _how_to_convert(checkpoint, {here.engine}, here) if is_zero else ""
        raise UserError(
            f"{checkpoint} was written by {counted(ranks, 'rank')}, this run has {here.ranks}",
            why="the order of the rows depends on it, with this --train_sampling_strategy"
            if order_depends_on_ranks
            else "in this format each rank reads the file that it wrote",
            fix=f"num_processes: {ranks}" + (f"; or {converted}" if converted else ""),
        )
