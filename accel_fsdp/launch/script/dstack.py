"""A job file for dstack."""

from accel_fsdp.launch.script.job_file import INSTALL, NCCL_DEBUG, TOKENS, JobFile, indented, refuse_own_disk

FOLDER = "/project"
"""The container's folder of the files that dstack copies."""
SHM = "16GB"


def text(job: JobFile) -> list[str]:
    """The task file. Its files are copied to the disk of each machine, so a run must be written elsewhere."""
    refuse_own_disk(job, "dstack gives each start a separate disk")
    command = f"exec {job.command()}".replace("$", "$$")  # dstack fills in ${{ NAME }}, and makes $ of $$
    return [
        *job.heading("It is in the folder that has both files; dstack copies it. Submit it: dstack apply -f FILE"),
        "type: task",
        f'name: "{job.name}"',
        f"nodes: {job.machines}",
        *([f"image: {job.flags.image}"] if job.flags.image else []),
        "files:",
        f"  - .:{FOLDER}",
        f"working_dir: {FOLDER}",
        "volumes:",
        f"  - /mnt/shared:{job.folder}    # <- a folder that all machines see, such as a network disk's",
        "env:",
        f"  - HF_HOME={job.folder}/.huggingface",
        *(f"  - {name}={value}" for name, value in job.variables.items()),
        *([f"  - TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.shutdown}"] if job.uses_sft else []),
        *(f"  # - {name}    # <- from your shell: {purpose}" for name, purpose in TOKENS.items()),
        f"  # - NCCL_DEBUG=INFO    # <- {NCCL_DEBUG}",
        *(["spot_policy: spot"] if job.flags.spot else []),
        "resources:",
        f"  gpu: {_gpu(job)}",
        f"  cpu: {job.cpus}..",
        *([f"  memory: {job.flags.host_memory}GB.."] if job.flags.host_memory else []),
        f"  shm_size: {SHM}",
        *([f"max_duration: {job.minutes}m"] if job.minutes else []),
        f"stop_duration: {job.flags.grace}s",
        *(["retry:", "  on_events: [interruption, error]", "  duration: 1d"] if job.resumes else []),
        *(["# fleets: [NAME]    # <- with placement: cluster, for InfiniBand or EFA"] if job.machines > 1 else []),
        "shell: bash",
        "commands:",
        "  - |",
        "    set -euo pipefail",
        f"    {INSTALL}",
        indented(command, "    "),
    ]


def _gpu(job: JobFile) -> str:
    kind = job.kind
    name = kind.accelerator.upper().replace(" ", "") if kind and kind.accelerator else ""
    memory = f"{kind.memory_gib:.0f}GB" if kind and kind.memory_gib else ""
    return ":".join(part for part in (name, memory, str(job.gpus)) if part)
