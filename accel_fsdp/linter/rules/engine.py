"""The linter's engine: rules as rows of a table, the findings they make, and repairs.

The other modules of this package are the rows. Pure: no torch, no files, no printing. Lines and edits go through
ruamel.yaml, which keeps comments.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from accel_fsdp.config import Edit, short_name
from accel_fsdp.job import clashes, combinations
from accel_fsdp.linter.rules.subject import Subject

Severity = Literal["error", "warning", "note"]
Each: TypeAlias = Iterator[Mapping[str, Any]]
Cases: TypeAlias = bool | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None
"""What a row's `when` returns: whether the row applies, or the words of each case in which it does.

The words fill the row's texts. `edits` and `severity` replace those of the row; `line` and `column` say where it is.
"""


@dataclass(frozen=True)
class Finding:
    """One problem.

    `key` is a dotted path, `line` and `column` count from 1; `edits` are the repair, if it is unambiguous.
    """

    key: str
    what: str
    why: str
    fix: str
    edits: tuple[Edit, ...] = ()
    code: str = ""
    severity: Severity = "error"
    line: int | None = None
    column: int | None = None


@dataclass(frozen=True)
class Row:
    """One case of a rule: its texts, which the docs and `--explain` show too, with {words} that a case fills.

    `seen` names what shows the fault: a public issue, or the library that a test runs; and the rows of
    `tests/known_issues.py` (P01) that the rule sees. `of` are names of the table of combinations, whose texts it has;
    `about` stands for a `what` that other modules write.
    """

    code: str
    severity: Severity
    key: str
    what: str
    why: str
    fix: str
    when: Callable[[Subject], Cases]
    edit: tuple[Edit, ...] = ()
    seen: str = ""
    of: tuple[str, ...] = ()
    about: str = ""

    def findings(self, subject: Subject) -> list[Finding]:
        cases = self.when(subject)
        if isinstance(cases, bool | None):
            cases = [{}] if cases else []
        return [self._finding(case) for case in ([cases] if isinstance(cases, Mapping) else cases)]

    def _finding(self, case: Mapping[str, Any]) -> Finding:
        key, what, why, fix = (text.format_map(case) for text in (self.key, self.what, self.why, self.fix))
        edits, severity = case.get("edits", self.edit), case.get("severity") or self.severity
        return Finding(key, what, why, fix, edits, self.code, severity, case.get("line"), case.get("column"))

    @property
    def texts(self) -> list[tuple[str, str, str]]:
        """What, why and fix for readers, empty where each case has its own; those of the combinations it is about."""
        if self.of:
            return [(clash.what, clash.why, clash.fix) for clash in combinations.TABLE if clash.name in self.of]
        return [(self.about or _shown(self.what), _shown(self.why), _shown(self.fix))]


def _shown(template: str) -> str:
    """A template for readers: a case's words in capitals, without those that only end a word or a sentence."""
    if re.fullmatch(r"\{\w+\}", template):
        return ""
    return re.sub(r"\{(\w+)\}", lambda word: word[1].upper(), re.sub(r"(?<=[a-zA-Z}.])\{\w+\}", "", template))


def combined(
    code: str,
    severity: Severity,
    key: str,
    *names: str,
    seen: str,
    only: Callable[[Subject], bool] = lambda subject: True,
    edit: tuple[Edit, ...] = (),
) -> Row:
    """A row about the rows with these names in the table of combinations, for `only` some jobs."""

    def when(subject: Subject) -> Cases:
        engine_key = "fsdp_config.fsdp_version" if subject.is_fsdp else "distributed_type"
        return [
            {"what": clash.what, "why": clash.why, "fix": clash.fix, "engine": engine_key}
            for clash in clashes(subject.job)
            if clash.name in names and not (clash.mended and subject.uses_sft) and only(subject)
        ]

    return Row(code, severity, key, "{what}", "{why}", "{fix}", when, edit, seen=seen, of=names)


