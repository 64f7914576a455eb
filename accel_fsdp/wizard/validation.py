"""The answers that can't be used, each with its reason: unsuitable options, values that would fail. Pure."""

import re
from typing import Any

from accel_fsdp.command_line import flag_of
from accel_fsdp.config import DEFAULT_PORT, Engine
from accel_fsdp.errors import UNPRINTABLE, UsageError, UserError
from accel_fsdp.hardware import gpus, machines
from accel_fsdp.job import Clash, Job, Layout, Recipe, clashes, combinations
from accel_fsdp.models import catalogue, check_layer_classes
from accel_fsdp.wizard import recommended
from accel_fsdp.wizard.answers import Context, engine_of

LONGEST_PATH, LONGEST_SHOWN = 1024, 80
MOST_RANKS = 1_000_000
"""The largest plausible number of machines or processes; a larger one is taken for a typing error."""


def reason(question: str, value: Any, context: Context) -> str:
    """Why this option can't be chosen with the answers so far; empty if it can."""
    fatal = (clash.what for clash in _clashes(question, value, context) if not clash.mended)
    return _why_unsuitable(question, value, context) or next(fatal, "")


def cautions(context: Context) -> tuple[str, ...]:
    """What train/sft.py alone trains correctly of the given answers, each once."""
    given = (name for name in _PARTS if name in context.given)
    matches = (clash for name in given for clash in _clashes(name, context[name], context) if clash.mended)
    return tuple(dict.fromkeys(f"{clash.what}: {clash.why}" for clash in matches))


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
    name, fix = str(value).strip(), "--model with a hub id or a folder"
    if not name:
        raise UsageError("--model is missing", why="the layer class is read from it", fix=fix)
    if name.startswith("-") or re.search(rf"{UNPRINTABLE.pattern}|[\n\t]", name) or len(name) > LONGEST_PATH:
        why = "neither of them begins with a dash, has control characters or is that long"
        raise UsageError(f"--model {name[:LONGEST_SHOWN]} is neither a hub id nor a folder", why=why, fix=fix)
    return catalogue.hub_id(name)


def check_gpus(context: Context, value: Any) -> str:
    """Refuses text that doesn't describe a machine, and a GPU whose memory can't be known."""
    text = str(value).strip()
    machine, number = machines.parse(text)
    name = machine.accelerator
    if name is None or text == machines.describe(context.detected):
        return text
    text = machines.as_typed(machine, number)
    try:
        if gpus.is_known(name) or not machine.memory_gib:  # with it, the GPU is just missing from the table
            gpus.find(name, machine.memory_gib)
    except UsageError as error:
        unknown = "" if gpus.is_known(name) else f"; or --gpus {text}-<N>GB, with N the GiB of memory of one GPU"
        raise UsageError(f"--gpus {text}: {error.what}", why=error.why, fix=error.fix + unknown) from error
    return text


