"""The answers that can't be used, each with its reason: options that are out of place, values that would fail. Pure."""

from collections.abc import Callable
from typing import Any

from accel_fsdp import machines
from accel_fsdp.asking import Context, is_ddp
from accel_fsdp.errors import UsageError, UserError, did_you_mean


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
    """Refuses an empty name."""
    if not value:
        raise UsageError("--model is missing", why="the layer class is read from it", fix="--model HUB_ID_OR_FOLDER")
    return str(value)


def check_gpus(context: Context, value: Any) -> str:
    """Refuses text that doesn't describe a machine."""
    text = str(value).strip() or "cpu"
    machines.parse(text)
    return text


def check_layer_class(context: Context, value: Any) -> tuple[str, ...]:
    """Refuses no class at all, and classes that the model doesn't have."""
    parts = value.split(",") if isinstance(value, str) else value
    names = tuple(name.strip() for part in parts for name in part.split(",") if name.strip())
    if not names:
        raise UserError(
            "no transformer layer class is known",
            why="without it FSDP makes one unit of the whole model and saves no memory",
            fix="--layer-class NAME, or --wrap-policy SIZE_BASED_WRAP with --fsdp-version 1",
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


def _number(flag: str, value: Any, why: str, most: int | None = None) -> int:
    text = str(value)
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < 1 or (most is not None and number > most):
        limits = "from 1 up" if most is None else f"from 1 to {most}"
        raise UserError(f"{flag} {value} is not a whole number {limits}", why=why, fix=f"{flag} 1")
    return number


def check_size(context: Context, value: Any) -> int:
    """Refuses 0, which wraps nothing."""
    return _number("--min-num-params", value, "0 wraps nothing, without a word from Accelerate")


def check_port(context: Context, value: Any) -> int:
    """Refuses what is no TCP port."""
    return _number("--main-process-port", value, "it must be a free TCP port", most=65535)


def check_machines(context: Context, value: Any) -> int:
    """Refuses less than one machine."""
    count = _number("--num-machines", value, "at least this machine takes part")
    described = machines.parse(context["gpus"])[1]
    if described not in (1, count):
        raise UserError(
            f"--num-machines {count} contradicts --gpus {context['gpus']}",
            why=f"that describes {described} machines",
            fix=f"--num-machines {described}, or describe one machine alone",
        )
    return count


def check_processes(context: Context, value: Any) -> int:
    """Refuses numbers that Accelerate would round, refuse, or shard over a single rank."""
    total = _number("--num-processes", value, "each process drives one GPU")
    machines_in_all = context["num_machines"]
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
            fix="--num-processes 2 or more",
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
    return text
