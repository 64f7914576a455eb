"""Fetches the first rows of a data set on the hub, in a separate process that is killed if the network blocks.

The user's variables for the hub apply: endpoint, token, proxies, caches, and HF_HUB_OFFLINE.
"""

import json
import os
import sys
from collections.abc import Sequence
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
PROBE_SECONDS = 5
OFFLINE = "HF_HUB_OFFLINE"


def fetch(launcher: Rehearsed, dataset: str, config_name: str | None, split: str, target: Path) -> str:
    """Writes the rows to the folder `target`; returns why that failed, empty on success.

    If the hub can't be reached, a copy in a cache is used.

    Raises:
        UserError: the data set exists, but without this configuration or split, or it can't be read.
    """
    separate = replace(launcher, cold=True)
    words = [str(SECONDS), str(target), dataset, split, *([config_name] if config_name else [])]
    why, may_be_cached = _request_rows(separate, "rows", words)
    if may_be_cached and _request_rows(separate, "rows-offline", words, **{OFFLINE: "1"})[0] == "":
        return ""
    return why


def _request_rows(launcher: Rehearsed, name: str, words: Sequence[str], **environment: str) -> tuple[str, bool]:
    """Fetches the rows; returns why there are none (empty on success), and whether a cache may have them."""
    outcome = launcher.python(name, __name__, words, **environment)
    if outcome.code == TOO_LATE:
        return f"the hub gave none in {SECONDS} seconds", True
    if outcome.code:
        return f"the process that reads it ended with exit code {outcome.code}", True
    answer = json.loads(outcome.printed.splitlines()[-1])
    if answer["error"]:
        what, why, fix = answer["error"]
        raise UserError(what, why=why, fix=fix)
    return answer["why"], answer["may_be_cached"]


def main(seconds: str, target: str, dataset: str, split: str, config_name: str | None = None) -> None:
    """Runs in the separate process: writes the rows, or reports why it can't."""
    import datasets  # noqa: F401  # takes as long as the hub may, where the machine is busy

    Timer(int(seconds), os._exit, [TOO_LATE]).start()
    why, error = _unreachable(dataset), None
    may_be_cached = bool(why) and not _offline()
    if not may_be_cached:
        try:
            rows.cut(dataset, Path(target), split, config_name=config_name, from_hub=True)
            why = ""
        except UserError as raised:
            cause = raised.__cause__ or raised
            if not why and not _is_gone(cause):
                error = (raised.what, raised.why, raised.fix)
            why = why or first_line(cause)
        except Exception as raised:  # any error of the network: rows can be made up
            why = why or first_line(raised)
    sys.stdout.write(json.dumps({"why": why, "may_be_cached": may_be_cached, "error": error}) + "\n")
    sys.stdout.flush()


def _is_gone(error: BaseException) -> bool:
    """Whether the data set is missing on the hub, closed to this account, or the connection was lost."""
    from datasets.exceptions import DatasetNotFoundError

    is_lost = type(error) is FileNotFoundError  # not one of its subclasses, which name a missing part of the data set
    return is_lost or isinstance(error, (DatasetNotFoundError, ConnectionError))


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _unreachable(dataset: str) -> str:
    """Why the hub can't be reached, after one request; empty if it answers, even if it lacks the data set."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if _offline():
        return f"{OFFLINE} is set, and no cache here has it"
    try:
        HfApi().dataset_info(dataset, timeout=PROBE_SECONDS)
    except RepositoryNotFoundError:
        return ""
    except Exception as error:  # errors of httpx, sockets and TLS, or a proxy's answer
        return f"the hub can't be reached ({first_line(error)}), and no cache here has it"
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # threads of a stream may still wait
