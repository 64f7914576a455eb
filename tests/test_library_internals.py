"""What this package relies on inside of its libraries: there in what is installed, and missed in one clear line."""

import ast
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import CHAT_DATA, ROOT, Finished, run, warm_python
from packaging.requirements import Requirement
from packaging.version import Version
from test_architecture import MODULES, PATCHING, assigned, tree_of
from transformers import Trainer

from accel_fsdp import errors, library_internals

pytestmark = pytest.mark.oldest
NEEDS = {"prediction.tracing.axes": "transformers.distributed.expert_parallel"}
"""What the oldest set lacks, by the module that runs only with it."""


def is_served(module: str) -> bool:
    """Whether the installed libraries have what this module runs with."""
    return module not in NEEDS or bool(find_spec(NEEDS[module]))


DECLARING = [
    module
    for module, path in MODULES.items()
    if re.search(r"^(RELIES_ON|@patch)", path.read_text(), re.M)
    if is_served(module)
]
LISTED = """
from importlib import import_module
from accel_fsdp.library_internals import Patch, flaw
for module in {modules}:
    for name, value in vars(import_module("accel_fsdp." + module)).items():
        is_patch = isinstance(value, Patch)
        for internal in value.relies_on if is_patch else value if name == "RELIES_ON" else ():
            print(module, flaw(internal)) if flaw(internal) and (not is_patch or value.is_needed) else None
            print(internal.path)
"""
OWN_AND_PYTHONS = {"accel_fsdp", *sys.stdlib_module_names}
RANK = {"ACCELERATE_USE_FSDP": "true", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}


def python(code: str, **environment: str) -> Finished:
    warm = warm_python()
    return run([warm["PYTHON_EXEC"], "-c", code], **warm, **environment)


@pytest.fixture(scope="module")
def declared() -> set[str]:
    """All paths that are declared; in a process of its own, as what is patched here looks otherwise."""
    done = python(LISTED.format(modules=DECLARING))
    assert done.code == 0, done.output
    lines = {line for line in done.output.splitlines() if ":" in line and " " not in line}
    assert [line for line in done.output.splitlines() if line.partition(" ")[0] in DECLARING] == []
    return lines


def test_what_is_declared_is_there(declared: set[str]) -> None:
    assert len(declared) > 40
    assert {"ranks.cpu", "training.trainer", "prediction.tracing.cuda_emulation"} <= set(DECLARING)


def test_each_inner_method_that_is_overridden_is_declared(declared: set[str]) -> None:
    members = [parted(path) for path in declared]
    found = [(module, name, owner) for module, node in classes() for name, owner in overridden(module, node)]
    assert {"_run_epoch", "_save_checkpoint"} <= {name for _, name, _ in found}
    assert [finding for finding in found if not is_declared(finding[2], finding[1], members)] == []


def test_an_inner_method_that_super_has_is_declared(declared: set[str]) -> None:
    members = [parted(path) for path in declared]
    for module, node in classes():
        for name in called_by_super(node):
            owner = next((base for base in library_bases(module, node) if name in vars(base)), None)
            assert owner is None or is_declared(owner, name, members), f"{module}: {owner}.{name}"


@pytest.mark.parametrize("module", sorted(filter(is_served, PATCHING)))
def test_what_is_replaced_is_declared(module: str, declared: set[str]) -> None:
    """By its whole path: a name of the same letters elsewhere is another thing."""
    members = [parted(path) for path in declared]
    places = imports(tree_of(module))
    for name, attribute in assigned(tree_of(module)):
        if not places.get(name, "accel_fsdp").startswith("accel_fsdp"):  # not ours, nor what the script made
            owner = resolved(places[name])
            assert any(known is owner and attribute == member_name for known, member_name in members), (
                f"{places[name]}.{attribute}"
            )


def resolved(path: str) -> Any:
    """What lies at module:name, or the module."""
    module, _, names = path.partition(":")
    member: Any = import_module(module)
    for name in filter(None, names.split(".")):
        member = getattr(member, name)
    return member


def parted(path: str) -> tuple[Any, str]:
    """The class or the module that something declared belongs to, and its name there."""
    module, _, names = path.partition(":")
    owner, _, name = names.rpartition(".")
    return resolved(f"{module}:{owner}"), name


