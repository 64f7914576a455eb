"""The steps that `--profile_steps` names."""

import re

from accel_fsdp.errors import UsageError

MOST_PROFILED = 10
"""The most steps of a profile: more would fill a disk and show nothing new."""
PROFILED = "--profile_steps 3:5 profiles the steps 3, 4 and 5, as the log counts them"


def steps_asked(text: str) -> range:
    """The steps of `--profile_steps`: `3:5` are 3, 4 and 5; `3` is step 3 alone."""
    if not (match := re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text.strip())):
        raise UsageError(f"--profile_steps {text}", why="it has to be FIRST:LAST, from 1 on", fix=PROFILED)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UsageError(f"--profile_steps {text}", why="its last step comes before the first", fix=PROFILED)
    if last - first >= MOST_PROFILED:
        raise UsageError(
            f"--profile_steps {text}",
            why=f"each step takes a file on each rank; {MOST_PROFILED} steps are the most",
            fix=PROFILED,
        )
    return range(first, last + 1)


def check_reached(steps: range, last: int) -> None:
    """Checks that a run of `last` steps trains all of `steps`."""
    if steps[-1] > last:
        raise UsageError(
            f"--profile_steps {steps.start}:{steps[-1]}",
            why=f"the run has {last:,} steps",
            fix=f"a last step up to {last:,}",
        )
