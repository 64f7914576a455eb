"""Commands run in a folder whose files are named like modules: no file there is imported, by no process of theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Finished, ended, start
from safetensors.torch import load_file

CONFIGS = ROOT / "accelerate_configs"
LIBRARIES = ("accel_fsdp", "torch", "transformers", "accelerate", "datasets", "numpy", "yaml", "safetensors")
PYTHONS = ("re", "json", "queue", "select", "socket", "struct", "random", "logging", "signal", "tempfile", "typing")
PLANTED = "open({proof!r}, 'a').write(__name__ + ' ')\nraise SystemExit('a planted module runs')\n"
CONSOLE = "import sys\nfrom accel_fsdp.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
"""As pip writes it."""
SCRIPT = """
import helper
import sys
from pathlib import Path
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
batch = torch.arange(24).reshape(2, 12) + accelerator.process_index
accelerator.backward(model(input_ids=batch, labels=batch).loss)
optimizer.step()
print(helper.DONE)
"""
COMMANDS = {
    "config": "config --yes --model {model} -o {out}/made.yaml",
    "plan": "plan --model {model} --gpus 2xH100-80GB",
    "check": "check {yaml} --model {model} --script {script}",
    "migrate": "migrate {yaml} --to fsdp1 -o {out}/fsdp1.yaml",
    "rehearse": "rehearse {yaml} --processes 2 --model {model}",
    "rehearse a script": "rehearse {yaml} --processes 2 --script {script} -- {model}",
    "launch": "launch --cpu {yaml} {script} {model}",
    "launch --dry-run": "launch --cpu --dry-run {yaml} {script} {model}",
    "script": "script slurm {yaml} {script} {model} -o {out}/job.sbatch",
    "export": "export {model} {out}/exported",
    "init": "init {out}/project",
    "doctor": "doctor --folder {out}",
}


@pytest.fixture
def console(tmp_path: Path) -> list[str]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "accel-fsdp").write_text(CONSOLE)
    return [sys.executable, str(tmp_path / "bin" / "accel-fsdp")]


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder of 20 modules, each of which leaves its name in `proof` beside it."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name in (*LIBRARIES, *PYTHONS):
        (folder / f"{name}.py").write_text(PLANTED.format(proof=str(tmp_path / "proof")))
    return folder


def in_folder(folder: Path, words: list[str]) -> Finished:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return ended(start(["env", "-C", str(folder), *words], env), 500)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_planted_module_runs(name: str, planted: Path, console: list[str], tiny_model: Path, tmp_path: Path) -> None:
    """The user's script still finds the module beside it."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "helper.py").write_text("DONE = 'a step was taken'\n")
    (project / "train.py").write_text(SCRIPT)
    text = (CONFIGS / "fsdp2.yaml").read_text().replace("num_processes: 8", "num_processes: 2")
    (tmp_path / "fsdp.yaml").write_text(text)
    places = {"yaml": tmp_path / "fsdp.yaml", "script": project / "train.py", "out": tmp_path, "model": tiny_model}
    finished = in_folder(planted, [*console, *COMMANDS[name].format(**places).split()])
    assert not (tmp_path / "proof").exists(), (tmp_path / "proof").read_text() + finished.output
    assert finished.code == 0 or name == "check", finished.output
    if name == "launch":
        assert finished.output.count("a step was taken") == 2
    if name == "export":
        assert load_file(tmp_path / "exported" / "model.safetensors")


def test_python_m_imports_nothing_of_the_current_folder(planted: Path, tmp_path: Path) -> None:
    """But what bears the package's own name."""
    (planted / "accel_fsdp.py").unlink()
    finished = in_folder(planted, [sys.executable, "-m", "accel_fsdp", "check", str(CONFIGS / "fsdp2.yaml")])
    assert not (tmp_path / "proof").exists(), (tmp_path / "proof").read_text() + finished.output
    assert finished.code == 0, finished.output


def test_every_child_is_started_in_one_way() -> None:
    """No module names Python's interpreter but the one that starts it, and where a user's script takes its place."""
    finished = subprocess.run(["grep", "-rlF", "sys.executable", ROOT / "accel_fsdp"], capture_output=True, text=True)
    names = {Path(line).relative_to(ROOT / "accel_fsdp").as_posix() for line in finished.stdout.splitlines()}
    assert {name for name in names if name.endswith(".py")} == {"launch/python_child.py"}
