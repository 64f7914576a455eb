"""What the allocator reserves over loading, steps, evaluation and export, and where it runs out."""

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from conftest import accel_fsdp

from accel_fsdp.config import Engine
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction import trace_store
from accel_fsdp.prediction.memory import (
    ModelShape,
    Reservation,
    Tapes,
    predict,
    reservation,
    reserve,
    variant_of,
)
from accel_fsdp.units import GIB

FULL = Recipe(rows=2, length=2048)
LORA = Recipe("lora", dtype="bfloat16", rows=2, length=2048)
ONE, DDP = Layout(Engine.NONE, 1, 1, 1), Layout(Engine.DDP, 1, 8, 8)
FSDP1, FSDP2 = Layout(Engine.FSDP1, 1, 8, 8), Layout(Engine.FSDP2, 1, 8, 8)


SMALL, LARGE = "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1"


def model(recipe: Recipe, layout: Layout, name: str = SMALL) -> tuple[ModelShape, Tapes]:
    stored = trace_store.find(name)
    assert stored is not None
    return stored[0], stored[1][variant_of(recipe, layout.engine)]


def reserved(
    recipe: Recipe, layout: Layout, room: float | None = None, name: str = SMALL, **given: object
) -> Reservation:
    room_bytes = None if room is None else round(room)
    return reserve(*model(recipe, layout, name), recipe, layout, capacity_bytes=room_bytes, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize(("checkpointing", "optimizer"), [("none", "adamw_torch_fused"), ("full", "adamw_torch")])
@pytest.mark.parametrize("layout", [ONE, DDP, FSDP1, FSDP2, replace(FSDP2, strategy=2), replace(FSDP1, strategy=2)])
def test_the_steps_allocate_what_is_predicted_of_one(
    method: str, checkpointing: str, optimizer: str, layout: Layout
) -> None:
    """Tensor by tensor the peak is that of the walk which sums bytes, up to what the allocator rounds."""
    dtype = "float32" if method == "full" else "bfloat16"
    recipe = Recipe(method, dtype=dtype, rows=2, checkpointing=checkpointing, optimizer=optimizer)  # type: ignore[arg-type]
    expected = predict(*model(recipe, layout), recipe, layout).peak.total
    reservation = reserved(recipe, layout, exports=False)
    assert reservation.allocated == pytest.approx(expected, rel=0.015)
    assert reservation.allocated <= reservation.active <= reservation.reserved


@pytest.mark.parametrize("layout", [FSDP1, FSDP2, replace(FSDP2, ranks=7, ranks_per_node=7)])
def test_gradient_accumulation(layout: Layout) -> None:
    """On seven GPUs shards are padded, which makes no gradient wider."""
    recipe = replace(FULL, accumulation=3)
    expected = predict(*model(recipe, layout), recipe, layout).peak.total
    assert reserved(recipe, layout, exports=False).allocated == pytest.approx(expected, rel=0.02)


def test_only_fsdp1_lets_blocks_wait_for_other_streams() -> None:
    """`record_stream` frees late: active bytes are more than the allocated ones (torchtitan, pull request 165)."""
    fsdp1, two = reserved(FULL, FSDP1), reserved(FULL, FSDP2)
    assert fsdp1.active > fsdp1.allocated
    assert two.active == two.allocated


@pytest.mark.parametrize("layout", [ONE, FSDP1, FSDP2])
def test_expandable_segments_waste_less(layout: Layout) -> None:
    recipe = replace(LORA, checkpointing="full", rows=4)
    plain, expandable = reserved(recipe, layout), reserved(recipe, layout, expandable=True)
    assert plain.allocated == pytest.approx(expandable.allocated, rel=0.01)
    assert expandable.reserved < plain.reserved


@pytest.mark.parametrize("layout", [ONE, FSDP1, FSDP2])
def test_rows_of_many_lengths_leave_gaps_that_expandable_segments_do_not(layout: Layout) -> None:
    recipe = replace(LORA, checkpointing="full", rows=4)
    varied = replace(recipe, varied=True)
    equal, plain, expandable = (
        reserved(recipe, layout),
        reserved(varied, layout),
        reserved(varied, layout, expandable=True),
    )
    assert plain.allocated == pytest.approx(equal.allocated, rel=0.01)
    assert plain.reserved > 1.2 * equal.reserved
    assert expandable.reserved == pytest.approx(reserved(recipe, layout, expandable=True).reserved, rel=0.03)


def test_growing_lengths_stand_for_random_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of lengths that are spread evenly, one after the other, reserve about as much."""
    recipe = replace(LORA, checkpointing="full", varied=True)
    usual = reserved(recipe, ONE).reserved
    drawn = []
    for seed in range(5):
        shares = random.Random(seed)
        monkeypatch.setattr(reservation, "GROWING", [shares.random() for _ in range(30)])
        drawn.append(reserved(recipe, ONE).reserved)
    assert usual == pytest.approx(median(drawn), rel=0.2)


def test_where_it_runs_out() -> None:
    """The phase is named; just enough memory is enough."""
    whole = reserved(FULL, ONE)
    assert reserved(FULL, ONE, whole.reserved) == whole
    weights = 4 * model(FULL, ONE)[0].numel
    assert reserved(FULL, ONE, 0.9 * weights).failed_at == "loading"
    assert reserved(FULL, ONE, 1.1 * weights).failed_at == "forward of step 1"
    states = 0.99 * 4 * weights  # weights, gradients and both moments
    assert reserved(replace(FULL, length=64), ONE, states).failed_at == "optimizer of step 1"


def test_cached_blocks_go_back_before_it_runs_out() -> None:
    """A GPU with less than what is reserved without a limit still holds what is allocated; it may take time."""
    recipe = replace(LORA, checkpointing="full", rows=8, length=4096)
    free = reserved(recipe, ONE, name=LARGE)
    room = 0.97 * free.reserved
    tight = reserved(recipe, ONE, room, LARGE)
    assert not tight.failed_at
    assert free.allocated < tight.reserved <= room
    assert reserved(recipe, ONE, 0.98 * free.allocated, LARGE).failed_at


def test_an_evaluation_of_larger_batches() -> None:
    recipe = replace(LORA, checkpointing="full", rows=1)
    trained = reserved(recipe, ONE)
    evaluated = reserved(replace(recipe, eval_batch=8), ONE)
    logits = 8 * recipe.length * model(recipe, ONE)[0].vocab
    assert evaluated.allocated - trained.allocated > 5 * logits
    assert reserved(replace(recipe, eval_batch=8), ONE, trained.reserved + GIB / 2).failed_at == "evaluation"


def test_an_export_gathers_one_unit_at_a_time() -> None:
    """Under FSDP1 the root, with embedding and head, is whole in float32 on every GPU."""
    recipe, layout = replace(FULL, length=32, rows=1), replace(FSDP1, ranks=64, ranks_per_node=8)
    without, with_export = (reserved(recipe, layout, exports=each).reserved for each in (False, True))
    assert with_export > without


@pytest.mark.slow
def test_the_plan_says_whether_it_fits_and_how_surely() -> None:
    """As fewer GiB are there, a way that fits does so with expandable segments only, then perhaps, then not."""
    seen = []
    for memory in (80, 48, 44, 42, 41, 40, 39, 38, 37, 36, 32):
        words = ["--model", LARGE, "--gpus", f"1xA100-{memory}GB", "--seq-len", "4096", "--batch", "8"]
        asked = [*words, "--method", "lora", "--checkpointing", "full", "--json"]
        report = json.loads(accel_fsdp("plan", *asked).output)
        seen.append(report["strategies"][0]["fits"])
    order = ["yes", "expandable", "tight", "no"]
    assert [order.index(value) for value in seen] == sorted(order.index(value) for value in seen)
    assert {seen[0], seen[-1]} == {"yes", "no"}
    assert "expandable" in seen


def test_a_job_says_whether_its_rows_have_many_lengths(tmp_path: Path) -> None:
    yaml, line = tmp_path / "fsdp.yaml", tmp_path / "arguments"
    machine = ("--model", SMALL, "--gpus", "2xA100-80GB")
    accel_fsdp("config", "--yes", "-o", yaml, *machine, "--method", "lora")
    job = "--per_device_train_batch_size 4 --max_length 4096 --use_peft true --lora_dropout 0"

    def planned_with(more: str) -> str:
        line.write_text(f"accelerate launch train/sft.py --model_name_or_path {SMALL} {job} {more}\n")
        return " ".join(accel_fsdp("plan", *machine, "--config", yaml, "--args", line).output.split())

    gaps = "as rows of many lengths leave gaps"
    assert gaps in planned_with("")
    assert gaps not in planned_with("--packing true")


def test_a_job_whose_evaluation_is_larger_than_its_steps(tmp_path: Path) -> None:
    """Trainer evaluates 8 rows at once unless it is told otherwise, whatever the training batch."""
    yaml = tmp_path / "fsdp.yaml"
    machine = ("--model", SMALL, "--gpus", "2xA100-40GB")
    accel_fsdp("config", "--yes", "-o", yaml, *machine, "--method", "lora", "--activation-checkpointing", "false")
    job = "--per_device_train_batch_size 1 --max_length 4096 --use_peft true --lora_dropout 0 --max_steps 10"

    def planned_with(more: str) -> dict[str, Any]:
        line = tmp_path / "arguments"
        line.write_text(f"accelerate launch train/sft.py --model_name_or_path {SMALL} {job} {more}\n")
        asked = [*machine, "--config", yaml, "--args", line, "--json"]
        strategy: dict[str, Any] = json.loads(accel_fsdp("plan", *asked).output)["strategies"][0]
        return strategy

    assert planned_with("")["fits"] == "yes"
    evaluated = planned_with("--eval_strategy steps")
    assert (evaluated["fits"], evaluated["runs_out"]) == ("no", "evaluation")
    assert planned_with("--eval_strategy steps --per_device_eval_batch_size 1")["fits"] == "yes"
