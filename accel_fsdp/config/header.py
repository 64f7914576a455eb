"""The comment at the top of a YAML that was made here: what it is, the command that made it, how to launch it."""

import shlex

COMMAND = "accel-fsdp config --yes"
HEADER = "# Made by accel-fsdp"
"""How a comment of this tool begins."""
MADE_HERE = f"#   {COMMAND}"
LAUNCH = "# Launch:"
THIS_FILE = "THIS_FILE"
"""How the launch command calls the file that it stands in."""


def with_header(text: str, lines: list[str]) -> str:
    """Replaces the header of a file that was made here; another file keeps its own first lines."""
    old = text.splitlines(keepends=True)
    found = _made_here(old)
    if found is None:
        return text
    says_launch = old[found + 1 : found + 2] == [f"{LAUNCH}\n"]
    end = found + 3 if says_launch else found + 1
    return "".join([*old[: max(found - 2, 0)], *(line + "\n" for line in lines), *old[end:]])


def launch_words(text: str) -> list[str]:
    """The words of the launch command in our own header; none where it has no such line."""
    lines = text.splitlines()
    at = lines.index(LAUNCH) + 1 if LAUNCH in lines else len(lines)
    return shlex.split(lines[at].removeprefix("#")) if at < len(lines) else []


def retitle(text: str, title: str) -> str:
    """Replaces the first line of our own header, which says what the file is; another file stays as it is."""
    old = text.splitlines(keepends=True)
    found = _made_here(old)
    if found is None or found < 2:
        return text
    return "".join([*old[: found - 2], f"# {title}\n", *old[found - 1 :]])


def _made_here(lines: list[str]) -> int | None:
    return next((number for number, line in enumerate(lines) if line.startswith(MADE_HERE)), None)
