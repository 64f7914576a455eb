"""What comes with the weights: no code, nor names of code; nothing that is broken passes for something else."""

import json
import os
import shutil
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from runs import as_loops_save, export, refused
from transformers import AutoModelForCausalLM

MAP = {"auto_map": {"AutoConfig": "x.X"}, "custom_pipelines": {"p": {"impl": "x.P"}}}
SETTINGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json"),
)


@pytest.fixture
def run_folder(tiny_model: Path, tmp_path: Path) -> Path:
    return as_loops_save(tiny_model, tmp_path / "run")


def test_no_code_comes_along(run_folder: Path, tmp_path: Path) -> None:
    for name in SETTINGS:
        path = run_folder / name
        content = json.loads(path.read_text()) if path.exists() else {"size": 3}
        path.write_text(json.dumps({**content, **MAP, "inner": {"deeper": [MAP], "stays": 1}}))
    code = [run_folder / name for name in ("x.py", "vocab.py", "chat_template.py", "additional_chat_templates/y.py")]
    for path in code:
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit")
    (run_folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    export(run_folder, tmp_path / "out")
    for name in SETTINGS:
        content = json.loads((tmp_path / "out" / name).read_text())
        assert "auto_map" not in json.dumps(content)
        assert "custom_pipelines" not in json.dumps(content)
        assert content["inner"] == {"deeper": [{}], "stays": 1}
    assert not list((tmp_path / "out").rglob("*.py"))
    assert (tmp_path / "out" / "additional_chat_templates" / "tool.jinja").exists()
    exact = (run_folder / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == exact


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ['{"a": ', "[]", ""])
def test_settings_that_are_cut_are_not_empty(name: str, text: str, run_folder: Path, tmp_path: Path) -> None:
    (run_folder / name).write_text(text)
    refused(f"{name} is damaged", run_folder)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_names_no_module_to_import(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    assert settings["auto_mapping"]["parent_library"].startswith("transformers.")
    for library, kept in (("transformers.models.llama.modeling_llama", True), ("antigravity", False), (3, False)):
        mapping = {"base_model_class": "LlamaForCausalLM", "parent_library": library}
        path.write_text(json.dumps({**settings, "auto_mapping": mapping}))
        export(tmp_path / "adapter", tmp_path / "out", force=True, verify="load")
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert config["auto_mapping"] == (mapping if kept else None)
    path.write_text(json.dumps({**settings, "megatron_config": {"x": 1}, "megatron_core": "antigravity"}))
    refused("megatron_core: antigravity", tmp_path / "adapter", tmp_path / "megatron", verify="load")


def test_a_project_around_the_checkpoint_stays_at_home(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what training writes there comes from the folder that a checkpoint is in."""
    project, out = tmp_path / "project", tmp_path / "out"
    shutil.copytree(tiny_model, project / "checkpoint-1", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    (project / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
    shutil.copy(tiny_model / "tokenizer.json", project)
    for name in ("README.md", "my_vocab.json", "notes.jinja"):
        (project / name).write_text('{"password": "accel-fsdp"}')
    export(project / "checkpoint-1", out)
    assert not {"README.md", "my_vocab.json", "notes.jinja", "tokenizer.json"} & set(os.listdir(out))
    shutil.copy(tiny_model / "config.json", project)
    capsys.readouterr()
    export(project / "checkpoint-1", out, force=True)
    assert ": tokenizer.json" in " ".join(capsys.readouterr().err.split())
    assert not {"README.md", "my_vocab.json", "notes.jinja"} & set(os.listdir(out))
