"""The command `accel-fsdp convert`: a checkpoint of one engine becomes one of another, with the optimizer."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from torch.distributed.checkpoint.api import CheckpointException

from accel_fsdp import atomic_files, console, disks, untrusted_files
from accel_fsdp.checkpoints import (
    CheckpointLocation,
    Origin,
    completeness,
    deepspeed,
    discover,
    file_names,
    marker,
    open_checkpoint,
    same_bytes,
)
from accel_fsdp.command_line import arg, positional
from accel_fsdp.config import ANY_FSDP, MigrationTarget, zero_name
from accel_fsdp.conversion import fsdp_files, training_state, zero_files
from accel_fsdp.errors import UsageError, UserError, first_line
from accel_fsdp.exporter import companion_files, refusals, transformers_probe
from accel_fsdp.units import counted, gb_or_mb

ENGINES_OWN = (
    *(file_names.MODELS, file_names.INDEX, file_names.TORCH_MODELS, file_names.TORCH_INDEX),
    *(f"{file_names.OPTIMIZER}*", f"{file_names.LATEST}*", "zero_to_*.py", file_names.MARKER),
)
"""Files of a checkpoint that aren't copied: they hold what is converted, or belong to the engine that wrote them."""
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 1 << 18
"""glibc gives the memory of blocks from this size on back at once (malloc.h). Its own threshold grows to that of the
largest tensor that was freed, and smaller ones then stay in its heap, which grows with the checkpoint."""


@dataclass(frozen=True)
class ConvertCommand:
    """The whole command."""

    src: Annotated[Path, positional("A checkpoint, or a run's folder: its newest complete one.", "SRC")]
    out: Annotated[Path, positional("The folder to write, such as NEW_RUN/checkpoint-40.", "OUT")]
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

    @property
    def stage(self) -> int:
        """DeepSpeed's stage; 0 for FSDP."""
        return int(self.to.removeprefix("zero")) if self.to.startswith("zero") else 0


