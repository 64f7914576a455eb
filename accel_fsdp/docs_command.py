"""The command `accel-fsdp docs`: the pages of docs/ in the terminal, those of the installed version."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from accel_fsdp import console, shipped
from accel_fsdp.errors import UsageError, did_you_mean
from accel_fsdp.flag_words import arg


@dataclass(frozen=True)
class DocsCommand:
    topic: Annotated[
        tyro.conf.Positional[str], arg("A page, such as check; without it, the topics.", "TOPIC", hint="(optional)")
    ] = ""


def show(options: DocsCommand) -> int:
    """Prints a page, or the topics; raises UsageError for an unknown one."""
    pages = topics()
    name = options.topic.removesuffix(".md")
    if not name:
        titles = [[topic, title_of(page)] for topic, page in pages.items()]
        console.show_table(["topic", "page"], titles, [""] * len(titles), whole=True)
    elif name in pages:
        console.show_markdown(pages[name].read_text(encoding="utf-8"))
    else:
        raise UsageError(
            f"there is no page about {name}.{did_you_mean(name, pages)}",
            why="nothing was printed",
            fix="accel-fsdp docs lists the topics",
        )
    return 0


def topics() -> dict[str, Path]:
    return {path.stem: path for path in sorted((shipped.source() / "docs").glob("*.md"))}


def title_of(page: Path) -> str:
    """The first line, which is the heading, without Markdown."""
    with page.open(encoding="utf-8") as file:
        return file.readline().strip("# \n").replace("`", "")
