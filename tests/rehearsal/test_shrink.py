"""Small models of real architectures: from configs with the published sizes, without weights or network."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer, logging

from accel_fsdp import models
from accel_fsdp.errors import UserError
from accel_fsdp.models.shrink import SmallModel, fewer_layers, shrink

ROWS, LENGTH = 2, 64
CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "architectures.json").read_text())
"""As published, but for what stands in transformers as a default."""


@dataclass(frozen=True)
class Case:
    """What the small model of a published config must have."""

    classes: set[str]
    has: dict[str, Any] = field(default_factory=dict)
    image: tuple[int, ...] = ()
    """The shape of what the image encoder takes; empty without one."""
    image_tokens: int = 0
    never_moved: tuple[str, ...] = ()
    """Parameters that this loss doesn't reach, by a part of the name."""


def rope(name: str, part: str = "") -> Any:
    """How the real one rotates positions, which stays."""
    return (CONFIGS[name][part] if part else CONFIGS[name])["rope_parameters"]


CASES = {
    "llama-3.2-1b": Case(
        {"LlamaDecoderLayer"},
        {"num_hidden_layers": 2, "head_dim": 16, "num_key_value_heads": 2, "rope_parameters": rope("llama-3.2-1b")},
    ),
    "qwen3-8b": Case({"Qwen3DecoderLayer"}, {"layer_types": ["full_attention"] * 2, "max_window_layers": 2}),
    "gemma-3-1b": Case(
        {"Gemma3DecoderLayer"},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "num_key_value_heads": 1},
    ),
    "gemma-3-4b": Case(
        {"Gemma3DecoderLayer", "SiglipEncoderLayer", "SiglipVisionEmbeddings"},
        {
            "text_config.layer_types": ["sliding_attention", "full_attention"],
            "text_config.rope_parameters": rope("gemma-3-4b", "text_config"),
            "vision_config.image_size": 896,
            "vision_config.num_hidden_layers": 2,
        },
        image=(1, 3, 896, 896),
        image_tokens=256,
    ),
    "phi-3-mini-128k": Case({"Phi3DecoderLayer"}, {"sliding_window": 16, "auto_map": None}),
    "gpt2": Case({"GPT2Block"}, {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 1024}),
    "qwen3-30b-a3b": Case({"Qwen3MoeDecoderLayer"}, {"num_experts": 8, "num_experts_per_tok": 2}),
    "gpt-oss-20b": Case(
        {"GptOssDecoderLayer"},
        {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 8, "quantization_config": None},
    ),
    "mixtral-8x7b": Case(
        {"MixtralDecoderLayer"},
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek-v3": Case(
        {"DeepseekV3DecoderLayer"},
        {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_group": 2, "qk_head_dim": 24},
    ),
    "llava-1.5-7b": Case(
        {"LlamaDecoderLayer", "CLIPEncoderLayer", "CLIPVisionEmbeddings"},
        {"vision_config.image_size": 336},
        image=(1, 3, 336, 336),
        image_tokens=576,
        never_moved=("post_layernorm", "encoder.layers.1"),  # its features are those before the last layer
    ),
    "qwen2.5-vl-7b": Case(
        {"Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"},
        {
            "vision_config.fullatt_block_indexes": [1],
            "vision_config.depth": 2,
        },
        image=(16, 1176),
        image_tokens=4,
    ),
    "bert-classifier": Case({"BertLayer"}, {"hidden_size": 64, "id2label": {0: "no", 1: "maybe", 2: "yes"}}),
    "bert-masked": Case({"BertLayer"}),  # the head shares the weight of the embeddings
    "bert-decoder": Case({"BertLayer"}),  # the head shares the weight of the embeddings
    "qwen3-next-80b": Case(
        {"Qwen3NextDecoderLayer"},
        {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    "falcon-7b": Case({"FalconDecoderLayer"}, {"num_attention_heads": 8, "hidden_size": 128, "multi_query": True}),
    "dbrx": Case(
        {"DbrxBlock"},
        {"n_heads": 12, "attn_config.kv_n_heads": 2, "ffn_config.moe_num_experts": 8, "ffn_config.moe_top_k": 2},
    ),
    "gemma-4": Case(
        {"Gemma4TextDecoderLayer"},
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16},  # two share keys and values
    ),
    "t5-base": Case({"T5Block"}, {"num_layers": 2, "num_decoder_layers": 2, "d_kv": 16}),
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.set_verbosity_error()


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(small: SmallModel, **options: Any) -> Any:
    config = models.read_config(str(small.folder))
    model, report = models.model_class(config).from_pretrained(
        small.folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model


def value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part, None)
    return config


def batch(model: Any, case: Case) -> dict[str, torch.Tensor]:
    text = model.config.get_text_config()
    tokens = torch.randint(0, 256, (ROWS, LENGTH))
    if not case.image:
        labels = tokens if "Classification" not in type(model).__name__ else torch.tensor([0, 2])
        return {"input_ids": tokens, "labels": labels}
    config = model.config
    image = getattr(config, "image_token_id", None) or config.image_token_index
    tokens = torch.cat([torch.full((1, case.image_tokens), image), tokens[:1]], dim=1)
    assert image < text.vocab_size
    more = {"image_grid_thw": torch.tensor([[1, 4, 4]])} if len(case.image) == 2 else {}
    if config.model_type != "llava":
        more["token_type_ids" if config.model_type == "gemma3" else "mm_token_type_ids"] = (tokens == image).long()
    return {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(case.image), **more}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_and_is_made_as_the_real_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    real = written(tmp_path / "real", CONFIGS[name])
    small = shrink(str(real), tmp_path / "small")
    assert set(small.layer_classes) == case.classes
    assert small.tokenizer == "made up"
    assert small.parameters < 5_000_000

    config, real_config = models.read_config(str(small.folder)), models.read_config(str(real))
    assert {key: value(config, key) for key in case.has} == case.has
    assert config.tie_word_embeddings == real_config.tie_word_embeddings
    assert models.stored_dtype(str(small.folder)) == (CONFIGS[name].get("dtype") or "float32")
    stored = load_file(small.folder / "model.safetensors")
    kept = ("e_score_correction_bias", "mlp.gate.weight")  # transformers keeps routers in float32
    dtypes = {tensor.dtype for name, tensor in stored.items() if not name.endswith(kept)}
    assert dtypes == {getattr(torch, CONFIGS[name].get("dtype", "float32"))}
    shape = models.build(str(real), real_config)
    model = loaded(small)
    if models.model_class(real_config) is type(shape):
        assert fewer_layers.all_kinds(shape) <= fewer_layers.all_kinds(model)
    assert {kind.name for kind in models.wrap_classes(shape)} == case.classes

    torch.manual_seed(0)
    model.train()
    outputs = model(**batch(model, case))
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss)
    lacking = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None and not any(part in name for part in case.never_moved)
    ]
    assert lacking == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


