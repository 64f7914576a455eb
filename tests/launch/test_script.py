"""Job files: what each engine makes of them, and what the command inside them starts."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, SFT, here
from test_place import ENGINES, TWO, YAML, ZERO3

from accel_fsdp.config import SCHEDULERS

ONE = f"{YAML}num_machines: 1\nnum_processes: 4\n"
TRAINS = ("--model_name_or_path", "a model", "--output_dir", "/shared/runs/first")
H100S = ("--gpus", "2x4xH100-80GB")
MADE = sorted(set((ROOT / "accelerate_configs").glob("*.yaml")) - {ROOT / "accelerate_configs" / "tpu.yaml"})
Write = Callable[..., str]
STUBS = {
    "accel-fsdp": 'printf "%s\\0" "$@" > launched',
    "srun": 'until [ "$1" = accel-fsdp ]; do echo "srun $1"; shift; done; [ "${ENDS:-}" ] && exit $ENDS; exec "$@"',
    "pip": 'echo "pip $*"',
    "torchrun": 'printf "%s\\n" "$@"',
    "scontrol": '[ "$1" = show ] && exit 1; echo "scontrol $*"',
}
"""In place of an engine's tools: what they were asked, and the words of a launch."""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """The job file for a YAML, or what is said instead. The command runs in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(engine: str, yaml: str, *flags: str, script: Path = SFT, words: tuple[str, ...] = TRAINS) -> str:
        Path("job.yaml").write_text(yaml)
        called = here("script", engine, *flags, "job.yaml", script, *words)
        return called.output if called.code else called.printed

    return run


def started(
    text: str, folder: Path, variables: Mapping[str, str], *words: str, by: Sequence[str] = ("bash", "-c")
) -> tuple[int, str]:
    """Runs the bash of a job file with an engine's variables and stubs for its tools: exit code and output."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, body in STUBS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", **variables}
    done = subprocess.run([*by, text, "job", *words], capture_output=True, text=True, env=env, cwd=folder, timeout=60)
    return done.returncode, done.stdout + done.stderr


def dry_run(folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the launch that was started says it would do, where that engine runs it."""
    for name, value in ENGINES[engine].items():
        monkeypatch.setenv(name, value)
    command, *words = (folder / "launched").read_text().split("\0")[:-1]
    called = here(command, "--dry-run", *words)
    assert called.code == 0, called.output
    return called.output


SLURM = {**ENGINES["SLURM"], "SLURM_CPUS_PER_TASK": "16"}


def asked(text: str) -> dict[str, str]:
    """What sbatch reads: the #SBATCH lines before the first command."""
    head = text.partition("\nset -euo pipefail")[0]
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, re.MULTILINE)
    assert len(options) == head.count("\n#SBATCH")
    return dict(options)


def test_slurm_is_asked_for_what_the_yaml_says(write: Write) -> None:
    assert asked(write("slurm", TWO)) == {
        "job-name": "job",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "cpus-per-task": "16",
        "mem": "0",
        "time": "1-00:00:00",
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": "USR1@120",
        "requeue": "",
    }
    numbers = ["--grace", "300", "--cpus", "8", "--host-memory", "64", "--gpus", "4xA100-80GB"]
    text = write("slurm", ONE, "--name", "first", "--shared", "/work/me", *numbers)
    wanted = {"job-name": "first", "signal": "USR1@300", "cpus-per-task": "8", "mem": "64G", "chdir": "/work/me"}
    assert wanted.items() <= asked(text).items()
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=290" in text


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("30:00", 1800), ("36:00:00", 129_600), ("2-12", 216_000), ("1-02:30", 95_400)],
)
def test_a_time_reaches_slurm_as_it_was_typed_and_others_as_slurm_reads_it(
    time: str, seconds: int, write: Write
) -> None:
    assert asked(write("slurm", TWO, "--time", time))["time"] == time
    assert yaml.safe_load(write("kubernetes", TWO, "--time", time))["spec"]["activeDeadlineSeconds"] == seconds
    assert f"timeout --foreground --signal=USR1 {seconds} torchrun" in write("torchrun", TWO, "--time", time)


@pytest.mark.parametrize(("ends", "again"), [("0", False), ("1", False), ("75", True), ("138", True), ("143", False)])
def test_a_slurm_job_ends_as_training_does_and_is_requeued_after_a_checkpoint(
    ends: str, again: bool, write: Write, tmp_path: Path
) -> None:
    code, output = started(write("slurm", TWO), tmp_path, {**SLURM, "ENDS": ends})
    assert code == int(ends)
    assert ("scontrol requeue 1234567" in output) == again


