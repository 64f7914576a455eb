"""Predictions against published bytes: one row for each thing that fused kernels and older libraries change."""

import json
from collections.abc import Iterator
from pathlib import Path

import memory_accuracy
import pytest

from accel_fsdp.job import Recipe
from accel_fsdp.prediction import trace_store
from accel_fsdp.prediction.memory import At, Tape, Variant, fused_head, levels
from accel_fsdp.prediction.tracing import Recorder, by_name

ROWS = {row["id"]: row for row in memory_accuracy.content()["rows"]}
DECIDED = {row["id"]: row for row in memory_accuracy.verdict_rows()}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("row", "limit"),
    [
        ("A020", 0.0002),  # flash attention takes no mask at the window's length
        ("A031", 0.0002),  # norms in float32, and so the hidden states of 4-bit layers
        ("A047", 0.0002),  # autocast's copies of the adapters live to the end of forward
        ("A167", 0.0002),  # foak: norms, and LoRA of 4-bit attention
        ("A199", 0.0002),  # foak: norms of a trained model, heads repeated
        ("A195", 0.0002),  # foak's loss
        ("A044", 0.005),  # a cache that checkpointing leaves on
        ("B-py-SHARD_GRAD_OP", 0.01),  # gradients cleared after forward
        ("B-py-NO_SHARD", 0.01),  # nothing gathered
        ("E-7b-l-512-allocated", 0.01),  # 16-bit adapters, logits kept
        ("C-165-fsdp2-sac", 0.02),  # torchtitan's selective checkpointing
    ],
)
def test_a_published_row_is_met(row: str, limit: float) -> None:
    result = memory_accuracy.result(ROWS[row])
    assert abs(result.peak) < limit, result
    assert result.steady is None or abs(result.steady) < 0.005


def test_every_row_outside_of_the_limits_has_an_explanation() -> None:
    rows = (row for row in ROWS.values() if row["model"] == "Llama-2-7B" and row["kind"] != "reserved")
    for finding in map(memory_accuracy.result, rows):
        assert abs(finding.peak) < 0.01 or (finding.row["note"] and abs(finding.peak) < 0.05), finding.row["id"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("row", ["E-7b-q-4", "E-7b-q-ddp8", "C-165-fsdp2-sac"])
def test_what_a_published_run_reserved_is_met(row: str) -> None:
    verdict = memory_accuracy.verdict(ROWS[row])
    predicted, measured = verdict.against("reserved") or pytest.fail("no figure")
    assert verdict.said != "no"
    assert abs(predicted / measured - 1) < 0.05


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("fitted", "ran_out"),
    [
        ("TQ03", "TQ04"),  # Qwen3-32B under FSDP2, twice the rows
        ("LG02", "LG03"),  # Llama-2-7B without checkpointing, twice the rows
        ("LG04", "LG05"),  # Llama-2-13B
    ],
)
def test_published_runs_fit_and_run_out_as_said(fitted: str, ran_out: str) -> None:
    assert memory_accuracy.verdict(DECIDED[fitted]).said in ("yes", *memory_accuracy.DOUBTS)
    verdict = memory_accuracy.verdict(DECIDED[ran_out])
    assert (verdict.fits, verdict.said) == (False, "no")
    assert verdict.share < 2, "it says little of a run that is far from fitting"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("row", "phase"),
    [
        ("TT620", "optimizer"),  # torchtitan, two cards: the first step makes the optimizer's states
        ("OR698", "optimizer"),  # DeepSpeed's ZeRO
        ("AO2409", ""),  # 4-bit weights, FSDP1, 24 GB
        ("LC234", ""),  # FSDP1 with fp16, 16 GB
    ],
)
def test_a_published_run_that_ran_out_is_not_said_to_fit(row: str, phase: str) -> None:
    verdict = memory_accuracy.verdict(DECIDED[row])
    assert verdict.said == "no"
    assert phase in verdict.why


@pytest.mark.slow
def test_a_run_near_its_card_is_in_doubt_whether_it_fitted_or_ran_out() -> None:
    """Llama-2-70B in 4 bits on two cards: with the same settings it fitted in one month and ran out in another."""
    assert memory_accuracy.verdict(ROWS["FA453"]).said in memory_accuracy.DOUBTS
    assert memory_accuracy.verdict(DECIDED["FO062"]).said in memory_accuracy.DOUBTS


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
    frozen = fused_head(shape, Recipe(method="lora", rows=4, length=4096, kernels="liger"))
    assert frozen.forward_peak == 2 * hidden + 2048 * 32000 * 2
    assert frozen.forward_end == hidden
    trained = fused_head(shape, Recipe(rows=4, length=4096, kernels="liger"))
    assert trained.forward_end == hidden + weight == hidden + trained.grad_bytes


def test_fused_kernels_take_less_everywhere() -> None:
    stored = trace_store.find("mistralai/Mistral-7B-v0.1") or pytest.fail("not bundled")
    plain = stored[1]["bf16-amp-full-sdpa"]
    _, fused = memory_accuracy.model("Mistral-7B-v0.1", "bf16-amp-full-sdpa-foak")
    for at in (At(1, 128), At(4, 4096), At(1, 32768)):
        assert _peak(fused.blocks[0], at) < _peak(plain.blocks[0], at)


def _peak(tape: Tape, at: At) -> int:
    own = tape.of(at.rows)
    forward = levels(own.forward, at)
    return max(*forward, forward[-1] + max(levels(own.backward, at)))


def test_a_variant_that_is_not_bundled_is_recorded_when_it_is_asked_for() -> None:
    recipe = Recipe(precision="no", dtype="bfloat16", kernels="liger")
    shape, tapes = by_name.read_shape("HuggingFaceTB/SmolLM2-135M", recipe)
    fused, plain = (tapes[f"bf16-full-sdpa{ending}"] for ending in ("-liger", ""))
    assert shape.name == "HuggingFaceTB/SmolLM2-135M"
    assert _peak(fused.blocks[0], At(2, 512)) < _peak(plain.blocks[0], At(2, 512))
    assert tapes["bf16-full-sdpa-liger"] is fused
