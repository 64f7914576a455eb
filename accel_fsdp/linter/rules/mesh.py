"""Rules about `parallelism_config`, the mesh of a job's ranks."""

import math
from collections.abc import Iterator

from accel_fsdp.config import BY_NAME, Engine, size_key
from accel_fsdp.linter.rules.engine import Finding, Subject, rule


@rule("AF315", pains=("P41",))
def mesh_under_another_engine(subject: Subject) -> Iterator[Finding]:
    """A dimension in `parallelism_config` that the engine doesn't use.

    FSDP2 uses all but `sp`; DDP `dp_replicate` and `tp`; FSDP1 and TPU none. DeepSpeed uses `sp`, and beside it
    `dp_replicate` and `dp_shard` as the number of batches; without `sp` those two change nothing.
    """
    sizes = {name: size for name, size in subject.mesh.items() if type(size) is int}
    sequences = subject.engine is Engine.DEEPSPEED and sizes.get("sp", 1) != 1
    for name, size in sizes.items():
        key = size_key(name)
        field = BY_NAME["parallelism_config", key]
        counts = subject.engine is Engine.DEEPSPEED and name.startswith("dp_")
        if size == 1 or subject.engine in field.engines or (counts and sequences):
            continue
        yield Finding(
            f"parallelism_config.{key}",
            f"{subject.engine.label} does not use {key}",
            "DeepSpeed shards as zero_stage says" if counts else "Accelerate stops, or runs without it",
            f"{key}: 1, or "
            + ("distributed_type: DEEPSPEED" if field.engines == {Engine.DEEPSPEED} else "fsdp_version: 2"),
            milder="warning" if counts else None,
        )


@rule("AF316", pains=("P42", "P103"))
def mesh_is_refused(subject: Subject) -> Iterator[Finding]:
    """A `parallelism_config` that Accelerate refuses.

    Sizes below 1; `cp` with `sp`; replicas beside `tp` or `cp` without shards; FSDP2 with neither shards nor `cp`; or
    a product that isn't `num_processes`. That stops DeepSpeed with `sp` too, whose batch then differs from
    Accelerate's. A mesh with all sizes 1 is ignored.
    """
    engines, sizes = (Engine.FSDP2, Engine.DDP, Engine.DEEPSPEED), subject.mesh
    are_integers = all(type(size) is int for size in sizes.values())
    if subject.engine not in engines or not subject.section("parallelism_config") or not are_integers:
        return
    small = [name for name, size in sizes.items() if size < 1]
    bare = sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1 and (sizes["tp"] > 1 or sizes["cp"] > 1)
    what = fix = ""
    if small:
        what, fix = f"{small[0]}_size is {sizes[small[0]]}", "sizes of 1 or more"
    elif sizes["cp"] > 1 and sizes["sp"] > 1:
        what, fix = "cp and sp exclude each other", "one of them at 1"
    elif bare:
        what, fix = "replicas beside tp or cp need shards", "dp_shard_size above 1, or dp_replicate_size: 1"
    elif subject.engine is Engine.FSDP2 and sizes["dp_shard"] == sizes["cp"] == 1 < sizes["dp_replicate"] * sizes["tp"]:
        what, fix = "the mesh leaves FSDP nothing to shard over", "dp_shard_size above 1"
    if what:
        yield Finding("parallelism_config", what, "Accelerate stops: ValueError", fix)
    total, processes = math.prod(sizes.values()), subject.number("num_processes")
    if processes and total not in (1, processes):
        largest = max((name for name in sizes if sizes[name] != 1), key=lambda name: sizes[name])
        product = " x ".join(f"{name}_size {size}" for name, size in sizes.items() if size != 1)
        yield Finding(
            f"parallelism_config.{size_key(largest)}",
            f"parallelism_config has {total} ranks ({product}), num_processes is {processes}",
            "DeepSpeed stops: train_batch_size is not equal to micro batches times ranks"
            if subject.engine is Engine.DEEPSPEED and sizes["sp"] != 1
            else "Accelerate stops: total_size does not match num_processes",
            f"parallelism_config_..._size whose product is {processes}, or num_processes: {total}",
        )


@rule("AF703", "warning")
def tensor_parallelism_splits_nothing(subject: Subject) -> Iterator[Finding]:
    """`tp_size` beside FSDP2 with transformers 5.17 or later, which lacks what Accelerate's tensor parallelism imports.

    A model that is loaded whole is not split: its ranks do the same work twice. One that is loaded with a tensor
    parallel plan stops in `prepare`.
    """
    size = subject.mesh["tp"]
    is_new = "transformers" in subject.versions and not subject.older("transformers", "5.17")
    if subject.engine is Engine.FSDP2 and isinstance(size, int) and size > 1 and is_new:
        yield Finding(
            f"parallelism_config.{size_key('tp')}",
            f"tp_size: {size} splits no layer with transformers {subject.versions['transformers']}",
            f"{size} ranks each train the same rows with the same shards; a model loaded with a tp_plan stops: "
            "ImportError: ReplicateParallel",
            f"{size_key('tp')}: 1, and {size_key('dp_shard')} {size} times as large",
        )
