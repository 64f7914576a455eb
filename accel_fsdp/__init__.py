"""accel-fsdp: from "this model, these GPUs" to a trained, exported model."""

import sys

if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].partition(".")[0] == __name__
    and not getattr(sys.flags, "safe_path", False)
):
    del sys.path[0]  # the current folder, where `python -m accel_fsdp` would find a torch.py that isn't meant

import logging
import os

import lazy_loader

__version__ = "0.1.0"

# transformers imports PEFT, which imports bitsandbytes; that warns on CPUs of a kernel unused in training (0.50)
logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)

_retried: set[str] = set()


def _says_something_new(record: logging.LogRecord) -> bool:
    """Filters huggingface_hub's log: one line for each cause of a retry, instead of two for each retry."""
    text = record.getMessage()
    cause, thrown, _ = text.partition(" thrown while ")
    if cause in _retried or text.startswith(("Retrying in ", "Rate limited. Waiting ")):
        return False
    if thrown:
        _retried.add(cause)
        record.msg = f"{text}; trying again"
    return True


logging.getLogger("huggingface_hub.utils._http").addFilter(_says_something_new)

# read when torch is imported: its warnings, such as DDP's about a search for unused parameters, repeat on every rank
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# The commands as functions: each is imported when it is first used
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
