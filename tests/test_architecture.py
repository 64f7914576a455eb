"""The shape of the code that reviews rely on: the layers of packages, their faces, and which libraries load where."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT

from accel_fsdp import cli
from accel_fsdp.checkpoints import file_names
from accel_fsdp.hardware import gpus
from accel_fsdp.linter import rules

PACKAGE = ROOT / "accel_fsdp"
LAYERS = [  # a package imports only from lower layers, which are the lines above it
    {"helpers"},
    {"checkpoints", "config", "hardware"},
    {"models"},
    {"exporter", "job"},
    {"linter", "prediction", "conversion", "ranks"},
    {"launch", "wizard"},
    {"planner", "training"},
    {"rehearsal"},
    {"commands"},
]
INSIDE = [  # of a package with packages inside, these import those of the lines above
    {"models", "prediction.memory", "linter.rules", "training.data"},
    {"models.shrink", "prediction", "linter", "launch", "training.reporting"},
    {"prediction.tracing", "launch.script", "launch.doctor", "training"},
]
PACKAGES = set().union(*LAYERS, *INSIDE)
COMMANDS = {"cli", "__main__", "api"}
"""The modules at the top that stand above all packages; the others there are helpers of all."""
HEAVY = {"torch", "transformers", "accelerate", "datasets", "peft"}
MAY_PRINT = {
    "console",
    "errors",
    "ranks.cpu",
    "launch.launcher",
    "ranks.on_cpu",
}  # all but console speak before it can be imported
PATCHING = {
    "ranks.cpu",
    "launch.starting",
    "ranks.gpu_as_cpu",
    "ranks.observing",
    "ranks.saves",
    "ranks.small",
    "ranks.watch",
    "prediction.tracing.axes",
    "training.patches",
}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}
FACES = {
    ".".join(path.parent.relative_to(PACKAGE).parts): path
    for path in sorted(PACKAGE.rglob("__init__.py"))
    if path.parent != PACKAGE
}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def package_of(module: str) -> str:
    return module.rpartition(".")[0] or ("commands" if module in COMMANDS else "helpers")


def imported(module: str) -> set[str]:
    """What a module imports from here: `package.module`, `package` for names of its face, or `module` at the top."""
    imported: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inside = {name for name in names if name.removeprefix("accel_fsdp.") in MODULES or is_package(name)}
            imported |= inside if inside == names else inside | {node.module}
    return {name.removeprefix("accel_fsdp.") for name in imported if name.startswith("accel_fsdp.")}


def is_package(name: str) -> bool:
    return (ROOT / name.replace(".", "/") / "__init__.py").is_file()


def test_imports_go_down() -> None:
    pairs = [(module, name) for module in MODULES for name in imported(module)]
    assert [pair for pair in pairs if not goes_down(*pair)] == []


def goes_down(module: str, name: str) -> bool:
    package, other = package_of(module), package_of(name) if name in MODULES else name
    return other == package or is_below(other, package)


def is_below(package: str, other: str) -> bool:
    tops = [name.partition(".")[0] for name in (package, other)]
    order, names = (INSIDE, [package, other]) if tops[0] == tops[1] else (LAYERS, tops)
    first, second = (next(number for number, names_of in enumerate(order) if name in names_of) for name in names)
    return first < second


def test_each_package_has_a_place() -> None:
    assert {package_of(module) for module in MODULES} == PACKAGES


def test_imports_are_written_out() -> None:
    """As `from accel_fsdp.package import name`, which the other tests read; a face imports nothing but its loader."""
    for path in (*MODULES.values(), *FACES.values()):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.partition(".")[0] == "accel_fsdp"], path
            elif isinstance(node, ast.ImportFrom):
                assert is_written_out(path, node), (path, ast.unparse(node))


def is_written_out(path: Path, node: ast.ImportFrom) -> bool:
    own = path.parent.name == "rules" and str(node.module).startswith("accel_fsdp.linter.rules")
    if node.level or (path.name == "__init__.py" and not own and node.module != "lazy_loader"):
        return False
    if node.module == "accel_fsdp":  # of the commands, which the package itself offers, a package knows nothing
        tops = {name for name in MODULES if "." not in name} | {"__version__"}
        if not all(alias.name in tops or is_package(f"accel_fsdp.{alias.name}") for alias in node.names):
            return False
    names = [f"{node.module}.{alias.name}".removeprefix("accel_fsdp.") for alias in node.names]
    here = (".".join(path.relative_to(PACKAGE).parent.parts), "helpers", "commands")
    return all(package_of(name) in here or offered(name) for name in names if name in MODULES)


def test_one_class_derives_from_trainer() -> None:
    """What such a class adds is in helpers and callbacks, each with one job."""
    classes = [node for module in MODULES for node in ast.walk(tree_of(module)) if isinstance(node, ast.ClassDef)]
    derived = [node.name for node in classes if any(ast.unparse(base).endswith("Trainer") for base in node.bases)]
    assert derived == ["SftTrainer"]


IMPORTERS = {"import_module", "__import__", "resolve_name", "run_module"}
BY_TABLE = {"cli", "library_internals"}
"""Modules that import what a table names: the commands' packages, and libraries."""


