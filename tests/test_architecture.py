"""The shape of the code that reviews rely on: the order of the rooms, their faces, and which libraries load where."""

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
from accel_fsdp.config import AXES, size_key
from accel_fsdp.hardware import gpus
from accel_fsdp.linter import rules

PACKAGE = ROOT / "accel_fsdp"
FLOORS = [  # a room imports rooms of lower floors, which are the lines above it, never one of its own floor
    {"helpers"},
    {"checkpoints", "config", "hardware"},
    {"models"},
    {"exporter", "job"},
    {"linter", "prediction", "conversion", "ranks"},
    {"launch", "wizard"},
    {"planner", "training"},
    {"rehearsal"},
    {"commands", "testing"},
]
INSIDE = [  # of a room with rooms inside, these import those of the lines above
    {"models", "prediction.memory", "linter.rules", "training.data"},
    {"models.shrink", "prediction", "linter", "launch", "training.reporting"},
    {"prediction.tracing", "launch.script", "launch.doctor", "training"},
]
ROOMS = set().union(*FLOORS, *INSIDE)
COMMANDS = {"cli", "__main__", "api", "init_command", "checkpoints_command"}
"""The modules at the top that stand above all rooms; the others there are helpers of all."""
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
    "ranks.raised",
    "ranks.saves",
    "ranks.watch",
    "ranks.weights",
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


def room_of(module: str) -> str:
    return module.rpartition(".")[0] or ("commands" if module in COMMANDS else "helpers")


def imported(module: str) -> set[str]:
    """What a module imports from this package: `room.module`, `room` for names of its face, or `module` at the top."""
    imported: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inside = {name for name in names if name.removeprefix("accel_fsdp.") in MODULES or is_room(name)}
            imported |= inside if inside == names else inside | {node.module}
    return {name.removeprefix("accel_fsdp.") for name in imported if name.startswith("accel_fsdp.")}


def is_room(name: str) -> bool:
    return (ROOT / name.replace(".", "/") / "__init__.py").is_file()


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    room = room_of(module)
    for name in imported(module):
        other = room_of(name) if name in MODULES else name
        assert other == room or is_below(other, room), f"{module} ({room}) imports {name} ({other})"


def is_below(room: str, other: str) -> bool:
    tops = [name.partition(".")[0] for name in (room, other)]
    order, names = (INSIDE, [room, other]) if tops[0] == tops[1] else (FLOORS, tops)
    first, second = (next(number for number, names_of in enumerate(order) if name in names_of) for name in names)
    return first < second


def test_each_room_has_a_place() -> None:
    assert {room_of(module) for module in MODULES} == ROOMS
    assert len(ROOMS) <= 30
    assert len(FLOORS) <= 9


@pytest.mark.parametrize("path", [*MODULES.values(), *FACES.values()], ids=str)
def test_imports_are_written_out(path: Path) -> None:
    """As `from accel_fsdp.room import name`, which the other tests read; a face imports nothing but its loader."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not [name for name in names if name.partition(".")[0] == "accel_fsdp"]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            own = path.parent.name == "rules" and str(node.module).startswith("accel_fsdp.linter.rules")
            assert path.name != "__init__.py" or own or node.module == "lazy_loader"
            if node.module == "accel_fsdp":  # of the commands, which the package itself offers, a room knows nothing
                tops = {name for name in MODULES if "." not in name} | {"__version__"}
                assert all(alias.name in tops or is_room(f"accel_fsdp.{alias.name}") for alias in node.names)
            names = [f"{node.module}.{alias.name}".removeprefix("accel_fsdp.") for alias in node.names]
            here = (".".join(path.relative_to(PACKAGE).parent.parts), "helpers", "commands")
            assert all(room_of(name) in here or offered(name) for name in names if name in MODULES)


def test_one_class_derives_from_trainer() -> None:
    """What such a class adds is in helpers and callbacks, each with one job."""
    classes = [node for module in MODULES for node in ast.walk(tree_of(module)) if isinstance(node, ast.ClassDef)]
    derived = [node.name for node in classes if any(ast.unparse(base).endswith("Trainer") for base in node.bases)]
    assert derived == ["SftTrainer"]


IMPORTERS = {"import_module", "__import__", "resolve_name", "run_module"}
BY_TABLE = {"cli", "library_internals"}
"""Modules that import what a table names: the commands' rooms, and libraries."""


@pytest.mark.parametrize("module", sorted(MODULES.keys() - BY_TABLE))
def test_no_call_imports_this_package(module: str) -> None:
    """Nor under another name, nor by a name that the call doesn't say, as the order of the rooms wouldn't see it."""
    assert imported_by_calls(tree_of(module)) == []


def imported_by_calls(tree: ast.AST) -> list[str]:
    """What `import_module("accel_fsdp.room")` and its like import, and their other names."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in IMPORTERS]
    given = [argument for call in named for argument in (*call.args, *(keyword.value for keyword in call.keywords))]
    renamed = [node.name for node in ast.walk(tree) if isinstance(node, ast.alias) and node.asname]
    return [
        text for argument in given if "accel_fsdp" in (text := ast.unparse(argument)) or isinstance(argument, ast.Name)
    ] + [name for name in renamed if name in IMPORTERS]


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ('import_module("accel_fsdp.planner")', True),
        ('importlib.import_module(name="accel_fsdp.planner")', True),
        ('import_module(".planner", "accel_fsdp")', True),
        ('import_module(f"accel_fsdp.{room}")', True),
        ("import_module(room)", True),
        ('__import__("accel_fsdp.planner", fromlist=["run"])', True),
        ("from importlib import import_module as load", True),
        ('import_module("torch.distributed")', False),
    ],
)
def test_a_call_that_imports_is_seen(code: str, seen: bool) -> None:
    assert bool(imported_by_calls(ast.parse(code))) == seen


@pytest.mark.parametrize("room", [room for room in FACES if room != "linter.rules"])
def test_a_face_offers_its_own_room(room: str) -> None:
    tree = ast.parse(FACES[room].with_suffix(".pyi").read_text())
    for node in tree.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 1
        assert {f"{room}.{node.module or alias.name}" for alias in node.names} <= MODULES.keys()


def offered(module: str) -> bool:
    """Whether a room's face has a module of it."""
    room, _, name = module.rpartition(".")
    return f"from . import {name} as {name}\n" in FACES[room].with_suffix(".pyi").read_text()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_no_circle_in_a_room(room: str) -> None:
    inside = [module for module in MODULES if room_of(module) == room]
    list(TopologicalSorter({module: imported(module) & set(inside) for module in inside}).static_order())


