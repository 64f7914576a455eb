"""The planner's page in a real Chromium that reaches no other machine: what `make site` builds, as a reader uses it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from conftest import ROOT, Called, here

if lacking := [name for name in ("chromium", "chromedriver", "npm", "node") if not shutil.which(name)]:
    pytest.skip(f"the page needs {', '.join(lacking)}", allow_module_level=True)
if lacking := [name for name in ("material", "selenium") if not find_spec(name)]:
    pytest.skip(f"the page needs {', '.join(lacking)}", allow_module_level=True)

import chromium
from selenium.webdriver import Chrome

LINKS = [
    "#model=openai-community/gpt2&gpus=2xA100-40GB&seq-len=512&method=lora&lora-rank=8",
    "#model=meta-llama/Llama-3.1-8B&gpus=8xH100-80GB&seq-len=4096",
    "#model=meta-llama/Llama-3.1-70B&gpus=8xA100-80GB&nodes=2&method=qlora&optimizer=adafactor",
    "#model=openai-community/gpt2&gpus=2xA100-40GB&seq-len=512&tokens=1B&price=2.5",
    "#model=microsoft/phi-4&gpus=1xRTX+4090-24GB&precision=fp16",
]
ANSWERED = "document.querySelector('main')?.dataset.answered"
RECORDS = """
addEventListener("DOMContentLoaded", () => {
  const status = document.querySelector("#state p");
  window.states = [];
  new MutationObserver(() => states.push(status.textContent)).observe(status, { childList: true });
});
"""
"""Makes a page keep all that its line of state says."""
CUT_OFF = """
const cut = [], alone = document.createElement("select");
alone.style.cssText = "width:auto;position:absolute";
document.querySelector("form").append(alone);
for (const select of document.querySelectorAll("form select[name]"))
  for (const option of select.options) {
    alone.replaceChildren(new Option(option.text));
    if (alone.offsetWidth > select.offsetWidth) cut.push(option.text);
  }
alone.remove();
return cut;
"""
"""The options whose text is wider than their field."""


@dataclass(frozen=True)
class Page:
    """The page, open."""

    browser: Chrome
    folder: Path

    def go(self, link: str) -> None:
        """Follows a link inside of the page, and waits for its answer."""
        if link != self.browser.execute_script("return location.hash"):
            self.do("location.hash = arguments[0]", link)

    def do(self, script: str, *arguments: Any) -> None:
        """Runs some JavaScript, and waits for the answer to what it changes."""
        before = self.browser.execute_script(f"return {ANSWERED}")
        self.browser.execute_script(script, *arguments)
        chromium.until(self.browser, f"{ANSWERED} !== {json.dumps(before)}")

    def text(self, query: str) -> str:
        return str(self.browser.execute_script("return document.querySelector(arguments[0]).textContent", query))

    def saved(self, name: str) -> Path:
        """The file that a button downloads."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        self.browser.find_element("css selector", f'a[download="{name}"]').click()
        deadline = time.monotonic() + chromium.SECONDS
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return path

    def command(self, *more: str | Path) -> Called:
        """The command that the page shows, run."""
        words = shlex.split(self.text("main details:last-of-type pre"))
        assert words[:2] == ["accel-fsdp", "plan"]
        return here(*words[1:], *more)


