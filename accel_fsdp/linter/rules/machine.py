"""Rules about how the job is started (`--args` with a command line), this machine (`--here`), and versions."""

from collections.abc import Callable, Iterator

from accel_fsdp.config import BY_NAME, DEFAULT_PORT, FALSE_WORDS, HYBRID, MULTI_CPU, TRUE_WORDS, Engine
from accel_fsdp.job import UNLESS_SFT
from accel_fsdp.linter.rules.engine import Finding, Subject, rule
from accel_fsdp.models import state_bytes
from accel_fsdp.units import about_gib, counted, distinguishable

LOCAL_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay"})


@rule("AF408", "warning", pains=("P50",))
def started_without_accelerate(subject: Subject) -> Iterator[Finding]:
    """The command line in `--args` starts with python or torchrun: neither reads the file, so FSDP is not used."""
    if subject.is_fsdp and subject.starter in ("python", "python3", "torchrun"):
        yield Finding(
            "distributed_type",
            f"{subject.starter} does not read this file",
            "nothing is sharded",
            "accelerate launch --config_file FILE SCRIPT ...",
        )


@rule("AF409", pains=("P08", "P41"))
def launched_as_something_else(subject: Subject) -> Iterator[Finding]:
    """A flag before the script that overrides the file: `--multi_gpu` its engine, `--use_fsdp` its device mesh."""
    flags = [name for name in ("multi_gpu", "use_deepspeed", "use_megatron_lm", "tpu") if subject.arg_on(name)]
    if subject.is_fsdp and subject.starter == "accelerate":
        for name in flags:
            yield Finding(
                "distributed_type",
                f"--{name} overrides distributed_type: FSDP",
                "FSDP is not used and every GPU holds the whole model",
                f"drop --{name}",
            )
    if subject.starter == "accelerate" and subject.arg_on("use_fsdp") and subject.section("parallelism_config"):
        yield Finding(
            "parallelism_config", "--use_fsdp drops parallelism_config", "the mesh is not built", "drop --use_fsdp"
        )


@rule("AF411")
def machine_of_no_such_number(subject: Subject) -> Iterator[Finding]:
    """`machine_rank` outside 0 to `num_machines` - 1: the machines wait for one that doesn't exist.

    A warning where `num_machines` is 1: each machine with this file trains alone.
    """
    rank, machines = subject.values.get("machine_rank"), subject.number("num_machines") or 1
    if isinstance(rank, int) and not isinstance(rank, bool) and not 0 <= rank < machines:
        is_single = machines == 1
        yield Finding(
            "machine_rank",
            f"machine_rank: {rank} of {counted(machines, 'machine')}",
            "this machine trains alone" if is_single else "they wait for a machine with another rank",
            "num_machines: all that take part, or machine_rank: 0"
            if is_single
            else f"0 to {machines - 1}, one for each: --machine_rank N",
            milder="warning" if is_single else None,
        )


@rule("AF413", pains=("P47",))
def fewer_gpu_ids_than_processes(subject: Subject) -> Iterator[Finding]:
    """`gpu_ids` names fewer GPUs than there are processes on a machine: two ranks share a GPU, which NCCL refuses.

    One id under MULTI_GPU on one machine is refused by the launcher.
    """
    chosen, ranks = _count_of_ids(subject), subject.ranks_here
    if subject.engine not in (Engine.FSDP1, Engine.FSDP2, Engine.DDP, Engine.DEEPSPEED) or not chosen:
        return
    if subject.values.get("distributed_type") == MULTI_CPU:
        return
    single = chosen == 1 and subject.engine is Engine.DDP and subject.top("num_machines") == 1
    if chosen < ranks or single:
        yield Finding(
            "gpu_ids",
            f"gpu_ids: {subject.top('gpu_ids')} and {counted(max(ranks, 1), 'process', 'processes')} on each machine",
            "the launcher stops: less than two GPU ids" if single else "NCCL stops: Duplicate GPU detected",
            "gpu_ids: all, or as many ids as processes",
        )


def _count_of_ids(subject: Subject) -> int:
    """The number of GPUs in `gpu_ids`; 0 for all of them."""
    chosen = subject.top("gpu_ids")
    if isinstance(chosen, list):  # AF207 makes text of it
        return len(chosen)
    if isinstance(chosen, int):  # 0 for 1:2, which means two GPUs or a mistake
        return int(str(chosen) == subject.spelt("gpu_ids", ""))
    if not isinstance(chosen, str) or chosen == "all":
        return 0
    return len([entry for entry in chosen.split(",") if entry.strip()])


