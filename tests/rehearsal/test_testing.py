"""`accel_fsdp.testing`: functions of a test run on ranks that live as long as the session."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch import nn

from accel_fsdp import testing
from accel_fsdp.errors import UserError
from accel_fsdp.rehearsal import janitor


def elements() -> tuple[int, int]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return sum(parameter.to_local().numel() for parameter in model.parameters()), os.getpid()


def trained(steps: int) -> list[float]:
    """Losses of one rank's rows, averaged over the ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.arange(16.0).reshape(4, 4) / 16
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for _ in range(steps):
        loss = model(mine).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def alone(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows, losses = torch.arange(16.0).reshape(4, 4) / 16, []
    for _ in range(steps):
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("no such row")
    dist.barrier()


def dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleeps(place: Path) -> None:
    (place / str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    time.sleep(100)


def computes_alone() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(8, 8))
    if dist.get_rank() == 1:
        model(torch.ones(1, 8))


def says(text: str) -> int:
    print(f"{text} of {dist.get_rank()}")
    warnings.warn("look out", stacklevel=1)
    os.write(2, b"from C\n")
    return dist.get_rank()


def given(value: Any) -> Any:
    return value


def sharded() -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(nn.Linear(8, 8))


def parameter() -> Any:
    return next(sharded().parameters())


def function_of_its_own() -> Callable[[], None]:
    return lambda: None


def gathered() -> Any:
    return parameter().full_tensor().detach()


def world() -> tuple[int, int]:
    from accelerate import Accelerator

    return dist.get_world_size(), Accelerator().num_processes


def pids(ranks: testing.Ranks) -> set[int]:
    return {process for _, process in ranks(elements)}


def test_the_same_processes_serve_every_call(fsdp_ranks: testing.Ranks) -> None:
    first, second = fsdp_ranks(elements), fsdp_ranks(elements)
    assert [count for count, _ in first] == [63, 63]
    assert first == second
    assert len({process for _, process in first} | {os.getpid()}) == 3


@pytest.mark.parametrize(
    ("function", "args", "says"),
    [
        (lambda: 1, (), "the function <lambda> can't be sent to the ranks"),
        (function_of_its_own(), (), "can't be sent"),
        (given, (lambda: 1,), "argument 1, of type function, can't be sent"),
    ],
    ids=["lambda", "local", "argument"],
)
def test_what_cannot_be_sent(fsdp_ranks: testing.Ranks, function: Any, args: Any, says: str) -> None:
    before = pids(fsdp_ranks)
    with pytest.raises(UserError, match=says) as raised:
        fsdp_ranks(function, *args)
    assert "top of a module" in raised.value.fix
    assert pids(fsdp_ranks) == before


@pytest.mark.parametrize(
    ("function", "says"),
    [(sharded, "FSDPLinear"), (parameter, "DTensor"), (function_of_its_own, "function")],
)
def test_what_cannot_be_returned(fsdp_ranks: testing.Ranks, function: Any, says: str) -> None:
    before = pids(fsdp_ranks)
    with pytest.raises(UserError, match=f"rank 0 can't return a value of type {says}") as raised:
        fsdp_ranks(function)
    assert "full_tensor()" in raised.value.fix
    assert pids(fsdp_ranks) == before
    assert [tuple(rank.shape) for rank in fsdp_ranks(gathered)] == [(8, 8), (8, 8)]


def test_a_function_that_the_ranks_cannot_import(fsdp_ranks: testing.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    before, module = pids(fsdp_ranks), types.ModuleType("made_here")
    exec("def elements(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "made_here", module)
    with pytest.raises(UserError, match=r"the ranks can't import .*made_here") as raised:
        fsdp_ranks(vars(module)["elements"])
    assert "pythonpath" in raised.value.fix
    assert pids(fsdp_ranks) == before


def test_output_is_the_tests_own(fsdp_ranks: testing.Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    fsdp_ranks(elements)
    assert capfd.readouterr() == ("", "")
    assert fsdp_ranks(says, "word") == [0, 1]
    out, err = capfd.readouterr()
    assert err == ""
    ranks = re.split(r"^--- output of rank (\d) ---$", out, flags=re.MULTILINE)
    assert ranks[1::2] == ["0", "1"]
    for rank, text in enumerate(ranks[2::2]):
        assert [f"word of {rank}" in text, "UserWarning: look out" in text, "from C" in text] == [True] * 3
        assert f"word of {1 - rank}" not in text


@pytest.mark.slow
def test_the_next_call_works_after_ctrl_c_a_failure_and_a_death(
    fsdp_ranks: testing.Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        fsdp_ranks(sleeps, tmp_path)
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.iterdir())
    with pytest.raises(testing.RankError, match=r"(?s)rank 1:.*in fails_on.*ValueError: no such row") as raised:
        fsdp_ranks(fails_on, 1)
    assert "serving.py" not in str(raised.value)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(testing.RankError, match=r"rank 1 ended without an answer \(SIGKILL\)"):
        fsdp_ranks(dies_on, 1)
    assert capfd.readouterr().out.startswith("--- output of rank 1 ---\nlast words\n")
    assert [count for count, _ in fsdp_ranks(elements)] == [63, 63]


def test_a_hang_says_where_each_rank_stands(fsdp_ranks: testing.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    before, line = pids(fsdp_ranks), computes_alone.__code__.co_firstlineno + 5
    monkeypatch.setattr(fsdp_ranks, "timeout_seconds", 1)
    with pytest.raises(TimeoutError) as raised:
        fsdp_ranks(computes_alone)
    first, *stack = str(raised.value).splitlines()
    message = rf"no answer of rank 1 after 1 s: rank 0 has ended; rank 1 waits in \w+ at {__file__}:{line}"
    assert re.fullmatch(message, first), first
    assert stack[:2] == ["rank 1:", f'  File "{__file__}", line {line}, in computes_alone']
    assert not any(psutil.pid_exists(pid) for pid in before)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["fsdp1_full_shard", "fsdp2"])
def test_a_yaml_decides_what_accelerate_does(name: str, tmp_path: Path) -> None:
    text = (ROOT / f"accelerate_configs/{name}.yaml").read_text()
    config = tmp_path / "fsdp.yaml"
    config.write_text(
        text.replace("mixed_precision: bf16", "mixed_precision: 'no'").replace("TRANSFORMER_BASED_WRAP", "NO_WRAP")
    )
    with testing.Ranks(config_file=config) as ranks:
        ours, processes = ranks(trained, 3), pids(ranks)
    assert not any(psutil.pid_exists(pid) for pid in processes)
    ranks.close()
    assert ours[0] == ours[1] == pytest.approx(alone(3), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "processes", "says"),
    [
        ("tpu", None, "tpu.yaml can't run on CPU ranks: TPU"),
        ("fsdp2_hybrid_2x8", 3, "an even number of processes, 4 or more"),
        ("fsdp2", 0, "0 processes"),
        ("none", None, "cannot read .*none.yaml"),
    ],
)
def test_a_yaml_that_no_cpu_can_run(name: str, processes: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        testing.Ranks(processes, config_file=ROOT / f"accelerate_configs/{name}.yaml")


@pytest.mark.parametrize(("name", "processes"), [("fsdp2", 2), ("fsdp1_hybrid_shard", 4)])
def test_a_yaml_of_many_gpus_runs_on_few_ranks(name: str, processes: int) -> None:
    config = ROOT / f"accelerate_configs/{name}.yaml"
    assert testing.Ranks(config_file=config).processes == processes
    assert testing.Ranks(8, config_file=config).processes == 8


@pytest.mark.parametrize("fsdp_ranks", [1], indirect=True)
def test_a_parameter_is_a_number(fsdp_ranks: testing.Ranks) -> None:
    assert fsdp_ranks(world) == [(1, 1)]


SLEEPING = """
import time
from pathlib import Path

import torch.distributed as dist

def sleeps(place):
    (place / str(dist.get_rank())).touch()
    dist.barrier()
    time.sleep(100)

def test_sleeps(fsdp_ranks):
    fsdp_ranks(sleeps, Path("started"))
"""


def project(folder: Path, **files: str) -> list[str]:
    """A project of a user's, with the fixture; the words that run its tests."""
    (folder / "started").mkdir()
    for name, text in {"conftest": 'pytest_plugins = ["accel_fsdp.testing"]', **files}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "tmp").mkdir()
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder)]


def left(folder: Path) -> list[object]:
    """What is in its folder for temporary files, and processes that have it in their environment."""
    left: list[object] = [path for path in (folder / "tmp").iterdir() if path.name.startswith("accel-fsdp")]
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder / "tmp") and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
        except (psutil.Error, OSError):
            continue
    return left


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda signal_number: signal_number.name)
def test_a_signal_to_pytest_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    words, output = project(tmp_path, test_sleeping=SLEEPING), tmp_path / "output"
    with open(output, "w") as log:
        process = subprocess.Popen(
            words, cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=log, start_new_session=True
        )
    end = time.monotonic() + 60
    while len(list((tmp_path / "started").iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(left(tmp_path)) >= 4, output.read_text()
    os.killpg(process.pid, number)
    process.wait(60)
    while left(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert left(tmp_path) == []
    assert "Traceback" not in output.read_text()
    assert ("KeyboardInterrupt" in output.read_text()) == (number == signal.SIGINT)


EXAMPLES = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", (ROOT / "docs/rehearse.md").read_text(), flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_whoever_was_forked_meanwhile_does_not_keep_the_janitor_waiting() -> None:
    """As the workers of a DataLoader in the test's own process: they hold the janitor's pipe open."""
    with janitor.folder() as place:
        child = os.fork()
        if not child:
            time.sleep(100)
            os._exit(0)
    assert not place.exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


OWN_PROCESS = """
import os

def own_process(place):
    print("seen by rank")
    with open(os.path.join(place, "pids"), "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + f" {os.getpid()}\\n")
    return 1

def test_own_process(fsdp_ranks):
    assert fsdp_ranks(own_process, "started") == EXPECTED
"""


@pytest.mark.slow
def test_the_pages_examples_on_two_workers_of_xdist(tmp_path: Path) -> None:
    """Each worker has ranks of its own; a test that fails after its ranks have answered shows what they printed."""
    wrong, right = (OWN_PROCESS.replace("EXPECTED", f"[1, {last}]") for last in (2, 1))
    words = project(tmp_path, **dict(EXAMPLES), test_a=wrong, test_z=right)  # the first worker's and the last one's
    (tmp_path / "configs").mkdir()
    config = (ROOT / "accelerate_configs/ddp.yaml").read_text()
    (tmp_path / "configs/ddp.yaml").write_text(config)
    finished = subprocess.run(
        [*words, "-n", "2"], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300
    )
    assert "1 failed, 3 passed" in finished.stdout, finished.stdout
    assert finished.stdout.count("--- output of rank 1 ---\nseen by rank") == 1
    lines = [line.split() for line in (tmp_path / "started/pids").read_text().splitlines()]
    assert len({worker for worker, _ in lines}) == 2
    assert len({pid for _, pid in lines}) == 4
    assert left(tmp_path) == []
