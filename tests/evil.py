"""An object whose pickle calls a function."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CALLS: dict[str, Callable[[str], Any]] = {
    "os.system": lambda proof: (os.system, (f"touch {proof}",)),
    "exec": lambda proof: (exec, (f"open({proof!r}, 'w')",)),
    "eval": lambda proof: (eval, (f"open({proof!r}, 'w')",)),
    "subprocess": lambda proof: (subprocess.Popen, (["touch", proof],)),
    "getattr": lambda proof: (getattr, (dict, "fromkeys")),
    "open": lambda proof: (open, (proof, "w")),
    "torch.load": lambda proof: (torch.load, (proof,)),
    "unlink": lambda proof: (os.unlink, (proof,)),
}


class Evil:
    """Unpickling it makes a file, or deletes it."""

    def __init__(self, proof: Path, call: str = "os.system") -> None:
        self.proof, self.call = str(proof), call

    def __reduce__(self) -> Any:
        return CALLS[self.call](self.proof)
