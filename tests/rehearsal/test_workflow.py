"""The workflow that docs/rehearse.md shows: its own lines, in a clean clone of a repository with two YAMLs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Finished, run

CONFIGS = ROOT / "accelerate_configs"
INSTALLED = [
    "pip install torch --index-url https://download.pytorch.org/whl/cpu",
    "pip install 'accel-fsdp[train]'",
]
"""What stands in the virtual environment of the tests already, from this checkout."""


def workflow() -> dict[str, Any]:
    """The YAML of the page that has jobs."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/rehearse.md").read_text(), flags=re.DOTALL)
    (workflow,) = [block for block in map(yaml.safe_load, blocks) if "jobs" in block]
    return dict(workflow)


def in_clean_clone(folder: Path, **texts: str) -> Finished:
    """Commits these files of configs/, clones the repository, and runs there what is left after the installation."""
    (folder / "mine/configs").mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"mine/configs/{name}.yaml").write_text(text)
    me = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for words in (["init", "-q"], ["add", "."], [*me, "commit", "-qm", "configs"], ["clone", "-q", ".", "../clone"]):
        subprocess.run(["git", *words], cwd=folder / "mine", check=True)
    (job,) = workflow()["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs[:-1] == INSTALLED
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run(["env", "-C", folder / "clone", "bash", "-e", "-c", runs[-1]], PATH=path)


@pytest.mark.slow
def test_a_yaml_is_rehearsed(tmp_path: Path) -> None:
    finished = in_clean_clone(tmp_path, fsdp1_full_shard=(CONFIGS / "fsdp1_full_shard.yaml").read_text())
    assert finished.code == 0, finished.output
    assert finished.output.startswith(
        "configs/fsdp1_full_shard.yaml\narguments: from the header of configs/fsdp1_full_shard.yaml\n"
        "       check ...\nok     check"
    )
    assert finished.output.count("proven here: check, ") == 1
    assert list((tmp_path / "clone").iterdir()) == [tmp_path / "clone/.git", tmp_path / "clone/configs"]


def test_a_mistake_ends_it(tmp_path: Path) -> None:
    right = (CONFIGS / "fsdp2.yaml").read_text()
    wrong = right.replace("fsdp_reshard_after_forward", "fsdp_reshard_after_foward")
    finished = in_clean_clone(tmp_path, a_wrong=wrong, b_right=right)
    assert finished.code == 1, finished.output
    assert finished.output.startswith(
        "configs/a_wrong.yaml\narguments: from the header of configs/a_wrong.yaml\n       check ...\nFAILED check"
    )
    assert "nothing reads fsdp_reshard_after_foward" in finished.output
    assert "b_right" not in finished.output
