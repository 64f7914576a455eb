"""Tapes against real runs: what is recorded on fake tensors is what PyTorch's allocator does."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MixtralConfig

from accel_fsdp import models
from accel_fsdp.config import Engine
from accel_fsdp.errors import UserError
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import catalogue
from accel_fsdp.planner.model_notes import model_notes
from accel_fsdp.prediction import trace_store
from accel_fsdp.prediction.memory import (
    ACTIVATIONS,
    OPTIMIZER,
    At,
    Event,
    Tape,
    Variant,
    predict,
)
from accel_fsdp.prediction.tracing import RecordedRun, Recorder, fit, model_shape

LLAMA = LlamaConfig(
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "vocab_size": 1000},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
)
MIXTRAL = MixtralConfig(
    **{"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 500},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
)
LLAMA_8B = "meta-llama/Meta-Llama-3-8B"


def recorder(variant: str, config: Any = LLAMA) -> Recorder:
    return Recorder("tiny", config, Variant.of(variant))


def peak(events: tuple[Event, ...] | list[tuple[int, int]], at: At, gradients: bool = False) -> tuple[float, float]:
    """The highest and the last level, parameter gradients included or not."""
    alive = highest = 0.0
    for sign, size in events:
        size = size if isinstance(size, int) else size.exact(at)
        alive += size if gradients and sign == 0 else sign * size
        highest = max(highest, alive)
    return highest, alive


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "variant",
    ["bf16-amp-full-sdpa", "fp32-full-sdpa", "fp32-amp-lora-sdpa", "bf16-amp-qlora32-sdpa", "bf16-lora-eager"],
)
def test_a_tape_replays_to_the_byte_where_it_was_not_recorded(variant: str) -> None:
    source = recorder(variant)
    parts: list[tuple[Tape, Callable[[At], RecordedRun]]] = [
        (fit.record_block(source, 0), lambda at: source.block(0, at)),
        (fit.fit(source.head, fit.LENGTHS, False), source.head),
    ]
    for (tape, run), rows in itertools.product(parts, (1, 5)):
        at = At(rows, 448, 0 if "full" in variant else 13)
        raw, tape_of_rows = run(at), tape.of(rows)
        assert [(e.sign, e.size.exact(at)) for e in tape_of_rows.forward] == raw.forward
        assert [(e.sign, e.size.exact(at)) for e in tape_of_rows.backward] == raw.backward
        assert tape_of_rows.keeps_input == raw.keeps_input


def test_a_window_changes_the_tape_from_its_length_on() -> None:
    assert fit.record(recorder("bf16-full-sdpa")).masked == (None,)
    shape, tapes = trace_store.find("mistralai/Mistral-7B-v0.1") or pytest.fail("not bundled")
    mistral = tapes["bf16-amp-full-sdpa"]
    assert shape.window == 4096
    assert mistral.block(0, 4095, shape.window) is mistral.blocks[0]
    long = mistral.block(0, 4096, shape.window)
    assert long is mistral.masked[0] is not mistral.blocks[0]
    source = Recorder("m", _config("mistralai/Mistral-7B-v0.1"), Variant.of("bf16-amp-full-sdpa"))
    at = At(1, 4096 + 640)
    assert [(e.sign, e.size.exact(at)) for e in long.of(1).forward] == source.block(0, at).forward


def _config(name: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**catalogue.entries()[name]["config"])


def test_llama_8b_saves_what_was_published() -> None:
    """25.58 x 2h bytes a token are alive after a block's forward: saved, its output, and the rotary tables.

    The loss takes 10 bytes a logit forward, and 12 backward.
    """
    shape, tapes = trace_store.find(LLAMA_8B) or pytest.fail("not bundled")
    block, head = tapes["bf16-full-sdpa"].blocks[0].of(1), tapes["bf16-amp-full-sdpa"].head.of(1)
    at = At(1, 8192)
    highest, kept = peak(block.forward, at)
    rotary = 2 * 2 * 128 * at.length
    assert round((kept + rotary) / at.length) == 209_544
    assert round(highest + rotary) // at.length == 225_928  # 27.58 x 2h, published as well
    logits, hidden = at.length * shape.vocab, 2 * at.length * shape.hidden
    forward, saved = peak(head.forward, at)
    backward = saved + peak(head.backward, at)[0]
    assert 10 * logits + 3 * hidden <= forward < 10 * logits + 3.01 * hidden
    assert 12 * logits + 4 * hidden <= backward < 12 * logits + 4.01 * hidden


class Given(torch.autograd.Function):
    """Hands a module an input that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, switch: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype).fill_(0.5)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


