"""Runs that are killed, signalled or run out of disk: what they leave behind, and that a resume goes on exactly."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, SFT, Finished, accelerate_launch, made_yaml, run, warm_python, write_texts
from reference import job_words, losses_of, train
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from accel_fsdp.checkpoints import completeness

KILLS = ROOT / "tests" / "killing.py"
MOMENTS = ROOT / "tests" / "moments.py"
STEPS, SAVED, GLOBAL_BATCH = 8, 4, 12
TOLERANCE = 1e-4
LORA = ("--save_steps", "100", "--use_peft", "--lora_dropout", "0.0", "--train_sampling_strategy", "random")


def config_of(folder: Path, model: Path, version: str, **flags: str) -> Path:
    path = folder / f"fsdp{version}-{'-'.join(flags.values())}.yaml"
    fixed = {"model": str(model), "num_processes": "2", "mixed_precision": "no", "fsdp_version": version}
    path.write_text(made_yaml(**{**fixed, "state_dict_type": "SHARDED_STATE_DICT", **flags}))
    return path


def words(model: Path, data: Path, output: Path, ranks: int, *more: str) -> list[str]:
    """Steps of GLOBAL_BATCH rows in two micro-batches."""
    shared = job_words(model, data, output, STEPS, GLOBAL_BATCH // ranks // 2, save_steps=SAVED)
    return [*shared, "--gradient_accumulation_steps", "2", *more]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """55 rows: the fifth step ends an epoch with seven, so that step 4 is inside of it."""
    return write_texts(tmp_path_factory.mktemp("rows") / "rows.jsonl", 55)


@pytest.fixture(scope="module")
def expected(tiny_model: Path, rows: Path) -> list[float]:
    return train(tiny_model, rows, steps=STEPS, global_batch=GLOBAL_BATCH).losses


@pytest.fixture(scope="module")
def expected_lora(tiny_model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("straight")
    flags = words(tiny_model, rows, folder / "run", 2, *LORA)
    finished = accelerate_launch(config_of(folder, tiny_model, "2"), SFT, *flags)
    assert finished.code == 0, finished.output
    return losses_of(folder / "run", STEPS)


def stored_moments(checkpoint: Path, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state as torch reads it from a sharded checkpoint, in this one process."""
    dcp_to_torch_save(checkpoint / "optimizer_0", folder / "stored.pt")
    states = torch.load(folder / "stored.pt", weights_only=True)["optimizer"]["state"]
    return {name: state for name, state in states.items() if state}


def assert_resumes(
    config: Path, ranks: int, source: Path, folder: Path, args: tuple[Path, Path], expected: list[float], *more: str
) -> Finished:
    """A copy of `source` resumed on `ranks` processes: moments bit-equal after loading, losses those of no stop."""
    run = folder / f"on{ranks}"
    shutil.copytree(source, run)
    newest = completeness.choose(run).newest
    assert newest is not None
    flags = words(*args, run, ranks, "--resume_from_checkpoint", "true", *more)
    launcher = ["--num_processes", str(ranks)]
    finished = accelerate_launch(config, MOMENTS, *flags, launcher=launcher, PROBE_OUT=str(folder))
    assert finished.code == 0, finished.output
    assert losses_of(run, STEPS) == pytest.approx(expected, abs=TOLERANCE)
    loaded = torch.load(folder / "moments.pt", weights_only=True)
    stored = stored_moments(newest, folder)
    assert loaded.keys() == stored.keys()
    for name, state in stored.items():
        assert loaded[name].keys() == state.keys()
        assert all(torch.equal(loaded[name][key].float(), state[key].float()) for key in state), name
        assert state["exp_avg"].abs().sum() > 0
    return finished


