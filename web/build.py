"""Builds the planner's page, which runs this package in the browser, and the pages of docs/ beside it: `make site`.

`python web/build.py FOLDER`: the folder is a whole site for any static host. It has the page, Pyodide from npm at the
version and the hash of `package-lock.json`, and this package with the few pure Python libraries that planning needs, as
they are installed here (constraints.txt). A browser that has the page loads nothing from elsewhere.
"""

import argparse
import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from html import escape
from importlib.metadata import distribution
from pathlib import Path
from string import Template

import npm
import pages

from accel_fsdp import console
from accel_fsdp.planner import browser, html_page
from accel_fsdp.planner.browser import Input

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "accel_fsdp"
FETCHED = ("pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", *FETCHED)
LIBRARIES = (*("rich", "ruamel.yaml", "PyYAML", "lazy-loader", "packaging"),)
"""What planning imports. PyYAML does without its compiled half."""
SCRIPTS = ("page.js", "worker.js")
MAIN = ("model", "gpus", "seq-len", "method")
EMPTY = {
    **{"nodes": "1", "seq-len": "2048", "global-batch": "any", "batch": "searched"},
    **{"tokens": "not said", "price": "not said"},
}
"""What an empty field says."""
LONG = 12
"""Letters of a choice for which a field needs twice the width."""
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)
SPACE = """---
title: accel-fsdp
emoji: 📐
colorFrom: blue
colorTo: green
sdk: static
app_file: index.html
license: apache-2.0
short_description: Which way fits, and how fast?
---

The planner of accel-fsdp as a page. It runs in the browser and sends nothing anywhere.
"""


def build(folder: Path) -> None:
    """Writes the site, in place of an older one; a folder with anything else in it stays as it is."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyodide").is_dir():
        raise SystemExit(f"{folder} is no site, and would be removed: name an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pyodide").mkdir(parents=True)
    console.say("npm: Pyodide, which is Python for browsers")
    runtime = npm.installed(HERE) / "pyodide"
    for name in RUNTIME:
        shutil.copy(runtime / name, folder / "pyodide")
    for name in SCRIPTS:
        shutil.copy(HERE / name, folder)
    console.say("planner.zip: this package and what planning imports")
    with zipfile.ZipFile(folder / "planner.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in _sources():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    console.say("index.html: the page")
    (folder / "index.html").write_text(_page(folder), encoding="utf-8")
    (folder / "LICENSES.txt").write_text("\n\n".join(_licenses(runtime)), encoding="utf-8")
    (folder / "README.md").write_text(SPACE, encoding="utf-8")
    console.say("docs/: the pages of the documentation")
    pages.build_pages(folder / "docs")
    files = [path for path in folder.rglob("*") if path.is_file()]
    console.say(f"{folder}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.0f} MB")


def _sources() -> Iterator[tuple[Path, str]]:
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".pyi", ".json") and "project" not in path.parts:
            yield path, path.relative_to(PACKAGE.parent).as_posix()
    for name in LIBRARIES:
        for file in sorted(distribution(name).files or []):
            if file.suffix == ".py":
                yield Path(str(file.locate())), file.as_posix()


def _licenses(runtime: Path) -> Iterator[str]:
    """Whose work the site carries, and on which terms."""
    about = json.loads((runtime / "package.json").read_text(encoding="utf-8"))
    yield (HERE.parent / "LICENSE").read_text(encoding="utf-8")
    yield f"pyodide {about['version']}: {about['license']}, {about['homepage']}"
    yield "CPython, which Pyodide holds: PSF-2.0, https://docs.python.org/3/license.html"
    for name in (*LIBRARIES, "mkdocs-material"):
        package = distribution(name)
        texts = [file for file in package.files or [] if "LICEN" in file.name.upper() and ".dist-info" in str(file)]
        kind = package.metadata.get("License-Expression") or package.metadata.get("License") or ""
        yield f"{name} {package.version} {kind}"
        yield from (Path(str(file.locate())).read_text(encoding="utf-8") for file in texts)


def _page(folder: Path) -> str:
    scripts = b"".join((folder / name).read_bytes() for name in (*SCRIPTS, "planner.zip"))
    fetched = [folder / "planner.zip", *(folder / "pyodide" / name for name in FETCHED)]
    fields = {field.name: _field(field) for field in browser.form()}
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        policy=POLICY,
        style=html_page.STYLE + (HERE / "page.css").read_text(encoding="utf-8"),
        build=hashlib.sha256(scripts).hexdigest()[:12],
        bytes=sum(path.stat().st_size for path in fetched),
        example=escape(json.dumps(browser.EXAMPLE)),
        main_fields="\n".join(fields.pop(name) for name in MAIN),
        more_fields="\n".join(fields.values()),
    )


def _field(field: Input) -> str:
    """A field with its label; its title says what it does."""
    given = f'id="{field.name}" name="{field.name}" data-default="{escape(field.default)}" title="{escape(field.help)}"'
    label = f'<label for="{field.name}">{escape(field.label)}</label>'
    if field.name == "gpus":
        cards = _options([(card, card.replace("-", " ").replace("GB", " GB")) for card in browser.cards()])
        count = '<input name="count" data-default="" inputmode="numeric" aria-label="How many">'
        both = f"{count}<span>x</span><select {given}>{cards}</select>"
        return f'<div class="broad">{label}<div class="gpus">{both}</div></div>'
    if field.name == "model":
        groups = (
            f'<optgroup label="{owner}">{_options([(name, name.partition("/")[2]) for name in names])}</optgroup>'
            for owner, names in browser.models().items()
        )
        return f'<div class="broad">{label}<select {given}>{"".join(groups)}</select></div>'
    if field.flag.is_switch:
        return f'<div class="switch"><input type="checkbox" {given}>{label}</div>'
    if field.choices:
        usual = [] if field.default else [("", "usual")]
        choices = _options([*usual, *((choice, choice) for choice in field.choices)])
        style = ' class="broad"' if max(map(len, field.choices)) > LONG else ""
        return f"<div{style}>{label}<select {given}>{choices}</select></div>"
    empty = EMPTY.get(field.name, "usual")
    return f'<div>{label}<input inputmode="{field.keys}" placeholder="{empty}" {given}></div>'


def _options(choices: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in choices)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    build(parser.parse_args().folder)
