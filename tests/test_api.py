"""The commands as functions: the examples of docs/api.md run, and say what the commands say."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, accel_fsdp

import accel_fsdp as api

BLOCKS = re.findall(r"```(python|text)\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), flags=re.DOTALL)
MODEL = {"model": "meta-llama/Llama-3.1-8B", "gpus": "8xH100-80GB"}


def test_the_examples_run_and_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "model")
    names: dict[str, object] = {}
    printed = ""
    for kind, text in BLOCKS:
        if kind == "text":
            assert printed == text
            continue
        exec(text.replace('"runs/first"', '"model"'), names)
        printed = capsys.readouterr().out


def test_they_say_what_the_commands_say(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    words = [word for name, value in MODEL.items() for word in (f"--{name}", value)]
    assert accel_fsdp("config", "--yes", *words, "-o", str(path)).code == 0
    assert api.to_yaml(MODEL) == path.read_text()
    assert api.to_yaml({**MODEL, "nodes": 1}) == path.read_text()
    assert " --max_length 4096\n" in api.to_yaml({**MODEL, "seq_len": 4096})
    planned = accel_fsdp("plan", *words, "--seq-len", "4096", "--json").output
    assert json.loads(json.dumps(api.plan(**MODEL, seq_len=4096).as_json())) == json.loads(planned)
    migrated = accel_fsdp("migrate", str(path), "--to", "fsdp1", "--json", "--dry-run").output
    assert api.migrate(path, "fsdp1").text == json.loads(migrated[migrated.index("{") :])["yaml"]
    assert api.check(path) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: api.plan("gpt2", "8xH100", sequence_length=1), "--sequence-length is not a flag of accel-fsdp plan."),
        (lambda: api.to_yaml({"modle": "gpt2"}), "there is no question modle. Did you mean model?"),
        (lambda: api.plan("gpt2", "8xH100", html="plan.html"), "html has no effect"),
        (lambda: api.plan("gpt2", "8xH100", checkpointing="ful"), "Did you mean full?"),
        (lambda: api.plan("gpt2", "8xH100", seq_len="many"), "--seq-len: many is not a whole number"),
        (lambda: api.migrate("nowhere.yaml", "fsdp9"), "Did you mean fsdp2?"),  # type: ignore[arg-type]
        (lambda: api.export("nowhere", "out", verify="bites"), "Did you mean bytes?"),  # type: ignore[arg-type]
        (lambda: api.export("nowhere", "out", dtype="bf16"), "--dtype bf16 is not a dtype of an export"),  # type: ignore[arg-type]
        (lambda: api.to_yaml({**MODEL, "strategy": 9}), "error: --strategy 9 can't be used."),
        (lambda: api.to_yaml({**MODEL, "engine": "fsdp", "zero_stage": 3}), "fix: leave out --zero-stage"),
        (lambda: api.check("nowhere.yaml"), "nowhere.yaml"),
        (lambda: api.export("nowhere", "out"), "nowhere"),
    ],
)
def test_what_is_wrong_is_one_error(call: object, message: str) -> None:
    with pytest.raises(api.UserError, match=re.escape(message)):
        call()  # type: ignore[operator]


def test_a_script_exports_and_runs_once(tiny_model: Path, tmp_path: Path) -> None:
    """Transformers is asked in a process of its own, which must not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(f"import accel_fsdp\nprint('once')\naccel_fsdp.export({str(tiny_model)!r}, 'out')\n")
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "once\n"
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, accel_fsdp; print([m for m in sys.modules if m.startswith(('accel_fsdp.', 'rich', 'torch'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