def test_no_call_imports_this_package() -> None:
    """Nor under another name, nor by a name that the call doesn't say, as the order of the packages wouldn't see it."""
    assert {
        module: names for module in MODULES.keys() - BY_TABLE if (names := imported_by_calls(tree_of(module)))
    } == {}


def imported_by_calls(tree: ast.AST) -> list[str]:
    """What `import_module("accel_fsdp.package")` and its like import, and their other names."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in IMPORTERS]
    given = [argument for call in named for argument in (*call.args, *(keyword.value for keyword in call.keywords))]
    renamed = [node.name for node in ast.walk(tree) if isinstance(node, ast.alias) and node.asname]
    return [
        text for argument in given if "accel_fsdp" in (text := ast.unparse(argument)) or isinstance(argument, ast.Name)
    ] + [name for name in renamed if name in IMPORTERS]


@pytest.mark.parametrize("package", [package for package in FACES if package != "linter.rules"])
def test_a_face_offers_its_own_package(package: str) -> None:
    tree = ast.parse(FACES[package].with_suffix(".pyi").read_text())
    for node in tree.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 1
        assert {f"{package}.{node.module or alias.name}" for alias in node.names} <= MODULES.keys()


def offered(module: str) -> bool:
    """Whether a package's face has a module of it."""
    package, _, name = module.rpartition(".")
    return f"from . import {name} as {name}\n" in FACES[package].with_suffix(".pyi").read_text()


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_circle_in_a_package(package: str) -> None:
    inside = [module for module in MODULES if package_of(module) == package]
    list(TopologicalSorter({module: imported(module) & set(inside) for module in inside}).static_order())


def test_other_packages_are_entered_by_their_faces() -> None:
    for module in MODULES:
        froms = [node.module or "" for node in ast.walk(tree_of(module)) if isinstance(node, ast.ImportFrom)]
        names = {name.removeprefix("accel_fsdp.") for name in froms} & MODULES.keys()
        assert [name for name in names if package_of(name) not in (package_of(module), "helpers")] == [], module


@pytest.mark.parametrize("package", sorted(PACKAGES - {"helpers", "commands"}))
def test_a_face_offers_what_it_names(package: str) -> None:
    face = import_module(f"accel_fsdp.{package}")
    assert face.__doc__
    assert [name for name in face.__all__ if not hasattr(face, name)] == []


PURE = ["config", "hardware", "prediction", "prediction.memory", "linter.rules", "wizard"]


JUDGED = ("completeness", "discover", "marker", "safetensors_header", "store")
"""The modules of `checkpoints` that find and judge them; the others read tensors."""
READERS = {"exporter.command", "conversion.command"}


