"""The command `accel-fsdp export`: find, plan, write, verify, rename."""

import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from accel_fsdp import atomic_files, console, untrusted_files
from accel_fsdp.checkpoints import (
    CheckpointLocation,
    discover,
    file_names,
    open_checkpoint,
    store,
)
from accel_fsdp.config import DTYPES
from accel_fsdp.errors import UsageError, UserError, nearest
from accel_fsdp.exporter import (
    companion_files,
    contents,
    hub,
    merge_lora,
    refusals,
    transformers_probe,
    verification,
    writer,
)
from accel_fsdp.exporter.companion_files import CompanionFiles
from accel_fsdp.exporter.contents import Planner
from accel_fsdp.exporter.flags import ExportCommand
from accel_fsdp.exporter.transformers_probe import Description
from accel_fsdp.exporter.verification import ExportReport
from accel_fsdp.exporter.writer import Output
from accel_fsdp.models import remote_code
from accel_fsdp.units import counted, gb_or_mb

SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]B", re.IGNORECASE)
"""The sizes of huggingface_hub, without the negative ones that it accepts."""


def run(options: ExportCommand) -> int:
    """Lists, checks or exports; returns the exit code.

    Raises:
        UserError: the command failed, and OUT is unchanged.
    """
    _check_dtype(options.dtype)
    refusals.check_local(options)
    if options.list:
        return show_list(options)
    out = options.src if options.check else _required_out(options)
    if options.push_to_hub:
        hub.check_name(options.push_to_hub)
    if options.check:
        report = verification.check(out, options.verify == "load", options.allow_non_finite)
    else:
        report = exported(options)
    _show(report, options)
    if options.push_to_hub:
        console.say(f"pushed: {hub.push(out, options.push_to_hub, options.private)}", style="green")
    return 0


def show_list(options: ExportCommand) -> int:
    listed = discover.listed(options.src) or [discover.find(options.src)[0]]
    checkpoints = [model for item in listed for model in discover.models(item)]
    if options.json:
        keys = ("kind", "folder", "weights", "missing", "size_bytes")
        rows_of_keys = [{key: getattr(item, key) for key in keys} for item in checkpoints]
        console.put(json.dumps(rows_of_keys, indent=2, default=str), lines=True)
        return 0
    rows = [
        (str(item.folder), item.model_name, item.kind, gb_or_mb(item.size_bytes), ", ".join(item.missing) or "nothing")
        for item in checkpoints
    ]
    styles = ["yellow" if item.missing else "" for item in checkpoints]
    console.show_table(("folder", "model", "kind", "weights", "lacks"), rows, styles, whole=True)
    return 0


def _required_out(options: ExportCommand) -> Path:
    if options.out is None:
        raise UsageError("no OUT given", why="there is nowhere to write", fix="accel-fsdp export SRC OUT")
    return options.out


def exported(options: ExportCommand) -> ExportReport:
    """Writes OUT, complete and verified, or not at all."""
    out = _required_out(options).resolve()
    try:
        with store.fetched(options.src, out, file_names.is_exported) as src:
            return _find_and_export(replace(options, src=src), out)
    except OSError as error:
        raise _disk_error(out, error) from error


def _find_and_export(options: ExportCommand, out: Path) -> ExportReport:
    _check_flags(options)
    checkpoint, newer = discover.find(options.src)
    for path in newer:
        console.say(f"passed over: {path}", style="yellow")
    checkpoint = _one_model(checkpoint, options)
    console.say(str(checkpoint), style="cyan")
    refusals.check_place(out, checkpoint, options.force)
    discover.check_bytes(checkpoint)
    return _Export(options, out, checkpoint).run()


def _one_model(checkpoint: CheckpointLocation, options: ExportCommand) -> CheckpointLocation:
    """The model that `--which` names, or SRC itself, of several that one `Accelerator.save_state` wrote."""
    both = (checkpoint.folder / file_names.ADAPTER, checkpoint.weights / file_names.MODEL)
    if checkpoint.kind == "safetensors" and options.src.is_dir() and all(path.is_file() for path in both):
        raise UsageError(
            f"{checkpoint.folder} holds a model and an adapter",
            why="an export holds one of them, and it is unclear which is meant",
            fix=f"name its file: {both[0]} or {both[1]}",
        )
    models = {model.model_name: model for model in discover.models(checkpoint)}
    is_named = (
        options.src.is_file() or options.src.resolve() == checkpoint.weights.resolve() != checkpoint.folder.resolve()
    )
    if options.which is None and (len(models) == 1 or is_named):
        return checkpoint
    if options.which is None or options.which not in models:
        raise UsageError(
            f"{checkpoint.folder} holds {counted(len(models), 'model')}: {', '.join(models)}",
            why="an export holds one of them, and it is unclear which is meant",
            fix=f"--which {min(models)}, and --model with its config",
        )
    return models[options.which]


