"""Configs that no model can have, and libraries that are missing: one message from every command, never a traceback."""

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp import cli, models
from accel_fsdp.errors import UserError
from accel_fsdp.job import Recipe
from accel_fsdp.models import config_json
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.training.data import chat_template

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
YAML = ROOT / "accelerate_configs" / "fsdp2.yaml"
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "big"}, 'hidden_size is "big": it must be a whole number'),
    ({"hidden_size": -4}, "hidden_size is -4: it must be at least 1"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": [64]}, "hidden_size"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0: it must be a whole number"),
    ({"hidden_size": 4096, "num_attention_heads": 3, "num_key_value_heads": 3}, "4096"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4, num_key_value_heads 3"),
    *(
        (
            {"model_type": kind, count: 2, used: 4},
            f"{count} is 2, {used} 4: a token can't go to more experts than there are",
        )
        for kind, count, used in (
            ("mixtral", "num_local_experts", "num_experts_per_tok"),
            ("qwen3_moe", "num_experts", "num_experts_per_tok"),
            ("deepseek_v3", "n_routed_experts", "num_experts_per_tok"),
            ("ernie4_5_moe", "moe_num_experts", "moe_k"),
        )
    ),
    ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000: no model has more than 2,000"),
    ({"num_hidden_layers": True}, "num_hidden_layers is true: it must be a whole number"),
    ({"vocab_size": 10**12}, "vocab_size is 1000000000000: no model has more than 1,000,000,000"),
    ({"model_type": "lama"}, "is of model_type lama, which transformers .* doesn't know. Did you mean llama"),
    ({"model_type": ["llama"]}, "model_type is .*: it must be a name"),
    ({"dtype": "float3"}, "float3"),
    ({"quantization_config": [4]}, "quantization_config is .4.: it must be a mapping"),
    ({"configuration_files": ["config.5.0.0.json"]}, "names other files"),
    ({"model_type": "llava", "text_config": {**LLAMA, "hidden_size": -1}}, "text_config.hidden_size is -1"),
]
TYPES = ("llama", "gpt2", "opt", "qwen3_moe", "llava", "gpt_oss", "t5", "bert", "deepseek_v3", "mamba")


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("change", "message"), IMPOSSIBLE, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_a_config_that_no_model_can_have_is_one_message(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {**LLAMA, **change})
    with pytest.raises(UserError, match=message):
        models.read_model(str(folder))
    with pytest.raises(UserError, match=message):
        by_name.read_shape(str(folder), Recipe("full", "bf16", "float32"))


def test_a_model_of_more_parts_than_any_other_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_json, "MOST_CALLS", 50)
    with pytest.raises(UserError, match="many times the layers and experts"):
        models.read_model(str(write(tmp_path / "model", LLAMA)))


Main = Callable[..., tuple[int, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """The console command in this process: its exit code and what it printed."""

    def run(*words: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["accel-fsdp", *map(str, words)])
        monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), " ".join((printed.out + printed.err).split())

    return run


@pytest.mark.parametrize(
    "words",
    [
        ["check", YAML, "--model", "{}"],
        ["plan", "--model", "{}", "--gpus", "2xA100-80GB"],
        ["config", "--yes", "--model", "{}", "--gpus", "2xA100-80GB", "-o", "{}/out.yaml"],
    ],
)
def test_every_command_says_it(words: list[str], main: Main, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {**LLAMA, "hidden_size": "big"})
    code, output = main(*(str(word).replace("{}", str(folder)) for word in words))
    assert code in (1, 2)
    assert 'hidden_size is "big": it must be a whole number' in output
    assert not (folder / "out.yaml").exists()


def test_the_training_script_says_it(tmp_path: Path) -> None:
    from accel_fsdp.training import ModelArguments, load_model

    with pytest.raises(UserError, match="hidden_size is -4"):
        load_model.load_tokenizer(ModelArguments(str(write(tmp_path / "model", {**LLAMA, "hidden_size": -4}))))


def test_a_believable_config_is_read(tmp_path: Path) -> None:
    assert models.read_model(str(write(tmp_path / "model", LLAMA))).parameters == 139_584


@pytest.mark.parametrize("library", ["torch", "transformers", "accelerate"])
def test_a_library_that_is_missing_is_named_with_the_command_that_brings_it(
    library: str, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "model", LLAMA)
    launches = library == "accelerate"
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch" if launches else library, None)
    reads = ["check", YAML, "--model", folder]
    code, output = main(*(["launch", "--dry-run", YAML, ROOT / "train" / "sft.py"] if launches else reads))
    assert code in (1, 2), output
    assert f"needs {library}, which isn't installed" in output
    assert output.strip().endswith(": pip install 'accel-fsdp[train]'")


def defaults() -> dict[str, dict[str, Any]]:
    """The config of each type, as small as it goes without knowing it."""
    from transformers import AutoConfig

    return {kind: json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False)) for kind in TYPES}


