"""The job of an Accelerate YAML and of the arguments of its script. Pure."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accel_fsdp.config import DEFAULT_ZERO_STAGE, Engine, JobConfig, Precision, made_with
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import machines
from accel_fsdp.job import from_arguments
from accel_fsdp.job.combinations import FLAGS
from accel_fsdp.job.from_arguments import is_on
from accel_fsdp.job.job import Job, Recipe
from accel_fsdp.job.layout import SHARDING_KINDS, Layout
from accel_fsdp.job.native import NATIVE_AXES, ROW_AXES, mesh_fits, row_refusal
from accel_fsdp.units import counted

PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "no": "no"}
STAGES = (0, 1, 2, 3)


def job_of(
    config: JobConfig, arguments: Mapping[str, Any] | None = None, recipe: Recipe | None = None, ranks: int = 0
) -> Job:
    """The job of a YAML on `ranks` processes, by default its `num_processes`; unreadable parts stay unknown.

    `recipe` replaces that of the arguments; the YAML decides its precision and FSDP's checkpointing.
    """
    arguments = arguments or {}
    recipe = from_arguments.recipe_of(arguments) if recipe is None else recipe
    mixed = from_arguments.precision_of(arguments) or str(config.top("mixed_precision"))
    recomputes = config.is_fsdp and config.on("fsdp_activation_checkpointing")
    offloads = recomputes and config.engine is Engine.FSDP2 and config.on("fsdp_activation_checkpointing_offload")
    by_script = is_on(arguments.get("gradient_checkpointing")) or is_on(arguments.get("activation_checkpointing"))
    flags = {name for name in FLAGS if is_on(arguments.get(name))}
    smoothed = str(arguments.get("label_smoothing_factor") or 0) not in ("0", "0.0")
    experts = from_arguments.expert_parallel_size(arguments)
    return Job(
        replace(layout_of(config, ranks), experts=experts),
        replace(
            recipe,
            precision=PRECISIONS.get(mixed, recipe.precision),
            checkpointing="full" if recomputes else recipe.checkpointing,
            offloads_inputs=offloads,
        ),
        model=str(arguments.get("model_name_or_path") or ""),
        optimizer=str(arguments.get("optim") or ""),
        recompute="engine" if recomputes else "script" if by_script else "none",
        wrap_policy=config.wrap_policy if config.is_fsdp else "",
        layer_classes=config.layer_classes if config.is_fsdp else (),
        ignores_modules=bool(config.is_fsdp and config.fsdp("fsdp_ignored_modules")),
        state_dict=config.state_dict_type,
        flags=frozenset(flags | ({"label_smoothing_factor"} if smoothed else set())),
    )


def layout_of(config: JobConfig, ranks: int = 0) -> Layout:
    """How a YAML shards its model on `ranks`, by default its `num_processes`; unreadable parts keep their defaults."""
    ranks, together, offload = ranks or config.processes, config.ranks_here, _offloads(config)
    layout = Layout(config.engine, 1, ranks, together)
    if config.engine is Engine.NONE:
        layout = Layout.alone()
    elif config.engine is Engine.FSDP1:
        layout = Layout.fsdp1(config.strategy, ranks, together, offload)
    elif config.engine is Engine.FSDP2:
        reshards = config.on("fsdp_reshard_after_forward")
        layout = Layout.fsdp2(reshards, ranks, together, offload)
    elif config.engine is Engine.DEEPSPEED:
        stage = _stage(config)
        layout = Layout.zero(stage if stage in STAGES else DEFAULT_ZERO_STAGE, ranks, together, offload)
    return layout.on_mesh(mesh_of(config))


def mesh_of(config: JobConfig) -> dict[str, int]:
    """The sizes of a YAML's device mesh by axis, 1 for unused and invalid ones."""
    return {axis: size if isinstance(size, int) and size > 0 else 1 for axis, size in config.mesh.items()}


