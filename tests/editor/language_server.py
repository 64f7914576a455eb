"""An editor's side of the Language Server Protocol, with the YAML server that editors run."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import npm

HERE = Path(__file__).parent
CAN = {
    "textDocument": {
        "publishDiagnostics": {},
        "completion": {"completionItem": {"documentationFormat": ["markdown"]}},
        "hover": {"contentFormat": ["markdown"]},
    },
    "workspace": {"configuration": True},
}
SETTINGS = {"yaml": {"validate": True, "completion": True, "hover": True, "schemaStore": {"enable": False}}}


class Editor:
    """Speaks JSON-RPC with a language server over its pipes."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._server = server
        self._number = 0
        self._told: dict[str, list[Any]] = {}

    def request(self, method: str, **parameters: Any) -> Any:
        """The server's answer."""
        self._number += 1
        self._send(id=self._number, method=method, params=parameters)
        while (message := self._next()).get("id") != self._number or "method" in message:
            pass
        return message["result"]

    def notify(self, method: str, **parameters: Any) -> None:
        """Tells the server something."""
        self._send(method=method, params=parameters)

    def open(self, path: Path) -> list[dict[str, Any]]:
        """Opens a file; the diagnostics that the editor would underline."""
        uri = path.as_uri()
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": path.read_text()}
        self._told.pop(uri, None)
        self.notify("textDocument/didOpen", textDocument=document)
        while uri not in self._told:
            self._next()
        return self._told[uri]

    def at(self, method: str, path: Path, line: int, column: int) -> Any:
        """What the server says of a place, counted from 1: `completion` or `hover`."""
        place = {"line": line - 1, "character": column - 1}
        return self.request(f"textDocument/{method}", textDocument={"uri": path.as_uri()}, position=place)

    def _next(self) -> dict[str, Any]:
        """The next message, after an answer to what the server asks of an editor."""
        assert self._server.stdout
        headers = iter(self._server.stdout.readline, b"\r\n")
        lengths = [int(line.split(b":")[1]) for line in headers if line.lower().startswith(b"content-length")]
        message: dict[str, Any] = json.loads(self._server.stdout.read(lengths[0]))
        if message.get("method") == "textDocument/publishDiagnostics":
            self._told[message["params"]["uri"]] = message["params"]["diagnostics"]
        elif "method" in message and "id" in message:
            items = message.get("params", {}).get("items", [])
            wanted = [SETTINGS.get(item.get("section"), {}) for item in items]
            self._send(id=message["id"], result=wanted if message["method"] == "workspace/configuration" else None)
        return message

    def _send(self, **message: Any) -> None:
        assert self._server.stdin
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        self._server.stdin.flush()


@contextmanager
def editor(folder: Path) -> Iterator[Editor]:
    """An editor with a folder open."""
    node = shutil.which("node")
    assert node
    program = npm.installed(HERE) / "yaml-language-server" / "bin" / "yaml-language-server"
    with subprocess.Popen([node, program, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            opened = Editor(server)
            opened.request("initialize", processId=None, rootUri=folder.as_uri(), capabilities=CAN)
            opened.notify("initialized")
            opened.notify("workspace/didChangeConfiguration", settings=SETTINGS)
            yield opened
        finally:
            server.kill()
