"""`accel-fsdp launch` of a script of which nothing is known: a hang ends and says where, another script goes on."""

import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conftest import Finished, accel_fsdp, at_once, made_yaml

from accel_fsdp.launch import hangs, launcher, script_watch
from accel_fsdp.launch.beats import COMPUTES, DEBUGGED, Beat
from accel_fsdp.launch.hangs import AFTER, Patience, PeerState
from accel_fsdp.ranks import hang

SECONDS = "6"
BEGIN = """
import hashlib, os, sys, time
from accel_fsdp import cpu
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
ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    if step == 2 and accelerator.process_index == 1:
        sleep()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
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
Trainer(LlamaForCausalLM(config), args, train_dataset=rows, callbacks=[Sleeps()]).train()
"""
SLOW = """
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**7)  # one call into C, for longer than the watch allows
dist.barrier()
if dist.get_rank():
    began, text = time.time(), open("/dev/zero", "rb")
    while time.time() < began + 15:  # at one place, computing nothing: it reads
        text.read(100_000); time.sleep(0.5)
dist.barrier()
print("the script has ended", flush=True)
cpu.finish(0)
"""


def yaml_of(folder: Path) -> Path:
    """The YAML of a job with two ranks."""
    path = folder / "job.yaml"
    path.write_text(made_yaml(model="llama-3.1-8b", num_processes="2", mixed_precision="no"))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return yaml_of(tmp_path)


SLEEPING = {
    "torch": (DDP, r"rank 0 of \S+ waits in all_reduce at \S+own\.py:14 in <module>"),
    "accelerate": (ACCELERATE, r"rank 0 of \S+ waits in \w+ at \S+own\.py:18 in <module>"),
    "trainer": (TRAINER, r"rank 0 of \S+ waits in \w+ at \S+\.py:\d+ in forward"),
}


@pytest.fixture(scope="module")
def asleep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """How each script ended, all launched at the same time."""
    launches = []
    for kind, (body, _) in SLEEPING.items():
        folder = tmp_path_factory.mktemp(kind)
        job, script = yaml_of(folder), folder / "own.py"
        if body == ACCELERATE:
            text = job.read_text().replace("TRANSFORMER_BASED_WRAP", "NO_WRAP")
            job.write_text(re.sub(r".*layer_cls.*\n", "", text))
        script.write_text(BEGIN.removeprefix("\n") + body.replace("OUT", str(folder / "run")))
        launches.append(partial(accel_fsdp, "launch", "--no-check", "--hang-timeout", SECONDS, job, script))
    return dict(zip(SLEEPING, at_once(launches), strict=True))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", SLEEPING)
def test_a_rank_that_sleeps_is_named(kind: str, asleep: dict[str, Finished]) -> None:
    ended, (_, waits) = asleep[kind], SLEEPING[kind]
    assert ended.code == 1, ended.output
    message = r"error: rank 1 of \S+ \(process \d+\) has done nothing for \d+ s; 1 rank of 2 waits in a collective\n"
    assert re.search(message, ended.output), ended.output
    assert re.search(rf"why: rank 1 of \S+ is at \S+own\.py:8 in sleep; {waits}", ended.output), ended.output
    assert re.search(r"--- rank 1 of \S+, at .*\n(  .*\n)*  File .*own\.py\", line 8, in sleep\n", ended.output)
    assert "--hang-timeout SECONDS" in ended.output[ended.output.index("--- rank 1 of") :]  # the advice comes last
    assert "the script has ended" not in ended.output


