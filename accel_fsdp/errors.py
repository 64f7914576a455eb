"""The one error that users see: what is wrong, why it matters, what to type next.

Everything else that escapes is a bug in accel-fsdp and keeps its traceback.
"""

import difflib
import os
import sys
import time
from collections.abc import Callable, Iterable

LET_RANK_ZERO_SPEAK_SECONDS = 3.0


class UserError(Exception):
    """Something the user can put right.

    `what` names the thing that is wrong (with its file, line or key), `why` the consequence, `fix` what to type next.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(what)

    def __str__(self) -> str:
        return f"error: {self.what}\n  why: {self.why}\n  fix: {self.fix}"


class UsageError(UserError):
    """A flag with a value it can't have."""

    exit_code = 2


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ' Did you mean X?' for the nearest known name, else the empty string."""
    near = nearest(name, known)
    return f" Did you mean {near}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that `name` was probably meant to be, else the empty string."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[near[0]] if near else ""


def guard(main: Callable[[], None], interrupted: str = "interrupted") -> int:
    """Runs `main` and returns its exit code; a `UserError` becomes its three lines on stderr.

    Ranks usually fail alike, so the other ranks of a node wait for rank 0's message: the launcher ends them once rank 0
    has failed, and a rank that is still alive afterwards failed alone and says so.
    """
    try:
        main()
    except UserError as error:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank != 0:
            time.sleep(LET_RANK_ZERO_SPEAK_SECONDS)
            print(f"[rank {os.environ.get('RANK', local_rank)}]", end=" ", file=sys.stderr)
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"\n{interrupted}", file=sys.stderr)
        return 130
    return 0
