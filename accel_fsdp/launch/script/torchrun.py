"""A job file for machines without a scheduler: torchrun on each of them."""

import shlex

from accel_fsdp.config import DEFAULT_PORT
from accel_fsdp.errors import UsageError
from accel_fsdp.launch import child_process
from accel_fsdp.launch.script.job_file import JobFile, in_lines, shell_variables


def text(job: JobFile) -> list[str]:
    """A bash script that is started on each machine with its number and the address of machine 0."""
    if not job.uses_sft:
        raise UsageError(
            f"torchrun reads no Accelerate YAML, and {job.flags.script} doesn't either",
            why="the script would train without FSDP",
            fix="accel-fsdp launch --machine-rank N --main-process-ip ADDRESS FILE SCRIPT, on each machine",
        )
    is_multi = job.machines > 1
    usage = "bash FILE NUMBER ADDRESS, with NUMBER 0, 1, ... and ADDRESS machine 0's" if is_multi else "bash FILE"
    return [
        "#!/bin/bash",
        *job.heading(f"Start it {'on each machine ' if is_multi else ''}from a folder that all machines see: {usage}"),
        "set -euo pipefail",
        *([f"cd {job.flags.shared}"] if job.flags.shared else []),
        "# source .venv/bin/activate    # <- where accel-fsdp is installed",
        'export HF_HOME="${HF_HOME:-$PWD/.huggingface}"',
        *shell_variables(job),
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.shutdown}",
        *(_rendezvous() if is_multi else []),
        f"mkdir -p logs/{job.name}",
        f"exec {job.under_timeout(_command(job))}",
    ]


def _rendezvous() -> list[str]:
    return [
        "# export NCCL_SOCKET_IFNAME=ib0    # <- InfiniBand, if NCCL takes another interface",
        "# export FI_PROVIDER=efa    # <- AWS with EFA",
        'number="${1:?NUMBER of this machine, from 0}"',
        'address="${2:?ADDRESS of machine 0}"',
        'is_host="$([ "$number" = 0 ] && echo 1 || echo 0)"',
    ]


def _command(job: JobFile) -> str:
    """torchrun, with a log for each rank; shell variables stay unquoted, so that the shell expands them."""
    rendezvous = f'--rdzv-backend=c10d --rdzv-endpoint="$address:{DEFAULT_PORT}" --rdzv-conf="is_host=$is_host"'
    rendezvous = f"{rendezvous} --rdzv-id={job.name}" if job.machines > 1 else "--standalone"
    words = ["--accelerate_config", str(job.flags.file)]
    script = in_lines([str(job.flags.script), *words], job.words, "    ")
    lines = [
        f"torchrun --nnodes={job.machines} --nproc-per-node={job.gpus} {rendezvous}",
        f"--signals-to-handle={','.join(child_process.SIGNALS)} --log-dir=logs/{shlex.quote(job.name)} --tee=3",
        script,
    ]
    return " \\\n    ".join(lines)
