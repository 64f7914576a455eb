"""The answers that can't be used, each with its reason: options that are out of place, values that would fail. Pure."""

from collections.abc import Callable
from typing import Any

from accel_fsdp import catalogue, gpus, machines
from accel_fsdp.asking import Context, is_ddp
from accel_fsdp.errors import UNPRINTABLE, UsageError, UserError, did_you_mean

LOOKALIKES = str.maketrans("OoIl", "0011")
"""Letters that are typed for digits."""
MOST_RANKS = 1_000_000
"""More machines or processes than any cluster has: a slip of the key."""


def reason(question: str, value: Any, context: Context) -> str:
    """Why this option can't be taken with the answers so far; empty when it can."""
    check = _OPTIONS.get((question, value))
    return check(context) if check else ""


def _unless(allowed: Callable[[Context], bool], why: str) -> Callable[[Context], str]:
    return lambda context: "" if allowed(context) else why


def _keeps_adapter(context: Context) -> bool:
    return bool(context["method"] == "full")


def _tpu(context: Context) -> str:
    if context["num_machines"] > 1:
        return "a TPU pod is started by gcloud, not by main_process_ip"
    return "bitsandbytes has no TPU kernels" if context["method"] == "qlora" else ""


def _checkpointing(context: Context) -> str:
    if context["engine"] == "fsdp" and context["wrap_policy"] == "NO_WRAP":
        return "Accelerate checkpoints what the wrap policy names, and NO_WRAP names nothing"
    if context["engine"] == "fsdp" and not _keeps_adapter(context):
        return "PEFT 0.21 saves an empty adapter with it; train with --gradient_checkpointing true"
    return ""


_OPTIONS: dict[tuple[str, Any], Callable[[Context], str]] = {
    ("engine", "deepspeed"): _unless(lambda c: c["method"] != "qlora", "ZeRO-3 can't partition 4-bit weights"),
    ("engine", "tpu"): _tpu,
    ("fsdp_version", 1): _unless(_keeps_adapter, "PEFT 0.21 saves an empty adapter under FSDP1"),
    ("activation_checkpointing", True): _checkpointing,
    ("wrap_policy", "SIZE_BASED_WRAP"): _unless(
        lambda c: c["fsdp_version"] == 1, "under FSDP2 Accelerate 1.15 would shard ModuleList and stop"
    ),
    ("mixed_precision", "fp16"): _unless(lambda c: c["engine"] != "tpu", "a TPU computes in bf16"),
    ("mixed_precision", "no"): _unless(
        lambda c: c["method"] != "qlora", "the 4-bit weights are stored in the compute dtype, a 16-bit one"
    ),
}


def check_model(context: Context, value: Any) -> str:
    """Refuses no name, and one that no line of a YAML can hold; a short name becomes the catalogue's hub id."""
    name = str(value).strip()
    if not name:
        raise UsageError("--model is missing", why="the layer class is read from it", fix="--model HUB_ID_OR_FOLDER")
    if UNPRINTABLE.search(name) or "\n" in name or "\t" in name:
        raise UsageError(
            f"--model {name} has control characters",
            why="the name stands in the YAML's first lines, which they would break",
            fix="--model HUB_ID_OR_FOLDER, typed by hand",
        )
    return catalogue.hub_id(name)


def check_gpus(context: Context, value: Any) -> str:
    """Refuses text that doesn't describe a machine, and a GPU whose memory can't be known."""
    text = str(value).strip() or "cpu"
    machine, _ = machines.parse(text)
    name = machine.accelerator
    if name is None or text == machines.describe(context.found):
        return text
    try:
        gpus.find(name, machine.memory_gib)
    except UsageError as error:
        meant = _lookalike(name)
        if machine.memory_gib and not meant:
            return text  # newer or rarer than our table
        raise UsageError(
            f"--gpus {text}: " + (f"{name} is no GPU. Did you mean {meant}?" if meant else error.what),
            why="what fits follows from a GPU's memory",
            fix=f"--gpus {text.replace(name, meant)}" if meant else f"--gpus with its memory, such as {text}-80GB",
        ) from error
    return text


def _lookalike(name: str) -> str:
    """The GPU that is meant where letters stand for digits: H1OO."""
    try:
        return "" if name == name.translate(LOOKALIKES) else gpus.find(name.translate(LOOKALIKES)).name
    except UsageError:
        return ""


