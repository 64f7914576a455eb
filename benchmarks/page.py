"""How long the planner's page makes a person wait: `python benchmarks/page.py --write`. Needs npm and Chromium.

Real Chromium, offline, at two widths: the first answer, which takes loading Python, and answers to changes of the form.
Medians of 3; the picture of docs/site.md is taken on the way.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import results

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import chromium  # noqa: E402
from selenium.webdriver import Chrome  # noqa: E402

REPEATS = 3
WIDTHS = (1280, 400)
PICTURE = ROOT / "docs" / "site.png"
LENGTHS = (1024, 4096, 12288)
ANSWERED = "document.querySelector('main')?.dataset.answered"


def first_and_later(address: str, width: int, picture: Path | None) -> tuple[float, list[float]]:
    """The seconds until the first answer, and those of each later one."""
    with tempfile.TemporaryDirectory() as place, chromium.opened(Path(place)) as browser:
        chromium.sized(browser, width)
        start = time.perf_counter()
        browser.execute_script("location = arguments[0]", address)
        chromium.until(browser, ANSWERED)
        first = time.perf_counter() - start
        if picture:
            time.sleep(0.5)  # the answer fades in
            browser.save_screenshot(str(picture))
        return first, [changed(browser, length) for length in LENGTHS]


def changed(browser: Chrome, length: int) -> float:
    """The seconds from a change of the form to its answer, the pause after a key included."""
    before = browser.execute_script(f"return {ANSWERED}")
    browser.execute_script(
        "const field = document.getElementById('seq-len'); field.value = arguments[0];"
        "field.dispatchEvent(new Event('input', {bubbles: true}))",
        length,
    )
    return chromium.seconds_until(browser, f"{ANSWERED} !== '{before}'")


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    lines = [
        "## The planner's page",
        "",
        f"Chromium, offline, two cores: medians of {REPEATS} loads. Later answers are those to a change of the form, "
        "the 0.15 s included that the page waits after a key.",
        "",
        "| width | first answer, Python loaded for it | later answers | longest of them |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "web" / "build.py", folder], check=True, cwd=ROOT)
        with chromium.served(Path(folder)) as host:
            for width in WIDTHS:
                picture = PICTURE if write and width == WIDTHS[0] else None
                firsts, laters = zip(
                    *(first_and_later(f"{host}/", width, picture) for _ in range(REPEATS)), strict=True
                )
                later = [seconds for each in laters for seconds in each]
                lines.append(f"| {width} | {median(firsts):.1f} s | {median(later):.2f} s | {max(later):.2f} s |")
    print("\n".join(lines))
    if write:
        results.keep("page", lines)


if __name__ == "__main__":
    main()
