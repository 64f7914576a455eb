"""Fetches the first rows of a data set on the hub, in a process that is ended if the network blocks.

The user's variables for the hub apply: endpoint, token, proxies, caches, and HF_HUB_OFFLINE.
"""

from dataclasses import replace
from pathlib import Path

from accel_fsdp.errors import UserError
from accel_fsdp.models import first_line
from accel_fsdp.rehearsal import rows
from accel_fsdp.rehearsal.job import CallFailed, Rehearsed

SECONDS = 20
"""Seconds that the hub may take; libraries retry for minutes."""


def fetch(launcher: Rehearsed, dataset: str, split: str, config_name: str | None, target: Path) -> str:
    """Writes the rows to the folder `target`; returns why that failed, empty on success.

    Raises:
        UserError: the data set exists, but without this configuration or split, or it can't be read.
    """
    try:
        return replace(launcher, seconds=SECONDS).call("hub", _write, dataset, target, split, config_name)
    except CallFailed as error:
        if error.outcome.hang:
            return f"the hub gave none in {SECONDS} seconds"
        return f"the process that reads it ended with exit code {error.outcome.code}"


def _write(dataset: str, target: Path, split: str, config_name: str | None) -> str:
    from datasets.exceptions import DatasetNotFoundError

    try:
        rows.cut(dataset, target, split, config_name, from_hub=True)
    except Exception as error:  # any error of the network: rows can be made up
        cause = error.__cause__ or error
        is_lost = type(cause) is FileNotFoundError  # its subclasses name a missing part of the data set
        if isinstance(error, UserError) and not (is_lost or isinstance(cause, DatasetNotFoundError | ConnectionError)):
            raise
        return first_line(cause)
    return ""