def test_reading_and_planning_need_no_torch() -> None:
    """Whatever these packages offer is loaded, and all commands but two, and none of the heavy libraries with them."""
    commands = [f"accel_fsdp.{module}" for module in MODULES if module.endswith("command") and module not in READERS]
    commands += [f"accel_fsdp.checkpoints.{module}" for module in JUDGED]
    code = "\n".join(
        [
            "import sys",
            "from importlib import import_module",
            f"for package in {PURE}:",
            "    face = import_module('accel_fsdp.' + package)",
            "    [getattr(face, name) for name in face.__all__]",
            f"for command in {commands}:",
            "    import_module(command)",
            f"print(sorted({HEAVY} & set(sys.modules)))",
        ]
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (finished.stdout, finished.stderr) == ("[]\n", "")


def test_questionary_printing_and_patching_stay_in_their_places() -> None:
    asking, printing, patching = set(), set(), set()
    for module in MODULES:
        nodes = list(ast.walk(tree_of(module)))
        calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        asking |= {module} if "questionary" in {name for node in nodes for name in roots(node)} else set()
        printing |= {module} if "print" in calls else set()
        patching |= {module} if "setattr" in calls or patched(tree_of(module)) else set()
    assert asking == {"wizard.asking"}
    assert printing <= MAY_PRINT
    assert patching <= PATCHING


def patched(tree: ast.AST) -> set[str]:
    """What is assigned to attributes of names that a module imports: of a library's modules and classes."""
    froms = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {(alias.asname or alias.name).partition(".")[0] for node in froms for alias in node.names} - {"os", "sys"}
    return {f"{owner}.{name}" for owner, name in assigned(tree) if owner in names}


def assigned(tree: ast.AST) -> set[tuple[str, str]]:
    """The attributes of names that something is assigned to: the name, and the attribute's."""
    targets = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    attributes = [target for target in targets if isinstance(target, ast.Attribute)]
    return {(attribute.value.id, attribute.attr) for attribute in attributes if isinstance(attribute.value, ast.Name)}


def roots(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {node.module.partition(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


NAMES_OF_FILES = {
    name
    for constant, name in vars(file_names).items()
    if constant.isupper() and isinstance(name, str) and re.search(r"[.*]\w", name)
}


def test_names_of_files_stand_in_one_place() -> None:
    """Those of runs, checkpoints and exports, in `file_names`; a text may mention one."""
    for module in MODULES.keys() - {"checkpoints.file_names"}:
        texts = [node.value for node in ast.walk(tree_of(module)) if isinstance(node, ast.Constant)]
        assert {text for text in texts if isinstance(text, str)} & NAMES_OF_FILES == set(), module


def test_sizes_are_put_into_words_in_one_place() -> None:
    """No text divides bytes or writes a unit behind a number by itself: `units` does."""
    for module in MODULES.keys() - {"units"}:
        texts = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.JoinedStr)]
        assert [ast.unparse(text) for text in texts if writes_a_unit(text) or divides_bytes(text)] == [], module


def writes_a_unit(text: ast.JoinedStr) -> bool:
    return any(
        isinstance(part, ast.FormattedValue)
        and isinstance(after, ast.Constant)
        and re.match(r" [KMGT]i?B\b", str(after.value))
        for part, after in pairwise(text.values)
    )


def divides_bytes(text: ast.JoinedStr) -> bool:
    """Whether a number in it is a size divided; what a printer is called with isn't in the text."""
    numbers = [part.value for part in text.values if isinstance(part, ast.FormattedValue)]
    divided = [
        number.right
        for number in numbers
        if isinstance(number, ast.BinOp) and isinstance(number.op, (ast.Div, ast.FloorDiv))
    ]
    return bool({ast.unparse(name) for name in divided} & {"GIB", "MIB", "1000000000.0"})


def test_a_gpu_is_added_in_one_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpus, "GPUS", (*gpus.GPUS, replace(gpus.find("H100"), name="X9")))
    model = ("--model", "Qwen/Qwen3-0.6B", "--gpus", "8xX9-80GB")
    assert cli.call(["plan", *model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"] == "X9"


def test_a_rule_is_added_in_one_place(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text("distributed_type: FSDP\n")

    row = rules.engine.Row("AF999", "error", "distributed_type", "a new rule", "it is new", "nothing", lambda _: True)
    rules.engine.add(row)
    try:
        cli.call(["check", str(config), "--json"])
        assert "AF999" in capsys.readouterr().out
        cli.call(["check", "--list-rules"])
        assert "AF999" in capsys.readouterr().out
    finally:
        del rules.engine.RULES["AF999"]
