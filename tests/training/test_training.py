"""`train/sft.py` under `accelerate launch`: sharding on real processes, the losses of plain PyTorch, full exports."""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROBE, SFT, accel_fsdp, accelerate_launch, made_yaml
from offline import assert_exports_offline
from peft import PeftModel
from reference import LORA_LEARNING_RATE, SGD_LEARNING_RATE, Reference, job_words, losses_of, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

STEPS, STOPPED = 4, 2
"""Of a whole run, and after how many of them one is stopped that is resumed."""
PER_RANK = 2
RANKS = 2
TOLERANCE = 1e-4


def make_config(folder: Path, model: Path, **flags: str) -> Path:
    """A YAML from the wizard's answers, as `accel-fsdp config --yes` writes it."""
    path = folder / "fsdp.yaml"
    path.write_text(made_yaml(**{"model": str(model), "num_processes": str(RANKS), "mixed_precision": "no", **flags}))
    return path


def sft_args(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return [*job_words(model, data, output, STEPS, PER_RANK, save_steps=STEPS), *more]


def logged_losses(run: Path) -> list[float]:
    return losses_of(run, STEPS)


@pytest.fixture(scope="module")
def reference(tiny_model: Path, text_data: Path) -> Reference:
    return train(tiny_model, text_data, steps=STEPS, global_batch=PER_RANK * RANKS)


FULL = {"state_dict_type": "FULL_STATE_DICT"}
CHECKPOINTS = {"activation_checkpointing": "true"}
RESUMED: dict[str, dict[str, str]] = {
    "sharded-1": {"fsdp_version": "1"},
    "sharded-2": {"fsdp_version": "2"},
    "full-2": {"fsdp_version": "2", **FULL},
    "lora-fsdp1-ac": {"fsdp_version": "1", **CHECKPOINTS},
    "lora-fsdp2-full": {"fsdp_version": "2", **FULL},
}
OPTIONS: dict[str, tuple[dict[str, str], str]] = {
    "nowrap-offload2": (
        {"fsdp_version": "2", "wrap_policy": "NO_WRAP", "cpu_offload": "true"},
        "CPU offload has no meaning here",
    ),
    "size-ac": ({"fsdp_version": "1", "wrap_policy": "SIZE_BASED_WRAP", **CHECKPOINTS}, "FSDP1 FULL_SHARD: 5 units"),
    "bf16-ac": ({"fsdp_version": "2", "mixed_precision": "bf16", **CHECKPOINTS}, "FSDP2: "),
}
SGD_JOBS, BASE16_JOBS = ("sgd-1", "sgd-2"), ("base16-1", "base16-2")
OLDEST = ("sharded-1", "full-2", "lora-fsdp1-ac", "lora-fsdp2-full", "bf16-ac", *SGD_JOBS, *BASE16_JOBS)
"""The jobs of `make test-oldest`: enough to see the main job, a resume, an adapter and an export under both engines."""
LORA = ("--use_peft", "--lora_dropout", "0.0")
SGD = ("--optim", "sgd", "--max_grad_norm", "0", "--learning_rate", str(SGD_LEARNING_RATE))
RESUME = ("--resume_from_checkpoint", "true")


@dataclass(frozen=True)
class Jobs:
    """Runs of `train/sft.py` that one launch made, and what each of them printed."""

    folder: Path
    printed: dict[str, str]


def flags_of(name: str) -> dict[str, str]:
    """The answers to the wizard of a job."""
    if name in RESUMED:
        return RESUMED[name]
    if name in OPTIONS:
        return OPTIONS[name][0]
    mixed = {"mixed_precision": "bf16"} if name.startswith("base16") else {}
    return {"fsdp_version": name[-1], **mixed, **(CHECKPOINTS if "-ac-" in name else {})}


def words_of(name: str, folder: Path, model: Path, data: Path) -> list[str]:
    """The arguments of a job."""
    more = SGD if name.startswith("sgd") else ()
    if name in RESUMED:
        more = ("--save_steps", str(STOPPED), *(LORA if name.startswith("lora") else ()))
    if name.startswith("base16"):
        data, more = folder / "again.jsonl", ("--use_peft", "--learning_rate", str(LORA_LEARNING_RATE))
    base = folder / name.partition("-")[0] if name.startswith(("base16", "deepseek")) else model
    return sft_args(base, data, folder / name, *more)


def launched(names: Sequence[str], folder: Path, model: Path, data: Path, *more: str) -> dict[str, str]:
    """Runs jobs, each under its own YAML, in one launch."""
    words = {name: [*words_of(name, folder, model, data), *more] for name in names}
    configs = {name: folder / f"{name}.yaml" for name in names}
    others = {name: ["--config_file", str(configs[name]), *words[name]] for name in names[1:]}
    env = {"PROBE_OUT": str(folder), "PROBE_MORE": json.dumps(others)}
    finished = accelerate_launch(configs[names[0]], PROBE, *words[names[0]], **env)
    assert finished.code == 0, finished.output
    parts = re.split(r"^job (.*)$", f"job {names[0]}\n{finished.output}", flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def oldest(*names: str) -> list[Any]:
    """Parameters of a test, those of `OLDEST` marked."""
    return [pytest.param(name, marks=pytest.mark.oldest) if name in OLDEST else name for name in names]


def wanted(names: Iterable[str], config: pytest.Config) -> list[str]:
    """The jobs that the chosen tests look at."""
    return [name for name in names if name in OLDEST or config.option.markexpr != "oldest"]


@pytest.fixture(scope="module")
def straight(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, text_data: Path, pytestconfig: pytest.Config
) -> Jobs:
    """All that train without a stop."""
    folder = tmp_path_factory.mktemp("jobs")
    shutil.copytree(tiny_model, folder / "base16")
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder / "base16")
    (folder / "again.jsonl").write_text("".join(text_data.read_text().splitlines(True)[: PER_RANK * RANKS]))
    tiny_deepseek(folder / "deepseek", tiny_model)
    names = wanted([*OPTIONS, *RESUMED, *SGD_JOBS, *BASE16_JOBS, "base16-ac-1", "deepseek-2"], pytestconfig)
    for name in names:
        base = folder / name.partition("-")[0] if name.startswith(("base16", "deepseek")) else tiny_model
        make_config(folder, base, **flags_of(name)).rename(folder / f"{name}.yaml")
    return Jobs(folder, launched(names, folder, tiny_model, text_data))


@pytest.fixture(scope="module")
def resumed(straight: Jobs, tiny_model: Path, text_data: Path, pytestconfig: pytest.Config) -> Jobs:
    """The runs that are stopped after step 2 and go on; what they were without a stop lies under `whole`."""
    folder, names = straight.folder, wanted(RESUMED, pytestconfig)
    for name in names:
        (folder / "whole" / name).mkdir(parents=True)
        for gone in ("final", f"checkpoint-{STEPS}"):
            (folder / name / gone).rename(folder / "whole" / name / gone)
        shutil.copy(folder / f"{name}-logits.pt", folder / "whole")
    return Jobs(folder, launched(names, folder, tiny_model, text_data, *RESUME))


@pytest.mark.oldest
@pytest.mark.parametrize("version", ["1", "2"])
def test_gradients_have_the_scale_of_plain_pytorch(
    version: str, straight: Jobs, tiny_model: Path, text_data: Path
) -> None:
    """AdamW and clipping would hide gradients that are off by the number of ranks; plain SGD doesn't."""
    expected = train(tiny_model, text_data, steps=STEPS, global_batch=PER_RANK * RANKS, sgd=True)
    assert "the model's own loss" not in straight.printed[f"sgd-{version}"]
    assert expected.losses[0] - expected.losses[-1] > 0.1
    assert logged_losses(straight.folder / f"sgd-{version}") == pytest.approx(expected.losses, abs=TOLERANCE)


@pytest.mark.parametrize("name", oldest(*OPTIONS))
def test_every_offered_option_trains_and_exports(name: str, straight: Jobs, reference: Reference) -> None:
    flags, reported = OPTIONS[name]
    out, output = straight.folder / name, straight.printed[name]
    assert reported in output
    assert "find_unused_parameters" not in output
    low_precision = flags.get("mixed_precision") == "bf16"
    assert logged_losses(out) == pytest.approx(reference.losses, abs=3e-2 if low_precision else TOLERANCE)
    exported = load_file(out / "final" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: tensor.shape for name, tensor in reference.weights.items()
    }
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}


