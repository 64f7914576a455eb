"""Draws `accel-fsdp config` on a virtual terminal; `python tests/screens.py` renews the pictures in docs/wizard.md."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pexpect
import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/wizard.md"
FLAGS = ["--model", "meta-llama/Llama-3.1-8B", "--gpus", "8xH100-80GB", "-o", "fsdp.yaml"]
ENTER = "\r"
COMMAND = "accel-fsdp config " + " ".join(FLAGS)
ASKED = (
    *("What do you train?", "How many machines?", "How many tokens per sequence?", "Which engine?"),
    *("Which sharding strategy?", "Which precision?", "(CPU offload)?", "(activation checkpointing)?"),
    *("(micro-batch)?", "How are checkpoints written?", "Write fsdp.yaml?"),
)
PICTURES = {
    "80 columns: the strategies, and the memory that each needs": (80, 24, "Which sharding strategy?"),
    "40 columns: the review": (40, 36, "Write fsdp.yaml?"),
}
SECONDS, SILENCE_SECONDS = 60, 0.5


def spawn(args: Sequence[str], columns: int, rows: int, folder: Path, **environment: str) -> pexpect.spawn:
    """The wizard in a pseudo-terminal of that size."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}  # pytest's own
    fixed = {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    return pexpect.spawn(
        sys.executable,
        ["-m", "accel_fsdp", "config", *args],
        env=inherited | fixed | environment,
        cwd=str(folder),
        encoding="utf-8",
        dimensions=(rows, columns),
        timeout=SECONDS,
    )


def draw(columns: int, rows: int, until: str, folder: Path, **environment: str) -> str:
    """The screen when the question `until` stands on it; those before are answered with Enter."""
    child = spawn(FLAGS, columns, rows, folder, **environment)
    pyte = pytest.importorskip("pyte")
    screen = pyte.Screen(columns, rows)
    stream = pyte.Stream(screen)
    try:
        for question in ASKED[: ASKED.index(until) + 1]:
            if question != ASKED[0]:
                child.send(ENTER)
            _wait_for(question, child, screen, stream)
    finally:
        child.close(force=True)
    return "\n".join(line.rstrip() for line in screen.display).strip("\n")


def _wait_for(question: str, child: pexpect.spawn, screen: Any, stream: Any) -> None:
    """Feeds what the program draws until the question is there and nothing more comes."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            stream.feed(child.read_nonblocking(4096, timeout=SILENCE_SECONDS))
        except pexpect.TIMEOUT:
            if _squeezed(question) in _squeezed("".join(screen.display)):
                return
    raise TimeoutError(f"{question} was not asked; the screen shows:\n" + "\n".join(screen.display))


def _squeezed(text: str) -> str:
    """Without blanks: a narrow screen breaks lines within words."""
    return "".join(text.split())


def page(folder: Path) -> str:
    """The whole page."""
    parts = [f"# What the wizard looks like\n\n`python tests/screens.py` draws these screens of\n`{COMMAND}`.\n"]
    for title, (columns, rows, until) in PICTURES.items():
        parts.append(f"## {title}\n\n```text\n{draw(columns, rows, until, folder)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as empty:
        PAGE.write_text(page(Path(empty)))
