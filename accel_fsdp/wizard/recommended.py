"""What the plan recommends for the answers so far, and what it says of all answers. Pure, but for recording tapes.

The prediction is imported on first use: `accel-fsdp --help` lists the questions and needs none.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accel_fsdp.config import ENGINE_NAMES, FSDP_VERSIONS, STRATEGIES, TORCH_DTYPES, Engine, Precision
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import gpus, machines
from accel_fsdp.job import FSDP_KINDS, Job, Layout, from_arguments, recompute_by
from accel_fsdp.wizard.answers import MESH
from accel_fsdp.wizard.question import Context, engine_of

if TYPE_CHECKING:
    from accel_fsdp.prediction import Candidate, Problem

OF_FSDP = frozenset(
    {
        *("fsdp_version", "strategy", "wrap_policy", "layer_class", "min_num_params", "state_dict_type"),
        *("ram_efficient_loading", "activation_checkpointing", *MESH),
    }
)
"""Questions whose answer by a flag picks FSDP."""
RECOMPUTES = "activation_checkpointing"
_CACHE: "dict[tuple[Any, ...], Candidate | None]" = {}


def layout_of(context: Context) -> Layout | None:
    """How the ranks share the model, as `accel-fsdp plan --config` reads the YAML; None on CPU and TPU."""
    answers = context.given
    count, number = context.machine.count, answers["num_machines"]
    ranks = answers.get("num_processes") or count * number
    if not count or answers["engine"] == "tpu":
        return None
    together, offloads = max(ranks // number, 1), bool(answers.get("cpu_offload"))
    engine = engine_of(answers)
    if answers["engine"] == "single":
        return Layout.alone()
    if engine is Engine.DEEPSPEED:
        return Layout.zero(answers.get("zero_stage", 3), ranks, together, offloads)
    if engine is Engine.DDP:
        return Layout.ddp(ranks, together)
    replicas, tensor, experts = (answers.get(name) or 1 for name in MESH)
    strategy = answers.get("strategy", 1)
    together = ranks // replicas if strategy in (4, 5) and replicas > 1 else together
    return Layout(engine, strategy, ranks, together, offloads, tensor, experts=experts)


def problem_of(context: Context) -> "Problem | None":
    """The model, GPUs, method, precision and length of the answers; None if the model or the GPU is unknown.

    Its job has any layout for these ranks, and one row.
    """
    from accel_fsdp.prediction import Problem, length_of
    from accel_fsdp.prediction.tracing import by_name

    machine = context.machine
    one_unit = context.given.get("wrap_policy", context.wished.get("wrap_policy")) == "NO_WRAP"  # plans gather layers
    known_gpu = machine.accelerator is not None and gpus.is_known(machine.accelerator)
    if one_unit or not known_gpu or (is_own_model(context) and context.traced is None) or context.model is None:
        return None
    recipe = from_arguments.planned_recipe(context["method"], _precision(context))
    try:
        shape, tapes = context.traced or by_name.read_shape(context["model"], recipe)
        length = length_of(shape, context.given.get("seq_len"))
        gpu = gpus.find(str(machine.accelerator), machine.memory_gib)
    except UserError:  # a model that can't be planned, such as an encoder-decoder, or a GPU of another size
        return None
    number = context["num_machines"]
    asked = str(context.given.get("num_processes") or context.wished.get("num_processes", ""))
    ranks = int(asked) if _is_number(asked) and int(asked) else machine.count * number
    layout = Layout.ddp(ranks, max(ranks // number, 1)) if ranks > 1 else Layout.alone()
    attention = "sdpa" if shape.eager_only else recipe.attention
    job = Job(layout, replace(recipe, length=length, attention=attention))
    return Problem(shape, tapes, gpu, job)


def is_own_model(context: Context) -> bool:
    """Whether the model has no name or is a folder, whose model may differ from the catalogue's."""
    return not context["model"] or os.path.exists(context["model"])


def _precision(context: Context) -> Precision:
    precision = context.given.get("mixed_precision", context.wished.get("mixed_precision"))
    return precision if precision in TORCH_DTYPES else "bf16" if machines.has_bf16(context.machine) else "fp16"


def candidate(context: Context) -> "Candidate | None":
    """The plan's recommendation among the jobs that agree with the answers so far, and with flags for later ones.

    The one that needs least if none fits; None if the model or the GPU is unknown.
    """
    problem = problem_of(context)
    if problem is None:
        return None
    asked = wanted(context)
    key = (
        context["model"],
        id(problem.tapes),
        problem.gpu.name,
        problem.gpu.memory_gib,
        problem.job,
        *asked.items(),
        *(str(context.given.get(axis)) for axis in MESH),
    )
    if key not in _CACHE:
        try:
            _CACHE[key] = _on_mesh(context, problem) if _divides(context) else _searched(context, problem, asked)
        except UserError:  # what this method allocates can't be recorded
            _CACHE[key] = None
    return _CACHE[key]


def _searched(context: Context, problem: "Problem", asked: Mapping[str, Any]) -> "Candidate | None":
    """The recommendation among the layouts that the plan tries, or in the one that is answered, such as NO_SHARD."""
    from accel_fsdp.prediction import layouts, search

    agrees = _agreement(asked)
    plain = _overall(problem)
    if plain and agrees(plain.job) and asked.get("batch", plain.recipe.rows) == plain.recipe.rows:
        return plain
    if "batch" in asked:
        problem = replace(problem, job=problem.job.with_recipe(rows=asked["batch"]), fixed_rows=True)
    jobs = [job for job in layouts(problem.job) if agrees(job) or agrees(job.with_layout(offload=True))]
    own = layout_of(context) if not jobs and "engine" in context.given else None
    jobs = [replace(problem.job, layout=own)] if own else jobs
    mended = _as_written(problem, problem.job)  # what trains with train/sft.py alone, where a flag asks for it
    found = search.best(problem, jobs, agrees) or search.best(mended, jobs, agrees)
    return found or search.least(problem, jobs, agrees)


