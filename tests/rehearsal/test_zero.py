"""A rehearsal under DeepSpeed repeats what the ranks did in one plain process."""

from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_mistakes import DOCS, in_docs, yaml_file
from test_public import rehearsed
from test_repeated import BF16, SAME, SCRIPT

from accel_fsdp.launch.ranks.records import united


def zero(stage: int, batches: int = 1, **more: Any) -> dict[str, Any]:
    section = {"zero_stage": stage, "gradient_accumulation_steps": batches, "gradient_clipping": 0.5, **more}
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": section}


RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulates,own loss,groups,clips,saves state": (zero(2, 2), {}),
    "accumulates,frozen weights,saves state": (zero(3, 2), {}),
    "dropout,two passes,momentum": (zero(1), {}),
    "adapter,accumulates": (zero(3, 2, zero3_init_flag=True), {}),
    "own loss,groups,accumulates": (zero(2, 2), BF16),
    "groups": (zero(3), BF16),
    "trains the head alone,clips,to 1": (zero(2, gradient_clipping="auto"), {}),
    "warmup": (zero(0), {}),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("ways", RIGHT)
def test_what_deepspeed_trains_is_what_one_process_trains(ways: str, tiny_model: Path, tmp_path: Path) -> None:
    engine, top = RIGHT[ways]
    step = rehearsed(yaml_file(tmp_path, {}, **engine, **top), SCRIPT, ways, tiny_model, tmp_path / "saved")
    assert step["passed"], step
    same = SAME.search(step["said"])
    assert same, step["said"]
    assert int(same[2]) <= (-2 if top else -5) or same[1] == "0"


ENGINE = ROOT / "tests/rehearsal/with_deepspeed.py"
OF_ACCELERATE = ROOT / "tests/rehearsal/mistaken.py"
WRONG: dict[str, tuple[Path, str, dict[str, Any], str]] = {
    "losses divided twice, under ZeRO-2": (
        OF_ACCELERATE,
        "divided twice",
        zero(2, 2),
        "accelerator.backward(loss / ACC",
    ),
    "losses not divided, under ZeRO-2": (ENGINE, "not divided", zero(2, 2), "engine.backward("),
    "losses not divided, under ZeRO-3": (ENGINE, "not divided", zero(3, 2), "engine.backward("),
    "backward past DeepSpeed's engine": (ENGINE, "past the engine", zero(2), "loss.backward()"),
    "a loss times the number of ranks, under ZeRO-1": (ENGINE, "times ranks", zero(1), "engine.backward("),
    "gradients scaled on one rank, under ZeRO-2": (ENGINE, "scaled on a rank", zero(2), "engine.step("),
    "gradients scaled on one rank, under ZeRO-3": (ENGINE, "scaled on a rank", zero(3), "engine.step("),
    "weights changed in the model, under ZeRO-2": (ENGINE, "changed behind", zero(2), "engine(input_ids"),
    "weights changed in the model, under ZeRO-3": (ENGINE, "changed behind", zero(3), "engine(input_ids"),
    "an optimizer without the head, under ZeRO-2": (ENGINE, "head forgotten", zero(2), "AdamW(trained"),
    "an optimizer without the head, under ZeRO-3": (ENGINE, "head forgotten", zero(3), "AdamW(trained"),
    "a step before all its batches, under ZeRO-2": (OF_ACCELERATE, "steps early", zero(2, 2), "backward(loss * scale)"),
    "gradients accumulated by hand, under ZeRO-2": (OF_ACCELERATE, "each batch cleared", zero(2), "optimizer.step()"),
    "a norm that DeepSpeed does not clip to": (
        OF_ACCELERATE,
        "clips by DeepSpeed",
        zero(2, gradient_clipping="auto"),
        "max_norm=0.1",
    ),
    "a norm without clipping by DeepSpeed": (
        OF_ACCELERATE,
        "clips by DeepSpeed",
        zero(3, gradient_clipping=0),
        "max_norm=0.1",
    ),
    "evaluation mode on one rank, under ZeRO-3": (OF_ACCELERATE, "evaluates on", zero(3), "backward(loss * scale)"),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_under_deepspeed_are_found(name: str, tiny_model: Path, tmp_path: Path) -> None:
    script, mistake, engine, text = WRONG[name]
    step = rehearsed(yaml_file(tmp_path, {}, **engine), script, mistake, tiny_model, tmp_path / "saved")
    assert not step["passed"], step
    assert f"| {name} | " in DOCS
    assert in_docs(step["said"]), step["said"]
    lines = enumerate(script.read_text().splitlines(), 1)
    assert int(step["line"].rpartition(":")[2]) in [number for number, line in lines if text in line], step


def test_what_deepspeed_keeps_elsewhere_is_said(tiny_model: Path, tmp_path: Path) -> None:
    step = rehearsed(yaml_file(tmp_path, {}, **zero(0), **BF16), SCRIPT, "groups", tiny_model)
    assert step["passed"], step
    assert "not repeated in one process: " in step["said"]
    assert "of DeepSpeed keeps gradients elsewhere" in step["said"]


def test_names_of_all_ranks_are_compared() -> None:
    """Rank 0 may hold no part of a weight, under FSDP1 too."""
    updates = [{"trained": [name], "forwards": [], "steps": [{"names": [[name], []]}]} for name in ("a", "b")]
    first = united(updates)[0]
    assert (first["trained"], first["steps"][0]["names"]) == (["a", "b"], [["a", "b"], []])