class Taken(torch.autograd.Function):
    """Gives a module's output a gradient that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        ctx.shape = out.shape
        return out.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ones(ctx.shape)


def real_block(config: Any, at: At) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """A float32 block on the CPU, an input like its own, and its other arguments."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").train()
    calls = []
    layer = model.model.layers[0]
    handle = layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args[0], kwargs)), with_kwargs=True)
    ids = torch.randint(0, config.vocab_size, (at.rows, at.length))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    handle.remove()
    return layer, *calls[0]


def measured(config: Any, at: At) -> tuple[int, int]:
    """What a real block's forward and backward take at most, by the CPU allocator's own report to the profiler.

    No dispatch mode is on, so that autograd sums in place as it does in training.
    """
    from torch.autograd.profiler import record_function
    from torch.profiler import ProfilerActivity, profile

    layer, hidden, kwargs = real_block(config, at)
    switch = torch.ones((), requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        given = Given.apply(switch, hidden)
        with record_function("forward starts"):
            out = layer(given, **kwargs)
        with record_function("backward starts"):
            loss = Taken.apply(out[0] if isinstance(out, tuple) else out)
        del out
        loss.backward()
    events = prof.profiler.kineto_results.events()
    marks = {event.name(): event.start_ns() for event in events}
    memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    alive, highest = 0, {"forward starts": 0, "backward starts": 0}
    for when, size in memory:
        if when >= marks["forward starts"]:
            alive += size
            phase = "backward starts" if when >= marks["backward starts"] else "forward starts"
            highest[phase] = max(highest[phase], alive)
    return highest["forward starts"], highest["backward starts"]


@pytest.mark.parametrize(
    ("config", "at", "error"),
    [(LLAMA, At(1, 128), {"abs": 64}), (LLAMA, At(2, 160), {"abs": 64}), (MIXTRAL, At(2, 160), {"rel": 0.01})],
)
def test_the_peak_is_the_cpu_allocators(config: Any, at: At, error: dict[str, float]) -> None:
    """But for scalars."""
    raw = recorder("fp32-full-eager", config).block(0, at)
    forward, saved = peak(raw.forward, at)
    backward = saved + raw.output + peak(raw.backward, at, gradients=True)[0]  # the caller holds the output's gradient
    assert (forward, backward) == pytest.approx(measured(config, at), **error)


@pytest.mark.parametrize("name", catalogue.entries())
def test_every_model_of_the_catalogue_is_bundled(name: str) -> None:
    if not trace_store.shipped(name):
        assert trace_store.find(name) is None
        return
    shape, tapes = trace_store.find(name) or pytest.fail("not bundled")
    assert shape.name == name
    assert set(tapes) == set(trace_store.shipped(name))
    facts = catalogue.find(name) or pytest.fail("unknown")
    inside = sum(len(block.layers) * sum(p.numel for p in block.parameters) for block in shape.blocks)
    assert inside + sum(p.numel for p in shape.outer) == facts.parameters
    assert sorted(layer for block in shape.blocks for layer in block.layers) == list(
        range(sum(len(block.layers) for block in shape.blocks))
    )
    assert all(len(each.blocks) == len(shape.blocks) for each in tapes.values())


def test_the_bundle_is_small_and_holds_nothing_else() -> None:
    files = list((ROOT / "accel_fsdp" / "prediction" / trace_store.FOLDER).iterdir())
    recorded = filter(trace_store.shipped, catalogue.entries())
    assert {path.name for path in files} == {trace_store.file_name(trace_store.first_alike(name)) for name in recorded}
    assert sum(path.stat().st_size for path in files) < 3_500_000


@pytest.mark.slow
def test_a_bundled_model_records_the_same_again() -> None:
    """And the bundle knows which models have no sdpa: Gemma 2's files said it has, though their tapes were eager."""
    name, variant = "HuggingFaceTB/SmolLM2-135M", "bf16-amp-lora-sdpa"
    shape, tapes = trace_store.find(name) or pytest.fail("not bundled")
    again = fit.record_model(name, _config(name), (variant,))
    recorded_shape = replace(again[0], positions=shape.positions)  # the bundle says only what the hub's config says
    assert (recorded_shape, again[1]) == (shape, {variant: tapes[variant]})
    for name in filter(trace_store.shipped, catalogue.entries()):
        stored, _ = trace_store.find(name) or pytest.fail("not bundled")
        assert stored.eager_only is not models.trained_class(_config(name))._supports_sdpa, name


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXED: dict[str, dict[str, Any]] = {
    "lfm2": {**SMALL, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**SMALL, "num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"], "num_experts": 4},
    "jetmoe": {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128, "num_local_experts": 4},
}