def test_killed_in_a_step_and_resumed_on_other_ranks_and_strategies(
    tiny_model: Path, rows: Path, expected: list[float], tmp_path: Path
) -> None:
    """Rank 1 alone dies; the others must not wait for it, and rank 0 says what there is to go on from."""
    config, run = config_of(tmp_path, tiny_model, "1"), tmp_path / "run"
    flags = words(tiny_model, rows, run, 2)
    killed = accelerate_launch(config, KILLS, *flags, KILL_AT="step:5", KILL_RANKS="1", KILL_SEED="1")
    assert killed.code != 0
    assert "error: a collective failed" in killed.output, killed.output
    assert f"checkpoint-{SAVED} is the newest complete checkpoint" in killed.output
    args = (tiny_model, rows)
    assert_resumes(config_of(tmp_path, tiny_model, "1", strategy="2"), 3, run, tmp_path, args, expected)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("where", [(), ("--async_checkpoints",)], ids=["in line", "background"])
def test_killed_in_a_save_and_resumed_on_other_ranks_and_engines(
    where: tuple[str, ...], tiny_model: Path, rows: Path, expected: list[float], tmp_path: Path
) -> None:
    config, run = config_of(tmp_path, tiny_model, "2"), tmp_path / "run"
    flags = words(tiny_model, rows, run, 2, *where)
    killed = accelerate_launch(config, KILLS, *flags, KILL_AT=f"save:{STEPS}", KILL_SEED="2")
    assert killed.code != 0
    half = tmp_path / "run" / f"checkpoint-{STEPS}"
    assert completeness.flaw(half)
    other = config_of(tmp_path, tiny_model, "1")
    finished = assert_resumes(other, 1, run, tmp_path, (tiny_model, rows), expected, *where)
    assert f"{half.name}: its run ended while it was written" in finished.output


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("version", ["1", "2"])
def test_a_signal_to_one_rank_stops_all_of_them_and_lora_goes_on(
    version: str, tiny_model: Path, rows: Path, expected_lora: list[float], tmp_path: Path
) -> None:
    """SIGTERM as rank 1 begins step 2: a checkpoint soon after, and the code that says so; then the other FSDP."""
    only_one = {"KILL_RANKS": "1", "KILL_SIGNAL": "SIGTERM"}
    config, run = config_of(tmp_path, tiny_model, version), tmp_path / "run"
    stopped = accelerate_launch(config, KILLS, *words(tiny_model, rows, run, 2, *LORA), KILL_AT="at:2", **only_one)
    assert re.findall(r"exitcode +: (-?\d+)", stopped.output) == ["75", "75"], stopped.output
    assert re.search(r"stopped: SIGTERM after step [23456]\n", stopped.output)
    assert len(list(run.glob("checkpoint-*"))) == 1
    other = config_of(tmp_path, tiny_model, "2" if version == "1" else "1")
    ranks = 3 if version == "1" else 1
    assert_resumes(other, ranks, run, tmp_path, (tiny_model, rows), expected_lora, *LORA)


class Job:
    """A launch whose processes the test can signal."""

    def __init__(self, config: Path, *flags: str) -> None:
        launcher = [sys.executable, "-m", "accel_fsdp", "launch", str(config), str(SFT)]
        self.process = subprocess.Popen(
            [*launcher, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **warm_python()},  # for its ranks; signals are the launcher's
            cwd=ROOT,
            start_new_session=True,
        )
        self.output = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:  # until the first step is done
            self.output += line
            if "  loss " in line:
                break
        self.ranks = psutil.Process(self.process.pid).children()

    def finish(self) -> None:
        """Waits until every process is gone; one that stays fails the test."""
        try:
            self.output += self.process.communicate(timeout=60)[0]
            _, left = psutil.wait_procs(self.ranks, timeout=30)
            assert left == []
        finally:
            for rank in self.ranks:
                if rank.is_running():
                    rank.kill()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("number", "to_all"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)], ids=["all", "launcher"]
)
def test_a_signal_to_the_launcher_or_to_all(
    number: signal.Signals, to_all: bool, tiny_model: Path, rows: Path, tmp_path: Path
) -> None:
    """One checkpoint, no rank left, and a resume that continues."""
    config, run = config_of(tmp_path, tiny_model, "2"), tmp_path / "run"
    flags = words(tiny_model, rows, run, 2, "--save_steps", "10000")
    job = Job(config, *flags, "--max_steps", "10000")
    assert len(job.ranks) == 2
    for process in job.ranks if to_all else []:
        process.send_signal(number)
    os.kill(job.process.pid, number)
    job.finish()
    assert job.process.returncode == 128 + number
    assert f"stopped: {number.name} after step" in job.output
    saved = completeness.choose(run)
    assert saved.newest is not None
    assert list(run.glob("checkpoint-*")) == [saved.newest]
    step = int(saved.newest.name.removeprefix("checkpoint-"))
    more = ["--resume_from_checkpoint", "auto", "--max_steps", str(step + 2)]
    resumed = accelerate_launch(config, SFT, *flags, *more)
    assert resumed.code == 0, resumed.output
    assert completeness.choose(run).newest == run / f"checkpoint-{step + 2}"