MAY_DIFFER = frozenset({"machine_rank", "main_process_ip", "main_process_port"})
"""Flags that differ from machine to machine, or from run to run, by their nature."""


@rule("AF414", "warning")
def flag_beats_the_file(subject: Subject) -> Iterator[Finding]:
    """A flag of `accelerate launch` in `--args` that contradicts the file: the flag wins.

    The launcher's flags come before the script. `--machine_rank` and the address may differ.
    """
    for (section, key), field in BY_NAME.items():
        flag, written = subject.launcher.get(key), subject.section(section).get(key)
        if key in MAY_DIFFER or not field.engines or None in (flag, written) or _is_same_value(flag, written):
            continue
        yield Finding(
            f"{section}.{key}".lstrip("."),
            f"--{key} {str(flag).lower() if isinstance(flag, bool) else flag} wins over {key}: {written}",
            "the file doesn't say what is trained",
            f"drop --{key}, or write its value here",
        )


def _is_same_value(flag: object, written: object) -> bool:
    texts = str(flag).lower(), str(written).lower()
    return texts[0] == texts[1] or any(texts[0] in words and texts[1] in words for words in (TRUE_WORDS, FALSE_WORDS))


@rule("AF420", "warning", pains=("P07",))
def no_accelerator_here(subject: Subject) -> Iterator[Finding]:
    """No accelerator on this machine (`--here`).

    Accelerate then trains every rank separately, unsharded, and ends with exit code 0. train/sft.py runs FSDP on CPU
    processes instead.
    """
    if subject.is_fsdp and subject.here is not None and subject.here.usable_gpus == 0:
        yield Finding(
            "distributed_type",
            "this machine has no usable GPU",
            f"every rank trains the whole model alone{UNLESS_SFT}",
            "run it on a machine with GPUs; look at CUDA_VISIBLE_DEVICES",
        )


@rule("AF421", "warning", pains=("P82",))
def syncing_without_accelerator(subject: Subject) -> Iterator[Finding]:
    """FSDP1 with synced module states, its default, on a machine without accelerator: Accelerate stops."""
    has_no_gpu = subject.here is not None and subject.here.usable_gpus == 0
    if subject.engine is Engine.FSDP1 and has_no_gpu and subject.on("fsdp_sync_module_states") and not subject.uses_sft:
        yield Finding(
            "fsdp_config.fsdp_sync_module_states",
            "FSDP1 looks for a GPU to sync module states on",
            f"There are currently no available devices found{UNLESS_SFT}",
            "fsdp_sync_module_states: false and fsdp_cpu_ram_efficient_loading: false",
        )


def _gpus(subject: Subject) -> int:
    """The GPUs that the ranks of this machine will see; 0 if unknown or none."""
    if subject.here is None or not subject.here.gpus:
        return 0
    return _count_of_ids(subject) or subject.here.usable_gpus or 0


@rule("AF422", pains=("P47",))
def more_processes_than_gpus(subject: Subject) -> Iterator[Finding]:
    """More processes than GPUs on this machine (`--here`): two ranks share a GPU, which NCCL refuses.

    AF413 is about `gpu_ids`.
    """
    gpus = _gpus(subject)
    if subject.engine is not Engine.NONE and 0 < gpus < subject.ranks_here and not _count_of_ids(subject):
        yield Finding(
            "num_processes",
            f"{subject.ranks_here} processes and {gpus} GPUs on this machine",
            "NCCL stops: Duplicate GPU detected",
            f"num_processes: {gpus * (subject.number('num_machines') or 1)}",
        )


@rule("AF423", "warning", pains=("P43",))
def hybrid_on_some_gpus(subject: Subject) -> Iterator[Finding]:
    """FSDP1's hybrid strategies with fewer processes than visible GPUs: the groups are made from the GPU count."""
    gpus = _gpus(subject)
    if subject.engine is Engine.FSDP1 and subject.strategy in HYBRID and 0 < subject.ranks_here < gpus:
        yield Finding(
            "num_processes",
            f"hybrid sharding of {subject.ranks_here} processes with {gpus} visible GPUs",
            "FSDP1 makes its groups from the number of GPUs, and the ranks hang or shard wrongly",
            "set CUDA_VISIBLE_DEVICES to the GPUs in use",
        )


