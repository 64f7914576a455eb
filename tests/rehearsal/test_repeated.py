"""A rehearsal repeats what the ranks did in one plain process: unusual scripts that are right pass."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from rehearsals import FSDP1, FSDP2, rehearsed, yaml_file

from accel_fsdp.ranks import RankEvent, loss_shares, ratios
from accel_fsdp.rehearsal import repeated, report

SCRIPT = ROOT / "tests/rehearsal/right.py"
SAME = re.compile(
    r"gradients (?:and weights of|after backward in) the first 2 steps are .* \(apart by (\d)e([+-]\d+)\)"
)
RIGHT: dict[str, dict[str, Any]] = {
    "accumulates,own loss,groups,clips,buffers": FSDP2 | {"fsdp_cpu_ram_efficient_loading": False},
    "accumulates by hand,frozen weights,momentum,evaluates": FSDP1,
    "logs a gradient,rate in a tensor": FSDP2,
    "dropout,two passes,weights clamped": {},
    "loss and logits,clips each micro-batch,summed loss": FSDP1 | {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    "probes gradients,momentum,slow rank,gathers padded,generates": FSDP2,
    "trains the head alone,compares weights,skips a mean": {},
    "compiled": {},
    "sums gradients": FSDP2,
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("ways", RIGHT)
def test_what_is_unusual_and_right_moves_weights_as_one_process_does(
    ways: str, tiny_model: Path, tmp_path: Path
) -> None:
    step = rehearsed(yaml_file(tmp_path, RIGHT[ways]), SCRIPT, ways, tiny_model)
    assert step["passed"], step
    same = SAME.search(step["said"])
    assert same, step["said"]
    assert int(same[2]) <= -5 or same[1] == "0"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_gradients_that_are_reduced_in_16_bits_pass(dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    step = rehearsed(yaml_file(tmp_path, {}), SCRIPT, f"gradients in {dtype}", tiny_model)
    assert step["passed"], step
    assert SAME.search(step["said"]), step["said"]


@pytest.mark.parametrize(("ways", "fsdp"), [("saves", FSDP2), ("saves,fsdp1", FSDP1), ("saves,ddp", {})])
def test_right_saves_of_many_kinds_pass(ways: str, fsdp: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """Checkpoints, parts of a model, averages of its weights, packed ones, and files that ranks write in turn."""
    step = rehearsed(yaml_file(tmp_path, fsdp), SCRIPT, ways, tiny_model, tmp_path / "saved")
    assert step["passed"], step


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("ways", "why"),
    [
        ("hook", "hooks were added to the model after it was sharded"),
        ("penalty", "is used outside of the model's forward"),
        ("averages weights", "the script combines the ranks' tensors itself"),
        ("gradients of low rank", "powerSGD_hook reduces gradients to something else than their mean"),
        ("skips a batch", "gradients are kept, cleared or changed between two backward passes of a step"),
    ],
)
def test_what_can_not_be_repeated_is_said(ways: str, why: str, tiny_model: Path, tmp_path: Path) -> None:
    step = rehearsed(yaml_file(tmp_path, {}), SCRIPT, ways, tiny_model)
    assert step["passed"], step
    assert "not repeated in one process: " in step["said"]
    assert why in step["said"]


def test_what_deepspeed_trains_is_observed_and_not_repeated(tiny_model: Path, tmp_path: Path) -> None:
    section = {"zero_stage": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    top = {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    step = rehearsed(yaml_file(tmp_path, {}, **top), SCRIPT, "accumulates,own loss,groups,clips", tiny_model)
    assert step["passed"], step
    assert "not repeated in one process: DeepSpeed's engine reduces" in step["said"]


def test_a_model_without_a_wrapper_passes_where_the_script_averages(tiny_model: Path, tmp_path: Path) -> None:
    step = rehearsed(yaml_file(tmp_path, {}), SCRIPT, "averages gradients by hand", tiny_model)
    assert step["passed"], step


def update_with(losses: list[float], accumulation: int, *, backwards: int = 0, same: bool = False) -> dict[str, Any]:
    """An update with one forward pass for each loss, of which this came back."""
    forwards = [
        {"inputs": [[torch.tensor([0 if same else number])], {}], "loss": 0, "gradients": [torch.tensor(loss)]}
        for number, loss in enumerate(losses)
    ]
    return {"forwards": forwards, "accumulation": accumulation, "midway": False, "backwards": backwards or len(losses)}


def test_losses_may_be_of_more_batches_than_they_are_divided_by() -> None:
    other = {"what": "other-step", "batches": 4, "accumulation": 2}
    assert loss_shares.misdivided(update_with([0.5] * 4, 2), 2) == other
    assert not loss_shares.misdivided(update_with([0.5] * 2, 2), 2)
    assert not loss_shares.misdivided(update_with([0.5] * 4, 2, same=True), 3)  # two losses of each batch
    assert not loss_shares.misdivided(update_with([0.5] * 4, 2, backwards=2), 3)  # of two tasks


def test_what_only_ran_is_not_called_proven(capsys: pytest.CaptureFixture[str]) -> None:
    ran = "DDP; each rank holds all 9 weights" + repeated.summary(
        [RankEvent(0, 0.0, "unrepeated", {"why": "a closure"})]
    )
    report.conclude(report.Report("a.yaml", steps=[report.StepResult("check", True, 0.1, "no errors")]))
    assert "only ran" not in capsys.readouterr().out
    steps = [report.StepResult(name, True, 0.1, said) for name, said in (("check", "no errors"), ("the script", ran))]
    report.conclude(report.Report("a.yaml", steps=steps))
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["proven here: check", "only ran, not compared with one process: the script"]


def test_a_rank_that_holds_nothing_of_a_weight_agrees_with_all_others() -> None:
    """Of a head with one output, which alone is trained at first, rank 1 has an empty shard."""
    head, clipped = ([0, 0], torch.ones(1, 4)), ([0, 0], torch.full((1, 4), 0.5))
    empty = ([1, 0], torch.ones(0, 4))
    assert ratios.factor({"head": head}, {"head": clipped}) == 0.5
    assert ratios.factor({"head": empty}, {"head": empty}) is None
    updates = [{"trained": ["head"], "reduced": {"head": part}} for part in (clipped, empty)]
    assert ratios.differing_copies(updates, "reduced") is None


def test_a_rate_of_0_is_remarked() -> None:
    content = {"rates": [0.0], "cleared": False, "idle": False, "changed": False, "apart": 0.0, "steps": "", "line": ""}
    still = [RankEvent(0, 0.0, "weights", {"model": 0, "held": {"head": [0, 0.1, 1.0]}})] * 2
    idle, trained = ([RankEvent(0, 0.0, "repeated", {**content, "rates": [rate]}), *still] for rate in (0.0, 0.1))
    assert not list(repeated.differences(idle))
    assert "the learning rate is 0 in them" in repeated.summary(idle)
    (mistake,) = repeated.differences(trained)
    assert mistake.what == "no weight moved in any step"
    in_one_process = {**content, "rates": [0.1], "cleared": True, "idle": True}
    assert not list(repeated.differences([RankEvent(0, 0.0, "repeated", in_one_process), *still]))
