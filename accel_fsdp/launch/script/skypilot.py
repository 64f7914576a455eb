"""A job file for SkyPilot's managed jobs."""

from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import MachineFacts
from accel_fsdp.launch.script.job_file import (
    ENDED_BY_SIGTERM,
    INSTALL,
    NCCL_DEBUG,
    RESTARTS,
    STOPPED,
    TOKENS,
    JobFile,
    indented,
    refuse_own_disk,
)

TWICE_THE_MEMORY = {("A100", 80.0): "A100-80GB", ("V100", 32.0): "V100-32GB"}
"""GPUs of one name that come with more memory, as SkyPilot calls them."""


def text(job: JobFile) -> list[str]:
    """The task. Its working folder is copied to the disk of each machine, so a run must be written elsewhere."""
    refuse_own_disk(job, "SkyPilot gives each start a separate disk")
    return [
        *job.heading("Submit it from the folder that has both files; SkyPilot copies it: sky jobs launch FILE"),
        f'name: "{job.name}"',
        f"num_nodes: {job.machines}",
        "workdir: .",
        "resources:",
        f"  accelerators: {_gpu(job.kind, job)}:{job.gpus}",
        f"  cpus: {job.cpus}+",
        *([f"  memory: {job.flags.host_memory}+"] if job.flags.host_memory else []),
        *([f"  image_id: docker:{job.flags.image}"] if job.flags.image else []),
        *(["  use_spot: true"] if job.flags.spot else []),
        *(["  # network_tier: best    # <- InfiniBand or EFA"] if job.machines > 1 else []),
        *(_recovery() if job.resumes else []),
        "volumes:",
        f"  {job.folder}: shared    # <- a volume that all machines see (sky volumes ls)",
        "envs:",
        f"  HF_HOME: {job.folder}/.huggingface",
        *(f"  {name}: {value}" for name, value in job.variables.items()),
        *([f'  TORCH_ELASTIC_SHUTDOWN_TIMEOUT: "{job.shutdown}"'] if job.uses_sft else []),
        f"  # NCCL_DEBUG: INFO    # <- {NCCL_DEBUG}",
        "# secrets:    # <- from your shell: sky jobs launch --secret HF_TOKEN FILE",
        *(f"#   {name}: null    # {purpose}" for name, purpose in TOKENS.items()),
        "setup: |",
        f"  {INSTALL}",
        "run: |",
        "  set -euo pipefail",
        indented(job.under_timeout(job.command()), "  "),
    ]


def _gpu(kind: MachineFacts | None, job: JobFile) -> str:
    """SkyPilot's name for the GPU."""
    if kind is None or kind.accelerator is None:
        raise UsageError(
            f"{job.flags.file} doesn't say which GPU",
            why="SkyPilot looks for machines that have it",
            fix=f"accel-fsdp script --gpus {f'{job.machines}x' if job.machines > 1 else ''}{job.gpus}xH100-80GB",
        )
    name = kind.accelerator.upper().replace(" ", "")
    return TWICE_THE_MEMORY.get((name, kind.memory_gib or 0.0), name)


def _recovery() -> list[str]:
    codes = ", ".join(map(str, (*STOPPED, ENDED_BY_SIGTERM)))
    return [
        "  job_recovery:",
        f"    max_restarts_on_errors: {RESTARTS}",
        f"    recover_on_exit_codes: [{codes}]    # the job got the signal to stop, and has saved a checkpoint",
    ]
