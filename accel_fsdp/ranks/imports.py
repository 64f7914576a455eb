"""Changes modules once they are imported: importing all of them beforehand would take seconds."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Change = Callable[[ModuleType], object]


def change(name: str, how: Change) -> None:
    """Calls `how` with a module: now, or after its import."""
    if name in sys.modules:
        how(sys.modules[name])
        return
    if not any(isinstance(finder, _Importer) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Importer())
    _changes.setdefault(name, []).append(how)


_changes: dict[str, list[Change]] = {}


class _Importer(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not (changes := _changes.pop(name, None)):
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def execute(module: ModuleType) -> None:
                run(module)
                for how in changes:
                    how(module)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec
