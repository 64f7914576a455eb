"""A real Chromium, offline, on a site that is served from this machine."""

import http.server
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars"),
    "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
SECONDS = 200


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder's files while they are served on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def opened(folder: Path) -> Iterator[Chrome]:
    """A Chromium that reaches this machine alone; `folder` gets downloads, and in `net.json` what it asks for."""
    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    profile = tempfile.mkdtemp(prefix="chromium-")
    for flag in (*FLAGS, f"user-data-dir={profile}", f"log-net-log={folder / 'net.json'}"):
        options.add_argument(f"--{flag}")
    browser = Chrome(options=options, service=ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield browser
    finally:
        browser.quit()
        shutil.rmtree(profile, ignore_errors=True)


def sized(browser: Chrome, width: int, height: int = 900) -> None:
    """Gives the page that width, which a window can't always have."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def until(browser: Chrome, condition: str) -> Any:
    """Waits until some JavaScript is true, and returns what it is."""
    return WebDriverWait(browser, SECONDS, poll_frequency=0.02).until(
        lambda it: it.execute_script(f"return {condition}")
    )


def asked_for(folder: Path, site: str) -> set[str]:
    """The addresses that a site's pages and workers asked for; Chromium, which writes them down, has to be closed."""
    log = json.loads((folder / "net.json").read_text())
    asked = (event["params"] for event in log["events"] if "initiator" in event.get("params", {}))
    return {request["url"] for request in asked if request["initiator"] == site or request["url"].startswith(site)}


def seconds_until(browser: Chrome, condition: str) -> float:
    """How long something takes from now on."""
    start = time.perf_counter()
    until(browser, condition)
    return time.perf_counter() - start