@rule("AF424", "warning", pains=("P48",))
def gpu_ids_against_the_environment(subject: Subject) -> Iterator[Finding]:
    """`gpu_ids` beside a different CUDA_VISIBLE_DEVICES: the launcher overwrites the variable."""
    chosen = subject.top("gpu_ids")
    visible = subject.here.visible if subject.here else None
    if visible and isinstance(chosen, str) and chosen not in ("all", visible):
        yield Finding(
            "gpu_ids",
            f"gpu_ids: {chosen} replaces CUDA_VISIBLE_DEVICES={visible}",
            "the job may run on another user's GPUs",
            "gpu_ids: all",
        )


@rule("AF425", "note", pains=("P49",))
def another_config_lies_here(subject: Subject) -> Iterator[Finding]:
    """Accelerate's default config file exists: a launch without `--config_file` uses it."""
    if subject.here is not None and subject.here.default_config:
        yield Finding(
            "",
            f"{subject.here.default_config} exists",
            "a launch without --config_file uses that file",
            "always give --config_file",
        )


def _short_of_memory(subject: Subject, needed_by: Callable[[int], float]) -> list[str] | None:
    """The memory that full training needs on this machine, given the bytes of its weights, and the available memory.

    None if that is enough, or one of them is unknown.
    """
    memory = subject.here.memory if subject.here else None
    if subject.model is None or memory is None or not subject.trains_everything:
        return None
    needed = needed_by(subject.held_bytes)
    return distinguishable(about_gib, needed, memory) if needed > memory else None


@rule("AF426", "warning", pains=("P12",))
def no_room_for_masters(subject: Subject) -> Iterator[Finding]:
    """Full training under FSDP2 with mixed precision needs a float32 copy of the model per rank in host memory.

    Each rank casts all loaded weights before it shards, also with `fsdp_cpu_ram_efficient_loading`. Needs `--model`,
    `--args` and `--here`.
    """
    short = _short_of_memory(subject, lambda weights: weights * subject.ranks_here)
    if subject.engine is Engine.FSDP2 and subject.mixed and short:
        yield Finding(
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
            f"{subject.ranks_here} ranks cast {short[0]} of weights in {short[1]} of memory",
            "each rank casts the whole model to float32 before it is sharded, and the system ends the job",
            "fewer processes on each machine, LoRA, or a machine with more memory",
        )


