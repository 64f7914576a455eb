"""Error messages and their usual causes: `doctor --explain`."""

import re
from collections.abc import Iterator

from accel_fsdp.launch.doctor.machine_errors import MACHINE_ERRORS
from accel_fsdp.launch.doctor.rows import KnownError
from accel_fsdp.launch.doctor.script_errors import SCRIPT_ERRORS

KNOWN = dict(sorted((MACHINE_ERRORS | SCRIPT_ERRORS).items(), key=lambda item: bool(item[1].means)))
"""Rows by their names. A message that names its own cause comes before one that other errors bring about."""
HARMLESS = re.compile(
    r"^(?!.*\bwandb\.errors\.).*wandb|\(errno: 97 "
    r"|has failed to (shutdown|send a keep-alive heartbeat to) the rendezvous"
)
"""Lines of a tracker's network, which goes on without it, torch's complaint where IPv6 is off, and torchrun's end."""
CHATTER = re.compile(
    r"NCCL INFO|^(\[\w+\]:)?\s*\[W(\d| socket)|(?<!=)\bINFO\b|Warning\b"
    r"|HEAD https?:|Retrying in \d|load from local cache"
)
"""Lines that don't say that something failed for good. They are read where a text has no others."""
MOST_CHARACTERS = 2_000_000
"""The part of a log's end that is read."""
LONGEST_LINE = 4_000
"""Characters of a line that are read, half of them at each end: some patterns take quadratic time in it."""
ROOT_CAUSE = re.compile(r"\bRoot Cause( \(first observed failure\))?:\s*$")
OTHER_FAILURES = re.compile(r"\bFailures:\s*$")
END_OF_REPORT = re.compile(r"={9}|\*{9}")
PYTHONS_ERROR = re.compile(
    r"^(\[\w+\]:)?\s*(Key|Index|Value|Type|Name|Attribute|Assertion|ZeroDivision|UnboundLocal|FileNotFound|Permission"
    r"|NotImplemented|Import|ModuleNotFound|UnicodeDecode|json\.decoder\.JSONDecode)(Error|Warning)?\b[^\n]*$",
    re.MULTILINE,
)
"""The last line of a traceback that ended a rank by itself; the others wait for that one, or lose it."""
FIRST_FAILURE = re.compile(r"failed \(exitcode: -?\d+\) local_rank")
"""torchrun's line on the rank that failed first."""


def find(message: str) -> str | None:
    """The name of the first row that matches the most specific part of the message; None if no row does."""
    message = "\n".join(map(_shortened, message[-MOST_CHARACTERS:].splitlines()))
    failed = PYTHONS_ERROR.search(message)
    rows = {name: row for name, row in KNOWN.items() if not (failed and row.follows)}
    return next((name for text in _texts(message) for name, row in rows.items() if _matches(row, text)), None)


def _shortened(line: str) -> str:
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


def _matches(row: KnownError, text: str) -> bool:
    if row.unless and re.search(row.unless, text, re.IGNORECASE):
        return False
    return bool(re.search(row.pattern, text, re.IGNORECASE | re.MULTILINE))


def _texts(message: str) -> Iterator[str]:
    """Yields torchrun's report of the first failed rank, then the other lines: torchrun itself ended those ranks."""
    lines = [line for line in message.splitlines() if not HARMLESS.search(line)]
    first, rest = _by_report(lines) if any(map(ROOT_CAUSE.search, lines)) else ([], lines)
    yield "\n".join([*first, *filter(FIRST_FAILURE.search, rest)])
    yield "\n".join([line for line in rest if not CHATTER.search(line)] or rest)


def _by_report(lines: list[str]) -> tuple[list[str], list[str]]:
    """The root cause of torchrun's report, and the lines outside of the report."""
    root: list[str] = []
    rest: list[str] = []
    others: list[str] = []
    part = rest
    for line in lines:
        if ROOT_CAUSE.search(line):
            part = root
        elif OTHER_FAILURES.search(line):
            part = others
        elif END_OF_REPORT.search(line):
            part = rest
        part.append(line)
    return root, rest