@pytest.mark.parametrize("module", MODULES)
def test_other_rooms_are_entered_by_their_faces(module: str) -> None:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel_fsdp."):
            name = str(node.module).removeprefix("accel_fsdp.")
            if name in MODULES:
                assert room_of(name) in (room_of(module), "helpers"), f"{module} imports from inside of {name}"


@pytest.mark.parametrize("room", sorted(ROOMS - {"helpers", "commands"}))
def test_a_face_offers_what_it_names(room: str) -> None:
    face = import_module(f"accel_fsdp.{room}")
    assert face.__doc__
    assert [name for name in face.__all__ if not hasattr(face, name)] == []


PURE = ["config", "hardware", "prediction", "prediction.memory", "linter.rules", "wizard"]


JUDGED = ("completeness", "dcp", "discover", "marker", "resumed_pickles", "safetensors_header", "store", "summary")
"""The modules of `checkpoints` that find and judge them; the others read tensors."""
READERS = {"exporter.command", "conversion.command"}


def test_reading_and_planning_need_no_torch() -> None:
    """Whatever these rooms offer is loaded, and all commands but two, and none of the heavy libraries with them."""
    commands = [f"accel_fsdp.{module}" for module in MODULES if module.endswith("command") and module not in READERS]
    commands += [f"accel_fsdp.checkpoints.{module}" for module in JUDGED]
    code = "\n".join(
        [
            "import sys",
            "from importlib import import_module",
            f"for room in {PURE}:",
            "    face = import_module('accel_fsdp.' + room)",
            "    [getattr(face, name) for name in face.__all__]",
            f"for command in {commands}:",
            "    import_module(command)",
            f"print(sorted({HEAVY} & set(sys.modules)))",
        ]
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (finished.stdout, finished.stderr) == ("[]\n", "")


@pytest.mark.parametrize("module", MODULES)
def test_questionary_printing_and_patching_stay_in_their_places(module: str) -> None:
    tree = tree_of(module)
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert ("questionary" in {name for node in ast.walk(tree) for name in roots(node)}) == (module == "wizard.prompts")
    assert module in MAY_PRINT or "print" not in calls
    assert module in PATCHING or not ({"setattr"} & calls | patched(tree))


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


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"checkpoints.file_names"}))
def test_names_of_files_stand_in_one_place(module: str) -> None:
    """Those of runs, checkpoints and exports, in `file_names`; a text may mention one."""
    texts = [node.value for node in ast.walk(tree_of(module)) if isinstance(node, ast.Constant)]
    assert {text for text in texts if isinstance(text, str)} & NAMES_OF_FILES == set()


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"units"}))
def test_sizes_are_put_into_words_in_one_place(module: str) -> None:
    """No text divides bytes or writes a unit behind a number by itself: `units` does."""
    texts = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.JoinedStr)]
    assert [ast.unparse(text) for text in texts if writes_a_unit(text) or divides_bytes(text)] == []


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


FILES_TO_CHANGE = {  # a name by which the files to change are found, and how many there may be
    "a GPU": (r"H200", 1),
    "a key of FSDP": (r"fsdp_forward_prefetch", 3),
    "an optimizer": (r"adamw_8bit", 2),
    "a cluster engine": (r"(?i)skypilot(?!_)", 4),
    "a checkpoint format, beside the module that reads it": (r"sharded \(DCP\)", 3),
    "an adapter kind": (r"use_dora", 6),
    "a rule": (r"AF610", 1),
    "a version of transformers": (r"5\.23\.0", 1),
}
SHARED_BY_AXES = {"shard_ranks", "ranks_per_row", "data_ranks"}
"""What `Layout` says of the ranks along some of the axes."""
AXIS = re.compile("|".join(rf"^{axis}$|\b({size_key(axis)}|{axis}_size)\b" for axis in AXES), re.IGNORECASE)


def code_words(module: str) -> set[str]:
    """The texts and names in a module's code, without docstrings."""
    tree = tree_of(module)
    documented = [
        node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    texts = {id(node.value) for node in documented}
    nodes = [node for node in ast.walk(tree) if id(node) not in texts]
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words |= {name for node in nodes for name in (getattr(node, "attr", ""), getattr(node, "id", ""))}
    return words | {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("change", FILES_TO_CHANGE)
def test_a_change_is_made_in_few_files(change: str) -> None:
    pattern, most = FILES_TO_CHANGE[change]
    files = [module for module in MODULES if any(re.search(pattern, word) for word in code_words(module))]
    assert 0 < len(files) <= most, files


def test_few_files_name_an_axis_of_the_mesh() -> None:
    files = [
        module for module in MODULES if any(AXIS.search(word) or word in SHARED_BY_AXES for word in code_words(module))
    ]
    assert 0 < len(files) <= 19, files


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
