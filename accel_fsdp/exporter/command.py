"""The command `accel-fsdp export`: find, plan, stream, verify, rename."""

import errno
import json
import re
import time
from concurrent.futures import Executor, Future
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, console, untrusted_files
from accel_fsdp.checkpoints import (
    CheckpointLocation,
    FileReader,
    Weights,
    discover,
    file_names,
    open_checkpoint,
    resumed_pickles,
    store,
)
from accel_fsdp.config import DTYPES
from accel_fsdp.errors import UsageError, UserError, nearest, require
from accel_fsdp.exporter import (
    companion_files,
    hub,
    merge_lora,
    pth_writer,
    refusals,
    safetensors_writer,
    transformers_probe,
    verification,
)
from accel_fsdp.exporter.companion_files import CompanionFiles
from accel_fsdp.exporter.contents import Planner
from accel_fsdp.exporter.flags import ExportCommand, Verify
from accel_fsdp.exporter.safetensors_writer import THREADS, Output, TensorPlacement
from accel_fsdp.exporter.verification import ExportReport
from accel_fsdp.models import remote_code
from accel_fsdp.units import gb_or_mb

SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]B", re.IGNORECASE)
"""The sizes of huggingface_hub, without the negative ones that it accepts."""


_before: tuple[Path, int] | None = None
"""OUT of the export that runs, and the number of the folder that was there before; 0 for none."""


def finished() -> str:
    """A sentence that OUT has been replaced, for a command that is ended afterwards; empty before."""
    if _before is None or _inode(_before[0]) in (0, _before[1]):
        return ""
    return f"after the export had finished: {_before[0]} is new and complete"


def _inode(out: Path) -> int:
    return out.stat().st_ino if out.exists() else 0


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
        _require_transformers(options.verify)
        with nullcontext() if options.verify == "bytes" else transformers_probe.aside() as pool:
            report = verification.check(out, pool, options.allow_non_finite)
    else:
        report = exported(options)
    _show(report, options)
    if options.push_to_hub:
        console.say(f"pushed: {hub.push(out, options.push_to_hub, options.private)}", style="green")
    return 0


def show_list(options: ExportCommand) -> int:
    checkpoints = list(map(_with_refused_pickles, discover.listed(options.src) or [discover.find(options.src)[0]]))
    if options.json:
        keys = ("kind", "folder", "weights", "missing", "size_bytes")
        rows_of_keys = [{key: getattr(item, key) for key in keys} for item in checkpoints]
        console.put(json.dumps(rows_of_keys, indent=2, default=str), lines=True)
        return 0
    rows = [
        (str(item.folder), item.kind, gb_or_mb(item.size_bytes), ", ".join(item.missing) or "nothing")
        for item in checkpoints
    ]
    styles = ["yellow" if item.missing else "" for item in checkpoints]
    console.show_table(("folder", "kind", "weights", "lacks"), rows, styles, whole=True)
    return 0


def _with_refused_pickles(checkpoint: CheckpointLocation) -> CheckpointLocation:
    """Counts a pickle that is damaged, or would run code when loaded, as a missing part."""
    refused = resumed_pickles.refusal(checkpoint.folder)
    if refused is None:
        return checkpoint
    return replace(checkpoint, missing=(*checkpoint.missing, f"a safe state: {refused.what}"))


def _required_out(options: ExportCommand) -> Path:
    if options.out is None:
        raise UsageError("no OUT given", why="there is nowhere to write", fix="accel-fsdp export SRC OUT")
    return options.out


def exported(options: ExportCommand) -> ExportReport:
    """Writes OUT, complete and verified, or not at all."""
    global _before
    out = _required_out(options).resolve()
    _before = out, _inode(out)
    try:
        with store.fetched(options.src, out, partial(_is_read, options.with_optimizer)) as src:
            return _find_and_export(replace(options, src=src), out)
    except OSError as error:
        raise _disk_error(out, error) from error


def _is_read(with_optimizer: bool, name: str) -> bool:
    """Whether an export reads a file of a checkpoint."""
    return with_optimizer or not name.startswith(file_names.SPARED)


