"""`accel-fsdp config` as a person uses it: in a real terminal, with arrow keys and Ctrl-C."""

import os
import re
import sys
from pathlib import Path

import pexpect
import pytest
from conftest import ROOT, SFT, accel_fsdp, accelerate_launch

from accel_fsdp import jobs
from accel_fsdp.questions import QUESTIONS

DOWN, ENTER, CTRL_C = "\x1b[B", "\r", "\x03"
SECONDS = 40
ASKED = [
    question.prompt
    for question in QUESTIONS
    if question.field not in ("min_num_params", "main_process_ip", "main_process_port")
]


class Terminal:
    """The wizard in a pseudo-terminal, 100 columns wide."""

    def __init__(self, *args: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        words = ["-m", "accel_fsdp", "config", *args]
        self.child = pexpect.spawn(
            sys.executable, words, env=environment, encoding="utf-8", dimensions=(50, 200), timeout=SECONDS
        )

    def wait_for(self, text: str) -> None:
        self.child.expect(re.escape(text))

    def answer(self, prompt: str, keys: str = "") -> None:
        """Waits until the question is fully drawn, presses `keys`, then Enter."""
        self.wait_for(prompt)
        self.child.expect("[)]")  # the reason for the default ends the line
        self.child.send(keys + ENTER)

    def exit_code(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus)


def test_arrow_keys_write_a_yaml_that_launches(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    terminal = Terminal("-o", str(path))
    terminal.answer(ASKED[0], str(tiny_model))
    terminal.wait_for("4 x LlamaDecoderLayer")
    terminal.answer("What do you train?")
    terminal.answer("Which FSDP?", DOWN)  # 2 -> 1
    terminal.answer("Which sharding strategy?", DOWN)  # 1 -> 2
    terminal.answer("How are FSDP units made?")
    terminal.answer("Which transformer layer class?")
    terminal.answer("CPU offload")
    terminal.answer("activation checkpointing", DOWN)  # no -> yes
    terminal.answer("How are checkpoints written?")
    terminal.answer("RAM-efficient loading")
    terminal.answer("Which precision?", DOWN + DOWN)  # bf16 -> no
    terminal.answer("How many machines?")
    terminal.answer("How many processes")
    terminal.wait_for("fsdp_sharding_strategy")
    terminal.wait_for(f"Write {path}?")
    terminal.child.send(ENTER)
    assert terminal.exit_code() == 0

    environment = jobs.environment(jobs.launcher_args(path, SFT, ()))
    assert environment["FSDP_VERSION"] == "1"
    assert environment["FSDP_SHARDING_STRATEGY"] == "2"
    assert environment["FSDP_ACTIVATION_CHECKPOINTING"] == "true"
    assert environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "LlamaDecoderLayer"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"

    words = ["--model_name_or_path", tiny_model, "--dataset_name", text_data, "--output_dir", tmp_path / "run"]
    finished = accelerate_launch(path, SFT, *words, "--max_steps", "1")
    assert finished.code == 0, finished.output
    assert "sharding: FSDP1 SHARD_GRAD_OP: 5 units" in finished.output
    assert "exported and verified" in finished.output


@pytest.mark.parametrize("stop_at", range(len(ASKED) + 1))
def test_ctrl_c_at_any_question_writes_nothing(stop_at: int, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    terminal = Terminal("-o", str(path))
    for number, prompt in enumerate(ASKED[:stop_at]):
        terminal.answer(prompt, str(tiny_model) if number == 0 else "")
    terminal.wait_for([*ASKED, "Write "][stop_at])
    terminal.child.send(CTRL_C)
    terminal.wait_for("nothing written")
    assert terminal.exit_code() == 130
    assert list(tmp_path.iterdir()) == []


def test_a_bad_answer_is_asked_again(tiny_model: Path, tmp_path: Path) -> None:
    terminal = Terminal("-o", str(tmp_path / "made.yaml"), "--method", "full", "--fsdp-version", "2", "--strategy", "1")
    terminal.answer(ASKED[0], "/no/such/model")
    terminal.wait_for("does not exist")
    terminal.answer(ASKED[0], str(tiny_model))
    terminal.answer("How are FSDP units made?")
    terminal.answer("Which transformer layer class?", ",Llama")
    terminal.wait_for("layer class Llama is not in the model")
    terminal.wait_for("Which transformer layer class?")
    terminal.child.send(CTRL_C)
    assert terminal.exit_code() == 130


def test_overwriting_needs_a_yes(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.yaml"
    path.write_text("mine\n")
    refused = accel_fsdp("config", "--yes", "--model", tiny_model, "-o", path)
    assert refused.code == 1
    assert "add --force" in refused.output
    assert path.read_text() == "mine\n"
    assert accel_fsdp("config", "--yes", "--model", tiny_model, "-o", path, "--force").code == 0
    assert "fsdp_version: 2" in path.read_text()


def test_the_command_in_the_header_writes_the_same_bytes(tiny_model: Path, tmp_path: Path) -> None:
    import shlex

    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    flags = ["--fsdp-version", "1", "--strategy", "HYBRID_SHARD", "--wrap-policy", "size_based_wrap"]
    assert accel_fsdp("config", "--yes", "--model", tiny_model, *flags, "-o", first).code == 0
    words = shlex.split(first.read_text().splitlines()[2].removeprefix("#"))
    assert accel_fsdp(*words[1:], "-o", second).code == 0
    assert first.read_bytes() == second.read_bytes()
