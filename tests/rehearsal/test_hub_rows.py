"""Rows of a data set on the hub: from a small hub on this machine, from a cache, and made up where there is neither."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT

from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.job import Layout
from accel_fsdp.rehearsal import hub_rows, prepare
from accel_fsdp.rehearsal.job import Rehearsed

COMMIT = "1" * 40
ROWS = [{"question": f"Q{number} " * 40, "answer": "A" * (1 + number % 5)} for number in range(80)]


class Hub(BaseHTTPRequestHandler):
    """What a hub answers for `me/chats`, which is public, and for names that it doesn't know."""

    files: ClassVar = {
        "data/train_sft-00000-of-00001.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    }
    silent: ClassVar = False

    def log_message(self, *words: Any) -> None:
        """Nothing: the test's output stays its own."""

    def answer(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        with suppress(ConnectionError):  # who asked was ended meanwhile
            self.end_headers()
            self.wfile.write(body if self.command != "HEAD" else b"")

    def do_GET(self) -> None:
        while Hub.silent:
            time.sleep(0.1)
        path = unquote(urlsplit(self.path).path)
        if "/me/chats" not in path:
            self.answer(b"{}", 401, X_Error_Code="RepoNotFound")
        elif path.startswith("/api/datasets/me/chats/tree/"):
            self.listed(path.partition("/tree/")[2].partition("/")[2])
        elif path.startswith("/api/"):
            info = {"id": "me/chats", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            self.answer(json.dumps({**info, "tags": [], "downloads": 0, "likes": 0, "private": False}).encode())
        else:
            self.file(re.sub(r".*/resolve/[^/]*/", "", path))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.listed("")

    def listed(self, folder: str) -> None:
        """What is in a folder; at the top that is the folder of the files."""
        entries: list[dict[str, Any]] = [{"type": "directory", "oid": COMMIT, "size": 0, "path": "data"}]
        if folder == "data":
            entries = [
                {"type": "file", "oid": COMMIT, "size": len(body), "path": name} for name, body in self.files.items()
            ]
        self.answer(json.dumps(entries).encode())

    def file(self, name: str) -> None:
        body = self.files.get(name)
        if body is None:
            self.answer(b"", 404, X_Error_Code="EntryNotFound")
            return
        common = {"X_Repo_Commit": COMMIT, "ETag": '"1"', "Accept_Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.answer(body, **common)
            return
        start, end = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
        part = body[start : end + 1]
        self.answer(part, 206, Content_Range=f"bytes {start}-{end}/{len(body)}", **common)


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
    why = hub_rows.fetch(Rehearsed(folder, folder), name, split, None, folder / "rows")
    lines = [line for file in folder.glob("rows/data/*.jsonl") for line in file.read_text().splitlines()]
    return why, [json.loads(line) for line in lines]


def test_the_first_rows_are_streamed(hub: str, tmp_path: Path) -> None:
    assert fetched(tmp_path / "there", "me/chats") == ("", ROWS[:64])


def test_what_the_hub_refuses(hub: str, tmp_path: Path) -> None:
    why, rows = fetched(tmp_path / "none", "me/diary")
    assert (why, rows) == ("Dataset 'me/diary' doesn't exist on the Hub or cannot be accessed.", [])
    with pytest.raises(UserError, match="no split train"):
        fetched(tmp_path / "split", "me/chats", "train")


@pytest.mark.slow
def test_why_there_are_none(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "silent", True)
    monkeypatch.setattr(hub_rows, "SECONDS", 3)
    assert fetched(tmp_path / "a", "me/chats") == ("the hub gave none in 3 seconds", [])
    monkeypatch.setattr(Hub, "silent", False)
    monkeypatch.setattr(hub_rows, "SECONDS", 60)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "OfflineModeIsEnabled" in fetched(tmp_path / "c", "me/chats")[0]


WORDS = ("--dataset_train_split", "train_sft", "--columns", "prompt=question", "completion=answer", "--seed", "7")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "me/chats",
            "as me/chats can't be read: Couldn't reach 'me/chats' on the Hub (OfflineModeIsEnabled)",
        ),
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
