"""The planner's page in a real Chromium that reaches no other machine: what `make site` builds, as a reader uses it."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from conftest import ROOT, Finished, accel_fsdp

if lacking := [name for name in ("chromium", "chromedriver", "npm", "node") if not shutil.which(name)]:
    pytest.skip(f"the page needs {', '.join(lacking)}", allow_module_level=True)
if not find_spec("material"):
    pytest.skip("the pages beside it need mkdocs-material", allow_module_level=True)

import chromium
from selenium.webdriver import Chrome

FIRST = "#model=openai-community/gpt2&gpus=2xA100-40GB&seq-len=512&method=lora&lora-rank=8"
LINKS = [
    FIRST,
    "#model=meta-llama/Llama-3.1-8B&gpus=8xH100-80GB&seq-len=4096",
    "#model=meta-llama/Llama-3.1-70B&gpus=8xA100-80GB&nodes=2&method=qlora&chunked-loss=true&optimizer=adafactor",
    "#model=Qwen/Qwen3-30B-A3B&gpus=8xH200-141GB&seq-len=8192&global-batch=64&attention=flash",
    "#model=openai-community/gpt2&gpus=2xA100-40GB&seq-len=512&tokens=1B&price=2.5",
    "#model=microsoft/phi-4&gpus=1xRTX+4090-24GB&precision=fp16",
]

TABLED = ("openai-community/gpt2", "meta-llama/Llama-3.1-70B")
"""The models for which the page is built with tables."""
SHOWN = "return [...document.querySelectorAll('#head, #table')].map(area => area.innerHTML)"
READY = "document.querySelector('#state p').textContent === 'Ready'"


@dataclass(frozen=True)
class Page:
    """The page, open."""

    browser: Chrome
    folder: Path
    first_seconds: float

    def go(self, link: str) -> None:
        """Follows a link inside of the page, and waits for its answer."""
        if link != self.browser.execute_script("return location.hash"):
            with self.answered():
                self.browser.execute_script("location.hash = arguments[0]", link)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Waits until what is done inside has its answer."""
        before = self.browser.execute_script("return document.querySelector('main').dataset.answered")
        yield
        chromium.until(self.browser, f"document.querySelector('main').dataset.answered !== {json.dumps(before)}")

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

    def command(self, *more: str | Path) -> Finished:
        """The command that the page shows, run."""
        words = shlex.split(self.text("#command"))
        assert words[:2] == ["accel-fsdp", "plan"]
        return accel_fsdp(*words[1:], *more)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, in a folder below that of its host."""
    host = tmp_path_factory.mktemp("host")
    words = [sys.executable, str(ROOT / "web" / "build.py"), str(host / "some" / "folder"), "--tables", *TABLED]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=200)
    return host


@pytest.fixture(scope="module")
def page(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("downloads")
    with chromium.served(built) as host, chromium.opened(folder) as browser:
        browser.get(f"{host}/some/folder/index.html{FIRST}")
        seconds = chromium.seconds_until(browser, "document.querySelector('main').dataset.answered")
        yield Page(browser, folder, seconds)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("link", LINKS)
def test_the_numbers_are_those_of_the_command(page: Page, link: str) -> None:
    page.go(link)
    shown = json.loads(page.saved("plan.json").read_text())
    same(shown, json.loads(page.command("--json").output))
    cells = page.browser.execute_script(
        "return [...document.querySelectorAll('main .wide tbody tr')].map(row => row.querySelector('data').value)"
    )
    rows = [*([shown["choice"]] if shown["choice"] else []), *shown["strategies"]]
    assert list(map(int, cells)) == [row["peak_bytes"] for row in rows]


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
    for link in (*LINKS[1:-1], LINKS[0], LINKS[-1]):  # each takes the place of the one before, whose plan then ends
        page.browser.execute_script("document.querySelector('main').ariaBusy = ''; location.hash = arguments[0]", link)
        chromium.until(page.browser, "document.querySelector('main').ariaBusy === 'true'")
        inputs = dict(parse_qsl(page.browser.execute_script("return location.hash.slice(1)")))
        assert inputs == dict(parse_qsl(link[1:]))
    form = "return Object.fromEntries([...document.querySelectorAll('form [name]')].map(f => [f.name, f.value]))"
    values = page.browser.execute_script(form)
    wanted = {"model": "microsoft/phi-4", "count": "1", "gpus": "RTX 4090-24GB", "precision": "fp16", "nodes": ""}
    assert values.items() >= wanted.items()
    chromium.until(page.browser, "document.querySelector('main').ariaBusy === 'false'")


def test_a_price_with_a_fraction_is_in_its_field(page: Page) -> None:
    page.go(LINKS[4])
    field = page.browser.find_element("css selector", "#price")
    assert field.get_attribute("value") == "2.5"
    assert field.get_attribute("inputmode") == "decimal", "a phone's keys for whole numbers have no point"
    assert page.browser.execute_script("return arguments[0].validity.valid", field)


def test_a_button_that_is_pressed_twice_has_its_name_back(page: Page) -> None:
    page.go(LINKS[0])
    named = "document.querySelector('[data-copy=link]').textContent"
    page.browser.execute_script(
        "const button = document.querySelector('[data-copy=link]'); button.click(); button.click()"
    )
    chromium.until(page.browser, f"{named} === 'Copied'")
    time.sleep(1.5)
    assert page.browser.execute_script(f"return {named}") == "Copy link"


def test_two_machines_in_one_word_are_taken_apart(page: Page) -> None:
    page.go("#model=llama-3.1-8b&gpus=2x8xa100-40gb")
    assert page.text("#head h1") == "meta-llama/Llama-3.1-8B on 16 x A100"
    link = page.browser.execute_script("return location.hash")
    assert link == "#model=meta-llama/Llama-3.1-8B&gpus=8xA100-40GB&nodes=2"


def test_one_machine_in_one_word_is_taken_apart(page: Page) -> None:
    page.go("#model=llama-3.1-8b&gpus=1x4xa100-40gb")
    link = page.browser.execute_script("return location.hash")
    assert link == "#model=meta-llama/Llama-3.1-8B&gpus=4xA100-40GB"


def test_the_yaml_is_the_commands_and_accelerate_reads_it(page: Page, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    page.go(LINKS[1])
    saved = page.saved("fsdp.yaml")
    assert page.text("#yaml") == saved.read_text()
    assert page.command("-o", tmp_path / "fsdp.yaml").code == 0
    assert saved.read_text() == (tmp_path / "fsdp.yaml").read_text()
    checked = accel_fsdp("check", saved, "--model", "llama-3.1-8b", "--strict")
    assert checked.code == 0, checked.output
    assert load_config_from_file(str(saved)).num_processes == 8


def test_a_change_of_the_form_is_answered_sooner_than_a_load(page: Page) -> None:
    page.go(LINKS[0])
    start = time.perf_counter()
    with page.answered():
        page.browser.execute_script(
            "const field = document.getElementById('seq-len'); field.value = 256;"
            "field.dispatchEvent(new Event('input', {bubbles: true}))"
        )
    assert "1 x 256 tokens" in page.text("main header .dim")
    assert time.perf_counter() - start < page.first_seconds
    assert "seq-len=256" in page.browser.execute_script("return location.hash")


@pytest.mark.parametrize("link", [LINKS[2], "#model=gpt2&gpus=8xH10"])
def test_no_width_scrolls_sideways(page: Page, link: str) -> None:
    page.go(link)
    page.browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")
    for width in (1280, 400):
        chromium.sized(page.browser, width)
        wide = page.browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide == [width, width]


@pytest.mark.parametrize(
    "link",
    [
        "#model=gpt2&gpus=2xA100&seq-len=9999",
        "#model=gpt2&gpus=8xH10",
        "#model=gpt2&gpus=H",
        "#model=gpt2&gpus=2xA100&seq-len=many",
        "#model=gpt2&gpus=2xA100&seq-length=9",
        "#model=gpt2&gpus=2xA100&method=dora",
        "#gpus=2xA100&model=<img src=x onerror=alert(1)>",
    ],
)
def test_what_is_wrong_is_said_as_the_command_says_it(page: Page, link: str) -> None:
    page.go(link)
    words = [word for name, value in parse_qsl(link[1:]) for word in (f"--{name}", value)]
    if "<img" not in link:
        what, why, fix = (page.text(f"#error {query}") for query in ("h1", "dd", "dd:last-of-type"))
        output = " ".join(accel_fsdp("plan", *words).output.split())
        assert f"error: {what} why: {why} fix: {fix}" in output
    else:
        assert "<img src=x onerror=alert(1)> isn't on this page" in page.text("#error h1")
    hidden = "return [...document.querySelectorAll('#take, #texts')].every(element => element.hidden)"
    assert page.browser.execute_script(hidden)
    page.go(LINKS[0])
    assert not page.browser.execute_script("return document.querySelector('#error').offsetHeight")
    assert "gpt2 on 2 x A100" in page.text("#head h1")


def test_where_nothing_fits_there_is_no_yaml(page: Page) -> None:
    page.go("#model=meta-llama/Llama-3.1-70B&gpus=1xT4-16GB")
    assert "Nothing fits" in page.text("#head .answer")
    assert "What would fit" in page.text(".advice")
    assert not page.browser.find_element("css selector", 'a[download="fsdp.yaml"]').is_displayed()
    assert page.browser.find_element("css selector", 'a[download="plan.json"]').is_displayed()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("link", ["#model=gpt2&gpus=8xA100-40GB", "#model=llama-3.1-70b&gpus=1xRTX 4090"])
def test_a_table_made_with_the_page_is_shown_until_python_has_loaded(built: Path, tmp_path: Path, link: str) -> None:
    """It is marked as such, has nothing to download yet, and is what Python then computes."""
    with chromium.served(built) as host, chromium.opened(tmp_path) as browser:
        browser.execute_script("location = arguments[0]", f"{host}/some/folder/index.html{link}")
        chromium.until(browser, "document.querySelector('main')?.dataset.tabled")
        answered = browser.execute_script("return document.querySelector('main').dataset.answered")
        early = browser.execute_script(SHOWN)
        status = browser.find_element("css selector", "#state p").text
        hidden = browser.execute_script("return document.querySelector('#take').hidden")
        chromium.until(browser, "document.querySelector('main').dataset.answered")
        assert browser.execute_script(SHOWN) == early
        assert browser.find_element("css selector", "#state p").text.startswith("Planned in")
        assert browser.find_elements("css selector", "#step figure")
    assert answered is None
    assert status.startswith("From a table made with this page")
    assert hidden
    assert "<table" in early[1]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("link", ["#model=gpt2&gpus=8xA100-40GB&seq-len=256", "#model=gpt2&gpus=3xT4-16GB"])
def test_what_no_table_has_is_said_to_be_computed(built: Path, tmp_path: Path, link: str) -> None:
    with chromium.served(built) as host, chromium.opened(tmp_path) as browser:
        browser.execute_script("location = arguments[0]", f"{host}/some/folder/index.html{link}")
        said = "document.querySelector('#state p')?.textContent"
        chromium.until(browser, f'{said}?.startsWith("Not in the page\'s table: computed here. ")')
        chromium.until(browser, "document.querySelector('main').dataset.answered")
        assert not browser.execute_script("return document.querySelector('main').dataset.tabled")
        assert "gpt2" in browser.find_element("css selector", "#head h1").text


def test_back_to_the_bare_page_shows_the_example_alone(page: Page) -> None:
    """Also from an error, and with an answer still to come."""
    shown = (
        "const headings = [...document.querySelectorAll('main h1, main h2')].filter(heading => heading.offsetParent);"
        "return [headings.map(heading => heading.textContent), document.querySelectorAll('#figures > *').length]"
    )
    page.go(LINKS[1])
    page.browser.execute_script("location.hash = ''")
    chromium.until(page.browser, READY)
    example = page.browser.execute_script(shown)
    page.go("#model=foo/bar&gpus=8xH100-80GB")
    assert page.browser.find_element("css selector", "#error").is_displayed()
    page.browser.execute_script("location.hash = ''")
    chromium.until(page.browser, READY)
    assert page.browser.execute_script(shown) == example
    page.browser.execute_script(f"location.hash = {json.dumps(LINKS[0])}; setTimeout(() => (location.hash = ''), 50)")
    time.sleep(2)  # in which the answer comes
    assert page.browser.execute_script(shown) == example
    assert "Llama-3.1-8B" in page.text("#command")


@pytest.mark.parametrize("width", [1100, 1280, 1600])
def test_no_table_begins_left_of_the_page(page: Page, width: int) -> None:
    chromium.sized(page.browser, width)
    page.go(LINKS[0])
    lefts = page.browser.execute_script(
        "return [...document.querySelectorAll('main .scroll')].map(box => box.getBoundingClientRect().left)"
    )
    assert lefts
    assert min(lefts) >= 0


def test_where_python_cannot_go_on_from_a_memory_it_starts_anew(built: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(built / "some" / "folder", copy, copy_function=os.link, ignore=shutil.ignore_patterns("docs"))
    (copy / "planner.memory").unlink()
    (copy / "planner.memory").write_bytes(b"not what was kept")
    with chromium.served(copy) as host, chromium.opened(tmp_path) as browser:
        browser.get(f"{host}/index.html#model=gpt2&gpus=8xA100-40GB&seq-len=256")
        chromium.until(browser, "document.querySelector('main').dataset.answered")
        assert "gpt2" in browser.find_element("css selector", "#head h1").text
    assert any("planner.zip" in url for url in chromium.asked_for(tmp_path, host))


@pytest.mark.parametrize("width", [1280, 400])
def test_the_first_screen_has_the_answer_the_table_and_a_figure(page: Page, width: int) -> None:
    chromium.sized(page.browser, width, 900)
    page.go(LINKS[1])
    page.browser.execute_script("document.querySelector('#more').open = false; scrollTo(0, 0)")
    bottoms = page.browser.execute_script(
        "const figure = [...document.querySelectorAll('#step figure svg')].find(svg => svg.clientWidth);"
        "const shown = [...['.answer', '#table tbody'].map(query => document.querySelector(query)), figure];"
        "return shown.map(element => element.getBoundingClientRect()).map(({top, height}) => top + 0.8 * height)"
    )
    assert max(bottoms) < 900
    reasons = page.browser.execute_script("return document.querySelector('#advice').getBoundingClientRect().top")
    assert reasons > max(bottoms)


@pytest.mark.parametrize("width", [1280, 400])
def test_labels_and_names(page: Page, width: int) -> None:
    """Every field and button has a name that a screen reader says, and there is one first heading."""
    chromium.sized(page.browser, width)
    page.go(LINKS[0])
    page.browser.execute_script("document.querySelector('#more').open = true")
    controls = page.browser.find_elements("css selector", "input, select, button, a[download]")
    assert len(controls) >= 20
    assert not [control.get_attribute("outerHTML") for control in controls if not control.accessible_name]


def test_the_browser_has_nothing_to_complain_about(page: Page) -> None:
    assert page.browser.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_nothing_is_asked_of_other_hosts_and_nothing_could_be(built: Path, tmp_path: Path) -> None:
    """The example opens at once; while Python loads and plans, only the page's own files are asked for."""
    with chromium.served(built) as host, chromium.opened(tmp_path) as browser:
        browser.get(f"{host}/some/folder/")
        assert "Llama-3.1-8B on 8 x H100" in browser.find_element("css selector", "#head h1").text
        chromium.until(browser, READY)
        Page(browser, tmp_path, 0).go(LINKS[0])
        refused = browser.execute_async_script(
            "const done = arguments[0], code = `fetch('http://localhost:1/').catch(() => postMessage('refused'))`;"
            "new Worker(URL.createObjectURL(new Blob([code]))).onmessage = ({data}) => done(data)"
        )
        complaints = browser.get_log("browser")  # type: ignore[no-untyped-call]
    assert refused == "refused"
    assert complaints
    assert all(
        "http://localhost:1/" in complaint["message"] and "Content" in complaint["message"] for complaint in complaints
    )
    asked = chromium.asked_for(tmp_path, host)
    names = [url.partition("?")[0].rpartition("/")[2] for url in asked]
    assert {"page.js", "worker.js", "planner.memory", "rest.zip"} < set(names)
    assert "planner.zip" not in names
    assert [url for url in asked if not url.startswith(f"{host}/some/folder/")] == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dark", [False, True])
