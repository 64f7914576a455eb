"""Machines of one job that were told different things: refused before the first step, on all of them, by name."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hosts
import pytest
from conftest import ROOT, SFT, Finished, made_yaml
from reference import job_words
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
SECONDS = 120
PORT = "29437"
SCRIPT = "import os\nimport accel_fsdp.ranks.cpu\nprint('rank', os.environ['RANK'], 'trains', flush=True)\n"


@pytest.fixture(scope="module")
def machines() -> Iterator[list[hosts.Host]]:
    with hosts.network("n1", "n2") as machines:
        yield machines


@dataclass
class Side:
    """What one machine is told."""

    file: Path
    script: Path
    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


def launched(machines: list[hosts.Host], sides: list[Side]) -> list[Finished]:
    """`accel-fsdp launch` on both machines."""
    place = ["--num-machines", "2", "--main-process-ip", "n1", "--main-process-port", PORT]
    started = [
        host.start(
            ["-m", "accel_fsdp", "launch", *place, "--machine-rank", str(rank), side.file, side.script, *side.words],
            **side.variables,
        )
        for rank, (host, side) in enumerate(zip(machines, sides, strict=True))
    ]
    return hosts.all_ended(started, SECONDS)


def job_file(folder: Path, **flags: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.yaml"
    file.write_text(made_yaml(num_processes="2", num_machines="2", main_process_ip="n1", fsdp_version="2", **flags))
    return file


def own_job(folder: Path, rank: int, model: Path) -> Side:
    """A script of the user's own on a machine, with what may differ between machines different."""
    script = folder / "train.py"
    words = ["--learning_rate", "1e-3", "--output_dir", str(folder / f"out{rank}"), f"--run_name=on-n{rank + 1}"]
    file = job_file(folder, mixed_precision="no", model=str(model))
    script.write_text(SCRIPT)
    own = {"TRITON_CACHE_DIR": str(folder), "GLOO_SOCKET_IFNAME": "eth0"} if rank else {}
    return Side(file, script, [*words, f"--host=n{rank + 1}", "--gpu", str(rank), f"--data={folder}/rows"], own)


def other_version(side: Side, folder: Path) -> None:
    info = folder / "peft-0.21.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.21.1\n")
    side.variables["PYTHONPATH"] = f"{folder}:{ROOT}"


def other_yaml(side: Side, key: str, value: str) -> None:
    side.file.write_text(re.sub(rf"{key}: .*", f"{key}: {value}", text := side.file.read_text()))
    assert side.file.read_text() != text


OF_ANY_SCRIPT: Mapping[str, tuple[Callable[[Side, Path], object], str]] = {
    "argument": (
        lambda side, _: side.words.__setitem__(1, "5e-2"),
        r"    --learning_rate +1e-3 +0 \(n1\)\n +5e-2 +1 \(n2\)",
    ),
    "one more argument": (
        lambda side, _: side.words.append("--packing"),
        r"    --packing +not set .*\n +given +1 \(n2\)",
    ),
    "yaml": (
        lambda side, _: other_yaml(side, "fsdp_reshard_after_forward", "false"),
        r"    FSDP_RESHARD_AFTER_FORWARD +true +0 \(n1\)\n +false +1 \(n2\)",
    ),
    "precision": (
        lambda side, _: other_yaml(side, "mixed_precision", "bf16"),
        r"ACCELERATE_MIXED_PRECISION +no +0 \(n1\)\n +bf16 +1 \(n2\)",
    ),
    "script": (
        lambda side, _: side.script.write_text(SCRIPT + "\n"),
        r"    script +\w+ +0 \(n1\)\n +\w+ +1 \(n2\)",
    ),
    "version": (other_version, r"    peft +[\d.]+ +0 \(n1\)\n +0\.21\.1 +1 \(n2\)"),
    "variable": (
        lambda side, _: side.variables.update(NVIDIA_TF32_OVERRIDE="0"),
        r"    NVIDIA_TF32_OVERRIDE +not set +0 \(n1\)\n +0 +1 \(n2\)",
    ),
}
"""What is other on machine 1, and what both machines say."""


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("planted", OF_ANY_SCRIPT)
def test_launchers_refuse_what_differs_before_ranks_start(
    planted: str, machines: list[hosts.Host], tiny_model: Path, tmp_path: Path
) -> None:
    change, message = OF_ANY_SCRIPT[planted]
    sides = [own_job(tmp_path / f"n{rank + 1}", rank, tiny_model) for rank in range(2)]
    change(sides[1], tmp_path)
    for done in launched(machines, sides):
        assert done.code == 1
        assert re.search(message, done.output), done.output
        assert "Traceback" not in done.output
        assert "trains" not in done.output
        assert len(re.findall(r" 1 \(n2\)$", done.output, re.MULTILINE)) == 1, done.output