def test_what_changed_is_listed(tmp_path: Path) -> None:
    small = shrink(str(written(tmp_path / "real", CONFIGS["gpt-oss-20b"])), tmp_path / "small")
    changes = [str(change) for change in small.changed]
    assert "num_hidden_layers 24 -> 2" in changes
    assert "layer_types 24 entries -> ['sliding_attention', 'full_attention']" in changes
    assert any(word.startswith("quantization_config ") and word.endswith(" -> None") for word in changes)
    assert "quantised weights: the small model's are not quantised" in small.not_shown
    unchanged = {"swiglu_limit", "rope_parameters", "hidden_act", "tie_word_embeddings", "model_type"}
    assert not unchanged & {change.key.partition(".")[0] for change in small.changed}


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next-80b", "gpt-oss-20b", "gemma-3-4b"])
def test_no_weight_is_left_to_chance(name: str, tmp_path: Path) -> None:
    real = str(written(tmp_path / "real", CONFIGS[name]))
    before = torch.random.get_rng_state()
    first, other = (shrink(real, tmp_path / folder).folder / "model.safetensors" for folder in "ab")
    assert first.read_bytes() == other.read_bytes()
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_does_not_run_is_made_smaller_by_less(tmp_path: Path) -> None:
    """Qwen2-VL's code has shares of a head of 128 as a default, which a small head doesn't have."""
    text = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {"model_type": "qwen2_5_vl_text", "vocab_size": 151936, "num_hidden_layers": 28, **text},
        "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "out_hidden_size": 1536},
    }
    small = shrink(str(written(tmp_path / "real", config)), tmp_path / "small")
    assert any(
        sentence.startswith("nothing more of its sizes: made smaller were its depth") for sentence in small.not_shown
    )
    assert {"text_config.num_hidden_layers 28 -> 2"} <= {str(change) for change in small.changed}


