"""Messages of GPUs, drivers, memory, processes, networks and the Hub.

Messages that follow from any failure of a peer (`Broken pipe`, `Connection reset by peer`, `ConnectionRefusedError`,
NCCL's `unhandled system error`) have no row, because they don't show the cause.
"""

from accel_fsdp.launch.doctor.rows import KnownError

SHM = "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"
HUB_HOST = r"(huggingface\.co|hf\.co|hf-mirror\.com)"
NOT_THE_HUB = (
    rf"\A(?!(?s:.)*({HUB_HOST}|huggingface_hub/))(?s:.)*(wandb|boto|\bs3|amazonaws|googleapis|gcsfs|azure|mlflow)"
)
"""A text that names another service alone."""
NO_CONNECTION = r"(Connection refused|No route to host|Network is unreachable|Connection timed out)"

MACHINE_ERRORS = {
    "open-files": KnownError(
        r"Too many open files|received 0 items of ancdata"
        r"|unable to open shared memory object(?![^\n]*(No such|Permission))",
        "ranks hold sockets to each other, shards and data loaders, and the limit is low",
        "ulimit -n 65536; torch.multiprocessing.set_sharing_strategy('file_system')",
        ("pytorch/pytorch#14768", "pytorch/pytorch#973"),
    ),
    "shared-memory": KnownError(
        r"posix_fallocate|/dev/shm.*No space left on device|creating shared memory segment|extend /dev/shm"
        r"|unable to (allocate|mmap|resize|write)[^\n]*</torch_\d|(insufficient|out of) shared memory",
        "/dev/shm is full or small: a container gets 64 MiB, and ended jobs leave files in it; "
        "or the memory of the host, of which it is a part, is full; or this user may not write there",
        f"df -h /dev/shm; ls -ld /dev/shm; remove what is left there; {SHM}",
        ("NVIDIA/nccl#342", "NVIDIA/nccl#525", "pytorch/ci-infra#490"),
    ),
    "disk-full": KnownError(
        r"No space left on device|Errno 28\b|Disk quota exceeded|inline_container\.cc[^\n]*unexpected pos"
        r"|PytorchStreamWriter failed writing",
        "a disk is full or a quota reached: for the run's folder, the caches in the home folder, or /tmp; in a "
        "container also /dev/shm; or the file system fails",
        "df -h and df -i of these folders; quota -s; --output_dir, HF_HOME and TMPDIR on a larger disk",
        ("NVIDIA/Megatron-LM#878",),
    ),
    "no-address": KnownError(
        r"Address family not supported|connecting to address with family .* neither AF_INET",
        "the interface that NCCL_SOCKET_IFNAME names, or each of the container's, is missing or has no IP address; "
        "one machine uses IPv4 and another IPv6; or their versions of NCCL differ",
        "export NCCL_SOCKET_IFNAME with one that has an address on each machine; export NCCL_SOCKET_FAMILY=AF_INET; "
        "accel-fsdp doctor on each machine compares the versions",
        ("NVIDIA/nccl#210", "NVIDIA/nccl#1837", "NVIDIA/nccl#1267"),
        means="NCCL has no address of the kind that it needs",
    ),
    "nvlink-sharp": KnownError(
        r"Failed to bind NVLink SHARP|nvls\.cc[^\n]*(bind|multicast)|CUDA failure 401",
        "NVLink SHARP can't get memory from the NVSwitch: the Fabric Manager or IMEX was restarted without a reset of "
        "the GPUs, or too many communicators use up its slots",
        "NCCL_NVLS_ENABLE=0; nvidia-smi --gpu-reset, or a restart of the machine",
        ("pytorch/pytorch#177472", "pytorch/pytorch#178749", "NVIDIA/nccl#976"),
    ),
    "fabric-manager": KnownError(
        r"system not yet initialized|\berror:? ?802\b(?!\.)|CUDA_ERROR_SYSTEM_NOT_READY",
        "the Fabric Manager, without which GPUs with NVSwitch can't be used, doesn't run or is of another version than "
        "the driver",
        "systemctl start nvidia-fabricmanager, in the version of the driver",
        ("NVIDIA/nccl-tests#264",),
    ),
    "driver-mismatch": KnownError(
        r"Driver/library version mismatch|driver version is insufficient|NVIDIA driver on your system is too old"
        r"|unsupported display driver / cuda driver combination|forward compatibility was attempted",
        "the driver in the kernel is another version than its libraries, older than CUDA of this torch or container "
        "needs, or not in the container",
        "restart the machine after an update of the driver; or pip install a torch for an older CUDA",
    ),
    "gpu-architecture": KnownError(
        r"no kernel image is available for execution|is not compatible with the current PyTorch installation"
        r"|Unsupported gpu architecture|not compiled with (CUDA|GPU)|implementation for device cuda:\d not found",
        "this torch or an extension was built without CUDA or kernels for this GPU, or nvcc is older than the GPU",
        "pip install torch for a newer CUDA; build the extension again on this machine, by its nvcc",
    ),
    "gpu-hardware": KnownError(
        r"uncorrectable (NVLink |ECC )?error|uncorrectable ECC|fallen off (of )?the bus|GPU is lost"
        r"|Unable to determine the device handle for GPU|\bXid\b[^\n]*: (48|63|64|74|79|94|95|119|120)\b",
        "the GPU, its power supply, its slot or its firmware fails",
        "dmesg | grep -i xid; nvidia-smi -q -d ECC; restart the machine; leave it out of the job if it happens again",
        ("NVIDIA/open-gpu-kernel-modules#507", "rwth-i6/returnn#1486"),
    ),
    "no-gpu": KnownError(
        r"No CUDA GPUs are available|Found no NVIDIA driver on your system|no GPUs found!",
        "no GPU is visible: CUDA_VISIBLE_DEVICES hides all, the job or container asked for none, or no driver is there",
        "nvidia-smi; echo $CUDA_VISIBLE_DEVICES; docker run --gpus all; sbatch --gpus-per-node",
    ),
    "undefined-symbol": KnownError(
        r"undefined symbol",
        "torch, NCCL or a compiled extension are of versions that don't fit together; "
        "two packages may bring the same library",
        "pip list | grep -i -e torch -e nccl -e cu1; unset LD_LIBRARY_PATH; build the extension again for this torch",
        ("NVIDIA/nccl#1180", "pytorch/pytorch#119932"),
    ),
    "nccl-versions": KnownError(
        r"Mismatched NCCL version|NCCL version mismatch",
        "ranks load different versions of NCCL",
        "the same environment on all machines; unset LD_LIBRARY_PATH; accel-fsdp doctor on each machine compares them",
    ),
    "nonsense-size": KnownError(
        r"more than 1EB memory",
        "another rank sent it: ranks are in different collectives, or one of them had timed out",
        "accel-fsdp rehearse FILE runs the job in small and says where each rank waits; training: --hang_timeout",
        ("NVIDIA/nccl#1284",),
        means="the requested memory size is nonsense",
    ),
    "gpu-memory": KnownError(
        r"(CUDA out of memory|(?<!ray\.exceptions\.)OutOfMemoryError)(?![^\n]*more than 1EB)|CUDA error: out of memory"
        r"|Cuda failure.{0,4}'out of memory'",
        "the GPU's memory is full; machines and their network have nothing to do with it",
        "accel-fsdp plan --config FILE says what fits; nvidia-smi shows what others hold",
    ),
    "locked-memory": KnownError(
        r"ibv_(reg_mr|create)[^\n]*Cannot allocate memory|ibv_reg_mr failed\s*$",
        "InfiniBand may lock too little memory (ulimit -l); or the kernel or its driver gives it none",
        "ulimit -l unlimited; docker run --ulimit memlock=-1 --cap-add=IPC_LOCK; LimitMEMLOCK=infinity for slurmd",
        ("NVIDIA/nccl-tests#206",),
        means="InfiniBand's driver could not register memory",
    ),
    "efa-only": KnownError(
        r"Only EFA provider is supported",
        "the container has the EFA plugin of NCCL, and this type of instance has no EFA",
        "NCCL_NET_PLUGIN=none, or an instance with EFA",
        ("aws/deep-learning-containers#2675",),
    ),
    "hub-access": KnownError(
        r"GatedRepoError|gated repo|RepositoryNotFoundError|401 Client Error",
        "the Hub refuses this account: no token here, no access to a gated model, or a misspelt name or path",
        "hf auth login, or HF_TOKEN on all machines; ask for access on the model's page",
        unless=NOT_THE_HUB,
    ),
    "port-taken": KnownError(
        r"EADDRINUSE|address already in use",
        "another job, the rest of one, or the launcher itself, listens on the port at which the ranks meet; "
        "or two processes take themselves for rank 0",
        "main_process_port: another one; ss -ltnp shows who has it",
        ("meta-pytorch/torchtune#392",),
    ),
    "duplicate-gpu": KnownError(
        r"Duplicate GPU detected|invalid device ordinal",
        "there are more ranks on a machine than GPUs, CUDA_VISIBLE_DEVICES or the scheduler hides some, "
        "or the script, a library or a server of inference takes one GPU twice, or one that isn't there",
        "num_processes: as many as GPUs; echo $CUDA_VISIBLE_DEVICES; torch.cuda.set_device(local_rank)",
        ("Lightning-AI/pytorch-lightning#4420", "tatsu-lab/stanford_alpaca#67"),
        means="two ranks use one GPU, or a process asks for a GPU by a number that it doesn't see",
    ),
    "no-such-interface": KnownError(
        r"no socket interface found|Unable to find (address|interface) for:? (?!\[?\d)",
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME fits no interface of this machine, or only ones that lead nowhere; "
        "Gloo takes one full name, not NCCL's prefixes and ^",
        "ip -brief address lists the interfaces; unset the variable where machines differ",
        ("pytorch/pytorch#29482", "aws-samples/aws-do-eks#51"),
        means="NCCL or Gloo found no network interface that it may use",
    ),
    "driver-lost": KnownError(
        r"Failed to initialize NVML: Unknown Error|CUDA (error: )?unknown error",
        "a container lost its devices when systemd reloaded, nvidia_uvm was not loaded again after a sleep or an "
        "update, or CUDA_VISIBLE_DEVICES was changed too late",
        "start the container again; nvidia-modprobe -u; restart the machine",
        means="the driver gave an error that it doesn't name",
    ),
    "peer-to-peer": KnownError(
        r"^[^\n]{0,60}hangs? at (99|100) ?%[^\n]{0,40}$|peer access is not supported",
        "an IOMMU or ACS is on, as on many RTX machines; or a version of NCCL takes this path by mistake",
        "NCCL_P2P_DISABLE=1 and NCCL_CUMEM_HOST_ENABLE=0 show whether it is that; iommu=pt, or ACS off in the BIOS",
        ("NVIDIA/nccl-tests#117", "NVIDIA/nccl#631"),
        means="two GPUs of one machine don't reach each other's memory directly (P2P)",
    ),
    "killed": KnownError(
        r"Signal 9 \(SIGKILL\)|Signals?[. ]SIGKILL|exitcode\s*:\s*-9\b|return code = -9\b|killed by signal: Killed"
        r"|exit(ed with)? (code|status):? 137\b|oom[-_]kill|OOMKilled|^\s*Killed\s*$",
        "the memory of the host, or of the container, was full; or a scheduler or a user ended it",
        "dmesg on that machine; fsdp_cpu_ram_efficient_loading: true; fewer workers of the data loader",
        ("bmaltais/kohya_ss#1065", "Lightricks/ComfyUI-LTXVideo#254"),
        means="a process was ended from outside, by SIGKILL",
    ),
    "host-memory": KnownError(
        r"DefaultCPUAllocator|Errno 12\] Cannot allocate memory|std::bad_alloc|\bMemoryError\b",
        "the memory of the host, or of the container, is full",
        "free -g; fsdp_cpu_ram_efficient_loading: true; fewer workers of the data loader; no offload",
        means="the system didn't give a process the memory that it asked for",
    ),
    "bus-error": KnownError(
        r"killed by signal: Bus error|exitcode\s*:\s*-7\b|Bus error \(core dumped\)|^\s*Bus error\s*$|\bSIGBUS\b",
        "/dev/shm or the host's memory is full (a container gets 64 MiB of the first); a file was cut while it was "
        "read, or its disk is full; or a compiled library (DeepSpeed, NCCL) doesn't fit this machine",
        f"df -h /dev/shm; {SHM}; reinstall the library",
        means="a process touched mapped memory without a page behind it (SIGBUS)",
    ),
    "segfault": KnownError(
        r"exitcode\s*:\s*-11\b|return code = -11\b|(?<!due to )\bSIGSEGV\b|Segmentation fault",
        "a library or an extension doesn't fit this torch, CUDA or driver; or the host's memory or stack ran out",
        "python -X faulthandler shows where; reinstall torch and its extensions in versions that fit together",
        ("open-mmlab/mmdetection#8916",),
        means="native code crashed",
    ),
    "ray-worker": KnownError(
        r"worker process has died|Worker unexpectedly exits with a connection error",
        "memory of the node ran out, ray stop, or a crash; Ray's text lists them all whatever happened",
        "the worker's own log in /tmp/ray/session_latest/logs has its last words; ray logs worker-*",
        ("VainF/Thinkless#4", "ray-project/ray#47461"),
        means="a worker of Ray ended without an exception of Python",
    ),
    "hangup": KnownError(
        r"got sig(nal|val): ?1\b|Received 1 death signal|closing signal SIGHUP",
        "the terminal or the connection to it ended, and torchrun stops the ranks then, even under nohup",
        "start the job inside tmux or screen, by setsid, or by sbatch",
        ("zai-org/ChatGLM2-6B#238", "pytorch/pytorch#67538"),
        means="the launcher got SIGHUP",
    ),
    "time-limit": KnownError(
        r"DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE)|got signal: 15\b|Received 15 death signal|SignalException\s*$",
        "the scheduler's time limit, a preemption, a user, a terminal that was closed, or another machine's end",
        "sacct -j JOB, or the events of the pod; --time for longer, and resume from the last checkpoint",
        means="the job was ended from outside",
    ),
    "own-address": KnownError(
        r"(c10d|gloo|NCCL)[^\n]*\bconnect(ing)?\b[^\n]*\b127\.0\.(0|1)\.1\b|connect[^\n]*\(127\.0\.(0|1)\.1, \d+\)"
        r"|remote=\[127\.|Unable to resolve hostname to a \(local\) address",
        "a name is a loopback address in /etc/hosts; on one machine, rank 0 has not begun to listen or has ended",
        "its real address beside its name in /etc/hosts; or GLOO_SOCKET_IFNAME; accel-fsdp doctor shows it",
        ("pytorch/pytorch#67547", "aws-samples/aws-do-eks#50"),
        means="ranks look for others at their own machine's address",
    ),
    "infiniband": KnownError(
        r"ibv_(modify|poll|post)\w*[^\n]*(failed|error)|Got completion[^\n]*\b(error|status)[ =]+12\b"
        r"|NET/IB[^\n]*async[^\n]*(port|fatal)",
        "a port is down, NCCL took an address or a GID that leads elsewhere, or the network loses packets",
        "ibstat on each machine; NCCL_IB_GID_INDEX=3 for RoCE; NCCL_IB_DISABLE=1 shows whether it is that",
        means="InfiniBand or RoCE between the machines failed",
    ),
    "unreachable": KnownError(
        rf"connectFullMesh failed|(NCCL WARN|gloo|ncclRemoteError|Last error)[^\n]*{NO_CONNECTION}"
        r"|socket\w*Connect[^\n]*(Connection refused|No route to host|unreachable|timed out)",
        "ranks chose an interface that leads to no other machine (docker0, veth, lo), a firewall is between them, "
        "or the other rank has ended",
        "accel-fsdp doctor on each machine tests every pair; export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        ("pytorch/pytorch#68893", "gpustack/gpustack#2125"),
        means="a rank couldn't connect to another",
    ),
    "rendezvous": KnownError(
        r"client socket has timed out[^\n]*connect to \([^\s,()]+, \d+\)|client socket has failed to connect"
        r"|\A(?!(?s:.)*_call_store)(?s:.)*RendezvousConnectionError|RendezvousTimeoutError|gai error: -\d"
        r"|host not found: Name or service not known",
        "its address is wrong, unknown here, or not one by which it knows itself; nothing listens there yet or any "
        "more; or a firewall drops the port",
        "accel-fsdp doctor on each machine, with the flags of the job; main_process_ip: what machine 0 knows itself by",
        ("pytorch/pytorch#69197", "hiyouga/LlamaFactory#3715"),
        means="machine 0 wasn't reached, or not all machines came in time",
    ),
    "gone": KnownError(
        r"gloo[^\n]*(Connection (closed|reset) by peer|Broken pipe)|RendezvousClosedError|failed to recv, got 0 bytes",
        "its own error is in the log of its machine; or the network to it broke",
        "look for the first error of all logs; exit code -9 is often a machine that ran out of memory (dmesg)",
        means="another rank has ended, or its connection",
        follows=True,
    ),
    "nccl-system": KnownError(
        r"ncclSystemError: System call",
        "/dev/shm, a network interface, InfiniBand, the driver, or a file that a variable NCCL_* names",
        "NCCL_DEBUG=WARN names it; accel-fsdp doctor tests the first three; env | grep NCCL",
        means="a system call failed inside NCCL",
    ),
    "certificate": KnownError(
        r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSLCertVerificationError|\bSSLError\b",
        "the network's proxy puts its own certificate in place or isn't set right (HTTPS_PROXY=http://...), "
        "the certificates here are old or missing, or the clock is wrong",
        "REQUESTS_CA_BUNDLE and SSL_CERT_FILE: a file with the proxy's certificate; pip install -U certifi; date",
        ("Snowflake-Labs/llm-bootcamp-build-2023#18",),
        means="an encrypted connection couldn't be made: this machine doesn't trust what it is shown",
    ),
    "hub": KnownError(
        rf"({HUB_HOST}|HTTPS?Connection(Pool)?\b(?!\(host='?(?!{HUB_HOST})))[^\n]*"
        r"(Max retries|timed out|resol(?!ve/)|unreachable|refused|couldn't connect|establish a new connection)"
        r"|(httpx|httpcore)\.(Connect|Read|Network|Proxy)\w*(Error|Timeout)"
        r"|(?s:(urllib3|httpx|httpcore|requests|huggingface_hub)/.{0,2000}?"
        r"(Name or service not known|Temporary failure in name resolution|Errno 1\d\d\] Connection refused))",
        "compute nodes often don't reach the internet; a proxy is needed; or the country blocks the Hub",
        "download where there is a network, and export HF_HUB_OFFLINE=1; HTTPS_PROXY or HF_ENDPOINT if there is one",
        ("PKU-YuanGroup/Chat-UniVi#12", "yuh-zha/AlignScore#17"),
        means="a request wasn't answered, as it seems one to the Hub",
        unless=NOT_THE_HUB,
    ),
    "service": KnownError(
        rf"HTTPS?ConnectionPool\(host='?(?!{HUB_HOST}|localhost|127\.)[^\n]*(Max retries|timed out|refused)"
        r"|botocore\.exceptions\.(ConnectTimeout|ReadTimeout|EndpointConnection|ConnectionClosed)Error"
        r"|wandb\.errors\.[\w.]*CommError[^\n]*timed out",
        "this machine can't reach it, or a large upload takes longer than the time-out",
        "curl -I its address on this machine, and HTTPS_PROXY if there is a proxy; longer time-outs for large uploads; "
        "WANDB_MODE=offline",
        ("boto/boto3#1090", "wandb/wandb#7671"),
        means="a service beside the Hub, such as an object store or a tracker, didn't answer this machine in time",
    ),
    "hub-file": KnownError(
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to '?https://huggingface\.co"
        r"|Connection error, and we cannot find the requested files",
        "this machine doesn't reach the Hub, the token may not read the file, or HF_HUB_OFFLINE is set; the first "
        "error of the text says which",
        "curl -I https://huggingface.co and hf auth whoami on this machine; download where there is a network",
        ("BaranziniLab/KG_RAG#46", "Stability-AI/generative-models#215"),
        means="the Hub gave no file, and the cache holds none",
    ),
}
