"""Builds the planner's page, which runs this package in the browser, and the pages of docs/ beside it: `make site`.

`python web/build.py FOLDER`: the folder is a whole site for any static host. It has the page, Pyodide from npm at the
version and the hash of `package-lock.json`, and this package with the few pure Python libraries that planning needs, as
they are installed here (constraints.txt). A browser that has the page loads nothing from elsewhere.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from html import escape
from importlib.metadata import distribution
from pathlib import Path
from string import Template

import npm
import pages

from accel_fsdp import html_page
from accel_fsdp.planner import browser
from accel_fsdp.planner.browser import Input

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "accel_fsdp"
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
LIBRARIES = (
    *("rich", "ruamel.yaml", "PyYAML", "tyro", "docstring_parser", "typing_extensions", "lazy-loader", "packaging"),
    "typeguard",
)
"""What planning imports. PyYAML does without its compiled half."""
SCRIPTS = ("page.js", "worker.js")
LOADED = ("planner.memory", "rest.zip")
PACKED = (*LOADED, "planner.zip")
"""What `pack.mjs` makes; the last is for browsers that can't load the first."""
MAIN = ("model", "gpus", "nodes", "seq-len", "method", "global-batch")
EMPTY = {
    "nodes": "1",
    "seq-len": "2048",
    "global-batch": "any",
    "batch": "searched",
    "tokens": "not said",
    "price": "not said",
}
"""What an empty field says."""
TYPED = {
    "number": 'type="number" min="1" step="1" inputmode="numeric"',
    "amount": 'type="number" min="0" step="any" inputmode="decimal"',
    "text": 'type="text"',
}
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


def build(folder: Path, models: Sequence[str]) -> None:
    """Writes the site, in place of an older one; a folder with anything else in it stays as it is.

    The page has tables for `models`, which are some of the catalogue's.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyodide").is_dir():
        raise SystemExit(f"{folder} is no site, and would be removed: name an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pyodide").mkdir(parents=True)
    runtime = npm.installed(HERE) / "pyodide"
    for name in RUNTIME:
        shutil.copy(runtime / name, folder / "pyodide")
    for name in SCRIPTS:
        shutil.copy(HERE / name, folder)
    _pack(folder, models)
    pages.build_pages(folder / "docs")
    (folder / "LICENSES.txt").write_text("\n\n".join(_licenses(runtime)), encoding="utf-8")
    (folder / "README.md").write_text(SPACE, encoding="utf-8")
    (folder / "index.html").write_text(_page(folder), encoding="utf-8")


def _pack(folder: Path, models: Sequence[str]) -> None:
    """This package and what it imports, compiled; and tables that the same files make, without torch as in browsers."""
    with tempfile.TemporaryDirectory() as place:
        packages, sources = Path(place) / "packages", Path(place) / "sources.zip"
        with zipfile.ZipFile(sources, "w") as archive:
            for path, name in _sources():
                archive.write(path, name)
            archive.extractall(packages)
        _tabulate(folder / "plans", packages, models)
        question = json.dumps(browser.EXAMPLE)
        subprocess.run(["node", "pack.mjs", sources, folder.resolve(), question], cwd=HERE, check=True)


def _tabulate(folder: Path, packages: Path, models: Sequence[str]) -> None:
    """A file of tables for each model, made on all cores; -S hides what else is installed here."""
    folder.mkdir()
    cores = os.cpu_count() or 1
    made = [
        subprocess.Popen(
            [sys.executable, "-S", HERE / "tables.py", folder, *models[number::cores]],
            env={**os.environ, "PYTHONPATH": str(packages)},
        )
        for number in range(min(cores, len(models)))
    ]
    codes = [process.wait() for process in made]
    if any(codes):
        raise SystemExit("a table could not be made: the error is above")


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
        found = distribution(name)
        texts = [file for file in found.files or [] if "LICEN" in file.name.upper() and ".dist-info" in str(file)]
        kind = found.metadata.get("License-Expression") or found.metadata.get("License") or ""
        yield f"{name} {found.version} {kind}"
        yield from (Path(str(file.locate())).read_text(encoding="utf-8") for file in texts)


def _page(folder: Path) -> str:
    loaded = [folder / name for name in LOADED] + [folder / "pyodide" / name for name in RUNTIME]
    scripts = b"".join((folder / name).read_bytes() for name in (*SCRIPTS, *PACKED))
    fields = {field.name: _field(field) for field in browser.form()}
    messages = [json.loads(message) for message in browser.answer(json.dumps(browser.EXAMPLE))]
    plan = next(message["plan"] for message in messages if "plan" in message)
    example = json.dumps({"inputs": browser.EXAMPLE, "plan": plan}).replace("<", "\\u003c")
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        policy=POLICY,
        style=html_page.STYLE + (HERE / "page.css").read_text(encoding="utf-8"),
        build=hashlib.sha256(scripts).hexdigest()[:12],
        bytes=sum(path.stat().st_size for path in loaded if "pyodide-lock" not in path.name),
        main_fields='<div class="grid main">' + "\n".join(fields.pop(name) for name in MAIN) + "</div>",
        more_fields="\n".join(fields.values()),
        example_sections="".join(message.get("section", "") for message in messages),
        example=example,
    )


def _field(one: Input) -> str:
    """A field with its label; what it does stands in its title."""
    given = f'id="{one.name}" name="{one.name}" data-default="{escape(one.default)}" title="{escape(one.help)}"'
    label = f'<label for="{one.name}">{escape(one.label)}</label>'
    if one.name == "gpus":
        return _cards(label, given)
    if one.name == "model":
        groups = "".join(f'<optgroup label="{owner}">{_options(those)}</optgroup>' for owner, those in _models())
        return f'<div class="broad">{label}<select {given}>{groups}</select></div>'
    if one.kind == "switch":
        return f'<div class="switch"><input type="checkbox" {given}>{label}</div>'
    if one.kind == "choice":
        choices = [("", "usual"), *_alike(one.choices)] if not one.default else _alike(one.choices)
        return f"<div>{label}<select {given}>{_options(choices)}</select></div>"
    return f'<div>{label}<input {TYPED[one.kind]} placeholder="{EMPTY.get(one.name, "usual")}" {given}></div>'


def _cards(label: str, given: str) -> str:
    count = (
        '<input type="number" name="count" id="count" data-default="8" min="1" step="1" inputmode="numeric" '
        'aria-label="How many">'
    )
    cards = [(card, card.replace("-", " ").replace("GB", " GB")) for card in browser.cards()]
    label = label.replace('for="gpus"', 'id="of-one" for="count"')
    return (
        f'<div class="broad" role="group" aria-labelledby="of-one">{label}<div class="gpus">{count}'
        f'<span aria-hidden="true">x</span><select {given} aria-label="Kind">{_options(cards)}</select></div></div>'
    )


def _models() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for owner, names in browser.models().items():
        yield owner, [(name, name.partition("/")[2]) for name in names]


def _alike(words: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(word, word) for word in words]


def _options(choices: list[tuple[str, str]]) -> str:
    return "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in choices)


def main() -> None:
    """Builds it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    every = [name for names in browser.models().values() for name in names]
    parser.add_argument("--tables", nargs="*", choices=every, default=every, metavar="MODEL", help="default: all")
    arguments = parser.parse_args()
    build(arguments.folder, arguments.tables)


if __name__ == "__main__":
    main()
