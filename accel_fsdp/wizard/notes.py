"""What the plan says of a strategy, and of all answers together.

Pure. GPUs outside the table have no notes. For models outside the catalogue the notes use the wizard's trace, else only
the weights. The prediction is imported on first use: `accel-fsdp --help` lists the questions and needs none.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_fsdp.hardware import gpus, machines
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction.memory import ModelShape
from accel_fsdp.units import GIB, gib_of, gib_or_mib
from accel_fsdp.wizard import recommended, validation
from accel_fsdp.wizard.question import Context

if TYPE_CHECKING:
    from accel_fsdp.prediction import Candidate
    from accel_fsdp.prediction.memory import Tapes

Known: TypeAlias = "tuple[ModelShape, Mapping[str, Tapes]] | None"
ROOM_FOR_STATE = 0.8
"""Share of a GPU that they may take; activations need the rest."""
NO_ADDRESS = (
    "note: without the first machine's address a cluster engine has to give it: accel-fsdp script makes its job file"
)


def note(strategy: int, context: Context) -> str:
    """What the plan says of a strategy: what a GPU needs, and its speed; empty if it is unknown."""
    if strategy in (4, 5) and context["num_machines"] == 1:
        return ""
    candidate = recommended.candidate(with_answers(context, strategy=strategy))
    return f", {in_figures(candidate)}" if candidate else ""


def in_figures(candidate: "Candidate") -> str:
    """The memory that a job needs and its speed on each GPU, or that it doesn't fit, in a few words."""
    needed = gib_or_mib(candidate.device.needed)
    if not candidate.fits:
        return f"{needed}: doesn't fit"
    return needed + (f", {candidate.tokens_per_s:,.0f} tokens/s" if candidate.step else "")


def because(candidate: "Candidate") -> str:
    """The reason for a recommended answer."""
    return "the plan recommends it" if candidate.fits else "nothing fits; this needs least"


def check_length(context: Context, value: Any) -> int | None:
    """Refuses rows without tokens, and rows longer than the model's positions, as far as these are known."""
    from accel_fsdp.prediction import length_of, trace_store

    if value is None:
        return None
    length = validation.check_tokens(context, value)
    recorded = context.traced or (None if recommended.is_own_model(context) else trace_store.find(context["model"]))
    return length_of(recorded[0], length) if recorded else length


def state_memory(context: Context) -> tuple[float, float] | None:
    """Bytes of weights, gradients and moments on a GPU, and its memory; None if one is unknown."""
    layout, machine = recommended.layout_of(context), context.machine
    if context.model is None or layout is None:
        return None
    is_known = machine.accelerator is not None and gpus.is_known(machine.accelerator)
    memory_gib = gpus.find(str(machine.accelerator), machine.memory_gib).usable_gib if is_known else machine.memory_gib
    if memory_gib is None:
        return None
    fused = context.model.fused_experts if context["method"] == "qlora" else 0
    state = (context.model.parameters - fused) * state_bytes.PER_PARAMETER[context["method"]]
    return layout.shard_of(state / layout.tensor + fused * state_bytes.DTYPE_BYTES["bfloat16"]), memory_gib * GIB


def checkpoints_in_yaml(context: Context) -> bool:
    """Whether Accelerate can checkpoint activations with these answers; otherwise the training script can."""
    question_key = ("activation_checkpointing", True, context)
    return context.is_fsdp and not validation.reason(*question_key) and not validation.caution(*question_key)


def warnings(context: Context) -> tuple[str, ...]:
    """Cautions and the plan's objections to settled answers, shown before writing, line by line."""
    lines = tuple(f"warning: {caution}" for caution in validation.cautions(context))
    if context["method"] == "qlora" and context.model and context.model.fused_experts:
        lines += (f"note: {state_bytes.experts_in_16_bits(context.model.fused_experts)}",)
    if context["num_machines"] > 1 and not context["main_process_ip"]:
        lines += (NO_ADDRESS,)
    if context["mixed_precision"] == "bf16" and context.machine.count and not machines.has_bf16(context.machine):
        units = f"{context.machine.accelerator} has no bf16 units and computes it at the rate of float32"
        lines += (f"warning: {units}; --mixed-precision fp16 is faster",)
    gpus = context.machine.count * context["num_machines"]
    if context["num_processes"] < gpus:
        lines += (f"note: {context['num_processes']} of {gpus} GPUs will be used, one per process",)
    return (*lines, *misfit(context))


def misfit(context: Context) -> tuple[str, ...]:
    """Why settled answers don't fit into a GPU's memory, and changes that would, as sentences.

    Empty if they fit, or if this is unknown.
    """
    from accel_fsdp.prediction import remedies

    if (judgement := recommended.judgement(context)) is None:
        return _misfit_of_state(context)
    problem, judged = judgement
    if judged.fits:
        return ()
    lead = "this leaves too little free memory" if judged.verdict == "tight" else "this doesn't fit"
    better = "; ".join(change.flags for change in remedies(problem, judged.job)) or "a smaller model, or larger GPUs"
    return f"warning: {lead}: {judged.refused or f'it {judged.words}'}", f"  what fits: {better}"


def _misfit_of_state(context: Context) -> tuple[str, ...]:
    state = state_memory(context)
    if state is None or context["cpu_offload"] or state[0] <= state[1]:
        return ()
    what = "weights" if context["method"] != "full" else "weights, gradients and Adam's state"
    return (f"warning: this doesn't fit: the {what} alone take {gib_of(*state)}",)


def with_answers(context: Context, **changed: Any) -> Context:
    return replace(context, given={**context.given, **changed})
