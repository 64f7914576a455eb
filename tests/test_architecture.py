"""The shape of the code that reviews rely on."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "accel_fsdp"
MODULES = sorted(PACKAGE.glob("*.py"))
RULES = {path.stem for path in MODULES if path.stem.startswith("rules_")}
PURE = {
    *("errors", "types", "machines", "asking", "defaults", "refusals", "questions", "presets", "catalogue", "fields"),
    *(
        "foreign",
        "headers",
        "stored",
        "archive",
        "dcp",
        "lora_names",
        "zero",
        "zero_checkpoint",
        "checkpoint",
        "opcodes",
        "unpickling",
    ),
    *("check", "combinations", "config", "reedit", "pains", "weights", "here", *RULES),
    *("gpus", "traffic", "speed", "notes", "layouts"),
    *("editing", "draft", "migrate", "migrate_fsdp", "migrate_zero"),
    *(
        "tapes",
        "recorded",
        "quirks",
        "overheads",
        "plan",
        "advice",
        "meter",
        "states",
        "engines",
        "zero",
        "playing",
        "memory",
    ),
    *("drawing", "page", "savings"),
}
HEAVY = {"torch", "transformers", "accelerate", "datasets", "peft"}
MAY_PRINT = {"render", "errors", "cpu", "jobs"}  # errors, cpu and jobs speak on stderr before render can be imported
MAY_PATCH = {"cpu", "adapters"}
LAYERS = [
    {"types", "errors", "__init__"},
    {
        "hints",
        "machines",
        "catalogue",
        "fields",
        "combinations",
        "presets",
        "files",
        "render",
        "editing",
        "pains",
        "tapes",
        "meter",
        "states",
        "quirks",
        "drawing",
        "foreign",
        "headers",
        "stored",
    },
    {"weights", "trust", "configs", "here", "engines", "zero", "playing", "gpus", "traffic", "recorded"},
    {"finite", "lora_names"},
    {"archive", "complete", "dcp", "stream", "zero_checkpoint", "pth", "hub", "opcodes", "unpickling"},
    {"checkpoint"},
    {"asking", "facts", "check", "memory", "speed", "overheads"},
    {"resuming", "stopping"},
    {
        *(
            "defaults",
            "layouts",
            "notes",
            "refusals",
            "draft",
            "plan",
            "advice",
            "savings",
            "shapes",
            "watching",
            "adapting",
        ),
        *("kernels", *RULES),
    },
    {"questions", "migrate_fsdp", "traces", "page", "remedies"},
    {"migrate_zero", "fitting"},
    {"migrate", "tracing"},
    {
        "config",
        "prompts",
        "cpu",
        "adapters",
        "sharding",
        "data",
        "export",
        "chats",
        "columns",
        "data_arguments",
        "causal",
    },
    {"describing", "sources", "papers"},
    {"planned", "merging", "converting", "reloading", "logits", "verifying"},
    {"exporting"},
    {"encoding"},
    {"packing"},
    {"tokenizing", "batching", "lineage"},
    {"wizard", "jobs", "arguments", "sensible", "inputs", "reedit"},
    {"lint", "plan_flags", "proposing", "telling", "configure", "rewrite", "planning", "gathering", "runs", "starter"},
    {"models", "prepare", "surviving", "disks", "forecast", "cards"},
    {"reporting", "losses"},
    {"training"},
    {"cli", "reference"},
    {"__main__"},
]


def imports(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_module_has_a_layer() -> None:
    assert {path.stem for path in MODULES} == set().union(*LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_go_one_way(path: Path) -> None:
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    for name in imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "accel_fsdp" and len(parts) > 1 and parts[1] in level:
            assert level[parts[1]] <= level[path.stem], f"{path.stem} imports {parts[1]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_libraries_stay_in_their_places(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
    assert ("questionary" in roots) == (path.stem == "prompts")
    if path.stem in PURE:
        assert not roots & HEAVY


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "train").glob("*.py"))], ids=lambda path: path.stem)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= 60, node.name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_printing_and_patching_stay_in_their_places(path: Path) -> None:
    text = path.read_text()
    if path.stem not in MAY_PRINT:
        assert "print(" not in text
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert ("setattr" not in calls) or path.stem in MAY_PATCH
