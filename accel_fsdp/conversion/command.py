"""The command `accel-fsdp convert`: a checkpoint of one engine becomes one of another, with the optimizer."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import tyro

from accel_fsdp import atomic_files, console, untrusted_files
from accel_fsdp.checkpoints import (
    ITEM_BYTES,
    CheckpointLocation,
    FileReader,
    Origin,
    Stored,
    completeness,
    deepspeed,
    differences,
    discover,
    file_names,
    marker,
    resumed_pickles,
)
from accel_fsdp.config import ANY_FSDP, MigrationTarget, zero_name
from accel_fsdp.conversion import fsdp_files, training_state, zero_files
from accel_fsdp.conversion.training_state import TrainingState
from accel_fsdp.errors import UsageError, UserError, require
from accel_fsdp.exporter import companion_files, pth_writer, refusals, safetensors_writer, transformers_probe
from accel_fsdp.flag_words import arg
from accel_fsdp.units import counted, gb_or_mb

ENGINES_OWN = (
    *(file_names.MODELS, file_names.INDEX, file_names.TORCH_MODELS, file_names.TORCH_INDEX, file_names.RANKS_MODEL),
    *(f"{file_names.OPTIMIZER}*", file_names.LATEST, "zero_to_*.py", file_names.MARKER),
)
"""Files of a checkpoint that aren't copied: they hold what is converted, or belong to the engine that wrote them."""


@dataclass(frozen=True)
class ConvertCommand:
    """The whole command."""

    src: Annotated[tyro.conf.Positional[Path], arg("A checkpoint, or a run's folder: its newest complete one.", "SRC")]
    out: Annotated[tyro.conf.Positional[Path], arg("The folder to write, such as NEW_RUN/checkpoint-40.", "OUT")]
    to: Annotated[MigrationTarget, arg("The engine that will resume it; fsdp1, fsdp2 and native share their files.")]
    ranks: Annotated[
        int | None, arg("The number of ranks that will resume it, for zero1 to zero3.", "N", default="SRC's")
    ] = None
    model: Annotated[
        str | None,
        arg("The model that was trained, for zero1 to zero3.", "ID_OR_FOLDER", default="what the run's folder says"),
    ] = None
    mixed_precision: Annotated[
        Literal["src", "no", "bf16"], arg("The precision of the run that will resume it, for zero1 to zero3.")
    ] = "src"
    no_sync: Annotated[bool, arg("Don't wait until the disk has it all.")] = False

    @property
    def stage(self) -> int:
        """DeepSpeed's stage; 0 for FSDP."""
        return int(self.to.removeprefix("zero")) if self.to.startswith("zero") else 0


def convert(command: ConvertCommand) -> int:
    """Writes OUT, complete and compared with SRC, or not at all; returns 0.

    Raises:
        UserError: SRC can't be read or lacks a part, OUT exists, or the target has no place for a part of it.
    """
    require("a conversion", "torch")
    if command.stage and command.ranks is not None and command.ranks < 1:
        raise UsageError(f"--ranks {command.ranks}", why="there is at least one rank", fix="--ranks 2")
    if command.out.exists():
        raise UserError(f"{command.out} exists", why="it may be another checkpoint", fix="another OUT")
    checkpoint, newer = discover.find(command.src)
    for passed_over in newer:
        console.say(f"passed over: {passed_over}", style="yellow")
    console.say(str(checkpoint), style="cyan")
    _check(checkpoint)
    with closing(FileReader()) as reader:
        state = training_state.read(checkpoint, reader)
        total = _bytes_of(state.tensors)
        refusals.check_space(command.out, total, what="the checkpoint")
        origin = _origin(command, checkpoint)
        with atomic_files.replaced_folder(command.out.resolve(), sync=not command.no_sync) as folder:
            with console.progress("converting", total) as progress:
                _write(command, checkpoint, state, origin, folder, reader, progress)
            for path in _others(checkpoint.folder):
                untrusted_files.copy(path, folder / path.name, within=checkpoint.folder)
            with console.progress("comparing", total) as progress:
                _compare(state, checkpoint, folder, reader, progress)
            completeness.seal(folder, origin)
    _say(command, state, origin, total)
    return 0


def _bytes_of(tensors: dict[str, Stored]) -> int:
    return sum(prod(stored.shape) * ITEM_BYTES[stored.dtype] for stored in tensors.values())


