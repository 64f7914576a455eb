"""The command `accel-fsdp check`: read, run the rules, repair, report."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, console
from accel_fsdp.config import ReadConfig, yaml_file
from accel_fsdp.errors import UsageError, UserError, did_you_mean
from accel_fsdp.linter.flags import LintOptions
from accel_fsdp.linter.inputs import RuleInputs, read_given, read_launch, read_subject
from accel_fsdp.linter.rules import RULES, Finding, Rule, Severity, locate, repair, run
from accel_fsdp.units import counted

COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "note": "cyan"}
REPAIR_ROUNDS = 6
NAMES = frozenset({"AF102", "AF103", "AF104", "AF105", "AF108"})
"""The rules that mend the names of keys."""
OF_SCRIPTS = "AF9"
"""How the codes of the rules about training scripts begin."""


def lint_all(paths: tuple[Path, ...], options: LintOptions) -> int:
    """Lints each file and reports; returns the exit code.

    That is 2 when a file can't be read, which hides nothing of the others; else 1 when one has errors (or warnings, if
    strict).
    """
    if not paths:
        raise UsageError("no file given", why="there is nothing to check", fix="accel-fsdp check FILE.yaml")
    if options.fix and Path(yaml_file.STDIN) in paths:
        raise UsageError("check --fix -", why="stdin can't be repaired", fix="accel-fsdp check --fix FILE")
    found, unread = _lint_each(paths, options)
    if options.json:
        listed = [{"file": str(path), **_as_json(one)} for path, findings in found.items() for one in findings]
        listed += [{"file": name, **_as_json(_unreadable(error))} for name, error in unread.items()]
        console.put(json.dumps(listed, indent=2), lines=True)
    else:
        for path, findings in found.items():
            _show(path, findings)
    for error in () if options.json else unread.values():
        console.say(str(error), lines=True)
    if unread:
        return UsageError.exit_code
    counted = {"error", "warning"} if options.strict else {"error"}
    return int(any(one.severity in counted for findings in found.values() for one in findings))


def _lint_each(paths: tuple[Path, ...], options: LintOptions) -> tuple[dict[Path, list[Finding]], dict[str, UserError]]:
    """The findings of the files that can be read, and what is wrong with the others, or with what all are held to."""
    found: dict[Path, list[Finding]] = {}
    unread: dict[str, UserError] = {}
    try:
        given = read_given(options)
    except UserError as error:
        return {}, {"": error}
    for path in paths:
        try:
            found[path] = lint(path, options, given)
        except UserError as error:
            unread[str(path)] = error
    return found, unread


def _unreadable(error: UserError) -> Finding:
    return Finding("", error.what, error.why, error.fix, code="unreadable")


def lint(
    path: Path, options: LintOptions, given: RuleInputs | None = None, read: ReadConfig | None = None
) -> list[Finding]:
    """The findings of one file, in the order of its lines; with `options.fix` those left after the repair.

    `given` and `read` are what the options name, and the file, where they have been read already.
    """
    given = given or read_given(options)
    if options.fix:
        _repair(path, options, given)
    subject, document = read_subject(path, options, given, read)
    found = run(subject)
    if subject.doubled:  # an edit of one of the two would leave the other
        found = [replace(one, edits=()) for one in found]
    return sorted(locate(found, document), key=lambda one: (one.line or 0, one.code))


def stops(
    path: Path,
    read: ReadConfig,
    script: Path,
    words: tuple[str, ...],
    unchecked: bool = False,
    stopped: str = "not launched; --no-check launches it as it is",
) -> bool:
    """Shows the errors of a job that is about to be launched; true when there are any and nobody wants it all the same.

    `stopped` is what is said then. Errors are what ends the job or trains something else than the file says. The script
    and its arguments are looked at too, and what the rules warn of in the script is shown: the job would run, and may
    leave no model.
    """
    found = lint(path, LintOptions(), read_launch(script, words), read)
    errors = [one for one in found if one.severity == "error"]
    warned = [one for one in found if one.severity == "warning" and one.code.startswith(OF_SCRIPTS)]
    if errors or warned:
        _show(path, [*errors, *warned], console.say)
    if errors:
        console.say("not stopped by them: --no-check" if unchecked else stopped)
    return bool(errors) and not unchecked


def _repair(path: Path, options: LintOptions, given: RuleInputs) -> None:
    """Repairs until nothing more can be: one repair can make room for the next.

    Names come first: a rule that misses a key must not add it beside its misspelling.
    """
    before = yaml_file.load(path, doubled=True).source
    for _ in range(REPAIR_ROUNDS):
        subject, document = read_subject(path, options, given)
        if subject.doubled:
            return
        found = run(subject)
        names = [one for one in found if one.edits and one.code in NAMES]
        if not repair(document, names or found):
            break
        atomic_files.write_text(path, yaml_file.dump(document))
    console.show_diff(before, yaml_file.load(path).source, str(path))


def _as_json(one: Finding) -> dict[str, Any]:
    shown = asdict(one)
    fixable = bool(shown.pop("edits"))
    del shown["milder"]
    return {**shown, "fixable": fixable}


def _show(path: Path, findings: list[Finding], put: Callable[..., None] = console.put) -> None:
    for one in findings:
        place = f"{path}:{one.line}" if one.line else str(path)
        put(f"{place}: {one.severity} {one.code}: {one.what}", style=COLOURS[one.severity])
        put(f"  why: {one.why}")
        put(f"  fix: {one.fix}{' (--fix does it)' if one.edits else ''}")
    console.say(f"{path}: {summary(findings)}")


def summary(findings: list[Finding]) -> str:
    """How many findings there are of each kind; clean where nothing has to be done."""
    counts = {kind: sum(one.severity == kind for one in findings) for kind in COLOURS}
    words = [counted(number, kind) for kind, number in counts.items() if number]
    serious = counts["error"] or counts["warning"]
    return ", ".join(words if serious else ["clean", *words])


def all_rules() -> list[Rule]:
    """Every rule in the order of codes; importing their modules has registered them."""
    return [RULES[code] for code in sorted(RULES)]


def show_rules(code: str | None) -> int:
    """Lists all rules, or explains one."""
    if code is None:
        for one in all_rules():
            fixed = f" (fixed in {one.fixed_in})" if one.fixed_in else ""
            console.put(f"{one.code} {one.severity:7} {one.title}{fixed}")
        return 0
    if code.upper() not in RULES:
        raise UsageError(
            f"there is no rule {code}.{did_you_mean(code, RULES)}",
            why="it can't be explained",
            fix="accel-fsdp check --list-rules",
        )
    one = RULES[code.upper()]
    console.put(f"{one.code} ({one.severity})\n{one.explanation}", lines=True)
    return 0
