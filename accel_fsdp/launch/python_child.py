"""Starts Python for this package, with this process's import path and nothing else.

`python -m MODULE` and `python -c CODE` search the current folder first, where a file named `queue.py` or `torch.py`
would run instead of the intended module.
"""

import os
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2]


def command(code: str, *arguments: str) -> list[str]:
    places = [path for path in sys.path if isinstance(path, str) and path not in ("", os.curdir)]
    path = [*places, str(SOURCE)]  # also after os.chdir, where a relative place leads elsewhere
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}", *arguments]


def module(name: str, *arguments: str) -> list[str]:
    return command(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments)
