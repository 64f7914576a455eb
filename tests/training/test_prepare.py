"""What is decided between the command line and `prepare`: dtypes, checkpointing, refusals. Launches are elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from accel_fsdp.errors import UserError
from accel_fsdp.training import ModelArguments, load_model, preflight

FSDP1 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
"""The name that Trainer goes by: the first since transformers renamed it between 5.17 and 5.23."""
OWN = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}


def engine(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    """What `accelerate launch` exports for the YAML."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def arguments(folder: Path, **more: object) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True, **more)


def adapted(model: Path, **more: object) -> nn.Module:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules="all-linear", **more))


@pytest.mark.parametrize(
    ("flags", "stored", "precision", "expected", "why"),
    [
        ({}, "bfloat16", "no", torch.float32, "master weights of full training"),
        ({}, "bfloat16", "bf16", torch.float32, "master weights of full training"),
        ({"dtype": "bfloat16"}, "float32", "no", torch.bfloat16, "--dtype; no float32 master weights"),
        ({"dtype": "bfloat16"}, "float32", "bf16", torch.bfloat16, "--dtype; no float32 master weights"),
        ({"dtype": "bfloat16"}, "float32", "bf16-fsdp", torch.float32, "not bfloat16: FSDP keeps float32 masters"),
        ({"use_peft": True}, "bfloat16", "bf16", torch.bfloat16, "the checkpoint's own, frozen under the adapter"),
        ({"use_peft": True, "dtype": "float32"}, "bfloat16", "bf16", torch.float32, "--dtype"),
    ],
)
def test_dtypes_are_decided_with_a_reason(
    flags: dict, stored: str, precision: str, expected: torch.dtype, why: str, tiny_model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision.removesuffix("-fsdp"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(precision.endswith("-fsdp")))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, stored))
    model.save_pretrained(tmp_path)
    options = ModelArguments(model_name_or_path=str(tmp_path), **flags)
    dtype, reason = load_model.weight_dtype(options)
    assert dtype == expected
    assert reason.startswith(why)
    loaded = load_model.load_model(options, AutoTokenizer.from_pretrained(tiny_model))
    assert {p.dtype for name, p in loaded.named_parameters() if "lora" not in name} == {expected}


def test_a_rank_that_receives_its_weights_has_the_same_shapes_and_dtypes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ModelArguments(model_name_or_path=str(tiny_model))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    first = load_model.load_model(options, tokenizer)
    engine(monkeypatch, {**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "RANK": "1"})
    other = load_model.load_model(options, tokenizer)
    wanted = {name: (p.shape, p.dtype, p.requires_grad) for name, p in first.named_parameters()}
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in other.named_parameters()} == wanted
    buffers = dict(first.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in other.named_buffers())


@pytest.mark.parametrize("word", ["false", "0", "No"])
def test_decay_of_flattened_parameters_is_refused(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch, {**FSDP1, "FSDP_USE_ORIG_PARAMS": word})
    preflight.check_weight_decay(arguments(tmp_path))
    with pytest.raises(UserError, match="fsdp_use_orig_params: false with --weight_decay"):
        preflight.check_weight_decay(arguments(tmp_path, weight_decay=0.1))


@pytest.mark.parametrize(
    ("storage", "precision", "fix"),
    [("bfloat16", "fp16", "float16"), ("float16", "bf16", "bfloat16"), ("uint8", "no", "bfloat16")],
)
def test_packed_weights_that_fsdp_would_cast_are_refused(
    storage: str, precision: str, fix: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(monkeypatch, {**FSDP2, "ACCELERATE_MIXED_PRECISION": precision})
    options = ModelArguments(str(tiny_model), use_peft=True, load_in_4bit=True, bnb_4bit_quant_storage=storage)
    with pytest.raises(UserError, match="packed weights would become noise") as refused:
        load_model.load_model(options, AutoTokenizer.from_pretrained(tiny_model))
    assert refused.value.fix == f"--bnb_4bit_quant_storage {fix}"
    engine(monkeypatch, {**FSDP1, "ACCELERATE_MIXED_PRECISION": "no"})
    with pytest.raises(UserError):
        load_model.load_model(options, AutoTokenizer.from_pretrained(tiny_model))


def test_what_could_not_be_put_together_at_the_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(tmp_path)
    key = "stage3_gather_16bit_weights_on_model_save"
    given.deepspeed_plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 3, key: True}})
    preflight.check_gathering(given)
    given.deepspeed_plugin.deepspeed_config["zero_optimization"][key] = False
    with pytest.raises(UserError, match="zero3_save_16bit_model"):
        preflight.check_gathering(given)
    engine(monkeypatch, FSDP2)
    with pytest.raises(UserError, match="--save_on_each_node"):
        preflight.check_gathering(arguments(tmp_path, save_on_each_node=True))


@pytest.mark.parametrize(
    ("environment", "dropout", "asked", "of_fsdp", "layers"),
    [
        (FSDP2, 0.1, False, False, False),
        (FSDP2, 0.1, True, False, True),
        (FSDP2 | OWN, 0.0, False, True, False),
        (FSDP2 | OWN, 0.0, True, True, False),
        (FSDP2 | OWN, 0.1, False, False, True),
        (FSDP1 | OWN, 0.1, True, True, False),
    ],
)
def test_one_kind_of_checkpointing_runs(
    environment: dict, dropout: float, asked: bool, of_fsdp: bool, layers: bool, tiny_model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine(monkeypatch, {"FSDP_ACTIVATION_CHECKPOINTING": "false", **environment})
    args = arguments(tmp_path, **{CHECKPOINTING: asked})
    preflight.settle_checkpointing(adapted(tiny_model, lora_dropout=dropout), args)
    assert FullyShardedDataParallelPlugin(fsdp_version=2).activation_checkpointing is of_fsdp
    assert getattr(args, CHECKPOINTING) is layers
    if layers:
        assert getattr(args, f"{CHECKPOINTING}_kwargs") == {"use_reentrant": False}


def test_zero3_checkpoints_reentrantly(tiny_model: Path, tmp_path: Path) -> None:
    """And the frozen embedding's output asks for the gradient without which that kind gives none."""
    args = arguments(tmp_path, **{CHECKPOINTING: True})
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    model = adapted(tiny_model)
    preflight.settle_checkpointing(model, args)
    assert getattr(args, f"{CHECKPOINTING}_kwargs") == {"use_reentrant": True}
    assert model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.long)).requires_grad


@pytest.mark.parametrize(("version", "kept"), [(1, "buffer_dtype"), (2, "output_dtype")])
def test_buffers_and_outputs_keep_their_dtype(version: int, kept: str) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision("bf16")
    assert getattr(plugin.mixed_precision_policy, kept) == torch.bfloat16  # what it would be
    preflight.keep_precision(plugin)
    assert getattr(plugin.mixed_precision_policy, kept) is None
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
