"""Jobs on two machines: `accel-fsdp launch` on each of two network hosts, as engines start it there."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hosts
import pytest
import yaml
from conftest import ROOT, SFT, accel_fsdp, made_yaml, warm_python
from reference import Reference, job_words, losses_of, train

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
STEPS, PER_RANK, RANKS = 4, 2, 4
SECONDS = 120


@pytest.fixture(scope="module")
def machines() -> Iterator[list[hosts.Host]]:
    with hosts.network("n1", "n2") as machines:
        yield machines


@pytest.fixture(scope="module")
def reference(tiny_model: Path, text_data: Path) -> Reference:
    return train(tiny_model, text_data, steps=STEPS, global_batch=PER_RANK * RANKS)


def kubeflow(rank: int) -> dict[str, str]:
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "n1",
        "PET_MASTER_PORT": "29431",
    }


def slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": str(rank),
        "SLURM_STEP_NODELIST": "n[1-2]",
    }


def skypilot(rank: int) -> dict[str, str]:
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.77.0.1\n10.77.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
    }


JOBS: Mapping[str, tuple[dict[str, str], object]] = {
    "fsdp2": ({"fsdp_version": "2", "strategy": "4"}, kubeflow),
    "fsdp1": ({"fsdp_version": "1", "strategy": "4"}, slurm),
}

KINDS = {"fsdp2": "FSDP2: 4", "fsdp1": "FSDP1 HYBRID_SHARD: 3"}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", JOBS)
def test_hybrid_sharding_over_two_machines_learns_as_one_process_does(
    name: str, machines: list[hosts.Host], tiny_model: Path, text_data: Path, reference: Reference, tmp_path: Path
) -> None:
    flags, engine = JOBS[name]
    file = tmp_path / "job.yaml"
    file.write_text(
        made_yaml(
            model=str(tiny_model),
            num_processes="4",
            num_machines="2",
            main_process_ip="n1",
            mixed_precision="no",
            **flags,
        )
    )
    words = job_words(tiny_model, text_data, tmp_path / "out", STEPS, PER_RANK, save_steps=STEPS)
    started = [
        host.start(["-m", "accel_fsdp", "launch", file, SFT, *words], **engine(rank))
        for rank, host in enumerate(machines)
    ]
    first, second = hosts.all_ended(started, SECONDS)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert f"{KINDS[name]} units, each rank holds 0.03 M of 0.06 M" in first.output + second.output
    assert losses_of(tmp_path / "out", STEPS) == pytest.approx(reference.losses, abs=1e-4)


COMMANDS: Mapping[str, tuple[Callable[[int], dict[str, str]], Callable[[dict[str, object]], object]]] = {
    "kubernetes": (kubeflow, lambda job: job["spec"]["trainer"]["args"][0]),  # type: ignore[index]
    "skypilot": (skypilot, lambda task: task["run"]),
}
TOLD = ("num_machines", "num_processes", "machine_rank")
"""Keys that engines tell."""
PROGRAMS = {"accel-fsdp": 'PATH="$BEFORE" exec "$PYTHON_EXEC" -m accel_fsdp "$@"', "pip": "exit 0"}
"""What is installed on the machines: the command, which starts warm, and a pip that has nothing to do."""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("engine", COMMANDS)
def test_the_command_of_a_job_file_trains_on_two_machines(
    engine: str, machines: list[hosts.Host], tiny_model: Path, text_data: Path, reference: Reference, tmp_path: Path
) -> None:
    """As it stands in the file, with the variables that the engine sets."""
    variables, command = COMMANDS[engine]
    file, job, programs = tmp_path / "job.yaml", tmp_path / "job", tmp_path / "bin"
    yaml_text = yaml.safe_load(
        made_yaml(model=str(tiny_model), num_processes="4", mixed_precision="no", fsdp_version="2")
    )
    file.write_text(yaml.safe_dump({key: value for key, value in yaml_text.items() if key not in TOLD}))
    words = job_words(tiny_model, text_data, tmp_path / "out", STEPS, PER_RANK, save_steps=STEPS)
    flags = ["--gpus", "2x2xH100-80GB", "--shared", tmp_path, "-o", job]
    written = accel_fsdp("script", engine, *map(str, (*flags, file, SFT, *words)))
    assert written.code == 0, written.output
    programs.mkdir()
    for name, does in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    path = {"BEFORE": os.environ["PATH"], "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    bash = ["bash", "-euo", "pipefail", "-c", str(command(yaml.safe_load(job.read_text())))]
    started = [host.run(bash, **path, **warm_python(), **variables(rank)) for rank, host in enumerate(machines)]
    first, second = hosts.all_ended(started, SECONDS)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert losses_of(tmp_path / "out", STEPS) == pytest.approx(reference.losses, abs=1e-4)