def in_small_disk(size: str, config: Path, script: Path, *flags: str, **environment: str) -> Finished:
    """A launch whose `--output_dir` is a tmpfs of its own namespace, copied to `copy` beside it at the end."""
    output = flags[flags.index("--output_dir") + 1]
    warm = warm_python()
    launch = [warm["PYTHON_EXEC"], "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    mount = f"mount -t tmpfs -o {size} none {output} && "
    keep = f"; code=$?; cp -r {output} {Path(output).with_name('copy')}; umount {output}; exit $code"
    Path(output).mkdir()
    inside = mount + shlex.join([*launch, "--config_file", str(config), str(script), *flags]) + keep
    return run(["unshare", "--map-root-user", "--mount", "sh", "-c", inside], **warm, **environment)


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode != 0,
    reason="no namespaces for mounts",
)
def test_a_disk_that_fills_up(tiny_model: Path, rows: Path, tmp_path: Path) -> None:
    """Full in the middle of a save, read-only: one error, no hang, nothing lost."""
    config = config_of(tmp_path, tiny_model, "2")
    flags = words(tiny_model, rows, tmp_path / "run", 2)
    full = in_small_disk("size=8m", config, ROOT / "tests" / "filling.py", *flags)
    assert full.code != 0
    assert re.search(r"error: cannot save .*checkpoint-8: the disk is full, 0\.\d MiB are free", full.output), (
        full.output
    )
    assert f"checkpoint-{SAVED} is the newest complete checkpoint" in full.output
    left = completeness.choose(tmp_path / "copy")
    assert left.newest == tmp_path / "copy" / f"checkpoint-{SAVED}"
    (tmp_path / "run").rmdir()
    shutil.rmtree(tmp_path / "copy")
    refused = in_small_disk("ro", config, SFT, *flags)
    assert "error: cannot write" in refused.output
    assert "Read-only file system" in refused.output
    (tmp_path / "run").rmdir()
    assert_every_part_says_so(tiny_model, rows, tmp_path)


def assert_every_part_says_so(model: Path, rows: Path, folder: Path) -> None:
    """On one process, where Trainer writes each part by itself: the errors of torch, safetensors and json."""
    parts = ("begin", "weights", "optimizer", "random", "state", "export")
    config = folder / "one.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\n")
    flags = words(model, rows, folder / "run", 1, "--max_steps", "1", "--save_steps", "1")
    finished = in_small_disk("size=12m", config, ROOT / "tests" / "filling.py", *flags, FILL=",".join(parts))
    for part in parts:
        [own] = re.findall(rf"FILLING {part}\n(.*?)(?=FILLING|CODES)", finished.output, re.DOTALL)
        verb = r"cannot write \S+/final" if part == "export" else r"cannot save \S+/checkpoint-1"
        assert re.search(rf"error: {verb}: the disk is full, 0\.0 MiB are free", own), own
        assert "Traceback" not in own
        assert f"LEFT {['checkpoint-1'] if part == 'export' else []}" in own
    assert f"CODES {[1] * len(parts)}" in finished.output