@dataclass(frozen=True)
class Rule:
    """The rows of one code, with the severity of the first."""

    code: str
    severity: Severity
    rows: tuple[Row, ...]

    @property
    def seen(self) -> list[str]:
        return [word for row in self.rows for word in row.seen.split()]

    @property
    def texts(self) -> list[tuple[str, str, str]]:
        return [text for row in self.rows for text in row.texts]

    @property
    def notes(self) -> list[str]:
        """What the rows' functions say of their cases."""
        notes = [row.when.__doc__ or "" for row in self.rows]
        return [" ".join(note.split()) for note in dict.fromkeys(notes) if note]

    @property
    def explanation(self) -> str:
        """The texts of all cases, and what is to be said of them."""
        lines = [(what, why and f"  why: {why}", fix and f"  fix: {fix}") for what, why, fix in self.texts]
        return "\n".join([*(line for text in lines for line in text if line), *self.notes])

    def findings(self, subject: Subject) -> list[Finding]:
        return [finding for row in self.rows for finding in row.findings(subject)]


RULES: dict[str, Rule] = {}
"""The rules in the order of their codes."""


def add(*rows: Row) -> None:
    """Adds rows to the table."""
    for row in sorted(rows, key=lambda row: row.code):
        first = RULES.get(row.code, Rule(row.code, row.severity, ()))
        RULES[row.code] = replace(first, rows=(*first.rows, row))


MISSPELT = ("AF102", "AF103", "AF104", "AF105")
"""The rules about names that nothing reads: those of the top level first, as they say what the sections are."""
FIRST = (*MISSPELT, "AF101", "AF203")
"""The rules whose corrections the others see: after the names, `distributed_type`, which decides what keys mean."""


def run(subject: Subject, rules: Mapping[str, Rule] = RULES) -> list[Finding]:
    """All findings of all rules, in the order of their codes.

    An obvious misspelling is one finding: the following rules see the corrected file. For another tool's file that is
    the only finding.
    """
    if subject.other_tool and "AF112" in rules:
        rules = {"AF112": rules["AF112"]}
    subjects = dict.fromkeys(rules, subject)
    for index, code in enumerate(FIRST if len(rules) > 1 else ()):
        subject = _corrected(subject, (edit for finding in RULES[code].findings(subject) for edit in finding.edits))
        subjects |= {later: subject for later in rules if later not in FIRST[: index + 1]}
    return [
        finding if all(_fits(subjects[code], edit) for edit in finding.edits) else replace(finding, edits=())
        for code, rule in rules.items()
        for finding in rule.findings(subjects[code])
    ]


def _corrected(subject: Subject, edits: Iterable[Edit]) -> Subject:
    """The subject with misspelt keys renamed, and with the engine that these edits give it."""
    values = dict(subject.values)
    for edit in edits:
        mapping = values.get(edit.section) if edit.section else values
        if edit.key == "distributed_type" and not edit.new_key:
            values[edit.key] = edit.value
        elif edit.new_key and isinstance(mapping, Mapping):
            names = (edit.key, short_name(edit.section, edit.key))
            renamed = {edit.new_key if key in names else key: value for key, value in mapping.items()}
            values = {**values, edit.section: renamed} if edit.section else renamed
    return replace(subject, values=values) if values != subject.values else subject


def _fits(subject: Subject, edit: Edit) -> bool:
    """Whether there is a mapping to edit, or none yet (AF106 reports a value that isn't a mapping)."""
    if not edit.section and edit.new_key:
        return edit.new_key not in subject.values
    return not edit.section or isinstance(subject.values.get(edit.section) or {}, Mapping)


def locate(findings: list[Finding], document: Any) -> list[Finding]:
    """Adds lines and columns from a ruamel.yaml document, which may spell a name differently from the findings."""
    misspelt = [edit for finding in findings if finding.code in MISSPELT for edit in finding.edits]
    spelt = {(edit.section, edit.new_key): edit.key for edit in misspelt}
    return [finding if finding.line else _at_key(finding, document, spelt) for finding in findings]


def _at_key(finding: Finding, document: Any, spelt: Mapping[tuple[str, str], str]) -> Finding:
    section, _, key = finding.key.rpartition(".")
    place = section if section in document else spelt.get(("", section), section)
    mapping = document.get(place) if section else document
    candidates = [(mapping, name) for name in (key, short_name(section, key), spelt.get((section, key)))]
    candidates.append((document, place))
    for parent, name in candidates:
        if name and hasattr(parent, "lc") and name in parent:
            line, column = parent.lc.key(name)
            return replace(finding, line=line + 1, column=column + 1)
    return finding
