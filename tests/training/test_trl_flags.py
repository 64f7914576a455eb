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

Trains = Callable[..., Finished]
ADAPTER = ("--use_peft", "--lora_r", "4", "--lora_alpha", "8", "--lora_dropout", "0", "--use_rslora", "true")
SAVED = ("--lora_modules_to_save", "lm_head", "embed_tokens")


def known_flags() -> set[str]:
    parser = arguments._Parser([arguments.ModelArguments, DataArguments, arguments.SftArguments])
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("flag", sorted(flag_values.TRL))
def test_a_hint_names_what_there_is(flag: str, trains: Trains) -> None:
    refused = trains(f"--{flag}", "x", code=2)
    assert f"unknown argument --{flag}." in refused.output
    assert "Did you mean" not in refused.output
    known = known_flags()
    assert f"--{flag}" not in known
    named = set(re.findall(r"--[a-z_0-9]+", flag_values.TRL[flag])) - {"--config_file"}  # Accelerate's
    assert named <= known


def assert_adapter_is_whole(final: Path, model: Path) -> None:
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


def test_rslora_and_modules_trained_in_full(trains: Trains, tiny_model: Path, tmp_path: Path) -> None:
    run, flags = tmp_path / "run", (*ADAPTER, *SAVED, "--learning_rate", "0.01", "--save_steps", "2")
    trains(*flags)
    assert_adapter_is_whole(run / "final", tiny_model)
    straight = load_file(run / "final" / "adapter_model.safetensors")
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoint-4")
    trains(*flags, "--resume_from_checkpoint", "true")
    again = load_file(run / "final" / "adapter_model.safetensors")
    assert again.keys() == straight.keys()
    assert all(torch.allclose(again[name], straight[name], atol=1e-6) for name in straight)


def test_tokens_of_ones_own(trains: Trains, tiny_model: Path, tmp_path: Path) -> None:
    """A tokenizer without an end token is said; --eos_token ends each row and goes into the export."""
    model, short = Path(shutil.copytree(tiny_model, tmp_path / "model")), ("--max_steps", "1")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    message = "the tokenizer has no end token: the model won't learn where to stop (--eos_token)"
    assert message in trains(*short, model=model, into="without").output
    wrong = trains("--eos_token", "<|im_ent|>", model=model, into="wrong", code=1)
    assert "Did you mean <|im_end|>?" in wrong.output
    tokens = ("--eos_token", "<|im_start|>", "--pad_token", "<|endoftext|>")
    assert message not in trains(*tokens, *short, model=model).output
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    assert (exported.eos_token, exported.pad_token) == ("<|im_start|>", "<|endoftext|>")
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["eos_token_id"] == exported.eos_token_id == 1


def test_help_begins_with_the_flags_that_most_runs_have(sft: Trains, capfd: pytest.CaptureFixture[str]) -> None:
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