def convert(command: ConvertCommand) -> int:
    """Writes OUT, complete and compared with SRC, or not at all; returns 0.

    Raises:
        UserError: SRC can't be read or lacks a part, OUT exists, or the target has no place for a part of it.
    """
    _check_flags(command)
    checkpoint, newer = discover.find(command.src)
    for passed_over in newer:
        console.say(f"passed over: {passed_over}", style="yellow")
    console.say(str(checkpoint), style="cyan")
    if command.out.resolve().is_relative_to(checkpoint.folder.resolve()):
        raise UserError(f"{command.out} is inside of SRC", why="it would be deleted with it", fix="another OUT")
    _check(checkpoint)
    with suppress(OSError, AttributeError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    state, origin = training_state.read(checkpoint), marker.origin_of(checkpoint.folder) or Origin("")
    layout = _zero_layout(command, checkpoint, origin) if command.stage else None
    engine = zero_name(command.stage) if command.stage else ANY_FSDP
    out, write = command.out.resolve(), layout.write if layout else fsdp_files.write
    size_bytes = sum(stored.size_bytes for stored in state.tensors.values())
    refusals.check_space(out, size_bytes, what="the checkpoint")
    with atomic_files.replaced_folder(out) as folder:
        try:
            with console.waiting("converting"):
                write(state, folder)
                for path in sorted(checkpoint.folder.iterdir()):  # what any engine reads: schedule, log, random states
                    if not path.is_dir() and not any(path.match(pattern) for pattern in ENGINES_OWN):
                        untrusted_files.copy(path, folder / path.name, within=checkpoint.folder)
            with console.waiting("comparing"):
                _compare(checkpoint.folder, state, folder)
            completeness.seal(folder, replace(origin, engine=engine))
        except (OSError, RuntimeError, CheckpointException) as error:  # torch's, if it can't write or was interrupted
            raise _why(error, command.out, folder) from None
    ranks = counted(layout.ranks, "rank") if layout else "any number of ranks"
    tensors = f"{counted(len(state.tensors), 'tensor')}, {gb_or_mb(size_bytes)}"
    console.say(f"{command.out}: {engine}, for {ranks}; {tensors}, equal to SRC's", style="green")
    console.say(f"resume: train/sft.py --resume_from_checkpoint {command.out}", style="green")
    return 0


def _check_flags(command: ConvertCommand) -> None:
    if command.ranks is not None and command.ranks < 1:
        raise UsageError(f"--ranks {command.ranks}", why="there is at least one rank", fix="--ranks 2")
    ignored = [name for name in ("ranks", "model", "mixed_precision") if getattr(command, name) not in (None, "src")]
    if ignored and not command.stage:
        what = f"--{ignored[0].replace('_', '-')} with --to {command.to}"
        raise UsageError(what, why="those files serve any number of ranks and any precision", fix="leave it out")
    refusals.check_local({"SRC": command.src})
    if command.out.exists():
        raise UserError(f"{command.out} exists", why="it may be another checkpoint", fix="another OUT")


def _check(checkpoint: CheckpointLocation) -> None:
    """Refuses what is damaged, could run code, has lost its schedule or place in the data, or is of fp16."""
    folder = checkpoint.folder
    discover.check_bytes(checkpoint, bool)
    if refused := open_checkpoint.refusal(folder):
        raise refused
    if any(folder.glob(f"{file_names.SCALER}*")):
        raise deepspeed.scaled(folder)
    has_step = completeness.step_of(folder) > 0
    if not has_step or not (folder / file_names.SCHEDULER).is_file():
        raise UserError(
            f"{folder} has no {file_names.SCHEDULER if has_step else file_names.TRAINER_STATE} that can be read",
            why="a run that resumes it would begin its schedule and its data again",
            fix="a checkpoint of Trainer, train/sft.py or accel_fsdp.Checkpoints",
        )


def _zero_layout(command: ConvertCommand, checkpoint: CheckpointLocation, origin: Origin) -> zero_files.ZeroLayout:
    """How DeepSpeed will store it: on the ranks and in the precision of the flags, of SRC's files, or of its marker."""
    files = list(checkpoint.weights.glob(file_names.ZERO_OPTIMIZERS))
    precision: str | None = command.mixed_precision
    if precision == "src" and files:
        precision = "bf16" if files[0].name.startswith(file_names.BF16) else "no"
    elif precision == "src":
        precision = origin.settings.get("precision", {}).get("mixed_precision")
    ranks = command.ranks or len(files) or origin.ranks
    flag = "--ranks N" if not ranks else "--mixed-precision bf16, or no" if not precision else ""
    if flag:
        raise UsageError(
            f"--to {command.to} without {flag.split()[0]}",
            why=f"DeepSpeed's files depend on it, and {checkpoint.folder} doesn't say it",
            fix=flag,
        )
    description = transformers_probe.describe(companion_files.find(checkpoint, command.model).folder)
    step = completeness.step_of(checkpoint.folder)
    return zero_files.ZeroLayout(description, command.stage, ranks, step, is_bf16=precision == "bf16")


def _why(error: BaseException, out: Path, folder: Path) -> BaseException:
    """Why OUT could not be written: the end of the process or a damaged SRC, if one of them is the cause."""
    for cause in disks.chain(error):
        if isinstance(cause, (SystemExit, KeyboardInterrupt, UserError)):
            return cause
    return UserError(
        f"cannot write {out}: {disks.full(error, folder) or first_line(error)}",
        why="the checkpoint is incomplete and was removed",
        fix="free some space on that disk, or another OUT",
    )


def _compare(checkpoint: Path, state: training_state.TrainingState, folder: Path) -> None:
    """Reads OUT as any checkpoint, and refuses a tensor or a group that differs from SRC's."""
    location = discover.look(folder)
    assert location is not None  # it was written just now
    written = training_state.read(location)
    before, after = state.tensors, written.tensors
    differing = sorted(before.keys() ^ after.keys())
    differing += [name for name in before.keys() & after if not same_bytes(before[name], after[name])]
    groups = [[sorted(group[training_state.PARAMS]) for group in of.filled_groups] for of in (state, written)]
    if groups[0] != groups[1]:
        differing.append("the optimizer's groups")
    if differing:
        raise UserError(
            f"the converted checkpoint differs from {checkpoint}: {differing[0]}",
            why="training would go on from something else",
            fix="the same command again; if it fails again, report it with what accel-fsdp doctor prints",
        )
