"""The answers that can't be used, each with its reason: unsuitable options, values that would fail. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from accel_fsdp.config import DEFAULT_PORT, Engine
from accel_fsdp.errors import UNPRINTABLE, UsageError, UserError
from accel_fsdp.hardware import gpus, machines
from accel_fsdp.job import Clash, Job, Layout, Recipe, clashes, combinations
from accel_fsdp.models import CAUSAL, Divisible, catalogue, check_layer_classes
from accel_fsdp.wizard.question import Context, engine_of

LONGEST_PATH, LONGEST_SHOWN = 1024, 80
MOST_RANKS = 1_000_000
"""The largest plausible number of machines or processes; a larger one is taken for a typing error."""
FLAGS = {"tp": "--tp", "ep": "--ep", "full": "--method full", "lora": "--method lora"}
"""What the user types for axes and methods, by the names in `Divisible.misfits`."""


def reason(question: str, value: Any, context: Context) -> str:
    """Why this option can't be chosen with the answers so far; empty if it can."""
    fatal = (clash.what for clash in _clashes(question, value, context) if not clash.mended)
    return _why_unsuitable(question, value, context) or next(fatal, "")


def caution(question: str, value: Any, context: Context) -> str:
    """The condition under which this option works with the answers so far; empty without one."""
    fixed = (clash for clash in _clashes(question, value, context) if clash.mended)
    return next((f"{clash.what}: {clash.why}" for clash in fixed), "")


def cautions(context: Context) -> tuple[str, ...]:
    """The cautions about all given answers, each once."""
    conditions = (caution(question, context[question], context) for question in _PARTS if question in context.given)
    return tuple(dict.fromkeys(filter(None, conditions)))


def _clashes(question: str, value: Any, context: Context) -> list[Clash]:
    """The rows of the table of combinations that match an option with the answers before it."""
    answers = {**context.given, question: value}
    if question not in _PARTS or (question == "activation_checkpointing" and not value):
        return []
    job = Job(
        Layout(engine_of(answers)),
        Recipe(answers["method"]),
        recompute="engine" if question == "activation_checkpointing" else "none",
        wrap_policy=answers.get("wrap_policy", ""),
        state_dict=answers.get("state_dict_type", ""),
        base=context.model.quant_method if context.model else "",
        embeddings=context.model.embeddings if context.model else "",
        scalars=context.model is not None and context.model.scalars,
    )
    return [clash for clash in clashes(job) if not _PARTS[question].isdisjoint(clash.parts)]


_PARTS = {
    "method": {"base"},
    "engine": {"method"},
    "fsdp_version": {"method", "embeddings", "scalars"},
    "wrap_policy": {"wrap_policy"},
    "activation_checkpointing": {"recompute"},
    "state_dict_type": {"state_dict"},
}
"""The questions that the table of combinations knows, and which parts of a job their options decide with what is known
by then."""


def _why_unsuitable(question: str, value: Any, context: Context) -> str:
    """Why an option is unsuitable, besides the table of combinations; empty if it is suitable."""
    four_bits = context.given.get("method") == "qlora"
    if (question, value) == ("engine", "deepspeed") and four_bits:
        return combinations.QLORA_ZERO
    if (question, value) == ("engine", "single"):
        ranks = context.wished.get("num_processes", max(context.machine.count, 1) * context["num_machines"])
        return "" if str(ranks) == "1" else f"{ranks} processes share the work"
    if (question, value) == ("engine", "tpu") and context["num_machines"] > 1:
        return "a TPU pod is started by gcloud, not by main_process_ip"
    if (question, value) == ("mixed_precision", "fp16") and context["engine"] == "tpu":
        return "a TPU computes in bf16"
    if question == "mixed_precision" and value in ("no", "fp8") and four_bits:
        return "the 4-bit weights are stored in the compute dtype, a 16-bit one"
    return ""


def check_model(context: Context, value: Any) -> str:
    """Refuses an empty name, and one that can't be in a line of YAML; a short name becomes the catalogue's hub id."""
    name = str(value).strip()
    if not name:
        raise UsageError("--model is missing", why="the layer class is read from it", fix="--model ID_OR_FOLDER")
    if name.startswith("-") or re.search(rf"{UNPRINTABLE.pattern}|[\n\t]", name) or len(name) > LONGEST_PATH:
        raise UsageError(
            f"--model {name[:LONGEST_SHOWN]} is neither a hub id nor a folder",
            why="neither of them begins with a dash, has control characters or is that long",
            fix="--model ID_OR_FOLDER",
        )
    return catalogue.hub_id(name)


