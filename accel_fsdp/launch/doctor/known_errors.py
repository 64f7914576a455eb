"""Messages of errors between GPUs and between machines, and what is really behind them: `doctor --explain`."""

import re
from dataclasses import dataclass

SHM = "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"
HANGING = "accel-fsdp rehearse FILE runs the job in small and says where each rank stands; training: --hang_timeout"


OTHERS = re.compile(r"huggingface\.co|HTTPS?ConnectionPool|wandb|\(errno: 97 ")
"""Lines of what has other networks, and torch's complaint where IPv6 is off, which harms nothing."""
CHATTER = re.compile(r"NCCL INFO|^\s*\[W\d|\bINFO\b")
"""Lines that say nothing is wrong; they count where there are no others."""


@dataclass(frozen=True)
class KnownError:
    """`messages`: regular expressions, one of which is found in what a user sees, whatever its case.

    `sources`: reports of it, as repository#issue.
    """

    name: str
    messages: tuple[str, ...]
    cause: str
    fix: str
    sources: tuple[str, ...] = ()


KNOWN = (
    KnownError(
        "duplicate-gpu",
        (r"Duplicate GPU detected", r"invalid device ordinal"),
        "there are more ranks on a machine than GPUs, or CUDA_VISIBLE_DEVICES hides some",
        "num_processes: as many as GPUs; echo $CUDA_VISIBLE_DEVICES",
        ("Lightning-AI/pytorch-lightning#4420",),
    ),
    KnownError(
        "shared-memory",
        (
            r"posix_fallocate",
            r"/dev/shm.*No space left on device",
            r"unable to [^\n]*</torch_\d",
            r"insufficient shared memory",
            r"DataLoader worker .* killed by signal: Bus error",
        ),
        "/dev/shm is full or small: a container gets 64 MiB, and ended jobs leave files in it",
        f"df -h /dev/shm; remove what is left there; {SHM}",
        ("NVIDIA/nccl#525", "pytorch/ci-infra#490", "llm-d/llm-d#352"),
    ),
    KnownError(
        "no-such-interface",
        (r"no socket interface found", r"Unable to find (address|interface) for", r"\bifa != nullptr"),
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that this machine hasn't",
        "ip -brief address shows those it has; unset the variable where machines differ",
        ("pytorch/pytorch#29482",),
    ),
    KnownError(
        "address-family",
        (r"connecting to address with family .* neither AF_INET", r"Address family not supported"),
        "the interface that was chosen has no IP address, or one machine talks IPv4 and another IPv6",
        "export NCCL_SOCKET_IFNAME with one that has an address on each machine; export NCCL_SOCKET_FAMILY=AF_INET",
        ("NVIDIA/nccl#1837", "NVIDIA/nccl#210"),
    ),
    KnownError(
        "gpu-memory",
        (r"CUDA out of memory", r"OutOfMemoryError"),
        "the GPU's memory is full; machines and their network have nothing to do with it",
        "accel-fsdp plan --config FILE says what fits",
    ),
    KnownError(
        "killed",
        (r"Signal 9 \(SIGKILL\)", r"exitcode\s*:\s*-9\b"),
        "the system has ended a rank, most often as the host's memory, or the container's, was full",
        "dmesg on that machine; fsdp_cpu_ram_efficient_loading: true; fewer workers of the data loader",
    ),
    KnownError(
        "gone",
        (
            r"Connection closed by peer",
            r"Connection reset by peer",
            r"Broken pipe",
            r"socketProgress.*remote",
            r"remote process exited",
            r"RendezvousClosedError",
            r"failed to recv, got 0 bytes",
        ),
        "another rank has ended: its own error is the cause, and stands in the log of its machine",
        "look for the first error of all logs; exit code -9 is often a machine that ran out of memory (dmesg)",
    ),
    KnownError(
        "infiniband",
        (r"ibv_(modify|poll|post)\w*[^\n]*(failed|error)", r"Got completion from peer .* with (status|error)"),
        "InfiniBand or RoCE between the machines fails: a port is down, or NCCL took an address that leads elsewhere",
        "ibstat on each machine; NCCL_IB_GID_INDEX=3 for RoCE; NCCL_IB_DISABLE=1 shows whether it is that",
    ),
    KnownError(
        "own-address",
        (r"(connect|socket|remote)\S*[^\n]*\b127\.0\.(0|1)\.1\b", r"remote=\[127\."),
        "ranks look for others at their own machine's address: a name is a loopback address in /etc/hosts; "
        "in a job of one machine, rank 0 has not begun to listen",
        "its real address beside its name in /etc/hosts; or GLOO_SOCKET_IFNAME; accel-fsdp doctor shows it",
        ("pytorch/pytorch#67547",),
    ),
    KnownError(
        "rendezvous",
        (
            r"client socket has timed out",
            r"client socket has failed to connect",
            r"RendezvousConnectionError",
            r"RendezvousTimeoutError",
            r"(Name or service not known|Temporary failure in name resolution)",
        ),
        "machine 0 isn't reached: its name is unknown here, nothing listens there yet, or a firewall drops the port",
        "accel-fsdp doctor on each machine, with the flags of the job; main_process_ip: an address, not a name",
        ("pytorch/pytorch#67547", "pytorch/pytorch#69197", "pytorch/pytorch#73656"),
    ),
    KnownError(
        "missing-ranks",
        (r"wait timeout after \d+ms, keys", r"\d+/\d+ clients joined"),
        "another rank never came to the start: it ended before, waits elsewhere, or was told another world size",
        "look for the first error in the logs of all machines; accel-fsdp doctor on each says who is missing",
    ),
    KnownError(
        "port-taken",
        (r"EADDRINUSE", r"address already in use", r"failed to listen on any local network address"),
        "another job, or the rest of one, listens on the port at which the ranks meet",
        "main_process_port: another one; ss -ltnp shows who has it",
    ),
    KnownError(
        "unreachable",
        (
            r"Connection refused",
            r"No route to host",
            r"Network is unreachable",
            r"connectFullMesh failed",
            r"Connection timed out",
        ),
        "ranks chose an interface that leads to no other machine (docker0, veth, lo), or a firewall is between them",
        "accel-fsdp doctor on each machine tests every pair; export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        ("pytorch/pytorch#68893",),
    ),
    KnownError(
        "collective-timeout",
        (
            r"Watchdog caught collective operation timeout",
            r"Timed out waiting \d+ms for (recv|send) operation",
            r"collective operation timeout",
            r"monitoredBarrier",
            r"watchdog got stuck",
            r"WorkNCCL.*ran for \d+ milliseconds before timing out",
        ),
        "one rank is elsewhere: it skipped a collective, took another branch, waits for data, or is stopped",
        HANGING,
        ("huggingface/accelerate#2375", "huggingface/accelerate#3250"),
    ),
    KnownError(
        "peer-to-peer",
        (r"^[^\n]{0,60}hangs? at (99|100) ?%[^\n]{0,40}$",),
        "links between GPUs of one machine (P2P) are broken: an IOMMU or ACS is on, as on many RTX machines",
        "NCCL_P2P_DISABLE=1 to see whether it is that; then iommu=pt, or ACS off in the BIOS",
        ("NVIDIA/nccl-tests#117", "NVIDIA/nccl#631"),
    ),
    KnownError(
        "nvlink-sharp",
        (r"Failed to bind NVLink SHARP", r"nvls\.cc", r"CUDA failure 401"),
        "the Fabric Manager or IMEX was started again without a reset of the GPUs",
        "NCCL_NVLS_ENABLE=0 for now; nvidia-smi --gpu-reset, or a restart of the machine",
        ("pytorch/pytorch#177472", "NVIDIA/nccl#976", "NVIDIA/nccl#1488"),
    ),
    KnownError(
        "fabric-manager",
        (r"system not yet initialized", r"\berror:? ?802\b(?!\.)", r"CUDA_ERROR_SYSTEM_NOT_READY"),
        "the Fabric Manager doesn't run, without which GPUs with NVSwitch can't be used",
        "systemctl start nvidia-fabricmanager, in the version of the driver",
        ("NVIDIA/nccl-tests#264",),
    ),
    KnownError(
        "driver-mismatch",
        (
            r"Driver/library version mismatch",
            r"driver version is insufficient",
            r"NVIDIA driver on your system is too old",
            r"unsupported display driver / cuda driver combination",
        ),
        "the driver in the kernel is another version than its libraries, or older than CUDA of this torch needs",
        "restart the machine after an update of the driver; or pip install a torch for an older CUDA",
    ),
    KnownError(
        "locked-memory",
        (r"ibv_(reg_mr|create)\w* .*Cannot allocate memory",),
        "InfiniBand may lock too little memory",
        "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity for slurmd",
        ("NVIDIA/nccl-tests#206",),
    ),
    KnownError(
        "efa-only",
        (r"Only EFA provider is supported",),
        "the container has the EFA plugin of NCCL, and this type of instance has no EFA",
        "NCCL_NET_PLUGIN=none, or an instance with EFA",
        ("aws/deep-learning-containers#2675",),
    ),
    KnownError(
        "slow-network",
        (r"NET/Socket",),
        "NCCL talks by TCP: the fast network card isn't in the container, or its plugin isn't",
        "mount /dev/infiniband, or ask for vpc.amazonaws.com/efa; the log should say NET/IB or NET/OFI",
        ("aws/sagemaker-hyperpod-cli#306",),
    ),
    KnownError(
        "mesh-without-shards",
        (r"Invalid mesh_dim_names",),
        "FSDP2 on a mesh with no dimension to shard over",
        "parallelism_config_dp_shard_size: 2 or more; accel-fsdp check FILE",
        ("huggingface/accelerate#3798",),
    ),
    KnownError(
        "device-unknown",
        (r"devices? used by this process (is|are) currently unknown",),
        "the process group was made without device_id, so a barrier guesses the GPU and may hang",
        "init_process_group(device_id=torch.device('cuda', local_rank)); accelerate launch does so",
        ("huggingface/trl#3994",),
    ),
    KnownError(
        "no-cpu-backend",
        (r"No backend type associated with device type cpu", r"A CPU backend must be enabled"),
        "the process group knows NCCL alone, and offload or an asynchronous save needs collectives on the CPU",
        "backend cpu:gloo,cuda:nccl; train/sft.py makes it so",
        ("huggingface/accelerate#3574", "pytorch/pytorch#148532"),
    ),
    KnownError(
        "every-machine-first",
        (r"^\W*every (node|machine) is (rank|machine|node) 0\W*$",),
        "a variable such as $SLURM_NODEID was expanded on the head node, so that every machine is told the same",
        "srun --ntasks-per-node=1 accel-fsdp launch FILE SCRIPT, which reads it on each machine",
        ("huggingface/accelerate#2816",),
    ),
    KnownError(
        "world-size-1",
        (r"^\W*world[_ ]size\W{1,3}1\W*$",),
        "the launcher reads no PET_* variables: each pod trains alone",
        "accel-fsdp launch FILE SCRIPT, or torchrun, in place of accelerate launch",
        ("kubeflow/trainer#3930",),
    ),
    KnownError(
        "open-files",
        (r"Too many open files",),
        "ranks hold sockets to each other, shards and data loaders, and the limit is low",
        "ulimit -n 65536",
    ),
)


def find(message: str) -> KnownError | None:
    """The first row that knows a piece of a message, of special ones first; None if none does."""
    lines = [line for line in message.splitlines() if not OTHERS.search(line)]
    telling = [line for line in lines if not CHATTER.search(line)]
    text = "\n".join(telling or lines)
    flags = re.IGNORECASE
    return next((one for one in KNOWN if any(re.search(piece, text, flags) for piece in one.messages)), None)
