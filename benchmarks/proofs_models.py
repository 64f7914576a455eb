"""The tiny models, rows and YAMLs of `proofs.py`."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_fsdp.models.shrink.small_model import made_up_tokenizer

VOCABULARY = 264
"""One token for each byte, and the special ones behind them."""
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 256, "eos_token_id": 257, "bos_token_id": None}
LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
HEADS = {"head_dim": 8}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


@dataclass(frozen=True)
class Family:
    """A kind of model: its config, its layer class, and the projections that adapters are added to."""

    config: Mapping[str, Any]
    layer: str
    projections: tuple[str, ...] = ("q_proj", "v_proj")


FAMILIES = {
    "Llama": Family({"model_type": "llama", **LLAMA}, "LlamaDecoderLayer"),
    "Qwen3": Family({"model_type": "qwen3", **LLAMA, **HEADS}, "Qwen3DecoderLayer"),
    "Gemma 3": Family(
        {"model_type": "gemma3_text", **LLAMA, **HEADS, **WINDOWS, "query_pre_attn_scalar": 8,
         "tie_word_embeddings": True},
        "Gemma3DecoderLayer",
    ),
    "Phi-3": Family({"model_type": "phi3", **LLAMA}, "Phi3DecoderLayer", ("qkv_proj",)),
    "GPT-2": Family(
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
         "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "GPT2Block", ("c_attn",),
    ),
    "Qwen3-MoE": Family(
        {"model_type": "qwen3_moe", **LLAMA, **HEADS, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 24, "decoder_sparse_step": 1},
        "Qwen3MoeDecoderLayer",
    ),
    "Mixtral": Family(
        {"model_type": "mixtral", **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        "MixtralDecoderLayer",
    ),
    "gpt-oss": Family(
        {"model_type": "gpt_oss", **LLAMA, **HEADS, **WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
        "GptOssDecoderLayer",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """Arguments of the script, keys of the YAML and of the model's config."""

    words: tuple[str, ...] = ()
    top: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


ADAPTER = ("--use_peft", "--lora_r", "4", "--lora_alpha", "8", "--lora_dropout", "0", "--lora_target_modules")
PLAIN = "accumulation"
CHECKPOINTING, SMOOTHING = "activation checkpointing", "label smoothing"
FEATURES = {
    PLAIN: Feature(),
    "packing": Feature(("--packing",)),
    "LoRA": Feature(ADAPTER),
    "DoRA": Feature(("--use_dora", *ADAPTER)),
    "modules_to_save": Feature(("--lora_modules_to_save", "lm_head", *ADAPTER)),
    "tied head": Feature(config={"tie_word_embeddings": True}),
    CHECKPOINTING: Feature(fsdp={"fsdp_activation_checkpointing": True}),
    SMOOTHING: Feature(("--label_smoothing_factor", "0.1")),
    "bf16": Feature(("--bf16", "true"), top={"mixed_precision": "bf16"}),
}
SMOOTHED = 0.1
SEED = 3
"""With it each of the two steps has an odd number of tokens over 256, which bfloat16 doesn't have."""

FSDP = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
FSDP2: Mapping[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, **FSDP}}
MESH = {f"parallelism_config_{axis}_size": 2 for axis in ("dp_replicate", "dp_shard")}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
ENGINES: Mapping[str, Mapping[str, Any]] = {
    **{
        f"FSDP1 {number}": {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": name, "fsdp_use_orig_params": True, **FSDP},
        }
        for number, name in enumerate(STRATEGIES, 1)
    },
    "FSDP2": FSDP2,
    "HSDP": {**FSDP2, "parallelism_config": MESH},
    "ZeRO-2": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}},
    "ZeRO-3": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "zero3_save_16bit_model": True}},
    "DDP": {"distributed_type": "MULTI_GPU"},
}
ACCUMULATED = 2


def job(engine: str, family: Family, feature: Feature) -> dict[str, Any]:
    """The content of a YAML."""
    content: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "num_machines": 1}
    content |= {"num_processes": 8, **ENGINES[engine], **feature.top}
    if "fsdp_config" in content:
        layer = {"fsdp_transformer_layer_cls_to_wrap": family.layer}
        content["fsdp_config"] = {**content["fsdp_config"], **layer, **feature.fsdp}
    if "deepspeed_config" in content:
        more = {"gradient_accumulation_steps": ACCUMULATED, "gradient_clipping": 1.0}
        content["deepspeed_config"] = {**content["deepspeed_config"], **more}
    return content


def words(engine: str, family: Family, feature: Feature, model: Path, rows: Path, output: Path) -> list[str]:
    """The arguments that all three scripts take."""
    by_script = feature is FEATURES[CHECKPOINTING] and "fsdp_config" not in ENGINES[engine]
    switches = ["--gradient_checkpointing", str(by_script)]
    if "--bf16" not in feature.words:
        switches += ["--bf16", "false"]
    pairs = {
        "model_name_or_path": model, "dataset_name": rows, "output_dir": output, "max_steps": 2, "max_length": 64,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATED, "learning_rate": 1e-3,
        "save_strategy": "no", "report_to": "none", "logging_steps": 1, "disable_tqdm": "true", "dtype": "float32",
    }  # fmt: skip
    given = [word for name, value in pairs.items() for word in (f"--{name}", str(value))]
    adapted = family.projections if "--lora_target_modules" in feature.words else ()
    return [*given, *switches, *feature.words, *adapted]


def make_model(folder: Path, family: Family, feature: Feature) -> None:
    """Writes a model with random weights in float32, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {**family.config, **TOKENS, **feature.config}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**settings), dtype=torch.float32, trust_remote_code=False
    )
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "norm" in name:  # norms of 1 would all be rounded alike
            torch.nn.init.normal_(weight, 0.0 if "Gemma" in type(model).__name__ else 1.0, 0.1)
    model.save_pretrained(folder)
    made_up_tokenizer({}).save_pretrained(folder)


def make_rows(folder: Path) -> None:
    """Writes texts of 16 to 60 bytes, so that each micro-batch has another number of tokens."""
    drawn = random.Random(SEED)
    folder.mkdir()
    texts = ("".join(drawn.choices("abcdefgh .", k=drawn.randint(16, 60))) for _ in range(64))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
