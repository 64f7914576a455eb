"""Packages from npm."""

import subprocess
from pathlib import Path


def installed(folder: Path) -> Path:
    """The folder's packages; npm fetches them where they aren't there yet, and refuses those of another hash."""
    modules = folder / "node_modules"
    kept, locked = modules / ".package-lock.json", folder / "package-lock.json"
    if not kept.exists() or kept.stat().st_mtime < locked.stat().st_mtime:
        words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(words, cwd=folder, check=True)
    return modules
