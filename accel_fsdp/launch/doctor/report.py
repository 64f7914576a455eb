"""The doctor's report: for people, for programs, and for a bug report, where nothing private may appear."""

import getpass
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from accel_fsdp import console
from accel_fsdp.launch.doctor.facts import Facts
from accel_fsdp.launch.doctor.network_tests import NetworkResults
from accel_fsdp.launch.doctor.rows import Row, Verdict
from accel_fsdp.units import counted, kib_or_mib, per_second

COLOURS: dict[Verdict, str] = {"ok": "", "unknown": "cyan", "warning": "yellow", "error": "red"}
VERDICT_WIDTH, SUBJECT_WIDTH = 9, 14
COLLECTIVE_TITLES = ("collective", "size", "time", "bus bandwidth")
PUBLIC_PATHS = ("/dev/shm", "/etc/hosts")
TOKEN = re.compile(r"\b(?:hf|gh[a-z]|sk|xox[a-z]|AKIA|glpat|wandb)[_-]?\w{8,}|\b(?=\w*\d)\w{24,}\b")
MAIL = re.compile(r"\b[\w.+-]+@[\w.-]+")
URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s,;'\"]+", re.IGNORECASE)
PATH = re.compile(r"(?<![\w.])(?:~|\.{1,2})?(?:/[\w.@%+=~-]+)+/?|\b[A-Za-z]:\\\S+")
DISTINCT = re.compile(r"[\d.-]")
PUBLIC_VALUES = re.compile(r"[\d,.:-]{0,12}|(?:\^|=)?(?:eth|ib|ens?|bond)\w{0,6}|lo|[a-z_]{1,12}", re.IGNORECASE)
"""Values of variables that are not private: numbers, switches, levels, interfaces. Longer words may be names."""
IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}(?:[0-9a-f]{1,4}|(?<=:))(?![\w:])", re.IGNORECASE)


@dataclass
class Examination:
    """The results of the examination on one of the machines."""

    machine: int
    machines: int
    rows: list[Row] = field(default_factory=list)
    results: NetworkResults = field(default_factory=NetworkResults)
    healthy: bool = True
    has_judged: bool = False
    """Whether this is machine 0 and it has judged all machines that connected."""

    def by_machine(self) -> Iterator[tuple[str, list[Row]]]:
        for number in sorted(self.results.facts):
            if rows := [row for row in self.rows if row.machine == number]:
                yield f"machine {number} ({self.results.facts[number].name})", rows
        if rows := [row for row in self.rows if row.machine is None]:
            yield "the job", rows


def as_json(examination: Examination) -> str:
    content: dict[str, Any] = {
        "healthy": examination.healthy,
        "machine": examination.machine,
        "machines": examination.machines,
        "rows": [asdict(row) for row in examination.rows],
        "facts": {number: asdict(facts) for number, facts in examination.results.facts.items()},
        "missing": examination.results.missing,
        "pairs": [asdict(pair) for pair in examination.results.pairs],
        "collectives": [asdict(result) for result in examination.results.collectives],
    }
    return json.dumps(content, indent=2)


def show(examination: Examination) -> None:
    """Prints the report: one line for each passed check, and the cause and fix of each problem."""
    for heading, rows in examination.by_machine():
        console.put(heading, style="bold")
        for row in rows:
            if examination.machine and row.verdict == "ok":  # machine 0 shows those
                continue
            line = f"  {row.verdict:{VERDICT_WIDTH}}{row.subject:{SUBJECT_WIDTH}} {row.what}"
            console.put(line, style=COLOURS[row.verdict])
            for word, text in (("why", row.why), ("fix", row.fix)):
                if text:
                    console.put(f"{' ' * (VERDICT_WIDTH + 2)}{word}: {text}")
    if table := list(_table(examination.results)):
        console.show_table(COLLECTIVE_TITLES, table, [""] * len(table))
    console.say(summary(examination))


def _table(results: NetworkResults) -> Iterator[list[str]]:
    for result in results.collectives:
        seconds = f"{result.seconds * 1e3:,.3f} ms"
        yield [result.collective, kib_or_mib(result.size_bytes), seconds, per_second(result.bytes_per_second)]


def summary(examination: Examination) -> str:
    counts = {kind: sum(row.verdict == kind for row in examination.rows) for kind in ("error", "warning")}
    words = [counted(number, kind) for kind, number in counts.items() if number]
    text = ", ".join(["healthy" if examination.healthy else "not healthy", *words])
    return text if examination.machine == 0 else f"{text}; machine 0 shows the whole report"


def for_bug_report(examination: Examination) -> str:
    """Markdown without paths, tokens, addresses and names of users and hosts; machines keep their numbers."""
    lines = ["### accel-fsdp doctor", "", summary(examination), ""]
    for number, facts in sorted(examination.results.facts.items()):
        versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
        lines += [f"- machine {number}: {facts.system}, Python {facts.python}, {versions}"]
    lines += ["", "| verdict | machine | subject | what | why |", "|---|---|---|---|---|"]
    for row in examination.rows:
        where = "" if row.machine is None else str(row.machine)
        cells = (row.verdict, where, row.subject, row.what, row.why)
        public = (without_values(" ".join(cell.split()), examination.results.facts).replace("|", "/") for cell in cells)
        lines.append(f"| {' | '.join(public)} |")
    if examination.results.collectives:
        titles = ["", f"| {' | '.join(COLLECTIVE_TITLES)} |", "|---|---|---|---|"]
        lines += [*titles, *(f"| {' | '.join(cells)} |" for cells in _table(examination.results))]
    return without_private("\n".join(lines), examination.results.facts)


def without_values(text: str, facts: dict[int, Facts]) -> str:
    """A text in which the values of variables are hidden, unless they are numbers or their libraries' own words."""
    values = {(name, value) for machine in facts.values() for name, value in machine.variables.items()}
    for name, value in sorted(values, key=lambda pair: -len(pair[1])):
        if not PUBLIC_VALUES.fullmatch(value):
            text = text.replace(f"{name}={' '.join(value.split())}", f"{name}=<set>")
    return text


def without_private(text: str, facts: dict[int, Facts]) -> str:
    """A text with placeholders for names and locations."""
    text = MAIL.sub("<user>", URL.sub("<url>", text))
    for number, machine in sorted(facts.items(), key=lambda item: -len(item[1].name)):
        for name in {machine.name, machine.name.partition(".")[0]} - {""}:
            context = r"" if DISTINCT.search(name) else r"(?<=\| )(?=\S+ is )"  # else a host called torch hides torch
            text = re.sub(rf"{context}(?<![\w-]){re.escape(name)}(?![\w-])", f"<machine {number}>", text)
        addresses = {address for own in machine.addresses.values() for address in own} | set(machine.name_addresses)
        for address in sorted(addresses, key=len):
            text = re.sub(rf"(?<![\w.:]){re.escape(address)}(?![\w.:]*\d)", "<address>", text)
    text = PATH.sub(lambda match: match[0] if match[0] in PUBLIC_PATHS else "<path>", text)
    text = IPV6.sub("<address>", IPV4.sub("<address>", text))
    text = TOKEN.sub("<token>", text)
    for user in {_user()} - {"", "root"}:
        text = re.sub(rf"\b{re.escape(user)}\b", "<user>", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
