"""Builds the pages of docs/ as a site beside the planner.

MkDocs with the theme Material makes it, and refuses a link or an anchor that leads nowhere. The pages are copied first:
what they link to outside of docs/ comes along, and links are changed to it. GitHub shows the originals. The pages of
rules, keys and known problems are made here, from the tables in the code.
"""

import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path, PurePosixPath

from mkdocs.commands.build import build
from mkdocs.config import load_config

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.append(str(ROOT / "tests"))  # reference_docs
FIRST = "README.md"
LAST = ("benchmarks/RESULTS.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages outside of docs/, before and after those of docs/index.md."""
NEEDLESS = ("404.html", "sitemap.xml", "sitemap.xml.gz")
"""What MkDocs writes with addresses that hold only at the top of a host."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def build_pages(folder: Path) -> None:
    """Writes the pages into a folder, which is emptied.

    Raises:
        mkdocs.exceptions.Abort: a link or an anchor leads nowhere, or a page is missing in docs/index.md.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # what MkDocs refuses
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [FIRST, "docs/index.md", *dict.fromkeys(f"docs/{name}" for name in LINK.findall(index)), *LAST]
    from reference_docs import site_pages

    with tempfile.TemporaryDirectory() as place:
        copies = Path(place)
        for name, text in (made := site_pages()).items():
            (copies / name).write_text(text, encoding="utf-8")
        for path in {*pages, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").iterdir())}:
            _copy(path, copies)
        navigation = [{"Overview": _place(FIRST)}, *map(_place, pages[1:]), *made]
        config = load_config(str(HERE / "mkdocs.yml"), docs_dir=place, site_dir=str(folder.resolve()), nav=navigation)
        build(config)
    for name in NEEDLESS:
        (folder / name).unlink()
    shutil.rmtree(folder / "assets" / "javascripts" / "lunr")  # languages that no page has


def _place(path: str) -> str:
    """Where the copy of a file of the repository is, from the top of the pages; of a folder, its README or a list."""
    if (ROOT / path).is_dir():
        path = f"{path}/README.md" if (ROOT / path / "README.md").exists() else f"{path}/index.md"
    parts = [part.lstrip(".") for part in PurePosixPath(path.removeprefix("docs/")).parts]
    return "/".join(parts).replace("README.md", "overview.md")  # MkDocs takes README.md for another index.md


def _copy(path: str, copies: Path) -> None:
    """Copies a file and what it links to; a folder becomes a list of its files."""
    source, copy = ROOT / path, copies / _place(path)
    if (source / "README.md").exists():
        path, source = f"{path}/README.md", source / "README.md"
    if copy.exists():
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        text = f"# {source.name}\n\n" + "".join(f"- [{file.name}]({file.name})\n" for file in sorted(source.iterdir()))
    elif source.suffix == ".md":
        text = source.read_text(encoding="utf-8")
    else:
        shutil.copy(source, copy)
        return
    folder = path if source.is_dir() else PurePosixPath(path).parent
    targets = {link: os.path.normpath(f"{folder}/{link}") for link in LINK.findall(text)}
    start = PurePosixPath(_place(path)).parent
    copy.write_text(LINK.sub(lambda link: os.path.relpath(_place(targets[link[1]]), start), text), encoding="utf-8")
    for target in targets.values():
        if (ROOT / target).exists():  # MkDocs reports one that doesn't
            _copy(target, copies)
