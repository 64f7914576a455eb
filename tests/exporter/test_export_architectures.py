"""An export holds what `save_pretrained` writes, for models of many makes: names, layouts, ties and dtypes."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runs import INNER, export, load_all, same
from torch.distributed import checkpoint as dcp
from transformers import conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from accel_fsdp import exporter

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
MIXED = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}
RANKS = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}),
    "opt": ("OPTForCausalLM", {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 16}),
    "llama tied": ("LlamaForCausalLM", {**SMALL, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", {**SMALL, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", {**SMALL, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**SMALL, **EXPERTS, "num_experts": 4, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**SMALL, **MIXED, **RANKS, "n_group": 2, "topk_group": 1}),
    "gpt_oss": ("GptOssForCausalLM", {**SMALL, "num_local_experts": 4, "head_dim": 8, "layer_types": None}),
    "phi3": ("Phi3ForCausalLM", SMALL),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}),
    "bert": ("BertForSequenceClassification", SMALL),
    "mamba": ("MambaForCausalLM", {**SMALL, "state_size": 4}),
    "ernie moe": ("Ernie4_5_MoeForCausalLM", {**SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8}),
}


def llava() -> Any:
    text, vision = (
        transformers.LlamaConfig(**SMALL),
        transformers.CLIPVisionConfig(**VISION, image_size=8, patch_size=4),
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
    return transformers.LlavaForConditionalGeneration(config)


def gemma3_with_images() -> Any:
    text = transformers.Gemma3TextConfig(**SMALL, head_dim=8)
    vision = transformers.SiglipVisionConfig(**VISION, image_size=8, patch_size=4)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def builder_of(make: str) -> Callable[[], Any]:
    name, sizes = MAKES[make]
    kind = getattr(transformers, name)
    return lambda: kind(kind.config_class(**{key: value for key, value in sizes.items() if value is not None}))


WHOLE = {"llava": llava, "gemma3 with images": gemma3_with_images, **{make: builder_of(make) for make in MAKES}}


@contextlib.contextmanager
def transposed_files() -> Iterator[None]:
    """Llama as if its files had q_proj transposed, which is square here: the same names and shapes."""
    registered, name = conversion_mapping.register_checkpoint_conversion_mapping, "LlamaForCausalLM"
    pattern = "self_attn.q_proj.weight"
    registered(name, [WeightConverter(pattern, pattern, operations=[Transpose(0, 1)])], overwrite=True)
    try:
        yield
    finally:
        registered(name, [], overwrite=True)


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("make", WHOLE)
def test_the_files_are_those_of_save_pretrained(make: str, tmp_path: Path) -> None:
    """In float32 as trained, and in bfloat16 as `from_pretrained` would hold it; `--verify` changes nothing."""
    torch.manual_seed(0)
    model = WHOLE[make]()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)
    (tmp_path / "run").mkdir()
    torch.save(model.state_dict(), tmp_path / "run" / "model.pth")
    model.save_pretrained(tmp_path / "run" / "model")
    theirs = {"float32": load_all(tmp_path / "run" / "model")}
    type(model).from_pretrained(tmp_path / "run" / "model", dtype=torch.bfloat16).save_pretrained(tmp_path / "low")
    theirs["bfloat16"] = load_all(tmp_path / "low")
    for dtype, expected in theirs.items():
        for verify in ("bytes", "load"):
            out = tmp_path / f"{dtype}-{verify}"
            assert exporter.run(exporter.ExportCommand(tmp_path / "run", out, dtype=dtype, verify=verify)) == 0
            same(load_all(out), expected)
    again = tmp_path / "again"
    assert exporter.run(exporter.ExportCommand(tmp_path / "float32-load", again, dtype="bfloat16", verify="bytes")) == 0
    same(load_all(again), theirs["bfloat16"])


@pytest.mark.parametrize("make", ["mixtral", "llama tied"])
def test_shards_are_written_again_if_transformers_names_other_tensors(make: str, tmp_path: Path) -> None:
    """Their write begins before transformers is imported, and leaves no file of its first layout."""
    model = WHOLE[make]()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run" / INNER, no_dist=True)
    model.save_pretrained(tmp_path / "run" / "model")
    out = tmp_path / "out"
    same(export(tmp_path / "run", out, dtype="float32", max_shard_size="20KB"), load_all(tmp_path / "run" / "model"))
    listed = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].values()
    assert {path.name for path in out.glob("model*.safetensors")} == set(listed)