ODD = st.one_of(
    st.sampled_from([None, True, -1, 0, 3, 10**8, 10**12, 10**30, 1e308, "big", "", [], {}, [1, 2], [None], ["x"] * 9]),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=9),
    st.recursive(
        st.none() | st.integers(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)
    ),
)


@pytest.mark.slow
@settings(max_examples=120, derandomize=True)
@given(data=st.data())
def test_whatever_a_config_says_ends_in_a_model_or_one_message(data: Any, tmp_path: Path) -> None:
    content = KINDS[data.draw(st.sampled_from(TYPES))]
    content = json.loads(json.dumps(content))
    for _ in range(data.draw(st.integers(1, 2))):
        part = content
        nested = [key for key, value in content.items() if isinstance(value, dict) and value]
        if nested and data.draw(st.booleans()):
            part = content[data.draw(st.sampled_from(nested))]
        part[data.draw(st.sampled_from(sorted(part)))] = data.draw(ODD)
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(UserError):
        models.read_model(str(write(tmp_path / "model", content)))
    assert time.process_time() - begun < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000


KINDS = defaults()


BROKEN: list[tuple[str, bytes]] = [
    ("tokenizer_config.json", b'{"tokenizer_class": [1]}'),
    ("tokenizer_config.json", b"[" * 100_000),
    ("tokenizer_config.json", b"\xff\xfe\x00"),
    ("tokenizer.json", b"{}"),
    ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": [[]]}}'),
    ("tokenizer.json", b"[" * 100_000),
    ("special_tokens_map.json", b'["eos_token"]'),
    ("config.json", b'{"vocab_size": "big", "model_type": "llama"}'),
]


@pytest.mark.parametrize(("file", "content"), BROKEN)
def test_a_damaged_tokenizer_is_one_message(file: str, content: bytes, tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / file).write_bytes(content)
    with pytest.raises(UserError):
        models.read_tokenizer(str(folder))


def test_a_pipe_among_a_tokenizers_files_is_not_waited_for(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for name in ("tokenizer.json", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match="it is a pipe"):
            models.read_tokenizer(str(folder))
    with pytest.raises(UserError, match="it is a pipe"):
        models.read_config(str(folder))


def test_a_models_files_may_be_links_to_another_disk(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    assert models.read_model(str(folder)).model_type == "llama"
    assert len(models.read_tokenizer(str(folder))) == 509


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch ' ~ messages) }}",
        "{{ messages.append(1) }}",
        "{% for a in range(10**9) %}{% endfor %}",
    ],
)
def test_a_chat_template_stays_in_its_sandbox(template: str, tiny_model: Path) -> None:
    tokenizer = models.read_tokenizer(str(tiny_model))
    tokenizer.chat_template = template
    chat_template.require_template(tokenizer)
    with pytest.raises(UserError, match="the chat template fails"):
        chat_template.marks(tokenizer)
