"""Compares what each rank holds with what the YAML asks for. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from accel_fsdp.config import Engine, JobConfig
from accel_fsdp.job import Job, from_yaml
from accel_fsdp.ranks import HeldUnit, Holding
from accel_fsdp.units import counted


@dataclass(frozen=True)
class Difference:
    """A difference between a rank and the YAML, and the `key` that causes it; or a `fix` if the script causes it."""

    what: str
    key: str
    fix: str = ""


WRAPPED = (
    "run forward through what accelerator.prepare, DistributedDataParallel or FSDP returned: a call of its .module, or "
    "of a model that was not prepared, averages no gradients over ranks"
)
WHOLE = "prepare the whole model, once it has all its modules; with fully_shard, shard the root after its layers"


def differences(job: Job, ranks: Mapping[int, Holding]) -> Iterator[Difference]:
    """Yields the differences, the most serious first; equal ones on several ranks once."""
    keys = set()
    for rank, holding in sorted(ranks.items()):
        for difference in _rank_differences(job, rank, holding):
            if difference.key + difference.fix not in keys:
                keys.add(difference.key + difference.fix)
                yield difference


def _rank_differences(job: Job, rank: int, holding: Holding) -> Iterator[Difference]:
    if job.layout.wrapper is not Engine.NONE and holding.engine == Engine.NONE.label:
        yield Difference(f"rank {rank} trains {holding.model} alone, as one process", "", WRAPPED)
        return
    if job.layout.tensor > 1 and not any(unit.is_split for unit in holding.units):
        what = f"rank {rank} holds whole layers: tensor parallelism splits none"
        yield Difference(what, "parallelism_config_tp_size")
    if not job.layout.is_sharded:
        return
    if not holding.units:
        what = f"{holding.model} runs as {holding.engine}"
        yield Difference(f"rank {rank} holds all {holding.weights:,} weights: {what}", "distributed_type")
        return
    may_be_whole = job.engine is Engine.DEEPSPEED or job.layout.is_by_transformers  # transformers leaves adapters whole
    if holding.whole and not may_be_whole and not job.ignores_modules:
        yield Difference(f"rank {rank} holds {holding.whole:,} weights whole, in no unit", "", WHOLE)
    yield from _unit_differences(job, rank, holding)
    for name in (job.layer_classes and holding.classes) or job.layer_classes:
        units = sum(unit.kind == name for unit in holding.units)
        modules = holding.kinds.get(name, 0)
        if units < modules or not modules:
            counts = f"{counted(modules, 'module')}, {counted(units, 'unit')}"
            yield Difference(f"{name} has {counts}", "fsdp_transformer_layer_cls_to_wrap")


def _unit_differences(job: Job, rank: int, holding: Holding) -> Iterator[Difference]:
    for unit in holding.units:
        ranks = job.layout.sharers(unit.is_of_experts)
        if unit.ranks != ranks:
            shared = f"shared by {counted(unit.ranks, 'rank')}, not {ranks}"
            yield Difference(f"unit {_name(unit)} of rank {rank} is {shared}", "fsdp_sharding_strategy")
            return
        if unit.held > unit.share:
            yield Difference(f"unit {_name(unit)}: rank {rank} holds {unit.held:,} of {unit.weights:,}", "fsdp_config")
            return
    inner = [unit for unit in holding.units if unit.kind in {*job.layer_classes, *holding.classes}]
    if any(unit.reshards != job.layout.reshards for unit in inner):
        expected_state = "gathered" if job.layout.reshards else "sharded"
        key = "fsdp_reshard_after_forward" if job.engine is Engine.FSDP2 else "fsdp_sharding_strategy"
        yield Difference(f"units stay {expected_state} between forward and backward", key)


def _name(unit: HeldUnit) -> str:
    return unit.name or f"{unit.kind}, the model itself"


def of_job(config: JobConfig, ranks: int, machines: int, own_classes: tuple[str, ...], experts: int = 1) -> Job:
    """The job of a YAML on `ranks` ranks; `own_classes`: the model's layer classes, unless the YAML decides them."""
    from_yaml.check_sharding(config, ranks)
    job = from_yaml.job_of(config, ranks=ranks)
    by_class = job.wrap_policy == "TRANSFORMER_BASED_WRAP"
    hybrid = job.engine is Engine.FSDP2 and job.layout.strategy in (4, 5)  # the mesh's replicas represent machines
    layout = job.layout if hybrid else replace(job.layout, ranks_per_node=ranks // machines)
    layout = replace(layout, experts=experts)
    classes = own_classes if layout.is_by_transformers else job.layer_classes or own_classes
    return replace(job, layout=layout, layer_classes=classes if by_class else ())


def repeated(holding: Holding) -> tuple[str, ...]:
    """The layer class of an unknown model: the most frequent class of its units, if it occurs several times."""
    kinds = Counter(unit.kind for unit in holding.units if unit.name)
    (kind, count), *_ = kinds.most_common(1) or [("", 0)]
    return (kind,) if count > 1 else ()


def summary(ranks: Mapping[int, Holding]) -> str:
    fullest = max(ranks.values(), key=lambda holding: holding.held)
    if fullest.units and all(unit.states_alone for unit in fullest.units):
        (unit,) = fullest.units
        states = f"the optimizer's states of {unit.held:,} of {unit.weights:,}"
        return f"{fullest.engine}; a rank holds all {fullest.weights:,} weights, and {states}"
    if not fullest.units:
        return f"{fullest.engine}; each rank holds all {fullest.weights:,} weights"
    units = counted(len(fullest.units), "unit")
    return f"{fullest.engine}, {units}; a rank holds at most {fullest.held:,} of {fullest.weights:,} weights"
