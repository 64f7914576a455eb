"""Changes that make a run smaller, each with the memory that it frees on a rank. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from accel_fsdp.config import Engine
from accel_fsdp.job import Job, Layout
from accel_fsdp.prediction.capacity import predicted
from accel_fsdp.prediction.memory import ModelShape, Tapes


@dataclass(frozen=True)
class Saving:
    """One change, as the flag or key to type, and the bytes by which it lowers the peak."""

    change: str
    freed_bytes: int


def savings(shape: ModelShape, tapes: Mapping[str, Tapes], job: Job) -> list[Saving]:
    """All single changes that free memory, each tried alone, the largest first."""
    now = predicted(shape, tapes, job, None).peak.total
    gains = (Saving(change, now - predicted(shape, tapes, smaller, None).peak.total) for change, smaller in _tries(job))
    return sorted((saving for saving in gains if saving.freed_bytes > 0), key=lambda saving: -saving.freed_bytes)


def _tries(job: Job) -> Iterator[tuple[str, Job]]:
    yield from _recipes(job)
    layout = job.layout
    if layout.is_fsdp:
        if layout.strategy != 1:
            yield f"{_full_shard(layout)} in the YAML", job.with_layout(strategy=1)
        if not layout.offload:
            yield "fsdp_offload_params: true in the YAML, several times slower", job.with_layout(offload=True)
    elif layout.engine is Engine.DEEPSPEED and layout.strategy < 3:
        yield "zero_stage: 3 in the YAML", job.with_layout(strategy=3)
    elif layout.engine is Engine.DDP:
        sharded = job.with_layout(engine=Engine.FSDP2, strategy=1)
        yield "sharding instead of DDP: accel-fsdp migrate FILE --to fsdp2", sharded


def _recipes(job: Job) -> Iterator[tuple[str, Job]]:
    recipe = job.recipe
    if recipe.rows > 1:  # in halves, so that the global batch can stay as it is
        rows, steps = -(-recipe.rows // 2), recipe.accumulation * 2
        flags = f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {steps}"
        yield flags, job.with_recipe(rows=rows, accumulation=steps)
    if recipe.length > 1:
        half = recipe.length // 2
        yield f"--max_length {half}", job.with_recipe(length=half)
    if recipe.checkpointing == "none":
        in_yaml = job.layout.is_fsdp and recipe.method == "full"  # PEFT loses adapters under it
        word = "fsdp_activation_checkpointing: true in the YAML" if in_yaml else "--gradient_checkpointing true"
        yield word, job.with_recipe(checkpointing="full")
    if recipe.precision == "no" and recipe.dtype == "float32":
        yield "mixed_precision: bf16 in the YAML", job.with_recipe(precision="bf16")
    if recipe.method == "full":
        yield "--use_peft, which trains an adapter only", job.with_recipe(method="lora", dtype="bfloat16")
    if not recipe.chunked_loss and recipe.kernels == "none":
        yield "--use_liger_kernel true, with pip install liger-kernel", job.with_recipe(chunked_loss=True)


def _full_shard(layout: Layout) -> str:
    """Full sharding under each version; FSDP2's hybrid sharding is disabled by removing its mesh."""
    if layout.engine is Engine.FSDP1:
        return "fsdp_sharding_strategy: FULL_SHARD"
    return "no parallelism_config" if layout.strategy in (4, 5) else "fsdp_reshard_after_forward: true"
