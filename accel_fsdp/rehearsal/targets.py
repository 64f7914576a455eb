"""Folders that a rehearsal writes: never the ones that it reads."""

from pathlib import Path

from accel_fsdp.errors import UserError


def check(target: Path, source: str | None, what: str) -> None:
    """Refuses a folder that what is read lies in: it would be replaced.

    Raises:
        UserError: it is `source`, or has it inside.
    """
    read, written = Path(source or ".").resolve(), target.resolve()
    if source and (read == written or written in read.parents):
        raise UserError(
            f"the rehearsal's folder {target} holds the {what} itself: {source}",
            why="that folder would be replaced by a small one",
            fix="name another folder",
        )
