"""`train/sft.py` under `accelerate launch`: sharding on real processes, the losses of plain PyTorch, full exports."""

import re
import shutil
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import PER_RANK, RANKS, STEPS, TOLERANCE, Jobs, launch, logged_losses, make_config, save, sft_args
from offline import assert_exports_offline
from peft import PeftModel
from reference import LORA_LEARNING_RATE, Reference, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

STOPPED = 2
"""After how many steps a run is stopped that is resumed."""


@pytest.fixture(scope="module")
def reference(tiny_model: Path, text_data: Path) -> Reference:
    return train(tiny_model, text_data, steps=STEPS, global_batch=PER_RANK * RANKS)


FULL = {"state_dict_type": "FULL_STATE_DICT"}
CHECKPOINTS = {"activation_checkpointing": "true"}
RESUMED: dict[str, dict[str, str]] = {
    "ddp": {
        "fsdp_version": "2",
        "strategy": "3",
    },  # before FSDP, which on CPUs has Accelerate take each job for its own
    "sharded-1": {"fsdp_version": "1"},
    "sharded-2": {"fsdp_version": "2"},
    "full-2": {"fsdp_version": "2", **FULL},
    "lora-fsdp1-ac": {"fsdp_version": "1", **CHECKPOINTS},
    "lora-fsdp2-full": {"fsdp_version": "2", **FULL},
}
OPTIONS: dict[str, tuple[dict[str, str], str]] = {
    "nowrap-offload2": (
        {"fsdp_version": "2", "wrap_policy": "NO_WRAP", "cpu_offload": "true"},
        "FSDP2: ",
    ),
    "size-ac": ({"fsdp_version": "1", "wrap_policy": "SIZE_BASED_WRAP", **CHECKPOINTS}, "FSDP1 FULL_SHARD: 5 units"),
    "bf16-ac": ({"fsdp_version": "2", "mixed_precision": "bf16", **CHECKPOINTS}, "FSDP2: "),
}
BASE16 = ("base16-1", "base16-2", "base16-ac-1")
OLDEST = ("sharded-1", "full-2", "lora-fsdp1-ac", "lora-fsdp2-full", "size-ac", "bf16-ac", *BASE16[:2])
"""The jobs of `make test-oldest`: enough to see the main job, a resume, an adapter and an export under both engines."""
LORA = ("--use_peft", "--lora_dropout", "0.0")
RESUME = ("--resume_from_checkpoint", "true")


def flags_of(name: str) -> dict[str, str]:
    """The answers to the wizard of a job."""
    if name in RESUMED:
        return RESUMED[name]
    if name in OPTIONS:
        return OPTIONS[name][0]
    mixed = {"mixed_precision": "bf16"} if name.startswith("base16") else {}
    return {"fsdp_version": name[-1], **mixed, **(CHECKPOINTS if "-ac-" in name else {})}


def words_of(name: str, folder: Path, model: Path, data: Path, *resume: str) -> list[str]:
    """A job's arguments and its YAML."""
    more: tuple[str, ...] = ()
    if name in RESUMED:
        more = ("--save_steps", str(STOPPED), *(LORA if name.startswith("lora") else ()))
    if name.startswith("base16"):
        data, more = folder / "again.jsonl", ("--use_peft", "--learning_rate", str(LORA_LEARNING_RATE))
    words = sft_args(base_of(name, folder, model), data, folder / name, *more, *resume)
    return ["--config_file", str(folder / f"{name}.yaml"), *words]


def base_of(name: str, folder: Path, model: Path) -> Path:
    return folder / name.partition("-")[0] if name.startswith(("base16", "deepseek")) else model


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
    save(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16), folder / "base16", tiny_model)
    (folder / "again.jsonl").write_text("".join(text_data.read_text().splitlines(True)[: PER_RANK * RANKS]))
    tiny_deepseek(folder / "deepseek", tiny_model)
    names = wanted([*RESUMED, *OPTIONS, *BASE16, "deepseek-2"], pytestconfig)
    for name in names:
        make_config(folder, base_of(name, folder, tiny_model), **flags_of(name)).rename(folder / f"{name}.yaml")
    return launch({name: words_of(name, folder, tiny_model, text_data) for name in names}, folder)


