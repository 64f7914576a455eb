"""The command `accel-fsdp check`: read, run the rules, repair, report."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_fsdp import atomic_files, console
from accel_fsdp.config import ReadConfig, apply, yaml_file
from accel_fsdp.errors import UsageError, UserError, did_you_mean
from accel_fsdp.linter import formats
from accel_fsdp.linter.flags import CheckCommand, LintOptions
from accel_fsdp.linter.inputs import read_given, read_launch, read_subject
from accel_fsdp.linter.rules import RULES, Finding, Subject, locate, run

REPAIR_ROUNDS = 6
NAMES = frozenset({"AF102", "AF103", "AF104", "AF105", "AF108"})
"""The rules that repair the names of keys."""
OF_SCRIPTS = "AF9"
"""The beginning of the codes of rules about training scripts."""
SUFFIXES = (".yaml", ".yml")
OURS = re.compile(r"""^\{?["']?(distributed_type|compute_environment|(fsdp|deepspeed)_config)["']?\s*:""", re.MULTILINE)
"""What tells an Accelerate YAML among the files of a folder."""
IGNORED = re.compile(r"#\s*accel-fsdp:\s*ignore\s+(AF\d{3}(?:[\s,]+AF\d{3})*)", re.IGNORECASE)
"""The comment that leaves out rules at its line, or at the next one if it has a line for itself."""


def with_folders(options: CheckCommand) -> CheckCommand:
    """The options with the Accelerate YAMLs in and below each folder in place of the folder."""
    return replace(options, files=tuple(file for path in options.files for file in _files_of(path)))


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [file for file in sorted(path.rglob("[!.]*")) if file.suffix in SUFFIXES and file.is_file()]
    files = [file for file in files if OURS.search(yaml_file.read_text(file, "it can't be checked", "leave it out"))]
    if not files:
        raise UsageError(
            f"no Accelerate YAML in {path}",
            why="there is nothing to check: none of its files has distributed_type",
            fix="accel-fsdp check FILE.yaml",
        )
    return files


def lint_all(options: CheckCommand) -> int:
    """Lints each file and prints the findings; returns the exit code.

    The code is 2 if a file can't be read, although the others are still linted; else 1 if a file has errors (or
    warnings, if strict).
    """
    name, stdin = options.stdin_filename, Path(yaml_file.STDIN)
    paths = options.files or (() if name is None else (stdin,))
    if not paths:
        raise UsageError("no file given", why="there is nothing to check", fix="accel-fsdp check FILE.yaml")
    if options.fix and stdin in paths:
        raise UsageError("check --fix -", why="stdin can't be repaired", fix="accel-fsdp check --fix FILE")
    if name is not None and paths != (stdin,):
        raise UsageError(
            f"--stdin-filename {name} with files",
            why="it names what is read from stdin, and files are checked by their own names",
            fix=f"accel-fsdp check --stdin-filename {name} -",
        )
    output = formats.format_of(options)
    by_file, unread = _lint_each(paths, options)
    if name is not None:
        by_file = {name: by_file[stdin]} if by_file else {}
        unread = {str(name) if path else "": _renamed(error, name) for path, error in unread.items()}
    formats.show(by_file, unread, output)
    if unread:
        return UsageError.exit_code
    counted = {"error", "warning"} if options.strict else {"error"}
    return int(any(finding.severity in counted for findings in by_file.values() for finding in findings))


def _renamed(error: UserError, name: Path) -> UserError:
    """The error of stdin, with the name that it was given."""
    what = re.sub(r"(?<!\S)-(?=[:\s])", lambda _: str(name), error.what, count=1)
    return type(error)(what, why=error.why, fix=error.fix)


def _lint_each(paths: tuple[Path, ...], options: LintOptions) -> tuple[dict[Path, list[Finding]], dict[str, UserError]]:
    """Returns the findings per readable file, and the errors of the other files or ("") of the shared inputs."""
    by_file: dict[Path, list[Finding]] = {}
    unread: dict[str, UserError] = {}
    try:
        inputs = read_given(options)
    except UserError as error:
        return {}, {"": error}
    for path in paths:
        try:
            by_file[path] = lint(path, options, inputs)
        except UserError as error:
            unread[str(path)] = error
    return by_file, unread


def lint(
    path: Path,
    options: LintOptions,
    given: Subject | None = None,
    read: ReadConfig | None = None,
    completes: bool = True,
) -> list[Finding]:
    """The findings of one file, in the order of its lines; with `options.fix` those left after the repair.

    `given` (the inputs that the options name) and `read` (the file) are passed if they have been read already; the
    file's header `completes` the arguments.
    """
    given = given or read_given(options)
    ignored = _ignored_codes(options.ignore)
    if options.fix:
        _repair(path, options, given, ignored)
    subject, document = read_subject(path, options, given, read, completes)
    findings = _findings(subject, document, ignored)
    if subject.doubled:  # an edit of one of the two keys would leave the other
        findings = [replace(finding, edits=()) for finding in findings]
    return sorted(findings, key=lambda finding: (finding.line or 0, finding.code))


def _findings(subject: Subject, document: Any, ignored: set[str]) -> list[Finding]:
    """The findings with their lines, or with the flags of `accelerate launch` that replace the file's values."""
    flags = {key: f"--{key}" for key in subject.launcher}
    findings = _kept(locate(run(subject), document), subject.source, ignored)
    return [_with_source(finding, flags.get(finding.key.rpartition(".")[2], "")) for finding in findings]


def _ignored_codes(text: str | None) -> set[str]:
    codes = {code.upper() for code in re.split(r"[\s,]+", text or "") if code}
    for code in sorted(codes - RULES.keys()):
        raise _no_rule(code, "--ignore leaves out rules by their codes")
    return codes


def _no_rule(code: str, why: str) -> UsageError:
    hint = did_you_mean(code, RULES)
    return UsageError(f"there is no rule {code}.{hint}", why=why, fix="accel-fsdp check --list-rules")


def _kept(findings: Iterable[Finding], source: str, ignored: set[str]) -> Iterator[Finding]:
    """The findings but for the ignored codes, and those that a comment at their line, or above it, names."""
    lines = source.splitlines()
    for finding in findings:
        line = (finding.line or 0) - 1
        above = lines[line - 1] if line > 0 and lines[line - 1].lstrip().startswith("#") else ""
        comments = [IGNORED.search(text) for text in (above, lines[line] if 0 <= line < len(lines) else "")]
        codes = {code for match in comments if match for code in re.split(r"[\s,]+", match[1].upper())}
        if finding.code not in ignored | codes:
            yield finding


def stops(
    path: Path,
    read: ReadConfig,
    script: Path,
    words: tuple[str, ...],
    unchecked: bool = False,
    sources: Mapping[str, str] = MappingProxyType({}),
    stopped: str = "not launched; --no-check launches it as it is",
) -> bool:
    """Shows the errors of a job that is about to be launched; true if there are any and `unchecked` is off.

    Errors stop the job or make it differ from the file; after them the message `stopped` is shown. Warnings about the
    script are shown too: such a job runs, but may not save a model. `sources` are the flags and variables that replace
    the file's values, by key.
    """
    findings = [
        _with_source(finding, sources.get(finding.key, ""))
        for finding in lint(path, LintOptions(), read_launch(script, words, read[0].values), read, completes=False)
    ]
    errors = [finding for finding in findings if finding.severity == "error"]
    of_script = [finding for finding in findings if finding.code.startswith(OF_SCRIPTS)]
    if errors or of_script:
        formats.show_text(path, [*errors, *of_script], console.say)
    if errors:
        console.say("not stopped by them: --no-check" if unchecked else stopped)
    return bool(errors) and not unchecked


def _with_source(finding: Finding, source: str) -> Finding:
    """The finding with the flag or variable that its value comes from, instead of a line of the file."""
    if not source:
        return finding
    if not source.startswith("--"):
        return replace(finding, what=f"{finding.what} (from {source})", line=None, column=None)
    key = finding.key.rpartition(".")[2]
    what, fix = finding.what.replace(f"{key}:", source), finding.fix.replace(key, source)
    return replace(finding, what=what, fix=fix, line=None, column=None, edits=())


def _repair(path: Path, options: LintOptions, given: Subject, ignored: set[str]) -> None:
    """Repairs until no finding has an edit left: one repair can enable the next.

    Names are repaired first, so that no rule adds a missing key beside its misspelling.
    """
    before = yaml_file.load(path, doubled=True).source
    for _ in range(REPAIR_ROUNDS):
        subject, document = read_subject(path, options, given)
        if subject.doubled:
            return
        findings = _findings(subject, document, ignored)
        names = [finding for finding in findings if finding.edits and finding.code in NAMES]
        edits = dict.fromkeys(edit for finding in names or findings for edit in finding.edits)
        if not edits:
            break
        apply(document, edits)
        atomic_files.write_text(path, yaml_file.dump(document))
    console.show_diff(before, yaml_file.load(path).source, str(path))


def show_rules(code: str | None) -> int:
    """Lists all rules, or explains one."""
    if code is None:
        for rule in RULES.values():
            console.put(f"{rule.code} {rule.severity:7} {rule.texts[0][0]}")
        return 0
    if code.upper() not in RULES:
        raise _no_rule(code, "it can't be explained")
    rule = RULES[code.upper()]
    console.put(f"{rule.code} ({rule.severity})\n{rule.explanation}", lines=True)
    return 0