def _overall(problem: "Problem") -> "Candidate | None":
    """The recommendation without any answer, which stays while the answers agree with it."""
    from accel_fsdp.prediction import search

    key = (id(problem.tapes), problem.gpu.name, problem.gpu.memory_gib, problem.job)
    if key not in _CACHE:
        _CACHE[key] = search.best(problem)
    return _CACHE[key]


def _divides(context: Context) -> bool:
    """Whether layers or experts are divided, by an answer or a flag."""
    answers = {**context.wished, **context.given}
    return any(str(answers.get(axis) or 1) != "1" for axis in MESH[1:])


def _on_mesh(context: Context, problem: "Problem") -> "Candidate | None":
    """One row on the mesh of the answers, with checkpointing where it doesn't fit without; None before its sizes."""
    layout = layout_of(context) if "ep" in context.given else None
    if layout is None:
        return None
    job = replace(problem.job, layout=layout)
    light, full = (problem.evaluate(job.with_recipe(checkpointing=kind)) for kind in ("none", "full"))
    return light if light.fits else full


def _is_number(text: str) -> bool:
    """Whether a flag that is not checked yet is a whole number, of a size that a job may have."""
    return text.isdecimal() and len(text) <= 9


def wanted(context: Context) -> dict[str, Any]:
    """The answers that decide a job, settled or by flags; a flag of one engine alone picks it."""
    answers = {**context.wished, **context.given}
    asked: dict[str, Any] = {}
    if "engine" in answers:
        asked["engine"] = str(answers["engine"]).lower()
    elif "zero_stage" in answers:
        asked["engine"] = "deepspeed"
    elif OF_FSDP & answers.keys():
        asked["engine"] = "fsdp"
    for name in ("fsdp_version", "zero_stage", "batch"):
        if _is_number(str(answers.get(name, ""))):
            asked[name] = int(answers[name])
    numbers = {name.lower(): number for number, name in STRATEGIES.items()} | {str(n): n for n in STRATEGIES}
    if number := numbers.get(str(answers.get("strategy", "")).lower()):
        asked["strategy"] = number
    for name in ("cpu_offload", "activation_checkpointing"):
        if str(answers.get(name, "")).lower() in ("true", "false"):
            asked[name] = str(answers[name]).lower() == "true"
    return asked


def _agreement(asked: Mapping[str, Any]) -> Callable[[Job], bool]:
    """Whether a job has the answers asked for, as far as they apply to its engine."""

    def agrees(job: Job) -> bool:
        layout, fsdp = job.layout, job.engine in FSDP_KINDS
        by_engine = recompute_by(job.engine, job.method) == "engine"
        named = "ddp" if asked.get("strategy") == 3 and asked.get("fsdp_version", 2) == 2 else asked.get("engine")
        has = {
            "engine": named in (None, ENGINE_NAMES[job.engine]) or job.engine is Engine.NONE,
            "fsdp_version": not fsdp or FSDP_VERSIONS[asked.get("fsdp_version", 2)] is job.engine,
            "strategy": not fsdp or layout.strategy == asked.get("strategy"),
            "zero_stage": job.engine is not Engine.DEEPSPEED or layout.strategy == asked.get("zero_stage"),
            "cpu_offload": not (fsdp or job.engine is Engine.DEEPSPEED) or layout.offload == asked.get("cpu_offload"),
            "activation_checkpointing": not by_engine or job.recipe.recomputes == asked.get(RECOMPUTES),
        }
        return all(has[name] for name in asked if name in has)

    return agrees


def job_of(context: Context) -> Job | None:
    """The job of settled answers; None on CPU and TPU, or if the model or the GPU is unknown."""
    problem, layout = problem_of(context), layout_of(context)
    if problem is None or layout is None:
        return None
    recomputes = context["activation_checkpointing"] or checkpoints_in_script(context)
    recipe = replace(
        problem.job.recipe,
        rows=context["batch"] or 1,
        checkpointing="full" if recomputes else "none",
        offloads_inputs=context["activation_offload"],
    )
    return Job(layout, recipe).settled


def checkpoints_in_script(context: Context) -> bool:
    """Whether the script has to checkpoint activations: where the engine can't, and the plan recommends it."""
    chosen = candidate(context)
    return (
        chosen is not None
        and not context["activation_checkpointing"]
        and chosen.recipe.recomputes
        and recompute_by(chosen.job.engine, chosen.job.method) == "script"
    )


def _as_written(problem: "Problem", job: Job) -> "Problem":
    """The problem of the YAML that has a job, which is judged for train/sft.py."""
    return replace(problem, job=replace(job, model=problem.shape.name))


def judgement(context: Context) -> "tuple[Problem, Candidate] | None":
    """The plan's verdict on settled answers, as it judges their YAML; None if the model or the GPU is unknown."""
    problem, job = problem_of(context), job_of(context)
    if problem is None or job is None:
        return None
    written = _as_written(problem, job)
    try:
        return written, written.judged(written.job)
    except UserError:
        return None
