"""`train/sft.py` under `accelerate launch`: sharding on real processes, the losses of plain PyTorch, full exports."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SFT, accel_fsdp, accelerate_launch, made_yaml
from offline import assert_exports_offline
from peft import PeftModel
from reference import LEARNING_RATE, SGD_LEARNING_RATE, Reference, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

PROBE = ROOT / "tests" / "probe.py"
STEPS = 6
PER_RANK = 2
RANKS = 2
TOLERANCE = 1e-4


def make_config(folder: Path, model: Path, **flags: str) -> Path:
    """A YAML from the wizard's answers, as `accel-fsdp config --yes` writes it."""
    path = folder / "fsdp.yaml"
    path.write_text(made_yaml(**{"model": str(model), "num_processes": str(RANKS), "mixed_precision": "no", **flags}))
    return path


def sft_args(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    fixed = {
        "--model_name_or_path": model,
        "--dataset_name": data,
        "--output_dir": output,
        "--max_steps": STEPS,
        "--per_device_train_batch_size": PER_RANK,
        "--learning_rate": LEARNING_RATE,
        "--lr_scheduler_type": "constant",
        "--train_sampling_strategy": "sequential",
        "--logging_steps": 1,
        "--save_steps": 3,
        "--disable_tqdm": "true",
    }
    return [str(word) for pair in fixed.items() for word in pair] + list(more)


def logged_losses(run_folder: Path) -> list[float]:
    """Losses at full precision, from the newest checkpoint's trainer_state.json."""
    state = json.loads((run_folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def reference(tiny_model: Path, text_data: Path) -> Reference:
    return train(tiny_model, text_data, steps=STEPS, global_batch=PER_RANK * RANKS)


@pytest.mark.parametrize("version", ["1", "2"])
def test_gradients_have_the_scale_of_plain_pytorch(
    version: str, tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """AdamW and clipping would hide gradients that are off by the number of ranks; plain SGD doesn't."""
    expected = train(tiny_model, text_data, steps=STEPS, global_batch=PER_RANK * RANKS, sgd=True)
    config = make_config(tmp_path, tiny_model, fsdp_version=version)
    flags = ("--optim", "sgd", "--max_grad_norm", "0", "--learning_rate", str(SGD_LEARNING_RATE))
    finished = accelerate_launch(config, SFT, *sft_args(tiny_model, text_data, tmp_path / "run", *flags))
    assert finished.code == 0, finished.output
    assert "the model's own loss" not in finished.output
    assert expected.losses[0] - expected.losses[-1] > 0.1
    assert logged_losses(tmp_path / "run") == pytest.approx(expected.losses, abs=TOLERANCE)


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_resume_continues_exactly(version: str, kind: str, tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, tiny_model, fsdp_version=version, state_dict_type=kind)
    assert_resumes_exactly(config, tiny_model, text_data, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        {"fsdp_version": "1"},
        {"fsdp_version": "1", "activation_checkpointing": "true"},
        {"fsdp_version": "2", "activation_checkpointing": "true"},
        {"fsdp_version": "2", "strategy": "3"},
        {"fsdp_version": "1", "state_dict_type": "FULL_STATE_DICT"},
        {"fsdp_version": "2", "state_dict_type": "FULL_STATE_DICT"},
    ],
    ids=["fsdp1", "fsdp1-ac", "fsdp2-ac", "ddp", "fsdp1-full", "fsdp2-full"],
)
def test_lora_exports_and_resumes(flags: dict[str, str], tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """PEFT 0.21 alone writes adapters without a single tensor here, into exports and checkpoints alike."""
    config = make_config(tmp_path, tiny_model, **flags)
    out = tmp_path / "run"
    lora = ("--use_peft", "--lora_dropout", "0.0")
    finished = accelerate_launch(config, PROBE, *sft_args(tiny_model, text_data, out, *lora), PROBE_OUT=str(tmp_path))
    assert finished.code == 0, finished.output
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    linears = sum(isinstance(m, torch.nn.Linear) for m in base.modules()) - 1  # all but the head
    adapter = load_file(out / "final" / "adapter_model.safetensors")
    assert len(adapter) == 2 * linears
    assert all(tensor.abs().sum() > 0 for tensor in adapter.values())  # B starts at zero: it was trained
    merged = PeftModel.from_pretrained(base, out / "final").merge_and_unload()
    assert_same_logits(merged, tmp_path)
    assert_resumes_exactly(config, tiny_model, text_data, tmp_path, *lora)
    if flags == {"fsdp_version": "2", "state_dict_type": "FULL_STATE_DICT"}:
        torch.save({}, out / "checkpoint-3" / "pytorch_model_fsdp.bin")  # as PEFT alone writes it under FSDP1
        (out / "checkpoint-3" / "complete.json").unlink()
        shutil.rmtree(out / f"checkpoint-{STEPS}")
        args = sft_args(tiny_model, text_data, out, *lora, "--resume_from_checkpoint", "true")
        refused = accelerate_launch(config, SFT, *args)
        assert refused.code != 0
        assert "holds 0 of the adapter's 56 tensors; it lacks base_model.model.model.layers.0." in refused.output


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (
            {"fsdp_version": "1", "wrap_policy": "SIZE_BASED_WRAP", "activation_checkpointing": "true"},
            "FSDP1 FULL_SHARD: 7 units",
        ),
        ({"fsdp_version": "1", "wrap_policy": "NO_WRAP", "cpu_offload": "true"}, "FSDP1 FULL_SHARD: 1 units"),
        ({"fsdp_version": "2", "wrap_policy": "NO_WRAP", "cpu_offload": "true"}, "CPU offload has no meaning here"),
        ({"fsdp_version": "2", "mixed_precision": "bf16", "activation_checkpointing": "true"}, "FSDP2: "),
        ({"fsdp_version": "1", "mixed_precision": "bf16"}, "FSDP1 FULL_SHARD: 5 units"),
        ({"fsdp_version": "2", "strategy": "3", "mixed_precision": "bf16"}, "MULTI_CPU: no FSDP was asked for"),
    ],
    ids=["size-ac", "nowrap-offload1", "nowrap-offload2", "bf16-ac", "bf16-fsdp1", "ddp"],
)
def test_every_offered_option_trains_and_exports(
    flags: dict[str, str], reported: str, tiny_model: Path, text_data: Path, reference: Reference, tmp_path: Path
) -> None:
    config = make_config(tmp_path, tiny_model, **flags)
    out = tmp_path / "run"
    finished = accelerate_launch(config, SFT, *sft_args(tiny_model, text_data, out))
    assert finished.code == 0, finished.output
    assert reported in finished.output
    assert "find_unused_parameters" not in finished.output
    low_precision = flags.get("mixed_precision") == "bf16"
    assert logged_losses(out) == pytest.approx(reference.losses, abs=3e-2 if low_precision else TOLERANCE)
    exported = load_file(out / "final" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: tensor.shape for name, tensor in reference.weights.items()
    }
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}


@pytest.mark.parametrize("version", ["1", "2"])
def test_lora_on_a_16_bit_base(version: str, tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """The usual LoRA recipe: frozen base as the checkpoint stores it, adapter and its export in float32."""
    base = tmp_path / "bf16"
    shutil.copytree(tiny_model, base)
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(base)
    config = make_config(tmp_path, base, fsdp_version=version, mixed_precision="bf16")
    out = tmp_path / "run"
    finished = accelerate_launch(config, SFT, *sft_args(base, text_data, out, "--use_peft"))
    assert finished.code == 0, finished.output
    adapter = load_file(out / "final" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert logged_losses(out)[-1] < logged_losses(out)[0]


def tiny_deepseek(folder: Path, tokenizer_of: Path) -> Path:
    """A mixture-of-experts model whose router stores a buffer in the checkpoint."""
    path = folder / "tiny-deepseek"
    sizes = {"vocab_size": 509, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **latent, **experts)).save_pretrained(path)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(path)
    return path


def test_a_model_with_stored_buffers(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """FSDP2's RAM-efficient loading fails on them in accelerate 1.15, so the wizard turns it off, or the run stops."""
    model = tiny_deepseek(tmp_path, tiny_model)
    config = make_config(tmp_path, model)
    assert "fsdp_cpu_ram_efficient_loading: false" in config.read_text()
    finished = accelerate_launch(config, SFT, *sft_args(model, text_data, tmp_path / "run"))
    assert finished.code == 0, finished.output
    exported = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert any("e_score_correction_bias" in name for name in exported)
    config.write_text(config.read_text().replace("efficient_loading: false", "efficient_loading: true"))
    refused = accel_fsdp("launch", config, SFT, *sft_args(model, text_data, tmp_path / "other"))
    assert refused.code == 1
    assert "fsdp_cpu_ram_efficient_loading: false in the YAML" in refused.output


def assert_same_logits(model: torch.nn.Module, noted: Path) -> None:
    """The reloaded model computes what the sharded one did before its export."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 43).reshape(2, 20)).logits
    torch.testing.assert_close(logits, torch.load(noted / "run-logits.pt", weights_only=True), atol=1e-5, rtol=1e-5)


def assert_resumes_exactly(config: Path, model: Path, data: Path, folder: Path, *more: str) -> None:
    """A run stopped after step 3 and resumed has the losses and the weights of one that was never stopped."""
    out = folder / "run"
    if not out.exists():
        straight = accelerate_launch(config, SFT, *sft_args(model, data, out, *more))
        assert straight.code == 0, straight.output
    expected = logged_losses(out)
    weights = load_file(next((out / "final").glob("*model.safetensors")))
    for gone in ("final", f"checkpoint-{STEPS}"):
        shutil.rmtree(out / gone)
    resumed = accelerate_launch(config, SFT, *sft_args(model, data, out, *more, "--resume_from_checkpoint", "true"))
    assert resumed.code == 0, resumed.output
    assert "peak memory after step 5: " in resumed.output
    assert logged_losses(out) == pytest.approx(expected, abs=1e-6)
    again = load_file(next((out / "final").glob("*model.safetensors")))
    assert again.keys() == weights.keys()
    for name, tensor in again.items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=0)
    assert_exports_offline(out, folder / "offline")


def test_what_cannot_be_resumed_is_said(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """Half-written checkpoints are passed over, and one that doesn't fit the run ends in one message."""
    config, out = make_config(tmp_path, tiny_model), tmp_path / "run"
    args = sft_args(tiny_model, text_data, out)
    assert accelerate_launch(config, SFT, *args).code == 0
    (out / f"checkpoint-{STEPS}" / "trainer_state.json").unlink()
    resume = ("--resume_from_checkpoint", "true")
    other = accel_fsdp("launch", config, SFT, *args, *resume, "--use_peft", "--resume_with_changes", "true")
    assert other.code == 1
    assert "cannot resume from" in other.output
    assert "checkpoint-3" in other.output
    assert "Traceback" not in other.output
    (out / "checkpoint-3" / "pytorch_model_fsdp_0" / ".metadata").unlink()
    none = accel_fsdp("launch", config, SFT, *args, "--resume_from_checkpoint", "true")
    assert none.code == 1
    assert "no complete checkpoint-N folder" in none.output
