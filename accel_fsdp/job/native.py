"""transformers' own settings of a mesh, `DistributedConfig` (5.23), which no Accelerate YAML holds. Pure."""

from collections.abc import Mapping
from math import gcd, prod

from accel_fsdp.config import OTHER_AXES, Engine

NATIVE_AXES: Mapping[str, str] = {"dp_replicate_size": "dp_replicate", "fsdp_size": "dp_shard", "tp_size": "tp"}
"""The sizes of its mesh, in order, each with the axis of `parallelism_config` that means the same."""
NATIVE_SIZES = (*NATIVE_AXES, "ep_size")
"""All sizes that training takes; experts are spread over the ranks of fsdp and tp."""
ROW_AXES = tuple(axis for axis in OTHER_AXES if axis not in NATIVE_AXES.values())
"""The axes that `DistributedConfig` lacks: their ranks divide the tokens of a row."""


def mesh_fits(sizes: Mapping[str, int], ranks: int) -> bool:
    """Whether the sizes fit the number of ranks; with `dp_shard` 1 transformers shards over all ranks that remain.

    `sizes` has those of all axes of `parallelism_config`.
    """
    total = prod(sizes.values())
    return total == ranks or (sizes["dp_shard"] == 1 and total > 0 and ranks % total == 0)


def row_axis(engine: Engine) -> str:
    """The axis whose ranks have parts of a row: Accelerate's for FSDP2, or DeepSpeed's."""
    return "sp" if engine is Engine.DEEPSPEED else "cp"


def whole_mesh(sizes: Mapping[str, int], ranks: int, engine: Engine, by_transformers: bool) -> dict[str, int]:
    """The nearest sizes of all axes that the engine takes, and whose product is the number of ranks."""
    one = dict.fromkeys(sizes, 1)
    if engine is Engine.DDP:
        return {**one, "dp_replicate": ranks}
    row = row_axis(engine)
    tensor = gcd(max(sizes["tp"], 1), ranks) if engine is Engine.FSDP2 else 1
    parts = 1 if by_transformers else gcd(max(sizes[row], 1), ranks // tensor)
    if tensor == ranks and not by_transformers:  # Accelerate needs ranks to shard over
        tensor //= next((factor for factor in range(2, tensor + 1) if tensor % factor == 0), 1)
    if parts == 1 and engine is Engine.DEEPSPEED:
        return one  # without parts of rows it has no mesh
    rest = ranks // (tensor * parts)
    copies = max(sizes["dp_replicate"], 1)
    copies = copies if rest % copies == 0 and rest > copies else 1
    return {**one, "dp_replicate": copies, "dp_shard": rest // copies, "tp": tensor, row: parts}


def row_refusal(sizes: Mapping[str, int], is_fsdp2: bool, is_zero_3: bool) -> tuple[str, str] | None:
    """A size that no library takes for parts of a row, and why: Accelerate has `cp` for FSDP2, and `sp` is ZeRO-3's."""
    context, sequence, tensor = (f"{axis}_size: {sizes[axis]}" for axis in ("cp", "sp", "tp"))
    if sizes["cp"] != 1 and not is_fsdp2:
        return context, "only FSDP2 has it"
    if sizes["sp"] != 1 and not is_zero_3:
        return sequence, "only ZeRO-3 has it"
    if sizes["cp"] != 1 and sizes["tp"] != 1:
        return f"{context} with {tensor}", "transformers, which divides layers, has no axis for parts of a row"
    return None


def expert_refusal(sizes: Mapping[str, int]) -> str:
    """Why transformers refuses the `ep_size` among these sizes of all `NATIVE_SIZES`; empty if it takes it."""
    _, shards, tensor, experts = (sizes[name] for name in NATIVE_SIZES)
    if experts > 1 and experts % tensor:
        return f"ep_size {experts} is not a multiple of tp_size {tensor}"
    if experts > 1 and shards * tensor % experts:
        return f"ep_size {experts} does not divide fsdp_size {shards} x tp_size {tensor}"
    return ""
