"""What the processes that a benchmark starts are given."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(**more: str) -> dict[str, str]:
    """This process's variables and `more`, with the clone's package before what PYTHONPATH names, and no hub."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}
