"""`accel-fsdp launch` of any script: it runs as Python runs it, and a hang ends and says where the ranks were."""

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from conftest import accel_fsdp, at_once, here, made_yaml

from accel_fsdp.launch import last_places, launcher

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


def test_the_place_of_a_rank_that_met_an_error_and_then_its_timeout(tmp_path: Path) -> None:
    error = 'Traceback (most recent call last):\n  File "/job/own.py", line 7, in step\nRuntimeError: closed by peer\n'
    stacks = 'Timeout (0:00:15)!\nThread 0x1 (most recent call first):\n  File "/job/begin.py", line 2 in <module>\n'
    for rank, text in enumerate((error + stacks, stacks, "")):
        (tmp_path / f"rank_{rank}").write_text(text)
    places = ["  rank 0: /job/own.py:7 in step", "  rank 1: /job/begin.py:2 in <module>", "  rank 2: wrote none"]
    assert last_places.lines(tmp_path)[1:] == places


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
