"""`accel-fsdp docs`: the pages in a pipe and in a terminal."""

import re

import pytest
from conftest import ROOT

from accel_fsdp import cli, console
from accel_fsdp.errors import UsageError

PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


def test_a_piped_page_is_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in PAGES.items():
        assert cli.call(["docs", name]) == 0
        assert capsys.readouterr() == (text, "")
    assert cli.call(["docs", "check.md"]) == 0
    assert capsys.readouterr().out == PAGES["check"]


def test_the_topics_are_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(PAGES)
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        text.partition("\n")[0].removeprefix("# ").replace("`", "") for text in PAGES.values()
    ]


def test_a_terminal_gets_a_page_laid_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "data", console.Stdout(force_terminal=True, width=100, highlight=False, emoji=False))
    assert cli.call(["docs", "check"]) == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "Check: accel-fsdp check" in shown
    assert not re.search(r"^#|`", shown, flags=re.MULTILINE)
    assert max(len(line) for line in shown.splitlines()) == 100


@pytest.mark.parametrize(
    ("topic", "message"),
    [("chek", "there is no page about chek. Did you mean check?"), ("../README", "there is no page about ../README.")],
)
def test_an_unknown_topic_is_refused(topic: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        cli.call(["docs", topic])