@pytest.mark.oldest
@pytest.mark.parametrize("version", ["1", "2"])
def test_lora_on_a_16_bit_base(version: str, straight: Jobs) -> None:
    """The usual LoRA recipe: frozen base as the checkpoint stores it, adapter and its export in float32.

    Each step has the same rows, so that the loss of each must be less than that of the one before.
    """
    out = straight.folder / f"base16-{version}"
    adapter = load_file(out / "final" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    losses = logged_losses(out)
    assert all(later < earlier for earlier, later in pairwise(losses)), losses


def test_lora_under_fsdp1_recomputes_what_forward_saved(straight: Jobs) -> None:
    """PEFT 0.21 alone casts to dtypes that FSDP1 changes in between, and torch stops the first backward pass."""
    plain, recomputed = (logged_losses(straight.folder / name) for name in ("base16-1", "base16-ac-1"))
    assert recomputed == pytest.approx(plain, abs=TOLERANCE)


@pytest.mark.parametrize("name", oldest(*RESUMED))
def test_resume_continues_exactly(name: str, resumed: Jobs) -> None:
    """A run stopped after step 2 and resumed has the losses and the weights of one that was never stopped."""
    out, whole = resumed.folder / name, resumed.folder / "whole" / name
    assert f"peak memory after step {STOPPED + 2}: " in resumed.printed[name]
    assert logged_losses(out) == pytest.approx(logged_losses(whole), abs=1e-6)
    again, weights = (load_file(next((folder / "final").glob("*model.safetensors"))) for folder in (out, whole))
    assert again.keys() == weights.keys()
    for key, tensor in again.items():
        torch.testing.assert_close(tensor, weights[key], atol=1e-6, rtol=0)
    assert_exports_offline(out, resumed.folder / "offline" / name)


@pytest.mark.parametrize("name", oldest(*(name for name in RESUMED if name.startswith("lora"))))
def test_lora_exports(name: str, resumed: Jobs, tiny_model: Path) -> None:
    """PEFT 0.21 alone writes adapters without a single tensor here, into exports and checkpoints alike."""
    final = resumed.folder / "whole" / name / "final"
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    linears = sum(isinstance(m, torch.nn.Linear) for m in base.modules()) - 1  # all but the head
    adapter = load_file(final / "adapter_model.safetensors")
    assert len(adapter) == 2 * linears
    assert all(tensor.abs().sum() > 0 for tensor in adapter.values())  # B starts at zero: it was trained
    merged = PeftModel.from_pretrained(base, final).merge_and_unload()
    assert_same_logits(merged, resumed.folder / "whole" / f"{name}-logits.pt")


def test_an_adapter_that_is_not_in_the_checkpoint(resumed: Jobs, tiny_model: Path, text_data: Path) -> None:
    """As PEFT alone writes it under FSDP1."""
    name, out = "lora-fsdp2-full", resumed.folder / "lora-fsdp2-full"
    torch.save({}, out / f"checkpoint-{STOPPED}" / "pytorch_model_fsdp.bin")
    (out / f"checkpoint-{STOPPED}" / "complete.json").unlink()
    shutil.rmtree(out / f"checkpoint-{STEPS}")
    args = words_of(name, resumed.folder, tiny_model, text_data)
    refused = accelerate_launch(resumed.folder / f"{name}.yaml", SFT, *args, *RESUME)
    assert refused.code != 0
    assert "holds 0 of the adapter's 28 tensors; it lacks LoRA tensors of 14 of 14 modules" in refused.output


def tiny_deepseek(folder: Path, tokenizer_of: Path) -> None:
    """A mixture-of-experts model whose router stores a buffer in the checkpoint."""
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
    DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **latent, **experts)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)


