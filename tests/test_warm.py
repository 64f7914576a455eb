"""The server of warm processes keeps nothing of a program that isn't started."""

import os
import select
import socket

import pytest
import warm
from conftest import warm_python


@pytest.mark.parametrize("asked", [b'[[], {}, "/", []]', b"no JSON", b"[1,", b""])
def test_files_of_a_program_that_is_not_started_are_closed(asked: bytes) -> None:
    """Whoever reads a killed stub's output would wait for its end forever."""
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as stub:
        stub.connect(warm_python()["WARM_SOCKET"])
        socket.send_fds(stub, [max(len(asked), 1).to_bytes(warm.LENGTH, "big")], [writing])
        stub.sendall(asked)
    os.close(writing)
    assert select.select([reading], [], [], 60)[0], "the server holds the file"
    assert os.read(reading, 1) == b""
    os.close(reading)
