"""Jobs on two machines: `accel-fsdp launch` on each of two network hosts, as engines start it there."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import hosts
import pytest
from conftest import SFT, made_yaml
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