def test_a_script_that_cannot_resume_is_not_requeued(write: Write, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("print(1)\n")
    text = write("slurm", TWO, script=Path("own.py"), words=("--resume",))
    assert "#SBATCH --no-requeue" in text
    assert "own.py \\\n        --resume || code=$?" in text
    assert "srun --kill-on-bad-exit=1 --open-mode" in text
    assert not re.search("signal|scontrol|resume_from_checkpoint|TORCH_ELASTIC", text)
    own = write("slurm", TWO, words=(*TRAINS, "--resume_from_checkpoint", "false"))
    assert "--resume_from_checkpoint false" in own
    assert "--no-requeue" in own


def test_a_trainjob_is_one_for_the_models_of_kubeflow(write: Write) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models.trainer_v1alpha1_train_job")
    text = write("kubernetes", TWO, "--time", "36:00:00", "--host-memory", "512", "--image", "mine:1", "--grace", "300")
    manifest = yaml.safe_load(text)
    job = models.TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None
    assert job.to_dict() == manifest  # the models drop what they don't know
    assert job.spec is not None
    assert job.spec.trainer is not None
    trainer = job.spec.trainer
    assert (job.spec.active_deadline_seconds, trainer.num_nodes, trainer.num_proc_per_node) == (36 * 3600, 2, 4)
    assert trainer.image == "mine:1"
    assert manifest["spec"]["trainer"]["resourcesPerNode"] == {
        "limits": {"nvidia.com/gpu": 4},
        "requests": {"cpu": 16, "memory": "512Gi"},
    }
    assert not [variable for variable in trainer.env or [] if variable.name.startswith("PET_")]
    patch = manifest["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = patch["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


def test_the_command_in_a_kubernetes_file_is_one_that_launch_accepts(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*TRAINS, "--run_name", "$(HOME)\n two$$ $$(HOME) $")
    container = yaml.safe_load(write("kubernetes", TWO, "--shared", str(tmp_path), words=words))["spec"]["trainer"]
    # Kubernetes makes $ of $$, and of a variable between $( and ) its value, of which these pods have none.
    text = re.sub(
        r"\$(\$|\(\w+\))", lambda match: "$" if match[1] == "$" else pytest.fail(match[0]), container["args"][0]
    )
    code, output = started(text, tmp_path, ENGINES["Kubeflow"], by=container["command"])
    assert code == 0, output
    dry = dry_run(tmp_path, "Kubeflow", monkeypatch)
    assert "# Kubeflow: num_machines 2" in dry
    assert "--machine_rank 1 --main_process_ip job-" in dry
    assert "--run_name '$(HOME)\n two$$ $$(HOME) $' --resume_from_checkpoint auto" in dry


def test_a_skypilot_task_has_a_command_that_launch_accepts(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--time", "36:00:00", "--host-memory", "512", "--image", "mine:1", "--spot")
    task = yaml.safe_load(write("skypilot", TWO, "--gpus", "2x4xA100-80GB", *more))
    resources = task["resources"]
    assert (task["num_nodes"], resources["accelerators"]) == (2, "A100-80GB:4")
    assert (resources["use_spot"], resources["image_id"]) == (True, "docker:mine:1")
    assert resources["job_recovery"]["recover_on_exit_codes"] == [75, 138, 143]
    code, output = started(task["run"], tmp_path, ENGINES["SkyPilot"])
    assert code == 0, output
    dry = dry_run(tmp_path, "SkyPilot", monkeypatch)
    assert "# SkyPilot: num_machines 2" in dry
    assert "--main_process_ip 10.0.0.1 --config_file" in dry
    assert "--resume_from_checkpoint auto" in dry


@pytest.mark.parametrize("number", ["0", "1"])
def test_torchrun_is_called_with_flags_that_it_has(number: str, write: Write, tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    code, output = started(write("torchrun", TWO), tmp_path, {}, number, "10.0.0.1")
    assert code == 0, output
    args = get_args_parser().parse_args(output.splitlines())
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint) == ("2", "4", "10.0.0.1:29500")
    assert args.rdzv_conf == f"is_host={1 - int(number)}"
    assert args.training_script == str(SFT)
    assert args.training_script_args == [
        "--accelerate_config", "job.yaml", *TRAINS, "--resume_from_checkpoint", "auto"
    ]  # fmt: skip


@pytest.mark.parametrize("engine", SCHEDULERS)
def test_files_have_a_place_for_tokens_and_none_is_overwritten(engine: str, write: Write, tmp_path: Path) -> None:
    words = (*TRAINS, "--prompt", "a\tb :smile: [bold]x[/] ${{ run.args }} $$")
    text = write(engine, TWO, *H100S, words=words)
    assert ":smile: [bold]x[/] ${{ run.args }}" in text.replace("$$", "$")
    for name in ("HF_TOKEN", "WANDB_API_KEY", "NCCL_DEBUG"):
        assert re.search(rf"^ *#.*{name}.*<-|^ *#.*<-.*{name}|^#   {name}: null", text, re.MULTILINE), name
    assert re.search(r"^[^#]*PYTORCH_ALLOC_CONF.*expandable_segments:True", text, re.MULTILINE)
    if engine != "torchrun":
        assert "PYTORCH_ALLOC_CONF" not in write(engine, ONE, "--gpus", "4xMI300X")
    if engine in ("kubernetes", "skypilot"):  # the lines for the user are YAML once the comment's sign is gone
        used = re.sub(r"^( *)# ?((?:- \{name: |secrets:|  HF_TOKEN|  WANDB|NCCL_DEBUG).*)$", r"\1\2", text, flags=re.M)
        assert {"HF_TOKEN", "WANDB_API_KEY", "NCCL_DEBUG"} <= set(re.findall(r"[A-Z_]{5,}", str(yaml.safe_load(used))))
    write(engine, TWO, *H100S, "-o", "job", words=words)
    assert (tmp_path / "job").read_text() == text
    assert "job exists" in write(engine, TWO, *H100S, "-o", "job")
    assert write(engine, TWO, "-o", "job", "--force", *H100S) == ""
    assert (tmp_path / "job").read_text() != text


NEXT = {
    ("slurm", TWO): "sbatch 'a job'",
    ("torchrun", ONE): "bash 'a job'",
    ("torchrun", TWO): "bash 'a job' NUMBER ADDRESS",
}


@pytest.mark.parametrize(("engine", "yaml"), NEXT)
def test_what_to_type_next_and_a_secret_is_warned_of(
    engine: str, yaml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml)
    for flag, is_secret in (("--eos_token", False), ("--hub_token", True)):
        output = here("script", engine, "--force", "-o", "a job", "job.yaml", SFT, *TRAINS, flag, "SECRET").output
        assert f"written: a job\nnext: {NEXT[engine, yaml]}" in output
        assert (f"the secret of {flag}" in output and "HF_TOKEN" in output) == is_secret, output


@pytest.mark.parametrize(
    ("yaml", "flags", "message"),
    [
        (TWO, ["--gpus", "8xH100"], "--gpus 8xH100 is 1 machine with 8 GPUs each, and job.yaml says num_machines 2"),
        (YAML, [], "job.yaml has no num_processes"),
        (TWO, ["--time", "36h"], "--time 36h is not a time as SLURM reads it: 90 (minutes), 36:00:00"),
        (TWO, ["--time", "2"], "--time 2 is no longer than the 120 seconds of --grace"),
        (TWO, ["--grace", "5"], "--grace 5"),
        (TWO, ["--name", "My Job"], "--name My Job"),
        (TWO, ["--shared", "work"], "--shared work is not an absolute path"),
        (TWO, ["--image", "mine:1"], "--image for slurm"),
        (TWO, ["--spot"], "--spot for slurm"),
        (f"{YAML}num_machines: 3\nnum_processes: 8\n", ["--no-check"], "num_processes 8 on 3 machines"),
        (f"{TWO}machine_rank: 1\n", [], "machine_rank: 1 in job.yaml"),
        (TWO.replace("fsdp_version", "fdsp_version"), [], "no job file was written; --no-check"),
        ("distributed_type: MULTI_CPU\nnum_processes: 4\n", [], "job.yaml is for CPUs"),
        ((ROOT / "accelerate_configs" / "tpu.yaml").read_text(), [], "job.yaml is for TPUs"),
        (ZERO3, [], "deepspeed_multinode_launcher: standard"),
    ],
)
def test_a_job_that_could_not_run_is_refused(yaml: str, flags: list[str], message: str, write: Write) -> None:
    assert message in write("slurm", yaml, *flags)


def test_one_process_takes_one_gpu(write: Write) -> None:
    """As Accelerate starts it, whatever `num_processes` says: TRL ships such a file."""
    alone = "distributed_type: 'NO'\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    assert asked(write("slurm", alone))["gpus-per-node"] == "1"
    assert "--nproc-per-node=1 " in write("torchrun", alone)
    assert "job.yaml starts one process" in write("slurm", alone, "--gpus", "8xH100")


@pytest.mark.parametrize("yaml_file", MADE, ids=lambda file: file.stem)
def test_each_ready_made_yaml_has_a_job_file(yaml_file: Path, write: Write) -> None:
    assert yaml.safe_load(write("kubernetes", yaml_file.read_text()))["kind"] == "TrainJob"
    for engine in ("slurm", "torchrun"):
        text = write(engine, yaml_file.read_text())
        assert text.startswith("#!/bin/bash")
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
