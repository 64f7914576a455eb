"""`accel-fsdp launch` against Accelerate's own launcher, on several machines, and where nothing can be sharded."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, SFT, made_yaml

from accel_fsdp.errors import UserError
from accel_fsdp.launch import launcher
from accel_fsdp.launch_environment import ALLOCATOR_VARIABLES
from accel_fsdp.ranks import cpu

TOP = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nnum_processes: 2\n"
FSDP = (
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
)
ZERO3 = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  zero3_init_flag: true\n"
YAMLS = {
    "fsdp2": f"{TOP}{FSDP}mixed_precision: bf16\n",
    "mesh": f"{TOP}{FSDP}mixed_precision: bf16\nparallelism_config:\n  parallelism_config_dp_shard_size: 2\n",
    "zero3": f"{TOP}{ZERO3}mixed_precision: bf16\n",
    "zero3 without precision": f"{TOP}{ZERO3}",
    "ddp": f"{TOP}distributed_type: MULTI_GPU\nmixed_precision: fp16\n",
    "one process": f"{TOP.replace('es: 2', 'es: 1')}distributed_type: 'NO'\nmixed_precision: 'no'\n",
    "one CPU": f"{TOP.replace('es: 2', 'es: 1')}distributed_type: 'NO'\nmixed_precision: 'no'\nuse_cpu: true\n",
}


class Started(Exception):
    """Instead of ranks."""


OF_HANGS = ("ACCEL_FSDP_STACKS", "ACCEL_FSDP_HANG_TIMEOUT", "TORCH_FR_", "TORCH_NCCL_")
"""Variables by which ranks leave stacks, and torch's record of collectives."""
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stops where ranks would be started, and holds the environment that they would have."""
    found: dict[str, str] = {}

    def run(*args: Any, env: dict[str, str] | None = None, **_: Any) -> None:
        found.update(os.environ if env is None else env)
        raise Started

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr("accelerate.commands.launch.subprocess.Popen", run)
    monkeypatch.setattr("accelerate.utils.launch.get_free_port", lambda: 29999)
    monkeypatch.setattr("accelerate.commands.launch.check_cuda_p2p_ib_support", lambda: False)
    monkeypatch.setattr("accelerate.utils.check_cuda_p2p_ib_support", lambda: False)
    monkeypatch.setattr(launcher.logging, "disable", lambda level: None)
    return found


@pytest.mark.parametrize("kind", YAMLS)
def test_the_ranks_get_what_accelerates_launcher_gives_them(
    kind: str, started: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    monkeypatch.setattr(cpu, "is_needed", lambda: False)
    path = tmp_path / "job.yaml"
    path.write_text(YAMLS[kind])
    words = ["--main_process_port", "0", "--config_file", str(path), str(SFT)]
    with pytest.raises(Started):
        launch_command(launch_command_parser().parse_args(words))
    theirs = dict(started)
    started.clear()
    with pytest.raises(Started):
        launcher.launch(launcher.launcher_args(path, SFT, ()))
    assert ("ACCEL_FSDP_STACKS" in started) == (kind not in ("one process", "one CPU"))
    shared = {name: value for name, value in started.items() if name in theirs or not name.startswith(OF_HANGS)}
    assert shared == theirs | ({} if kind == "one CPU" else EXPANDABLE)
    shown = launcher.environment(launcher.launcher_args(path, SFT, ()))
    assert shown == {name: value for name, value in theirs.items() if os.environ.get(name) != value}
    ranks = launcher.rank_environment(path, SFT)
    assert ranks.items() <= shown.items()
    assert not ranks.keys() & {"MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize(
    ("name", "hip", "release", "expandable"),
    [
        ("OWN", None, "6.8.0-generic", True),
        ("OWN", "7.2", "6.8.0-generic", False),  # where it may hang
        ("OWN", None, "5.15.90.1-microsoft-standard-WSL2", False),
        *((name, None, "6.8.0-generic", False) for name in ALLOCATOR_VARIABLES),
    ],
)
def test_the_allocator_expands_segments_unless_that_may_fail_or_a_person_has_set_it(
    name: str, hip: str | None, release: str, expandable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    monkeypatch.setattr("torch.version.hip", hip)
    monkeypatch.setattr(launcher.platform, "uname", lambda: SimpleNamespace(release=release))
    (path := tmp_path / "job.yaml").write_text(YAMLS["fsdp2"])
    args = launcher.launcher_args(path, SFT, ())
    assert launcher.allocator_variables(args) == (EXPANDABLE if expandable else {})


OWN, NAMES_OURS = "Accelerator()\n", "from accel_fsdp import api  # for training on a cpu\n"


@pytest.mark.skipif(not cpu.is_needed(), reason="this machine has an accelerator")
@pytest.mark.parametrize(
    ("kind", "text", "words", "starts"),
    [
        *((kind, text, (), False) for kind in ("fsdp2", "zero3", "ddp") for text in (OWN, NAMES_OURS)),
        ("fsdp2", "from accel_fsdp.ranks import cpu\ncpu.enable()\n", (), True),
        ("fsdp2", "import os, accel_fsdp.ranks.cpu\naccel_fsdp.ranks.cpu.enable()\n", (), True),
        ("fsdp2", SFT.read_text(), (), True),
        ("ddp", "Accelerator(cpu=True)\n", (), True),
        ("ddp", "train()\n", ("--use_cpu",), True),
        ("one process", "train()\n", (), True),
    ],
)
def test_a_script_that_would_train_unsharded_is_not_started(
    kind: str, text: str, words: tuple[str, ...], starts: bool, started: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(YAMLS[kind])
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(Started if starts else UserError) as stopped:
        launcher.launch(launcher.launcher_args(tmp_path / "job.yaml", tmp_path / "own.py", words))
    if not starts:
        assert "would train unsharded" in str(stopped.value)
        assert "accel-fsdp launch --cpu" in str(stopped.value)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("flags", [["--cpu"], []])
def test_nothing_is_left_after_ctrl_c(flags: list[str], tmp_path: Path) -> None:
    """The terminal sends the signal to the launcher and to its ranks."""
    (temporary := tmp_path / "tmp").mkdir()
    (tmp_path / "job.yaml").write_text(made_yaml(model="llama-3.1-8b", num_processes="2", mixed_precision="no"))
    own = tmp_path / "own.py"
    own.write_text(
        "from accel_fsdp.ranks import cpu\nimport os, time\nos.write(1, b'a rank waits\\n')\ntime.sleep(60)\n"
    )
    words = [sys.executable, "-m", "accel_fsdp", "launch", *flags, str(tmp_path / "job.yaml"), str(own)]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as launcher_process:
        assert launcher_process.stdout is not None
        for _ in range(2):
            assert launcher_process.stdout.readline() == "a rank waits\n"
        os.killpg(launcher_process.pid, signal.SIGINT)
        _, output = launcher_process.communicate(timeout=60)
    assert launcher_process.returncode == 130, output
    assert "Traceback" not in output or not flags, output
    assert "ended by SIGINT" in output
    until = time.monotonic() + 20
    while left := list(temporary.iterdir()):  # a process of its own removes the rehearsal's folder
        assert time.monotonic() < until, left
        time.sleep(0.1)
