"""`accel-fsdp check --format`: what GitHub and readers of SARIF make of the findings."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from checking import V2
from conftest import here
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft4Validator

from accel_fsdp.linter import formats
from accel_fsdp.linter.rules import RULES, Finding

SCHEMA = json.loads((Path(__file__).parent / "sarif-2.1.0-rtm.5.json").read_text())
"""The schema that OASIS publishes for SARIF 2.1.0, as the npm package @microsoft/jest-sarif ships it."""
BAD = V2 + "  fsdp_ofload_params: true\n"
KEYS = ["file", "key", "what", "why", "fix", "code", "severity", "line", "column", "fixable"]
COMMAND = re.compile(r"::(error|warning|notice) (.*?)::(.*)")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a faultless file, a faulty one and one that is no YAML."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "good.yaml").write_text(V2)
    (tmp_path / "configs" / "bad, 50%.yaml").write_text(BAD)
    (tmp_path / "broken.yaml").write_text("a: [\n")
    return tmp_path


def read_back(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as the runner of GitHub Actions reads it."""
    match = COMMAND.fullmatch(line)
    assert match, line
    properties = dict(word.split("=", 1) for word in match[2].split(","))
    for code, letter in {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}.items():
        properties = {name: value.replace(code, letter) for name, value in properties.items()}
    message = match[3].replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")
    return match[1], properties, message


def annotations(*words: str, code: int) -> list[tuple[str, dict[str, str], str]]:
    finished = here("check", "--format", "github", *words)
    assert finished.code == code
    return [read_back(line) for line in finished.printed.splitlines()]


def sarif(*words: str, code: int) -> Any:
    """The run of a valid log."""
    finished = here("check", "--format", "sarif", *words)
    assert finished.code == code
    log = json.loads(finished.printed)
    assert [error.message for error in Draft4Validator(SCHEMA).iter_errors(log)] == []
    (run,) = log["runs"]
    return run


def place_of(result: Any) -> tuple[str, int | None, int | None]:
    place = result["locations"][0]["physicalLocation"]
    region = place.get("region", {})
    return unquote(place["artifactLocation"]["uri"]), region.get("startLine"), region.get("startColumn")


def test_github_gets_an_annotation_per_finding(repository: Path) -> None:
    """Unreadable files and inputs have one too; the job may work in a folder inside of the repository."""
    (repository / "configs" / "bad, 50%.yaml").write_text(BAD.replace("ofload", "ofload%0A"))
    of_file, of_broken = annotations("broken.yaml", "configs/good.yaml", "configs/bad, 50%.yaml", code=2)
    assert of_file[:2] == ("error", {"file": "configs/bad, 50%.yaml", "line": "8", "col": "3", "title": "AF103"})
    what, why, fix = of_file[2].splitlines()
    assert what.startswith("nothing reads fsdp_ofload%0A_params.")
    assert (why.partition(":")[0], fix.partition(":")[0]) == ("why", "fix")
    assert [of_broken[1][key] for key in ("file", "line", "title")] == ["broken.yaml", "2", "unreadable"]
    ((_, properties, message),) = annotations("--args", "nowhere", "configs/good.yaml", code=2)
    assert (properties, "nowhere" in message) == ({"title": "unreadable"}, True)


def test_paths_are_those_of_the_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of GitHub may work in a folder inside; the repository's is in a variable."""
    monkeypatch.chdir(repository / "configs")
    (result,) = sarif(str(repository / "broken.yaml"), code=2)["results"]
    assert place_of(result)[0] == (repository / "broken.yaml").as_uri()  # a file outside has its whole address
    monkeypatch.setenv("GITHUB_WORKSPACE", str(repository))
    ((_, properties, message),) = annotations("bad, 50%.yaml", code=1)
    assert (properties["file"], properties["line"]) == ("configs/bad, 50%.yaml", "8")
    assert "(--fix does it)" in message


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda name: name != "-")


@given(name=NAMES, what=st.text(), line=st.integers(1, 999), severity=st.sampled_from(["error", "warning", "note"]))
def test_a_workflow_command_is_one_line_that_reads_back(name: str, what: str, line: int, severity: Any) -> None:
    command = formats.annotation(name, Finding("", what, "w", "f", code="AF101", severity=severity, line=line))
    assert not set("\r\n") & set(command)
    kind, properties, message = read_back(command)
    assert kind == {"note": "notice"}.get(severity, severity)
    assert Path(properties["file"]) == Path(name)
    assert (properties["line"], properties["title"]) == (str(line), "AF101")
    assert message == f"{what}\nwhy: w\nfix: f"


def test_sarif_says_where(repository: Path) -> None:
    (repository / "noted.yaml").write_text("num_processes: 2\nfsdp_config: {fsdp_version: 2, fsdp_ofload_params: no}\n")
    run = sarif("broken.yaml", "noted.yaml", "configs/bad, 50%.yaml", "configs/good.yaml", code=2)
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [*sorted(RULES), "unreadable"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    assert {
        ("AF103", "configs/bad, 50%.yaml", 8, 3),
        ("AF103", "noted.yaml", 2, 32),
        ("AF101", "noted.yaml", 1, None),  # about the whole file
        ("unreadable", "broken.yaml", 2, 1),
    } <= {(result["ruleId"], *place_of(result)) for result in run["results"]}
    (misspelt,) = (result for result in run["results"] if place_of(result)[0].endswith("%.yaml"))
    assert misspelt["level"] == "error"
    assert re.search(r"fsdp_ofload_params.*\nwhy: .*\nfix: .*", misspelt["message"]["text"])


@pytest.mark.parametrize(
    ("text", "code"),
    [(V2, 0), ("", 2), ("a: [", 2), (BAD, 1), ("num_processes: 0\n", 1), ("- 1\n", 2), ("distributed_type: FSPD\n", 1)],
)
@pytest.mark.parametrize("name", ["plain.yaml", "with: a colon.yaml", "größe#1?.yaml"])
def test_sarif_is_valid_for_any_file(text: str, code: int, name: str, repository: Path) -> None:
    (repository / name).write_text(text)
    assert {place_of(result)[0] for result in sarif(name, code=code)["results"]} <= {name}


def test_json_is_short_for_its_format(repository: Path) -> None:
    flags = (["--json"], ["--format", "json"], ["--json", "--format", "json"])
    short, *others = (json.loads(here("check", *words, "configs/bad, 50%.yaml").printed) for words in flags)
    assert (list(short[0]), others) == (KEYS, [short, short])


@pytest.mark.parametrize("words", [["-"], []])
def test_an_editors_text_has_the_name_of_its_file(
    words: list[str], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file itself, which is faultless, is as it was saved last; without a name stdin has no place."""
    named = ["--stdin-filename", "configs/good.yaml", *words]

    def pipe() -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))

    pipe()
    finished = here("check", *named)
    assert (finished.code, finished.printed.partition(": ")[0]) == (1, "configs/good.yaml:8")
    pipe()
    (result,) = sarif(*named, code=1)["results"]
    assert place_of(result) == ("configs/good.yaml", 8, 3)
    pipe()
    (result,) = sarif("-", code=1)["results"]
    assert (result["ruleId"], "locations" in result) == ("AF103", False)
