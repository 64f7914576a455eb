"""What a new version of a library changes of what this package relies on: `make against VERSION=torch==2.15.0`.

Reads the sources of the installed library and those of a wheel, which is downloaded but not installed.
"""

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from accel_fsdp.errors import UsageError, guard
from accel_fsdp.library_internals import Internal, Patch, fits

PACKAGE = Path(__file__).parent.parent / "accel_fsdp"
DECLARES = re.compile(r"^(RELIES_ON|@patch)", re.MULTILINE)
Read = Callable[[str], str | None]
"""Returns the text of a file of a library by its path, None where there is none."""


class Sources:
    """A library's Python files, parsed when they are asked for."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
        return ast.parse(text) if text is not None else None

    def find(self, module: str, names: list[str], depth: int = 5) -> ast.AST | None:
        """The definition of a name in a module: through imports from the same library and through base classes."""
        tree = self.tree(module)
        if tree is None or not depth:
            return None
        for node in _definitions(tree, names[0]):
            if isinstance(node, ast.ImportFrom):
                origin = next(alias.name for alias in node.names if (alias.asname or alias.name) == names[0])
                return self.find(_absolute(module, node, self.tree), [origin, *names[1:]], depth - 1)
            if len(names) == 1:
                return node
            if isinstance(node, ast.ClassDef):
                return self._member(module, node, names[1], depth)
        return None

    def _member(self, module: str, owner: ast.ClassDef, name: str, depth: int) -> ast.AST | None:
        for node in _definitions(owner, name):
            return node
        for node in ast.walk(owner):  # what instances have
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                return node
        for base in owner.bases:
            bare = ast.unparse(base).partition("[")[0]
            if found := self.find(module, [bare, name], depth - 1):
                return found
        return None


def _definitions(scope: ast.Module | ast.ClassDef, name: str) -> Iterator[ast.AST]:
    """The statements of a module or class that bind a name, also below `if` and `try`, the last one first."""
    return (node for node in reversed(list(_statements(scope.body))) if name in _bound(node))


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, part, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _absolute(module: str, node: ast.ImportFrom, tree: Callable[[str], ast.Module | None]) -> str:
    if not node.level:
        return node.module or ""
    is_package = tree(f"{module}.__init__") is not None
    parents = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
    return ".".join([*parents, *([node.module] if node.module else [])])


def installed(library: str) -> Sources:
    """The sources of the installed library."""
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        raise UsageError(f"{library} isn't installed", why="its sources are compared", fix=f"pip install {library}")
    root = Path(spec.origin).parent.parent

    def read(path: str) -> str | None:
        return (root / path).read_text(encoding="utf-8") if (root / path).is_file() else None

    return Sources(read)


def of_wheel(path: Path) -> Sources:
    """The sources in a wheel."""
    archive = zipfile.ZipFile(path)
    names = frozenset(archive.namelist())
    return Sources(lambda name: archive.read(name).decode() if name in names else None)


def declared() -> dict[Internal, bool]:
    """All that this package declares of its libraries' insides, and whether a patch replaces it."""
    found: dict[Internal, bool] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if not DECLARES.search(path.read_text(encoding="utf-8")):
            continue
        module = import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        for name, value in vars(module).items():
            internals = value.relies_on if isinstance(value, Patch) else value if name == "RELIES_ON" else ()
            found |= {internal: found.get(internal, False) or isinstance(value, Patch) for internal in internals}
    return found


def change(internal: Internal, before: Sources, after: Sources) -> str:
    """What is other in the new version, in a few words; empty where nothing is."""
    module, _, name = internal.path.partition(":")
    old, new = (sources.find(module, name.split(".")) for sources in (before, after))
    if old is None:
        return "" if new is None else "its source is found in the new version only"
    if new is None:
        return "is gone"
    if internal.parameters is not None and isinstance(new, ast.FunctionDef):
        known = [argument.arg for argument in (*new.args.posonlyargs, *new.args.args, *new.args.kwonlyargs)]
        if not fits(known, internal.parameters):
            return f"now takes ({', '.join(known)})"
    return "" if ast.dump(old) == ast.dump(new) else "has another body"


def report(specification: str) -> list[str]:
    """A line for each declared inside of the library that the new version changes.

    Raises:
        UsageError: the version can't be had.
    """
    library = re.split(r"[=<>~ ]", specification)[0]
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, specification]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise UsageError(f"{specification} can't be downloaded", why=why, fix="a version that has a wheel")
        before, after = installed(library), of_wheel(next(Path(folder).glob("*.whl")))
        used = {internal: patched for internal, patched in declared().items() if internal.library == library}
        changes = {internal: sentence for internal in used if (sentence := change(internal, before, after))}
    lines = [
        f"{inside.name} {sentence}{' (patched here)' if used[inside] else ''}" for inside, sentence in changes.items()
    ]
    return [*lines, f"{len(used)} declared, {len(changes)} changed"]


def main() -> None:
    if len(sys.argv) != 2:
        raise UsageError("no version was given", why="the installed one is compared with it", fix="torch==2.15.0")
    for line in report(sys.argv[1]):
        print(line)


if __name__ == "__main__":
    sys.exit(guard(main))