def check_layer_class(context: Context, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    names = tuple(name.strip() for part in parts for name in part.split(",") if name.strip())
    if not names:
        why = "without it FSDP makes one unit of the whole model and saves no memory"
        fix = "--layer-class NAME, the class of the model's repeated layers"
        raise UserError("no transformer layer class is known", why=why, fix=fix)
    if bad_name := next((name for name in names if not name.isidentifier()), ""):
        what, why = f"layer class {bad_name[:LONGEST_SHOWN]} is not a class name", "Accelerate looks for such a class"
        raise UserError(what, why=why, fix="--layer-class NAME, such as LlamaDecoderLayer")
    if context.model is not None:
        check_layer_classes(names, context.model.classes, tuple(layer.name for layer in context.model.wrap_classes))
    return names


NUMBERS = {
    "num_machines": (1, MOST_RANKS, "it counts all machines, including this one"),
    "seq_len": (Recipe.length, 10**9, "a row has tokens to train on"),
    "num_processes": (1, MOST_RANKS, "each process drives one GPU"),
    "dp_replicate": (1, MOST_RANKS, "the processes are divided evenly among them"),
    "tp": (1, MOST_RANKS, "every layer waits for all ranks of a group"),
    "ep": (1, MOST_RANKS, "experts are divided over the ranks of one copy"),
    "min_num_params": (100_000_000, 10**15, "FSDP makes a unit of each larger module; 0 wraps nothing"),
    "batch": (1, 10**6, "a step trains on something"),
    "main_process_port": (DEFAULT_PORT, 65535, "it must be a free TCP port"),
}
"""The questions for a number from 1 on: the usual one, the largest, and why it is one."""


def whole_number(question: str, value: Any, usual: int = 0) -> int:
    """Refuses a value that is not a whole number in the question's range."""
    default, most, why = NUMBERS[question]
    flag, text = flag_of(question), str(value).strip()
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 1 <= number <= most:
        what = f"{flag} {text[:LONGEST_SHOWN]} is not a whole number from 1 to {most}"
        raise UserError(what, why=why, fix=f"{flag} {usual or default}")
    return number


def check_seq_len(context: Context, value: Any) -> int | None:
    """Refuses rows without tokens, and rows longer than the model's positions, as far as these are known."""
    from accel_fsdp.prediction import length_of, trace_store

    if value is None:
        return None
    length, problem = whole_number("seq_len", value), recommended.problem_of(context)
    recorded = (problem.shape,) if problem else trace_store.find(context["model"])
    return length_of(recorded[0], length) if recorded else length


def check_batch(context: Context, value: Any) -> int:
    return 0 if value == 0 else whole_number("batch", value)


def check_num_machines(context: Context, value: Any) -> int:
    described = machines.parse(context["gpus"])[1]
    count = whole_number("num_machines", value, described)
    if described not in (1, count):
        fix = f"--num-machines {described}, or describe one machine alone"
        what = f"--num-machines {count} contradicts --gpus {context['gpus']}"
        raise UserError(what, why=f"that describes {described} machines", fix=fix)
    return count


def check_num_processes(context: Context, value: Any) -> int:
    """Refuses numbers that the machine doesn't have GPUs for, or with which there is nothing to share."""
    hosts, gpus = context["num_machines"], context.machine.count * context["num_machines"]
    total = whole_number("num_processes", value, gpus or hosts)
    if 0 < gpus < total:
        fix = f"--num-processes {gpus}, or describe the machine: --gpus {total // hosts}xNAME"
        raise UserError(f"--num-processes {total} on {gpus} GPUs", why="each process drives one GPU", fix=fix)
    if context["engine"] == "fsdp" and context["strategy"] in (4, 5) and total // hosts < 2:
        what, why = f"hybrid sharding with {total // hosts} process per machine", "nothing would be sharded"
        raise UserError(what, why=why, fix="two GPUs or more on each machine, or --strategy 1")
    if total < 2 and context.engine is Engine.DDP:
        fix = "--num-processes 2 or more" if context.machine.count != 1 else "--engine fsdp, which one GPU can do"
        raise UserError("data parallel training with 1 process", why="Accelerate refuses it", fix=fix)
    return total


def check_tp(context: Context, value: Any) -> int:
    """Refuses groups of ranks over several machines."""
    here, size = context["num_processes"] // context["num_machines"], whole_number("tp", value)
    if here % size:
        what = f"--tp {size} does not divide the {here} processes of a machine"
        raise UserError(what, why=NUMBERS["tp"][2], fix="--tp with a divisor of it, or leave out --tp")
    return size


def check_main_process_ip(context: Context, value: Any) -> str:
    """Refuses invalid addresses; an empty one is left to the scheduler."""
    text = str(value).strip()
    if text and (problem := machines.address_problem(text)):
        fix = "--main-process-ip NAME, the first machine's host name or IP address, such as 10.0.0.1"
        raise UserError(f"--main-process-ip {text[:LONGEST_SHOWN]} is not an address", why=problem, fix=fix)
    return text