def _check_flags(options: ExportCommand) -> None:
    _check_dtype(options.dtype)
    size = options.max_shard_size.strip()
    if not SIZE.fullmatch(size) or not float(size[:-2]):
        raise UsageError(
            f"--max-shard-size {options.max_shard_size} is not a size",
            why="it is how large a file may get",
            fix="such as 5GB",
        )


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(
            f"--dtype {dtype} is not a dtype of an export",
            why="weights are written in one of " + ", ".join(DTYPES),
            fix=f"--dtype {nearest(dtype.replace('fp', 'float'), DTYPES) or 'bfloat16'}",
        )


@dataclass(frozen=True)
class _Export:
    """One export."""

    options: ExportCommand
    out: Path
    checkpoint: CheckpointLocation

    def run(self) -> ExportReport:
        started, options = time.monotonic(), self.options
        companions = companion_files.find(self.checkpoint, options.model, options.merge_adapter)
        refusals.check_model(self.out, companions, self.checkpoint)
        dtype = options.dtype or companions.dtype
        description, unknown = self._described(companions, dtype)
        shapes = description.memory if description else None
        weights = open_checkpoint.read(self.checkpoint, shapes=shapes)
        is_adapter = bool(weights.adapter) and not options.merge_adapter
        refusals.check_weights(options, weights, companions)
        dtype = options.dtype if is_adapter else dtype
        if is_adapter:
            if options.verify == "load" and options.format != "pth":
                merge_lora.check_saved(
                    weights.adapter, transformers_probe.adapted(companions.settings, companions.folder)
                )
            outputs = contents.named(weights.adapter, _torch_dtype(dtype))
        else:
            planner = Planner(weights, companions, _torch_dtype(dtype))
            planner = planner.merged(description) if options.merge_adapter else planner
            outputs = planner.outputs(description)
        with atomic_files.replaced_folder(self.out, sync=not options.no_sync) as folder:
            total = sum(output.size_bytes for output in outputs)
            refusals.check_space(self.out, total, wide=any(output.dtype.itemsize >= 4 for output in outputs))
            report = self._write_and_verify(folder, companions, dtype, outputs, is_adapter)
            if unknown and not is_adapter:
                console.say(f"names and ties are taken from the checkpoint: {unknown}", style="yellow")
            report.save(folder)
        return replace(report, seconds=round(time.monotonic() - started, 3))

    def _described(self, companions: CompanionFiles, dtype: str | None) -> tuple[Description | None, str]:
        """transformers' description of the model's files; under --verify bytes None if only its own code has it."""
        try:
            return transformers_probe.describe(companions.folder, _torch_dtype(dtype)), ""
        except remote_code.NeedsCode:
            if self.options.verify != "bytes" or self.options.merge_adapter:
                raise
            return None, "transformers has no such model"

    def _write_and_verify(
        self, folder: Path, companions: CompanionFiles, dtype: str | None, outputs: list[Output], is_adapter: bool
    ) -> ExportReport:
        options, total = self.options, sum(output.size_bytes for output in outputs)
        copied_files = companions.copy_adapter(folder) if is_adapter else companions.copy(folder, dtype)
        stem, largest = (file_names.ADAPTER_STEM, total + 1) if is_adapter else ("model", options.max_shard_size)
        with console.progress("exporting", total) as progress:
            written = writer.write(outputs, folder, stem, largest, progress, sync=not options.no_sync)
        if options.format == "pth":
            written = writer.as_pth(folder, written, sync=not options.no_sync)
        report = ExportReport(self.checkpoint.folder.name, self.checkpoint.kind, written, ())
        with console.progress("verifying", report.size_bytes) as progress:
            report = verification.verify(folder, report, progress)
        report = report if options.allow_non_finite else verification.check_finite(report)
        if copied_files:
            console.say(f"taken from {companions.run}: {', '.join(copied_files)}", style="cyan")
        if options.verify == "bytes" or options.format == "pth":
            return report
        if is_adapter:
            return report.proven("names and shapes are those that PEFT expects")
        transformers_probe.loads(folder)
        return report.proven("names, shapes and ties are the config's, and from_pretrained loads all of it")


def _torch_dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def _disk_error(out: Path, error: OSError) -> UserError:
    """The error for a file of the source, or for the export that is being written; write errors mostly name no file."""
    path, reason = Path(str(error.filename)) if error.filename else out, error.strerror or str(error)
    if not any(part.startswith(f".{out.name}.") for part in path.parts) and not out.is_relative_to(path):
        return untrusted_files.unreadable(path, reason)
    return UserError(
        f"cannot write {out}: {reason}",
        why="the export is incomplete and was removed",
        fix="free some space on that disk, or choose a folder on another one that you may write to",
    )


def _show(report: ExportReport, options: ExportCommand) -> None:
    if options.json:
        console.put(json.dumps(report.content(), indent=2), lines=True)
        return
    for line in report.lines():
        console.say(line, style="green")