def run_build(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "web" / "build.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, in a folder below that of its host."""
    host = tmp_path_factory.mktemp("host")
    ran = run_build(host / "some" / "folder")
    assert ran.returncode == 0, ran.stderr
    assert [line.partition(":")[0] for line in ran.stderr.splitlines()][:4] == [
        *("npm", "planner.zip", "index.html", "docs/")
    ]
    return host


@pytest.fixture(scope="module")
def page(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("downloads")
    with chromium.served(built) as host, chromium.opened(folder) as browser:
        browser.get(f"{host}/some/folder/index.html")
        chromium.until(browser, ANSWERED)
        yield Page(browser, folder)


def test_the_page_says_what_it_loads_until_the_first_answer(built: Path, tmp_path: Path) -> None:
    """And while it loads, it asks for its own files alone; a request to another host would be refused."""
    with chromium.served(built) as host, chromium.opened(tmp_path) as browser:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": RECORDS})
        browser.get(f"{host}/some/folder/")
        chromium.until(browser, ANSWERED)
        states = browser.execute_script("return states")
        assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
        refused = browser.execute_async_script(
            "const done = arguments[0], code = `fetch('http://localhost:1/').catch(() => postMessage('refused'))`;"
            "new Worker(URL.createObjectURL(new Blob([code]))).onmessage = ({data}) => done(data)"
        )
    loading = [re.fullmatch(r"Loading Python: ([\d.]+) of ([\d.]+) MB", state) for state in states]
    sizes = [(float(match[1]), float(match[2])) for match in loading if match]
    assert len(sizes) > 3
    assert sizes == sorted(sizes)
    assert len({total for _, total in sizes}) == 1
    assert states[len(sizes) : -1] == ["Starting Python", "Starting the planner"], "all bytes were counted"
    assert states[-1].startswith("Planned in ")
    assert refused == "refused"
    asked = chromium.asked_for(tmp_path, host)
    assert {"page.js", "worker.js", "planner.zip"} < {url.partition("?")[0].rpartition("/")[2] for url in asked}
    assert [url for url in asked if not url.startswith(f"{host}/some/folder/")] == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("link", LINKS)
def test_the_numbers_are_those_of_the_command(page: Page, link: str) -> None:
    page.go(link)
    shown = json.loads(page.saved("plan.json").read_text())
    same(shown, json.loads(page.command("--json").printed))
    cells = page.browser.execute_script("return [...document.querySelectorAll('main data')].map(data => data.value)")
    rows = [row for row in (shown["choice"], *shown["strategies"]) if row]
    rows = [row for number, row in enumerate(rows) if row not in rows[:number]]
    assert list(map(int, cells)) == [row["needed_bytes"] for row in rows]


def same(first: Any, other: Any) -> None:
    """Equal, but for the last digits of what isn't whole: Python 3.12 and later add up more precisely."""
    if isinstance(other, dict):
        assert first.keys() == other.keys()
        for key in other:
            same(first[key], other[key])
    elif isinstance(other, list):
        for mine, theirs in zip(first, other, strict=True):
            same(mine, theirs)
    else:
        assert first == (pytest.approx(other, rel=1e-12) if isinstance(other, float) else other)


def test_a_link_fills_the_form_and_the_form_writes_the_link(page: Page) -> None:
    for link in LINKS:
        page.go(link)
        shown = page.browser.execute_script("return location.hash.slice(1)")
        assert dict(parse_qsl(shown)) == dict(parse_qsl(link[1:]))
    form = "return Object.fromEntries([...document.querySelectorAll('form [name]')].map(f => [f.name, f.value]))"
    values = page.browser.execute_script(form)
    wanted = {"model": "microsoft/phi-4", "count": "1", "gpus": "RTX 4090-24GB", "precision": "fp16", "nodes": ""}
    assert values.items() >= wanted.items()
    assert page.browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    page.do(
        "const field = document.getElementById('seq-len'); field.value = 256;"
        "field.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert "1 x 256 tokens" in page.text("main header .dim")
    assert "seq-len=256" in page.browser.execute_script("return location.hash")


def test_the_yaml_is_the_commands_and_accelerate_reads_it(page: Page, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    page.go(LINKS[1])
    saved = page.saved("fsdp.yaml")
    assert page.text("main details pre") == saved.read_text()
    assert page.command("-o", tmp_path / "fsdp.yaml").code == 0
    assert saved.read_text() == (tmp_path / "fsdp.yaml").read_text()
    assert load_config_from_file(str(saved)).num_processes == 8


@pytest.mark.parametrize(
    "link",
    [
        "#model=gpt2&gpus=2xA100&seq-len=9999",
        "#gpus=2xA100&model=<img src=x onerror=alert(1)>",
    ],
)
def test_what_is_wrong_is_said_as_the_command_says_it(page: Page, link: str) -> None:
    page.go(link)
    if "<img" in link:
        assert "<img src=x onerror=alert(1)> isn't on this page" in page.text(".error h1")
    else:
        words = [word for name, value in parse_qsl(link[1:]) for word in (f"--{name}", value)]
        what, why, fix = (page.text(f".error {query}") for query in ("h1", "dd", "dd:last-of-type"))
        assert f"error: {what} why: {why} fix: {fix}" in here("plan", *words).text
    assert page.browser.execute_script("return document.querySelector('#take').hidden")
    page.go(LINKS[0])
    assert "gpt2 on 2 x A100" in page.text("main h1")


def test_where_nothing_fits_there_is_no_yaml(page: Page) -> None:
    page.go("#model=meta-llama/Llama-3.1-70B&gpus=1xT4-16GB")
    assert "Nothing fits" in page.text(".answer")
    assert not page.browser.find_element("css selector", 'a[download="fsdp.yaml"]').is_displayed()
    assert page.browser.find_element("css selector", 'a[download="plan.json"]').is_displayed()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("link", [LINKS[2], "#model=gpt2&gpus=8xH10"])
def test_nothing_is_cut_off_and_everything_has_a_name(page: Page, link: str, width: int) -> None:
    chromium.sized(page.browser, width)
    page.go(link)
    page.browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.browser.execute_script("return document.documentElement.scrollWidth") == width
    assert page.browser.execute_script(CUT_OFF) == []
    controls = page.browser.find_elements("css selector", "form input, form select")
    assert len(controls) >= 15
    assert not [control.get_attribute("outerHTML") for control in controls if not control.accessible_name]


def test_where_python_can_not_be_loaded_the_page_says_so(built: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(built / "some" / "folder", copy, ignore=shutil.ignore_patterns("docs", "planner.zip"))
    with chromium.served(copy) as host, chromium.opened(tmp_path) as browser:
        browser.get(f"{host}/index.html")
        chromium.until(browser, "document.querySelector('main').textContent.includes('planner.zip')")
        assert "The planner stopped: " in browser.find_element("css selector", "main").text


@pytest.mark.slow
def test_the_pages_are_a_click_away_and_can_be_searched(built: Path, tmp_path: Path) -> None:
    """From the planner to the pages and back; nothing leaves this host."""
    with chromium.served(built) as host, chromium.opened(tmp_path) as browser:
        browser.get(f"{host}/some/folder/")
        browser.find_element("css selector", ".top a").click()
        chromium.until(browser, "document.querySelector('h1')?.textContent.startsWith('Pages')")
        browser.execute_script(
            "const field = document.querySelector('.md-search__input'); field.focus(); field.value = 'offload';"
            "field.dispatchEvent(new Event('input', {bubbles: true})); field.dispatchEvent(new KeyboardEvent('keyup'))"
        )
        chromium.until(browser, "document.querySelectorAll('.md-search-result__item a').length > 1")
        browser.execute_script("document.querySelector('.md-banner a').click()")
        chromium.until(browser, "document.querySelector('main h1')?.textContent.includes('8 x H100')")
        assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    asked = chromium.asked_for(tmp_path, host)
    assert [url for url in asked if not url.startswith(f"{host}/some/folder/")] == []


def test_a_folder_with_other_things_is_not_replaced(built: Path, tmp_path: Path) -> None:
    """The site's own folder is a Space of Hugging Face."""
    import yaml

    (tmp_path / "thesis.txt").write_text("years of work")
    ran = run_build(tmp_path)
    assert (ran.returncode != 0, "is no site" in ran.stderr) == (True, True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    _, front, _ = (built / "some" / "folder" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front).items() >= {"sdk": "static", "app_file": "index.html"}.items()
    sizes = {path.name: path.stat().st_size for path in built.rglob("*") if path.is_file()}
    assert max(sizes.values()) < 10e6, "a Space takes larger files through Git LFS alone"
