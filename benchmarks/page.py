"""How long the planner's page makes one wait: `python benchmarks/page.py --write`. Needs npm and Chromium.

Real Chromium, offline, at two widths: the first answer of a page that is opened by a link, which takes loading Python,
and answers to later changes of the form. Medians of 3; the picture of docs/site.md is taken on the way.
"""

import argparse
import subprocess
import sys
import tempfile
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
LINK = "#" + urlencode({"model": "meta-llama/Llama-3.1-8B", "gpus": "8xH100-80GB", "seq-len": 8192})
LENGTHS = (1024, 2048, 4096, 6144, 12288)
ANSWERED = "document.querySelector('main').dataset.answered"


def first_and_later(address: str, width: int) -> tuple[float, list[float]]:
    """The seconds until the first answer is whole, and those of each later one."""
    with tempfile.TemporaryDirectory() as place, chromium.opened(Path(place)) as browser:
        chromium.sized(browser, width)
        browser.execute_script("location = arguments[0]", address + LINK)
        first = chromium.seconds_until(browser, f"document.querySelector('main') && {ANSWERED}")
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
        chromium.sized(browser, 1000, 940)
        browser.get(address)
        chromium.until(browser, "document.querySelector('#state p').textContent === 'Ready'")
        browser.save_screenshot(str(PICTURE))


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "web" / "build.py", folder], check=True, cwd=ROOT)
        with chromium.served(Path(folder)) as host:
            lines = [
                "## The planner's page",
                "",
                f"Chromium, offline, two cores: medians of {REPEATS} loads. Later answers are those to a change of the "
                "form, the 0.15 s included that the page waits after a key.",
                "",
                "| width | first answer, Python loaded for it | later answers | longest of them |",
                "|---|---|---|---|",
            ]
            for width in WIDTHS:
                runs = [first_and_later(f"{host}/", width) for _ in range(REPEATS)]
                later = [seconds for _, each in runs for seconds in each]
                first = median(seconds for seconds, _ in runs)
                lines.append(f"| {width} | {first:.1f} s | {median(later):.2f} s | {max(later):.2f} s |")
            if given.write:
                take_picture(f"{host}/")
    print("\n".join(lines))
    if given.write:
        results.keep("page", lines)


if __name__ == "__main__":
    main()
