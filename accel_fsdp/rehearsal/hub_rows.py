"""Fetches the first rows of a data set on the hub, in a separate process that is killed if the network blocks.

The user's variables for the hub apply: endpoint, token, proxies, caches, and HF_HUB_OFFLINE.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from threading import Timer

from accel_fsdp.errors import UserError
from accel_fsdp.models import first_line
from accel_fsdp.rehearsal import rows
from accel_fsdp.rehearsal.job import Rehearsed

SECONDS = 20
"""Seconds that the hub may take; libraries retry for minutes."""
TOO_LATE = 124
"""The exit code of a process that got nothing from the hub in this time, as `timeout` has it."""


def fetch(launcher: Rehearsed, dataset: str, config_name: str | None, split: str, target: Path) -> str:
    """Writes the rows to the folder `target`; returns why that failed, empty on success.

    Raises:
        UserError: the data set exists, but without this configuration or split, or it can't be read.
    """
    words = [str(SECONDS), str(target), dataset, split, *([config_name] if config_name else [])]
    outcome = replace(launcher, cold=True).python("rows", __name__, words)
    if outcome.code == TOO_LATE:
        return f"the hub gave none in {SECONDS} seconds"
    if outcome.code:
        return f"the process that reads it ended with exit code {outcome.code}"
    answer = json.loads(outcome.printed.splitlines()[-1])
    if answer["error"]:
        what, why, fix = answer["error"]
        raise UserError(what, why=why, fix=fix)
    return str(answer["why"])


def main(seconds: str, target: str, dataset: str, split: str, config_name: str | None = None) -> None:
    """Runs in the separate process: writes the rows, or reports why it can't."""
    import datasets  # noqa: F401  # takes as long as the hub may, where the machine is busy

    Timer(int(seconds), os._exit, [TOO_LATE]).start()
    why, error = "", None
    try:
        rows.cut(dataset, Path(target), split, config_name=config_name, from_hub=True)
    except UserError as raised:
        cause = raised.__cause__ or raised
        if _is_gone(cause):
            why = first_line(cause)
        else:
            error = (raised.what, raised.why, raised.fix)
    except Exception as raised:  # any error of the network: rows can be made up
        why = first_line(raised)
    sys.stdout.write(json.dumps({"why": why, "error": error}) + "\n")
    sys.stdout.flush()


def _is_gone(error: BaseException) -> bool:
    """Whether the data set is missing on the hub, closed to this account, or the hub can't be reached."""
    from datasets.exceptions import DatasetNotFoundError

    is_lost = type(error) is FileNotFoundError  # not one of its subclasses, which name a missing part of the data set
    return is_lost or isinstance(error, (DatasetNotFoundError, ConnectionError))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # threads of a stream may still wait