def test_the_pages_are_a_click_away_and_can_be_searched(built: Path, tmp_path: Path, dark: bool) -> None:
    """From the planner to the pages and back, in the colours that the system prefers; nothing leaves this host."""
    with chromium.served(built) as host, chromium.opened(tmp_path, dark) as browser:
        browser.get(f"{host}/some/folder/")
        chromium.until(browser, READY)
        browser.find_element("css selector", ".top a").click()
        chromium.until(browser, "document.querySelector('h1')?.textContent.startsWith('Pages')")
        scheme = "document.body.getAttribute('data-md-color-scheme')"
        chromium.until(browser, f"{scheme} === '{'slate' if dark else 'default'}'")
        browser.execute_script(
            "const field = document.querySelector('.md-search__input'); field.focus(); field.value = 'offload';"
            "field.dispatchEvent(new Event('input', {bubbles: true})); field.dispatchEvent(new KeyboardEvent('keyup'))"
        )
        chromium.until(browser, "document.querySelectorAll('.md-search-result__item a').length > 1")
        browser.execute_script("document.querySelector('.md-banner a').click()")
        chromium.until(browser, "document.querySelector('#head h1')?.textContent.includes('8 x H100')")
        chromium.until(browser, READY)
        assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    asked = chromium.asked_for(tmp_path, host)
    assert f"{host}/some/folder/docs/search/search_index.json" in asked
    assert [url for url in asked if not url.startswith(f"{host}/some/folder/")] == []


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    words = [sys.executable, str(ROOT / "web" / "build.py"), str(tmp_path)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60)
    assert done.returncode != 0
    assert b"is no site" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_folder_is_a_space_of_hugging_face(built: Path) -> None:
    import yaml

    _, front, _ = (built / "some" / "folder" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front).items() >= {"sdk": "static", "app_file": "index.html"}.items()
    sizes = {path.name: path.stat().st_size for path in built.rglob("*") if path.is_file()}
    assert max(sizes.values()) < 10e6, "a Space takes larger files through Git LFS alone"
