"""The rows of the doctor's report, one for each check."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from accel_fsdp.errors import UserError

Verdict = Literal["ok", "unknown", "warning", "error"]


@dataclass(frozen=True)
class Row:
    """The result `what` of a check of `subject`; for a problem also `why` it matters, and the `fix` to type.

    `machine` is the checked machine, None for a check between several.
    """

    subject: str
    verdict: Verdict
    what: str
    why: str = ""
    fix: str = ""
    machine: int | None = None


def of_error(subject: str, error: UserError) -> Row:
    return Row(subject, "error", error.what, error.why, error.fix)


def is_healthy(rows: Iterable[Row]) -> bool:
    """Whether a job could run: warnings only make it slower or less safe."""
    return all(row.verdict != "error" for row in rows)
