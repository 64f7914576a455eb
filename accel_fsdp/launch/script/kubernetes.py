"""A job file for kubectl: a TrainJob of Kubeflow's Trainer."""

from accel_fsdp.launch.script.job_file import INSTALL, NCCL_DEBUG, TOKENS, JobFile, indented

RUNTIME, REPLICATED_JOB, CONTAINER = "torch-distributed", "node", "node"
"""The runtime that comes with Kubeflow's Trainer, and what it calls its parts."""
CLAIM = "shared"


def text(job: JobFile) -> list[str]:
    """A TrainJob: its trainer lacks fields for /dev/shm, the shared folder and the signal; runtime patches set them."""
    return [
        *_heading(job),
        "apiVersion: trainer.kubeflow.org/v1alpha1",
        "kind: TrainJob",
        "metadata:",
        f'  name: "{job.name}"',
        "spec:",
        "  runtimeRef:",
        f"    name: {RUNTIME}",
        *_deadline(job, "  "),
        "  trainer:",
        *_image(job, "    ", f"the runtime's: kubectl get clustertrainingruntime {RUNTIME}"),
        f"    numNodes: {job.machines}",
        f"    numProcPerNode: {job.gpus}",
        "    resourcesPerNode:",
        *_resources(job, "      "),
        *_container(job, "    "),
        "  runtimePatches:",
        "    - manager: accel-fsdp",
        "      trainingRuntimeSpec:",
        "        template:",
        "          spec:",
        "            replicatedJobs:",
        f"              - name: {REPLICATED_JOB}",
        "                template:",
        "                  spec:",
        "                    template:",
        "                      spec:",
        *_pod(job, "                        "),
        "                        containers:",
        f"                          - name: {CONTAINER}",
        *_mounts(job, "                            "),
    ]


def _heading(job: JobFile) -> list[str]:
    note = f"It runs in {job.folder}, which each machine sees, with both files in it. Submit it: kubectl create -f FILE"
    return job.heading(note)


def _deadline(job: JobFile, indent: str) -> list[str]:
    return [f"{indent}activeDeadlineSeconds: {job.minutes * 60}"] if job.minutes else []


def _image(job: JobFile, indent: str, otherwise: str) -> list[str]:
    if job.flags.image is None:
        return [f"{indent}# image: IMAGE    # <- or {otherwise}"]
    return [f"{indent}image: {job.flags.image}"]


def _resources(job: JobFile, indent: str) -> list[str]:
    memory = [f"  memory: {job.flags.host_memory}Gi"] if job.flags.host_memory else []
    devices = ["limits:", f"  nvidia.com/gpu: {job.gpus}"]
    network = ["  # vpc.amazonaws.com/efa: 1    # <- AWS with EFA", "  # rdma/ib: 1    # <- InfiniBand"]
    requests = ["requests:", f"  cpu: {job.cpus}", *memory]
    return [indent + line for line in (*devices, *(network if job.machines > 1 else []), *requests)]


def _container(job: JobFile, indent: str) -> list[str]:
    """Variables and command, with `exec`: a pod's first process gets the signal, and bash would not forward it."""
    values = {"HF_HOME": f"{job.folder}/.huggingface", **job.variables}
    if job.uses_sft:
        values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = f'"{job.shutdown}"'
    variables = [line for name, value in values.items() for line in (f"  - name: {name}", f"    value: {value}")]
    command = [
        f"cd {job.folder}",
        f"# {INSTALL}    # <- where the image lacks it",
        f"exec {job.command()}",
    ]
    text = "\n".join(command).replace("$", "$$")  # Kubernetes fills in $(NAME), and makes $ of $$
    lines = ["env:", *variables, *_own_variables(), "command: [bash, -euo, pipefail, -c]", "args:", "  - |"]
    return [*(indent + line for line in lines), indented(text, f"{indent}    ")]


def _own_variables() -> list[str]:
    secret = "{{name: {0}, valueFrom: {{secretKeyRef: {{name: tokens, key: {0}}}}}}}"
    lines = [f"  # - {secret.format(name)}    # <- {TOKENS[name]}" for name in TOKENS]
    return [*lines, f"  # - {{name: NCCL_DEBUG, value: INFO}}    # <- {NCCL_DEBUG}"]


def _pod(job: JobFile, indent: str) -> list[str]:
    """The volumes of a pod, and its grace period. The default /dev/shm of 64 MB is too small for NCCL and loaders."""
    lines = [
        f"terminationGracePeriodSeconds: {job.flags.grace}",
        "# nodeSelector: {nvidia.com/gpu.product: NAME}    # <- which GPU",
        "volumes:",
        "  - name: shm",
        "    emptyDir: {medium: Memory}",
        "  - name: shared",
        f"    persistentVolumeClaim: {{claimName: {CLAIM}}}    # <- ReadWriteMany, with YAML and script in it",
    ]
    return [indent + line for line in lines]


def _mounts(job: JobFile, indent: str) -> list[str]:
    lines = [
        "volumeMounts:",
        "  - {name: shm, mountPath: /dev/shm}",
        f"  - {{name: shared, mountPath: {job.folder}}}",
    ]
    return [indent + line for line in lines]
