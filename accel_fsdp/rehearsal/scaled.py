"""Scales the user's YAML down for a rehearsal: fewer processes on one machine, with the same shape of mesh. Pure."""

from dataclasses import replace

from accel_fsdp.config import EXPERT_FLAG, HYBRID, Engine, JobConfig, hybrid_mesh, size_key
from accel_fsdp.errors import UsageError
from accel_fsdp.job import NATIVE_AXES, ROW_AXES, Layout, from_yaml

PROCESSES = 2
"""The number of ranks: as many as two cores can run, and enough for shards."""
SPLIT = 2
"""The ranks of a tensor parallel group, and the groups that divide experts."""
OF_MACHINES = (
    *("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "gpu_ids"),
    *("deepspeed_hostfile", "deepspeed_multinode_launcher", "enable_cpu_affinity", "commands", "command_file"),
)
"""Keys about the machines that the real job runs on."""
SMALLEST_UNIT = "fsdp_min_num_params"


def scale(job: JobConfig, processes: int | None = None, experts: int = 1) -> tuple[JobConfig, list[str]]:
    """The job on `processes` ranks of this machine, and its differences from the file.

    The default is 2 ranks, or 4 with sharded replicas, tensor parallelism beside shards, or sharded copies of the
    experts, whose expert-parallel size is `experts`.

    Raises:
        UsageError: the engine or mesh doesn't run on CPUs, or the mesh doesn't fit so many processes.
    """
    _refuse_unknown(job)
    copies, shards, tensor = (from_yaml.mesh_of(job)[axis] for axis in NATIVE_AXES.values())
    real, split = layout_of(job, experts), SPLIT if tensor > 1 else 1
    if tensor > 1:  # train/sft.py shards over what is left of the ranks
        shards = max(shards, real.shard_ranks)
    hybrid = copies > 1 and shards > 1
    is_split_alone = split > 1 and copies == shards == 1
    copied = real.expert_shard_ranks > 1 < experts
    nested = hybrid or copied or _is_hybrid_of_fsdp1(job) or (split > 1 and not is_split_alone)
    minimum = 2 * PROCESSES if nested else PROCESSES
    ranks = minimum if processes is None else processes
    check_processes(ranks, minimum, ranks if not is_split_alone else SPLIT)
    values = {key: value for key, value in job.values.items() if key not in OF_MACHINES}
    in_file = job.number("num_processes")
    changes = [f"num_processes {in_file or 'not given'} -> {ranks}"] if in_file != ranks else []
    if job.number("num_machines") > 1:
        changes.append(f"num_machines {job.number('num_machines')} -> 1")
    values |= {"num_processes": ranks, "num_machines": 1}
    if section := job.section("parallelism_config"):
        groups = ranks // split
        replicas = 1 if copies == 1 else groups if not hybrid else 2 if groups >= 4 and groups % 2 == 0 else 1
        values["parallelism_config"] = {**section, **hybrid_mesh(replicas, groups)}
        values["parallelism_config"] |= {size_key("tp"): split} if tensor > 1 else {}
        sizes = ((copies, shards, tensor), (replicas, groups // replicas, split))
        before, after = (" x ".join(map(str, mesh if tensor > 1 else mesh[:2])) for mesh in sizes)
        left_out = f", without replicas, which need --processes {4 * split}" if replicas < min(copies, 2) else ""
        changes.append(f"mesh {before} -> {after}{left_out}")
    small = JobConfig(values)
    if experts > 1:
        changes.append(f"{EXPERT_FLAG} {experts} -> {small_layout(job, small, experts).experts}")
    return small, changes


def layout_of(job: JobConfig, experts: int) -> Layout:
    """The real job's mesh.

    Raises:
        UsageError: it doesn't fit the expert-parallel size.
    """
    layout = replace(from_yaml.layout_of(job), experts=experts)
    if layout.ranks:
        layout.check_experts()
    return layout


def small_layout(job: JobConfig, small: JobConfig, experts: int) -> Layout:
    """The small job's mesh: a tensor parallel group divides the experts, all of a replica, or a part, as in `job`."""
    real, layout = layout_of(job, experts), from_yaml.layout_of(small)
    whole = layout.shard_ranks * layout.tensor
    if experts in (1, real.tensor):
        return replace(layout, experts=min(experts, layout.tensor))
    is_whole = experts >= real.shard_ranks * real.tensor
    return replace(layout, experts=whole if is_whole else min(whole, SPLIT * layout.tensor))


def check_own(job: JobConfig, script: str) -> None:
    """Refuses tensor parallelism in a script that relies on Accelerate's, which splits no layer."""
    if (size := from_yaml.mesh_of(job)["tp"]) > 1:
        raise UsageError(
            f"tp_size can't be rehearsed with {script}",
            why=f"Accelerate splits no layer with transformers 5.17 or later: {size} ranks do the same work",
            fix="train/sft.py, which has transformers split layers; or parallelism_config_tp_size: 1",
        )


def machines_of(job: JobConfig) -> int:
    """The machines that the ranks of a scaled job represent: two if each can hold a copy of the model in shards."""
    ranks = job.number("num_processes")
    return 2 if _is_hybrid_of_fsdp1(job) and ranks > PROCESSES and ranks % 2 == 0 else 1


def _is_hybrid_of_fsdp1(job: JobConfig) -> bool:
    return job.engine is Engine.FSDP1 and job.strategy in HYBRID


def check_processes(processes: int, least: int = PROCESSES, most: int | None = None) -> None:
    """Checks that a job can be sharded over `processes`; `least` is 4 if copies of the model are sharded or split."""
    if least <= processes <= (most or processes) and processes % (least // PROCESSES) == 0:
        return
    raise UsageError(
        f"--processes {processes}",
        why=f"a mesh of two dimensions needs an even number of processes, {least} or more"
        if least > PROCESSES
        else f"nothing is sharded over fewer than {least}"
        if processes < least
        else f"tp_size alone becomes {SPLIT} in a rehearsal",
        fix=f"accel-fsdp rehearse FILE --processes {least}",
    )


def _refuse_unknown(job: JobConfig) -> None:
    mesh = from_yaml.mesh_of(job)
    if others := [f"{axis}_size" for axis in ROW_AXES if mesh[axis] > 1]:
        raise UsageError(
            f"{others[0]} can't be rehearsed",
            why="rows are divided by kernels that CPUs lack",
            fix=f"rehearse the job without {others[0]}",
        )
    if mesh["tp"] > 1 and job.engine is not Engine.FSDP2:
        raise UsageError(
            f"tp_size can't be rehearsed under {job.engine.label}",
            why="train/sft.py splits layers beside FSDP2 alone",
            fix="fsdp_version: 2, or parallelism_config_tp_size: 1",
        )
    if job.engine in (Engine.TPU, Engine.NONE):
        raise UsageError(
            f"{job.engine.label} can't be rehearsed",
            why="nothing could be shared by several CPU processes",
            fix="a YAML with distributed_type: FSDP, MULTI_GPU or DEEPSPEED",
        )


def without_mesh(job: JobConfig, processes: int) -> JobConfig:
    """The job on another number of ranks, which share one copy of the model, or two under FSDP1's hybrid."""
    values = {key: value for key, value in job.values.items() if key != "parallelism_config"}
    return JobConfig({**values, "num_processes": processes})


def by_size(job: JobConfig) -> bool:
    """Whether FSDP wraps by size."""
    return job.engine is Engine.FSDP1 and job.wrap_policy == "SIZE_BASED_WRAP"


def with_smaller_units(job: JobConfig, real: int, small: int) -> tuple[JobConfig, list[str]]:
    """Adapts the size of units to a layer of `small` weights instead of `real`, for as many units in each layer."""
    before = job.fsdp(SMALLEST_UNIT) if by_size(job) else 0
    if not (isinstance(before, int) and before > 0 and real > small > 0):
        return job, []
    fewer = max(1, before * small // real)
    section = {**job.section("fsdp_config"), SMALLEST_UNIT: fewer}
    return JobConfig({**job.values, "fsdp_config": section}), [f"{SMALLEST_UNIT} {before} -> {fewer}"]
