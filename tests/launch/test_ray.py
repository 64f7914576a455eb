"""Ray: the driver that `accel-fsdp script ray` writes, on a cluster of two nodes that loses a rank and then a node."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray_cluster
from conftest import SFT, Finished, made_yaml
from reference import Reference, job_words, losses_of, train

from accel_fsdp import cli

pytestmark = pytest.mark.skipif(bool(ray_cluster.missing()), reason=ray_cluster.missing())
STEPS, RANKS, GLOBAL_BATCH = 9, 4, 4
SECONDS = 250
OWN = """
import glob, json, os, signal, sys, time
from accel_fsdp import cpu  # what says that it can do without a GPU
os.setsid()  # Ray ends processes of the worker's own group, too
rank = os.environ["RANK"]
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
with open(f"started-{rank}-{os.getpid()}.json", "w") as file:
    json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], file)
if sys.argv[1] == "wrong" and len(glob.glob("started-*")) > 1:
    sys.exit(2)
time.sleep(60)
"""


def written(folder: Path, words: list[str], script: Path = SFT, **yaml: str) -> Path:
    """The driver for a job on two machines, each with the CPUs of a node; of four ranks unless `yaml` says so."""
    settings = {"num_processes": str(RANKS), "num_machines": "2", "main_process_ip": "n1", "mixed_precision": "no"}
    (folder / "job.yaml").write_text(made_yaml(**{**settings, **yaml}))
    flags = ["--shared", str(folder), "--cpus", "2", "-o", str(folder / "driver.py")]
    assert cli.call(["script", "ray", *flags, str(folder / "job.yaml"), str(script), *words]) == 0
    return folder / "driver.py"


class Driver:
    """One that runs, as `python FILE` starts it."""

    def __init__(self, driver: Path, cluster: ray_cluster.Cluster) -> None:
        self.folder = driver.parent
        words = [sys.executable, driver.name]
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                words, env=cluster.environment, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_for(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not there():
            assert self.process.poll() is None, self.ended().output
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def ended(self) -> Finished:
        try:
            code = self.process.wait(SECONDS)
        finally:
            self.process.kill()
        return Finished(code, (self.folder / "log").read_text().replace("\r", "\n"))


def rank_of(cluster: ray_cluster.Cluster, number: int) -> psutil.Process:
    """The process that trains as one rank now."""
    for process in ray_cluster.processes(cluster.folder):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:2] == [str(SFT)] and process.environ().get("RANK") == str(number):
                return process
    raise AssertionError(f"no rank {number}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_cluster.Cluster]:
    with ray_cluster.cluster() as started:
        yield started
    assert started.left == []
    assert not started.folder.exists()


@pytest.fixture(scope="module")
def reference(tiny_model: Path, text_data: Path) -> Reference:
    return train(tiny_model, text_data, steps=STEPS, global_batch=GLOBAL_BATCH)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_loses_a_rank_and_a_node_learns_as_one_process_does(
    cluster: ray_cluster.Cluster, tiny_model: Path, text_data: Path, reference: Reference, tmp_path: Path
) -> None:
    """One rank on each node: each start of a rank imports torch, and they start three times."""
    output = tmp_path / "out"
    words = job_words(tiny_model, text_data, output, STEPS, GLOBAL_BATCH // 2, save_steps=1)
    yaml = {"model": str(tiny_model), "fsdp_version": "2", "strategy": "1", "num_processes": "2"}
    driver = Driver(written(tmp_path, words, **yaml), cluster)
    driver.wait_for((output / "checkpoint-3").exists)
    rank_of(cluster, 1).kill()
    driver.wait_for((output / "checkpoint-6").exists)
    cluster.ask("remove")
    cluster.ask("add")
    done = driver.ended()
    assert done.code == 0, done.output
    assert losses_of(output, STEPS) == pytest.approx(reference.losses, abs=1e-4)
    assert "FSDP2: 4 units, each rank holds 0.03 M of 0.06 M parameters" in done.output
    assert "rank 1 on" in done.output
    assert "ended with exit code 137 (SIGKILL)" in done.output
    for step in (2, 5):
        assert f"checkpoint-{step}, after {step} steps" in done.output or f"checkpoint-{step + 1}, after" in done.output


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], Path]:
    """The driver of a script that isn't made of this package's parts."""

    def write(word: str) -> Path:
        (tmp_path / "own.py").write_text(OWN)
        return written(tmp_path, [word], tmp_path / "own.py", model="Qwen/Qwen2.5-0.5B", fsdp_version="2")

    return write


def ranks_of(folder: Path) -> list[tuple[list[str], dict[str, str], str]]:
    """What each rank of `OWN` was started with."""
    return [
        tuple(json.loads(path.read_text())) for path in sorted(folder.glob("started-*.json")) if path.stat().st_size
    ]


@pytest.mark.slow
def test_a_script_gets_what_accelerate_launch_gives_and_a_signal_to_the_driver_stops_it_for_good(
    cluster: ray_cluster.Cluster, own: Callable[[str], Path], tmp_path: Path
) -> None:
    driver = Driver(own("it's"), cluster)
    driver.wait_for(lambda: len(ranks_of(tmp_path)) == RANKS)
    driver.process.send_signal(signal.SIGUSR1)
    done = driver.ended()
    assert done.code == 75, done.output
    ranks = ranks_of(tmp_path)
    assert len(ranks) == RANKS
    for rank, (words, variables, folder) in enumerate(ranks):
        assert (words, folder) == (["it's"], str(tmp_path))
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank // 2),
            "CUDA_VISIBLE_DEVICES": "0,1",
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
            "HF_HOME": f"{tmp_path}/.huggingface",
        }
        assert expected.items() <= variables.items()


@pytest.mark.slow
def test_a_rank_ends_with_its_worker_and_a_bad_flag_is_not_tried_again(
    cluster: ray_cluster.Cluster, own: Callable[[str], Path], tmp_path: Path
) -> None:
    path = own("wrong")
    text = path.read_text()
    assert "max_failures=0" in text  # it couldn't resume
    path.write_text(text.replace("max_failures=0", "max_failures=3").replace("num_workers=4", "num_workers=1"))
    driver = Driver(path, cluster)
    driver.wait_for(lambda: len(ranks_of(tmp_path)) == 1)
    [first] = tmp_path.glob("started-*.json")
    rank = psutil.Process(int(first.stem.rpartition("-")[2]))
    rank.parent().kill()
    rank.wait(5)
    done = driver.ended()
    assert done.code == 2, done.output
    assert len(ranks_of(tmp_path)) == 2
