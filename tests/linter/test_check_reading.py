"""What `check` reads, by the real command: models and command lines; and that each pain has a rule or a reason."""

import json
import sys
from pathlib import Path

import pytest
import reference_docs
import test_check
import test_check_facts
import test_check_script
import torch
import yaml
from checking import V1, V2, codes_of, subject
from conftest import SFT, accel_fsdp, run
from known_issues import PAINS, UNSEEN
from transformers import AutoConfig

from accel_fsdp.linter import command_words, launcher_of
from accel_fsdp.linter.rules import RULES

IDS = {f"P{number:02}" for number in range(1, 108)}
LEAST_COVERED = 60


def test_every_rule_has_a_golden_pair_and_a_case_that_was_seen() -> None:
    on_file = {*test_check.GOLDEN, *test_check.GOLDEN_WITH_ARGS}
    assert on_file | set(test_check_facts.FACTS) | set(test_check_script.SCRIPTS) == set(RULES)
    assert [code for code, rule in RULES.items() if not set(rule.seen) - IDS] == []


def test_every_pain_has_a_rule_or_a_reason() -> None:
    covered = IDS.intersection(word for rule in RULES.values() for word in rule.seen)
    assert set(PAINS) == IDS
    assert covered | set(UNSEEN) == IDS
    assert len(covered) >= LEAST_COVERED
    assert reference_docs.covered().keys() == IDS


@pytest.fixture
def fsdp2(tmp_path: Path) -> Path:
    path = tmp_path / "fsdp.yaml"
    path.write_text(V2)
    return path


def found(*words: str | Path) -> dict[str, str]:
    """The findings of the real command: code -> what."""
    finished = run([sys.executable, "-m", "accel_fsdp", "check", *words, "--json"])
    return {entry["code"]: entry["what"] for entry in json.loads(finished.output[finished.output.index("[") :])}


def test_model_command(tiny_model: Path, tmp_path: Path, fsdp2: Path) -> None:
    from transformers import AutoModelForCausalLM

    low = tmp_path / "low"
    AutoModelForCausalLM.from_pretrained(tiny_model).to(torch.bfloat16).save_pretrained(low)
    args = tmp_path / "args.yaml"
    args.write_text("learning_rate: 0.1\n")
    assert found(fsdp2, "--model", tiny_model, "--args", args) == {}
    assert set(found(fsdp2, "--model", low, "--args", args)) == {"AF613"}
    settings = json.loads((low / "config.json").read_text())
    (low / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    assert "AF506" in found(fsdp2, "--model", low)


def test_the_model_in_the_arguments_is_read(tmp_path: Path) -> None:
    """gpt-oss has no plan for `tp`: `check` and `launch` say so before a rank starts."""
    AutoConfig.for_model("gpt_oss", num_hidden_layers=2, hidden_size=32).save_pretrained(tmp_path / "model")
    mesh = "parallelism_config: {parallelism_config_dp_shard_size: 1, parallelism_config_tp_size: 2}\n"
    (tmp_path / "tp.yaml").write_text(V2.replace("LlamaDecoderLayer", "GptOssDecoderLayer") + mesh)
    words = ("--model_name_or_path", tmp_path / "model")
    (tmp_path / "args").write_text(f"train/sft.py {' '.join(map(str, words))}")
    checked = accel_fsdp("check", tmp_path / "tp.yaml", "--args", tmp_path / "args")
    launched = accel_fsdp("launch", "--cpu", tmp_path / "tp.yaml", SFT, *words)
    for finished in (checked, launched):
        assert finished.code == 1
        assert "AF517" in finished.output
    bundled = "openai/gpt-oss-20b"
    (tmp_path / "args").write_text(f"train/sft.py --model_name_or_path {bundled}")
    assert "AF517" in accel_fsdp("check", tmp_path / "tp.yaml", "--args", tmp_path / "args").output


def test_facts_of_models() -> None:
    """Experts in lists and fused, parameters kept in float32, declared classes."""
    from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, GPTNeoXConfig, MixtralConfig

    from accel_fsdp.models import expert_classes, kept_in_float32

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
    ("strategy", "kind", "code"),
    [("full_shard", "FULL_STATE_DICT", "AF304"), ("FULL_SHARD", "LOCAL_STATE_DICT", "AF309")],
)
def test_what_to_fsdp2_leaves_is_found(strategy: str, kind: str, code: str) -> None:
    """Accelerate's own converter passes values through that FSDP2 can't read."""
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    given = yaml.safe_load(V1)
    given["fsdp_config"] |= {"fsdp_sharding_strategy": strategy, "fsdp_state_dict_type": kind}
    assert code in codes_of(subject(yaml.safe_dump(convert_config_to_fsdp2(given))))
