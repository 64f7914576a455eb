"""A real S3 server in the test's process, which can be stopped and started again, be slow, and refuse."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from s3fs import S3FileSystem

ERRORS = {
    "SlowDown": ("503 Slow Down", "Please reduce your request rate."),
    "InvalidAccessKeyId": ("403 Forbidden", "The AWS Access Key Id you provided does not exist in our records."),
}
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "not-to-be-shown", "AWS_DEFAULT_REGION": "us-east-1"}


class S3:
    """What it holds outlives its stops. `asked` has method and path of each request; `refuses` says with which error of
    Amazon's one is refused, or an empty text; `seconds` is how long each takes.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.seconds, self.port = 0.0, 0
        self.refuses: Callable[[str, str], str] = lambda method, path: ""
        moto = pytest.importorskip("moto.server", reason="the server comes with the nightly extra")
        self._app: Any = moto.DomainDispatcherApplication(moto.create_backend_app)
        self._server: Any = None
        self.start()
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def start(self) -> None:
        from werkzeug.serving import make_server

        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self.port = self._server.port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"])

    def _answer(self, request: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = request["REQUEST_METHOD"], request["PATH_INFO"]
        self.asked.append((method, path))
        time.sleep(self.seconds)
        if code := self.refuses(method, path):
            status, message = ERRORS[code]
            text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
            return [text]
        answer: Iterable[bytes] = self._app(request, start_response)
        return answer

    def names(self, bucket: str) -> dict[str, int]:
        """All that a bucket holds, with sizes, as Amazon's own library sees it."""
        return {item["Key"]: item["Size"] for item in self._client().list_objects_v2(Bucket=bucket).get("Contents", ())}

    def read(self, bucket: str, name: str) -> bytes:
        content: bytes = self._client().get_object(Bucket=bucket, Key=name)["Body"].read()
        return content

    def write(self, bucket: str, name: str, content: bytes) -> None:
        self._client().put_object(Bucket=bucket, Key=name, Body=content)

    def make(self, bucket: str) -> str:
        """Makes a bucket; the URI of a run in it."""
        self._client().create_bucket(Bucket=bucket)
        return f"s3://{bucket}/runs/first"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = pytest.importorskip("moto.moto_api._internal", reason="the server comes with the nightly extra")
    moto.moto_api_backend.reset()
    S3FileSystem.clear_instance_cache()  # they hold the address of a server that is gone
    server = S3()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    with contextlib.suppress(OSError):
        server.stop()
    os.environ.pop("AWS_ENDPOINT_URL", None)