def test_a_real_tokenizer_goes_along(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    real = tmp_path / "real"
    real.mkdir()
    for path in tiny_model.glob("*token*"):
        (real / path.name).write_bytes(path.read_bytes())
    (real / "chat_template.jinja").write_bytes((tiny_model / "chat_template.jinja").read_bytes())
    wide = {"hidden_size": 1536, "intermediate_size": 4096, "vocab_size": 50000, "num_hidden_layers": 30}
    (real / "config.json").write_text(json.dumps({**config, **wide, "head_dim": 256}))
    small = shrink(str(real), tmp_path / "small")
    tokenizer, before = AutoTokenizer.from_pretrained(small.folder), AutoTokenizer.from_pretrained(real)
    assert small.tokenizer == "real"
    assert tokenizer.get_vocab() == before.get_vocab()
    assert tokenizer.chat_template == before.chat_template
    small_config = models.read_config(str(small.folder))
    assert small_config.vocab_size == 512  # the tokenizer's 509
    assert small_config.eos_token_id == config["eos_token_id"]
    assert loaded(small).num_parameters() == small.parameters


def test_a_made_up_tokenizer_is_read_back(tmp_path: Path) -> None:
    small = shrink(str(written(tmp_path / "real", CONFIGS["llama-3.2-1b"])), tmp_path / "small")
    tokenizer, config = AutoTokenizer.from_pretrained(small.folder), models.read_config(str(small.folder))
    turns = [{"role": "user", "content": "Grüße, 世界"}, {"role": "assistant", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(tokenizer.get_vocab().values()) < config.vocab_size
    assert tokenizer.bos_token_id == config.bos_token_id
    assert tokenizer.eos_token_id == config.eos_token_id[0]
    assert tokenizer.pad_token_id is not None


def test_its_generation_config_goes_along(tmp_path: Path) -> None:
    real = written(tmp_path / "real", CONFIGS["llama-3.2-1b"])
    expected = {"do_sample": True, "temperature": 0.6, "bos_token_id": 128000, "eos_token_id": [128001, 128008]}
    (real / "generation_config.json").write_text(json.dumps(expected))
    small = shrink(str(real), tmp_path / "small")
    settings = json.loads((small.folder / "generation_config.json").read_text())
    assert (settings["temperature"], settings["bos_token_id"], settings["eos_token_id"]) == (0.6, 256, [257, 258])


def test_code_of_its_own_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    real = written(tmp_path / "real", config)
    (real / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="comes with its own Python code"):
        shrink(str(real), tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_what_stays_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shrink.__globals__, "MOST_PARAMETERS", 1000)
    with pytest.raises(UserError, match=r"has no small version: .* still has"):
        shrink(str(written(tmp_path / "real", CONFIGS["gpt2"])), tmp_path / "small")
    assert not (tmp_path / "small").exists()


@given(
    groups=st.integers(1, 12),
    ratio=st.integers(1, 12),
    head=st.integers(1, 64).map(lambda half: 2 * half),
    layers=st.integers(1, 40),
    wider=st.booleans(),
)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_sizes(
    groups: int, ratio: int, head: int, layers: int, wider: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    heads = groups * ratio
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": heads * head * (2 if wider else 1),
        "intermediate_size": heads * head * 3,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "num_hidden_layers": layers,
        "vocab_size": 1000,
    }
    small = shrink(str(written(folder / "real", config)), folder / "small")
    small_config = models.read_config(str(small.folder))
    assert small_config.num_hidden_layers == min(layers, 2)
    assert small_config.head_dim % 2 == 0
    assert small_config.head_dim <= head
    assert (small_config.num_key_value_heads == 1) == (groups == 1) or ratio == 1
    if groups > 1:
        assert small_config.num_attention_heads // small_config.num_key_value_heads == ratio
    assert not [
        sentence for sentence in small.not_shown if sentence.startswith(("nothing more", "that it runs", "some kinds"))
    ]
