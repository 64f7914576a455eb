"""Verifies an export: reopens its files and compares them with the report from when they were written."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from accel_fsdp import __version__, untrusted_files
from accel_fsdp.checkpoints import discover, file_names, marker, open_checkpoint, safetensors_header
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import transformers_probe, writer
from accel_fsdp.exporter.writer import Progress, Written
from accel_fsdp.units import counted, gb_or_mb

HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class ExportReport:
    """The exported tensors and the checks that they passed; `export.json` in the exported folder.

    `papers`: the hash of each other file except the card, which people edit; empty until the report is saved.
    `non_finite`: the count of NaN or infinite numbers, for the tensors that hold any.
    """

    source: str
    kind: str
    tensors: dict[str, Written]
    checks: tuple[str, ...]
    seconds: float = 0.0
    papers: dict[str, str] = field(default_factory=dict)
    non_finite: dict[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(written.size_bytes for written in self.tensors.values())

    def proven(self, what: str) -> "ExportReport":
        return replace(self, checks=(*self.checks, what))

    def content(self) -> dict[str, Any]:
        parameters = sum(prod(written.shape) for written in self.tensors.values())
        totals = {"tensor_count": len(self.tensors), "parameters": parameters, "size_bytes": self.size_bytes}
        return {"accel_fsdp": __version__, **asdict(self), **totals}

    def save(self, folder: Path) -> None:
        content = replace(self, papers=_companion_hashes(folder)).content()
        (folder / file_names.REPORT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def lines(self) -> list[str]:
        speed = f", {self.seconds:.1f} s" if self.seconds else ""
        dtypes = ", ".join(sorted({written.dtype for written in self.tensors.values()}))
        first = f"{counted(len(self.tensors), 'tensor')}, {gb_or_mb(self.size_bytes)}, {dtypes}{speed}"
        notes = [f"  not finite: {_non_finite(self)}"] if self.non_finite else []
        return [f"verified: {first}", *(f"  {check}" for check in self.checks), *notes]


def read_report(folder: Path) -> ExportReport | None:
    """The report in an exported folder; None if there is none."""
    content = untrusted_files.read_json(folder / file_names.REPORT)
    if not content:
        return None
    try:
        tensors = {str(name): _written_tensor(entry) for name, entry in content["tensors"].items()}
        hashes = {str(name): str(digest) for name, digest in content["papers"].items()}
        if not hashes:
            raise ValueError("no hashes of config and tokenizer")
        return ExportReport(str(content["source"]), str(content["kind"]), tensors, (), papers=hashes)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise untrusted_files.broken(folder / file_names.REPORT, "is damaged: no report of an export") from error


def _written_tensor(entry: Mapping[str, Any]) -> Written:
    if not HASH.fullmatch(entry["hash"]):
        raise ValueError("no hash")
    return Written(entry["dtype"], tuple(map(int, entry["shape"])), entry["file"], entry["hash"])


def _companion_hashes(folder: Path) -> dict[str, str]:
    """The hash by name of all files except weights and hidden files, which are git's and the hub's."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return marker.hashes_of(
        folder,
        [
            name.as_posix()
            for name in names
            if str(name) not in (file_names.REPORT, file_names.CARD)
            and not any(part.startswith(".") for part in name.parts)
            and not (len(name.parts) == 1 and name.suffix in file_names.EXPORTED)
        ],
    )


def _check_links(folder: Path) -> None:
    """Refuses links to folders, whose files would be loaded without a check, and anything that can't be read."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and not path.is_file() and (path.is_symlink() or not path.is_dir()):
            if path.is_dir():
                raise untrusted_files.broken(path, "is a link to a folder, which isn't part of an export")
            untrusted_files.check(path, folder)


def _check_companions(folder: Path, report: ExportReport) -> ExportReport:
    hashes = _companion_hashes(folder)
    missing, extra = report.papers.keys() - hashes.keys(), hashes.keys() - report.papers.keys()
    changed = (name for name, digest in report.papers.items() if hashes.get(name, digest) != digest)
    problems = [
        *(f"{name} is missing" for name in sorted(missing)),
        *(f"{name} was changed after the export" for name in changed),
        *(f"{name} was not exported" for name in sorted(extra)),
    ]
    if problems:
        raise UserError(
            f"{folder} has changed since the export: {'; '.join(problems[: transformers_probe.SHOWN])}",
            why="users would load another model than the one that was verified, or run what is beside it",
            fix="restore the files, or export it again: accel-fsdp export SRC OUT --force",
        )
    return report.proven(f"{len(hashes)} other files are unchanged")


def verify(folder: Path, report: ExportReport, progress: Progress) -> ExportReport:
    """Reopens all files: names, shapes, dtypes and hashes must be those of the report."""
    non_finite = writer.reread(folder, report.tensors, progress)
    hashed_too = ", and the hash of each tensor" if any(written.hash for written in report.tensors.values()) else ""
    report = replace(report, non_finite=non_finite)
    return report.proven(f"files reopened: names, shapes, dtypes{hashed_too}")


def check_finite(report: ExportReport) -> ExportReport:
    """Adds to the report that all numbers are finite, or raises."""
    if report.non_finite:
        first = ", ".join(list(report.non_finite)[: transformers_probe.SHOWN])
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
    if report is not None:
        report = _check_companions(folder, report)
    report = verify(folder, report or _report_from_headers(folder), lambda _: None)
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


def _report_from_headers(folder: Path) -> ExportReport:
    """The report of an export that has none, from its headers."""
    checkpoint = discover.look(folder) if folder.is_dir() else None
    if checkpoint is not None and checkpoint.refused is not None:
        raise checkpoint.refused
    if checkpoint is None or checkpoint.kind not in ("safetensors", "adapter") or checkpoint.missing:
        missing = f": it lacks {', '.join(checkpoint.missing)}" if checkpoint and checkpoint.missing else ""
        raise UserError(
            f"{folder} is not a complete export{missing}",
            why="there is nothing to verify",
            fix="export it (again): accel-fsdp export SRC OUT",
        )
    open_checkpoint.read(checkpoint)  # the index and the files agree
    paths = [path for path in sorted(folder.iterdir()) if path.suffix == file_names.SAFETENSORS]
    headers = {path.name: safetensors_header.read(path) for path in paths}
    tensors = {name: Written(t.dtype, t.shape, file, "") for file, of in headers.items() for name, t in of.items()}
    checks = ("all files there and whole; no report to compare hashes with",)
    return ExportReport(folder.name, checkpoint.kind, tensors, checks)
