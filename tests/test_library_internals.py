"""What this package relies on inside of its libraries: there in what is installed, and missed in one clear line."""

import ast
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import CHAT_DATA, ROOT, Finished, run, warm_python
from packaging.requirements import Requirement
from packaging.version import Version
from test_architecture import MODULES, PATCHING, TREES, assigned
from transformers import Trainer

from accel_fsdp import errors, library_internals

pytestmark = pytest.mark.oldest
DECLARING = [module for module, path in MODULES.items() if "\nRELIES_ON" in path.read_text()]
LISTED = """
from importlib import import_module
from accel_fsdp.library_internals import flaw
for module in {modules}:
    for name, listed in vars(import_module("accel_fsdp." + module)).items():
        if name.startswith("RELIES_ON"):
            for one in listed:
                print(module, flaw(one)) if flaw(one) else None
                print(one.path)
"""
RANK = {"ACCELERATE_USE_FSDP": "true", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}


def python(code: str, **environment: str) -> Finished:
    warm = warm_python()
    return run([warm["PYTHON_EXEC"], "-c", code], **warm, **environment)


@pytest.fixture(scope="module")
def declared() -> set[str]:
    """All paths that are declared; in a process of its own, as what is patched here looks otherwise."""
    done = python(LISTED.format(modules=DECLARING))
    assert done.code == 0, done.output
    found = {line for line in done.output.splitlines() if ":" in line and " " not in line}
    assert [line for line in done.output.splitlines() if line.partition(" ")[0] in DECLARING] == []
    return found


def test_what_is_declared_is_there(declared: set[str]) -> None:
    assert len(declared) > 40
    assert {"cpu", "training.losses", "exporter.reload", "prediction.tracing.cuda_emulation"} <= set(DECLARING)


def test_what_is_overridden_or_replaced_is_declared(declared: set[str]) -> None:
    names = {path.rpartition(":")[2].rpartition(".")[2] for path in declared}
    for module in [name for name in MODULES if name.startswith("training.")]:
        assert private_methods(TREES[module]) <= names, module
    for module in PATCHING:
        assert replaced(TREES[module]) <= names, module


def private_methods(tree: ast.AST) -> set[str]:
    """Of a library's class, as far as they are called by `super()`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)]
    of_super = [node.attr for node in calls if isinstance(node.value.func, ast.Name) and node.value.func.id == "super"]
    return {name for name in of_super if name.startswith("_") and not name.startswith("__")}


def replaced(tree: ast.AST) -> set[str]:
    """What is assigned to an attribute of a module or a class that isn't of this package."""
    return {name for owner, name in assigned(tree) if owner != "self" and name != "accel_fsdp_enabled"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("del {0}._init_utils._check_module_states_for_sync_module_states",
         "has no torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states\n"),
        ("{0}._optim_utils._unflatten_orig_param_states = lambda infos, state_name, **more: None",
         "has torch.distributed.fsdp._optim_utils._unflatten_orig_param_states(infos, state_name, more),"
         " not (fsdp_param_info, output_states, state_name, *)\n"),
        ("{0}._flat_param.FlatParamHandle.to_cpu = None",
         "has torch.distributed.fsdp._flat_param.FlatParamHandle.to_cpu, which is no function, not (self)\n"),
    ],
)  # fmt: skip
def test_fsdp_on_cpu_is_refused_where_torch_has_changed(change: str, said: str) -> None:
    code = f"""
import sys
import torch.distributed.fsdp
{change.format("torch.distributed.fsdp")}
from accel_fsdp import cpu
from accel_fsdp.errors import guard
sys.exit(guard(cpu.enable))
"""
    done = python(code, **RANK)
    assert done.code == 1
    oldest, newest = errors.TESTED["torch"]
    expected = f"error: torch {metadata.version('torch')} {said}"
    expected += "  why: FSDP1 on CPU tensors would fail, or save wrong states\n"
    assert done.output.endswith(f"{expected}  fix: pip install 'torch>={oldest},<={newest}', which is tested\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("import accelerate; del accelerate.PartialState._prepare_backend", "has no accelerate.PartialState._prepare"),
        ("import accelerate; accelerate.PartialState._prepare_backend = lambda self, cpu, sagemaker_dp: None",
         "has accelerate.PartialState._prepare_backend(self, cpu, sagemaker_dp), not (self, cpu, sagemaker_dp, back"),
    ],
)  # fmt: skip
def test_fsdp_on_cpu_is_refused_where_accelerate_has_changed(change: str, said: str) -> None:
    code = f"{change}\nimport sys\nfrom accel_fsdp import cpu, errors\nsys.exit(errors.guard(cpu.enable))"
    done = python(code, **RANK)
    assert done.code == 1
    assert f"error: accelerate {metadata.version('accelerate')} {said}" in done.output
    assert "fix: pip install 'accelerate==1.15.0', which is tested" in done.output


@pytest.mark.parametrize(
    ("name", "other", "said"),
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
    said: str,
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
    assert f"error: transformers {metadata.version('transformers')} {said}" in done.output


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("from torch.distributed import no_such_name", "has no torch.distributed.no_such_name\n"),
        ("import torch._no_such_module", "has no torch._no_such_module\n"),
    ],
)
def test_a_name_that_a_command_imports_and_a_library_lacks(
    code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert errors.guard(lambda: exec(code)) == 1
    assert f"error: torch {metadata.version('torch')} {said}" in capsys.readouterr().err


def test_other_failed_imports_are_bugs() -> None:
    with pytest.raises(ImportError):
        errors.guard(lambda: exec("from json import no_such_name"))


# Which versions


def pinned(name: str) -> dict[str, str]:
    lines = [line.partition("==") for line in (ROOT / name).read_text().splitlines() if "==" in line and line[0] != "#"]
    return {package.lower().replace("_", "-"): version for package, _, version in lines}


def test_the_tested_versions_are_those_of_the_two_sets() -> None:
    oldest, newest = pinned("constraints-oldest.txt"), pinned("constraints.txt")
    assert {name: (oldest[name], newest[name]) for name in errors.TESTED} == errors.TESTED
    readme = (ROOT / "README.md").read_text()
    for name, ends in errors.TESTED.items():
        shown = [end.removesuffix(".0") for end in ends]
        assert f"| {name} | {shown[0]} | {shown[1]} |" in readme


def test_the_installed_set_is_one_of_the_two() -> None:
    ours: dict[str, Any] = {name: metadata.version(name).partition("+")[0] for name in errors.TESTED}
    assert ours in [{name: ends[place] for name, ends in errors.TESTED.items()} for place in (0, 1)]


def test_the_ranges_begin_with_the_oldest_tested_and_hold_the_newest() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = [line.strip().strip('",') for line in text.splitlines() if line.strip().startswith('"')]
    for name, (oldest, newest) in errors.TESTED.items():
        [range_of] = [Requirement(one).specifier for one in named if one.startswith(f"{name}>")]
        assert Version(oldest) in range_of
        assert Version(newest) in range_of
        below = [Version(each.version) for each in range_of if each.operator == ">="]
        assert [each.release[:2] for each in below] == [Version(oldest).release[:2]]


def test_the_check_reads_signatures() -> None:
    cases = {"name known": True, "name": False, "name *": True, "known *": False, "* known": True, "* other": False}
    for expected, fits in cases.items():
        one = library_internals.Internal("accel_fsdp.errors:did_you_mean", expected)
        assert (library_internals.flaw(one) == "") is fits
