"""The answers that the wizard proposes, each with its reason in one line. Pure."""

from collections.abc import Callable
from typing import Any

from accel_fsdp.config import DEFAULT_PORT, PLACING, Engine
from accel_fsdp.hardware import machines
from accel_fsdp.units import listed
from accel_fsdp.wizard import recommended, validation
from accel_fsdp.wizard.answers import Context

model = ("", "its layers become the FSDP units")
method = ("full", "every weight is trained")
tp = (1, "whole layers; more sum activations over the ranks several times in each layer")
ep = (1, "each rank gathers all experts of a layer; more send tokens to the experts' ranks")
wrap_policy = ("TRANSFORMER_BASED_WRAP", "gathers one layer at a time")
activation_offload = (False, "the inputs of layers stay on the GPU; in host memory they cost copies over PCIe")
state_dict_type = ("SHARDED_STATE_DICT", "each rank writes its part; resumes on another number of GPUs")
main_process_ip = ("", f"empty: {listed(PLACING, 'or')} give the address of the first machine")
main_process_port = (DEFAULT_PORT, "Accelerate's default")


def gpus(context: Context) -> tuple[str, str]:
    text = machines.describe(context.detected)
    return text, "no GPU here: describe the target, or rehearse on this CPU" if text == "cpu" else "found here"


def num_machines(context: Context) -> tuple[int, str]:
    count = machines.parse(context["gpus"])[1]
    return count, "one machine" if count == 1 else f"as in {context['gpus']}"


def _planned(name: str, otherwise: Any, reason: str) -> Callable[[Context], tuple[Any, str]]:
    """The plan's recommendation for a question, or without one a fixed default."""

    def default(context: Context) -> tuple[Any, str]:
        candidate = recommended.candidate(context)
        decided = recommended.decisions(candidate.job) if candidate else {}
        if candidate is None or name not in decided:
            return otherwise, reason
        return decided[name], "the plan recommends it" if candidate.fits else "nothing fits; this needs least"

    return default


zero_stage = _planned("zero_stage", 3, "fits the largest model")
strategy = _planned("strategy", 1, "FULL_SHARD fits the largest model")
cpu_offload = _planned("cpu_offload", False, "slower; only when nothing else fits")
batch = _planned("batch", 0, "unknown")


def engine(context: Context) -> tuple[str, str]:
    if asked := recommended.wanted(context).get("engine"):
        return asked, "named or needed by a flag"
    return _planned("engine", "fsdp", "PyTorch's own sharding; nothing else to install")(context)


def fsdp_version(context: Context) -> tuple[int, str]:
    why = validation.reason("fsdp_version", 2, context)
    if why and not validation.reason("fsdp_version", 1, context):
        return 1, why
    return _planned("fsdp_version", 2, "it resumes the optimizer exactly")(context)


def seq_len(context: Context) -> tuple[int | None, str]:
    problem = recommended.problem_of(context)
    if problem is None:
        return None, "memory can't be predicted for it"
    return problem.job.recipe.length, "with the micro-batch it decides the memory"


def dp_replicate(context: Context) -> tuple[int, str]:
    return context["num_machines"], "one on each machine: only gradients cross the network"


def layer_class(context: Context) -> tuple[tuple[str, ...], str]:
    if context.model is None:
        return (), "no model was read"
    return tuple(layer.name for layer in context.model.wrap_classes), context.model.wrap_reason


def min_num_params(context: Context) -> tuple[int, str]:
    largest = context.model.largest_layer_parameters if context.model else 0
    if not largest:
        return 100_000_000, "Accelerate's default"
    return largest * 9 // 10, "just under the model's largest layer, so that each layer becomes a unit"


def activation_checkpointing(context: Context) -> tuple[bool, str]:
    """True if the plan recommends it and Accelerate can do it."""
    if context["engine"] == "fsdp" and context["method"] != "full":
        return False, "PEFT would lose the adapter; the launch line has --gradient_checkpointing where it is needed"
    if why := validation.reason("activation_checkpointing", True, context):
        return False, why
    return _planned("activation_checkpointing", False, "costs about a third more compute")(context)


def ram_efficient_loading(context: Context) -> tuple[bool, str]:
    """On, except for stored buffers, on which FSDP2 would crash."""
    if context.engine is Engine.DEEPSPEED and "ram_efficient_loading" in context.wished:
        return str(context.wished["ram_efficient_loading"]).lower() == "true", "as in the file"
    crashes = context.engine is Engine.FSDP2 and context.model is not None and context.model.persistent_buffers
    if crashes or context["method"] == "qlora":
        return False, "stored buffers and 4-bit weights can't be filled from rank 0"
    return True, "one rank reads the weights, the others receive them"


def mixed_precision(context: Context) -> tuple[str, str]:
    if not context.machine.count and context["engine"] != "tpu":
        return "no", "a CPU computes bf16 three to nine times slower than float32"
    if not machines.has_bf16(context.machine):
        return "fp16", f"{context.machine.accelerator} has no bf16"
    return "bf16", "bf16 compute over fp32 master weights"


def num_processes(context: Context) -> tuple[int, str]:
    """One process per GPU; two per machine without GPUs."""
    if context["engine"] == "single":
        return 1, "one process"
    usual, reason = (8, "one per TPU core") if context["engine"] == "tpu" else (2, "enough to rehearse on CPU")
    count = context.machine.count
    return (count or usual) * context["num_machines"], "one per GPU" if count else reason
