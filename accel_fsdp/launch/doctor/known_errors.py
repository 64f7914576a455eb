"""Messages of errors and what is often behind them: `doctor --explain`.

The rows are ordered: an error that names its own cause comes before one that other errors bring about, such as a
collective that timed out. What any failure of a peer brings about (`Broken pipe`, `Connection reset by peer`,
`ConnectionRefusedError`, NCCL's `unhandled system error`) is in no row, because it says nothing of the cause.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

SHM = "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"
HANGING = "accel-fsdp rehearse FILE runs the job in small and says where each rank stands; training: --hang_timeout"
SYNCHRONOUS = "CUDA_LAUNCH_BLOCKING=1 shows the operation"

HARMLESS = re.compile(
    r"^(?!.*\bwandb\.errors\.).*wandb|\(errno: 97 "
    r"|has failed to (shutdown|send a keep-alive heartbeat to) the rendezvous"
)
"""Lines of a tracker's network, which goes on without it, torch's complaint where IPv6 is off, and torchrun's end."""
CHATTER = re.compile(
    r"NCCL INFO|^(\[\w+\]:)?\s*\[W(\d| socket)|(?<!=)\bINFO\b|Warning\b"
    r"|HEAD https?:|Retrying in \d|load from local cache"
)
"""Lines that don't say that something failed for good. They are read where a text has no others."""
MOST_CHARACTERS = 2_000_000
"""Of a log, its end is read."""
ROOT_CAUSE = re.compile(r"\bRoot Cause( \(first observed failure\))?:\s*$")
OTHER_FAILURES = re.compile(r"\bFailures:\s*$")
END_OF_REPORT = re.compile(r"={9}|\*{9}")
HUB_HOST = r"(huggingface\.co|hf\.co|hf-mirror\.com)"
NOT_THE_HUB = (
    rf"\A(?!(?s:.)*({HUB_HOST}|huggingface_hub/))(?s:.)*(wandb|boto|\bs3|amazonaws|googleapis|gcsfs|azure|mlflow)"
)
"""A text that names another service alone."""
PYTHONS_ERROR = re.compile(
    r"^(\[\w+\]:)?\s*(Key|Index|Value|Type|Name|Attribute|Assertion|ZeroDivision|UnboundLocal|FileNotFound|Permission"
    r"|NotImplemented|Import|ModuleNotFound|UnicodeDecode|json\.decoder\.JSONDecode)(Error|Warning)?\b[^\n]*$",
    re.MULTILINE,
)
"""The last line of a traceback that ended a rank by itself; the others wait for that one, or lose it."""
FIRST_FAILURE = re.compile(r"failed \(exitcode: -?\d+\) local_rank")
"""torchrun's line on the rank that failed first."""


@dataclass(frozen=True)
class KnownError:
    """`messages`: regular expressions, one of which matches what a user sees, in any case.

    `sources`: reports of it, as repository#issue. `unless`: a text that matches is another error. `follows`: it also
    follows from an error of the script on another rank, which is then the cause.
    """

    name: str
    messages: tuple[str, ...]
    cause: str
    fix: str
    sources: tuple[str, ...] = ()
    unless: str = ""
    follows: bool = False

    @property
    def often(self) -> str:
        """The cause as a table can know it: from others' reports, not from a look at this machine."""
        return f"often: {self.cause}"


