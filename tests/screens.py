"""Draws `accel-fsdp config` on a virtual terminal; `python tests/screens.py` renews the pictures in docs/wizard.md."""

import os
import sys
import time
from pathlib import Path

import pexpect
import pyte

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/wizard.md"
FLAGS = ["--model", "meta-llama/Llama-3.1-8B", "--gpus", "8xH100-80GB", "-o", "fsdp.yaml"]
ENTER = "\r"
COMMAND = "accel-fsdp config " + " ".join(FLAGS)
ASKED = (
    *("What do you train?", "How many machines?", "Which engine?", "Which FSDP?", "Which sharding strategy?"),
    *("How are FSDP units made?", "Which transformer layer class?", "(CPU offload)?", "(activation checkpointing)?"),
    *("How are checkpoints written?", "(RAM-efficient loading)?", "Which precision?", "over all machines)?"),
    "Write fsdp.yaml?",
)
PICTURES = {
    "80 columns: the strategies, and what speaks for the default": (80, 24, "Which sharding strategy?"),
    "40 columns: the review": (40, 36, "Write fsdp.yaml?"),
}
SECONDS, LOST_SECONDS, SILENCE_SECONDS = 60, 15, 0.5


def draw(columns: int, rows: int, until: str, folder: Path) -> str:
    """The screen when the question `until` stands on it; those before are answered with Enter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    words = ["-m", "accel_fsdp", "config", *FLAGS]
    child = pexpect.spawn(
        sys.executable, words, env=environment, cwd=str(folder), encoding="utf-8", dimensions=(rows, columns)
    )
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


def _wait_for(question: str, child: pexpect.spawn, screen: pyte.Screen, stream: pyte.Stream) -> None:
    """Feeds what the program draws until the question is there and nothing more comes."""
    deadline, again = time.monotonic() + SECONDS, time.monotonic() + LOST_SECONDS
    while time.monotonic() < deadline:
        if time.monotonic() > again and question != ASKED[0]:  # on a busy machine a key may fall between two prompts
            child.send(ENTER)
            again = deadline
        try:
            stream.feed(child.read_nonblocking(4096, timeout=SILENCE_SECONDS))
        except pexpect.TIMEOUT:
            if question in " ".join(" ".join(screen.display).split()):
                return
    raise TimeoutError(f"{question} was not asked")


def page(folder: Path) -> str:
    """The whole page."""
    parts = [f"# What the wizard looks like\n\nMade by `python tests/screens.py`, which runs `{COMMAND}`.\n"]
    for title, (columns, rows, until) in PICTURES.items():
        parts.append(f"## {title}\n\n```text\n{draw(columns, rows, until, folder)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as empty:
        PAGE.write_text(page(Path(empty)))
