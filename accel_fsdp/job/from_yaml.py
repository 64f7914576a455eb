"""From an Accelerate YAML to what the planner predicts for, and from that to what can't be combined. Pure.

A running job says the same by the plugins that Accelerate made of its YAML (`training.run_plan`).
"""

from dataclasses import dataclass, replace

from accel_fsdp.config import STRATEGIES, Engine, JobConfig, Precision
from accel_fsdp.errors import UsageError
from accel_fsdp.job.combinations import Setup, recompute_by
from accel_fsdp.job.recipe import Layout, Recipe
from accel_fsdp.units import counted

PREDICTED = frozenset(Engine) - {Engine.NONE, Engine.TPU}
"""The engines of several processes that can be predicted for."""
PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "no": "no"}
STAGES = (0, 1, 2, 3)
OTHER_SIZES = ("tp_size", "cp_size", "sp_size")


@dataclass(frozen=True)
class Sharding:
    """How a job shares out its model, in the words of YAMLs and of Accelerate's plugins, and on how many ranks.

    `strategy` is FSDP1's; `reshards` and the mesh of `copies` x `shards` are FSDP2's; `stage` is DeepSpeed's.
    """

    engine: Engine
    ranks: int
    ranks_per_node: int
    offload: bool = False
    strategy: str = ""
    reshards: bool = True
    copies: int = 1
    shards: int = 1
    stage: int = 0

    def layout(self) -> Layout:
        """The same as the planner numbers it. DeepSpeed's stage 0 shards nothing, which is DDP."""
        if self.engine is Engine.NONE:
            return Layout(Engine.NONE, 1, 1, 1)
        number, together = 1, self.ranks_per_node
        if self.engine is Engine.FSDP1:
            number = next((number for number, name in STRATEGIES.items() if name == self.strategy), 1)
        elif self.engine is Engine.FSDP2:
            number = 1 if self.reshards else 2
            if self.copies > 1:
                number, together = number + 3, self.shards
        elif self.engine is Engine.DEEPSPEED and self.stage:
            number = self.stage
        else:
            return Layout(Engine.DDP, 1, self.ranks, together)
        return Layout(self.engine, number, self.ranks, together, self.offload)


def of_config(job: JobConfig, recipe: Recipe) -> tuple[Layout, Recipe]:
    """The layout that a YAML asks for, and the recipe with what the YAML decides of it.

    Raises:
        UsageError: what it asks for can't be predicted, or it doesn't say how many processes there are.
    """
    ranks = job.number("num_processes")
    alone = job.engine is Engine.NONE and ranks == 1
    if not alone and (job.engine not in PREDICTED or not ranks):
        several = counted(ranks, "process", "processes") if ranks else "an unknown number of processes"
        raise UsageError(
            f"{job.engine.label} with {several} can't be predicted",
            why="a plan needs FSDP, DDP, DeepSpeed or one process, and num_processes",
            fix="leave out --config, or see what accel-fsdp check FILE says",
        )
    sharding = sharding_of(job, ranks)
    precision = str(job.top("mixed_precision"))
    _refuse(precision not in PRECISIONS, f"mixed_precision: {precision}", "there is no formula for it")
    changed = replace(
        recipe,
        precision=PRECISIONS[precision],
        checkpointing="full" if job.is_fsdp and job.on("fsdp_activation_checkpointing") else recipe.checkpointing,
    )
    return replace(sharding, offload=_offloads(job)).layout(), changed


def setup_of(layout: Layout, recipe: Recipe) -> Setup:
    """A row of the planner's table as a job, with activation checkpointing where `recompute_by` puts it."""
    engine = layout.engine
    return Setup(
        engine,
        recipe.method,
        recipe.optimizer,
        recompute_by(engine, recipe.method) if recipe.checkpointing != "none" else "none",
        stage=layout.strategy if layout.engine is Engine.DEEPSPEED else None,
        strategy=STRATEGIES.get(layout.strategy, "") if engine is Engine.FSDP1 else "",
    )


def sharding_of(job: JobConfig, ranks: int) -> Sharding:
    """How a YAML shares out its model on so many ranks; all but the offload.

    Raises:
        UsageError: its stage or its mesh can't be predicted.
    """
    sharding = Sharding(job.engine, ranks, job.ranks_here)
    if job.engine is Engine.FSDP1:
        return replace(sharding, strategy=job.strategy)
    if job.engine is Engine.DEEPSPEED:
        stage = job.section("deepspeed_config").get("zero_stage", 2)  # the launcher's default
        _refuse(stage not in STAGES, f"zero_stage: {stage}", "DeepSpeed has the stages 0 to 3")
        return replace(sharding, stage=int(stage))
    if job.engine in (Engine.DDP, Engine.NONE):
        return sharding
    copies, shards = _mesh(job, ranks)
    return replace(sharding, reshards=job.on("fsdp_reshard_after_forward"), copies=copies, shards=shards)


def _mesh(job: JobConfig, ranks: int) -> tuple[int, int]:
    """How many copies of the model there are, and how many ranks share one; 1 and 1 without a mesh."""
    mesh = {key.removeprefix("parallelism_config_"): size for key, size in job.section("parallelism_config").items()}
    for name in OTHER_SIZES:
        _refuse(mesh.get(name, 1) != 1, f"{name}: {mesh.get(name)}", "only data-parallel meshes are known")
    copies, shards = mesh.get("dp_replicate_size", 1), mesh.get("dp_shard_size", 1)
    fits = isinstance(copies, int) and isinstance(shards, int) and copies * shards == ranks
    _refuse(
        bool(mesh) and not fits, f"a mesh of {copies} x {shards} on {ranks} processes", "they must multiply to that"
    )
    return copies, shards


def _offloads(job: JobConfig) -> bool:
    if job.is_fsdp:
        return job.on("fsdp_offload_params")
    section = job.section("deepspeed_config")
    places = {str(section.get(f"offload_{what}_device", "none")) for what in ("optimizer", "param")}
    stage = section.get("zero_stage", 2)
    _refuse("nvme" in places, "offload to nvme", "no run tells how fast it is")
    mixed = stage == 3 and len(places) > 1
    _refuse(mixed, "offload of parameters or optimizer alone in stage 3", "only both together are known")
    return str(section.get("offload_optimizer_device")) == "cpu"


def notes(job: JobConfig) -> tuple[str, ...]:
    """What the prediction makes of a YAML that it doesn't follow to the letter, in sentences."""
    policy = str(job.fsdp("fsdp_auto_wrap_policy")).upper()
    if not job.is_fsdp or policy == "TRANSFORMER_BASED_WRAP":
        return ()
    return (f"The YAML's {policy} is predicted as one unit per layer.",)


def _refuse(wrong: bool, what: str, why: str) -> None:
    if wrong:
        raise UsageError(
            f"{what} can't be predicted", why=why, fix="leave out --config, or see what accel-fsdp check FILE says"
        )