def _find_and_export(options: ExportCommand, out: Path) -> ExportReport:
    _check_flags(options)
    checkpoint, newer = discover.find(options.src)
    for path in newer:
        console.say(f"passed over: {path}", style="yellow")
    checkpoint = _model_or_adapter(checkpoint, options)
    if checkpoint.kind == "adapter":
        checkpoint = _one_adapter(checkpoint, options.adapter)
    console.say(str(checkpoint), style="cyan")
    refusals.check_place(out, checkpoint, options.force)
    discover.check_bytes(checkpoint, options.with_optimizer)
    if discover.has_lost_marker(checkpoint):
        what = "shards that were exchanged, or are of another step, go unnoticed"
        console.say(f"no {file_names.MARKER}: {what}", style="yellow")
    with closing(FileReader()) as reader, transformers_probe.aside() as pool:
        return _Export(options, out, checkpoint, reader, pool).run()


def _model_or_adapter(checkpoint: CheckpointLocation, options: ExportCommand) -> CheckpointLocation:
    """Chooses between a model and an adapter in one folder: the adapter if a flag asks for it, else the model."""
    nearby = discover.adapter_beside(checkpoint) if options.src.is_dir() else None
    if nearby is None or options.merge_adapter or options.adapter:
        return nearby or checkpoint
    console.say(f"passed over: the adapter beside the model; it is exported as {nearby.weights}", style="yellow")
    return checkpoint


def _one_adapter(checkpoint: CheckpointLocation, name: str | None) -> CheckpointLocation:
    if name is not None:
        return discover.of_adapter(checkpoint, name)
    for adapter in discover.others(checkpoint):
        console.say(f"passed over: the adapter {adapter}; it is exported with --adapter {adapter}", style="yellow")
    return checkpoint


def _check_flags(options: ExportCommand) -> None:
    _check_dtype(options.dtype)
    _require_transformers(options.verify)
    size = options.max_shard_size.strip()
    if not SIZE.fullmatch(size) or not float(size[:-2]):
        raise UsageError(
            f"--max-shard-size {options.max_shard_size} is not a size",
            why="it is how large a file may get",
            fix="such as 5GB",
        )
    if options.verify == "logits" and options.format == "pth":
        raise UsageError(
            "--verify logits with --format pth",
            why="from_pretrained, which the logits are taken from, loads no .pth file",
            fix="--verify load, or --format safetensors",
        )


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(
            f"--dtype {dtype} is not a dtype of an export",
            why="weights are written in one of " + ", ".join(DTYPES),
            fix=f"--dtype {nearest(dtype.replace('fp', 'float'), DTYPES) or 'bfloat16'}",
        )


def _require_transformers(verify: Verify) -> None:
    """Raises unless transformers is installed, which checks that load a model need; --verify bytes doesn't."""
    if verify != "bytes":
        require(f"--verify {verify}, unlike --verify bytes,", "transformers", "torch")


