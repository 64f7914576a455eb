"""What the plan recommends for the answers so far, and says of a strategy. Pure, but for recording.

The prediction is imported on first use: `accel-fsdp --help` lists the questions and needs none.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from accel_fsdp.config import ENGINE_NAMES, STRATEGIES, TORCH_DTYPES, Engine
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import gpus, machines
from accel_fsdp.job import Job, Layout, Recipe, from_arguments, recompute_by
from accel_fsdp.units import gib_or_mib
from accel_fsdp.wizard.answers import MESH, Context

if TYPE_CHECKING:
    from accel_fsdp.prediction import Candidate, Problem
    from accel_fsdp.prediction.memory import ModelShape, Tapes

RECOMPUTES = "activation_checkpointing"
OF_FSDP = {
    *("fsdp_version", "strategy", "wrap_policy", "layer_class", "min_num_params", "state_dict_type"),
    *("ram_efficient_loading", RECOMPUTES, *MESH),
}
"""Questions whose answer by a flag picks FSDP."""
DECIDING = ("fsdp_version", "strategy", "zero_stage", "cpu_offload", RECOMPUTES, "batch")
"""Questions besides the engine whose answers are a job's."""
NAMES = {name: str(number) for number, name in STRATEGIES.items()}
_CACHE: "dict[tuple[Any, ...], Candidate | None]" = {}


@cache
def _shape_of(model: str) -> "tuple[ModelShape, Mapping[str, Tapes]]":
    from accel_fsdp.prediction.tracing import by_name

    return by_name.read_shape(model, Recipe())


