"""The pages of docs/ as a site: every link and anchor leads somewhere, and no page loads anything from another host."""

import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT

if not find_spec("material"):
    pytest.skip("the pages need mkdocs-material", allow_module_level=True)

LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
"""The tags and attributes that make a browser load something without a click."""


class Links(HTMLParser):
    """Collects the ids of a page, what it links to, and what it loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.loads: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self.targets += [given[name] for name in ("href", "src", "data") if name in given]
        self.loads += [given[LOADS[tag]]] if LOADS.get(tag) in given else []

    handle_startendtag = handle_starttag


@cache
def links_of(page: Path) -> Links:
    return Links(page)


def built_by(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'web'}"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages in `docs`, and a page in the place of the planner."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text("the planner")
    ran = built_by(f"import pages; from pathlib import Path; pages.build_pages(Path({str(folder / 'docs')!r}))")
    assert ran.returncode == 0, ran.stderr
    return folder


def test_each_link_and_anchor_leads_somewhere(site: Path) -> None:
    checked = 0
    for page in site.rglob("*.html"):
        for target in links_of(page).targets:
            address = urlsplit(target)
            if address.scheme or address.netloc:
                assert address.scheme in ("https", "http", "data", "mailto"), (page, target)
                continue
            file = (page.parent / unquote(address.path)).resolve() if address.path else page
            assert file.is_file(), f"{page.relative_to(site)}: {target}"
            assert file.is_relative_to(site.resolve())
            if address.fragment and file.suffix == ".html":
                checked += 1
                assert unquote(address.fragment) in links_of(file).ids, f"{page.relative_to(site)}: {target}"
    assert checked > 100


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list((site / "docs").rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        assert [load for load in links_of(page).loads if urlsplit(load).netloc] == []
        assert "Content-Security-Policy" in page.read_text(encoding="utf-8")
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8"))


def test_each_page_of_docs_is_in_the_navigation_and_leads_to_the_planner(site: Path) -> None:
    for source in (ROOT / "docs").glob("*.md"):
        targets = {target.removeprefix("./") for target in links_of(site / "docs" / f"{source.stem}.html").targets}
        assert {"../index.html", "overview.html", "plan.html", "benchmarks/RESULTS.html"} <= targets
