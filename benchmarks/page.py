"""How long the planner's page makes one wait: `python benchmarks/page.py --write`. Needs npm and Chromium.

Real Chromium, offline, at two widths. A page that is opened by a link shows a table that was made with it, then the
one that it computes, which takes loading Python, then the whole answer. Answers to changes of the form follow. Medians
of 3; the picture of docs/site.md is taken on the way.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlencode

import results

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import chromium  # noqa: E402
from selenium.webdriver import Chrome  # noqa: E402

REPEATS = 3
WIDTHS = (1280, 400)
PICTURE = ROOT / "docs" / "site.png"
MODEL = "meta-llama/Llama-3.1-8B"
LINK = "#" + urlencode({"model": MODEL, "gpus": "8xH100-80GB"})
LENGTHS = (1024, 2048, 4096, 6144, 12288)
ANSWERED = "document.querySelector('main').dataset.answered"
FIRST = (
    "document.querySelector('main')?.dataset.tabled",
    "document.querySelector('#step figure')",  # which follows the computed table at once
    f"document.querySelector('main') && {ANSWERED}",
)
"""What the page has when it shows the table made with it, the computed one, and the whole answer."""


def first_and_later(address: str, width: int) -> tuple[list[float], list[float]]:
    """The seconds until each of `FIRST`, and those of each later answer."""
    with tempfile.TemporaryDirectory() as place, chromium.opened(Path(place)) as browser:
        chromium.sized(browser, width)
        start = time.perf_counter()
        browser.execute_script("location = arguments[0]", address + LINK)
        first = []
        for condition in FIRST:
            chromium.until(browser, condition)
            first.append(time.perf_counter() - start)
        later = [changed(browser, length) for length in LENGTHS]
    return first, later


def changed(browser: Chrome, length: int) -> float:
    """The seconds from a change of the form to its whole answer, the pause after a key included."""
    before = browser.execute_script(f"return {ANSWERED}")
    browser.execute_script(
        "const field = document.getElementById('seq-len'); field.value = arguments[0];"
        "field.dispatchEvent(new Event('input', {bubbles: true}))",
        length,
    )
    return chromium.seconds_until(browser, f"{ANSWERED} !== '{before}'")


def take_picture(address: str) -> None:
    """The page with its example, as it opens."""
    with tempfile.TemporaryDirectory() as place, chromium.opened(Path(place)) as browser:
        chromium.sized(browser, 1280, 900)
        browser.get(address)
        chromium.until(browser, "document.querySelector('#state p').textContent === 'Ready'")
        browser.save_screenshot(str(PICTURE))


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "web" / "build.py", folder, "--tables", MODEL], check=True, cwd=ROOT)
        with chromium.served(Path(folder)) as host:
            lines = [
                "## The planner's page",
                "",
                f"Chromium, offline, two cores: medians of {REPEATS} loads. Later answers are those to a change of the "
                "form, the 0.15 s included that the page waits after a key.",
                "",
                "| width | table made with the page | table computed, Python loaded for it | whole answer | "
                "later answers | longest of them |",
                "|---|---|---|---|---|---|",
            ]
            for width in WIDTHS:
                runs = [first_and_later(f"{host}/", width) for _ in range(REPEATS)]
                later = [seconds for _, each in runs for seconds in each]
                first = " | ".join(
                    f"{median(seconds):.1f} s" for seconds in zip(*(run for run, _ in runs), strict=True)
                )
                lines.append(f"| {width} | {first} | {median(later):.2f} s | {max(later):.2f} s |")
            if given.write:
                take_picture(f"{host}/")
    print("\n".join(lines))
    if given.write:
        results.keep("page", lines)


if __name__ == "__main__":
    main()
