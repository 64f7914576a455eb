"""A job file for sbatch."""

from accel_fsdp.launch.script.job_file import STOPPED, JobFile, shell_variables

DEFAULT_MINUTES = 24 * 60
OTHERS_SECONDS = 60
"""Seconds that a machine may go on after another has ended."""


def text(job: JobFile) -> list[str]:
    """The batch script: `srun` starts the launcher once on each machine; a stopped job goes back into the queue."""
    return [*_directives(job), "", *_setup_lines(job), "", *_run(job)]


def _directives(job: JobFile) -> list[str]:
    time_comments, limit = _limit(job)
    days, minutes = divmod(limit, 24 * 60)
    memory_comment = [] if job.flags.host_memory else ["# All of each machine's memory:"]
    return [
        "#!/bin/bash",
        *job.heading("Submit it from a folder that all machines see: sbatch FILE"),
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.machines}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={job.gpus}",
        f"#SBATCH --cpus-per-task={job.cpus}",
        *memory_comment,
        f"#SBATCH --mem={f'{job.flags.host_memory}G' if job.flags.host_memory else 0}",
        *time_comments,
        f"#SBATCH --time={f'{days}-' if days else ''}{minutes // 60:02d}:{minutes % 60:02d}:00",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
        *([f"#SBATCH --chdir={job.flags.shared}"] if job.flags.shared else []),
        *([f"#SBATCH --signal=USR1@{job.flags.grace}"] if job.uses_sft else []),
        "#SBATCH --requeue" if job.resumes else "#SBATCH --no-requeue",
        "# <- With one # where your cluster wants them:",
        "##SBATCH --partition=NAME",
        "##SBATCH --account=NAME",
    ]


def _limit(job: JobFile) -> tuple[list[str], int]:
    """The minutes after which SLURM ends the job, and a comment on their origin unless a flag gave them."""
    if job.minutes:
        return [], job.minutes
    return ["# <- No duration was given. A shorter limit lets the scheduler start the job earlier:"], DEFAULT_MINUTES


def _setup_lines(job: JobFile) -> list[str]:
    network = [
        "# export NCCL_SOCKET_IFNAME=ib0          # <- InfiniBand, if NCCL takes another interface",
        "# export FI_PROVIDER=efa                 # <- AWS with EFA",
    ]
    return [
        "set -euo pipefail",
        "# source .venv/bin/activate              # <- where accel-fsdp is installed",
        'export HF_HOME="${HF_HOME:-$PWD/.huggingface}"',
        *shell_variables(job),
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        *([f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.shutdown}"] if job.uses_sft else []),
        *([] if job.machines == 1 else network),
    ]


def _run(job: JobFile) -> list[str]:
    again = [
        f"# {' or '.join(map(str, STOPPED))}: the job got the signal to stop, and has saved a checkpoint.",
        f"if {' || '.join(f'[ $code = {code} ]' for code in STOPPED)}; then",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]
    return [
        "# One launcher for each machine, with a separate log.",
        "code=0",
        f"srun {_early_end_flags(job)} --open-mode=append --output=%x-%j-machine-%n.log \\",
        f"    {job.command('    ')} || code=$?",
        *(again if job.resumes else []),
        "exit $code",
    ]


def _early_end_flags(job: JobFile) -> str:
    """srun's flags for a machine that ends before the others.

    Ending the others at once would hide the code of a stopped job behind theirs, 143. Our ranks all end together; a
    user's own script may run much longer on one machine, so for it only a failure ends the others.
    """
    return f"--kill-on-bad-exit=0 --wait={OTHERS_SECONDS}" if job.uses_sft else "--kill-on-bad-exit=1"
