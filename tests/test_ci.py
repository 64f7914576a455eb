"""The linter in continuous integration: the steps of action.yml, the examples of docs/ci.md, the pre-commit hook."""

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
BLOCKS = [
    yaml.load(text, yaml.BaseLoader)  # `on` stays a word
    for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(), flags=re.DOTALL)
]
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
GOOD = (ROOT / "accelerate_configs" / "fsdp2.yaml").read_text()
BAD = GOOD.replace("fsdp_offload_params", "fsdp_ofload_params")
STUB = """\
#!/bin/sh
printf '[%s]' "${0##*/}" "$@"
echo
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's repository with two YAMLs, which is the folder that steps run in."""
    project = tmp_path / "project"
    (project / "configs").mkdir(parents=True)
    (project / "configs" / "fsdp.yaml").write_text(GOOD)
    (project / "configs" / "with space.yaml").write_text(GOOD)
    return project


def in_bash(script: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs a step as GitHub does, with this environment's commands and this project's package."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment}
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, errors="replace", timeout=120)


def run_step(name: str, folder: Path, /, path: str = "", **inputs: str) -> "subprocess.CompletedProcess[str]":
    values = {key: str(value.get("default", "")) for key, value in ACTION["inputs"].items()} | inputs
    environment = {key: filled_in(str(value), values) for key, value in STEPS[name].get("env", {}).items()}
    summary = {"GITHUB_STEP_SUMMARY": str(folder.parent / "summary.md")}
    return in_bash(STEPS[name]["run"], folder, **environment, **summary, **({"PATH": path} if path else {}))


def filled_in(text: str, inputs: Mapping[str, str]) -> str:
    text = text.replace("${{ github.action_path }}", str(ROOT))
    return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: inputs[match[1]], text)


