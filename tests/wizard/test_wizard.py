"""`accel-fsdp config` as a person uses it: in a real terminal, with arrow keys and Ctrl-C."""

import re
from pathlib import Path

import pexpect
import pytest
import screens
from conftest import ROOT, SFT, here

from accel_fsdp.launch import launcher
from accel_fsdp.wizard import QUESTIONS

DOWN, UP, ENTER, CTRL_C, ESCAPE = "\x1b[B", "\x1b[A", "\r", "\x03", "\x1b"
LLAMA = ["--model", "meta-llama/Llama-3.1-8B", "--gpus", "8xH100"]  # nothing is built, and torch not imported
FIELDS = (
    *("model", "method", "gpus", "num_machines", "engine", "strategy", "mixed_precision", "cpu_offload"),
    *("activation_checkpointing", "state_dict_type"),
)
"""The questions for a model outside of the catalogue on a CPU, whose memory nobody predicts."""
ASKED = [question.prompt for field in FIELDS for question in QUESTIONS if question.field == field]


class Terminal:
    """The wizard in a pseudo-terminal."""

    def __init__(self, *args: str, rows: int = 50, columns: int = 200) -> None:
        self.child = screens.spawn(args, columns, rows, ROOT)

    def wait_for(self, text: str) -> None:
        self.child.expect(re.escape(text))

    def answer(self, prompt: str, keys: str = "") -> None:
        """Waits until the question is fully drawn, presses `keys`, then Enter."""
        self.wait_for(prompt)
        self.child.expect("[)]|Description")  # the reason for the default comes last
        self.child.send(keys + ENTER)

    def exit_code(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus)


