"""The command `accel-fsdp export`: find, plan, write, verify, rename."""

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from accel_fsdp import atomic_files, console, untrusted_files
from accel_fsdp.checkpoints import CheckpointLocation, Store, discover, file_names, open_checkpoint, store
from accel_fsdp.config import DTYPES
from accel_fsdp.errors import UsageError, UserError, nearest
from accel_fsdp.exporter import (
    companion_files,
    contents,
    exported_folder,
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
from accel_fsdp.exporter.writer import Output, Written
from accel_fsdp.models import remote_code
from accel_fsdp.units import counted, gb_or_mb

SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]B", re.IGNORECASE)
"""The sizes of huggingface_hub, without the negative ones that it accepts."""


def run(options: ExportCommand) -> int:
    """Lists, checks or exports; returns the exit code.

    Raises:
        UserError: the command failed, and OUT is unchanged.
    """
    _check_flags(options)
    if options.list:
        return show_list(options)
    if options.check:
        report = verification.check(options.src, options.verify == "load", options.allow_non_finite)
    else:
        report = exported(options)
    if options.json:
        console.put(json.dumps(report.content(), indent=2), lines=True)
    else:
        for line in report.lines():
            console.say(line, style="green")
    if options.push_to_hub:
        out = options.src if options.check or options.out is None else options.out
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


def exported(options: ExportCommand) -> ExportReport:
    """Writes OUT, complete and verified, or not at all."""
    _check_flags(options)
    if options.out is None:
        raise UsageError("no OUT given", why="there is nowhere to write", fix="accel-fsdp export SRC OUT")
    out = options.out.resolve()
    try:
        with _fetched(options.src, out) as src:
            checkpoint, newer = discover.find(src)
            for path in newer:
                console.say(f"passed over: {path}", style="yellow")
            checkpoint = _one_model(checkpoint, replace(options, src=src))
            console.say(str(checkpoint), style="cyan")
            refusals.check_place(out, checkpoint, options.force)
            discover.check_bytes(checkpoint)
            return _export(options, out, checkpoint)
    except OSError as error:
        raise _disk_error(out, error) from error


@contextmanager
def _fetched(src: Path, out: Path) -> Iterator[Path]:
    """SRC itself, or for a URI a temporary copy beside OUT of that checkpoint, or of a run's newest complete one."""
    if not (uri := store.uri_of(src)):
        yield src
        return
    run, _, name = uri.rpartition("/")
    is_run = file_names.step(name) < 0
    place = Store(uri if is_run else run)
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=atomic_files.existing_part(out.parent)) as folder:
        with place.reached():
            name = place.newest() if is_run else name
            place.get(name, Path(folder), file_names.is_exported)
        yield Path(folder, name)


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
    """Refuses what can't be meant, before hours of work."""
    src = options.src if options.check or options.list else None  # an export fetches it
    refusals.check_local({"OUT": options.out, "--model": options.model, "SRC": src})
    size, dtype = options.max_shard_size.strip(), options.dtype
    if not SIZE.fullmatch(size) or not float(size[:-2]):
        raise UsageError(f"--max-shard-size {size} is not a size", why="no file may be larger", fix="such as 5GB")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(
            f"--dtype {dtype} is not a dtype of an export",
            why="weights are written in one of " + ", ".join(DTYPES),
            fix=f"--dtype {nearest(dtype.replace('fp', 'float'), DTYPES) or 'bfloat16'}",
        )
    if options.push_to_hub:
        hub.check_name(options.push_to_hub)


def _export(options: ExportCommand, out: Path, checkpoint: CheckpointLocation) -> ExportReport:
    started = time.monotonic()
    companions = companion_files.find(checkpoint, options.model, options.merge_adapter)
    refusals.check_model(out, companions, checkpoint)
    dtype = options.dtype or companions.dtype
    background = ThreadPoolExecutor(1)  # transformers takes seconds to import
    described = background.submit(_described, options, companions, dtype)
    is_early = checkpoint.kind == "sharded (DCP)" and not options.merge_adapter
    description = None if is_early else described.result()
    weights = open_checkpoint.read(checkpoint, shapes=description.memory if description else None)
    is_adapter = bool(weights.adapter) and not options.merge_adapter
    loads = options.verify == "load" and options.format != "pth"
    refusals.check_weights(options, weights, companions)
    planner = Planner(weights, companions, _torch_dtype(dtype))
    if is_adapter:
        dtype = options.dtype
        described.result()  # an adapter needs none of it, but the refusals
        if loads:
            merge_lora.check_saved(weights.adapter, merge_lora.adapted(companions.settings, companions.folder))
        outputs = contents.named(weights.adapter, _torch_dtype(dtype))
    elif is_early:
        outputs = planner.early_outputs()
    else:
        outputs = (planner.merged(description) if options.merge_adapter else planner).outputs(description)
    is_checked = is_adapter or not is_early
    other = background.submit(lambda: None if is_checked else planner.other_outputs(described.result(), outputs))
    with atomic_files.replaced_folder(out, sync=not options.no_sync) as folder:
        total = sum(output.spec.size_bytes for output in outputs)
        refusals.check_space(out, total, wide=any(output.dtype.itemsize >= 4 for output in outputs))
        if from_run := companions.copy(folder, dtype, is_adapter):
            console.say(f"taken from {companions.run}: {', '.join(from_run)}", style="cyan")
        stem, largest = (file_names.ADAPTER_STEM, total + 1) if is_adapter else ("model", options.max_shard_size)
        write = partial(writer.write, folder=folder, stem=stem, max_shard_size=largest)
        with console.progress("exporting", total) as progress:
            outputs, written = _written(outputs, other, write, progress)
        if options.format == "pth":
            written = writer.as_pth(folder, written)
        with console.waiting("verifying"):
            report = verification.verify(folder, checkpoint.folder.name, checkpoint.kind, written)
        report = report if options.allow_non_finite else verification.check_finite(report)
        if loads and is_adapter:  # checked before it was written
            report = report.proven("names and shapes are those that PEFT expects")
        elif loads:
            transformers_probe.loads(folder)
            report = report.proven("names, shapes and ties are the config's, and from_pretrained loads all of it")
        cast = {output.source.dtype for output in outputs if output.dtype != output.source.dtype}
        if options.dtype is None and (rounding := exported_folder.rounding(cast, _torch_dtype(dtype))):
            console.say(f"{rounding}, the config's dtype; --dtype {rounding.trained} keeps them", style="yellow")
        if described.result() is None and not is_adapter:
            console.say("names and ties are taken from the checkpoint: transformers has no such model", style="yellow")
        report.save(folder)
    return replace(report, seconds=round(time.monotonic() - started, 3))


def _written(
    outputs: list[Output], other: Future[list[Output] | None], write: Callable[..., Written], progress: writer.Progress
) -> tuple[list[Output], Written]:
    """Writes outputs, and the `other` ones in their place if transformers, once it is imported, asks for those."""

    def check(count: int) -> None:
        progress(count)
        if other.done() and other.result() is not None:
            raise CancelledError

    with suppress(CancelledError):
        written = write(outputs, progress=check)
        if other.result() is None:
            return outputs, written
    outputs = other.result() or []
    return outputs, write(outputs, progress=progress)


def _described(options: ExportCommand, companions: CompanionFiles, dtype: str | None) -> Description | None:
    """transformers' description of the model's files; under --verify bytes None if only its own code has it."""
    try:
        return transformers_probe.describe(companions.folder, _torch_dtype(dtype))
    except remote_code.NeedsCode:
        if options.verify != "bytes" or options.merge_adapter:
            raise
        return None


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