@pytest.mark.parametrize("kind", MIXED)
def test_a_convolution_is_no_expert(kind: str) -> None:
    """The shape of the plan and the facts of the wizard count the same parameters in tensors of several experts."""
    config = AutoConfig.for_model(kind, vocab_size=512, **MIXED[kind])
    model = models.build("tiny", config)
    shape = model_shape.shape_of("tiny", config, model)
    held = sum(p.numel * len(block.layers) for block in shape.blocks for p in block.parameters if p.is_fused_experts)
    assert held == models.model_facts("tiny", config).fused_experts
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    assert held == sum(p.numel() for module in experts for p in module.parameters())
    notes = model_notes(shape, Recipe(method="qlora"))
    assert any("stay in 16 bits" in note for note in notes) == (kind != "lfm2")


@pytest.mark.slow
def test_a_model_for_images_is_planned_for_rows_of_text() -> None:
    from transformers import Gemma3Config

    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sight = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = Gemma3Config(text_config={**text, **heads}, vision_config=sight, mm_tokens_per_image=4)
    shape, tapes = fit.record_model("sees", config, ("fp32-full-sdpa",))
    assert [shape.blocks[index].name for index in shape.untraced] == ["SiglipEncoderLayer"]
    alone, blind = fit.record_model("blind", config.text_config, ("fp32-full-sdpa",))
    count = len(shape.untraced)
    assert tapes["fp32-full-sdpa"].blocks[count:] == blind["fp32-full-sdpa"].blocks
    layout, recipe = Layout(Engine.NONE, 1, 1, 1), Recipe(precision="no", rows=1, length=128)
    prediction = [
        predict(model_shape, each["fp32-full-sdpa"], recipe, layout)
        for model_shape, each in ((shape, tapes), (alone, blind))
    ]
    model = models.build("sees", config)
    beside, layers = models.beside_text(model), "encoder.layers"
    more = sum(p.numel() for name, p in model.named_parameters() if name in beside and layers not in name)
    assert prediction[0].peak.live[OPTIMIZER] - prediction[1].peak.live[OPTIMIZER] == 8 * more
    trained = type(model)(config)
    optimizer = torch.optim.AdamW(trained.parameters())
    ids = torch.ones(1, 8, dtype=torch.long)
    trained(input_ids=ids, token_type_ids=torch.zeros_like(ids), labels=ids).loss.backward()
    optimizer.step()
    assert not {name for name, p in trained.named_parameters() if p in optimizer.state and layers in name}
    assert sum(state["exp_avg"].numel() for state in optimizer.state.values()) == models.language_parameters(model)
    assert prediction[0].peak.live[ACTIVATIONS] == pytest.approx(prediction[1].peak.live[ACTIVATIONS], rel=0.001)


@pytest.mark.slow
def test_a_model_for_images_without_a_base_model_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Llama4Config
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    text = {"hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    sight = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    widths = {"projector_input_dim": 48, "projector_output_dim": 48, "vision_output_dim": 48, "image_size": 28}
    config = Llama4Config(text_config={**text, **heads, "vocab_size": 512}, vision_config={**sight, **widths})
    with pytest.raises(UserError, match=r"what sees allocates can't be recorded: .*image_outputs"):
        fit.record_model("sees", config, ("fp32-full-sdpa",))
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)  # transformers 5.24 reads it
    shape, tapes = fit.record_model("sees", config, ("fp32-full-sdpa",))
    assert [block.name for block in shape.blocks] == ["Llama4VisionEncoderLayer", *["Llama4TextDecoderLayer"] * 2]
    assert peak(tapes["fp32-full-sdpa"].head.of(1).forward, At(1, 4096))[0] > 4 * 4096 * 512
    with pytest.raises(UserError, match=r"Llama4Router \(.*\) can't get an adapter or 4-bit weights: it returns 2"):
        fit.record_model("sees", config, ("bf16-lora-sdpa",))


def test_a_model_that_cannot_be_recorded_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """In one message: torch would log the traceback of each operation that fails on fake tensors."""
    config = MixtralConfig(**SMALL, num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=4)
    with pytest.raises(UserError, match="can't be recorded"):
        fit.record_model("too few experts", config, ("fp32-full-sdpa",))
    assert "fake" not in capfd.readouterr().err


@pytest.mark.slow
def test_values_narrower_than_keys_take_the_efficient_kernel() -> None:
    """DeepSeek-V3's, of 192 and 128: flash refuses them, so that no plan could be made for any of its kind."""
    config = DeepseekV3Config(
        **{"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 64},
    )
    shape, tapes = fit.record_model("deepseek", config, ("bf16-full-sdpa",))
    assert [block.name for block in shape.blocks] == ["DeepseekV3DecoderLayer"] * 2
    assert all(tape.forward and tape.backward for tape in tapes["bf16-full-sdpa"].blocks)
