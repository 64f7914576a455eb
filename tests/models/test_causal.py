"""Models that see their next token are refused before data are read, and no other is."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Finished
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertGenerationConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
    XLNetConfig,
)

from accel_fsdp.errors import UserError
from accel_fsdp.models import causal

Sft = Callable[..., Finished]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BertConfig(**SMALL), "is a Bert that sees the tokens after the one that it predicts"),
        (RobertaConfig(**SMALL, architectures=["RobertaForMaskedLM"]), "is a RobertaForMaskedLM that sees"),
        (T5Config(architectures=["T5ForConditionalGeneration"]), "which has an encoder and a decoder"),
        (ViTConfig(), "of which transformers has no causal language model"),
        (XLNetConfig(is_decoder=True), "is a XLNet that sees the tokens after"),
        (BertGenerationConfig(is_decoder=True), ""),
        (BertConfig(**SMALL, is_decoder=True), ""),
        (LlamaConfig(**SMALL, num_key_value_heads=2), ""),
        (GptOssConfig(**SMALL, num_local_experts=4, num_key_value_heads=2), ""),
        (Gemma3TextConfig(**SMALL, num_key_value_heads=2, sliding_window=4), ""),
        (MambaConfig(hidden_size=32, num_hidden_layers=2), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PreTrainedConfig) else "",
)
def test_kinds_are_told_by_their_configs(config: PreTrainedConfig, message: str) -> None:
    if not message:
        causal.check_config(config, "model")
        return
    with pytest.raises(UserError) as refused:
        causal.check_config(config, "model")
    assert message in str(refused.value)
    assert ("is_decoder" in refused.value.fix) == ("sees" in message and not isinstance(config, XLNetConfig))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loaded_model_is_asked(dtype: torch.dtype) -> None:
    experts = {"num_local_experts": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    xlnet = XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, initializer_range=0.2)
    for config, ahead in (
        (BertConfig(**SMALL, initializer_range=0.2), True),
        *([(xlnet, True)] if dtype is torch.float32 else []),  # transformers' own code fails in bfloat16
        (MixtralConfig(**SMALL, **experts), False),
    ):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.train()
        assert causal.looks_ahead(model) is ahead
        assert model.training
        with pytest.raises(UserError, match="sees the tokens after") if ahead else contextlib.nullcontext():
            causal.check_model(model, "model")


def test_the_script_refuses_before_it_reads_data(sft: Sft, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(tiny_model, folder)
    BertConfig(**SMALL, vocab_size=509).save_pretrained(folder)
    flags = [
        "--model_name_or_path",
        folder,
        "--dataset_name",
        tmp_path / "none.jsonl",
        "--output_dir",
        tmp_path / "run",
    ]
    refused = sft(*flags)
    assert refused.code == 1
    assert "sees the tokens after the one that it predicts" in refused.output
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    passed = sft(*flags)
    assert "none.jsonl does not exist" in passed.output
