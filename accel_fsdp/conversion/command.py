"""The command `accel-fsdp convert`: a checkpoint of one engine becomes one of another, with the optimizer."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tyro

from accel_fsdp import atomic_files, console, disks, untrusted_files
from accel_fsdp.checkpoints import (
    CheckpointLocation,
    Origin,
    completeness,
    deepspeed,
    deepspeed_files,
    discover,
    file_names,
    marker,
    resumed_pickles,
    same_bytes,
)
from accel_fsdp.config import ANY_FSDP, MigrationTarget, zero_name
from accel_fsdp.conversion import fsdp_files, training_state, zero_files
from accel_fsdp.conversion.training_state import TrainingState
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.exporter import companion_files, refusals, transformers_probe, writer
from accel_fsdp.flag_words import arg
from accel_fsdp.models import first_line
from accel_fsdp.units import counted, gb_or_mb

ENGINES_OWN = (
    *(file_names.MODELS, file_names.INDEX, file_names.TORCH_MODELS, file_names.TORCH_INDEX),
    *(f"{file_names.OPTIMIZER}*", f"{file_names.LATEST}*", "zero_to_*.py", file_names.MARKER),
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
    if command.ranks is not None and command.ranks < 1:
        raise UsageError(f"--ranks {command.ranks}", why="there is at least one rank", fix="--ranks 2")
    ignored = [name for name in ("ranks", "model", "mixed_precision") if getattr(command, name) not in (None, "src")]
    if ignored and not command.stage:
        raise UsageError(
            f"--{ignored[0].replace('_', '-')} with --to {command.to}",
            why="those files serve any number of ranks and any precision",
            fix="leave it out",
        )
    _check_places(command)
    checkpoint, newer = discover.find(command.src)
    for passed_over in newer:
        console.say(f"passed over: {passed_over}", style="yellow")
    console.say(str(checkpoint), style="cyan")
    if command.out.resolve().is_relative_to(checkpoint.folder.resolve()):
        raise UserError(f"{command.out} is inside of SRC", why="it would be deleted with it", fix="another OUT")
    _check(checkpoint)
    conversion = _Conversion(command, checkpoint, training_state.read(checkpoint))
    conversion.run()
    for line in conversion.lines():
        console.say(line, style="green")
    return 0


def _check_places(command: ConvertCommand) -> None:
    refusals.require_local("SRC", command.src, "a conversion reads local disks only", "copy it here first")
    if command.out.exists():
        raise UserError(f"{command.out} exists", why="it may be another checkpoint", fix="another OUT")
    place = atomic_files.existing_part(command.out)
    if not place.is_dir():
        raise UserError(f"{place} is a file", why=f"{command.out} can't be in it", fix="another OUT")


def _check(checkpoint: CheckpointLocation) -> None:
    """Refuses what is damaged, could run code, has lost its schedule or place in the data, or is of fp16."""
    if damage := marker.damage(checkpoint.folder):
        raise UserError(
            f"{checkpoint.folder} is damaged: {damage}",
            why="training would go on from something else",
            fix="copy it again from where it was written, or convert an older one",
        )
    if refused := resumed_pickles.refusal(checkpoint.folder):
        raise refused
    if any(checkpoint.folder.glob(f"{file_names.SCALER}*")):
        raise deepspeed_files.scaled(checkpoint.folder)
    if _is_of_loop(checkpoint):
        _check_schedule(checkpoint)
        return
    has_schedule = (checkpoint.folder / file_names.SCHEDULER).is_file()
    has_step = completeness.has_trainer_state(checkpoint.folder) and completeness.step_of(checkpoint.folder) > 0
    if not has_schedule or not has_step:
        raise UserError(
            f"{checkpoint.folder} has no {file_names.SCHEDULER if has_step else file_names.TRAINER_STATE} "
            "that can be read",
            why="a run that resumes it would begin its schedule and its data again",
            fix="a checkpoint of Trainer, train/sft.py, accel_fsdp.Checkpoints or Accelerator.save_state",
        )


def _is_of_loop(checkpoint: CheckpointLocation) -> bool:
    """Whether `Accelerator.save_state` wrote it: the loop itself knows its place in the data."""
    has_log = (checkpoint.folder / file_names.TRAINER_STATE).exists()
    return not has_log and any(checkpoint.folder.glob(f"{file_names.RANDOM_STATES}*"))


def _check_schedule(checkpoint: CheckpointLocation) -> None:
    is_prepared = any(checkpoint.folder.glob(file_names.PREPARED_SCHEDULERS))
    if is_prepared or (checkpoint.kind == "ZeRO" and deepspeed.has_schedule(checkpoint.weights)):
        raise UserError(
            f"{checkpoint.folder} holds a schedule that Accelerate prepared",
            why="its steps differ: Accelerate takes one for each rank, DeepSpeed one for all",
            fix="in a run from its first step on: accelerator.register_for_checkpointing(scheduler), and no prepare",
        )


@dataclass(frozen=True)
class _Conversion:
    """One conversion of a checkpoint that holds `state`."""

    command: ConvertCommand
    checkpoint: CheckpointLocation
    state: TrainingState

    @cached_property
    def origin(self) -> Origin:
        """What SRC says of its run."""
        return marker.origin_of(self.checkpoint.folder) or Origin("")

    @cached_property
    def total_bytes(self) -> int:
        return sum(stored.size_bytes for stored in self.state.tensors.values())

    @property
    def step(self) -> int:
        """The optimizer's steps until SRC."""
        steps = [int(numbers.get("step", 0)) for numbers in self.state.numbers.values()]
        return completeness.step_of(self.checkpoint.folder) or max(steps, default=0)

    @cached_property
    def _files_of_ranks(self) -> list[Path]:
        """DeepSpeed's files of the ranks' optimizers."""
        return list(self.checkpoint.weights.glob(file_names.ZERO_OPTIMIZERS)) if self.checkpoint.kind == "ZeRO" else []

    @cached_property
    def ranks(self) -> int:
        """The ranks of DeepSpeed that will resume OUT."""
        ranks = self.command.ranks or len(self._files_of_ranks) or self.origin.ranks
        return ranks or self._not_given("ranks", "N", "has a file for each rank")

    @cached_property
    def is_bf16(self) -> bool:
        """Whether the run that will resume OUT trains in bf16."""
        precision: str | None = self.command.mixed_precision
        if precision == "src" and (files := self._files_of_ranks):
            precision = "bf16" if files[0].name.startswith(file_names.BF16) else "no"
        if precision == "src":
            precision = self.origin.settings.get("precision", {}).get("mixed_precision")
        return (precision or self._not_given("mixed-precision", "bf16, or no", "names its files by it")) == "bf16"

    def _not_given(self, flag: str, values: str, why: str) -> NoReturn:
        raise UsageError(
            f"--to {self.command.to} without --{flag}",
            why=f"DeepSpeed {why}, and {self.checkpoint.folder} doesn't say it",
            fix=f"--{flag} {values}",
        )

    def run(self) -> None:
        """Writes all of OUT beside it, compares it with SRC, marks it as complete and renames it."""
        out = self.command.out.resolve()
        refusals.check_space(out, self.total_bytes, what="the checkpoint")
        with atomic_files.replaced_folder(out, sync=not self.command.no_sync) as folder:
            try:
                with console.progress("converting", self.total_bytes) as progress:
                    self._write(folder, progress)
                self._copy_others(folder)
                with console.progress("comparing", self.total_bytes) as progress:
                    self._compare(folder, progress)
                completeness.seal(
                    folder,
                    replace(self.origin, engine=zero_name(self.command.stage) if self.command.stage else ANY_FSDP),
                )
            except (OSError, RuntimeError) as error:  # the latter is torch's, if it can't write or was interrupted
                for cause in disks.chain(error):
                    if isinstance(cause, (SystemExit, KeyboardInterrupt)):
                        raise cause from None
                raise UserError(
                    f"cannot write {self.command.out}: {disks.full(error, folder) or first_line(error)}",
                    why="the checkpoint is incomplete and was removed",
                    fix="free some space on that disk, or another OUT",
                ) from error

    def _write(self, folder: Path, progress: writer.Progress) -> None:
        if not self.command.stage:
            fsdp_files.write(self.state, folder, progress)
            return
        ranks, is_bf16 = self.ranks, self.is_bf16
        description = transformers_probe.describe(companion_files.find(self.checkpoint, self.command.model).folder)
        rows, stage = self.origin.rows_per_step, self.command.stage
        layout = zero_files.ZeroLayout(self.state, description, stage, ranks, self.step, rows, is_bf16)
        name = file_names.TORCH_STEM if _is_of_loop(self.checkpoint) else f"{file_names.GLOBAL_STEP}{self.step}"
        layout.write(folder, name, progress)

    def _copy_others(self, folder: Path) -> None:
        """Copies the files that any engine reads: schedule, log, random states, config, tokenizer."""
        for path in sorted(self.checkpoint.folder.iterdir()):
            if path.is_dir() or any(path.match(pattern) for pattern in ENGINES_OWN):
                continue
            if not path.exists():
                raise UserError(f"{path} links to nothing", why="OUT would lack it", fix="copy it again, or remove it")
            untrusted_files.copy(path, folder / path.name, within=self.checkpoint.folder)

    def _compare(self, folder: Path, progress: writer.Progress) -> None:
        """Reads OUT as any checkpoint, and refuses a tensor, a number or a group that differs from SRC's."""
        written = discover.look(folder)
        assert written is not None  # it was written just now
        state = training_state.read(written)
        differing = next(iter(self.state.tensors.keys() ^ state.tensors.keys()), "")
        for name, tensor in self.state.tensors.items() if not differing else ():
            progress(tensor.size_bytes)
            if not same_bytes(tensor, state.tensors[name]):
                differing = name
                break
        if not differing and (self.state.numbers != state.numbers or self.state.membership != state.membership):
            differing = "the optimizer's groups or steps"
        if differing:
            raise UserError(
                f"the converted checkpoint differs from {self.checkpoint.folder}: {differing}",
                why="training would go on from something else",
                fix="the same command again; if it fails again, report it with what accel-fsdp doctor prints",
            )

    def lines(self) -> list[str]:
        """What was written, and how a run goes on from it."""
        out = self.command.out
        engine = zero_name(self.command.stage) if self.command.stage else ANY_FSDP
        ranks = counted(self.ranks, "rank") if self.command.stage else "any number of ranks"
        tensors = f"{counted(len(self.state.tensors), 'tensor')}, {gb_or_mb(self.total_bytes)}"
        resume = f"train/sft.py --output_dir {out.parent} --resume_from_checkpoint true"
        if _is_of_loop(self.checkpoint):
            resume = f'accelerator.load_state("{out}")'
        elif completeness.choose(out.parent).newest != out:
            resume = f"train/sft.py --resume_from_checkpoint {out}"
        return [f"{out}: {engine}, for {ranks}; {tensors}, equal to SRC's", f"resume: {resume}"]
