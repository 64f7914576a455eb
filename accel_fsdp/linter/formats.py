"""Prints findings: as text for people, as JSON, as annotations of GitHub Actions, or as SARIF for code scanning."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from accel_fsdp import __version__, console
from accel_fsdp.config import yaml_file
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.linter.flags import Format, LintOptions
from accel_fsdp.linter.rules import RULES, Finding, Severity
from accel_fsdp.units import counted

COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "note": "cyan"}
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
UNREADABLE = "unreadable"
"""The code of a file that can't be linted, in the formats for programs."""
WORKSPACE = "GITHUB_WORKSPACE"
"""The variable that names the repository's folder in a job of GitHub."""
UNREADABLE_RULE = (UNREADABLE, "error", "A file can't be read.", "A file, or an input of the check, can't be read.")
Read: TypeAlias = Mapping[Path, list[Finding]]
"""The findings per readable file."""
Unread: TypeAlias = Mapping[str, UserError]
"""The errors of the other files, by name; of inputs that all files share the name is empty."""


def format_of(options: LintOptions) -> Format:
    if options.json and options.format not in (None, "json"):
        raise UsageError(
            f"--json and --format {options.format}",
            why="--json is short for --format json, and stdout takes one format",
            fix=f"accel-fsdp check --format {options.format} FILE.yaml",
        )
    return "json" if options.json else options.format or "text"


def show(read: Read, unread: Unread, output: Format) -> None:
    if output == "text":
        for path, findings in read.items():
            show_text(path, findings)
        for error in unread.values():
            console.say(str(error), lines=True)
        return
    rows = [(str(path), finding) for path, findings in read.items() for finding in findings]
    rows += [(name, _unreadable(name, error)) for name, error in unread.items()]
    if output == "github":
        for name, finding in rows:
            console.put(annotation(name, finding), lines=True)
        for path, findings in read.items():
            console.say(f"{path}: {summary(findings)}")
    else:
        content = [_as_json(*row) for row in rows] if output == "json" else sarif(rows)
        console.put(json.dumps(content, indent=2), lines=True)


def _unreadable(name: str, error: UserError) -> Finding:
    """The error as a finding, at the line and column that its text begins with."""
    place = re.match(rf"{re.escape(name)}:(\d+)(?::(\d+))?: ", error.what)
    line, column = (int(number) if number else None for number in place.groups()) if place else (None, None)
    what = error.what[place.end() :] if place else error.what
    return Finding("", what, error.why, error.fix, code=UNREADABLE, line=line, column=column)


def show_text(path: Path, findings: list[Finding], print_row: Callable[..., None] = console.put) -> None:
    for finding in findings:
        place = f"{path}:{finding.line}" if finding.line else str(path)
        print_row(f"{place}: {finding.severity} {finding.code}: {finding.what}", style=COLOURS[finding.severity])
        print_row(f"  why: {finding.why}")
        print_row(f"  fix: {_fix(finding)}")
    console.say(f"{path}: {summary(findings)}")


def summary(findings: list[Finding]) -> str:
    """The number of findings of each severity; "clean" if none needs a change."""
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in COLOURS}
    words = [counted(number, kind) for kind, number in counts.items() if number]
    serious = counts["error"] or counts["warning"]
    return ", ".join(words if serious else ["clean", *words])


def _as_json(name: str, finding: Finding) -> dict[str, Any]:
    row = asdict(finding)
    fixable = bool(row.pop("edits"))
    return {"file": name, **row, "fixable": fixable}


def annotation(name: str, finding: Finding) -> str:
    """A workflow command, which GitHub shows beside the line of a pull request."""
    file = _relative(name).as_posix() if _is_file(name) else ""
    properties = {"file": file, "line": finding.line, "col": finding.column, "title": finding.code}
    words = ",".join(f"{key}={_escaped(str(value), ',:')}" for key, value in properties.items() if value)
    kind = "notice" if finding.severity == "note" else finding.severity
    return f"::{kind} {words}::{_escaped(_message(finding))}"


def _escaped(text: str, more: str = "") -> str:
    """Percent-encodes what ends a workflow command, and `more`, which ends a property; % first, as it begins a code."""
    for letter in f"%\r\n{more}":
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


def _message(finding: Finding) -> str:
    return f"{finding.what}\nwhy: {finding.why}\nfix: {_fix(finding)}"


def _fix(finding: Finding) -> str:
    return f"{finding.fix}{' (--fix does it)' if finding.edits else ''}"


def sarif(rows: Iterable[tuple[str, Finding]]) -> dict[str, Any]:
    """A SARIF log of one run, with all rules and these findings."""
    described = [(rule.code, rule.severity, rule.texts[0][0], rule.explanation) for rule in RULES.values()]
    rules: list[dict[str, Any]] = [
        {
            "id": code,
            "shortDescription": {"text": title},
            "fullDescription": {"text": explanation},
            "help": {"text": explanation},
            "defaultConfiguration": {"level": severity},
        }
        for code, severity, title, explanation in (*described, UNREADABLE_RULE)
    ]
    indices = {rule["id"]: index for index, rule in enumerate(rules)}
    driver = {"name": "accel-fsdp", "version": __version__, "rules": rules}
    results = [{**_result(name, finding), "ruleIndex": indices[finding.code]} for name, finding in rows]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(name: str, finding: Finding) -> dict[str, Any]:
    result = {"ruleId": finding.code, "level": finding.severity, "message": {"text": _message(finding)}}
    if not _is_file(name):
        return result
    column = {"startColumn": finding.column} if finding.column else {}
    region = {"startLine": finding.line or 1, **column}  # GitHub requires one
    path = _relative(name)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    place = {"artifactLocation": {"uri": uri}, "region": region}
    return {**result, "locations": [{"physicalLocation": place}]}


def _is_file(name: str) -> bool:
    return name not in ("", yaml_file.STDIN)


def _relative(name: str) -> Path:
    """The path from the repository's folder, which GitHub names, or the working one; unchanged for a file elsewhere."""
    path, root = Path(os.path.abspath(name)), Path(os.environ.get(WORKSPACE) or Path.cwd())
    return path.relative_to(root) if path.is_relative_to(root) else Path(name)