def check_gpus(context: Context, value: Any) -> str:
    """Refuses text that doesn't describe a machine, and a GPU whose memory can't be known."""
    text = str(value).strip()
    machine, number = machines.parse(text)
    name = machine.accelerator
    if name is None or text == machines.describe(context.detected):
        return text
    text, why = machines.as_typed(machine, number), "a GPU's memory decides what fits"
    if gpus.is_npu(name) and not machine.memory_gib:
        raise UsageError(f"--gpus {text} has no size of memory", why=why, fix=f"--gpus {text}-{gpus.NPU_MEMORY}")
    try:
        if gpus.is_known(name) or not machine.memory_gib:  # with it, the GPU is just missing from the table
            gpus.find(name, machine.memory_gib)
    except UsageError as error:
        sized, fix = gpus.with_size(name), error.fix
        if sized:
            fix = f"--gpus {text.replace(name, sized)}"
        elif not gpus.is_known(name):
            fix += f"; or --gpus {text}-<N>GB, with N the GiB of memory of one GPU"
        raise UsageError(f"--gpus {text}: {error.what}", why=why, fix=fix) from error
    return text


def check_layer_class(context: Context, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    names = tuple(name.strip() for part in parts for name in part.split(",") if name.strip())
    if not names:
        raise UserError(
            "no transformer layer class is known",
            why="without it FSDP makes one unit of the whole model and saves no memory",
            fix="--layer-class NAME, the class of the model's repeated layers",
        )
    if bad_name := next((name for name in names if not name.isidentifier()), ""):
        raise UserError(
            f"layer class {bad_name[:LONGEST_SHOWN]} is not a class name",
            why="Accelerate looks for a module class of that name",
            fix="--layer-class NAME, such as LlamaDecoderLayer",
        )
    if context.model is not None:
        check_layer_classes(names, context.model.classes, tuple(layer.name for layer in context.model.wrap_classes))
    return names


def _number(flag: str, value: Any, why: str, *, fix: int, most: int) -> int:
    text = str(value).strip()
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 1 <= number <= most:
        what = f"{flag} {text[:LONGEST_SHOWN]} is not a whole number from 1 to {most}"
        raise UserError(what, why=why, fix=f"{flag} {fix}")
    return number


def _whole(flag: str, fix: int, most: int, why: str) -> Callable[[Context, Any], int]:
    return lambda context, value: _number(flag, value, why, fix=fix, most=most)


UNITS = "FSDP makes a unit of each module with more parameters than that; 0 wraps nothing"
check_min_num_params = _whole("--min-num-params", 100_000_000, 10**15, UNITS)
check_tokens = _whole("--seq-len", Recipe.length, 10**9, "a row has tokens to train on")
check_main_process_port = _whole("--main-process-port", DEFAULT_PORT, 65535, "it must be a free TCP port")


def check_batch(context: Context, value: Any) -> int:
    return 0 if value == 0 else _number("--batch", value, "a step trains on something", fix=1, most=10**6)


def _refuse_first(problems: Iterable[tuple[str, str, str]]) -> None:
    for what, why, fix in problems:
        raise UserError(what, why=why, fix=fix)


def check_num_machines(context: Context, value: Any) -> int:
    described, why = machines.parse(context["gpus"])[1], "it counts all machines, including this one"
    count = _number("--num-machines", value, why, fix=described, most=MOST_RANKS)
    if described not in (1, count):
        what, why = (
            f"--num-machines {count} contradicts --gpus {context['gpus']}",
            f"that describes {described} machines",
        )
        raise UserError(what, why=why, fix=f"--num-machines {described}, or describe one machine alone")
    return count


def check_num_processes(context: Context, value: Any) -> int:
    """Refuses numbers that Accelerate would round, refuse, or shard over a single rank."""
    one_each = max(context.machine.count, 1) * context["num_machines"]
    total = _number("--num-processes", value, "each process drives one GPU", fix=one_each, most=MOST_RANKS)
    _refuse_first(_problems_of_processes(context, total))
    return total


def _problems_of_processes(context: Context, total: int) -> Iterator[tuple[str, str, str]]:
    number = context["num_machines"]
    each, gpus = total // number, context.machine.count * number
    if total % number:
        why = "it is the total over all machines; Accelerate would start fewer, silently"
        what = f"--num-processes {total} is not a multiple of --num-machines {number}"
        yield what, why, f"--num-processes {max(each, 1) * number}"
    if 0 < gpus < total:
        fix = f"--num-processes {gpus}, or describe the machine: --gpus {each}xNAME"
        yield f"--num-processes {total} on {gpus} GPUs", "each process drives one GPU", fix
    if context["engine"] == "fsdp" and context["strategy"] in (4, 5) and each < 2:
        why = "it shards inside each machine, so nothing would be sharded"
        fix = "two GPUs or more on each machine, or --strategy 1"
        yield f"hybrid sharding with {each} process per machine", why, fix
    if total < 2 and context.engine is Engine.DDP:
        fix = "--num-processes 2 or more" if context.machine.count != 1 else "--engine fsdp, which one GPU can do"
        yield "data parallel training with 1 process", "Accelerate refuses it", fix


def _divisor(flag: str, value: Any, whole: int, why: str, fix: str = "") -> int:
    size = _number(flag, value, why, fix=1, most=MOST_RANKS)
    if whole % size:
        raise UserError(f"{flag} {size} does not divide {whole}", why=why, fix=fix or f"{flag} that divides {whole}")
    return size


def check_dp_replicate(context: Context, value: Any) -> int:
    total = context["num_processes"]
    size = _divisor("--dp-replicate", value, total, f"the {total} processes are divided evenly among them")
    if size * 2 > total:
        fix = f"--dp-replicate {max(total // 2, 1)}; or --strategy 1 without --dp-replicate"
        raise UserError(f"{size} replicas of {total} processes", why="one process has nothing to share", fix=fix)
    return size


def _check_axis(axis: Literal["tp", "ep"]) -> Callable[[Context, Any], int]:
    """Refuses what transformers can't divide: over machines, by heads or experts, without a plan, or in 4 bits."""

    def check(context: Context, value: Any) -> int:
        here, copy = context["num_processes"] // context["num_machines"], _ranks_per_copy(context)
        whole, why = {
            "tp": (here, f"every layer waits for all ranks of a group, so it stays in one machine: {here}"),
            "ep": (copy, f"experts are divided over the {copy} ranks of one copy"),
        }[axis]
        size = _divisor(f"--{axis}", value, whole, why, _sizes_that_fit(context, axis))
        if size > 1:
            _refuse_first(_problems_of_axis(context, axis, size))
        return size

    return check


check_tp, check_ep = _check_axis("tp"), _check_axis("ep")


def _problems_of_axis(context: Context, axis: str, size: int) -> Iterator[tuple[str, str, str]]:
    model, flag, fix = context.model, f"--{axis} {size}", _sizes_that_fit(context, axis)
    if axis == "ep" and size % context["tp"]:
        yield flag, f"it holds whole groups of --tp {context['tp']}", fix
    if context["strategy"] in (2, 5):
        why = "its weights are always freed after forward"
        yield f"{flag} with --strategy {context['strategy']}", why, f"--strategy {context['strategy'] - 1}"
    if context["mixed_precision"] == "fp16":
        why = "transformers, which divides the model, has no fp16"
        yield f"{flag} with --mixed-precision fp16", why, f"--mixed-precision bf16, or --{axis} 1"
    if model and model.auto_class != CAUSAL:
        yield f"{flag} for {model.auto_class}", "train/sft.py alone divides", f"--{axis} 1"
    axes = {"tp": context.given.get("tp", 1), "ep": 1, axis: size}
    sizes = {**axes, "fsdp": _ranks_per_copy(context) // axes["tp"]}
    for misfit in (model or Divisible()).misfits(sizes, context["method"], FLAGS):
        what = f"{model.name}: {misfit.what}" if model else misfit.what
        yield what, misfit.why, _sizes_that_fit(context, misfit.axis) if misfit.kind == "count" else misfit.fix


def _sizes_that_fit(context: Context, axis: str) -> str:
    """The fix that names an axis' sizes for these processes and this model."""
    tensor, here = context["tp"] if axis == "ep" else 1, context["num_processes"] // context["num_machines"]
    sizes = {"fsdp": _ranks_per_copy(context) // tensor, "tp": tensor, "ep": 1}
    fitting = (context.model or Divisible()).fitting(axis, sizes)
    words = " or ".join(str(size) for size in fitting if axis == "ep" or here % size == 0)
    return f"--{axis} {words}" if words else f"leave out --{axis}, or another --num-processes"


def _ranks_per_copy(context: Context) -> int:
    """The ranks that share one copy of the model."""
    replicas = context["dp_replicate"] if context["strategy"] in (4, 5) else 1
    return int(context["num_processes"] // max(replicas, 1))


def check_main_process_ip(context: Context, value: Any) -> str:
    """Refuses invalid addresses; an empty one is left to the cluster engine."""
    text = str(value).strip()
    if not text:
        return text
    if problem := machines.address_problem(text):
        raise UserError(
            f"--main-process-ip {text[:LONGEST_SHOWN]} is not an address",
            why=problem,
            fix="--main-process-ip NAME, the first machine's host name or IP address, such as 10.0.0.1",
        )
    return text
