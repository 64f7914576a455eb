"""Fetches the first rows of a data set on the hub, in a separate process that is ended if the network blocks.

The user's variables for the hub apply here too: endpoint, token, proxies, caches, and HF_HUB_OFFLINE.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accel_fsdp.errors import UserError
from accel_fsdp.models import first_line
from accel_fsdp.rehearsal import rows
from accel_fsdp.rehearsal.job import Rehearsed

SECONDS = 20
"""How long the hub may take; libraries try again for minutes."""
PROBE_SECONDS = 5
OFFLINE = "HF_HUB_OFFLINE"


@dataclass(frozen=True)
class Wanted:
    """The rows to fetch, the folder to write them to, and the file for the result."""

    dataset: str
    config_name: str | None
    split: str
    target: str
    told: str


def fetch(launcher: Rehearsed, dataset: str, config_name: str | None, split: str, target: Path) -> str:
    """Writes the rows to the folder `target`; returns why that failed, empty on success.

    If the hub can't be reached, a copy in a cache is used.

    Raises:
        UserError: the data set exists, but without this configuration or split, or it can't be read.
    """
    alone = replace(launcher, seconds=SECONDS, cold=True)
    request = Wanted(dataset, config_name, split, str(target), str(launcher.folder / "rows.json"))
    why, may_be_cached = _asked(alone, request, "rows")
    if why and may_be_cached and _asked(alone, request, "rows-offline", **{OFFLINE: "1"})[0] == "":
        return ""
    return why


def _asked(launcher: Rehearsed, request: Wanted, name: str, **environment: str) -> tuple[str, bool]:
    """Why there are no rows, and whether a cache may have them; both are empty if the rows were written."""
    file = Path(request.told)
    file.unlink(missing_ok=True)
    outcome = launcher.python(name, __name__, [json.dumps(asdict(request))], **environment)
    if not file.is_file():
        crashed = f"the process that reads it ended with exit code {outcome.code}"
        return f"the hub gave none in {SECONDS} seconds" if outcome.code is None else crashed, True
    answer = json.loads(file.read_text(encoding="utf-8"))
    if answer["error"]:
        raise UserError(answer["error"][0], why=answer["error"][1], fix=answer["error"][2])
    return answer["why"], answer["may_be_cached"]


def main(request: Wanted) -> None:
    """The process itself: writes the rows, or the reason why not."""
    why, may_be_cached, error = _unreachable(request.dataset), False, None
    if why and not _offline():
        may_be_cached = True
    else:
        try:
            _write(request)
            why = ""
        except UserError as raised:
            cause = raised.__cause__ or raised
            if not why and not _is_gone(cause):
                error = (raised.what, raised.why, raised.fix)
            why = why or first_line(cause)
        except Exception as raised:  # whatever a network brings: rows can be made up
            why = why or first_line(raised)
    answer = json.dumps({"why": why, "may_be_cached": may_be_cached, "error": error})
    Path(request.told).write_text(answer, encoding="utf-8")


def _write(request: Wanted) -> None:
    splits = (request.split,)
    rows.cut(request.dataset, Path(request.target), splits=splits, config_name=request.config_name, from_hub=True)


def _is_gone(error: BaseException) -> bool:
    """Whether the data set is missing on the hub, closed to this account, or the connection was lost."""
    from datasets.exceptions import DatasetNotFoundError

    lost = type(error) is FileNotFoundError  # not one of its subclasses, which name a missing part of the data set
    return lost or isinstance(error, (DatasetNotFoundError, ConnectionError))


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _unreachable(dataset: str) -> str:
    """Why the hub can't be reached, after one request; empty if it answers, even that it lacks the data set."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if _offline():
        return f"{OFFLINE} is set, and no cache here has it"
    try:
        HfApi().dataset_info(dataset, timeout=PROBE_SECONDS)
    except RepositoryNotFoundError:
        return ""
    except Exception as error:  # of httpx, of sockets, of TLS; a proxy's answer
        return f"the hub can't be reached ({first_line(error)}), and no cache here has it"
    return ""


if __name__ == "__main__":
    main(Wanted(**json.loads(sys.argv[1])))
    os._exit(0)  # threads of a stream may still wait
