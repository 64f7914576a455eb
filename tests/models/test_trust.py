"""Python that comes with a model: no command asks whether to run it, none runs it, and the refusal says what to do."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, warm_python
from transformers import LlamaConfig

from accel_fsdp import models
from accel_fsdp.models import remote_code

READERS = {"from_pretrained", "from_config"}
KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
CODE = """import pathlib
pathlib.Path({trace!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
def generate(model, **options):
    pass
"""
YAML = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
MAPS = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel", "AutoModel": "evil.EvilModel"}
TOKENIZER_MAP = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}


def edit(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **values}))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The file that the planted Python writes."""
    return tmp_path / "trace.txt"


@pytest.fixture
def planted(tmp_path: Path, trace: Path, tiny_model: Path) -> Path:
    """A model whose config, model, tokenizer, processor and generation come with Python of their own."""
    folder = tmp_path / "planted"
    shutil.copytree(tiny_model, folder)
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CODE.format(trace=str(trace)))
    edit(folder / "config.json", model_type="evil", auto_map=MAPS, architectures=["EvilModel"])
    edit(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=TOKENIZER_MAP)
    for name in ("processor_config.json", "preprocessor_config.json", "generation_config.json"):
        edit(folder / name, auto_map={**TOKENIZER_MAP, "AutoProcessor": "evil.EvilTokenizer"})
    return folder


def run_with_yes(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """A command whose every question is answered with y."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **warm_python()}
    python = sys.executable if words[0] == "export" else env["PYTHON_EXEC"]
    command = [python, "-m", "accel_fsdp", *map(str, words)]
    return subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)


def refused(ended: subprocess.CompletedProcess[str], trace: Path) -> None:
    assert ended.returncode in (1, 2), ended
    assert not trace.exists()
    assert "[y/N]" not in ended.stdout + ended.stderr
    message = " ".join((ended.stdout + ended.stderr).split())
    assert "comes with its own Python code for its config" in message
    assert "train/sft.py --trust_remote_code" in message
    assert "Traceback" not in ended.stderr


def test_commands_that_read_a_model_neither_ask_nor_run_its_code(planted: Path, trace: Path, tmp_path: Path) -> None:
    job, out = tmp_path / "job.yaml", tmp_path / "out.yaml"
    job.write_text(YAML)
    checked = run_with_yes("check", job, "--model", planted, "--json")
    refused(checked, trace)
    assert len(json.loads(checked.stdout)) == 1
    planned = run_with_yes("plan", "--model", planted, "--gpus", "2xA100-80GB", "--json")
    refused(planned, trace)
    assert planned.stdout == ""
    words = ("config", "--yes", "--model", planted, "--gpus", "2xA100-80GB", "-o", out)
    refused(run_with_yes(*words), trace)
    assert not out.exists()
    written = run_with_yes(*words, "--layer-class", "EvilLayer")
    message = " ".join((written.stdout + written.stderr).split())
    assert written.returncode == 0, message
    assert message.count("going on with the given layer class, unchecked") == 1
    assert message.count("--trust_remote_code") == 1
    assert not trace.exists()


@pytest.mark.slow
def test_an_export_neither_asks_nor_runs_code(planted: Path, trace: Path, tmp_path: Path) -> None:
    refused(run_with_yes("export", planted, tmp_path / "out"), trace)
    assert not (tmp_path / "out").exists()
    run_with_yes("export", planted, tmp_path / "out", "--verify", "bytes")
    assert not trace.exists()


def test_a_known_model_is_read_without_the_code_beside_it(
    planted: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(planted / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    edit(planted / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert models.read_model(str(planted)).model_type == "llama"
    assert len(models.read_tokenizer(str(planted))) == 509
    assert not trace.exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["AutoTokenizer", "AutoModel", "pipeline", "Trainer", 3])
def test_a_named_architecture_that_is_no_model_is_never_called(name: Any, planted: Path, trace: Path) -> None:
    from accel_fsdp.exporter import transformers_probe

    edit(planted / "config.json", model_type="llama", architectures=[name])
    assert type(transformers_probe.build(planted)).__name__ == "LlamaForCausalLM"
    assert not trace.exists()


def test_code_in_a_nested_config_is_not_run(planted: Path, trace: Path) -> None:
    inner = json.loads((planted / "config.json").read_text())
    (planted / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": inner, "auto_map": MAPS}))
    with pytest.raises(remote_code.UserError):
        models.read_model(str(planted))
    assert not trace.exists()


@pytest.mark.parametrize("key", [*KERNEL_KEYS, "a", "renamed"])
def test_a_config_cannot_name_a_repository_of_kernels(key: str, planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor rename the setting, by itself or by its class: what counts is the config as it was built."""
    names = {"a": "_attn_implementation"}
    if key == "renamed":
        monkeypatch.setattr(LlamaConfig, "attribute_map", names)
    edit(planted / "config.json", model_type="llama", **({"attribute_map": names} if key == "a" else {}))
    edit(planted / "config.json", **{"a" if key == "renamed" else key: "some/kernel"})
    with pytest.raises(remote_code.NeedsCode, match="names a repository of code"):
        models.read_config(str(planted))


@pytest.mark.parametrize("key", KERNEL_KEYS)
def test_a_nested_config_cannot_either(key: str, planted: Path) -> None:
    """transformers itself drops what the outer config doesn't say."""
    config = {"model_type": "llava", "text_config": {"model_type": "llama", key: "some/kernel"}}
    (planted / "config.json").write_text(json.dumps(config))
    try:
        text = models.read_config(str(planted)).text_config
    except remote_code.NeedsCode:
        return
    assert (text._attn_implementation, text._experts_implementation) == (None, None)


def test_flash_attention_is_not_fetched_to_look_at_a_model(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package isn't installed here, and transformers would take the kernel from the hub."""
    from accel_fsdp.exporter import transformers_probe

    fetched: list[Any] = []
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda *_: True)
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", lambda *given, **_: fetched.append(given))
    edit(planted / "config.json", model_type="llama", _attn_implementation="flash_attention_2")
    transformers_probe.build(planted)
    models.read_model(str(planted))
    assert not fetched


def test_the_training_script_runs_code_only_when_told_so(
    planted: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_fsdp.training import ModelArguments, load_model

    with pytest.raises(remote_code.NeedsCode, match="for its config"):
        load_model.load_tokenizer(ModelArguments(str(planted)))
    edit(planted / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(remote_code.NeedsCode, match="for its tokenizer"):
        load_model.load_tokenizer(ModelArguments(str(planted)))
    assert not trace.exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    arguments = ModelArguments(str(planted), trust_remote_code=True)
    edit(planted / "config.json", model_type="evil", architectures=["EvilModel"])
    tokenizer = load_model.load_tokenizer(arguments)
    assert type(tokenizer).__name__ == "EvilTokenizer"
    assert trace.exists()
    assert type(load_model.load_model(arguments, tokenizer)).__name__ == "EvilModel"


def test_every_reader_of_a_model_says_whether_code_may_run() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in (*ROOT.glob("accel_fsdp/**/*.py"), *ROOT.glob("train/*.py"), *ROOT.glob("benchmarks/*.py"))
        for call in readers(path)
        if "trust_remote_code" not in {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []


def readers(path: Path) -> Iterator[ast.Call]:
    """The calls in a file that make transformers read a model, its config or its tokenizer."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if owner.startswith("Auto") or not owner[:1].isupper():  # a class that is named runs its own code
                yield node
