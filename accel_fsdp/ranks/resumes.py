"""Checks that an optimizer that a script loaded from a checkpoint has its states at the next step."""

import sys
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints import file_names
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, script
from accel_fsdp.ranks.observing import Observation, after

CALLS = (
    ("transformers.trainer", "Trainer", "_load_optimizer_and_scheduler"),
    ("accelerate.accelerator", "Accelerator", "load_state"),
)
"""A module, its class and its method, whose first argument names a checkpoint."""
RELIES_ON = tuple(Internal(f"{module}:{kind}.{method}", "self *") for module, kind, method in CALLS)


class ObservedResumes:
    """Reports an optimizer that begins without states, and creates new ones, although the checkpoint has them.

    Accelerate 1.15 silently loads none under FSDP1 from a sharded checkpoint.
    """

    def __init__(self) -> None:
        self.watched: set[str] = set()
        self.checkpoint = self.line = ""
        self.empty: Any = None

    def watch(self) -> None:
        """Wraps the methods of the modules that the script has imported by now."""
        for (module, kind, method), internal in zip(CALLS, RELIES_ON, strict=True):
            owner = getattr(sys.modules.get(module), kind, None)
            if owner is None or module in self.watched:
                continue
            self.watched.add(module)
            if Observation(f"resumes by {kind}.{method}", internal).is_possible:
                after(owner, method, self._note_load)

    def _note_load(self, _: Any, checkpoint: Any = None, *__: Any, **___: Any) -> None:
        folder = Path(checkpoint) if checkpoint else None
        if folder is not None and any(folder.glob(f"{file_names.OPTIMIZER}*")):
            self.checkpoint, self.line = folder.name, script.line_of_stack(sys._getframe(2))

    def before_step(self, optimizer: Any) -> None:
        """Called before each step of an optimizer."""
        if self.checkpoint:
            self.empty = None if _has_states(optimizer) else optimizer

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Called after each step: an optimizer without states, such as SGD, has none then either."""
        if self.empty is optimizer and self.checkpoint and _has_states(optimizer):
            kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
            events.report("anew", optimizer=kind, checkpoint=self.checkpoint, line=self.line)
        self.checkpoint, self.empty = "", None


def _has_states(optimizer: Any) -> bool:
    return any(bool(state) for state in optimizer.state.values())
