"""The doctor's report: for people, and for a bug report, where nothing private may appear."""

import getpass
import re
from collections.abc import Mapping

from accel_fsdp import console
from accel_fsdp.launch.doctor.facts import Facts
from accel_fsdp.launch.doctor.machine import Row, Verdict
from accel_fsdp.units import counted

COLOURS: dict[Verdict, str] = {"ok": "", "unknown": "cyan", "warning": "yellow", "error": "red"}
VERDICT_WIDTH, SUBJECT_WIDTH = 9, 14
PUBLIC_PATHS = ("/dev/shm", "/etc/hosts")
TOKEN = re.compile(r"\b(?:hf|gh[a-z]|sk|xox[a-z]|AKIA|glpat|wandb)[_-]?\w{8,}|\b(?=\w*\d)\w{24,}\b")
MAIL = re.compile(r"\b[\w.+-]+@[\w.-]+")
URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s,;'\"]+", re.IGNORECASE)
PATH = re.compile(r"(?<![\w.])(?:~|\.{1,2})?(?:/[\w.@%+=~-]+)+/?|\b[A-Za-z]:\\\S+")
PUBLIC_VALUES = re.compile(r"[\d,.:-]{0,12}|(?:\^|=)?(?:eth|ib|ens?|bond)\w{0,6}|lo|[a-z_]{1,12}", re.IGNORECASE)
"""Values of variables that are not private: numbers, switches, levels, interfaces. Longer words may be names."""
IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}(?:[0-9a-f]{1,4}|(?<=:))(?![\w:])", re.IGNORECASE)


def show(rows: list[Row]) -> None:
    """Prints the report: one line for each passed check, and the cause and fix of each problem."""
    for row in rows:
        line = f"{row.verdict:{VERDICT_WIDTH}}{row.subject:{SUBJECT_WIDTH}} {row.what}"
        console.put(line, style=COLOURS[row.verdict])
        for word, text in (("why", row.why), ("fix", row.fix)):
            if text:
                console.put(f"{' ' * VERDICT_WIDTH}{word}: {text}")
    console.say(summary(rows))


def summary(rows: list[Row]) -> str:
    """Such as `2 errors, 1 warning`; `healthy` only if there are none."""
    counts = {kind: sum(row.verdict == kind for row in rows) for kind in ("error", "warning")}
    return ", ".join(counted(number, kind) for kind, number in counts.items() if number) or "healthy"


def for_bug_report(rows: list[Row], facts: Facts) -> str:
    """Markdown without paths, tokens, addresses and names of users and hosts."""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    lines = ["### accel-fsdp doctor", "", summary(rows), "", f"- {facts.system}, {versions}"]
    lines += ["", "| verdict | subject | what | why |", "|---|---|---|---|"]
    for row in rows:
        cells = (" ".join(cell.split()) for cell in (row.verdict, row.subject, row.what, row.why))
        lines.append(f"| {' | '.join(_without_values(cell, facts.variables).replace('|', '/') for cell in cells)} |")
    return without_private("\n".join(lines), facts.name)


def _without_values(text: str, variables: Mapping[str, str]) -> str:
    """A text in which the values of variables are hidden, unless they are numbers or their libraries' own words."""
    for name, value in sorted(variables.items(), key=lambda pair: -len(pair[1])):
        if not PUBLIC_VALUES.fullmatch(value):
            text = text.replace(f"{name}={' '.join(value.split())}", f"{name}=<set>")
    return text


def without_private(text: str, host: str) -> str:
    """A text with placeholders for names and locations."""
    text = MAIL.sub("<user>", URL.sub("<url>", text))
    text = PATH.sub(lambda match: match[0] if match[0] in PUBLIC_PATHS else "<path>", text)
    text = TOKEN.sub("<token>", IPV6.sub("<address>", IPV4.sub("<address>", text)))
    for name, placeholder in ((host, "<host>"), (host.partition(".")[0], "<host>"), (_user(), "<user>")):
        if name not in ("", "root"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", placeholder, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