@pytest.fixture
def stubs(tmp_path: Path) -> str:
    """A PATH on which python and accel-fsdp only print the words that they are called with."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "accel-fsdp"):
        stub = tmp_path / "bin" / name
        stub.write_text(STUB)
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


def test_the_check_passes_good_files_and_annotates_bad_ones(project: Path) -> None:
    finished = run_step("Check", project, files="configs/*.yaml\n", strict="true")
    assert (finished.returncode, finished.stdout) == (0, ""), finished.stderr
    assert finished.stderr == "configs/fsdp.yaml: clean\nconfigs/with space.yaml: clean\n"
    (project / "configs" / "with space.yaml").write_text(BAD)
    finished = run_step("Check", project, files="configs/fsdp.yaml\nconfigs/with space.yaml\n")
    assert finished.returncode == 1, finished.stderr
    assert re.match(
        r"::error file=configs/with space\.yaml,line=\d+,col=3,title=AF103::.*fsdp_ofload_params", finished.stdout
    )
    assert len(finished.stdout.splitlines()) == 1
    assert run_step("Check", project, files="nowhere/*.yaml\n").returncode == 2


def test_a_pattern_of_all_folders_leaves_none_out(project: Path, stubs: str) -> None:
    for name in ("top.yaml", "one/inner.yaml", "one/two/deep.yaml"):
        (project / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "all" / name).touch()
    for step in ("Check", "Plan", "Rehearse"):
        finished = run_step(step, project, path=stubs, files="all/**/*.yaml")
        assert finished.returncode == 0, finished.stderr
        said = finished.stdout + (project.parent / "summary.md").read_text() if step == "Plan" else finished.stdout
        assert all(f"all/{name}" in said for name in ("top.yaml", "one/inner.yaml", "one/two/deep.yaml")), said


def test_the_check_takes_model_and_strictness(project: Path) -> None:
    (project / "configs" / "fsdp.yaml").write_text(GOOD.replace("LlamaDecoderLayer", "LamaDecoderLayer"))
    one = {"files": "configs/fsdp.yaml", "model": "meta-llama/Llama-3.1-8B"}
    assert run_step("Check", project, **one).returncode == 1
    (project / "configs" / "fsdp.yaml").write_text(GOOD.replace("TRANSFORMER_BASED_WRAP", "NO_WRAP"))
    lenient, strict = (run_step("Check", project, files=one["files"], strict=word) for word in ("false", "true"))
    assert (lenient.returncode, strict.returncode) == (0, 1), lenient.stdout
    assert "::warning" in lenient.stdout


def test_the_plan_is_in_the_summary(project: Path) -> None:
    finished = run_step("Plan", project, files="configs/*.yaml\n")
    assert finished.returncode == 0, finished.stderr
    pages = (project.parent / "summary.md").read_text().split("### ")[1:]
    assert [page.splitlines()[0] for page in pages] == ["configs/fsdp.yaml", "configs/with space.yaml"]
    for page in pages:
        table = re.search(r"```text\n(.*)```\n\Z", page, flags=re.DOTALL)
        assert table
        assert re.search(r"^FSDP2 FULL_SHARD +[\d.]+ .* yes ", table[1], flags=re.MULTILINE)


def test_a_plan_that_does_not_fit_fails_after_the_last_file(project: Path) -> None:
    """Eight of these GPUs are too small for full training of 8 billion parameters."""
    finished = run_step("Plan", project, files="configs/*.yaml", gpus="8xRTX4090", model="meta-llama/Llama-3.1-8B")
    assert finished.returncode == 1, finished.stderr
    assert (project.parent / "summary.md").read_text().count("### ") == 2


def test_a_rehearsal_gets_its_arguments_as_a_shell_would_give_them(project: Path, stubs: str) -> None:
    args = "--max_length 64 --prompt 'two words' --template \"a;$(touch ran)\""
    words = {"files": "configs/*.yaml", "script": "my train.py", "args": args, "model": "gpt2"}
    finished = run_step("Rehearse", project, path=stubs, **words)
    tail = "[--][--max_length][64][--prompt][two words][--template][a;$(touch ran)]"
    assert finished.stdout.splitlines() == [
        f"[accel-fsdp][rehearse][--model][gpt2][--script][my train.py][configs/{name}.yaml]{tail}"
        for name in ("fsdp", "with space")
    ]
    assert not (project / "ran").exists()
    finished = run_step("Rehearse", project, path=stubs, files="configs/fsdp.yaml")
    assert finished.stdout == "[accel-fsdp][rehearse][configs/fsdp.yaml][--]\n"


def test_the_installation_brings_torch_for_a_rehearsal_only(project: Path, stubs: str) -> None:
    assert run_step("Install", project, path=stubs).stdout.endswith(f"[{ROOT}]\n")
    assert f"[{ROOT}[train]]" in run_step("Install", project, path=stubs, rehearse="true").stdout


def scripts(content: Any) -> list[str]:
    """All that the steps of a workflow or an action run."""
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else []
    own = [content["run"]] if isinstance(content, dict) and isinstance(content.get("run"), str) else []
    return own + [script for value in inner for script in scripts(value)]


@pytest.mark.parametrize("content", [ACTION, *WORKFLOWS.values()], ids=["action.yml", *WORKFLOWS])
def test_no_input_becomes_part_of_a_script(content: Any) -> None:
    assert scripts(content)
    assert [script for script in scripts(content) if "${{" in script] == []


def test_the_inputs_of_the_example_are_those_of_the_action(project: Path) -> None:
    (step,) = (step for step in BLOCKS[0]["jobs"]["fsdp"]["steps"] if "accel-fsdp@" in step.get("uses", ""))
    assert step["with"].keys() <= ACTION["inputs"].keys()
    listed = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "ci.md").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(listed))) == set(ACTION["inputs"])
    for name in ("Check", "Plan"):
        finished = run_step(name, project, **step["with"])
        assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("block", [BLOCKS[1], BLOCKS[2]], ids=["code scanning", "GitLab"])
def test_the_commands_of_the_examples_run(block: Any, project: Path) -> None:
    lines = scripts(block) + block["fsdp"]["script"] if "fsdp" in block else scripts(block)
    own = [line for line in lines if line.startswith("accel-fsdp ")]
    assert own
    for line in own:
        finished = in_bash(line, project)
        assert finished.returncode == 0, finished.stderr
    (project / "configs" / "fsdp.yaml").write_text(BAD)
    assert in_bash(own[0], project).returncode == 1


def test_the_commands_of_the_workflow_run(tmp_path: Path) -> None:
    """On this system and Python; the workflow runs them on others."""
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    lines = [line for line in scripts(WORKFLOWS["check.yml"]["jobs"]["light"]) if line.startswith("accel-fsdp ")]
    assert {line.split()[1] for line in lines} >= {"--help", "check", "plan", "migrate"}
    finished = in_bash("\n".join(lines), tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert WORKFLOWS["check.yml"]["jobs"]["action"]["steps"][1]["with"].keys() <= ACTION["inputs"].keys()


def test_a_release_is_made_by_tags_alone() -> None:
    assert WORKFLOWS["release.yml"][True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true


@pytest.fixture
def with_hook(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the pre-commit configuration of the page, and the hook installed.

    The hook comes from a repository with this project's manifest, and runs the `accel-fsdp` that is installed here:
    only pip is left out.
    """
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "A User")
        monkeypatch.setenv(f"{name}_EMAIL", "user@example.com")
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "cache"))
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    in_bash("git init -q && git add . && git commit -qm hooks && git tag v0.1.0", hooks).check_returncode()
    config = BLOCKS[3]
    config["repos"][0]["repo"] = str(hooks)
    config["repos"][0]["hooks"][0] |= {"language": "system"}
    (project / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    in_bash("git init -q && pre-commit install", project).check_returncode()
    return project


def test_a_commit_with_a_misspelt_key_is_refused(with_hook: Path) -> None:
    in_bash("mkdir other && mv 'configs/with space.yaml' other/plain.yaml", with_hook).check_returncode()
    (with_hook / "other" / "plain.yaml").write_text("a: chart, not Accelerate's\n")
    good = in_bash("git add . && git commit -m good", with_hook)
    assert good.returncode == 0, good.stdout + good.stderr
    assert re.search(r"accel-fsdp check\.+Passed", good.stderr)
    (with_hook / "configs" / "fsdp.yaml").write_text(BAD)
    bad = in_bash("git commit -am bad", with_hook)
    assert bad.returncode == 1
    assert re.search(r"accel-fsdp check\.+Failed", bad.stderr)
    assert "error AF103" in bad.stderr
    assert in_bash("git log --format=%s", with_hook).stdout == "good\n"


def test_the_commands_of_the_workflow_need_nothing_that_windows_lacks(tmp_path: Path) -> None:
    """Also with an output whose encoding has no arrows, such as that of a pipe there."""
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    lines = [line for line in scripts(WORKFLOWS["check.yml"]["jobs"]["light"]) if line.startswith("accel-fsdp ")]
    program = f'accel-fsdp() {{ {sys.executable} {ROOT / "tests" / "windows.py"} "$@"; }}\n'
    finished = in_bash(program + "\n".join(lines), tmp_path, PYTHONIOENCODING="cp1252")
    assert finished.returncode == 0, finished.stderr
