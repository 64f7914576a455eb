"""Whether an export that was ended early had finished; torch may only be half imported then."""

from pathlib import Path

_before: tuple[Path, int] | None = None
"""OUT of the export that runs, and the number of the folder that was there before; 0 for none."""


def begin(out: Path) -> None:
    """Notes what OUT is before an export."""
    global _before
    _before = out, _inode(out)


def finished() -> str:
    """A sentence that OUT has been replaced, for a command that is ended afterwards; empty before."""
    if _before is None or _inode(_before[0]) in (0, _before[1]):
        return ""
    return f"after the export had finished: {_before[0]} is new and complete"


def _inode(out: Path) -> int:
    return out.stat().st_ino if out.exists() else 0
