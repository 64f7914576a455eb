"""Rows of a data set on the hub: from a small hub on this machine, from a cache, and made up where there is neither."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from conftest import ROOT

from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.job import Layout
from accel_fsdp.rehearsal import prepare, rows
from accel_fsdp.rehearsal.job import Rehearsed


class Hub(BaseHTTPRequestHandler):
    """Knows no data set; while it is silent it doesn't even say that."""

    silent: ClassVar = False

    def log_message(self, *words: Any) -> None:
        """Nothing: the test's output stays its own."""

    def do_GET(self) -> None:
        while Hub.silent:
            time.sleep(0.1)
        with suppress(ConnectionError):  # who asked was ended meanwhile
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_POST = do_GET


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    for name, value in {"HF_ENDPOINT": place, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    yield place
    server.shutdown()
    server.server_close()


def fetched(folder: Path, name: str, split: str = "train_sft") -> tuple[str, list[Any]]:
    """Why there are none, and the rows."""
    folder.mkdir()
    why = rows.of_hub(Rehearsed(folder, folder), name, split, None, folder / "rows")
    lines = [line for file in folder.glob("rows/data/*.jsonl") for line in file.read_text().splitlines()]
    return why, [json.loads(line) for line in lines]


def test_the_first_rows_are_streamed(tmp_path: Path) -> None:
    """Of a folder, which datasets streams as it does a data set of the hub."""
    (folder := tmp_path / "chats").mkdir()
    (folder / "train_sft.jsonl").write_text("".join(json.dumps({"question": n}) + "\n" for n in range(80)))
    why, read = fetched(tmp_path / "there", str(folder), "train")
    assert (why, [row["question"] for row in read]) == ("", [*range(64)])
    with pytest.raises(UserError, match="no split validation"):
        fetched(tmp_path / "split", str(folder), "validation")


def test_what_the_hub_refuses(hub: str, tmp_path: Path) -> None:
    why, read = fetched(tmp_path / "none", "me/diary")
    assert (why, read) == ("Dataset 'me/diary' doesn't exist on the Hub or cannot be accessed.", [])


@pytest.mark.slow
def test_why_there_are_none(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "silent", True)
    monkeypatch.setattr("accel_fsdp.rehearsal.rows.HUB_SECONDS", 3)
    assert fetched(tmp_path / "a", "me/chats") == ("the hub gave none in 3 seconds", [])
    monkeypatch.setattr(Hub, "silent", False)
    monkeypatch.setattr("accel_fsdp.rehearsal.rows.HUB_SECONDS", 60)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "OfflineModeIsEnabled" in fetched(tmp_path / "c", "me/chats")[0]


WORDS = ("--dataset_train_split", "train_sft", "--columns", "prompt=question", "completion=answer", "--seed", "7")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("me/chats", "as me/chats can't be read: Couldn't reach 'me/chats' on the Hub (OfflineModeIsEnabled)"),
        ("/data/me/chats", "as /data/me/chats isn't here: /data/me/chats"),
        ("chats.jsonl", f"as chats.jsonl isn't here: {ROOT / 'chats.jsonl'}"),
    ],
)
def test_made_up_rows_need_no_columns(name: str, message: str, tiny_model: Path, tmp_path: Path) -> None:
    words = ("--dataset_name", name, *WORDS)
    alone = Layout.alone()
    prepared = prepare.prepare(JobConfig({}), str(tiny_model), words, Rehearsed(tmp_path, tmp_path), alone, alone)
    assert prepared.sentence.endswith(f"; tokenizer real, rows made up, {message}")
    assert prepared.run.kept == ("--dataset_train_split", "train_sft", "--seed", "7")
    assert [file.name for file in prepared.rows.rglob("*.jsonl")] == ["train_sft-00000-of-00001.jsonl"]
