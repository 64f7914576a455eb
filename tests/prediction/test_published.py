"""Predictions against published bytes and verdicts, and the memory of fused kernels."""

import json
from collections.abc import Iterator
from pathlib import Path

import memory_accuracy
import pytest

from accel_fsdp.job import Recipe
from accel_fsdp.prediction import trace_store
from accel_fsdp.prediction.memory import At, Variant, fused_head, levels
from accel_fsdp.prediction.tracing import Recorder, by_name

ROWS = {row["id"]: row for row in memory_accuracy.content()["rows"]}
DECIDED = {row["id"]: row for row in memory_accuracy.verdict_rows()}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("row", ROWS)
def test_a_published_row_is_met(row: str) -> None:
    if ROWS[row]["kind"] == "reserved":
        return
    result = memory_accuracy.result(ROWS[row])
    assert abs(result.peak) < 0.01 or (result.row["note"] and abs(result.peak) < 0.2), result
    assert result.steady is None or abs(result.steady) < 0.005


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("row", [*ROWS, *DECIDED])
def test_a_published_run_that_fitted_is_not_said_to_run_out_nor_the_reverse(row: str) -> None:
    verdict = memory_accuracy.verdict(ROWS.get(row) or DECIDED[row])
    unexplained = "not explained" in verdict.row.get("note", "")
    assert unexplained or verdict.said in (("yes", "tight") if verdict.fits else ("tight", "no"))
    assert not verdict.why if verdict.said == "yes" else verdict.why


def test_every_published_verdict_has_a_source_and_no_row_is_left_out_too() -> None:
    left = json.loads(memory_accuracy.VERDICTS.read_text())["left_out"]
    assert len(DECIDED) == len(memory_accuracy.verdict_rows())
    assert not (DECIDED.keys() | ROWS.keys()) & left.keys()
    assert all(row["source"] and isinstance(row["fits"], bool) for row in DECIDED.values())


def test_ligers_kernels_save_inputs_and_factors() -> None:
    """Counted by hand, in hidden states of 2 bytes: see the sources that `fused_kernels.py` names."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(num_hidden_layers=1, vocab_size=500, head_dim=64, **sizes)
    recorder, at = Recorder("tiny", config, Variant.of("bf16-full-sdpa-liger")), At(2, 256)
    raw = recorder.block(0, at)
    norms, attention, feed_forward = 2 + 1, 1 + 2 * 0.5 + 1, 3 * 2  # one norm's input is the block's own
    rows = 4 * (2 + 8)  # of each norm and each head
    saved = (norms + attention + feed_forward) * 2 * 512 + rows
    assert raw.keeps_input
    assert sum(sign * size for sign, size in raw.forward) - raw.output == pytest.approx(saved * 512, abs=64)


def test_a_fused_head_holds_the_logits_of_one_part() -> None:
    """Liger's own example: 16384 tokens, a vocabulary of 32000 and 4096 wide make parts of 2048 tokens."""
    shape, _ = trace_store.find("mistralai/Mistral-7B-v0.1") or pytest.fail("not bundled")
    hidden, weight = 16384 * 4096 * 2, 32000 * 4096 * 2
    frozen = fused_head(shape, Recipe(method="lora", rows=4, length=4096, liger=True))
    assert frozen.forward_peak == 2 * hidden + 2048 * 32000 * 2
    assert frozen.forward_end == hidden
    trained = fused_head(shape, Recipe(rows=4, length=4096, liger=True))
    assert trained.forward_end == hidden + weight == hidden + trained.grad_bytes


def test_a_variant_that_is_not_bundled_is_recorded_when_it_is_asked_for() -> None:
    recipe, at = Recipe(precision="no", dtype="bfloat16", liger=True), At(2, 512)
    shape, tapes = by_name.read_shape("HuggingFaceTB/SmolLM2-135M", recipe)
    fused, plain = (tapes[f"bf16-full-sdpa{ending}"].blocks[0].of(at.rows) for ending in ("-liger", ""))
    assert shape.name == "HuggingFaceTB/SmolLM2-135M"
    assert max(levels(fused.forward, at)) < max(levels(plain.forward, at))