def problem_of(context: Context) -> "Problem | None":
    """The model, GPUs, method, precision and length of the answers; None if the model or the GPU is unknown.

    Its job has any layout for these ranks, one row, and train/sft.py for its script.
    """
    from accel_fsdp.prediction import Problem, length_of

    machine, answers = context.machine, {**context.wished, **context.given}
    if context.model is None or answers.get("wrap_policy") == "NO_WRAP":  # plans gather layers
        return None
    try:
        gpu = gpus.find(str(machine.accelerator), machine.memory_gib)
        shape, tapes = _shape_of(context["model"])
        length = length_of(shape, context.given.get("seq_len"))
    except UserError:  # an encoder-decoder, no GPU, or an unknown one
        return None
    number, asked = context["num_machines"], str(answers.get("num_processes", ""))
    ranks = int(asked) if _is_number(asked) and int(asked) else machine.count * number
    layout = Layout.ddp(ranks, max(ranks // number, 1)) if ranks > 1 else Layout.alone()
    precision: Any = answers.get("mixed_precision")
    if precision not in TORCH_DTYPES:
        precision = "bf16" if machines.has_bf16(machine) else "fp16"
    recipe = from_arguments.planned_recipe(context["method"], precision)
    attention = "sdpa" if shape.eager_only else recipe.attention
    return Problem(shape, tapes, gpu, Job(layout, replace(recipe, length=length, attention=attention), shape.name))


def layout_of(context: Context, problem: "Problem") -> Layout | None:
    """How the ranks share the model, as `accel-fsdp plan --config` reads the YAML; None off GPUs."""
    answers, layout, engine = context.given, problem.job.layout, context.engine
    strategy = answers.get("zero_stage", 3) if engine is Engine.DEEPSPEED else answers.get("strategy", 1)
    if engine in (Engine.NONE, Engine.TPU):
        return None
    if engine is Engine.DDP or not strategy:
        return layout
    replicas, tensor, experts = (answers.get(name) or 1 for name in MESH)
    each = layout.ranks // replicas if strategy in (4, 5) and replicas > 1 else layout.ranks_per_node
    offloads = bool(answers.get("cpu_offload"))
    return Layout(engine, strategy, layout.ranks, each, offloads, tensor, experts=experts)


def candidate(context: Context) -> "Candidate | None":
    """The plan's recommendation among the jobs that agree with the answers so far, and with flags for later ones.

    The one that needs least if none fits; None if the model or the GPU is unknown.
    """
    problem = problem_of(context)
    if problem is None:
        return None
    asked, sizes = wanted(context), tuple(str(context.given.get(axis)) for axis in MESH)
    return _cached(problem, (*asked.items(), *sizes), lambda: _searched(context, problem, asked))


def _cached(problem: "Problem", answers: tuple[Any, ...], find: "Callable[[], Candidate | None]") -> "Candidate | None":
    key = (id(problem.tapes), problem.gpu.name, problem.gpu.memory_gib, problem.job, *answers)
    if key not in _CACHE:
        _CACHE[key] = None  # what this method allocates can't be recorded
        with suppress(UserError):
            _CACHE[key] = find()
    return _CACHE[key]


def _searched(context: Context, problem: "Problem", asked: Mapping[str, str]) -> "Candidate | None":
    """The recommendation among the layouts that the plan tries, or in the one that is answered, such as NO_SHARD.

    The one without any answer stays while the answers agree with it. On a mesh that divides layers or experts: with
    checkpointing where it doesn't fit without; None before the mesh is known.
    """
    from accel_fsdp.prediction import layouts, search

    agrees, answers = _agreement(asked), {**context.wished, **context.given}
    divides = any(str(answers.get(axis) or 1) != "1" for axis in MESH[1:])
    plain = None if divides else _cached(problem, (), lambda: search.best(problem))
    if plain and agrees(plain.job):
        return plain
    if rows := int(asked.get("batch", divides)):  # 0 is refused when its question comes
        problem = replace(problem, job=problem.job.with_recipe(rows=rows), fixed_rows=True)
    jobs = [job for job in layouts(problem.job) if agrees(job) or agrees(job.with_layout(offload=True))]
    if divides or not jobs:
        own = layout_of(context, problem) if ("ep" if divides else "engine") in context.given else None
        jobs = [replace(problem.job, layout=own)] if own else []
    if divides:  # its speed isn't predicted
        tried = [problem.evaluate(variant) for variant in search.variants(jobs)]
        return next((candidate for candidate in tried if candidate.fits), tried[-1] if tried else None)
    return search.best(problem, jobs, agrees) or search.least(problem, jobs, agrees)


def verdict(context: Context) -> "Candidate | None":
    """The job of all answers, also judged by the memory of a machine."""
    problem, best = problem_of(context), candidate(context)
    return problem.judged(best.job) if problem and best else None


def _is_number(text: str) -> bool:
    """Whether a flag that is not checked yet is a whole number, of a size that a job may have."""
    return text.isdecimal() and len(text) <= 9


def wanted(context: Context) -> dict[str, str]:
    """The answers that decide a job, settled or by flags; a flag of one engine alone picks it."""
    answers = {name: str(value).lower() for name, value in {**context.wished, **context.given}.items()}
    asked = {name: NAMES.get(answers[name].upper(), answers[name]) for name in DECIDING if name in answers}
    asked = {name: text for name, text in asked.items() if text in ("true", "false") or _is_number(text)}
    implied = "deepspeed" if "zero_stage" in answers else "fsdp" if OF_FSDP & answers.keys() else ""
    engine = answers.get("engine", implied)
    return asked | ({"engine": engine} if engine else {})


def decisions(job: Job) -> dict[str, Any]:
    """The answers to the wizard that say how a job is trained."""
    layout = job.layout
    answers: dict[str, Any] = {"engine": ENGINE_NAMES[layout.engine], "batch": job.recipe.rows}
    if layout.is_fsdp:
        answers |= {"fsdp_version": int(layout.engine.removeprefix("fsdp")), "strategy": layout.strategy}
        answers |= {RECOMPUTES: job.settled.recompute == "engine", "cpu_offload": layout.offload}
    if layout.engine is Engine.DEEPSPEED:
        answers |= {"zero_stage": layout.strategy, "cpu_offload": layout.offload}
    return answers


def _agreement(asked: Mapping[str, str]) -> Callable[[Job], bool]:
    """Whether a job has the answers asked for, as far as they apply to its engine."""
    if asked.get("strategy") == "3" and asked.get("fsdp_version", "2") == "2":
        asked = {**asked, "engine": "ddp"}

    def agrees(job: Job) -> bool:
        decided = decisions(job)
        if job.engine is Engine.NONE:
            del decided["engine"]
        if recompute_by(job.engine, job.method) != "engine":
            decided.pop(RECOMPUTES, None)
        return all(str(decided.get(name, text)).lower() == text for name, text in asked.items())

    return agrees


def checkpoints_in_script(context: Context) -> bool:
    """Whether the script has to checkpoint activations: where the engine can't, and the plan recommends it."""
    chosen = None if context["activation_checkpointing"] else candidate(context)
    return bool(chosen and chosen.recipe.recomputes and recompute_by(chosen.job.engine, chosen.job.method) == "script")


def note(strategy: int, context: Context) -> str:
    """What the plan says of a strategy: what a GPU needs, and its speed; empty if it is unknown."""
    chosen = candidate(replace(context, given={**context.given, "strategy": strategy}))
    if chosen is None:
        return ""
    speed = f", {chosen.tokens_per_s:,.0f} tokens/s" if chosen.step else ""
    return f", {gib_or_mib(chosen.device.needed)}" + (speed if chosen.fits else ": doesn't fit")