def is_declared(owner: type, name: str, members: list[tuple[Any, str]]) -> bool:
    """Of the class that has it, or of one that derives from that."""
    return any(
        isinstance(known, type) and issubclass(known, owner) and name == member_name for known, member_name in members
    )


def imports(tree: ast.AST) -> dict[str, str]:
    """Where the names that a module imports lie, anywhere in it, as module:name, or as a module."""
    places_by_name: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            places_by_name |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                is_module = _is_module(node.module) and _is_module(f"{node.module}.{alias.name}")
                place = f"{node.module}.{alias.name}" if is_module else f"{node.module}:{alias.name}"
                places_by_name[alias.asname or alias.name] = place
    return places_by_name


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for module in filter(is_served, MODULES):
        yield from (
            (module, node) for node in ast.walk(tree_of(module)) if isinstance(node, ast.ClassDef) and node.bases
        )


def library_bases(module: str, node: ast.ClassDef) -> list[type]:
    """The classes of libraries that a class derives from, in the order in which Python asks them."""
    real = getattr(import_module(f"accel_fsdp.{module}"), node.name, None)
    if not isinstance(real, type):  # a class that a function makes
        places = imports(tree_of(module))
        paths = [places[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in places]
        real = type(node.name, tuple(map(resolved, paths)), {})
    return [base for base in real.__mro__[1:] if base.__module__.partition(".")[0] not in OWN_AND_PYTHONS]


def overridden(module: str, node: ast.ClassDef) -> Iterator[tuple[str, type]]:
    """The private methods of a library's classes that a class has anew, each with the library's class."""
    bases = library_bases(module, node)
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and re.match("_[^_]", statement.name):
            yield from ((statement.name, base) for base in bases if statement.name in vars(base))


def called_by_super(tree: ast.AST) -> set[str]:
    """The private methods that are called by `super()`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)]
    of_super = [node.attr for node in calls if isinstance(node.value.func, ast.Name) and node.value.func.id == "super"]
    return {name for name in of_super if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("del {0}._init_utils._check_module_states_for_sync_module_states",
         "has no torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states\n"),
        ("{0}._optim_utils._unflatten_orig_param_states = lambda infos, state_name, **more: None",
         "has torch.distributed.fsdp._optim_utils._unflatten_orig_param_states(infos, state_name, more),"
         " not (fsdp_param_info, output_states, state_name, *)\n"),
        ("{0}._init_utils._init_intra_and_inter_node_groups = None",
         "has torch.distributed.fsdp._init_utils._init_intra_and_inter_node_groups, which isn't callable,"
         " not (global_process_group, num_devices_per_node)\n"),
    ],
)  # fmt: skip
def test_fsdp_on_cpu_is_refused_where_torch_has_changed(change: str, message: str) -> None:
    code = f"""
import sys
import torch.distributed.fsdp
{change.format("torch.distributed.fsdp")}
from accel_fsdp.ranks import cpu
from accel_fsdp.errors import guard
sys.exit(guard(cpu.enable))
"""
    done = python(code, **RANK)
    assert done.code == 1
    oldest, newest = errors.TESTED["torch"]
    expected = f"error: torch {metadata.version('torch')} {message}"
    expected += "  why: FSDP1 on CPU tensors would fail, or save wrong states\n"
    assert done.output.endswith(f"{expected}  fix: pip install 'torch>={oldest},<={newest}', which is tested\n")


def test_a_patch_asks_for_nothing_where_it_is_not_needed() -> None:
    applied: list[str] = []
    gone = library_internals.Internal("torch:no_such_name")
    for until in ("2.0", ""):
        patch = library_internals.patch(gone, why="it fails", until=until)(lambda: applied.append("applied"))
        assert patch.is_needed == (not until)
        with pytest.raises(errors.UserError) if patch.is_needed else contextlib.nullcontext():
            patch()
    assert applied == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("import accelerate; del accelerate.PartialState._prepare_backend", "has no accelerate.PartialState._prepare"),
        ("import accelerate; accelerate.PartialState._prepare_backend = lambda self, cpu, sagemaker_dp: None",
         "has accelerate.PartialState._prepare_backend(self, cpu, sagemaker_dp), not (self, cpu, sagemaker_dp, back"),
    ],
)  # fmt: skip
def test_fsdp_on_cpu_is_refused_where_accelerate_has_changed(change: str, message: str) -> None:
    imports = "import sys\nfrom accel_fsdp import errors\nfrom accel_fsdp.ranks import cpu"
    code = f"{change}\n{imports}\nsys.exit(errors.guard(cpu.enable))"
    done = python(code, **RANK)
    assert done.code == 1
    assert f"error: accelerate {metadata.version('accelerate')} {message}" in done.output
    assert "fix: pip install 'accelerate==1.15.0', which is tested" in done.output


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("_get_grad_norm", None, "has no transformers.Trainer._get_grad_norm\n"),
        ("_load_rng_state", lambda self: None,
         "has transformers.Trainer._load_rng_state(self), not (self, checkpoint)\n"),
        ("_save_checkpoint", lambda self, model, trial, metrics: None,
         "has transformers.Trainer._save_checkpoint(self, model, trial, metrics), not (self, model, trial)\n"),
    ],
)  # fmt: skip
def test_training_is_refused_where_trainer_has_changed(
    name: str,
    other: Callable[..., None] | None,
    message: str,
    sft: Callable[..., Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before data or a model are read: neither is there."""
    if other is None:
        monkeypatch.delattr(Trainer, name)
    else:
        monkeypatch.setattr(Trainer, name, other)
    words = ["--model_name_or_path", tmp_path, "--dataset_name", CHAT_DATA, "--output_dir", tmp_path / "run"]
    done = sft(*words, "--report_to", "none")
    assert done.code == 1
    assert f"error: transformers {metadata.version('transformers')} {message}" in done.output


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from torch.distributed import no_such_name", "has no torch.distributed.no_such_name\n"),
        ("import torch._no_such_module", "has no torch._no_such_module\n"),
    ],
)
def test_a_name_that_a_command_imports_and_a_library_lacks(
    code: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert errors.guard(lambda: exec(code)) == 1
    assert f"error: torch {metadata.version('torch')} {message}" in capsys.readouterr().err


def test_other_failed_imports_are_bugs() -> None:
    with pytest.raises(ImportError):
        errors.guard(lambda: exec("from json import no_such_name"))


# Which versions


def pinned(name: str) -> dict[str, str]:
    lines = [line.partition("==") for line in (ROOT / name).read_text().splitlines() if "==" in line and line[0] != "#"]
    return {package.lower().replace("_", "-"): version for package, _, version in lines}


def versions_of_sets() -> list[dict[str, str]]:
    """The oldest, that of CI, and the newest, which differs from that of CI where a file says so."""
    oldest, usual = pinned("constraints-oldest.txt"), pinned("constraints.txt")
    sets = oldest, usual, usual | pinned("constraints-newest.txt")
    return [{name: versions[name] for name in errors.TESTED} for versions in sets]


def test_the_tested_versions_are_those_of_the_sets() -> None:
    oldest, _, newest = sets = versions_of_sets()
    assert {name: (oldest[name], newest[name]) for name in errors.TESTED} == errors.TESTED
    readme = (ROOT / "README.md").read_text()
    for name in errors.TESTED:
        shown = " | ".join(versions[name].removesuffix(".0") for versions in sets)
        assert f"| {name} | {shown} |" in readme


def test_the_installed_set_is_one_of_the_tested() -> None:
    ours = {name: metadata.version(name).partition("+")[0] for name in errors.TESTED}
    assert ours in versions_of_sets()


def test_the_ranges_begin_with_the_oldest_tested_and_end_after_the_newest() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = [line.strip().strip('",') for line in text.splitlines() if line.strip().startswith('"')]
    for name, (oldest, newest) in errors.TESTED.items():
        [range_of] = [Requirement(requirement).specifier for requirement in named if requirement.startswith(f"{name}>")]
        assert Version(oldest) in range_of
        assert Version(newest) in range_of
        below = [Version(each.version) for each in range_of if each.operator == ">="]
        assert [each.release[:2] for each in below] == [Version(oldest).release[:2]]
        major, minor = Version(newest).release[:2]
        ends = {"torch": f"{major}.{minor + 1}", "accelerate": f"{major}.{minor + 1}", "peft": f"{major}.{minor + 1}"}
        assert Version(ends.get(name, f"{major + 1}")) not in range_of


def test_the_check_reads_signatures() -> None:
    cases = {"name known": True, "name": False, "name *": True, "known *": False, "* known": True, "* other": False}
    for expected, fits in cases.items():
        internal = library_internals.Internal("accel_fsdp.errors:did_you_mean", expected)
        assert (library_internals.flaw(internal) == "") is fits
