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
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft4Validator

from accel_fsdp import cli
from accel_fsdp.errors import UsageError
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


def test_github_gets_an_annotation_per_finding(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "configs" / "bad, 50%.yaml").write_text(BAD.replace("ofload", "ofload%0A"))
    words = ["check", "--format", "github", "configs/good.yaml", str(repository / "configs" / "bad, 50%.yaml")]
    assert cli.call(words) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("::error file=configs/bad%2C 50%25.yaml,line=8,col=3,title=AF103::")
    kind, properties, message = read_back(line)
    assert (kind, properties["file"], properties["title"]) == ("error", "configs/bad, 50%.yaml", "AF103")
    assert message.startswith("nothing reads fsdp_ofload%0A_params.")
    assert [text.partition(":")[0] for text in message.splitlines()[1:]] == ["why", "fix"]


def test_github_is_told_of_unreadable_files_too(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["check", "--format", "github", "broken.yaml", "configs/bad, 50%.yaml"]) == 2
    commands = [read_back(line) for line in capsys.readouterr().out.splitlines()]
    assert [tuple(properties[key] for key in ("file", "line", "title")) for _, properties, _ in commands] == [
        ("configs/bad, 50%.yaml", "8", "AF103"),
        ("broken.yaml", "2", "unreadable"),
    ]
    assert cli.call(["check", "--format", "github", "--args", "nowhere", "configs/good.yaml"]) == 2
    _, properties, message = read_back(capsys.readouterr().out.strip())
    assert properties == {"title": "unreadable"}
    assert "nowhere" in message


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


def test_sarif_is_valid_and_says_where(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "noted.yaml").write_text("num_processes: 2\nfsdp_config: {fsdp_version: 2, fsdp_ofload_params: no}\n")
    words = ["broken.yaml", "noted.yaml", "configs/bad, 50%.yaml", "configs/good.yaml"]
    assert cli.call(["check", "--format", "sarif", *words]) == 2
    (run,) = valid(json.loads(capsys.readouterr().out))["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [*sorted(RULES), "unreadable"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    found = {(result["ruleId"], *place_of(result)) for result in run["results"]}
    assert {
        ("AF103", "configs/bad, 50%.yaml", 8, 3),
        ("AF103", "noted.yaml", 2, 32),
        ("AF101", "noted.yaml", 1, None),  # about the whole file
        ("unreadable", "broken.yaml", 2, 1),
    } <= found
    (misspelt,) = (result for result in run["results"] if place_of(result)[0].endswith("%.yaml"))
    assert misspelt["level"] == "error"
    assert re.search(r"fsdp_ofload_params.*\nwhy: .*\nfix: .*", misspelt["message"]["text"])


@pytest.mark.parametrize("text", [V2, "", "a: [", BAD, "num_processes: 0\n", "- 1\n", "distributed_type: FSPD\n"])
@pytest.mark.parametrize("name", ["plain.yaml", "with: a colon.yaml", "größe#1?.yaml"])
def test_sarif_is_valid_for_any_file(
    text: str, name: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / name).write_text(text)
    cli.call(["check", "--format", "sarif", name])
    (run,) = valid(json.loads(capsys.readouterr().out))["runs"]
    assert {place_of(result)[0] for result in run["results"]} <= {name}


def test_a_file_outside_of_the_working_folder_has_its_whole_address(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repository / "configs")
    cli.call(["check", "--format", "sarif", str(repository / "broken.yaml")])
    (run,) = valid(json.loads(capsys.readouterr().out))["runs"]
    assert [place_of(result)[0] for result in run["results"]] == [(repository / "broken.yaml").as_uri()]


def valid(log: Any) -> Any:
    assert [error.message for error in Draft4Validator(SCHEMA).iter_errors(log)] == []
    return log


def place_of(result: Any) -> tuple[str, int | None, int | None]:
    place = result["locations"][0]["physicalLocation"]
    region = place.get("region", {})
    return unquote(place["artifactLocation"]["uri"]), region.get("startLine"), region.get("startColumn")


def test_the_flags_of_the_formats(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is the short form; of two formats neither is taken."""
    outputs = []
    for flags in (["--json"], ["--format", "json"], ["--json", "--format", "json"]):
        assert cli.call(["check", *flags, "configs/bad, 50%.yaml"]) == 1
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1] == outputs[2]
    assert list(outputs[0][0]) == KEYS
    with pytest.raises(UsageError, match="--json and --format text"):
        cli.call(["check", "--json", "--format", "text", "configs/good.yaml"])
    with pytest.raises(UsageError, match="Did you mean sarif"):
        cli.call(["check", "--format", "sarf", "configs/good.yaml"])


def piped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("latin-1"))))


@pytest.mark.parametrize("words", [["-"], []])
def test_an_editors_text_has_the_name_of_its_file(
    words: list[str], repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file itself, which is faultless, is as it was saved last."""
    named = ["check", "--stdin-filename", "configs/good.yaml", *words]
    piped(monkeypatch, BAD)
    assert cli.call(named) == 1
    assert capsys.readouterr().out.startswith("configs/good.yaml:8: error AF103: ")
    piped(monkeypatch, BAD)
    assert cli.call([*named, "--format", "sarif"]) == 1
    (result,) = valid(json.loads(capsys.readouterr().out))["runs"][0]["results"]
    assert place_of(result) == ("configs/good.yaml", 8, 3)


def test_a_name_of_stdin_is_for_stdin_alone() -> None:
    for files in (["a.yaml"], ["a.yaml", "-"]):
        with pytest.raises(UsageError, match=r"--stdin-filename b\.yaml with files"):
            cli.call(["check", "--stdin-filename", "b.yaml", *files])


def test_stdin_is_no_file_of_the_repository(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, BAD)
    assert cli.call(["check", "--format", "sarif", "-"]) == 1
    (result,) = valid(json.loads(capsys.readouterr().out))["runs"][0]["results"]
    assert (result["ruleId"], "locations" in result) == ("AF103", False)


def test_paths_are_those_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job of GitHub may work in a folder inside; the repository's is in a variable."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_verion: 2\n")
    monkeypatch.chdir(tmp_path / "configs")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    cli.call(["check", "--format", "github", "fsdp.yaml"])
    told = capfd.readouterr().out
    assert "::error file=configs/fsdp.yaml,line=3" in told
    assert "(--fix does it)" in told