def predictable(config: JobConfig, arguments: Mapping[str, Any] | None = None, recipe: Recipe | None = None) -> Job:
    """`job_of` for a job that the planner supports.

    Raises:
        UsageError: the YAML's settings can't be predicted, or it has no number of processes.
    """
    _refuse(bool(config.off_gpus), f"a job for {config.off_gpus}", "a plan is about GPUs with FSDP, DDP or DeepSpeed")
    ranks = config.processes
    is_single = config.engine is Engine.NONE and ranks == 1
    if not is_single and (config.engine not in SHARDING_KINDS | {Engine.DDP} or not ranks):
        amount = counted(ranks, "process", "processes") if ranks else "an unknown number of processes"
        raise UsageError(
            f"{config.engine.label} with {amount} can't be predicted",
            why="a plan needs FSDP, DDP, DeepSpeed or one process, and num_processes",
            fix="leave out --config, or see what accel-fsdp check FILE says",
        )
    check_sharding(config, ranks)
    for axis in ROW_AXES:
        _refuse(config.mesh[axis] != 1, f"{axis}_size: {config.mesh[axis]}", "no run has proven what its ranks hold")
    precision = str(config.top("mixed_precision"))
    _refuse(precision not in PRECISIONS, f"mixed_precision: {precision}", "there is no formula for it")
    _check_offload(config)
    job = job_of(config, arguments, recipe)
    why = job.layout.experts_misfit
    _refuse(bool(why), f"expert_parallel_size {job.layout.experts}", why)
    _refuse(job.is_one_unit, "NO_WRAP, which makes one unit of the whole model,", "a plan gathers layer by layer")
    return job


def check_sharding(config: JobConfig, ranks: int) -> None:
    """Checks that the ZeRO stage or the mesh of a YAML is valid for this number of ranks.

    Raises:
        UsageError: it isn't.
    """
    if config.engine is Engine.DEEPSPEED:
        stage = _stage(config)
        _refuse(stage not in STAGES, f"zero_stage: {stage}", "DeepSpeed has the stages 0 to 3")
    is_zero_3 = config.engine is Engine.DEEPSPEED and _stage(config) == 3
    if refusal := row_refusal(config.mesh, config.engine is Engine.FSDP2, is_zero_3):
        _refuse(True, *refusal)
    if config.engine is not Engine.FSDP2:
        return
    *sizes, tensor = (config.mesh[axis] for axis in NATIVE_AXES.values())
    others = [size for axis in ROW_AXES if (size := config.mesh[axis]) != 1]
    sizes += ([] if tensor == 1 else [tensor]) + others
    fits = all(isinstance(size, int) for size in sizes) and (
        mesh_fits(config.mesh, ranks) if tensor != 1 else math.prod(sizes) == ranks
    )
    misfits = bool(config.section("parallelism_config")) and not fits
    _refuse(misfits, f"a mesh of {' x '.join(map(str, sizes))} on {ranks} processes", "they must multiply to that")


def _stage(config: JobConfig) -> Any:
    return config.section("deepspeed_config").get("zero_stage", DEFAULT_ZERO_STAGE)


def _offloads(config: JobConfig) -> bool:
    if config.is_fsdp:
        return config.on("fsdp_offload_params")
    return str(config.section("deepspeed_config").get("offload_optimizer_device")) == "cpu"


def _check_offload(config: JobConfig) -> None:
    section = config.section("deepspeed_config")
    places = {str(section.get(f"offload_{what}_device", "none")) for what in ("optimizer", "param")}
    if config.is_fsdp:
        return
    _refuse("nvme" in places, "offload to nvme", "its speed has not been measured")
    mixed = _stage(config) == 3 and len(places) > 1
    _refuse(mixed, "offload of parameters or optimizer alone in stage 3", "only both together are known")


def notes(config: JobConfig) -> tuple[str, ...]:
    """Sentences about settings of a YAML that are predicted only approximately."""
    if config.is_fsdp and config.wrap_policy == "SIZE_BASED_WRAP":
        return ("The YAML's SIZE_BASED_WRAP is predicted as one unit per layer.",)
    return ()


def gpus_in_header(config: JobConfig) -> str:
    """The GPUs in the header of a generated YAML, as `--gpus` takes them; empty if the file has another number now."""
    text = made_with(config.source).get("--gpus", "")
    several = config.number("num_machines") or 1
    try:
        machine, number = machines.parse(text)
    except UsageError:
        return ""
    if not machine.count or several * machine.count != config.processes or number not in (1, several):
        return ""
    return machines.as_typed(machine, several)


def _refuse(condition: bool, what: str, why: str) -> None:
    if condition:
        raise UsageError(
            f"{what} can't be predicted", why=why, fix="leave out --config, or see what accel-fsdp check FILE says"
        )
