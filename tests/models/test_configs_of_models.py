"""Configs that no model can have, and libraries that are missing: one message from every command, never a traceback."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SFT, here

from accel_fsdp import models
from accel_fsdp.errors import UserError
from accel_fsdp.job import Recipe
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
    ({"hidden_size": "big"}, "Field 'hidden_size' expected int, got str"),
    ({"hidden_size": -4}, "negative dimension -4"),
    ({"hidden_size": 4096, "num_attention_heads": 3, "num_key_value_heads": 3}, "4096"),
    ({"model_type": "lama"}, "has model type `lama` but Transformers does not recognize this architecture"),
    ({"model_type": ["llama"]}, "can't use the config of .*model: unhashable"),
    ({"dtype": "float3"}, "float3"),
    ({"quantization_config": [4]}, "can't use the config of .*model: 'list' object"),
    ({"configuration_files": ["config.5.0.0.json"]}, "config.5.0.0.json"),
]


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


@pytest.mark.parametrize(
    "words",
    [
        ["check", YAML, "--model", "{}"],
        ["plan", "--model", "{}", "--gpus", "2xA100-80GB"],
        ["config", "--yes", "--model", "{}", "--gpus", "2xA100-80GB", "-o", "{}/out.yaml"],
    ],
)
def test_every_command_says_it(words: list[str], tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {**LLAMA, "hidden_size": "big"})
    refused = here(*(str(word).replace("{}", str(folder)) for word in words))
    assert refused.code in (1, 2)
    assert "Field 'hidden_size' expected int, got str" in refused.text
    assert not (folder / "out.yaml").exists()


@pytest.mark.parametrize("library", ["torch", "transformers", "accelerate"])
def test_a_library_that_is_missing_is_named_with_the_command_that_brings_it(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "model", LLAMA)
    launches = library == "accelerate"
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch" if launches else library, None)
    reads = ("check", YAML, "--model", folder)
    refused = here(*(("launch", "--dry-run", YAML, SFT) if launches else reads))
    assert refused.code in (1, 2), refused.output
    assert f"needs {library}, which isn't installed" in refused.text
    assert refused.text.endswith(": pip install 'accel-fsdp[train]'")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", b'{"tokenizer_class": [1]}'),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"\xff\xfe\x00"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": [[]]}}'),
        ("special_tokens_map.json", b'["eos_token"]'),
        ("config.json", b'{"vocab_size": "big", "model_type": "llama"}'),
    ],
)
def test_a_damaged_tokenizer_is_one_message(file: str, content: bytes, tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / file).write_bytes(content)
    with pytest.raises(UserError):
        models.read_tokenizer(str(folder))


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
