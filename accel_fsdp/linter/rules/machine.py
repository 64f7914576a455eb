"""Rules about how the job is started (`--args` with a command line), this machine (`--here`), and versions."""

from collections.abc import Iterator

from accel_fsdp.config import BY_NAME, FALSE_WORDS, MULTI_CPU, TRUE_WORDS, Engine
from accel_fsdp.linter.rules.engine import Finding, Subject, rule
from accel_fsdp.units import counted


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
    flags = [name for name in ("multi_gpu", "use_deepspeed", "tpu") if subject.arg_on(name)]
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
