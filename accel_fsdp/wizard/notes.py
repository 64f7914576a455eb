"""The planner's notes on an option of the wizard, and on all answers together.

Pure. GPUs outside the table have no notes. For models outside the catalogue the notes use the wizard's trace, else only
the weights. The prediction is imported on first use: `accel-fsdp --help` lists the questions and needs none.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_fsdp.config import TORCH_DTYPES, Engine, Precision
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import gpus, machines
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import ModelFacts, state_bytes
from accel_fsdp.prediction.memory import ModelShape
from accel_fsdp.units import GIB, gib_of, gib_or_mib
from accel_fsdp.wizard import validation
from accel_fsdp.wizard.question import Context, engine_of

if TYPE_CHECKING:
    from accel_fsdp.prediction import Candidate, Problem
    from accel_fsdp.prediction.memory import Tapes

Known: TypeAlias = "tuple[ModelShape, Mapping[str, Tapes]] | None"
ROOM_FOR_STATE = 0.8
"""Share of a GPU that they may take; activations need the rest."""
GATHERED_BYTES, LARGE_LAYER = 6, 0.2
"""Bytes of a gathered parameter, in 16 bits, with its gradient in 32, and the share of a GPU from which it matters."""
MOST_MACHINES = 64
NO_ADDRESS = (
    "note: without --main-process-ip a cluster engine has to give the rendezvous address: accel-fsdp "
    "script makes its job file"
)
SMALL_STATE_GIB = 2
"""Below this, weights and training state leave any GPU room for a row of activations."""


def may_be_too_large(model: ModelFacts) -> bool:
    """Whether training this model may need more memory than a GPU has."""
    return model.parameters * state_bytes.PER_PARAMETER["full"] > SMALL_STATE_GIB * GIB


def has_large_layers(context: Context) -> bool:
    """Whether a gathered layer, with its gradients, takes a large share of a GPU: tensor parallelism divides it."""
    machine, name = context.machine, context.machine.accelerator
    memory = machine.memory_gib or (gpus.find(name).memory_gib if name and gpus.is_known(name) else 0)
    layer = context.model.largest_layer_parameters if context.model and context.model.tensor_plan else 0
    return memory > 0 and layer * GATHERED_BYTES > LARGE_LAYER * memory * GIB


def layout_of(context: Context) -> Layout | None:
    """How the ranks share the model, as `accel-fsdp plan --config` reads the YAML; None on CPU and TPU."""
    answers = context.given
    count, number = context.machine.count, answers["num_machines"]
    ranks = answers.get("num_processes") or count * number
    if not count or answers["engine"] == "tpu":
        return None
    together, offloads = max(ranks // number, 1), bool(answers.get("cpu_offload"))
    engine = engine_of(answers)
    if engine is Engine.DEEPSPEED:
        return Layout.zero(answers.get("zero_stage", 3), ranks, together, offloads)
    if engine is Engine.DDP:
        return Layout.ddp(ranks, together)
    replicas, tensor, experts = (answers.get(name) or 1 for name in ("dp_replicate", "tp", "ep"))
    strategy = answers.get("strategy", 1)
    together = ranks // replicas if strategy in (4, 5) and replicas > 1 else together
    return Layout(engine, strategy, ranks, together, offloads, tensor, experts=experts)


def note(question: str, value: Any, context: Context) -> str:
    """The predicted peak of a strategy on the GPUs of the answers, or what 4 bits leave; empty for other questions."""
    if (question, value) == ("method", "qlora") and context.model and context.model.fused_experts:
        return f"; {state_bytes.experts_in_16_bits(context.model.fused_experts)}"
    if question != "strategy" or (value in (4, 5) and context["num_machines"] == 1):
        return ""
    candidate = _evaluate(_sharded_problem(context, value), False)
    return f", ~{gib_or_mib(candidate.device.allocated)}" if candidate else ""


def _sharded_problem(context: Context, strategy: int) -> "Problem | None":
    """The problem in a strategy, if several ranks share the model."""
    problem = _problem(with_answers(context, strategy=strategy))
    return problem if problem and problem.ranks > 1 else None


def legend(context: Context) -> str:
    """Explains the numbers of `note`; empty without any."""
    problem = _sharded_problem(context, 1)
    if problem is None:
        return ""
    memory, length = gib_or_mib(problem.capacity_bytes), problem.job.recipe.length
    return f"~GiB: predicted peak with 1 x {length:,} tokens, of {memory} on a GPU"


def of_each_size(axis: str, check: Callable[[Context, Any], Any], context: Context) -> str:
    """The predicted peak with each size of an axis, in words; records what a size allocates, in seconds."""
    words = []
    for size in range(1, context.machine.count + 1):
        try:
            check(context, size)
            candidate = _evaluate(_problem(with_answers(context, **{axis: size}), records=True), False)
        except UserError:  # this size doesn't divide the model, or can't be recorded
            continue
        if candidate:
            words.append(f"{size}: ~{gib_or_mib(candidate.device.allocated)}")
    return "predicted for each GPU: " + "; ".join(words) if words else ""


def advice(context: Context, **changed: Any) -> "Candidate | None":
    """The switches to turn on so that it fits; None if the model or the GPU is unknown."""
    from accel_fsdp.prediction import advise

    problem = _problem(with_answers(context, **changed))
    try:
        return advise(problem) if problem else None
    except UserError:  # what this method allocates can't be recorded
        return None


def _evaluate(problem: "Problem | None", checkpointing: bool) -> "Candidate | None":
    if problem is None:
        return None
    try:
        return problem.evaluate(problem.job.with_recipe(checkpointing="full" if checkpointing else "none"))
    except UserError:
        return None


def _problem(context: Context, records: bool = False) -> "Problem | None":
    """The answers as a problem for the planner; None if the model, its allocations or the GPU are unknown.

    With `records`, missing allocations of a bundled model are recorded.
    """
    from accel_fsdp.prediction import problem_of
    from accel_fsdp.prediction.memory import variant_for
    from accel_fsdp.prediction.tracing import by_name

    layout, precision = layout_of(context), _precision(context)
    if layout is None or _is_unknown(context):
        return None
    model, method, seq_len = context["model"], context["method"], context.given.get("seq_len")
    traced = context.traced or (by_name.read_shape(model, Recipe()) if records else None)
    problem = problem_of(model, context.machine, layout, method, precision, traced, seq_len)
    known = problem is None or variant_for(problem.job.recipe, problem.job.layout) in problem.tapes
    return problem if known or not layout.is_by_transformers else None


def check_length(context: Context, value: Any) -> int | None:
    """Refuses rows without tokens, and rows longer than the model's positions, as far as these are known."""
    from accel_fsdp.prediction import length_of, trace_store

    if value is None:
        return None
    length = validation.check_tokens(context, value)
    recorded = context.traced or (None if _is_own_model(context) else trace_store.find(context["model"]))
    return length_of(recorded[0], length) if recorded else length