@pytest.mark.slow
def test_machines_that_differ_in_what_may_differ_train(
    machines: list[hosts.Host], tiny_model: Path, tmp_path: Path
) -> None:
    """Paths, hosts and caches; and what the user names, on one machine."""
    sides = [own_job(tmp_path / f"n{rank + 1}", rank, tiny_model) for rank in range(2)]
    sides[1].words[1] = "5e-2"
    sides[1].variables["ACCEL_FSDP_MAY_DIFFER"] = "learning-rate"
    done = launched(machines, sides)
    assert [process.code for process in done] == [0, 0], done[0].output + done[1].output
    assert {re.findall(r"rank (\d) trains", process.output)[0] for process in done} == {"0", "1"}


# train/sft.py: what the ranks know


@contextmanager
def covered(host: hosts.Host, place: Path, other: Path) -> Iterator[None]:
    """Another file or folder at the same path on one machine."""
    with hosts.changed(host, ["mount", "--bind", str(other), str(place)], ["umount", "--lazy", str(place)]):
        yield


def other_weights(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def other_merges(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (model / "tokenizer.json").write_text(json.dumps(content))


def other_rows(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def write(rows: Path) -> None:
        rows.write_text("".join(change(rows.read_text().splitlines(keepends=True))))

    return write


TWO_DIGESTS = r" +\w+ +0 \(n1\)\n +\w+ +1 \(n2\)"
AT_ONE_PATH: Mapping[str, tuple[str, Callable[[Path], None], str]] = {
    "weights": ("model", other_weights, f"    weights{TWO_DIGESTS}"),
    "tokenizer": ("model", other_merges, f"    tokenizer{TWO_DIGESTS}"),
    "other rows": ("rows", other_rows(lambda rows: rows[::-1]), f"    rows.content{TWO_DIGESTS}"),
    "fewer rows": ("rows", other_rows(lambda rows: rows[:40]), r"    rows +48 +0 \(n1\)\n +40 +1 \(n2\)"),
}


def refused(finished: Sequence[Finished], message: str) -> None:
    """Both machines say what differs, and none has taken a step."""
    for done in finished:
        assert done.code == 1
        assert re.search(message, done.output), done.output
        assert "host memory while loading" not in done.output


@dataclass
class Job:
    """`train/sft.py` on one rank of each machine, each of which loads the weights itself."""

    machines: list[hosts.Host]
    folder: Path
    model: Path
    rows: Path

    def sides(self) -> list[Side]:
        words = job_words(self.model, self.rows, self.folder / "out", 2, 2)
        files = [
            job_file(
                self.folder / host.name, model=str(self.model), mixed_precision="no", ram_efficient_loading="false"
            )
            for host in self.machines
        ]
        return [Side(file, SFT, list(words)) for file in files]

    def other(self, path: Path) -> Path:
        """A copy to be changed."""
        target = self.folder / "other" / path.name
        target.parent.mkdir(exist_ok=True)
        return Path(shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target))


@pytest.fixture
def job(machines: list[hosts.Host], tiny_model: Path, text_data: Path, tmp_path: Path) -> Job:
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(tiny_model, model)
    shutil.copy(text_data, rows)
    return Job(machines, tmp_path, model, rows)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("planted", AT_ONE_PATH)
def test_ranks_refuse_other_contents_at_the_same_path(planted: str, job: Job) -> None:
    what, change, message = AT_ONE_PATH[planted]
    place = job.model if what == "model" else job.rows
    change(other := job.other(place))
    with covered(job.machines[1], place, other):
        refused(launched(job.machines, job.sides()), message)


def test_machines_that_were_told_the_same_train(job: Job) -> None:
    """Each may read its data, log and wait in its own way."""
    sides = job.sides()
    sides[1].words += ["--dataset_num_proc", "1", "--hang_timeout", "700", "--run_name", "second"]
    done = launched(job.machines, sides)
    assert [process.code for process in done] == [0, 0], done[0].output + done[1].output


OTHER_ARGUMENTS: Mapping[str, tuple[list[str], str, str]] = {
    "seed": (["--seed", "7"], "42", "7"),
    "gradient_accumulation_steps": (["--gradient_accumulation_steps", "2"], "1", "2"),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", OTHER_ARGUMENTS)
def test_ranks_of_any_launcher_refuse_other_arguments(name: str, job: Job) -> None:
    """torchrun compares nothing, and numbers the machines as they come."""
    words, here, there = OTHER_ARGUMENTS[name]
    (sides := job.sides())[1].words += words
    for done in under_torchrun(job.machines, sides):
        refused([done], rf"    {name} ")
        assert re.search(rf" {re.escape(here)} +\d \(n1\)$", done.output, re.MULTILINE), done.output
        assert re.search(rf" {re.escape(there)} +\d \(n2\)$", done.output, re.MULTILINE), done.output


def under_torchrun(machines: list[hosts.Host], sides: list[Side]) -> list[Finished]:
    started = []
    for number, (host, side) in enumerate(zip(machines, sides, strict=True)):
        meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=n1:29439", f"--rdzv-conf=is_host={int(not number)}"]
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meeting, "--rdzv-id=job"]
        started.append(host.start([*torchrun, SFT, "--accelerate_config", side.file, *side.words]))
    return hosts.all_ended(started, SECONDS)
