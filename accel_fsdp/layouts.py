"""From an Accelerate YAML to what the planner predicts for. Pure."""

from dataclasses import replace

from accel_fsdp.check import Subject
from accel_fsdp.errors import UsageError
from accel_fsdp.fields import Engine
from accel_fsdp.types import STRATEGIES, EngineKind, Layout, Precision, Recipe

KINDS: dict[Engine, EngineKind] = {
    Engine.FSDP1: "fsdp1",
    Engine.FSDP2: "fsdp2",
    Engine.DDP: "ddp",
    Engine.DEEPSPEED: "zero",
}
PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16"}


def of_subject(subject: Subject, recipe: Recipe) -> tuple[Layout, Recipe]:
    """The layout that a YAML asks for, and the recipe with what the YAML decides of it.

    Raises:
        UsageError: its engine can't be predicted, or it doesn't say how many processes there are.
    """
    ranks = subject.number("num_processes")
    if subject.engine not in KINDS or not ranks:
        raise UsageError(
            f"{subject.engine.value} with {ranks or 'an unknown number of'} processes can't be predicted",
            why="a plan needs FSDP, DDP or DeepSpeed, and num_processes",
            fix="accel-fsdp check FILE, or leave out --config",
        )
    strategy, together = _strategy(subject)
    kind = KINDS[subject.engine]
    changed = replace(
        recipe,
        precision=PRECISIONS.get(str(subject.top("mixed_precision")), "no"),
        checkpointing="full"
        if subject.is_fsdp and subject.on("fsdp_activation_checkpointing")
        else recipe.checkpointing,
    )
    return Layout(kind, strategy, ranks, together or subject.ranks_here, _offloads(subject)), changed


def _strategy(subject: Subject) -> tuple[int, int]:
    """The strategy's number or the stage, and how many ranks a mesh puts together, 0 without one."""
    if subject.engine is Engine.FSDP1:
        return next((number for number, name in STRATEGIES.items() if name == subject.strategy), 1), 0
    if subject.engine is Engine.DEEPSPEED:
        return int(subject.section("deepspeed_config").get("zero_stage", 2)), 0  # the launcher's default
    if subject.engine is Engine.DDP:
        return 1, 0
    number = 1 if subject.on("fsdp_reshard_after_forward") else 2
    mesh = subject.section("parallelism_config")
    return (number + 3, int(mesh.get("parallelism_config_dp_shard_size", 1))) if mesh else (number, 0)


def _offloads(subject: Subject) -> bool:
    if subject.is_fsdp:
        return subject.on("fsdp_offload_params")
    return subject.section("deepspeed_config").get("offload_optimizer_device") == "cpu"
