"""Verifies an export: reopens its files and compares them with the report from when they were written."""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from accel_fsdp import __version__, untrusted_files
from accel_fsdp.checkpoints import discover, file_names, marker, open_checkpoint, short_name
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import transformers_probe, writer
from accel_fsdp.exporter.exported_folder import Spec
from accel_fsdp.exporter.writer import Written
from accel_fsdp.units import counted, gb_or_mb

HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class ExportReport:
    """The exported tensors and the checks that they passed; `export.json` in the exported folder.

    `hashes`: those of all files but the card, which people edit; until the report is saved, of the weights alone.
    `non_finite`: the count of NaN or infinite numbers, for the tensors that hold any.
    """

    source: str
    kind: str
    tensors: dict[str, Spec]
    checks: tuple[str, ...]
    seconds: float = 0.0
    hashes: dict[str, str] = field(default_factory=dict)
    non_finite: dict[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.tensors.values())

    def proven(self, what: str) -> "ExportReport":
        return replace(self, checks=(*self.checks, what))

    def content(self) -> dict[str, Any]:
        tensors = {name: spec._asdict() for name, spec in self.tensors.items()}
        parameters = sum(prod(spec.shape) for spec in self.tensors.values())
        totals = {"tensor_count": len(tensors), "parameters": parameters, "size_bytes": self.size_bytes}
        return {"accel_fsdp": __version__, **asdict(replace(self, tensors={})), "tensors": tensors, **totals}

    def save(self, folder: Path) -> None:
        others = marker.hashes_of(folder, [name for name in _hashed(folder) if name not in self.hashes])
        content = replace(self, hashes={**self.hashes, **others}).content()
        (folder / file_names.REPORT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def lines(self) -> list[str]:
        speed = f", {self.seconds:.1f} s" if self.seconds else ""
        dtypes = ", ".join(sorted({spec.dtype for spec in self.tensors.values()}))
        first = f"{counted(len(self.tensors), 'tensor')}, {gb_or_mb(self.size_bytes)}, {dtypes}{speed}"
        notes = [f"  not finite: {_non_finite(self)}"] if self.non_finite else []
        return [f"verified: {first}", *(f"  {check}" for check in self.checks), *notes]


def read_report(folder: Path) -> ExportReport | None:
    """The report in an exported folder; None if there is none."""
    content = untrusted_files.read_json(folder / file_names.REPORT)
    if not content and not (folder / file_names.REPORT).exists():
        return None
    try:
        tensors = {str(name): Spec(tuple(map(int, t["shape"])), t["dtype"]) for name, t in content["tensors"].items()}
        hashes = {str(name): str(digest) for name, digest in content["hashes"].items()}
        non_finite = {str(name): int(count) for name, count in content["non_finite"].items()}
        if not hashes or not all(map(HASH.fullmatch, hashes.values())):
            raise ValueError("no hashes of its files")
        return ExportReport(content["source"], content["kind"], tensors, (), hashes=hashes, non_finite=non_finite)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise untrusted_files.broken(folder / file_names.REPORT, "is damaged: no report of an export") from error


def _hashed(folder: Path) -> list[str]:
    """The names of all files except report, card and hidden files, which are git's and the hub's."""
    names = (path.relative_to(folder) for path in marker.files_in(folder))
    visible = [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]
    return [name for name in visible if name not in (file_names.REPORT, file_names.CARD)]


def _check_links(folder: Path) -> None:
    """Refuses links to folders, whose files would be loaded without a check, and anything that can't be read."""
    for path in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.is_symlink() and path.is_dir():
            raise untrusted_files.broken(path, "is a link to a folder, which isn't part of an export")
        if not path.is_dir():
            untrusted_files.check(path, folder)


def verify(folder: Path, source: str, kind: str, written: Written) -> ExportReport:
    """Reopens all files: names, shapes, dtypes and hashes must be those that were written."""
    tensors = {name: Spec(stored.shape, short_name(stored.dtype)) for name, stored in writer.tensors_in(folder).items()}
    hashes = marker.hashes_of(folder, written.hashes)
    if hashes != written.hashes or tensors != written.tensors:
        raise untrusted_files.broken(folder, "doesn't hold what was written")
    checks = ("files reopened: names, shapes, dtypes, and the hash of each file",)
    return ExportReport(source, kind, tensors, checks, hashes=hashes, non_finite=written.non_finite)


def check_finite(report: ExportReport) -> ExportReport:
    """Adds to the report that all numbers are finite, or raises."""
    if report.non_finite:
        first = ", ".join(sorted(report.non_finite)[: transformers_probe.SHOWN])
        raise UserError(
            f"{_non_finite(report)}: {first}",
            why="training has diverged, or the checkpoint is damaged; a model of such numbers answers nothing",
            fix="take an older checkpoint; if they belong there: --allow-non-finite",
        )
    return report.proven("no number is NaN or infinite")


def _non_finite(report: ExportReport) -> str:
    numbers, tensors = sum(report.non_finite.values()), len(report.non_finite)
    amount = counted(numbers, "number is", "numbers are")
    return f"{amount} NaN or infinite, in {tensors} of {counted(len(report.tensors), 'tensor')}"


def check(folder: Path, by_loading: bool, allow_non_finite: bool = False) -> ExportReport:
    """Verifies an exported folder against its report, if it has one, and on request by loading it."""
    report = read_report(folder)
    _check_links(folder)
    report = _report_of_files(folder) if report is None else _unchanged(folder, report)
    report = report if allow_non_finite else check_finite(report)
    has_config = (folder / file_names.CONFIG).is_file()
    if not has_config and not (folder / file_names.ADAPTER).is_file():
        raise UserError(
            f"{folder} holds no {file_names.CONFIG}",
            why="from_pretrained needs it",
            fix="put it back, or export the model again",
        )
    if by_loading and has_config and not (folder / file_names.TORCH_MODEL).is_file():
        transformers_probe.loads(folder)
        report = report.proven("from_pretrained loads all of it")
    return report


def _unchanged(folder: Path, report: ExportReport) -> ExportReport:
    kept, hashes = report.hashes, marker.hashes_of(folder, _hashed(folder))
    problems = [
        f"{name} was {'not exported' if name not in kept else 'changed after the export'}"
        if name in hashes
        else f"{name} is missing"
        for name in sorted(kept.keys() | hashes.keys())
        if kept.get(name) != hashes.get(name)
    ]
    if problems:
        raise UserError(
            f"{folder} has changed since the export: {'; '.join(problems[: transformers_probe.SHOWN])}",
            why="users would load another model than the one that was verified, or run what is beside it",
            fix="restore the files, or export it again: accel-fsdp export SRC OUT --force",
        )
    return report.proven(f"{counted(len(hashes), 'file is', 'files are')} as exported, by their hashes")


def _report_of_files(folder: Path) -> ExportReport:
    """The report of an export that has none."""
    checkpoint = discover.look(folder) if folder.is_dir() else None
    if checkpoint is not None and checkpoint.refused is not None:
        raise checkpoint.refused
    if checkpoint is None or checkpoint.kind not in discover.EXPORTED or checkpoint.missing:
        missing = f": it lacks {', '.join(checkpoint.missing)}" if checkpoint and checkpoint.missing else ""
        raise UserError(
            f"{folder} is not a complete export{missing}",
            why="there is nothing to verify",
            fix="export it (again): accel-fsdp export SRC OUT",
        )
    weights = open_checkpoint.read(checkpoint)  # the index and the files agree
    tensors = {**weights.tensors, **weights.adapter}
    counts = {name: sum(map(writer.count_non_finite, writer.blocks(t.load()))) for name, t in tensors.items()}
    specs = {name: Spec(stored.shape, short_name(stored.dtype)) for name, stored in tensors.items()}
    checks = ("all files there and whole; no report to compare hashes with",)
    non_finite = {name: count for name, count in counts.items() if count}
    return ExportReport(folder.name, checkpoint.kind, specs, checks, non_finite=non_finite)