def _precision(context: Context) -> Precision:
    precision: Precision = context.given.get("mixed_precision", "fp8")
    return precision if precision in TORCH_DTYPES else "bf16" if machines.has_bf16(context.machine) else "fp16"


def state_memory(context: Context) -> tuple[float, float] | None:
    """Bytes of weights, gradients and moments on a GPU, and its memory; None if one is unknown."""
    layout, machine = layout_of(context), context.machine
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


def checkpoints_in_script(context: Context) -> bool:
    """Whether the script has to checkpoint activations, so that it fits."""
    if checkpoints_in_yaml(context):
        return False
    needed = advice(context)
    return needed is not None and needed.recipe.recomputes


def warnings(context: Context) -> tuple[str, ...]:
    """Cautions and the plan's objections to settled answers, shown before writing, line by line."""
    lines = tuple(f"warning: {caution}" for caution in (*validation.cautions(context), *_unknown_gpu(context)))
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
    misfits, host = misfit(context), host_words(context)
    return (*lines, *misfits, *([f"note: {host}"] if host and not any(host in line for line in misfits) else []))


def _unknown_gpu(context: Context) -> tuple[str, ...]:
    """The planner's refusal of a typed GPU that only its memory size makes usable here."""
    if context.machine == context.detected or context.machine.accelerator is None:
        return ()
    try:
        gpus.find(context.machine.accelerator)
    except UserError as error:
        return (f"{error.what} Its speed is not predicted, and its memory is taken from {context['gpus']}",)
    return ()


