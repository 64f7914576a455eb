"""One predicted step unit by unit: its parts add up to what is predicted for the whole."""

import pytest

from accel_fsdp.config import Engine
from accel_fsdp.hardware import gpus
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction import by_unit, step_time, step_traffic, trace_store
from accel_fsdp.prediction.memory import predict, variant_of
from accel_fsdp.units import any_size

LLAMA = "meta-llama/Llama-3.1-8B"
RECIPES = {
    "full": Recipe(rows=1, length=2048, accumulation=3),
    "lora": Recipe("lora", dtype="bfloat16", rows=2, length=1024, checkpointing="full"),
}


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp1", "fsdp2", "zero"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_units_add_up_to_the_step(engine: str, recipe: Recipe) -> None:
    """Three micro-batches at most: of more than that the second stands for all between."""
    stored = trace_store.find(LLAMA)
    assert stored
    ranks = 1 if engine == "single" else 16
    layout = Layout(engine, 1, ranks, min(ranks, 8))  # type: ignore[arg-type]
    shape, tapes, gpu = stored[0], stored[1][variant_of(recipe, layout.engine)], gpus.find("H100")
    steps = by_unit.unit_steps(shape, tapes, recipe, layout, gpu, 1000)

    whole = step_time(shape, recipe, layout, gpu).step_seconds
    assert sum(stretch.seconds or 0 for stretch in steps.stretches) == pytest.approx(whole, rel=1e-9)
    traffic = step_traffic(shape, recipe, layout)
    sent = [row.gathers + row.reduces for row in steps.sent]
    assert sum(row.intra_bytes for row in sent) == pytest.approx(traffic.intra_bytes)
    assert sum(row.inter_bytes for row in sent) == pytest.approx(traffic.inter_bytes)
    memory = predict(shape, tapes, recipe, layout, 1000)
    assert max(stretch.peak_bytes for stretch in steps.stretches) == memory.peak.total
    assert steps.between_bytes == memory.steady

    per_batch = [stretch for stretch in steps.stretches if stretch.micro_batch == 1 and stretch.phase != "update"]
    layers = [stretch.layer for stretch in per_batch if stretch.layer is not None]
    assert layers == [*range(32), *reversed(range(32))]
    assert [stretch.unit for stretch in per_batch if stretch.layer is None] == [
        *(by_unit.EMBEDDING, by_unit.HEAD),
        *(by_unit.HEAD, by_unit.EMBEDDING),
    ]


def test_without_a_known_gpu_there_is_no_time() -> None:
    stored = trace_store.find(LLAMA)
    assert stored
    recipe, layout = Recipe(), Layout(Engine.FSDP2, 1, 2, 2)
    steps = by_unit.unit_steps(stored[0], stored[1][variant_of(recipe, "fsdp2")], recipe, layout, None, 0)
    assert {stretch.seconds for stretch in steps.stretches} == {None}
    assert steps.sent


@pytest.mark.parametrize(
    ("count", "message"), [(0, "0 B"), (-765.5 * 1024, "-765.5 KiB"), (5 << 20, "5.00 MiB"), (40 << 30, "40.0 GiB")]
)
def test_sizes_of_any_unit_have_three_digits(count: float, message: str) -> None:
    assert any_size(count) == message
