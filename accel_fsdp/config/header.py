"""The comment at the top of a generated YAML: its title, the command that made it, the launch command."""

import contextlib
import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from accel_fsdp import __version__
from accel_fsdp.launch_environment import EXPANDABLE_SEGMENTS

COMMAND = "accel-fsdp config --yes"
HEADER = "# Made by accel-fsdp"
"""The beginning of this tool's comments."""
MADE_HERE = f"#   {COMMAND}"
LAUNCH = "# Launch:"
TITLE = re.compile(r"# (.+ training, .+|Migrated from .+)\.$", re.MULTILINE)
"""The first line of this tool's comments."""
THIS_FILE = "THIS_FILE"
"""The name of the file itself in its launch command."""
SCRIPT = "train/sft.py"
EXAMPLE = ("--dataset_name", "train/data/fsdp_chat", "--output_dir", "runs/first")
"""The example data and output folder of a launch line, to be replaced by the user."""
PACKAGE = Path(__file__).parents[1]
IN_A_CLONE = {SCRIPT: "accel-fsdp init . copies it", EXAMPLE[1]: "name data of your own"}
"""The files of a launch line that only a clone of the repository has, each with what to do elsewhere."""


def shipped() -> Path:
    """The folder of `train/` and `accelerate_configs/`: inside an installed package, beside it in a clone."""
    return PACKAGE / "project" if (PACKAGE / "project").is_dir() else PACKAGE.parent


def comment(title: str, made_by: str, launch: str) -> list[str]:
    """Comment lines: the title of the file, the command that made it, and the command that uses it.

    The command that made it is on a separate line, by which `with_header` recognises the header.
    """
    is_command = made_by.startswith(COMMAND)
    origin = [f"{HEADER} {__version__}:", f"#   {made_by}"] if is_command else [f"{HEADER} {__version__}: {made_by}"]
    return [f"# {title}", *origin, LAUNCH, f"#   {launch}"]


def launch_line(path: str, script: Iterable[str], *, place: str = "", expandable: bool = True) -> str:
    """The command that runs a script, with its arguments, on the YAML at `path`.

    `place` is "rank" if the user gives each machine's rank, and "scheduler" if a scheduler gives rank and address;
    `expandable` sets PyTorch's allocator to expandable segments.
    """
    rank = ("--machine_rank", "0") if place == "rank" else ()
    words = ["accel-fsdp", "launch", path] if place == "scheduler" else ["accelerate", "launch", "--config_file", path]
    variables = EXPANDABLE_SEGMENTS if expandable else {}
    return shlex.join([*(f"{name}={value}" for name, value in variables.items()), *words, *rank, *script])


def example_run(model: str, arguments: Iterable[str]) -> list[str]:
    """The command that trains `model` on the example data with our script, and its extra arguments."""
    return [SCRIPT, "--model_name_or_path", model, *EXAMPLE, *arguments]


def with_header(text: str, lines: list[str]) -> str:
    """Replaces the header of a file that this package made; another file keeps its first lines."""
    old = text.splitlines(keepends=True)
    place = next((number for number, line in enumerate(old) if line.startswith(MADE_HERE)), None)
    if place is None:
        return text
    first = place - 2 if place > 1 and TITLE.match(old[place - 2]) else max(place - 1, 0)
    says_launch = old[place + 1 : place + 2] == [f"{LAUNCH}\n"]
    end = place + 3 if says_launch else place + 1
    return "".join([*old[:first], *(line + "\n" for line in lines), *old[end:]])


def sft_line(text: str) -> str:
    """The launch command in our header; empty without one, or if it doesn't run train/sft.py."""
    words = launch_words(text)
    return shlex.join(words) if SCRIPT in words else ""


def script_arguments(text: str) -> tuple[str, ...]:
    """The script's arguments in the launch command of our header; empty without one."""
    words = launch_words(text)
    return tuple(words[words.index(SCRIPT) + 1 :] if SCRIPT in words else ())


def missing_here(words: Sequence[str]) -> str:
    """A note on the files of a launch command of our headers that this folder lacks; empty if it has them."""
    missing = [name for name in IN_A_CLONE if name in words and not Path(name).exists()]
    if not missing:
        return ""
    return "note: " + "; ".join(f"{name} is not in this folder: {IN_A_CLONE[name]}" for name in missing)


def launch_words(text: str) -> list[str]:
    """The launch command in our header; empty without one."""
    lines = text.splitlines()
    first = lines.index(LAUNCH) + 1 if LAUNCH in lines else len(lines)
    return _words_in(lines[first]) if first < len(lines) else []


def made_with(text: str) -> dict[str, str]:
    """The flags and values of the command in our header; empty without one."""
    line = next((line for line in text.splitlines() if line.startswith(MADE_HERE)), "#")
    return dict(itertools.pairwise(_words_in(line)))


def _words_in(line: str) -> list[str]:
    """The words of a comment; none if a person has left a quote open in it."""
    with contextlib.suppress(ValueError):
        return shlex.split(line.removeprefix("#"))
    return []


def retitle(text: str, title: str) -> str:
    """Replaces the title in our header; other files stay unchanged."""
    return re.sub(rf"^{TITLE.pattern}(?=\n{HEADER})", lambda _: f"# {title}", text, count=1, flags=re.MULTILINE)
