"""`accel-fsdp launch` of any script: it runs as Python runs it, ends as it ends, and a hang says where ranks were."""

import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, accel_fsdp, at_once, here, made_yaml

from accel_fsdp.launch import launcher

BEGIN = """
import hashlib, os, sys, time
from accel_fsdp.ranks import cpu
cpu.enable()
import torch
import torch.distributed as dist

def sleep():
    time.sleep(1000)
"""
DDP = """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
if dist.get_rank():
    sleep()
model(torch.ones(2, 4)).sum().backward()
"""
TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Sleeps(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and args.process_index == 1:
            sleep()

config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 16
args = TrainingArguments("OUT", max_steps=3, report_to="none", save_strategy="no", per_device_train_batch_size=1)
from accel_fsdp import HangTimeout
Trainer(LlamaForCausalLM(config), args, train_dataset=rows, callbacks=[Sleeps(), HangTimeout()]).train()
"""


def test_a_rank_that_sleeps_ends_the_job_which_says_where_ranks_were(tmp_path: Path) -> None:
    """In a collective of torch, and in a step of any Trainer."""
    (tmp_path / "job.yaml").write_text(made_yaml(model="llama-3.1-8b", num_processes="2", mixed_precision="no"))
    launches = []
    for name, body in (("ddp", DDP), ("trainer", TRAINER)):
        (script := tmp_path / f"{name}.py").write_text(BEGIN.lstrip() + body.replace("OUT", str(tmp_path / "run")))
        words = ("launch", "--no-check", "--hang-timeout", "15", tmp_path / "job.yaml", script)
        launches.append(partial(accel_fsdp, *words))
    for ended, waits in zip(
        at_once(launches), (r"\S+ddp\.py:14 in <module>", r"(\w+, )?\S+\.py:\d+ in \w+"), strict=True
    ):
        assert ended.code == 1, ended.output
        assert re.search(rf"  rank 0: {waits}$", ended.output, re.MULTILINE), ended.output
        assert re.search(r"  rank 1: \S+(ddp|trainer)\.py:8 in sleep$", ended.output, re.MULTILINE), ended.output
        folder = re.search(r"their stacks are in (\S+):", ended.output)
        assert folder is not None
        assert '.py", line 8 in sleep' in (Path(folder[1]) / "rank_1").read_text()
        shutil.rmtree(folder[1])


SCRIPTS = {
    "names": "import sys, own_helper\nprint(sorted(globals()), __name__, __file__, __spec__, sys.argv, sys.path[0])\n",
    "spawn": (
        "import multiprocessing\nclass Own:\n    pass\ndef show(own): print(type(own), flush=True)\n"
        "spawn = multiprocessing.get_context('spawn')\n"
        "if __name__ == '__main__':\n    own = spawn.Process(target=show, args=(Own(),))\n    own.start(); own.join()\n"
    ),
    "error": "def f():\n    raise ValueError('x')\ntry:\n    f()\nexcept ValueError as error:\n    {}['a']\n",
    "syntax": "print(1)\nif:\n",
    "exit": "import sys, atexit\natexit.register(print, 'last')\nsys.exit('why')\n",
    "thread": (
        "import pickle, sys, threading, time\nclass Own:\n    pass\n"
        "def later():\n    time.sleep(0.3)\n    print(pickle.loads(pickle.dumps(Own())), sys.argv)\n"
        "Own.__repr__ = lambda own: 'Own'\nthreading.Thread(target=later).start()\n"
    ),
}


def test_a_script_of_a_launch_runs_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "own_helper.py").touch()
    for kind, text in SCRIPTS.items():
        (tmp_path / f"{kind}.py").write_text(text)

    def run(case: tuple[str, ...]) -> tuple[int, str, str]:
        words = [sys.executable, *case, "--a", "b"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        return done.returncode, done.stdout, done.stderr

    cases = [(launcher.LEAVES_STACKS, f"{kind}.py") for kind in SCRIPTS]
    cases.append((launcher.ON_CPU, "names.py"))
    with ThreadPoolExecutor(2) as pool:
        by_python = dict(zip(SCRIPTS, pool.map(run, [(f"{kind}.py",) for kind in SCRIPTS]), strict=True))
        for (program, script), ended in zip(cases, pool.map(run, cases), strict=True):
            assert ended == by_python[script.removesuffix(".py")], (program, script)


@pytest.mark.parametrize("words", ["--hang-timeout -1", "--hang-timeout inf", "--hang-timeout nan", "--timeout 0"])
def test_a_time_that_cannot_be(words: str) -> None:
    refused = here("launch", *words.split(), "job.yaml", "own.py")
    assert (refused.code, f"error: {words}" in refused.output) == (2, True), refused.output


ALONE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\nnum_processes: 1\n"
SAVES_AND_STOPS = """import os, signal, sys, time
def received(number, frame):
    os.write(1, b'%d\\n' % number)
    if number == signal.SIGTERM:
        sys.exit(75)
for name in ("SIGTERM", "SIGHUP", "SIGINT"):
    signal.signal(signal.Signals[name], received)
os.write(1, b'%d\\n' % os.getpid())
for _ in range(300):
    time.sleep(0.1)
"""
"""A script that ends with code 75 at SIGTERM, as train/sft.py does, and goes on at other signals."""


def test_each_signal_reaches_the_script_once_and_its_code_is_the_launchers(tmp_path: Path) -> None:
    """Whether the launcher gets it alone, or its group does, as at Ctrl-C."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "job.yaml").write_text(ALONE)
    (tmp_path / "own.py").write_text(SAVES_AND_STOPS)
    words = [sys.executable, "-m", "accel_fsdp", "launch", str(tmp_path / "job.yaml"), str(tmp_path / "own.py")]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True, start_new_session=True, env=environment) as launcher:
        assert launcher.stdout is not None
        child = psutil.Process(int(launcher.stdout.readline()))
        try:
            for send in (os.kill, os.killpg):
                for number in (signal.SIGHUP, signal.SIGINT):
                    send(launcher.pid, number)
                    assert launcher.stdout.readline() == f"{number:d}\n"
            os.killpg(launcher.pid, signal.SIGTERM)
            output, errors = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert (launcher.returncode, output) == (75, f"{signal.SIGTERM:d}\n"), errors
    assert "accel-fsdp: the script ended with exit code 75" in errors
    assert not child.is_running()
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("raise SystemExit(3)", 3, "exit code 3"),
        ("import os; os.kill(os.getpid(), 15)", 143, "exit code 143 (SIGTERM)"),
        ("import os; os.kill(os.getpid(), 1)", 129, "exit code 129 (SIGHUP)"),
    ],
)
def test_a_script_that_fails_alone_gives_its_code_and_no_traceback(
    ends: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(ALONE)
    (tmp_path / "own.py").write_text(f"{ends}\n")
    finished = here("launch", tmp_path / "job.yaml", tmp_path / "own.py")
    assert (finished.code, finished.output) == (code, f"accel-fsdp: the script ended with {said}\n")


CPUS = "distributed_type: MULTI_CPU\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
SAYS_WHO = """from accelerate import Accelerator
import os
accelerator = Accelerator()
place = os.environ["RANK"] + " of " + os.environ["WORLD_SIZE"]
mean = accelerator.reduce(__import__("torch").tensor(float(accelerator.process_index)), "mean").item()
os.write(1, f"rank {place}, {accelerator.distributed_type}, {accelerator.device}, mean {mean}\\n".encode())
"""


def test_processes_on_cpus_start_without_mpirun(tmp_path: Path) -> None:
    """Accelerate alone would start one."""
    (tmp_path / "job.yaml").write_text(CPUS)
    (tmp_path / "own.py").write_text(SAYS_WHO)
    finished = accel_fsdp("launch", tmp_path / "job.yaml", tmp_path / "own.py")
    assert finished.code == 0, finished.output
    for rank in range(2):
        assert f"rank {rank} of 2, DistributedType.MULTI_CPU, cpu:0, mean 0.5\n" in finished.output


@pytest.mark.parametrize("mpi", ["OMPI_COMM_WORLD_SIZE", ""])
def test_processes_that_mpirun_starts_are_not_started_again(
    mpi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(CPUS)
    (tmp_path / "own.py").write_text(SAYS_WHO)
    if mpi:
        monkeypatch.setenv(mpi, "2")
    finished = here("launch", "--dry-run", tmp_path / "job.yaml", tmp_path / "own.py")
    assert ("accelerate launch --multi_gpu" in finished.output) == (not mpi), finished.output
    assert "ACCELERATE_USE_CPU=" in finished.output


def test_without_mpirun_a_hostfile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(f"{CPUS}mpirun_config:\n  mpirun_hostfile: hosts\n")
    (tmp_path / "own.py").write_text(SAYS_WHO)
    monkeypatch.setenv("PATH", str(tmp_path))
    finished = here("launch", tmp_path / "job.yaml", tmp_path / "own.py")
    assert finished.code == 1
    assert "mpirun or mpiexec were not found" in finished.output
    assert "Traceback" not in finished.output


IGNORES = (
    "import signal\nprint([signal.getsignal(number).name for number in (signal.SIGINT, signal.SIGHUP)], flush=True)\n"
)


def test_signals_that_a_shell_ignores_stay_ignored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`nohup accel-fsdp launch ... &` in a script; the launcher says what ends the job instead."""
    (tmp_path / "job.yaml").write_text(ALONE)
    (tmp_path / "own.py").write_text(IGNORES)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        launched = here("launch", tmp_path / "job.yaml", tmp_path / "own.py")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (launched.code, capfd.readouterr().out) == (0, "['SIG_IGN', 'SIG_IGN']\n"), launched.output
    assert "SIGINT is ignored, as in the background of a shell; kill -TERM ends the job" in launched.output
