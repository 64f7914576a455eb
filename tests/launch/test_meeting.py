"""`accel-fsdp launch` on machines that don't meet, or that were told different things: all say why, and none trains."""

import contextlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import hosts
import pytest
from conftest import ROOT, SFT, made_yaml

from accel_fsdp.command_line import values_by_name
from accel_fsdp.launch.meeting import MAY_DIFFER, difference, of_job

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
PORT, SECONDS = "29431", 120
SCRIPT = "from accel_fsdp.ranks import cpu\ncpu.enable()\nprint('a rank has started', flush=True)\ncpu.finish(0)\n"


def told(rank: int, machines: int = 2, address: str = "n1", wait: int = 11) -> str:
    """The flags of a machine with one rank; the wait is longer where all come, each when it has started."""
    numbers = f"--num-machines {machines} --num-processes {machines} --machine-rank {rank}"
    return f"{numbers} --main-process-ip {address} --main-process-port {PORT} --timeout {wait}"


def write_job(folder: Path) -> Path:
    (folder / "job.yaml").write_text(made_yaml(model="gpt2", num_processes="2", mixed_precision="no"))
    (folder / "own.py").write_text(SCRIPT)
    return folder


def start(host: hosts.Host, folder: Path, flags: str, words: str = "", **variables: str) -> "subprocess.Popen[str]":
    job = [*flags.split(), folder / "job.yaml", folder / "own.py", *words.split()]
    return host.start(["-m", "accel_fsdp", "launch", *job], **variables)


AWAY = "10.77.0.9"
NOT_REACHED = f"machine 0 has not been reached at n1:{PORT} for "
TWICE_0 = r"two machines were started as machine 0: n1 \(process \d+\), and n2 |lost each other"
TWICE_1 = r"error: two machines were started as machine 1: n2 \(process \d+\), and n3 \(process"
MISSING = (
    f"accel-fsdp: of 2 machines, these are missing after 10 s: 1; machine 0 waits at n1:{PORT}\n",
    f"error: of 2 machines, these are missing after 11 s: 1; machine 0 waits at n1:{PORT}\n",
)
CASES: Mapping[str, Sequence[tuple[str, Sequence[str]]]] = {
    "machine 1 is never started": [(told(0), MISSING)],
    "machine 0 is never started": [
        ("", ()),
        (
            told(1),
            [f"accel-fsdp: {NOT_REACHED}10 s: Connection refused\n", f"error: {NOT_REACHED}11 s: Connection refused"],
        ),
    ],
    "both were told that they are machine 0": [(told(0), [f"{TWICE_0}|{MISSING[1]}"]), (told(0), [TWICE_0])],
    "two of three have one rank": [(told(rank, 3, wait=90), [TWICE_1]) for rank in (0, 1, 1)],
    "an address that no machine has": [
        (told(0, address=AWAY), [f"this is machine 0, which has not reached itself at {AWAY}:{PORT}"]),
        (told(1, address=AWAY), [f"machine 0 has not been reached at {AWAY}:{PORT} for 1"]),
    ],
    "other numbers": [
        (told(rank, 2 + rank, wait=90), [r"num_machines +2 +0 \(n1\)\n +3 +1 \(n2\)\n"]) for rank in range(2)
    ],
}
"""What the machines of a network are told, and what each says."""


def test_machines_that_do_not_meet(tmp_path: Path) -> None:
    folder, started = write_job(tmp_path), dict[str, "list[subprocess.Popen[str]]"]()
    with contextlib.ExitStack() as networks:  # at the same time: they mostly wait
        for case, machines in CASES.items():
            network = networks.enter_context(hosts.network("n1", "n2", "n3"))
            pairs = zip(network, machines, strict=False)
            started[case] = [start(host, folder, flags) for host, (flags, _) in pairs if flags]
        for case, processes in started.items():
            expected = [messages for flags, messages in CASES[case] if flags]
            for machine, messages in zip(hosts.all_ended(processes, SECONDS), expected, strict=True):
                assert machine.code == 1, (case, machine.output)
                assert "a rank has started" not in machine.output
                for message in messages:
                    assert re.search(message, machine.output), (case, machine.output)