@pytest.mark.slow
def test_a_slow_script_goes_on(job: Path, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(BEGIN + SLOW)
    ended = accel_fsdp("launch", "--hang-timeout", SECONDS, job, script)
    assert ended.code == 0, ended.output
    assert ended.output.count("the script has ended") == 2


def test_what_hangs() -> None:
    """All ranks do nothing, and some wait for others; by default for nearly as long as the collective may take."""
    still = Beat(0, "n1", "n1", 7, step=None, doing="", still=700, quiet=700, allowed=540)
    asleep, waits = replace(still, rank=1, pid=8), replace(still, collective="barrier", quiet=0)
    given, default = Patience(100, longest_silence=300), Patience(longest_silence=300)

    def verdict(first: Beat, second: Beat, patience: Patience = default, silent: float = 0.0) -> str:
        return hangs.verdict_without_steps({0: PeerState(first, 0.0), 1: PeerState(second, silent)}, patience)

    nothing = "rank 1 of n1 (process 8) has done nothing for 700 s; 1 rank of 2 waits in a collective"
    assert verdict(waits, asleep) == nothing
    assert verdict(waits, replace(waits, rank=1)) == "all ranks have waited in collectives for 700 s"
    assert verdict(waits, replace(asleep, quiet=3)) == ""  # one call, which computes
    assert verdict(waits, replace(asleep, still=3)) == ""
    assert verdict(still, asleep) == ""  # none waits for another
    assert verdict(replace(waits, allowed=1620), asleep) == ""
    assert verdict(replace(waits, allowed=1620), asleep, given) == nothing
    assert verdict(waits, asleep, Patience(800)) == ""
    ended = "rank 1 of n1 (process 8) has ended its script; 1 rank of 2 waits in a collective"
    assert verdict(waits, replace(asleep, still=0, quiet=0, doing=AFTER), silent=600) == ended
    assert verdict(waits, replace(asleep, still=0, quiet=0, doing=AFTER), silent=500) == ""
    assert (
        verdict(replace(waits, still=200), asleep, silent=301) == "no heartbeat of rank 1 of n1 (process 8) for 301 s"
    )
    assert verdict(replace(still, still=200, quiet=200), asleep, silent=301) == ""  # it doesn't wait for rank 1
    for alive in (COMPUTES, DEBUGGED):
        seen = replace(waits, still=400, mates={"1": alive})
        assert verdict(seen, replace(asleep, still=1, quiet=1), silent=400) == ""


SCRIPTS = {
    "names": "import sys, own_helper\nprint(sorted(globals()), __name__, __file__, __spec__, sys.argv, sys.path[0])\n",
    "spawn": (
        "import multiprocessing\nclass Own:\n    pass\ndef show(own): print(type(own), flush=True)\n"
        "spawn = multiprocessing.get_context('spawn')\n"
        "if __name__ == '__main__':\n    own = spawn.Process(target=show, args=(Own(),))\n    own.start(); own.join()\n"
    ),
    "error": "def f():\n    raise ValueError('x')\ntry:\n    f()\nexcept ValueError as error:\n    {}['a']\n",
    "hook": "import sys\nsys.excepthook = lambda *all: print('own', all[0])\n1 / 0\n",
    "syntax": "print(1)\nif:\n",
    "exit": "import sys, atexit\natexit.register(print, 'last')\nsys.exit('why')\n",
    "code": "raise SystemExit(7)\n",
    "thread": (
        "import pickle, sys, threading, time\nclass Own:\n    pass\n"
        "def later():\n    time.sleep(0.3)\n    print(pickle.loads(pickle.dumps(Own())), sys.argv)\n"
        "Own.__repr__ = lambda own: 'Own'\nthreading.Thread(target=later).start()\n"
    ),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("kind", "before"),
    [
        *((kind, (launcher.WATCHED, launcher.BY_COLLECTIVES)) for kind in SCRIPTS),
        *((kind, (launcher.ON_CPU,)) for kind in ("names", "error")),
    ],
)
def test_a_script_of_a_launch_runs_as_python_runs_it(kind: str, before: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPTS[kind])
    (tmp_path / "own_helper.py").touch()

    def run(*before: str) -> tuple[int, str, str]:
        words = [sys.executable, *before, "own.py", "--a", "b"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        return done.returncode, done.stdout, done.stderr

    assert run(*before) == run()


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_a_time_that_cannot_be(seconds: str, job: Path) -> None:
    refused = accel_fsdp("launch", "--hang-timeout", seconds, job, "own.py")
    assert refused.code == 2
    assert f"error: --hang-timeout {seconds}" in refused.output


def test_a_rank_that_has_just_moved_has_not_waited() -> None:
    """A thread looks once a second where it is: between two looks a sign of life took the old place's time."""
    watch = script_watch.ScriptWatch(6)
    watch.begin()
    watch._place, watch._place_since = (), time.monotonic() - 100
    beat, _ = watch._own_beat()
    watch.end()
    assert beat.still < 50


def test_a_watch_may_end_while_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's watch begins in a thread, and the script's own Trainer ends it at that moment."""
    watch = script_watch.ScriptWatch(6)
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == hang.WATCHES:
            watch.leave()
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    watch.begin()
    for thread in started:
        thread.join(5)
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("watches", [True, False])
def test_what_watches_read_is_not_the_scripts(watches: bool) -> None:
    """They read what the system says of all processes: idle ranks of `launch --cpu` counted as busy."""
    done, read = threading.Event(), threading.Event()

    def reads() -> None:
        with open("/dev/zero", "rb", buffering=0) as zeros:
            zeros.read(1 << 20)
        read.set()
        done.wait()

    before = script_watch._moved_bytes()
    thread = threading.Thread(target=reads, name=hang.WATCHES if watches else None, daemon=True)
    thread.start()
    read.wait()
    moved = script_watch._moved_bytes() - before
    done.set()
    assert (moved < 1 << 20) == watches
