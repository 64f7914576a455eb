"""What `check` reads beside the file: models, arguments, command lines, and the launch line of the file's header."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from checking import V1, V2, codes_of, subject
from conftest import SFT, here
from transformers import AutoConfig, AutoModelForCausalLM, Ernie4_5_MoeConfig, GPTNeoXConfig, MixtralConfig

from accel_fsdp import linter
from accel_fsdp.errors import UsageError
from accel_fsdp.linter import Sources, command_words, launcher_of, read_given, read_subject
from accel_fsdp.linter.rules import Subject
from accel_fsdp.models import expert_classes, kept_in_float32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "fsdp.yaml").write_text(V2)
    return path


def checked(path: Path, args: str) -> dict[str, str]:
    """The severity of each rule that finds something beside these arguments."""
    (line := path.with_suffix(".args")).write_text(args)
    return {finding.code: finding.severity for finding in linter.lint(path, linter.LintOptions(args=line))}


def read(path: Path, text: str, args: str = "") -> Subject:
    """The rules' input of a file, with the command line of an `--args` file."""
    path.write_text(text)
    (line := path.with_suffix(".line")).write_text(args)
    return read_subject(path, Sources(args=line if args else None))[0]


def test_a_model_is_read(tiny_model: Path, tmp_path: Path, file: Path) -> None:
    low, args = tmp_path / "low", tmp_path / "args.yaml"
    AutoModelForCausalLM.from_pretrained(tiny_model).to(torch.bfloat16).save_pretrained(low)
    args.write_text("learning_rate: 0.1\n")

    def found(*words: str | Path) -> set[str]:
        return {entry["code"] for entry in json.loads(here("check", file, "--json", *words).printed)}

    assert found("--model", tiny_model, "--args", args) == set()
    assert found("--model", low, "--args", args) == {"AF613"}
    settings = json.loads((low / "config.json").read_text())
    (low / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    assert "AF506" in found("--model", low)


def test_the_model_in_the_arguments_is_read(tmp_path: Path, file: Path) -> None:
    """gpt-oss has no plan for `tp`: `check` and `launch` say so before a rank starts."""
    AutoConfig.for_model("gpt_oss", num_hidden_layers=2, hidden_size=32).save_pretrained(tmp_path / "model")
    mesh = "parallelism_config: {parallelism_config_dp_shard_size: 1, parallelism_config_tp_size: 2}\n"
    file.write_text(V2.replace("LlamaDecoderLayer", "GptOssDecoderLayer") + mesh)
    for name in (str(tmp_path / "model"), "openai/gpt-oss-20b"):
        assert checked(file, f"train/sft.py --model_name_or_path {name}")["AF517"] == "error"
    launched = here("launch", "--cpu", file, SFT, "--model_name_or_path", tmp_path / "model")
    assert (launched.code, "AF517" in launched.output) == (1, True)


def test_facts_of_models() -> None:
    """Experts in lists and fused, parameters kept in float32, declared classes."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        ernie = AutoModelForCausalLM.from_config(Ernie4_5_MoeConfig(**sizes, num_key_value_heads=2, vocab_size=16))
        mixtral = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=16))
        neox = AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes, vocab_size=16))
    assert kept_in_float32(ernie, "bfloat16")[0].endswith("gate.weight")
    assert kept_in_float32(neox, "bfloat16") == []
    assert expert_classes(mixtral) == frozenset()
    experts = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2, device="meta")])})
    assert expert_classes(experts) == {"Linear"}


@pytest.mark.parametrize(
    ("line", "starter"),
    [
        ("accelerate launch --config_file a.yaml \\\n train.py", "accelerate"),
        ("CUDA_VISIBLE_DEVICES=0 /opt/bin/torchrun --nproc 2 train.py", "torchrun"),
        ("python -m accelerate.commands.launch train.py", "accelerate"),
        ("python -m torch.distributed.run train.py", "torchrun"),
        ("python train.py --bf16", "python"),
        ("bf16: true", ""),
        ("'", ""),
    ],
)
def test_what_a_command_line_starts_with(line: str, starter: str) -> None:
    assert launcher_of(command_words(line)) == starter


@pytest.mark.parametrize(
    "text",
    ["optim: adafactor\nbf16: true\n", '{"optim": "adafactor", "bf16": true}', "train.py --optim=adafactor --bf16"],
)
def test_arguments_come_in_three_forms(text: str, tmp_path: Path) -> None:
    (args := tmp_path / "args").write_text(text)
    assert read_given(Sources(args=args)).args == {"optim": "adafactor", "bf16": True}


@pytest.mark.parametrize("content", [b"just prose", b"", b"don't", b"\xff\xfe", b"- a\n- b\n"])
def test_what_holds_no_arguments(content: bytes, tmp_path: Path) -> None:
    (args := tmp_path / "args").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_given(Sources(args=args))
    assert "Accelerate YAML" not in str(caught.value)
    assert "--args FILE, which holds" in caught.value.fix


@pytest.mark.parametrize("flag", ["--multi_gpu", "--use_deepspeed", "--tpu"])
def test_a_flag_without_a_value_does_not_take_the_script(flag: str, file: Path) -> None:
    line = f"accelerate launch --config_file {file} {flag} my_train.py --bf16"
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(shlex.split(line)[2:]))
    assert (args.training_script, args.use_fsdp) == ("my_train.py", False)
    assert checked(file, line)["AF409"] == "error"
    assert "AF409" not in checked(file, line.replace(f" {flag}", ""))
    assert "AF409" not in checked(file, f"accelerate launch --config_file {file} my_train.py {flag}")


def test_a_launch_lines_own_flags_have_an_effect(file: Path) -> None:
    line = f"accelerate launch --config_file {file} --rdzv_backend c10d my_train.py --bf16"
    assert "AF107" not in checked(file, line)
    file.write_text(V2 + "rdzv_backend: c10d\n")
    assert checked(file, "my_train.py --bf16")["AF107"] == "note"


def test_torchrun_with_our_script_that_reads_the_file(file: Path) -> None:
    line = f"torchrun --nproc_per_node 2 train/sft.py --accelerate_config {file} --max_steps 3"
    assert checked(file, line) == {}
    assert checked(file, line.replace("--accelerate_config", "--config")) == {"AF408": "warning"}
    assert checked(file, line.replace("train/sft.py", "mine.py")) == {"AF408": "warning"}


@pytest.mark.parametrize(("precision", "dtype"), [("fp8", "bfloat16"), ("bf16", "bfloat16"), ("'no'", "float32")])
def test_four_bits_are_stored_in_the_dtype_of_the_shards(precision: str, dtype: str, file: Path) -> None:
    """AF612's fix: as Accelerate's plugin chooses it: `set_mixed_precision` has bfloat16 for fp8."""
    file.write_text(V2.replace("'no'", precision))
    assert "AF612" in checked(file, "train.py --load_in_4bit")
    found = linter.lint(file, linter.LintOptions(args=file.with_suffix(".args")))
    assert [row.fix for row in found if row.code == "AF612"] == [f"--bnb_4bit_quant_storage {dtype}"]
    assert "AF612" not in checked(file, f"train.py --load_in_4bit --bnb_4bit_quant_storage {dtype}")


OUR_LINE = "# Launch:\n#   accelerate launch --config_file THIS_FILE train/sft.py --expert_parallel_size 2 "


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--model_name_or_path openai/gpt-oss-20b", "AF517"),
        ("--model_name_or_path Qwen/Qwen3-30B-A3B --use_peft --lora_target_modules q_proj down_proj", "AF519"),
        ("--load_in_4bit", "AF519"),
        ("--eval_strategy steps --load_best_model_at_end --eval_steps 3 --save_steps 5", ""),
    ],
)
def test_the_launch_line_of_a_file_is_read_as_arguments(words: str, code: str, file: Path) -> None:
    """Those that are given, or a script, replace it."""
    line = OUR_LINE + words
    mesh = "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2}\n"
    text = V2 + mesh if code == "AF517" else V2
    written, given = read(file, f"{line}\n{text}"), read(file, text, line.partition("#   ")[2])
    assert replace(written, source="") == replace(given, source="")
    assert not code or code in codes_of(written)
    assert code not in codes_of(read(file, f"{line}\n{text}", "other.py --lr 1"))
    (script := file.with_suffix(".py")).write_text("import torch\n")
    assert read_subject(file, Sources(script=script))[0].args is None
    assert read(file, f"# Launch:\n# it's train/sft.py\n{text}").args is None


@pytest.mark.parametrize(
    ("strategy", "kind", "code"),
    [("full_shard", "FULL_STATE_DICT", "AF304"), ("FULL_SHARD", "LOCAL_STATE_DICT", "AF309")],
)
def test_what_to_fsdp2_leaves_is_found(strategy: str, kind: str, code: str) -> None:
    """Accelerate's own converter passes values through that FSDP2 can't read."""
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    given = yaml.safe_load(V1)
    given["fsdp_config"] |= {"fsdp_sharding_strategy": strategy, "fsdp_state_dict_type": kind}
    assert code in codes_of(subject(yaml.safe_dump(convert_config_to_fsdp2(given))))