PLANTED: Mapping[str, tuple[str, str]] = {
    "learning_rate": ("1e-3", "5e-2"),
    "seed": ("42", "7"),
    "packing": ("not set", "given"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "false"),
    "ACCELERATE_MIXED_PRECISION": ("no", "bf16"),
    "NVIDIA_TF32_OVERRIDE": ("not set", "0"),
    "peft": (r"[\d.]+", "0.0.1"),
    "script": (r"\w+", r"\w+"),
}
"""What is other on the second machine, and the values that the table has."""


def test_what_differs_ends_the_job_on_all_machines_unless_it_may(tmp_path: Path) -> None:
    """Paths, names and variables of a machine alone differ in any case."""
    folders = [tmp_path / "n1", tmp_path / "n2"]
    for folder in folders:
        folder.mkdir()
        write_job(folder)
    own = [
        f"--output_dir {folder} --run_name=on-{folder.name} --data={folder}/rows --gpu {folder.name}"
        for folder in folders
    ]
    first, rates = f"{own[0]} --learning_rate 1e-3 --seed 42", f"{own[1]} --learning_rate 5e-2"
    flags = [told(rank, wait=90) for rank in range(2)]
    variables = {"TRITON_CACHE_DIR": str(folders[1]), "GLOO_SOCKET_IFNAME": "eth0"}
    with hosts.network("n1", "n2") as machines:
        allowed = hosts.all_ended(
            [
                start(machines[0], folders[0], flags[0], first, **{MAY_DIFFER: "learning-rate"}),
                start(machines[1], folders[1], flags[1], f"{rates} --seed 42", **variables),
            ],
            SECONDS,
        )
        text = (folders[1] / "job.yaml").read_text().replace("mixed_precision: 'no'", "mixed_precision: bf16")
        (folders[1] / "job.yaml").write_text(text.replace("after_forward: true", "after_forward: false"))
        (folders[1] / "own.py").write_text(f"{SCRIPT}\n")
        (info := folders[1] / "peft-0.0.1.dist-info").mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.0.1\n")
        variables |= {"NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": f"{folders[1]}:{ROOT}"}
        refused = hosts.all_ended(
            [
                start(machines[0], folders[0], flags[0], first),
                start(machines[1], folders[1], flags[1], f"{rates} --seed 7 --packing", **variables),
            ],
            SECONDS,
        )
    for machine in allowed:
        assert (machine.code, "a rank has started" in machine.output) == (0, True), machine.output
    for machine in refused:
        assert (machine.code, "a rank has started" in machine.output) == (1, False), machine.output
        for name, (here, there) in PLANTED.items():
            row = rf"^    {name} +{here} +0 \(n1\)\n +{there} +1 \(n2\)$"
            assert re.search(row, machine.output, re.MULTILINE), (name, machine.output)
        assert machine.output.count(" 1 (n2)\n") == len(PLANTED), machine.output


def test_one_setting_that_differs_is_enough() -> None:
    members = [(f"{rank} (n{rank})", {"seed": "1", "rows": None, MAY_DIFFER: ""}) for rank in range(7)]
    assert difference(members) is None
    members[6][1].update({"seed": "2", "rows": "8"})  # rows that one machine alone knows are not compared
    differs = difference(members)
    assert differs is not None
    assert differs.table[1:] == ["seed  1      0 (n0), 1 (n1), 2 (n2), 3 (n3) and 2 more", "      2      6 (n6)"]
    members[3][1][MAY_DIFFER] = "rows, --seed"
    assert difference(members) is None


def test_what_may_be_a_secret_is_compared_and_not_shown() -> None:
    words = ["--hub_token", "hf-1", "--eos_token=<end>", "--openai_key", "sk-1", "+my.apikey=sk-2"]
    settings = of_job({}, values_by_name(words), SFT)
    assert settings.keys() & {"hub_token", "eos_token", "openai_key", "+my.apikey"} == {"eos_token", "openai_key"}
    assert settings != of_job({}, values_by_name([*words, "--openai_key", "sk-2"]), SFT)
    assert not [secret for secret in ("hf-1", "sk-1", "sk-2", "<end>") if secret in str(settings)]
