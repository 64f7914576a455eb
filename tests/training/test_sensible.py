"""Flags with values that can't be meant: one error each, before anything is read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished
from transformers import AutoTokenizer, TrainingArguments

from accel_fsdp.errors import UserError
from accel_fsdp.training import arguments, load_model

Sft = Callable[..., Finished]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """What the parser says of some flags; empty where it takes them."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    given = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", str(tmp_path)]

    def parse(*flags: str, **environment: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr("sys.argv", ["sft.py", *given, *flags])
            try:
                arguments.parse()
            except UserError as error:
                return str(error)
        return ""

    return parse


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logging_steps", "0"], ""),
        (["--lora_r", "4"], "--lora_r without --use_peft"),
        (["--lora_alpha", "8"], "--lora_alpha without --use_peft"),
        (["--lora_dropout", "0"], "--lora_dropout without --use_peft"),
        (["--lora_target_modules", "q_proj"], "--lora_target_modules without --use_peft"),
        (["--lora_modules_to_save", "lm_head"], "--lora_modules_to_save without --use_peft"),
        (["--use_rslora"], "--use_rslora without --use_peft"),
        (["--bnb_4bit_quant_type", "fp4", "--use_peft"], "--bnb_4bit_quant_type without --load_in_4bit"),
        (["--lora_r", "4", "--lora_target_modules", "q_proj", "--use_peft"], ""),
        (["--lora_r", "16"], ""),
        (["--streaming_buffer", "0"], "--streaming_buffer 0"),
        (["--early_stopping_patience", "2"], "--early_stopping_patience without evaluation"),
        (["--early_stopping_patience", "0", "--eval_strategy", "steps"], "--early_stopping_patience 3"),
        (["--push_to_hub", "true"], "--push_to_hub, and the hub can't be used: "),
        (["--optim", "sgd", "--max_steps", "3", "--num_train_epochs", "0"], ""),
        (["--optim", "adafactor"], ""),
        (["--report_to", "tensorbord"], "--report_to tensorbord is no tracker of Trainer. Did you mean tensorboard?"),
        (["--report_to", "none"], ""),
        *((["--profile_steps", steps], "it has to be FIRST:LAST, from 1 on") for steps in ("5:3", "0:3", "3-5")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_one_error(flags: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused(*flags)
    assert bool(refused(*flags)) == bool(message)


FLAGS = [field.name for field in dataclasses.fields(TrainingArguments) if field.name != "output_dir"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", FLAGS)
def test_no_flag_of_trainers_ends_in_a_traceback(name: str, refused: Callable[..., str]) -> None:
    """The parser takes a value or says what is wrong with it; any other exception fails the test."""
    for value in ("-1", "nonsense", "{}"):
        refused(f"--{name}={value}")


@pytest.mark.parametrize(
    ("flags", "version", "message"),
    [
        (["--use_dora"], "1", "fsdp_version: 2"),
        (["--use_dora"], "2", ""),
        (["--lora_modules_to_save", "lm_head"], "2", "--lora_modules_to_save under FSDP2"),
    ],
)
def test_adapters_that_shards_cannot_have(
    flags: list[str], version: str, message: str, refused: Callable[..., str]
) -> None:
    refusal = refused("--use_peft", *flags, ACCELERATE_USE_FSDP="true", FSDP_VERSION=version)
    assert message in refusal
    assert bool(refusal) == bool(message)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw_bnb_8bit", "adamw_8bit"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_optimizers_that_fsdp_cannot_run(optimizer: str, version: str, refused: Callable[..., str]) -> None:
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": version}
    refusal = refused("--optim", optimizer, **fsdp)
    assert f"(FSDP{version})" in refusal
    assert "fix: --optim adamw_torch_fused" in refusal
    if version == "1":  # which fails when it saves, and only then
        assert "FSDP1" not in refused("--optim", optimizer, "--save_strategy", "no", **fsdp)


def test_tokens_beyond_the_embedding_are_told_by_their_numbers(tiny_model: Path, tmp_path: Path, sft: Sft) -> None:
    """A vocabulary may have gaps: few tokens, and one whose number is larger than the last row."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    options = arguments.ModelArguments(str(tiny_model))

    class Gapped:
        def __len__(self) -> int:
            return 10

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "far": 600}

    load_model.load_model(options, tokenizer)
    with pytest.raises(UserError, match="largest token is 600, the model's embedding has 509 rows"):
        load_model.load_model(options, Gapped())  # type: ignore[arg-type]
    resized = load_model.load_model(arguments.ModelArguments(str(tiny_model), resize_vocab=True), Gapped())  # type: ignore[arg-type]
    assert resized.get_input_embeddings().weight.shape[0] == 601  # type: ignore[operator]
