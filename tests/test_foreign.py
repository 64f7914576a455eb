"""Files of folders that somebody else made: what is opened, and what is refused."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_fsdp import untrusted_files
from accel_fsdp.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "a.json").write_text('{"secret": 1}')
    return tmp_path / "folder"


def test_plain_files_and_links_inside_are_read(folder: Path, tmp_path: Path) -> None:
    (folder / "a.json").write_text('{"a": 1, "a": 2, "max": 1000000000000000019884624838656, "odd": NaN}')
    (folder / "inner" / "b.json").symlink_to("../a.json")
    (tmp_path / "named").symlink_to(folder)
    for path in (folder / "a.json", tmp_path / "named" / "a.json"):
        assert untrusted_files.read_json(path)["a"] == 2
    assert untrusted_files.read_json(folder / "inner" / "b.json", within=folder)
    with pytest.raises(UserError, match="outside of its folder"):
        untrusted_files.read_json(folder / "inner" / "b.json")
    assert untrusted_files.read_json(folder / "none.json") == {}
    assert untrusted_files.read_json(folder / "a.json" / "none.json") == {}
    untrusted_files.copy(folder / "inner" / "b.json", tmp_path / "copy", within=folder)
    assert (tmp_path / "copy").read_text() == (folder / "a.json").read_text()
    assert not (tmp_path / "copy").is_symlink()


def test_the_hubs_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "repo" / "snapshots" / "1"
    (snapshot / "inner").mkdir(parents=True)
    (tmp_path / "repo" / "blobs").mkdir()
    (tmp_path / "repo" / "blobs" / "f00").write_text("{}")
    (tmp_path / "repo" / "config.json").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/f00")
    (snapshot / "inner" / "config.json").symlink_to("../../../blobs/f00")
    (snapshot / "other.json").symlink_to("../../config.json")
    assert untrusted_files.read_json(snapshot / "config.json") == {}
    assert untrusted_files.read_json(snapshot / "inner" / "config.json", within=snapshot) == {}
    with pytest.raises(UserError, match="outside of its folder"):
        untrusted_files.read_json(snapshot / "other.json")


def _through_folder(path: Path) -> None:
    (path.parent / "linked").symlink_to("../secrets")
    path.symlink_to("linked/a.json")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix_socket:
        here = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            unix_socket.bind(path.name)
        finally:
            os.chdir(here)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("../secret.json"), "is a link to .*secret.json, outside"),
        (lambda path: path.symlink_to("/proc/self/environ"), "is a link to /proc/.*, outside"),
        (lambda path: path.symlink_to("/dev/zero"), "is a link to /dev/zero, outside"),
        (_through_folder, "is a link to .*secrets/a.json, outside"),
        (lambda path: os.mkfifo(path), "can't be read: it is not a file"),
        (_socket, "can't be read: it is not a file"),
        (lambda path: path.mkdir(), "can't be read: it is not a file"),
        (lambda path: path.symlink_to(path), "can't be read: "),
        (lambda path: path.write_text("[1]"), "is damaged: a mapping is expected"),
        (lambda path: path.write_text('{"a": '), "is damaged or cut short: no JSON"),
        (lambda path: path.write_bytes(b'{"a": "\xff"}'), "is damaged: no text|is damaged or cut short: no JSON"),
        (lambda path: path.write_text('{"a": ' + "[" * 200_000), "is damaged or cut short: no JSON"),
    ],
    ids=range(12),
)
def test_other_files_are_refused(make: Callable[[Path], None], message: str, folder: Path, tmp_path: Path) -> None:
    make(folder / "a.json")
    with pytest.raises(UserError, match=message):
        untrusted_files.read_json(folder / "a.json")
    if "damaged" not in message:
        with pytest.raises(UserError, match=message):
            untrusted_files.copy(folder / "a.json", tmp_path / "copy")
        assert not (tmp_path / "copy").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_of_others(folder: Path) -> None:
    (folder / "a.json").write_text("{}")
    (folder / "a.json").chmod(0)
    with pytest.raises(UserError, match="can't be read: Permission denied"):
        untrusted_files.read_json(folder / "a.json")
