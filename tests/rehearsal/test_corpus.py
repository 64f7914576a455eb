"""Scripts of the benchmark's corpus: the line of a mistake is named, and right scripts pass."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from rehearsals import rehearsed

sys.path.append(str(ROOT / "benchmarks"))
import mistakes

CORPUS = (
    *("issue_sampler_and_prepare", "issue_barrier_on_one_rank", "own_reduced_again"),
    *("own_no_wrapper", "unseen_broadcast_of_uneven_shards", "own_shards_in_safetensors", "issue_divided_twice"),
    *("own_cleared_per_micro_batch", "unseen_schedule_too_long", "issue_names_of_the_wrapper"),
    *("unseen_unfreezing_later", "unseen_trainer_loader", "own_eval_left_on"),
)
RIGHT = ("right_two_models", "right_joined", "right_steps_in_backward", "right_codebook", "right_heads_in_turn")


def step_of(name: str, folder: Path) -> dict[str, Any]:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(mistakes.config(mistakes.TABLE[name])))
    return rehearsed(file, mistakes.FOLDER / f"{name}.py")


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", CORPUS)
def test_a_mistake_is_named_with_its_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = step_of(name, tmp_path)
    assert not step["passed"]
    assert re.search(mistakes.TABLE[name]["says"], step["said"]), step
    named = {Path(step["line"]).name, *re.findall(r"\w+\.py:\d+", step["said"])}
    assert named & mistakes.marked(mistakes.FOLDER / f"{name}.py"), step


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = step_of(name, tmp_path)
    assert step["passed"], step