def test_a_model_with_stored_buffers(straight: Jobs, text_data: Path, tmp_path: Path) -> None:
    """FSDP2's RAM-efficient loading fails on them in accelerate 1.15, so the wizard turns it off, or the run stops."""
    text = (straight.folder / "deepseek-2.yaml").read_text()
    assert "fsdp_cpu_ram_efficient_loading: false" in text
    exported = load_file(straight.folder / "deepseek-2" / "final" / "model.safetensors")
    assert any("e_score_correction_bias" in name for name in exported)
    config = tmp_path / "other.yaml"
    config.write_text(text.replace("efficient_loading: false", "efficient_loading: true"))
    words = sft_args(straight.folder / "deepseek", text_data, tmp_path / "other")
    refused = accel_fsdp("launch", config, SFT, *words)
    assert refused.code == 1
    assert "fsdp_cpu_ram_efficient_loading: false in the YAML" in refused.output


def assert_same_logits(model: torch.nn.Module, noted: Path) -> None:
    """The reloaded model computes what the sharded one did before its export."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 43).reshape(2, 20)).logits
    torch.testing.assert_close(logits, torch.load(noted, weights_only=True), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_resumed_is_said(straight: Jobs, tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """Half-written checkpoints are passed over, and one that doesn't fit the run ends in one message."""
    config, out = straight.folder / "sharded-2.yaml", tmp_path / "run"
    shutil.copytree(straight.folder / "sharded-2", out)
    args = sft_args(tiny_model, text_data, out)
    (out / f"checkpoint-{STEPS}" / "trainer_state.json").unlink()
    resume = ("--resume_from_checkpoint", "true")
    other = accel_fsdp("launch", config, SFT, *args, *resume, "--use_peft", "--resume_with_changes", "true")
    assert other.code == 1
    assert "cannot resume from" in other.output
    assert f"checkpoint-{STOPPED}" in other.output
    assert "Traceback" not in other.output
    (out / f"checkpoint-{STOPPED}" / "pytorch_model_fsdp_0" / ".metadata").unlink()
    none = accel_fsdp("launch", config, SFT, *args, "--resume_from_checkpoint", "true")
    assert none.code == 1
    assert "no complete checkpoint-N folder" in none.output