def test_arrow_keys_write_a_yaml_that_launches(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    terminal = Terminal("-o", str(path), "--fsdp-version", "1")
    terminal.answer(ASKED[0], str(tiny_model))
    terminal.wait_for("2 x LlamaDecoderLayer")
    terminal.answer("What do you train?")
    terminal.answer("Which machine will train?")
    terminal.answer("How many machines?")
    terminal.answer("Which engine?")
    terminal.answer("Which sharding strategy?", DOWN)  # 1 -> 2
    terminal.answer("Which precision?")  # no
    terminal.answer("CPU offload")
    terminal.answer("activation checkpointing", DOWN)  # no -> yes
    terminal.answer("How are checkpoints written?")
    terminal.wait_for(f"Write {path}?")
    terminal.wait_for("Quit, write nothing")
    terminal.child.send(ENTER)
    assert terminal.exit_code() == 0

    environment = launcher.environment(launcher.launcher_args(path, SFT, ()))
    assert environment["FSDP_VERSION"] == "1"
    assert environment["FSDP_SHARDING_STRATEGY"] == "2"
    assert environment["FSDP_ACTIVATION_CHECKPOINTING"] == "true"
    assert environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "LlamaDecoderLayer"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("stop_at", [0, 1, 2, 5, 8, len(ASKED)])  # of each kind of question some
def test_ctrl_c_at_any_question_writes_nothing(stop_at: int, tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    terminal = Terminal("-o", str(path))
    for number, prompt in enumerate(ASKED[:stop_at]):
        terminal.answer(prompt, "openai-community/gpt2" if number == 0 else "")
    terminal.wait_for([*ASKED, "Quit, write nothing"][stop_at])
    terminal.child.send(CTRL_C)
    terminal.wait_for("nothing written")
    assert terminal.exit_code() == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_bad_answer_is_asked_again(tiny_model: Path, tmp_path: Path) -> None:
    terminal = Terminal("-o", str(tmp_path / "made.yaml"), "--preset", "fsdp2")
    terminal.answer(ASKED[0], "/no/such/model")
    terminal.wait_for("does not exist")
    terminal.answer(ASKED[0], " ")
    terminal.wait_for("error: --model is missing")
    terminal.wait_for("fix: --model with a hub id or a folder")
    assert "\\n" not in terminal.child.before  # the three parts of an error have a line each
    terminal.answer(ASKED[0], str(tiny_model))
    terminal.answer("How many tokens per sequence?")
    terminal.answer("Which precision?")
    terminal.wait_for("CPU offload")
    terminal.wait_for("Description")  # the question is drawn, and takes keys
    terminal.child.send(CTRL_C)
    assert terminal.exit_code() == 130


def test_overwriting_needs_a_yes(tmp_path: Path) -> None:
    path = tmp_path / "kept.yaml"
    path.write_text("mine\n")
    refused = here("config", "--yes", *LLAMA, "-o", path)
    assert refused.code == 1
    assert "add --force" in refused.output
    assert path.read_text() == "mine\n"
    assert here("config", "--yes", *LLAMA, "-o", path, "--force").code == 0
    assert "fsdp_version: 2" in path.read_text()


@pytest.mark.parametrize(("engine", "precision"), [("fsdp", "'no'"), ("ddp", "'no'"), ("tpu", "bf16")])
def test_a_cpu_trains_in_float32(engine: str, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    words = ("config", "--yes", *LLAMA[:2], "--gpus", "cpu", "--engine", engine)
    assert here(*words, "-o", path).code == 0
    assert f"mixed_precision: {precision}" in path.read_text()


def yaml_in(folder: Path) -> Path:
    path = folder / "made.yaml"
    assert here("config", "--yes", "--preset", "fsdp2", *LLAMA[:2], "-o", path).code == 0
    return path


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (30, 40)])
def test_escape_goes_back_one_question(rows: int, columns: int, tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    given = [*LLAMA[:2], "--gpus", "cpu", "--num-machines", "1", "--strategy", "1", "--mixed-precision", "no"]
    rest = ["--cpu-offload", "false", "--activation-checkpointing", "false", "--state-dict-type", "FULL_STATE_DICT"]
    terminal = Terminal(*given, *rest, "-o", str(path), rows=rows, columns=columns)
    terminal.answer("What do you train?", DOWN)  # lora
    terminal.wait_for("Which engine?")
    terminal.wait_for("Description")
    terminal.child.send(ESCAPE)
    terminal.wait_for("quantised to 4 bits")  # without the description, which is that of the proposal
    terminal.child.send(UP + ENTER)  # back to full
    terminal.answer("Which engine?")
    terminal.wait_for("Quit, write nothing")
    terminal.child.send(ESCAPE)  # from the review to the last question
    terminal.answer("Which engine?")
    terminal.wait_for("Quit, write nothing")
    terminal.child.send(ENTER)
    assert terminal.exit_code() == 0
    assert "--method full" in path.read_text()


def test_an_answer_is_changed_at_the_review(tmp_path: Path) -> None:
    path = yaml_in(tmp_path)
    terminal = Terminal("--from", str(path))
    terminal.wait_for("Quit, write nothing")
    terminal.child.send(DOWN * 6 + ENTER)  # write, model, method, gpus, machines, length, engine
    terminal.answer("Which engine?", DOWN)  # ddp
    terminal.wait_for("Quit, write nothing")
    terminal.child.send(ENTER)
    terminal.wait_for("+distributed_type: MULTI_GPU")
    terminal.wait_for("Overwrite it?")
    terminal.child.send(ENTER)
    assert terminal.exit_code() == 0
    assert "distributed_type: MULTI_GPU" in path.read_text()
    assert "fsdp_config" not in path.read_text()


def test_an_unknown_preset_is_refused() -> None:
    finished = here("config", "--yes", "--preset", "fsdp3", *LLAMA[:2], "-o", "-")
    assert finished.code == 2
    assert "Did you mean fsdp2?" in finished.output


@pytest.mark.slow
def test_the_pictures_in_the_docs_are_what_is_drawn(tmp_path: Path) -> None:
    assert screens.page(tmp_path) == screens.PAGE.read_text(), "run: python tests/screens.py"


def test_a_stale_variable_columns_breaks_no_word(tmp_path: Path) -> None:
    drawn = screens.draw(40, 36, screens.ASKED[0], tmp_path, COLUMNS="200")
    assert "   lora: small adapter matrices, the\n     base stays frozen\n" in drawn
