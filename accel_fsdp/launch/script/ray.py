"""A driver for Ray Train: a Python program, because Ray has no job files."""

import json

from accel_fsdp.launch.script.job_file import NCCL_DEBUG, RESTARTS, TOKENS, JobFile, refuse_own_disk

RESULTS = "ray"
"""The part of the shared folder in which Ray keeps its notes about a run."""


def text(job: JobFile) -> list[str]:
    """The driver, a file for users to edit. `launch.on_ray` runs the workers and ends the job."""
    limit = f", minutes={job.minutes}" if job.minutes else ""
    restarts = f"{RESTARTS}),  # <- starts again, from the newest complete checkpoint" if job.resumes else "0),"
    refuse_own_disk(job, "Ray starts the workers again on any of its machines")
    return [
        *job.heading(
            "Start it on a machine of Ray's cluster, in a folder that all machines see, with both files: python FILE",
            "Or let Ray copy such a folder to each machine: ray job submit --working-dir . -- python FILE",
        ),
        "import os",
        "import sys",
        "",
        "from ray.train import FailureConfig, RunConfig, ScalingConfig",
        "from ray.train.torch import TorchTrainer",
        "",
        "from accel_fsdp.launch import on_ray",
        "",
        "trainer = TorchTrainer(",
        "    on_ray.run_rank,",
        "    train_loop_config={",
        *_loop(job),
        "    },",
        "    torch_config=on_ray.shared_devices(),",
        "    scaling_config=ScalingConfig(",
        f"        num_workers={job.machines * job.gpus},",
        "        use_gpu=True,",
        f"        resources_per_worker={_resources(job)},",
        '        # accelerator_type="H100",    # <- which GPU',
        "    ),",
        "    run_config=RunConfig(",
        f"        name={_quoted(job.name)},",
        f"        storage_path={_path(job, RESULTS)},",
        f"        failure_config=FailureConfig(max_failures={restarts}",
        "    ),",
        ")",
        f"sys.exit(on_ray.fit(trainer, grace={job.flags.grace}{limit}))",
    ]


def _loop(job: JobFile) -> list[str]:
    """The settings of each worker: the command, and the variables of its rank that Ray doesn't set."""
    network = [
        '# "NCCL_SOCKET_IFNAME": "ib0",    # <- InfiniBand, if NCCL takes another interface',
        '# "FI_PROVIDER": "efa",    # <- AWS with EFA',
    ]
    variables = [
        f'"HF_HOME": {_path(job, ".huggingface")},',
        *(f"{_quoted(name)}: {_quoted(value)}," for name, value in job.variables.items()),
        *(f'# "{name}": os.environ["{name}"],    # <- {purpose}' for name, purpose in TOKENS.items()),
        f'# "NCCL_DEBUG": "INFO",    # <- {NCCL_DEBUG}',
        *(network if job.machines > 1 else []),
    ]
    return [
        '        "folder": os.getcwd(),  # <- where each machine finds the two files',
        f'        "config_file": {_quoted(str(job.flags.file))},',
        f'        "script": {_quoted(str(job.flags.script))},',
        '        "arguments": [',
        *(f"            {line}," for line in _arguments(job.words)),
        "        ],",
        '        "environment": {  # <- what else the ranks need; they don\'t get the variables of this process',
        *(f"            {line}" for line in variables),
        "        },",
    ]


def _arguments(words: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(_quoted(word))
        else:
            lines[-1] += f", {_quoted(word)}"
    return lines


def _resources(job: JobFile) -> str:
    """The resources of each worker, a share of its machine's; `use_gpu` asks for its GPU."""
    memory = f', "memory": {job.flags.host_memory // job.gpus or 1} << 30' if job.flags.host_memory else ""
    return f'{{"CPU": {max(1, job.cpus // job.gpus)}{memory}}}'


def _path(job: JobFile, name: str) -> str:
    return _quoted(f"{job.folder}/{name}")


def _quoted(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)