def check_layer_class(context: Context, value: Any) -> tuple[str, ...]:
    """Refuses no class at all, and classes that the model doesn't have."""
    parts = value.split(",") if isinstance(value, str) else value
    names = tuple(name.strip() for part in parts for name in part.split(",") if name.strip())
    if not names:
        raise UserError(
            "no transformer layer class is known",
            why="without it FSDP makes one unit of the whole model and saves no memory",
            fix="--layer-class NAME, the class of the model's repeated layers",
        )
    if context.model is not None:
        check_layer_classes(names, context.model.classes)
    return names


def check_layer_classes(names: tuple[str, ...], classes: frozenset[str]) -> None:
    """Refuses layer class names that the built model doesn't have.

    Raises:
        UserError: naming the first unknown one and the nearest existing class.
    """
    for name in names:
        if name not in classes:
            raise UserError(
                f"layer class {name} is not in the model.{did_you_mean(name, classes)}",
                why="Accelerate would stop at prepare: Could not find the transformer layer class",
                fix="one of: " + ", ".join(sorted(classes)),
            )


def _number(flag: str, value: Any, why: str, *, fix: int, most: int) -> int:
    text = str(value).strip()
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 1 <= number <= most:
        raise UserError(f"{flag} {value} is not a whole number from 1 to {most}", why=why, fix=f"{flag} {fix}")
    return number


def check_size(context: Context, value: Any) -> int:
    """Refuses 0, which wraps nothing."""
    why = "FSDP makes a unit of each module with more parameters than that; 0 wraps nothing"
    return _number("--min-num-params", value, why, fix=100_000_000, most=10**15)


def check_port(context: Context, value: Any) -> int:
    """Refuses what is no TCP port."""
    return _number("--main-process-port", value, "it must be a free TCP port", fix=29500, most=65535)


def check_machines(context: Context, value: Any) -> int:
    """Refuses less than one machine."""
    described = machines.parse(context["gpus"])[1]
    count = _number("--num-machines", value, "it counts machines, this one too", fix=described, most=MOST_RANKS)
    if described not in (1, count):
        raise UserError(
            f"--num-machines {count} contradicts --gpus {context['gpus']}",
            why=f"that describes {described} machines",
            fix=f"--num-machines {described}, or describe one machine alone",
        )
    return count


def check_processes(context: Context, value: Any) -> int:
    """Refuses numbers that Accelerate would round, refuse, or shard over a single rank."""
    machines_in_all = context["num_machines"]
    one_each = max(context.machine.count, 1) * machines_in_all
    total = _number("--num-processes", value, "each process drives one GPU", fix=one_each, most=MOST_RANKS)
    if total % machines_in_all:
        raise UserError(
            f"--num-processes {total} is not a multiple of --num-machines {machines_in_all}",
            why="it is the total over all machines; Accelerate would start fewer, without a word",
            fix=f"--num-processes {max(total // machines_in_all, 1) * machines_in_all}",
        )
    gpus = context.machine.count * machines_in_all
    if 0 < gpus < total:
        raise UserError(
            f"--num-processes {total} on {gpus} GPUs",
            why="each process drives a GPU of its own",
            fix=f"--num-processes {gpus}, or describe the machine: --gpus {total // machines_in_all}xNAME",
        )
    hybrid = context["engine"] == "fsdp" and context["strategy"] in (4, 5)
    if hybrid and total // machines_in_all < 2:
        raise UserError(
            f"hybrid sharding with {total // machines_in_all} process per machine",
            why="it shards inside each machine, so nothing would be sharded",
            fix=f"--num-processes {2 * machines_in_all} or more, or --strategy 1",
        )
    if total < 2 and is_ddp(context.given):
        raise UserError(
            "data parallel training with 1 process",
            why="Accelerate refuses it",
            fix="--num-processes 2 or more" if context.machine.count != 1 else "--engine fsdp, which one GPU can do",
        )
    return total


def check_ip(context: Context, value: Any) -> str:
    """Refuses no address at all."""
    text = str(value).strip()
    if not text:
        raise UserError(
            "--main-process-ip is missing",
            why=f"{context['num_machines']} machines have to meet at one address; Accelerate would wait at None:29500",
            fix="--main-process-ip ADDRESS_OF_THE_FIRST_MACHINE",
        )
    if problem := machines.address_problem(text):
        raise UserError(
            f"--main-process-ip {text} is no address to meet at",
            why=problem,
            fix="--main-process-ip with the first machine's host name or IP address, such as 10.0.0.1",
        )
    return text
