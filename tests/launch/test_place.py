"""Where a launch runs: what engines say of it, what flags and the YAML say, and contradictions."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from conftest import SFT, here

from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host
from accel_fsdp.launch import meeting, place

YAML = (
    "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
)
TWO = f"{YAML}num_machines: 2\nnum_processes: 8\n"
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
ENGINES: Mapping[str, dict[str, str]] = {
    "SLURM": SLURM,
    "Kubeflow": {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29400",
    },
    "SkyPilot": {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    },
}
MEETING = {
    "SLURM": "--main_process_ip gpu07 --main_process_port 24567",
    "Kubeflow": "--main_process_ip job-node-0-0.job --main_process_port 29400",
    "SkyPilot": "--main_process_ip 10.0.0.1",
}
Dry = Callable[..., str]


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dry:
    """What `accel-fsdp launch --dry-run` prints for a YAML, variables and flags, or the error that it ends with."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PET_", "SKYPILOT_")):
            monkeypatch.delenv(name)

    def run(yaml: str, variables: Mapping[str, str], *flags: str) -> str:
        (tmp_path / "job.yaml").write_text(yaml)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return here("launch", "--dry-run", *flags, tmp_path / "job.yaml", SFT).output

    return run


ONE_OF_2 = f"{YAML}num_machines: 1\nnum_processes: 2\n"
IP = "main_process_ip: 10.0.0.1\n"
ZERO3 = "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 3\n"
FLAGS = ("--num-machines", "4", "--num_processes", "16", "--machine-rank=3", "--main-process-ip", "10.0.0.9")
TEMPLATE = {"MASTER_ADDR": "gpu07", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "1"}
"""Variables that common templates export."""
PODS = ENGINES["Kubeflow"]
CASES: Sequence[tuple[str, Mapping[str, str], Sequence[str], str]] = [
    *((TWO, ENGINES[name], (), f"--machine_rank 1 {MEETING[name]} --config_file") for name in ENGINES),
    *((YAML, ENGINES[name], (), "launch --num_machines 2 --num_processes 8 --machine_rank 1") for name in ENGINES),
    *((ONE_OF_2, ENGINES[name], (), f"{name} says num_machines 2 (") for name in ENGINES),
    *(
        (f"{YAML}num_machines: 2\nnum_processes: 16\n", ENGINES[name], (), "num_processes: 16 is in")
        for name in ENGINES
    ),
    # Fewer processes than GPUs are allowed
    (f"{YAML}num_machines: 2\nnum_processes: 2\n", SLURM, (), "uses some of 8 GPUs"),
    (TWO, SLURM, ("--num-processes", "4"), "--num_processes 4 "),
    (TWO, SLURM, ("--num-processes", "16"), "--num-processes 16 is on the command line"),
    (TWO, PODS, ("--num-processes", "4"), "--num-processes 4 is on"),
    (TWO, PODS, ("--machine-rank", "0"), "--machine-rank 0 is on"),
    # SLURM's own variables win
    (TWO, SLURM | TEMPLATE, (), "# SLURM: num_machines 2 ("),
    (ONE_OF_2, TEMPLATE, (), "accelerate launch --config_file"),
    (TWO, SLURM | {"SLURM_STEP_ID": ""}, (), "fix: srun --ntasks-per-node=1"),
    (TWO, SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, (), "8 tasks on 2 machines (SLURM_STEP_NUM_TASKS)"),
    (TWO, SLURM | {"SLURM_NODEID": "two"}, (), "SLURM_NODEID=two is not a number"),
    (TWO, SLURM | {"SLURM_NODEID": "2"}, (), "SLURM_NODEID 2 of 2 machines"),
    (TWO, SLURM | {"SLURM_NODEID": ""}, (), "the number of this machine is unknown"),
    (f"{TWO}{IP}machine_rank: 3\n", SLURM, (), "SLURM_NODEID 1, and machine_rank: 3 in"),
    (TWO, PODS | {"PET_NNODES": "1:2"}, (), "torchrun train/sft.py"),
    (TWO, PODS | {"PET_NPROC_PER_NODE": "auto"}, (), "num_processes 8 ("),
    # Without an engine
    (TWO, {}, FLAGS, "--num_machines 4 --num_processes 16 --machine_rank 3 --main_process_ip 10.0.0.9 --config_file"),
    (TWO, {}, (*FLAGS, "--num_processes", "15"), "15 on 4 machines"),
    (f"{TWO}{IP}", {}, (), "is for 2 machines, and the number of this machine is unknown"),
    (f"{TWO}{IP}", {}, ("--machine-rank", "2"), "--machine-rank 2 of 2 machines"),
    (f"{TWO}{IP}machine_rank: 0\n", {}, ("--machine-rank", "1"), "--machine_rank 1 --config_file"),
    (f"{TWO}{IP}machine_rank: 1\n", {}, ("--machine-rank", "0"), "machine_rank: 1 in"),
    # DeepSpeed's own launcher would start every rank twice
    (ZERO3, SLURM, (), "deepspeed_multinode_launcher: standard"),
    (f"{ZERO3}  deepspeed_multinode_launcher: standard\n", SLURM, (), "--machine_rank 1"),
]


@pytest.mark.parametrize(("yaml", "variables", "flags", "message"), CASES)
def test_where_a_launch_runs(
    yaml: str, variables: Mapping[str, str], flags: Sequence[str], message: str, dry: Dry
) -> None:
    assert message in dry(yaml, {name: value for name, value in variables.items() if value}, *flags)


def test_the_first_host_of_slurms_short_lists() -> None:
    lists = {"n[007-012,3],m1": "n007", "a-b[3]": "a-b3", "n7,m[1-2]": "n7", "gpu-1-[0-3]-x": "gpu-1-0-x"}
    assert {hosts: place._first_of(hosts) for hosts in lists} == lists


def test_an_address_and_a_port_at_which_machines_cannot_meet_are_said_before_ranks_start() -> None:
    with pytest.raises(UserError, match=r"localhost is .*, which no other machine reaches"):
        meeting.meet(0, 2, "localhost", host.free_port(), {}, seconds=0)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(UserError, match=f"port {taken.getsockname()[1]} is taken") as refused:
            meeting.meet(0, 2, "10.77.0.1", taken.getsockname()[1], {}, seconds=0)
        assert "--main-process-port" in refused.value.fix


def test_a_finding_about_a_flag_names_the_flag(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: 'no'\nnum_processes: 2\nmain_process_ip: 10.0.0.1\n"
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "own.py").write_text("print(1)\n")
    flags = ["--num-machines", "2", "--machine-rank", "0", "--main-process-ip", "127.0.0.1"]
    finished = here("launch", *flags, tmp_path / "job.yaml", tmp_path / "own.py")
    assert finished.code == 1
    assert "AF403" not in finished.text
    assert "job.yaml: error AF415: --main-process-ip 127.0.0.1 and 2 machines" in finished.text
    assert "fix: --main-process-ip: an address of machine 0" in finished.text
    (tmp_path / "job.yaml").write_text(text.partition("main_process_ip")[0])
    without = here("launch", *flags[:4], tmp_path / "job.yaml", tmp_path / "own.py")
    assert (without.code, "AF403" in without.text) == (1, True)
    assert "or --main-process-ip ADDRESS before the script" in without.text