def _check(checkpoint: CheckpointLocation) -> None:
    """Refuses a damaged checkpoint, pickles that could run code, and fp16's scale of the loss."""
    if damage := marker.damage(checkpoint.folder):
        raise UserError(
            f"{checkpoint.folder} is damaged: {damage}",
            why="training would go on from something else",
            fix="copy it again from where it was written, or convert an older one",
        )
    if refused := resumed_pickles.refusal(checkpoint.folder):
        raise refused
    if (
        not completeness.has_trainer_state(checkpoint.folder)
        or not (checkpoint.folder / file_names.SCHEDULER).is_file()
    ):
        raise UserError(
            f"{checkpoint.folder} has no {file_names.TRAINER_STATE} or no {file_names.SCHEDULER}",
            why="a run that resumes it would begin its schedule and its data again",
            fix="a checkpoint of Trainer or train/sft.py",
        )
    if any(checkpoint.folder.glob(f"{file_names.SCALER}*")):
        raise deepspeed.scaled(checkpoint.folder)


def _origin(command: ConvertCommand, checkpoint: CheckpointLocation) -> Origin:
    """What the marker of OUT will say of the run."""
    before = marker.origin_of(checkpoint.folder) or Origin("")
    if command.stage and not (command.ranks or before.ranks):
        raise UsageError(
            f"--to {command.to} without --ranks",
            why=f"DeepSpeed stores a file for each rank, and {checkpoint.folder} doesn't say how many there were",
            fix="--ranks N",
        )
    return replace(before, engine=zero_name(command.stage) if command.stage else ANY_FSDP)


def _write(
    command: ConvertCommand,
    checkpoint: CheckpointLocation,
    state: TrainingState,
    origin: Origin,
    folder: Path,
    reader: FileReader,
    progress: safetensors_writer.Progress,
) -> None:
    if not command.stage:
        fsdp_files.write(state, folder, reader, progress)
        return
    with transformers_probe.aside() as pool:
        companions = companion_files.find(checkpoint, command.model)
        description = pool.submit(transformers_probe.describe, companions.folder).result()
    step, is_bf16 = completeness.step_of(checkpoint.folder), _is_bf16(command, checkpoint, origin)
    ranks = command.ranks or origin.ranks
    layout = zero_files.ZeroLayout(state, description, command.stage, ranks, step, origin.rows_per_step, is_bf16)
    placed = layout.place(folder)
    safetensors_writer.write(placed, reader, safetensors_writer.THREADS, progress, sync=not command.no_sync)
    for path in {placement.path for placement in placed}:
        pth_writer.seal(path)


def _is_bf16(command: ConvertCommand, checkpoint: CheckpointLocation, origin: Origin) -> bool:
    precision: str | None = command.mixed_precision
    if precision == "src":
        precision = origin.settings.get("precision", {}).get("mixed_precision")
    if precision is None and checkpoint.kind == "ZeRO":
        precision = "bf16" if any(checkpoint.weights.glob(f"{file_names.BF16}*")) else "no"
    if precision is None:
        raise UsageError(
            f"--to {command.to} without --mixed-precision",
            why=f"DeepSpeed's files have other names under bf16, and {checkpoint.folder} doesn't say what it was",
            fix="--mixed-precision bf16, or no",
        )
    return bool(precision == "bf16")


def _others(folder: Path) -> Iterator[Path]:
    """The files that any engine reads: schedule, log, random states, config, tokenizer."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in ENGINES_OWN):
            yield path


def _compare(
    state: TrainingState,
    checkpoint: CheckpointLocation,
    folder: Path,
    reader: FileReader,
    progress: safetensors_writer.Progress,
) -> None:
    """Reads OUT as any checkpoint, and refuses a tensor, a number or a group that differs from SRC's."""
    written = discover.look(folder)
    assert written is not None  # it was written just now
    found = training_state.read(written, reader)
    compared = differences.differences(state.tensors, found.tensors, reader, progress)
    differing = next((item for item in compared if not item.is_equal), None)
    groups = [[sorted(group.names) for group in part.groups] for part in (state, found)]
    if differing or state.numbers != found.numbers or groups[0] != groups[1]:
        what = f"{differing.name} {differing.why}" if differing else "the optimizer's groups or steps differ"
        raise UserError(
            f"the converted checkpoint differs from {checkpoint.folder}: {what}",
            why="training would go on from something else",
            fix="the same command again; if it fails again, report it with accel-fsdp doctor --report",
        )


def _say(command: ConvertCommand, state: TrainingState, origin: Origin, total: int) -> None:
    ranks = counted(command.ranks or origin.ranks, "rank") if command.stage else "any number of ranks"
    tensors = f"{counted(len(state.tensors), 'tensor')}, {gb_or_mb(total)}"
    console.say(f"{command.out}: {origin.engine}, for {ranks}; {tensors}, equal to SRC's", style="green")
    console.say(f"resume: train/sft.py --output_dir {command.out.parent} --resume_from_checkpoint true", style="cyan")
