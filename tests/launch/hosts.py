"""Machines of a network on this one: each a network namespace, with a name, an /etc/hosts and processes of its own.

What it takes is root and Linux's `ip`, `nsenter` and `unshare`. Killing a machine's first process is a power cut.
It reads a pipe of the tests, so that a machine ends with them in any case.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import conftest
import psutil
from conftest import ROOT, warm_python

NEEDED = ("ip", "nsenter", "unshare")
NUMBERS = itertools.count()
"""One for each network of this process."""
START = 'ip link set lo up; hostname "$0"; mount --bind "$1" /etc/hosts; exec cat'
NAMESPACES = ("--uts", "--mount", "--pid")


def missing() -> str:
    """Why there can be none here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [name for name in NEEDED if shutil.which(name) is None]:
        return f"no {', '.join(lacking)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], check=False)
    return "unshare is not allowed" if tried.returncode else ""


class Host:
    """One machine, reached by the others as `name`."""

    def __init__(self, name: str, namespace: str, hosts: Path) -> None:
        self.name, self._namespace = name, namespace
        words = ["nsenter", f"--net=/var/run/netns/{namespace}", "unshare", *NAMESPACES, "--fork", "--mount-proc"]
        self._unshare = subprocess.Popen(
            [*words, "bash", "-c", START, name, str(hosts)], stdin=subprocess.PIPE, start_new_session=True
        )
        while not (children := psutil.Process(self._unshare.pid).children()) or children[0].name() != "cat":
            time.sleep(0.01)
        self.first = children[0]
        self.before = ("nsenter", "--target", str(self.first.pid), "--net", *NAMESPACES)

    def start(self, words: Sequence[str | Path], **environment: str) -> "subprocess.Popen[str]":
        """Starts Python with these words there, with the libraries imported already."""
        warm = warm_python()
        return self.run([warm["PYTHON_EXEC"], *words], **{"PYTHONPATH": str(ROOT), **warm, **environment})

    def run(self, words: Sequence[str | Path], **environment: str) -> "subprocess.Popen[str]":
        """Starts a command there."""
        return conftest.start([*self.before, *map(str, words)], {**os.environ, **environment})

    def cut_power(self) -> None:
        """Ends all of its processes at once, which have no other parent than the first; then its system is silent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.first.kill()
        with self._unshare:  # closes the pipe
            pass
        subprocess.run(["ip", "-n", self._namespace, "link", "set", "eth0", "down"], check=False, capture_output=True)


def all_ended(processes: Sequence["subprocess.Popen[str]"], seconds: float) -> list[conftest.Finished]:
    """What started commands printed; each may take so long after the one before."""
    return [conftest.ended(process, seconds) for process in processes]


@contextlib.contextmanager
def network(*names: str) -> Iterator[list[Host]]:
    """Machines of these names, each of which reaches the others by name, over one switch."""
    mark = f"afsdp{os.getpid()}x{next(NUMBERS)}"
    switch, namespaces = f"{mark}s", [f"{mark}n{number}" for number in range(len(names))]
    addresses = [f"10.77.0.{number + 1}" for number in range(len(names))]
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    hosts = folder / "hosts"
    lines = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
    hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
    machines: list[Host] = []
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for number, (name, namespace, address) in enumerate(zip(names, namespaces, addresses, strict=True)):
            _ip(f"netns add {namespace}")
            _ip(f"-n {namespace} link add eth0 type veth peer name port{number} netns {switch}")
            _ip(f"-n {switch} link set port{number} master bridge up")
            _ip(f"-n {namespace} address add {address}/24 dev eth0")
            _ip(f"-n {namespace} link set eth0 up")
            machines.append(Host(name, namespace, hosts))
        yield machines
    finally:
        for machine in machines:
            machine.cut_power()
        for namespace in (*namespaces, switch):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
        shutil.rmtree(folder)


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ip {words}: {done.stderr}")