@pytest.fixture(scope="module")
def resumed(straight: Jobs, tiny_model: Path, text_data: Path, pytestconfig: pytest.Config) -> Jobs:
    """The runs that are stopped after step 2 and go on; what they were without a stop lies under `whole`."""
    folder, names = straight.folder, wanted(RESUMED, pytestconfig)
    for name in names:
        (folder / "whole" / name).mkdir(parents=True)
        for gone in ("final", f"checkpoint-{STEPS}"):
            (folder / name / gone).rename(folder / "whole" / name / gone)
        shutil.copy(folder / f"{name}-logits.pt", folder / "whole")
    return launch({name: words_of(name, folder, tiny_model, text_data, *RESUME) for name in names}, folder)


@pytest.mark.parametrize("name", oldest(*OPTIONS))
def test_every_offered_option_trains_and_exports(name: str, straight: Jobs, reference: Reference) -> None:
    """AdamW and clipping would hide gradients that are off by the number of ranks; their norms don't."""
    flags, reported = OPTIONS[name]
    output, noted = straight.printed[name], straight.noted(name)
    assert reported in output
    assert "find_unused_parameters" not in output
    assert "rounded" not in output
    assert "the model's own loss" not in output
    low_precision = flags.get("mixed_precision") == "bf16"
    assert noted["losses"] == pytest.approx(reference.losses, abs=3e-2 if low_precision else TOLERANCE)
    assert noted["norms"] == pytest.approx(reference.norms, rel=3e-2 if low_precision else 20 * TOLERANCE)
    exported = load_file(straight.folder / name / "final" / "model.safetensors")
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
    merged = PeftModel.from_pretrained(base, final).merge_and_unload().eval()
    with torch.no_grad():
        logits = merged(input_ids=torch.arange(3, 43).reshape(2, 20)).logits
    torch.testing.assert_close(logits, Jobs(final.parent.parent, {}).logits(name), atol=1e-5, rtol=1e-5)


def test_what_cannot_go_on_ends_in_one_message(straight: Jobs, tiny_model: Path, text_data: Path) -> None:
    """Half-written checkpoints are passed over, and PEFT alone writes adapters without a tensor under FSDP1."""
    folder, saved = straight.folder, f"checkpoint-{STOPPED}"
    for name, like in (("empty", "lora-fsdp2-full"), ("other", "sharded-2"), ("none", "sharded-2")):
        shutil.copytree(folder / like, folder / name)
        (folder / name / f"checkpoint-{STEPS}" / "trainer_state.json").unlink()
    torch.save({}, folder / "empty" / saved / "pytorch_model_fsdp.bin")
    (folder / "empty" / saved / "complete.json").unlink()
    (folder / "none" / saved / "pytorch_model_fsdp_0" / ".metadata").unlink()
    efficient = (folder / "deepseek-2.yaml").read_text().replace("loading: false", "loading: true")
    (folder / "buffers.yaml").write_text(efficient)
    sharded = words_of("sharded-2", folder, tiny_model, text_data, *RESUME)
    jobs = {
        "empty": words_of("lora-fsdp2-full", folder, tiny_model, text_data, *RESUME),
        **{"other": [*sharded, "--use_peft", "--resume_with_changes", "true"], "none": sharded},
        "buffers": [
            *words_of("deepseek-2", folder, tiny_model, text_data)[2:],
            *("--config_file", str(folder / "buffers.yaml")),
        ],
    }
    printed = launch(jobs, folder, refused=list(jobs)).printed
    lacking = "holds 0 of the adapter's 28 tensors; it lacks LoRA tensors of 14 of 14 modules"
    assert lacking in printed["empty"]
    assert re.search(f"cannot resume from .*{saved}", printed["other"])
    assert "no complete checkpoint-N folder" in printed["none"]
    assert "fsdp_cpu_ram_efficient_loading: false in the YAML" in printed["buffers"]


def tiny_deepseek(folder: Path, tokenizer_of: Path) -> None:
    """A mixture-of-experts model whose router stores a buffer in the checkpoint."""
    sizes = {"vocab_size": 509, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV3Config(**sizes, **heads, **latent, **experts, first_k_dense_replace=1)
    save(DeepseekV3ForCausalLM(config), folder, tokenizer_of)


def test_a_model_with_stored_buffers(straight: Jobs) -> None:
    """FSDP2's RAM-efficient loading fails on them in accelerate 1.15, so the wizard turns it off, or the run stops."""
    assert "fsdp_cpu_ram_efficient_loading: false" in (straight.folder / "deepseek-2.yaml").read_text()
    exported = load_file(straight.folder / "deepseek-2" / "final" / "model.safetensors")
    assert any("e_score_correction_bias" in name for name in exported)