KNOWN = (
    KnownError(
        "duplicate-gpu",
        (r"Duplicate GPU detected", r"invalid device ordinal"),
        "there are more ranks on a machine than GPUs, CUDA_VISIBLE_DEVICES or the scheduler hides some, "
        "or the script names one GPU for all ranks or one that isn't there",
        "num_processes: as many as GPUs; echo $CUDA_VISIBLE_DEVICES; torch.cuda.set_device(local_rank)",
        ("Lightning-AI/pytorch-lightning#4420", "tatsu-lab/stanford_alpaca#67"),
    ),
    KnownError(
        "open-files",
        (
            r"Too many open files",
            r"unable to open shared memory object",
            r"received 0 items of ancdata",
        ),
        "ranks hold sockets to each other, shards and data loaders, and the limit is low",
        "ulimit -n 65536; torch.multiprocessing.set_sharing_strategy('file_system')",
        ("pytorch/pytorch#14768", "pytorch/pytorch#973"),
    ),
    KnownError(
        "shared-memory",
        (
            r"posix_fallocate",
            r"/dev/shm.*No space left on device",
            r"creating shared memory segment",
            r"unable to (allocate|mmap|resize|write)[^\n]*</torch_\d",
            r"(insufficient|out of) shared memory",
            r"DataLoader worker .* killed by signal: Bus error",
            r"exitcode\s*:\s*-7\b",
        ),
        "/dev/shm is full or small: a container gets 64 MiB, and ended jobs leave files in it; "
        "or the memory of the host, of which it is a part, is full",
        f"df -h /dev/shm; remove what is left there; {SHM}",
        ("NVIDIA/nccl#342", "NVIDIA/nccl#525", "pytorch/ci-infra#490"),
    ),
    KnownError(
        "disk-full",
        (
            r"No space left on device",
            r"Errno 28\b",
            r"Disk quota exceeded",
            r"inline_container\.cc[^\n]*unexpected pos",
            r"PytorchStreamWriter failed writing",
        ),
        "a disk or its quota is full: that of the run's folder, of the caches in the home folder, or of /tmp; "
        "in a container it can be /dev/shm; or the file system fails",
        "df -h and df -i of these folders; quota -s; --output_dir, HF_HOME and TMPDIR on a larger disk",
        ("NVIDIA/Megatron-LM#878",),
    ),
    KnownError(
        "no-such-interface",
        (r"no socket interface found", r"Unable to find (address|interface) for:? (?!\[?\d)"),
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME fits no interface of this machine, or only ones that lead nowhere; "
        "Gloo takes one full name, not NCCL's prefixes and ^",
        "ip -brief address lists the interfaces; unset the variable where machines differ",
        ("pytorch/pytorch#29482", "aws-samples/aws-do-eks#51"),
    ),
    KnownError(
        "address-family",
        (r"Address family not supported",),
        "the interface that was chosen has no IP address, or one machine uses IPv4 and another IPv6",
        "export NCCL_SOCKET_IFNAME with one that has an address on each machine; export NCCL_SOCKET_FAMILY=AF_INET",
        ("NVIDIA/nccl#210",),
    ),
    KnownError(
        "no-address",
        (r"connecting to address with family .* neither AF_INET",),
        "a rank sent no address: NCCL_SOCKET_IFNAME names an interface that its machine doesn't have, "
        "or machines have different versions of NCCL",
        "accel-fsdp doctor on each machine compares both; unset NCCL_SOCKET_IFNAME and LD_LIBRARY_PATH",
        ("NVIDIA/nccl#1837", "NVIDIA/nccl#1267"),
    ),
    KnownError(
        "nvlink-sharp",
        (r"Failed to bind NVLink SHARP", r"nvls\.cc[^\n]*(bind|multicast)", r"CUDA failure 401"),
        "NVLink SHARP can't get memory from the NVSwitch: the Fabric Manager or IMEX was restarted without a reset of "
        "the GPUs, or too many communicators use up its slots",
        "NCCL_NVLS_ENABLE=0; nvidia-smi --gpu-reset, or a restart of the machine",
        ("pytorch/pytorch#177472", "pytorch/pytorch#178749", "NVIDIA/nccl#976"),
    ),
    KnownError(
        "fabric-manager",
        (r"system not yet initialized", r"\berror:? ?802\b(?!\.)", r"CUDA_ERROR_SYSTEM_NOT_READY"),
        "the Fabric Manager, without which GPUs with NVSwitch can't be used, doesn't run or is of another version than "
        "the driver",
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
        "the driver in the kernel is another version than its libraries, older than CUDA of this torch needs, "
        "or not in the container",
        "restart the machine after an update of the driver; or pip install a torch for an older CUDA",
    ),
    KnownError(
        "gpu-architecture",
        (r"no kernel image is available for execution", r"is not compatible with the current PyTorch installation"),
        "this torch, or an extension, was built without kernels for this GPU",
        "pip install torch for a newer CUDA; build the extension again on this machine",
    ),
    KnownError(
        "gpu-hardware",
        (
            r"uncorrectable (NVLink |ECC )?error",
            r"uncorrectable ECC",
            r"fallen off (of )?the bus",
            r"Unable to determine the device handle for GPU",
            r"GPU is lost",
            r"\bXid\b[^\n]*: (48|63|64|74|79|94|95|119|120)\b",
        ),
        "the GPU, its power supply, its slot or its firmware fails",
        "dmesg | grep -i xid; nvidia-smi -q -d ECC; restart the machine; leave it out of the job if it happens again",
        ("NVIDIA/open-gpu-kernel-modules#507", "rwth-i6/returnn#1486"),
    ),
    KnownError(
        "driver-lost",
        (r"Failed to initialize NVML: Unknown Error", r"CUDA (error: )?unknown error"),
        "this process can't use the driver: a container lost its devices when systemd reloaded, "
        "nvidia_uvm was not loaded again after a sleep or an update, or CUDA_VISIBLE_DEVICES was changed too late",
        "start the container again; nvidia-modprobe -u; restart the machine",
    ),
    KnownError(
        "no-gpu",
        (r"No CUDA GPUs are available", r"Found no NVIDIA driver on your system"),
        "no GPU is visible: CUDA_VISIBLE_DEVICES hides all, the job or container asked for none, or no driver is there",
        "nvidia-smi; echo $CUDA_VISIBLE_DEVICES; docker run --gpus all; sbatch --gpus-per-node",
    ),
    KnownError(
        "undefined-symbol",
        (r"undefined symbol",),
        "torch, NCCL or a compiled extension are of versions that don't fit together; "
        "two packages may bring the same library",
        "pip list | grep -i -e torch -e nccl -e cu1; unset LD_LIBRARY_PATH; build the extension again for this torch",
        ("NVIDIA/nccl#1180", "pytorch/pytorch#119932"),
    ),
    KnownError(
        "nccl-versions",
        (r"Mismatched NCCL version", r"NCCL version mismatch"),
        "ranks load different versions of NCCL",
        "the same environment on all machines; unset LD_LIBRARY_PATH; accel-fsdp doctor on each machine compares them",
    ),
    KnownError(
        "peer-to-peer",
        (r"^[^\n]{0,60}hangs? at (99|100) ?%[^\n]{0,40}$", r"peer access is not supported between these two devices"),
        "links between GPUs of one machine (P2P) are broken: an IOMMU or ACS is on, as on many RTX machines",
        "NCCL_P2P_DISABLE=1 to see whether it is that; then iommu=pt, or ACS off in the BIOS",
        ("NVIDIA/nccl-tests#117", "NVIDIA/nccl#631"),
    ),
    KnownError(
        "cuda-before-fork",
        (r"Cannot re-initialize CUDA in forked subprocess",),
        "a process was forked from one that had used CUDA: by an import or an earlier cell of a notebook; "
        "or a worker of the data loader uses the GPU",
        "restart the notebook and touch no GPU before notebook_launcher; data sets on the CPU; "
        "multiprocessing with spawn",
        ("huggingface/accelerate#940",),
    ),
    KnownError(
        "invalid-values",
        (r"probability tensor contains", r"Assertion `[^\n]*(input_val|<= one|<= 1)\b"),
        "values are NaN, infinite or out of range: float16 overflowed where the model needs bfloat16, "
        "weights or a quantised kernel are faulty, or a row is padding alone",
        f"look at the loss and the norm of the steps before; mixed_precision: bf16 in place of fp16; {SYNCHRONOUS}",
    ),
    KnownError(
        "index-out-of-range",
        (r"device-side assert triggered", r"Assertion `[^`\n]*(srcSelectDimSize|n_classes)"),
        "an index is out of range: a token beyond the embedding, a label beyond the classes, "
        "or a position beyond the model's; with several GPUs, broken P2P; where no line names the assertion, "
        "it can be a value: NaN, or beyond 0 to 1 in a loss",
        f"compare len(tokenizer) with the rows of the embedding; {SYNCHRONOUS}",
    ),
    KnownError(
        "illegal-access",
        (r"illegal memory access was encountered", r"an illegal instruction was encountered"),
        "a kernel read or wrote outside of its memory: often one of an extension (attention, quantisation, Liger) or "
        "of a version of torch or CUDA, a tensor on another GPU, an index out of range, or a failing GPU; the line "
        "at which the error shows is not the place",
        f"{SYNCHRONOUS}; compute-sanitizer; turn extensions off one by one",
    ),
    KnownError(
        "cublas-memory",
        (r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)",),
        "the GPU's memory is full when cuBLAS asks for its own; an index out of range broke CUDA before; "
        "or cuBLAS doesn't fit the driver",
        f"a smaller batch tells which; accel-fsdp plan --config FILE says what fits; {SYNCHRONOUS}",
    ),
    KnownError(
        "nonsense-size",
        (r"more than 1EB memory",),
        "a size that another rank sent is nonsense: ranks are in different collectives, or one of them had timed out",
        HANGING,
        ("NVIDIA/nccl#1284",),
    ),
    KnownError(
        "gpu-memory",
        (
            r"CUDA out of memory",
            r"(?<!ray\.exceptions\.)OutOfMemoryError",
            r"CUDA error: out of memory",
            r"Cuda failure.{0,4}'out of memory'",
        ),
        "the GPU's memory is full; machines and their network have nothing to do with it",
        "accel-fsdp plan --config FILE says what fits; nvidia-smi shows what others hold",
    ),
    KnownError(
        "mixed-dtypes",
        (r"uniform dtype", r"uniform original parameter dtype", r"all (parameters|tensors) to have (the )?same dtype"),
        "one FSDP unit holds parameters of several dtypes, as LoRA in float32 on a base in bfloat16",
        "load the model and the adapter in one dtype; FSDP's mixed_precision computes in bfloat16 anyway",
    ),
    KnownError(
        "integer-weights",
        (r"Cannot flatten integer dtype", r"shapes cannot be multiplied \(\S+ and (1x\d{5,}|\d{5,}x1|0x0)\)"),
        "FSDP can't shard weights that bitsandbytes stores as integers, or sharded them without their scales; "
        "or a layer computes with weights as they are stored",
        "bnb_4bit_quant_storage: the dtype of the model (bfloat16); 8-bit weights can't be sharded",
    ),
    KnownError(
        "mixed-requires-grad",
        (r"uniform `?requires_grad",),
        "one FSDP1 unit holds frozen and trained parameters, as LoRA makes them",
        "fsdp_use_orig_params: true; or fsdp_version: 2",
        ("huggingface/peft#1702", "pytorch/pytorch#104690"),
    ),
    KnownError(
        "meta-weights",
        (r"Cannot copy out of meta tensor",),
        "weights have no values yet on this rank: rank 0 alone loaded them (cpu_ram_efficient_loading, "
        "low_cpu_mem_usage) and didn't send them, device_map left them elsewhere, or the checkpoint lacks them",
        "fsdp_sync_module_states: true beside fsdp_cpu_ram_efficient_loading, or both false; "
        "start with accelerate launch, and load the model after the process group is there",
        ("hiyouga/LlamaFactory#2940", "huggingface/accelerate#2031"),
    ),
    KnownError(
        "sharded-shapes",
        (
            r"size mismatch for [^\n]*flat_param",
            r"_flat_param[^\n]*(size|shape)s? mismatch",
            r"shape in current model is torch\.Size\(\[0\]\)",
        ),
        "a checkpoint of shards meets other shards: it was saved by another number of ranks, with other units, "
        "or as LOCAL_STATE_DICT; or whole weights meet a model that is already sharded",
        "the number of ranks and the wrap classes of the save; fsdp_state_dict_type: SHARDED_STATE_DICT for later ones",
    ),
    KnownError(
        "missing-key",
        (r"Missing key in checkpoint state_dict",),
        "the checkpoint doesn't hold what the job asks for: another model or adapter, no optimizer state, "
        "or other versions of accelerate and torch",
        "accel-fsdp checkpoints RUN lists what it holds; for optimizer.state.0.step: accelerate above 1.12",
        ("huggingface/accelerate#3971", "pytorch/pytorch#148252"),
    ),
    KnownError(
        "wrong-layer-class",
        (r"Could not find the transformer layer class",),
        "fsdp_transformer_layer_cls_to_wrap, or the model's own list of layers, names a class that this model lacks; "
        "the YAML may be that of another project",
        "accel-fsdp check FILE --model MODEL names the classes; "
        "rm ~/.cache/huggingface/accelerate/default_config.yaml if it is an old one",
        ("tatsu-lab/stanford_alpaca#58", "axolotl-ai-cloud/axolotl#394", "huggingface/transformers#37672"),
    ),
    KnownError(
        "outside-forward",
        (
            r"'weight' must be 2-D",
            r"(?s)(generat|grpo|rollout).{0,9999}mixed torch\.Tensor and DTensor",
            r"setStorage[^\n]*out of bounds for storage of size 0",
        ),
        "a module was used while its parameters were sharded: generate, or a part of the model called by itself, "
        "outside of the forward pass of its FSDP unit, or by a library that doesn't know of shards",
        "call the wrapped model; FSDP.summon_full_params or model.unshard() around generate, on all ranks",
        ("huggingface/transformers#32285", "pytorch/pytorch#124019", "huggingface/trl#4550"),
    ),
    KnownError(
        "no-gradient",
        (
            r"none of output has requires_grad=True, this checkpoint",
            r"element 0 of tensors does not require grad",
            r"One of the differentiated Tensors does not require grad",
        ),
        "the loss depends on no parameter that is trained: reentrant activation checkpointing over frozen inputs "
        "(LoRA), target modules that match nothing, or detach or no_grad on the way",
        "gradient_checkpointing_kwargs: use_reentrant false; or model.enable_input_require_grads()",
        ("cloneofsimo/lora#253",),
    ),
    KnownError(
        "fp16-weights",
        (r"unscale FP16 gradients",),
        "weights that are trained are float16, and gradient scaling needs them in float32",
        "load the model in float32 and train with mixed_precision: fp16; or mixed_precision: bf16",
        ("yk7333/d3po#6",),
    ),
    KnownError(
        "unused-parameters",
        (r"Expected to have finished reduction in the prior iteration",),
        "parameters took no part in the loss: a branch that wasn't taken, or a layer whose output isn't used",
        "find_unused_parameters=True (ddp_find_unused_parameters); freeze what isn't used",
    ),
    KnownError(
        "no-process-group",
        (
            r"Default process group has not been initialized",
            r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
        ),
        "the script was started by python alone, or uses torch.distributed before its process group is there",
        "accel-fsdp launch FILE SCRIPT; create Accelerator() or call init_process_group first",
    ),
    KnownError(
        "mesh-without-shards",
        (r"Invalid mesh_dim_names",),
        "FSDP2 on a mesh with no dimension to shard over",
        "parallelism_config_dp_shard_size: 2 or more; accel-fsdp check FILE",
        ("huggingface/accelerate#3798",),
    ),
    KnownError(
        "no-cpu-backend",
        (r"No backend type associated with device type cpu", r"A CPU backend must be enabled"),
        "the process group has NCCL alone, and offload or an asynchronous save needs collectives on the CPU",
        "backend cpu:gloo,cuda:nccl; train/sft.py makes it so",
        ("huggingface/accelerate#3574", "pytorch/pytorch#148532"),
    ),
    KnownError(
        "locked-memory",
        (r"ibv_(reg_mr|create)[^\n]*Cannot allocate memory",),
        "InfiniBand may lock too little memory",
        "ulimit -l unlimited; docker run --ulimit memlock=-1 --cap-add=IPC_LOCK; LimitMEMLOCK=infinity for slurmd",
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
        "hub-access",
        (r"GatedRepoError", r"gated repo", r"RepositoryNotFoundError", r"401 Client Error"),
        "the Hub refuses this account: no token on this machine, no access to a gated model, or a misspelt name "
        "or path",
        "hf auth login, or HF_TOKEN on all machines; ask for access on the model's page",
    ),
    KnownError(
        "port-taken",
        (r"EADDRINUSE", r"address already in use"),
        "another job, the rest of one, or the launcher itself, listens on the port at which the ranks meet; "
        "or two processes take themselves for rank 0",
        "main_process_port: another one; ss -ltnp shows who has it",
        ("meta-pytorch/torchtune#392",),
    ),
    KnownError(
        "killed",
        (
            r"Signal 9 \(SIGKILL\)",
            r"Signals?[. ]SIGKILL",
            r"exitcode\s*:\s*-9\b",
            r"return code = -9\b",
            r"exit(ed with)? (code|status):? 137\b",
            r"killed by signal: Killed",
            r"oom[-_]kill",
            r"OOMKilled",
            r"^\s*Killed\s*$",
        ),
        "the system ended a rank, mostly as the memory of the host, or of the container, was full",
        "dmesg on that machine; fsdp_cpu_ram_efficient_loading: true; fewer workers of the data loader",
        ("bmaltais/kohya_ss#1065", "Lightricks/ComfyUI-LTXVideo#254"),
    ),
    KnownError(
        "host-memory",
        (r"DefaultCPUAllocator", r"Errno 12\] Cannot allocate memory", r"std::bad_alloc", r"\bMemoryError\b"),
        "the memory of the host, or of the container, is full",
        "free -g; fsdp_cpu_ram_efficient_loading: true; fewer workers of the data loader; no offload",
    ),
    KnownError(
        "segfault",
        (r"exitcode\s*:\s*-11\b", r"return code = -11\b", r"\bSIGSEGV\b", r"Segmentation fault"),
        "native code crashed: a library or an extension doesn't fit this torch, CUDA or driver; "
        "or the host's memory or stack ran out",
        "python -X faulthandler shows where; install torch and its extensions anew in versions that fit together",
        ("open-mmlab/mmdetection#8916",),
    ),
    KnownError(
        "hangup",
        (r"got signal: 1\b", r"Received 1 death signal", r"closing signal SIGHUP"),
        "the terminal or the connection to it ended; torchrun stops the ranks then, even under nohup",
        "start the job inside tmux or screen, by setsid, or by sbatch",
        ("zai-org/ChatGLM2-6B#238", "pytorch/pytorch#67538"),
    ),
    KnownError(
        "time-limit",
        (r"DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE)", r"got signal: 15\b", r"Received 15 death signal"),
        "the job was ended from outside: by the scheduler's time limit, a preemption, a user, or another machine's end",
        "sacct -j JOB, or the events of the pod; --time for longer, and resume from the last checkpoint",
    ),
    KnownError(
        "own-address",
        (
            r"(c10d|gloo|NCCL)[^\n]*\bconnect(ing)?\b[^\n]*\b127\.0\.(0|1)\.1\b",
            r"connect[^\n]*\(127\.0\.(0|1)\.1, \d+\)",
            r"remote=\[127\.",
            r"Unable to resolve hostname to a \(local\) address",
        ),
        "ranks look for others at their own machine's address: a name is a loopback address in /etc/hosts; "
        "in a job of one machine, rank 0 has not begun to listen or has ended",
        "its real address beside its name in /etc/hosts; or GLOO_SOCKET_IFNAME; accel-fsdp doctor shows it",
        ("pytorch/pytorch#67547", "aws-samples/aws-do-eks#50"),
    ),
    KnownError(
        "infiniband",
        (
            r"ibv_(modify|poll|post)\w*[^\n]*(failed|error)",
            r"Got completion[^\n]*\b(error|status)[ =]+12\b",
            r"NET/IB[^\n]*async[^\n]*(port|fatal)",
        ),
        "InfiniBand or RoCE between the machines fails: a port is down, or NCCL took an address that leads elsewhere",
        "ibstat on each machine; NCCL_IB_GID_INDEX=3 for RoCE; NCCL_IB_DISABLE=1 shows whether it is that",
    ),
    KnownError(
        "unreachable",
        (
            r"connectFullMesh failed",
            r"(NCCL WARN|gloo|ncclRemoteError|Last error)[^\n]*"
            r"(Connection refused|No route to host|Network is unreachable|Connection timed out)",
            r"socket\w*Connect[^\n]*(Connection refused|No route to host|unreachable|timed out)",
        ),
        "ranks chose an interface that leads to no other machine (docker0, veth, lo), a firewall is between them, "
        "or the other rank has ended",
        "accel-fsdp doctor on each machine tests every pair; export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        ("pytorch/pytorch#68893", "gpustack/gpustack#2125"),
    ),
    KnownError(
        "slow-preparation",
        (r"(?s)\b(Running tokenizer|Tokenizing|Filter|Map)\b[^\n]*\d+%\|.{0,9999}?collective operation timeout",),
        "one rank prepares the rows while the others wait for it, for longer than a collective may take",
        "--ddp_timeout 7200; or prepare the rows before the job",
        ("hiyouga/LlamaFactory#2424",),
    ),
    KnownError(
        "collective-timeout",
        (
            r"Watchdog caught collective operation timeout",
            r"Timed out waiting \d+ms for (recv|send) operation",
            r"collective operation timeout",
            r"monitoredBarrier",
            r"watchdog got stuck",
            r"Timeout at NCCL work",
            r"Detected mismatch between collectives on ranks",
            r"WorkNCCL.*ran for \d+ milliseconds before timing out",
        ),
        "one rank is elsewhere: it skipped a collective, took another branch, evaluates or saves for long, "
        "waits for data, or has stopped; "
        "or links between GPUs or machines hang",
        f"{HANGING}; NCCL_P2P_DISABLE=1 shows whether it is the links",
        ("huggingface/accelerate#3250", "konstmish/prodigy#35"),
        follows=True,
    ),
    KnownError(
        "rendezvous",
        (
            r"client socket has timed out[^\n]*connect to \([^\s,()]+, \d+\)",
            r"client socket has failed to connect",
            r"\A(?!(?s:.)*_call_store)(?s:.)*RendezvousConnectionError",
            r"RendezvousTimeoutError",
            r"gai error: -\d",
            r"host not found: Name or service not known",
        ),
        "machine 0 isn't reached: its address is wrong or unknown here, nothing listens there yet or any more, "
        "or a firewall drops the port",
        "accel-fsdp doctor on each machine, with the flags of the job; main_process_ip: an address, not a name",
        ("pytorch/pytorch#69197", "hiyouga/LlamaFactory#3715"),
    ),
    KnownError(
        "missing-ranks",
        (r"wait timeout after \d+ms, keys", r"\d+/\d+ clients joined"),
        "another rank never came to the start: it ended before, waits elsewhere, doesn't reach machine 0, "
        "or was given another world size",
        "look for the first error in the logs of all machines; accel-fsdp doctor on each says who is missing",
        follows=True,
    ),
    KnownError(
        "gone",
        (
            r"gloo[^\n]*(Connection (closed|reset) by peer|Broken pipe)",
            r"RendezvousClosedError",
            r"failed to recv, got 0 bytes",
        ),
        "another rank has ended, or the network to it broke; its own error is in the log of its machine",
        "look for the first error of all logs; exit code -9 is often a machine that ran out of memory (dmesg)",
        follows=True,
    ),
    KnownError(
        "nccl-system",
        (r"ncclSystemError: System call",),
        "a system call failed inside NCCL, and this text doesn't say which: on /dev/shm, a network interface, "
        "InfiniBand, the driver, or a file that a variable NCCL_* names",
        "NCCL_DEBUG=WARN names it; accel-fsdp doctor tests the first three; env | grep NCCL",
    ),
    KnownError(
        "certificate",
        (r"CERTIFICATE_VERIFY_FAILED", r"certificate verify failed", r"SSLCertVerificationError"),
        "this machine doesn't trust the certificate that it is shown: the network's proxy puts its own in place, "
        "the certificates here are old or missing, or the clock is wrong",
        "REQUESTS_CA_BUNDLE and SSL_CERT_FILE: a file with the proxy's certificate; pip install -U certifi; date",
        ("Snowflake-Labs/llm-bootcamp-build-2023#18",),
    ),
    KnownError(
        "hub",
        (
            rf"({HUB_HOST}|HTTPS?Connection(Pool)?\b(?!\(host='?(?!{HUB_HOST})))[^\n]*"
            r"(Max retries|timed out|resol(?!ve/)|unreachable|refused|couldn't connect|establish a new connection)",
            r"(httpx|httpcore)\.(Connect|Read|Network|Proxy)\w*(Error|Timeout)",
            r"(?s)(urllib3|httpx|httpcore|requests|huggingface_hub)/.{0,2000}?"
            r"(Name or service not known|Temporary failure in name resolution|Errno 1\d\d\] Connection refused)",
        ),
        "this machine doesn't reach the Hub, as compute nodes often don't reach the internet",
        "download where there is a network, and export HF_HUB_OFFLINE=1; HTTPS_PROXY or HF_ENDPOINT if there is one",
        ("PKU-YuanGroup/Chat-UniVi#12", "yuh-zha/AlignScore#17"),
        unless=NOT_THE_HUB,
    ),
    KnownError(
        "service",
        (
            rf"HTTPS?ConnectionPool\(host='?(?!{HUB_HOST}|localhost|127\.)[^\n]*(Max retries|timed out|refused)",
            r"botocore\.exceptions\.(ConnectTimeout|ReadTimeout|EndpointConnection|ConnectionClosed)Error",
            r"wandb\.errors\.[\w.]*CommError[^\n]*timed out",
        ),
        "a service beside the Hub, such as an object store or a tracker, doesn't answer this machine in time",
        "curl -I its address on this machine, and HTTPS_PROXY if there is a proxy; longer time-outs for large uploads; "
        "WANDB_MODE=offline",
        ("boto/boto3#1090", "wandb/wandb#7671"),
    ),
    KnownError(
        "hub-file",
        (
            r"LocalEntryNotFoundError",
            r"OfflineModeIsEnabled",
            r"couldn't connect to '?https://huggingface\.co",
            r"Connection error, and we cannot find the requested files",
        ),
        "the Hub gave no file, and the cache holds none: this machine doesn't reach the Hub, the token may not read "
        "the file, or HF_HUB_OFFLINE is set; the first error of the text says which",
        "curl -I https://huggingface.co and hf auth whoami on this machine; download where there is a network",
        ("BaranziniLab/KG_RAG#46", "Stability-AI/generative-models#215"),
    ),
    KnownError(
        "slow-network",
        (r"\A[^\n]*NET/Socket[^\n]*\Z",),
        "NCCL uses TCP: the fast network card isn't in the container, or its plugin isn't",
        "mount /dev/infiniband, or ask for vpc.amazonaws.com/efa; the log should say NET/IB or NET/OFI",
        ("aws/sagemaker-hyperpod-cli#306",),
    ),
    KnownError(
        "device-unknown",
        (r"devices? used by this process (is|are) currently unknown",),
        "the process group was made without device_id, so a barrier guesses the GPU and may hang",
        "init_process_group(device_id=torch.device('cuda', local_rank)); accelerate launch does so",
        ("huggingface/trl#3994",),
    ),
    KnownError(
        "every-machine-first",
        (r"^\W*every (node|machine) is (rank|machine|node) 0\W*$",),
        "a variable such as $SLURM_NODEID was expanded on the head node, so that every machine gets the same",
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
)


def find(message: str) -> KnownError | None:
    """The first row of the table that knows the message's most telling part; None if none does."""
    failed = PYTHONS_ERROR.search(message[-MOST_CHARACTERS:])
    rows = [row for row in KNOWN if not (failed and row.follows)]
    return next((row for text in _texts(message) for row in rows if _matches(row, text)), None)


def _matches(row: KnownError, text: str) -> bool:
    if row.unless and re.search(row.unless, text, re.IGNORECASE):
        return False
    return any(re.search(message, text, re.IGNORECASE | re.MULTILINE) for message in row.messages)


def _texts(message: str) -> Iterator[str]:
    """What torchrun says of the rank that failed first, then all but its report: it ended the other ranks itself."""
    lines = [line for line in message[-MOST_CHARACTERS:].splitlines() if not HARMLESS.search(line)]
    first, rest = _by_report(lines) if any(map(ROOT_CAUSE.search, lines)) else ([], lines)
    yield "\n".join([*first, *filter(FIRST_FAILURE.search, rest)])
    yield "\n".join([line for line in rest if not CHATTER.search(line)] or rest)


def _by_report(lines: list[str]) -> tuple[list[str], list[str]]:
    """The root cause of torchrun's report, and the lines outside of the report."""
    root: list[str] = []
    rest: list[str] = []
    others: list[str] = []
    part = rest
    for line in lines:
        if ROOT_CAUSE.search(line):
            part = root
        elif OTHER_FAILURES.search(line):
            part = others
        elif END_OF_REPORT.search(line):
            part = rest
        part.append(line)
    return root, rest