@dataclass(frozen=True)
class _Export:
    """One export; `pool` calls transformers while the weights are streamed."""

    options: ExportCommand
    out: Path
    checkpoint: CheckpointLocation
    reader: FileReader
    pool: Executor

    def run(self) -> ExportReport:
        started, options = time.monotonic(), self.options
        companions = companion_files.find(self.checkpoint, options.model, options.merge_adapter, options.adapter)
        refusals.check_model(self.out, companions, self.checkpoint)
        dtype_asked = companion_files.DTYPES[options.dtype] if options.dtype else None
        model_described = self.pool.submit(
            transformers_probe.describe, companions.folder, dtype_asked or companions.dtype
        )
        weights = open_checkpoint.read(self.checkpoint, self.reader, options.with_optimizer, options.adapter)
        is_adapter = bool(weights.adapter) and not options.merge_adapter
        refusals.check_weights(options, weights, companions)
        if options.merge_adapter:
            self._check_adapter(weights, companions)
        dtype = dtype_asked or (None if is_adapter else companions.dtype)
        planner = Planner(weights, companions, self.reader, dtype, options.merge_adapter)
        description, unknown = (
            (None, "") if is_adapter else planner.described(model_described, by_name=options.verify == "bytes")
        )
        outputs = planner.outputs(description)
        with atomic_files.replaced_folder(self.out, sync=not options.no_sync) as folder:
            report = self._write_and_verify(folder, planner, outputs, is_adapter)
            if unknown:
                console.say(f"names and ties are taken from the checkpoint: {unknown}", style="yellow")
            report.save(folder)
        return replace(report, seconds=round(time.monotonic() - started, 3))

    def _check_adapter(self, weights: Weights, companions: CompanionFiles) -> None:
        assert companions.adapter  # else `check_weights` raised
        merge_lora.check_settings(companions.settings, trained_base=bool(weights.tensors))
        describe, places = transformers_probe.describe_adapter, (companions.adapter, companions.folder)
        try:
            description = self.pool.submit(describe, *places).result()
        except remote_code.NeedsCode:
            if self.options.verify != "bytes":
                raise
            base = weights.tensors or open_checkpoint.of_folder(companions.folder)
            shapes = {name: tensor.shape for name, tensor in base.items()}
            description = self.pool.submit(describe, *places, shapes).result()
        merge_lora.check_saved(weights.adapter, *description)

    def _write_and_verify(self, folder: Path, planner: Planner, outputs: list[Output], adapter: bool) -> ExportReport:
        """Writes headers and companion files first: from_pretrained needs only those, and loads them meanwhile."""
        companions, options = planner.companions, self.options
        placed = self._place(folder, outputs, planner.weights, adapter)
        copied_files = companions.copy_adapter(folder) if adapter else companions.copy(folder, planner.dtype)
        loading: Future[Any] | None = None
        if options.verify != "bytes" and options.format == "safetensors":
            describe, load = transformers_probe.describe_adapter, transformers_probe.loads
            loading = (
                self.pool.submit(describe, folder, companions.folder) if adapter else self.pool.submit(load, folder)
            )
        with console.progress("exporting", sum(placement.output.size_bytes for placement in placed)) as progress:
            hashes = safetensors_writer.write(placed, self.reader, THREADS, progress, sync=not options.no_sync)
        if options.format == "pth":
            pth_writer.seal(folder / file_names.TORCH_MODEL)
        report = ExportReport.of(self.checkpoint.folder.name, self.checkpoint.kind, placed, hashes, self.reader.check())
        with console.progress("verifying", report.size_bytes) as progress:
            report = verification.verify(folder, report, THREADS, progress)
        report = report if options.allow_non_finite else verification.check_finite(report)
        if copied_files:
            console.say(f"taken from {companions.run}: {', '.join(copied_files)}", style="cyan")
        if loading is not None and adapter:
            report = verification.same_as_peft(report, *loading.result())
        elif loading is not None:
            loading.result()
            report = report.proven("names, shapes and ties are the config's, and from_pretrained loads all of it")
        if options.verify == "logits":
            report = verification.same_logits(folder, report, self.pool, self.checkpoint, companions)
        return report

    def _place(self, folder: Path, outputs: list[Output], weights: Weights, adapter: bool) -> list[TensorPlacement]:
        options = self.options
        state = [Output(name, tensor.dtype, tensor) for name, tensor in sorted(weights.optimizer.items())]
        total = sum(output.size_bytes for output in (*outputs, *state))
        refusals.check_space(self.out, total, wide=any(output.dtype in ("F32", "F64") for output in outputs))
        if options.format == "pth":
            placed = pth_writer.place({output.name: output for output in outputs}, folder / file_names.TORCH_MODEL)
        elif adapter:
            placed = safetensors_writer.place(outputs, folder, file_names.ADAPTER_STEM, total + 1)
        else:
            placed = safetensors_writer.place(outputs, folder, "model", options.max_shard_size)
        if state:
            placed += safetensors_writer.place(state, folder, file_names.OPTIMIZER, options.max_shard_size)
        return placed


def _disk_error(out: Path, error: OSError) -> UserError:
    """The error for a file of the source, or for the export that is being written; write errors mostly name no file."""
    path = Path(str(error.filename)) if error.filename else out
    being_written = any(part.startswith(f".{out.name}.") for part in path.parts) or out.is_relative_to(path)
    return (
        _export_stopped(out, error) if being_written else untrusted_files.unreadable(path, error.strerror or str(error))
    )


def _export_stopped(out: Path, error: OSError) -> UserError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return UserError(
        f"cannot write {out}: {error.strerror or error}",
        why="the export is incomplete and was removed",
        fix="free some space on that disk, or choose another OUT" if full else "choose a folder you may write to",
    )


def _show(report: ExportReport, options: ExportCommand) -> None:
    if options.json:
        console.put(json.dumps(report.content(), indent=2), lines=True)
        return
    for line in report.lines():
        console.say(line, style="green")
