"""Flags that users of TRL type: those that work here do what PEFT and transformers say, the others get a true hint."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Finished
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_fsdp.job import from_arguments
from accel_fsdp.training import arguments, flag_values
from accel_fsdp.training.data import DataArguments

Sft = Callable[..., Finished]
ADAPTER = ("--use_peft", "--lora_r", "4", "--lora_alpha", "8", "--lora_dropout", "0", "--use_rslora", "true")
SAVED = ("--lora_modules_to_save", "lm_head", "embed_tokens")


def words(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    flags = ["--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(output)]
    flags += ["--max_steps", "4", "--per_device_train_batch_size", "4", "--learning_rate", "0.01", "--save_steps", "2"]
    return [*flags, "--disable_tqdm", "true", "--lr_scheduler_type", "constant", *more]


def known_flags() -> set[str]:
    parser = arguments._Parser([arguments.ModelArguments, DataArguments, arguments.SftArguments])
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("flag", sorted(flag_values.TRL))
def test_a_hint_names_what_there_is(flag: str, sft: Sft, tmp_path: Path) -> None:
    refused = sft(*words(tmp_path, tmp_path, tmp_path / "run", f"--{flag}", "x"))
    assert refused.code == 2
    assert f"unknown argument --{flag}." in refused.output
    assert "Did you mean" not in refused.output
    known = known_flags()
    assert f"--{flag}" not in known
    named = set(re.findall(r"--[a-z_0-9]+", flag_values.TRL[flag])) - {"--config_file"}  # Accelerate's
    assert named <= known


def assert_adapter_is_whole(final: Path, model: Path, run: Path) -> None:
    """As PEFT reads it: scale, modules trained in full, and all of it moved by training."""
    settings = json.loads((final / "adapter_config.json").read_text())
    assert settings["use_rslora"] is True
    assert settings["modules_to_save"] == ["lm_head", "embed_tokens"]
    stored = load_file(final / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(model)
    heads = {name: tensor for name, tensor in stored.items() if "lora_" not in name}
    assert {name.rsplit(".", 2)[-2] for name in heads} == {"lm_head", "embed_tokens"}
    for name, tensor in heads.items():
        before = base.get_parameter(name.removeprefix("base_model.model."))
        assert tensor.shape == before.shape
        assert not torch.equal(tensor, before)
    loaded = PeftModel.from_pretrained(base, final)
    assert loaded.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] == pytest.approx(8 / 4**0.5)
    assert torch.equal(loaded.get_output_embeddings().weight, heads["base_model.model.lm_head.weight"])


def test_rslora_and_modules_trained_in_full(tiny_model: Path, text_data: Path, tmp_path: Path, sft: Sft) -> None:
    run = tmp_path / "run"
    flags = words(tiny_model, text_data, run, *ADAPTER, *SAVED)
    finished = sft(*flags)
    assert finished.code == 0, finished.output
    assert_adapter_is_whole(run / "final", tiny_model, run)
    straight = load_file(run / "final" / "adapter_model.safetensors")
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoint-4")
    resumed = sft(*flags, "--resume_from_checkpoint", "true")
    assert resumed.code == 0, resumed.output
    again = load_file(run / "final" / "adapter_model.safetensors")
    assert again.keys() == straight.keys()
    assert all(torch.allclose(again[name], straight[name], atol=1e-6) for name in straight)


def test_tokens_of_ones_own(tiny_model: Path, text_data: Path, tmp_path: Path, sft: Sft) -> None:
    """A tokenizer without an end token is said; --eos_token ends each row and goes into the export."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    message = "the tokenizer has no end token: the model won't learn where to stop (--eos_token)"
    without = sft(*words(model, text_data, tmp_path / "without", "--max_steps", "1"))
    assert without.code == 0, without.output
    assert message in without.output
    wrong = sft(*words(model, text_data, tmp_path / "wrong", "--eos_token", "<|im_ent|>"))
    assert wrong.code == 1
    assert "Did you mean <|im_end|>?" in wrong.output
    tokens = ("--eos_token", "<|im_start|>", "--pad_token", "<|endoftext|>", "--max_steps", "1")
    run = sft(*words(model, text_data, tmp_path / "run", *tokens))
    assert run.code == 0, run.output
    assert message not in run.output
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    assert (exported.eos_token, exported.pad_token) == ("<|im_start|>", "<|endoftext|>")
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["eos_token_id"] == exported.eos_token_id == 1


def test_what_has_not_been_shown_on_shards_is_refused_there(
    sft: Sft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    refused = sft(*words(tmp_path, tmp_path, tmp_path / "run", "--use_peft", "--lora_modules_to_save", "lm_head"))
    assert refused.code == 1
    assert "--lora_modules_to_save under FSDP2" in refused.output


def test_help_begins_with_the_flags_that_most_runs_have(sft: Sft, capfd: pytest.CaptureFixture[str]) -> None:
    """And has each flag once."""
    with pytest.raises(SystemExit):
        sft("--help")
    output = capfd.readouterr().out
    first, rest = output.split("all others:")
    assert "--learning_rate" in first
    assert "--adam_beta1" in rest
    flags = re.findall(r"^  (?:-h, )?(--\w+)", output, re.MULTILINE)
    assert len(flags) == len(set(flags)) > 100


def test_no_flag_is_taken_for_another_one_misspelt() -> None:
    names = {flag.removeprefix("--").replace("-", "_") for flag in known_flags()} | flag_values.TRL.keys()
    assert list(from_arguments.misspelt(dict.fromkeys(names, 1))) == []
    assert list(from_arguments.misspelt({"max_lenght": 9})) == [("max_lenght", "max_length")]
