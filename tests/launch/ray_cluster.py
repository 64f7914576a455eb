"""A cluster of Ray's on this machine, in a process of its own: `python ray_cluster.py`, then words on stdin.

`add` and `remove` are about a node beside the head; each is answered with a line. At the end of stdin all is shut down.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
from conftest import ROOT

RANKS = 2
"""Of each node, with a CPU and what Ray takes for a GPU each: it believes what it is told."""
NODE = {"num_cpus": RANKS, "num_gpus": RANKS, "object_store_memory": 80 << 20}
SECOND_ADDRESS = "127.0.0.2"
"""Of the node that comes and goes: Ray counts ranks of a machine by its address."""
SECONDS = 60
HASTE = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "2",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
"""A lost node is noticed after a second instead of a quarter of a minute, a failed worker at once."""


def missing() -> str:
    """Why there can be none here; empty where there can."""
    return "" if find_spec("ray") else "ray isn't installed: pip install 'accel-fsdp[ray]'"


class Cluster:
    """Two nodes; one of them may be lost, and another one come."""

    def __init__(self) -> None:
        self.left: list[list[str]] = []
        """Commands of what was still running when the cluster had been shut down."""
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short name: sockets are in it
        self.environment = {**os.environ, **HASTE, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.folder)}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **self.environment,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
            },
            start_new_session=True,
        )
        try:
            self.environment["RAY_ADDRESS"] = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, word: str) -> None:
        """Adds or removes the second node."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._answer() == word

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return str(json.loads(line)["done"])
        raise AssertionError("the cluster has ended")

    def close(self) -> None:
        """Shuts all of it down and removes its folder."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=SECONDS)
        self.left = [process.cmdline() for process in processes(self.folder)]
        for process in processes(self.folder):
            process.kill()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def processes(folder: Path) -> list[psutil.Process]:
    """Those that have a cluster's folder in their command line or environment."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in f"{process.cmdline()} {process.environ()}":
                processes.append(process)
    return processes


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    nodes = Cluster()
    try:
        yield nodes
    finally:
        nodes.close()


def serve() -> None:
    """What the process does."""
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes(True, head_node_args={**NODE, "include_dashboard": False})
    second = nodes.add_node(**NODE, node_ip_address=SECOND_ADDRESS)
    _tell(nodes.address)
    for line in sys.stdin:
        if line.strip() == "add":
            second = nodes.add_node(**NODE, node_ip_address=SECOND_ADDRESS)
        else:
            nodes.remove_node(second, allow_graceful=False)
        _tell(line.strip())
    nodes.shutdown()


def _tell(done: str) -> None:
    print(json.dumps({"done": done}), flush=True)


if __name__ == "__main__":
    serve()