def judgement(context: Context) -> "Candidate | None":
    """The plan's verdict on settled answers; None if the model or the GPU is unknown."""
    checkpointing = context["activation_checkpointing"] or checkpoints_in_script(context)
    return _evaluate(_problem(context), checkpointing)


def misfit(context: Context) -> tuple[str, ...]:
    """Why settled answers don't fit into a GPU's memory, and changes that would, as sentences.

    Empty if they fit, or if this is unknown.
    """
    candidate = judgement(context)
    if candidate is None:
        return _misfit_of_state(context)
    if candidate.fits and _is_hosted(context):
        return ()
    if candidate.verdict == "no":
        misfit_words = f"this doesn't fit: it {candidate.words}"
    elif candidate.verdict == "tight":
        misfit_words = f"this leaves too little free memory: it {candidate.words}"
    else:
        problem = _problem(context)
        misfit_words = f"this doesn't fit. {host_words(context) or (problem.host_lack(problem.job) if problem else '')}"
    better = "; ".join(_better(context)) or "a smaller model, or larger GPUs"
    return f"warning: {misfit_words}", f"  what fits: {better}"


def host_words(context: Context) -> str:
    """The host memory that offload needs per machine; empty without offload."""
    problem = _problem(context)
    if problem is None or not problem.job.layout.offload:
        return ""
    return f"CPU offload needs {problem.host_need(problem.host(problem.job).training)}"


def _is_hosted(context: Context) -> bool:
    """Whether each machine has the memory to load the model, and for the offload, as far as it is known."""
    problem = _problem(context)
    return problem is None or problem.is_hosted(problem.job)


def _misfit_of_state(context: Context) -> tuple[str, ...]:
    state = state_memory(context)
    if state is None or context["cpu_offload"] or state[0] <= state[1]:
        return ()
    what = "weights" if context["method"] != "full" else "weights, gradients and Adam's state"
    return (f"warning: this doesn't fit: the {what} alone take {gib_of(*state)}",)


def _is_unknown(context: Context) -> bool:
    """Whether nothing can be predicted, for example for a model in a single unit: predictions gather layer by layer."""
    one_unit = context["engine"] == "fsdp" and context.given.get("wrap_policy") == "NO_WRAP"
    return one_unit or (context.traced is None and _is_own_model(context))


def _is_own_model(context: Context) -> bool:
    """Whether the model has no name or is a folder, whose model may differ from the catalogue's."""
    return not context["model"] or os.path.exists(context["model"])


def _better(context: Context) -> Iterator[str]:
    now = advice(context)
    if now and _fits(context):
        yield " ".join(_switches(context, now))
        return
    sharded: Mapping[str, Any] = {"engine": "fsdp", "fsdp_version": 2, "strategy": 1}
    if any(context.given[name] != value for name, value in sharded.items()) and _fits(context, **sharded):
        yield "--engine fsdp --fsdp-version 2 --strategy 1"
    adapters = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[context["method"]]
    for method in adapters:
        if not validation.reason("engine", context["engine"], with_answers(context, method=method)) and _fits(
            context, method=method, fsdp_version=2
        ):
            yield f"--method {method}"
            break
    number = context["num_machines"] * 2
    while number <= MOST_MACHINES:
        if _fits(context, num_machines=number, num_processes=context.machine.count * number):
            yield f"{number} machines: --gpus {number}x{machines.describe(context.machine)}"
            return
        number *= 2


def _fits(context: Context, **changed: Any) -> bool:
    fitting = advice(context, **changed)
    if fitting is None or not fitting.fits:
        return False
    return _is_hosted(with_answers(context, **changed, cpu_offload=fitting.layout.offload))


def with_answers(context: Context, **changed: Any) -> Context:
    return replace(context, given={**context.given, **changed})


def _switches(context: Context, needed: "Candidate") -> Iterator[str]:
    """The flags by which the answers differ from the advice."""
    if needed.recipe.recomputes and checkpoints_in_yaml(context) and not context["activation_checkpointing"]:
        yield "--activation-checkpointing true"
    if needed.layout.offload and not context["cpu_offload"]:
        yield "--cpu-offload true"
