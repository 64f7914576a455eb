"""Watches a script's saves: by which call, into which folder, in which line. The files are read later."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from accel_fsdp.launch.ranks import events, script
from accel_fsdp.launch.ranks.observing import Observation
from accel_fsdp.library_internals import Internal

CALLS = (
    ("accelerate.accelerator", "Accelerator", "save_state"),
    ("accelerate.accelerator", "Accelerator", "save_model"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("transformers.trainer", "Trainer", "save_model"),
    ("peft.peft_model", "PeftModel", "save_pretrained"),
)
"""A module, its class and its method, whose arguments name a folder."""
FOLDERS = ("output_dir", "save_directory")


RELIES_ON = tuple(Internal(f"{module}:{kind}.{method}", "self *") for module, kind, method in CALLS)


def _has_been_imported(module: str, kind: str) -> bool:
    """Whether the script's import of a module is done, so that a missing class means that the library changed."""
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None)
    return loaded is not None and (hasattr(loaded, kind) or not getattr(spec, "_initializing", False))


class ObservedSaves:
    """Reports the outermost call that saves; Trainer's `save_model` calls `save_pretrained`."""

    def __init__(self) -> None:
        self.depth = 0
        self.watched: set[tuple[str, str, str]] = set()

    def watch(self) -> None:
        """Wraps the methods of modules that the script has imported by now; imports none itself."""
        for call in CALLS:
            module, kind, method = call
            if call in self.watched or not _has_been_imported(module, kind):
                continue
            self.watched.add(call)
            if Observation(f"saves by {kind}.{method}", (Internal(f"{module}:{kind}.{method}", "self *"),)).is_possible:
                owner = getattr(sys.modules[module], kind)
                setattr(owner, method, self._wrapped(getattr(owner, method)))

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def saving(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0:
                self._report(original.__qualname__, args, kwargs, result)
            return result

        return saving

    def _report(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        keyword = next((kwargs[name] for name in FOLDERS if name in kwargs), None)
        folder = keyword or next((argument for argument in args[1:] if isinstance(argument, str | os.PathLike)), None)
        if folder is None and isinstance(result, str | os.PathLike):  # save_state returns the folder that it chose
            folder = result
        if folder is None and call == "Trainer.save_model":
            folder = args[0].args.output_dir
        if folder is not None:
            line = script.line_of_stack(sys._getframe(1))
            events.report("saved", call=call, folder=os.path.abspath(folder), line=line)
