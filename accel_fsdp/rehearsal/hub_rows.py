"""The first rows of a data set on the hub, fetched in a process of its own: one that waits for a network is ended.

What the user's environment says of the hub holds here too: endpoint, token, proxies, caches, and HF_HUB_OFFLINE.
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
    """Which rows, the folder to write them to, and the file that then says what became of it."""

    dataset: str
    config_name: str | None
    split: str
    target: str
    told: str


def fetch(launcher: Rehearsed, dataset: str, config_name: str | None, split: str, target: Path) -> str:
    """Writes the rows to the folder `target`; returns why they can't be had, empty where they could.

    A copy in a cache is used where the hub can't be reached.

    Raises:
        UserError: the data set is there, but not with this configuration or split, or it can't be read.
    """
    alone = replace(launcher, seconds=SECONDS, cold=True)
    wanted = Wanted(dataset, config_name, split, str(target), str(launcher.folder / "rows.json"))
    why, may_be_cached = _asked(alone, wanted, "rows")
    if why and may_be_cached and _asked(alone, wanted, "rows-offline", **{OFFLINE: "1"})[0] == "":
        return ""
    return why


def _asked(launcher: Rehearsed, wanted: Wanted, name: str, **environment: str) -> tuple[str, bool]:
    """Why there are no rows, and whether a cache may have them; both are empty where the rows are written."""
    file = Path(wanted.told)
    file.unlink(missing_ok=True)
    outcome = launcher.python(name, __name__, [json.dumps(asdict(wanted))], **environment)
    if not file.is_file():
        crashed = f"the process that reads it ended with exit code {outcome.code}"
        return f"the hub gave none in {SECONDS} seconds" if outcome.code is None else crashed, True
    told = json.loads(file.read_text(encoding="utf-8"))
    if told["error"]:
        raise UserError(told["error"][0], why=told["error"][1], fix=told["error"][2])
    return told["why"], told["may_be_cached"]


def main(wanted: Wanted) -> None:
    """What the process does: writes the rows, or says why not."""
    why, may_be_cached, error = _unreachable(wanted.dataset), False, None
    if why and not _offline():
        may_be_cached = True
    else:
        try:
            _write(wanted)
            why = ""
        except UserError as raised:
            cause = raised.__cause__ or raised
            if not why and not _is_gone(cause):
                error = (raised.what, raised.why, raised.fix)
            why = why or first_line(cause)
        except Exception as raised:  # whatever a network brings: rows can be made up
            why = why or first_line(raised)
    told = json.dumps({"why": why, "may_be_cached": may_be_cached, "error": error})
    Path(wanted.told).write_text(told, encoding="utf-8")


def _write(wanted: Wanted) -> None:
    splits = (wanted.split,)
    rows.cut(wanted.dataset, Path(wanted.target), splits=splits, config_name=wanted.config_name, from_hub=True)


def _is_gone(error: BaseException) -> bool:
    """Whether the hub has no such data set, or none for this account, or answers no more."""
    from datasets.exceptions import DatasetNotFoundError

    lost = type(error) is FileNotFoundError  # of no kind that says what a data set lacks
    return lost or isinstance(error, (DatasetNotFoundError, ConnectionError))


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _unreachable(dataset: str) -> str:
    """Why nothing can be asked of the hub, after one request; empty where it answers, if only that it has no such."""
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
