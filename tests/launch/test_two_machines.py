"""`train/sft.py` on two machines: it learns as one process does, and ends on both where they differ or one fails."""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from conftest import SFT, Finished, made_yaml
from reference import Reference, job_words, losses_of, train
from safetensors.torch import load_file, save_file

from accel_fsdp.errors import UserError
from accel_fsdp.training import arguments

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
STEPS, PER_RANK, RANKS = 6, 2, 4
HANG_SECONDS = 15
SECONDS = 120
ELASTIC = {
    "PET_NNODES": "1:2",
    "PET_NPROC_PER_NODE": "2",
    "PET_MAX_RESTARTS": "3",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "n1:29455",
    "PET_RDZV_ID": "elastic",
    "PET_RDZV_CONF": "last_call_timeout=10",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""What Kubeflow tells torchrun of an elastic job."""
FAULT = """
import os, runpy, signal, time
from pathlib import Path
import accel_fsdp.training
from transformers import TrainerCallback, trainer

def wait():
    time.sleep(300)

class Fault(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and os.environ["RANK"] == "3":
            Path("NOTE").touch()
            os.kill(os.getpid(), signal.SIGKILL) if "KIND" == "kill" else wait()

trainer.DEFAULT_CALLBACKS.append(Fault)
runpy.run_path("SFT", run_name="__main__")
"""
"""`train/sft.py` unchanged, on whose rank 3 a step doesn't end."""
Launchers = list["subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def reference(tiny_model: Path, text_data: Path) -> Reference:
    return train(tiny_model, text_data, steps=STEPS, global_batch=PER_RANK * RANKS)


class Job:
    """A job of two machines with two ranks each."""

    def __init__(self, folder: Path, model: Path, data: Path, machines: list[hosts.Host]) -> None:
        self.folder, self.run, self.machines = folder, folder / "run", machines
        self.model, self.data = folder / "model", folder / "rows.jsonl"
        shutil.copytree(model, self.model)
        shutil.copy(data, self.data)
        self.yaml = self.write()
        self.words = job_words(self.model, self.data, self.run, STEPS, PER_RANK, save_steps=2)

    def write(self, **flags: str) -> Path:
        machines = {"num_processes": "4", "num_machines": "2", "main_process_ip": "n1", "mixed_precision": "no"}
        (yaml := self.folder / "job.yaml").write_text(made_yaml(model=str(self.model), **machines, **flags))
        return yaml

    def launch(self, script: Path, of_second: list[str]) -> Launchers:
        """As Kubeflow starts it."""
        words = ["-m", "accel_fsdp", "launch", "--hang-timeout", str(HANG_SECONDS), self.yaml, script, *self.words]
        numbers = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "29431"}
        return [
            host.start([*words, *of_second * rank], **numbers, PET_NODE_RANK=str(rank))
            for rank, host in enumerate(self.machines)
        ]

    def torchrun(self, script: Path, of_second: list[str], **environment: str) -> Launchers:
        words = ["-m", "torch.distributed.run", script, *self.words, "--accelerate_config", self.yaml]
        return [host.start([*words, *of_second * rank], **environment) for rank, host in enumerate(self.machines)]

    def faulty(self, kind: str) -> Path:
        text = FAULT.replace("NOTE", str(self.folder / "note")).replace("KIND", kind).replace("SFT", str(SFT))
        (script := self.folder / "faulty.py").write_text(text)
        return script

    def until_fault(self, started: Launchers) -> Launchers:
        deadline = time.monotonic() + SECONDS
        while not (self.folder / "note").exists():
            if time.monotonic() > deadline or any(process.poll() is not None for process in started):
                pytest.fail(str([process.output for process in hosts.all_ended(started, 5)]))
            time.sleep(0.1)
        return started


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, text_data: Path) -> Iterator[Job]:
    with hosts.network("n1", "n2") as machines:
        yield Job(tmp_path, tiny_model, text_data, machines)


@pytest.mark.parametrize(("version", "units"), [("2", "FSDP2: 4"), ("1", "FSDP1 HYBRID_SHARD: 3")])
def test_hybrid_sharding_learns_as_one_process_does(version: str, units: str, job: Job, reference: Reference) -> None:
    """Each machine may read its data, log and wait in its own way."""
    job.write(fsdp_version=version, strategy="4")
    own = ["--dataset_num_proc", "1", "--hang_timeout", "700", "--run_name", "second"]
    first, second = hosts.all_ended(job.launch(SFT, own), SECONDS)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert f"{units} units, each rank holds 0.03 M of 0.06 M" in first.output + second.output
    assert losses_of(job.run, STEPS) == pytest.approx(reference.losses, abs=1e-4)


DIFFERENT = ("seed", "gradient_accumulation_steps", "weights", "tokenizer", "rows", "rows.content")


def test_ranks_of_any_launcher_refuse_what_they_were_told_or_have_loaded_otherwise(job: Job) -> None:
    """torchrun compares nothing, and numbers the machines as they come. Each rank loads the weights itself."""
    job.write(ram_efficient_loading="false")
    shutil.copytree(job.model, other := job.folder / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(content))
    (fewer := job.folder / "fewer.jsonl").write_text("".join(job.data.read_text().splitlines(keepends=True)[:40]))
    for source, target in ((other, job.model), (fewer, job.data)):  # at the same path, on the second machine
        subprocess.run([*job.machines[1].before, "mount", "--bind", str(source), str(target)], check=True)
    environment = {**ELASTIC, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    words = ["--seed", "7", "--gradient_accumulation_steps", "2"]
    for machine in hosts.all_ended(job.torchrun(SFT, words, **environment), SECONDS):
        assert machine.code == 1
        assert "host memory while loading" not in machine.output  # which the first step is preceded by
        for name in DIFFERENT:
            rows = rf"^    {re.escape(name)} +\w+ +\d \(n\d\)\n +\w+ +\d \(n\d\)$"
            assert re.search(rows, machine.output, re.MULTILINE), (name, machine.output)


def says_where(ended: Finished, *ranks: int) -> None:
    """The job has failed, and the last lines name the place of each rank of the machine."""
    assert ended.code in (1, 128 + signal.SIGKILL), ended.output
    places = ended.output[ended.output.index("where the ranks of this machine were") :]
    for rank in ranks:
        assert re.search(rf"^  rank {rank}: (\w+, )?/\S+\.py:\d+ in \w+$", places, re.MULTILINE), ended.output


@pytest.mark.parametrize("kind", ["wait", "kill", "power cut"])
def test_a_rank_that_stops_ends_the_job_on_all_machines(kind: str, job: Job) -> None:
    """A machine without power closes no connection, and nothing comes."""
    launchers = job.until_fault(job.launch(job.faulty(kind), []))
    if kind == "power cut":
        job.machines[1].cut_power()
    first, second = hosts.all_ended(launchers, SECONDS)
    says_where(first, 0, 1)
    if kind != "power cut":
        says_where(second, 2)
        of_rank_3 = r"\S+/faulty\.py:\d+ in wait" if kind == "wait" else "wrote none"
        assert re.search(f"  rank 3: {of_rank_3}$", second.output, re.MULTILINE), second.output
        assert re.search("accel-fsdp: rank [23] ended with exit code ", second.output)  # rank 2 may be noticed first


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_machine(job: Job, reference: Reference) -> None:
    """On two ranks instead of four, with the same rows in each step; as the hint for an elastic Kubeflow job says."""
    job.words += ["--resume_from_checkpoint", "auto", "--hang_timeout", str(HANG_SECONDS)]
    launchers = job.until_fault(job.torchrun(job.faulty("wait"), [], **ELASTIC))
    job.machines[1].cut_power()
    first, _ = hosts.all_ended(launchers, SECONDS)
    assert first.code == 0, first.output
    assert "elastic: 2 ranks instead of 4, so --gradient_accumulation_steps 2 instead of 1: steps of 8" in first.output
    assert losses_of(job.run, STEPS) == pytest.approx(reference.losses, abs=1e-4)


def test_a_mesh_of_other_ranks_than_there_are(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an elastic job of hybrid sharding would have after a loss."""
    (yaml := tmp_path / "job.yaml").write_text(made_yaml(model=str(tiny_model), num_processes="4", strategy="4"))
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [str(SFT), "--accelerate_config", str(yaml), "--output_dir", str(tmp_path / "run")])
    with pytest.raises(UserError, match=r"lays out 4 ranks .*, and there are 2") as refused:
        arguments.parse()
    assert "hybrid sharding can't grow or shrink" in str(refused.value)
