"""Models with their own Python code, which only `train/sft.py --trust_remote_code` runs.

transformers itself asks on stdin whether it may run the code of a model folder, and prints the question on stdout; so
every reader passes `trust_remote_code=False`, and these errors give the reason.
"""

import re
from typing import Any

from accel_fsdp.errors import UserError

ASKS_FOR_CODE = re.compile(r"trust_remote_code")
"""The common text of transformers' refusals of a folder's code."""


class NeedsCode(UserError):
    """A model, or its tokenizer, can't be read without running the Python beside it."""


def refusal(name: str, part: str) -> NeedsCode:
    """The error for a `part` of the model `name` (config or tokenizer) that only the model's own code can read."""
    return NeedsCode(
        f"{name} comes with its own Python code for {part}",
        why="the installed transformers can't read it without, and no command runs code that comes with a model",
        fix="use a model that transformers knows; or read that code, and train with train/sft.py --trust_remote_code",
    )


def is_refusal(error: BaseException) -> bool:
    """Whether transformers stopped because a folder's code wasn't allowed to run."""
    return isinstance(error, ValueError) and bool(ASKS_FOR_CODE.search(str(error)))


def check_kernels(name: str, config: Any) -> None:
    """Refuses a config that names a repository of compiled kernels, which transformers would download and run.

    It is checked as transformers built it, because a setting has several names in a file. Flash Attention is left to
    the flags: if its package isn't installed, transformers takes it from the hub.
    """
    for key in ("_attn_implementation", "_experts_implementation"):
        value = getattr(config, key, None)
        if any("/" in str(part) for part in (value.values() if isinstance(value, dict) else [value])):
            raise NeedsCode(
                f"the config of {name} names a repository of code: {key}: {value}",
                why="transformers would download it and run it, and no command runs code that comes with a model",
                fix=f"remove {key.lstrip('_')} from its config.json; train/sft.py takes --attn_implementation",
            )
    if "flash" in str(getattr(config, "_attn_implementation", "")):
        config._attn_implementation = None
    for part in getattr(config, "sub_configs", None) or {}:
        if (inner := getattr(config, part, None)) is not None:
            check_kernels(name, inner)