@rule("AF427", "warning", pains=("P39",))
def no_room_for_offload(subject: Subject) -> Iterator[Finding]:
    """CPU offload of 16 bytes per trained parameter, pinned, is more than the host's memory.

    It is half of that if `--dtype` asks for 16 bits without mixed precision. Needs `--model`, `--args` and `--here`.
    """
    machines = subject.number("num_machines") or 1
    short = _short_of_memory(subject, lambda weights: state_bytes.training_bytes(weights) // machines)
    if subject.is_fsdp and subject.on("fsdp_offload_params") and short:
        yield Finding(
            "fsdp_config.fsdp_offload_params",
            f"offload needs {short[0]} on each machine, this one has {short[1]}",
            "the system ends the job",
            "more machines, LoRA, or fsdp_offload_params: false",
        )


@rule("AF428", "warning", pains=("P56",))
def no_room_to_gather(subject: Subject) -> Iterator[Finding]:
    """FULL_STATE_DICT gathers the model on rank 0, which is more than the host's memory.

    It is gathered in float32, or without mixed precision in the dtype of `--dtype`. Needs `--model`, `--args` and
    `--here`.
    """
    short = _short_of_memory(subject, state_bytes.gathering_bytes)
    if subject.is_fsdp and subject.full_state_dict and short:
        yield Finding(
            "fsdp_config.fsdp_state_dict_type",
            f"a gathered state dict needs {short[0]}, this machine has {short[1]}",
            "rank 0 is ended when it saves",
            "fsdp_state_dict_type: SHARDED_STATE_DICT, and merge on another machine",
        )


@rule("AF429", "warning", pains=("P53",))
def no_room_for_checkpoints(subject: Subject) -> Iterator[Finding]:
    """The checkpoints won't fit on the disk of `--output_dir`.

    A checkpoint of full training with Adam takes 12 bytes per parameter sharded and 16 gathered, half of that if
    `--dtype` asks for 16 bits without mixed precision; another `--optim` stores less or more beside the weights. While
    the newest is written, there is one more than `--save_total_limit`. Needs `--model`, `--args` and `--here`.
    """
    free = subject.here.free_disk if subject.here else None
    save_total_limit = str(subject.arg("save_total_limit") or "1")
    saves = str(subject.arg("save_strategy")).lower() != "no"
    if not subject.is_fsdp or not subject.trains_everything or not saves or subject.model is None or free is None:
        return
    size = subject.checkpoint_bytes
    needed = size * ((int(save_total_limit) if save_total_limit.isdecimal() else 1) + 1)
    if needed > free:
        takes, available = distinguishable(about_gib, needed, free)
        yield Finding(
            "fsdp_config.fsdp_state_dict_type",
            f"checkpoints of {about_gib(size)} need {takes}, {available} are free at --output_dir",
            "a full disk stops the run",
            "another disk, a lower --save_total_limit, or SHARDED_STATE_DICT",
        )


@rule("AF430", "warning", pains=("P60",))
def torch_xla_beside_gpus(subject: Subject) -> Iterator[Finding]:
    """torch_xla is installed on a machine with GPUs: Accelerate prefers it, and FSDP is not used."""
    if subject.is_fsdp and subject.here is not None and subject.here.torch_xla and subject.here.gpus:
        yield Finding(
            "distributed_type",
            "torch_xla is installed here and comes before CUDA",
            "the backend is xla and FSDP is not used",
            "export USE_TORCH_XLA=0, or uninstall torch_xla",
        )


@rule("AF431", "warning", pains=("P90",))
def port_is_taken(subject: Subject) -> Iterator[Finding]:
    """`main_process_port` (29500 if absent) is in use on this machine.

    On one machine the launcher moves to another port; on several it stops on machine 0.
    """
    if subject.engine is Engine.NONE or subject.here is None or not subject.here.port_in_use:
        return
    is_multi = subject.number("num_machines") > 1
    yield Finding(
        "main_process_port" if "main_process_port" in subject.values else "",
        f"port {subject.top('main_process_port') or DEFAULT_PORT} is in use on this machine",
        "the launcher stops if this is machine 0" if is_multi else "the launcher takes another one",
        "main_process_port: another one" if is_multi else "main_process_port: 0, which finds a free one",
    )


@rule("AF433", "warning", pains=("P55",))
def local_disk_for_several_machines(subject: Subject) -> Iterator[Finding]:
    """Sharded checkpoints of several machines on a local disk: each has only its own parts, one has `.metadata`."""
    is_local = subject.here is not None and subject.here.filesystem in LOCAL_FILESYSTEMS
    if subject.is_fsdp and is_local and subject.number("num_machines") > 1 and subject.sharded_state_dict:
        yield Finding(
            "num_machines",
            f"--output_dir is on this machine's own {subject.here.filesystem if subject.here else 'disk'}",
            "no machine has the whole checkpoint, and resuming stops",
            "an --output_dir that all machines share",
        )


@rule("AF702")
def sagemaker_is_not_launched(subject: Subject) -> Iterator[Finding]:
    """A file for SageMaker with accelerate 1.10 or later, whose launcher stops at every such file.

    It asks for the file's `parallelism_config`, which 1.10 added to files for a local machine only.
    """
    installed = subject.versions.get("accelerate")
    is_broken = installed is not None and not subject.older("accelerate", "1.10")
    if subject.values.get("compute_environment") == "AMAZON_SAGEMAKER" and is_broken:
        yield Finding(
            "compute_environment",
            f"accelerate {installed} launches no file for SageMaker",
            "it stops: 'SageMakerConfig' object has no attribute 'parallelism_config'",
            "pip install 'accelerate<1.10' where the job is submitted",
        )


@rule("AF701", "warning", pains=("P92", "P93", "P94", "P95", "P96", "P97"))
def accelerate_is_older(subject: Subject) -> Iterator[Finding]:
    """FSDP2 with accelerate before 1.15, which has bugs that depend on no key.

    Checkpoints keep rank 0's slice of an adapter, activation checkpointing wraps a layer's children (4 times the
    activations), and tied embeddings stop on torch 2.13. Version 1.13.0 makes no float32 master weights. Before 1.13
    the optimizer can't be resumed, and offload with `fsdp_cpu_ram_efficient_loading` fails.
    """
    if subject.engine is Engine.FSDP2 and subject.older("accelerate", "1.15"):
        yield Finding(
            "fsdp_config.fsdp_version",
            f"accelerate {subject.versions['accelerate']} has bugs under FSDP2 that 1.15 fixed",
            "adapters are lost, layers are checkpointed in parts, and tied embeddings or a resumed optimizer stop it",
            "pip install 'accelerate>=1.15'",
        )
