"""Where a launch runs: what engines say of it, what flags and the YAML say, and contradictions."""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from conftest import SFT, accel_fsdp
from hypothesis import given
from hypothesis import strategies as st

from accel_fsdp import cli
from accel_fsdp.errors import UserError
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
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dry:
    """What `accel-fsdp launch --dry-run` prints for a YAML, variables and flags, or the error that it ends with."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PET_", "SKYPILOT_")):
            monkeypatch.delenv(name)

    def run(yaml: str, variables: Mapping[str, str], *flags: str) -> str:
        (tmp_path / "job.yaml").write_text(yaml)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        try:
            code = cli.call(["launch", "--dry-run", *flags, str(tmp_path / "job.yaml"), str(SFT)])
        except UserError as error:
            return f"{error.what}\n{error.fix}"
        assert code == 0, capsys.readouterr()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_says_where_a_launch_runs(engine: str, dry: Dry) -> None:
    shown = dry(TWO, ENGINES[engine])
    assert f"# {engine}: num_machines 2 (" in shown
    assert f"--machine_rank 1 {MEETING[engine]} --config_file" in shown


@pytest.mark.parametrize("engine", ENGINES)
def test_a_yaml_without_numbers_takes_the_engines(engine: str, dry: Dry) -> None:
    assert "launch --num_machines 2 --num_processes 8 --machine_rank 1" in dry(YAML, ENGINES[engine])


@pytest.mark.parametrize("engine", ENGINES)
def test_another_number_of_machines_is_refused_with_both(engine: str, dry: Dry) -> None:
    shown = dry(f"{YAML}num_machines: 1\nnum_processes: 8\n", ENGINES[engine])
    assert f"{engine} says num_machines 2 (" in shown
    assert "num_machines: 1 is in" in shown
    assert "num_machines: 2 in the YAML" in shown


@pytest.mark.parametrize("engine", ENGINES)
def test_another_number_of_processes_is_refused_with_both(engine: str, dry: Dry) -> None:
    shown = dry(f"{YAML}num_machines: 2\nnum_processes: 16\n", ENGINES[engine])
    assert f"{engine} says num_processes 8 (" in shown
    assert "num_processes: 16 is in" in shown


def test_a_flag_may_leave_gpus_idle_but_not_contradict_processes(dry: Dry) -> None:
    assert "--num_processes 4 " in dry(TWO, SLURM, "--num-processes", "4")
    assert "--num-processes 16 is on the command line" in dry(TWO, SLURM, "--num-processes", "16")


def test_a_yaml_may_leave_gpus_idle(dry: Dry) -> None:
    shown = dry(f"{YAML}num_machines: 2\nnum_processes: 2\n", SLURM)
    assert "num_processes 2 (" in shown
    assert "--num_processes" not in shown


def test_a_slurm_step_with_the_variables_of_common_templates_is_slurms(dry: Dry) -> None:
    common = {"MASTER_ADDR": "gpu07", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "1"}
    assert "# SLURM: num_machines 2 (" in dry(TWO, SLURM | common)
    assert "#" not in dry(f"{YAML}num_machines: 1\nnum_processes: 2\n", {"RANK": "1"})


def test_flags_contradict_neither_kubernetes(dry: Dry) -> None:
    assert "--num-processes 4 is on" in dry(TWO, ENGINES["Kubeflow"], "--num-processes", "4")
    assert "--machine-rank 0 is on" in dry(TWO, ENGINES["Kubeflow"], "--machine-rank", "0")


def test_flags_alone_replace_what_the_yaml_says(dry: Dry) -> None:
    flags = ["--num-machines", "4", "--num_processes", "16", "--machine-rank=3", "--main-process-ip", "10.0.0.9"]
    shown = dry(TWO, {}, *flags)
    assert "--num_machines 4 --num_processes 16 --machine_rank 3 --main_process_ip 10.0.0.9 --config_file" in shown
    assert "#" not in shown
    assert "15 on 4 machines" in dry(TWO, {}, *flags, "--num_processes", "15")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_STEP_ID": ""}, "this is its batch script itself\nsrun --ntasks-per-node=1"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "8 tasks on 2 machines (SLURM_STEP_NUM_TASKS)"),
        ({"SLURM_NODEID": "two"}, "SLURM_NODEID=two is not a number"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID 2 of 2 machines"),
        ({"SLURM_NODEID": ""}, "the number of this machine is unknown"),
    ],
)
def test_a_slurm_job_that_would_hang_is_refused(changed: dict[str, str], message: str, dry: Dry) -> None:
    variables = {name: value for name, value in (SLURM | changed).items() if value}
    assert message in dry(TWO, variables)


def test_an_elastic_kubernetes_job_is_torchruns(dry: Dry) -> None:
    assert "torchrun train/sft.py" in dry(TWO, {**ENGINES["Kubeflow"], "PET_NNODES": "1:2"})


@pytest.mark.parametrize("word", ["auto", "gpu", "cpu"])
def test_words_for_the_number_of_processes_leave_it_to_the_yaml(word: str, dry: Dry) -> None:
    assert "num_processes 8 (" in dry(TWO, {**ENGINES["Kubeflow"], "PET_NPROC_PER_NODE": word})


def test_a_rank_of_torchrun_is_no_pod(dry: Dry) -> None:
    yaml = f"{YAML}num_machines: 1\nnum_processes: 2\n"
    assert "#" not in dry(yaml, {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "23456"})


def test_a_machine_rank_in_the_file_that_is_another_machines(dry: Dry) -> None:
    ip = "main_process_ip: 10.0.0.1\n"
    assert "machine_rank: 0" not in dry(f"{TWO}{ip}machine_rank: 0\n", SLURM)
    shown = dry(f"{TWO}{ip}machine_rank: 3\n", SLURM)
    assert "SLURM_NODEID 1, and machine_rank: 3 in" in shown


def test_deepspeeds_own_launcher_would_start_every_rank_twice(dry: Dry) -> None:
    yaml = "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 3\n"
    assert "deepspeed_multinode_launcher: standard" in dry(yaml, SLURM)
    assert "--machine_rank 1" in dry(f"{yaml}  deepspeed_multinode_launcher: standard\n", SLURM)


@given(
    st.text("abn-", min_size=1, max_size=5),
    st.lists(st.integers(0, 120), min_size=1, max_size=4, unique=True),
    st.booleans(),
)
def test_the_first_host_of_slurms_short_lists(name: str, numbers: list[int], wide: bool) -> None:
    names = [f"{name}{number:03d}" if wide else f"{name}{number}" for number in sorted(numbers)]
    short = f"{name}[{','.join(host.removeprefix(name) for host in names)}],other1"
    assert place._first_of(short) == names[0]
    assert place._first_of(",".join(names)) == names[0]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("no-such-host.invalid", "the name no-such-host.invalid is unknown"),
        ("localhost", "which no other machine reaches"),
    ],
)
def test_where_machines_cannot_meet_is_said_before_ranks_start(address: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        meeting.check_place(address, 29500, 0)


def test_a_port_that_is_taken_is_said_with_one_that_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is taken") as refused:
            meeting.check_place("10.77.0.1", port, 0)
        assert "--main-process-port" in refused.value.fix
        meeting.check_place("10.77.0.1", port, 1)


@pytest.mark.parametrize("in_file", ["", "main_process_ip: 10.0.0.1\n"])
def test_a_finding_about_a_flag_names_the_flag(in_file: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        f"distributed_type: MULTI_GPU\nmixed_precision: 'no'\nnum_processes: 2\n{in_file}"
    )
    (tmp_path / "own.py").write_text("print(1)\n")
    flags = ["--num-machines", "2", "--machine-rank", "0", "--main-process-ip", "127.0.0.1"]
    finished = accel_fsdp("launch", *flags, tmp_path / "job.yaml", tmp_path / "own.py")
    assert finished.code == 1
    said = " ".join(finished.output.split())
    assert "job.yaml: error AF415: --main-process-ip 127.0.0.1 and 2 machines" in said
    assert "fix: --main-process-ip: an address of machine 0" in said
