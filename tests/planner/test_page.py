"""The page of `accel-fsdp plan --html`: whole, self-contained, and with the numbers of the plan."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import here

from accel_fsdp.hardware import gpus
from accel_fsdp.job import Job, Layout, Recipe
from accel_fsdp.planner import PlanReport, html_page, html_report, svg
from accel_fsdp.prediction import Problem, search, trace_store
from accel_fsdp.prediction.memory import step, variant_of

LLAMA = "meta-llama/Llama-3.1-8B"


def rows_of(text: str) -> list[list[str]]:
    """The texts of the first table's cells, and the exact values of its bars."""
    rows = re.findall(r"<tr.*?</tr>", text, re.DOTALL)
    return [re.findall(r'(?<=<data value=")[^"]*|(?<=>)[^<>]+(?=</t[hd]>|<small>)', row) for row in rows]


def problem(recipe: Recipe, model: str = LLAMA, gpu: str = "H100", ranks: int = 8, per_node: int = 8) -> Problem:
    stored = trace_store.find(model)
    assert stored is not None
    layout = Layout.ddp(ranks, per_node) if ranks > 1 else Layout.alone()
    return Problem(*stored, gpus.find(gpu, 80), Job(layout, recipe))


def page_of(given: Problem) -> str:
    return html_report.make_page(PlanReport(given, search.make_plan(given), None))


def test_the_page_is_whole_has_the_plans_numbers_and_asks_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    words = ("plan", "--model", "llama-3.1-8b", "--gpus", "8xH100-80GB", "--seq-len", "4096", "--html", file)
    shown = here(*words, "--json")
    assert shown.code == 0
    assert f"written: {file}" in shown.output
    text, report = file.read_text(encoding="utf-8"), json.loads(shown.printed)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not re.search(r"<(script|img|iframe|object)", text)
    assert re.findall(r'href="([^"]*)"', text) == ["data:,"]
    assert "default-src 'none'" in text

    header, *rows = rows_of(text)
    assert header == ["strategy", "memory", "GiB", "fits", "step s", "tokens/s per GPU"]
    strategies = [report["choice"], *(row for row in report["strategies"] if row != report["choice"])]
    bars, usable = re.findall(r'<svg class="bar".*?</svg>', text), report["gpu_memory_usable_bytes"]
    for row, bar, strategy in zip(rows, bars, strategies, strict=True):
        speed = [f"{strategy['step_seconds']:.2f}", f"{strategy['tokens_per_s_per_gpu']:,.0f}"]
        assert row == [strategy["strategy"], str(strategy["needed_bytes"]), strategy["fits"], *speed]
        # all bars have one scale, whose line is one GPU's memory; a longer bar ends with a mark
        limit = re.search(r'class="capacity" x1="(\d+)"', bar) or pytest.fail(bar)
        parts = re.findall(r'<rect class="[A-Z]" x="(\d+)" width="(\d+)"', bar)
        length = strategy["peak_bytes"] / usable * int(limit[1])
        assert int(parts[-1][0]) + int(parts[-1][1]) == pytest.approx(min(length, svg.CELL), abs=1)
        assert ('class="cut"' in bar) == (length > svg.CELL)
    figures = re.findall(r"<svg role=\"img\".*?</svg>", text)
    assert len(figures) == len(html_page.WIDTHS)
    assert all(re.match(r"<svg [^>]*><title>[^<]+</title><desc>[^<]+</desc>", figure) for figure in figures)

    other = ("plan", "--model", "gpt2", "--gpus", "2xA100", "--seq-len", "512", "--html", file)
    kept = here(*other)
    assert (kept.code, "add --force" in kept.output, file.read_text(encoding="utf-8") == text) == (1, True, True)
    assert here(*other, "--force").code == 0
    assert "openai-community/gpt2 on 2 x A100" in file.read_text(encoding="utf-8")


def test_a_name_can_not_become_markup() -> None:
    given = problem(Recipe(length=512))
    text = page_of(replace(given, shape=replace(given.shape, name="<script>alert(1)</script>&")))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in text


@pytest.mark.parametrize(
    "given",
    [
        problem(Recipe(length=512), "openai-community/gpt2", ranks=1, per_node=1),
        problem(Recipe(length=4096), "meta-llama/Llama-3.1-70B", "A100", ranks=1, per_node=1),
        problem(Recipe("lora", dtype="bfloat16", accumulation=4, checkpointing="full"), ranks=12, per_node=4),
        problem(Recipe(length=300), "openai-community/gpt2", ranks=2048),
    ],
    ids=["one small", "nothing fits", "micro-batches and machines", "many"],
)
def test_odd_plans_make_a_page(given: Problem) -> None:
    text = page_of(given)
    assert not re.search(r"nan|inf[^o]|-\d+\.\d\" (?:width|height)|(?:width|height)=\"-", text.partition("</style>")[2])


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "zero"])
@pytest.mark.parametrize("strategy", [1, 2])
@pytest.mark.parametrize("model", [LLAMA, "google/gemma-2-9b", "google/gemma-3-4b-it", "openai-community/gpt2"])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(length=1024),
        Recipe(rows=4, length=512, checkpointing="full", accumulation=3),
        Recipe("lora", dtype="bfloat16", length=1024, optimizer="adamw_torch"),
    ],
    ids=["full", "recomputed", "lora"],
)
def test_the_timeline_has_the_peaks_of_the_prediction(engine: str, strategy: int, model: str, recipe: Recipe) -> None:
    """A timeline sees each layer; a prediction goes through those in the middle once, also where kinds alternate."""
    layout = Layout(engine, strategy, 8, 8, offload=engine == "fsdp1" and strategy == 2)  # type: ignore[arg-type]
    stored = trace_store.find(model)
    assert stored is not None
    shape, tapes = stored[0], stored[1][variant_of(recipe, layout.engine)]
    moments = step.predict(shape, tapes, recipe, layout, 1000).moments
    drawn = step.timeline(shape, tapes, recipe, layout, 1000)
    for moment in moments:
        assert moment in drawn
        assert moment.total == max(sample.total for sample in drawn if sample.phase == moment.phase)
    assert list(dict.fromkeys(sample.phase for sample in drawn)) == [moment.phase for moment in moments]
