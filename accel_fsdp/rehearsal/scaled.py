"""Scales the user's YAML down for a rehearsal: fewer processes on one machine, with the same shape of mesh. Pure."""

from accel_fsdp.config import DATA_AXES, HYBRID, OTHER_AXES, Engine, JobConfig, hybrid_mesh
from accel_fsdp.errors import UsageError
from accel_fsdp.job import from_yaml

PROCESSES = 2
"""The number of ranks: as many as two cores can run, and enough for shards."""
OF_MACHINES = (
    *("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "gpu_ids"),
    *("deepspeed_hostfile", "deepspeed_multinode_launcher", "enable_cpu_affinity", "commands", "command_file"),
)
"""Keys about the machines that the real job runs on."""
SMALLEST_UNIT = "fsdp_min_num_params"


class CannotRehearse(UsageError):
    """The job's engine or mesh doesn't run on CPUs."""


def scale(job: JobConfig, processes: int | None = None) -> tuple[JobConfig, list[str]]:
    """The job on `processes` ranks of this machine, and its differences from the file.

    By default there are 2 ranks, or 4 if copies of the model are sharded too.

    Raises:
        CannotRehearse: the engine or mesh doesn't run on CPUs. UsageError: the mesh doesn't fit so many processes.
    """
    _refuse_unknown(job)
    copies, shards = (from_yaml.mesh_of(job)[axis] for axis in DATA_AXES)
    hybrid = copies > 1 and shards > 1
    least = 2 * PROCESSES if hybrid or _is_hybrid_of_fsdp1(job) else PROCESSES
    ranks = least if processes is None else processes
    check_processes(ranks, least)
    values = {key: value for key, value in job.values.items() if key not in OF_MACHINES}
    in_file = job.number("num_processes")
    changes = [f"num_processes {in_file or 'not given'} -> {ranks}"] if in_file != ranks else []
    if job.number("num_machines") > 1:
        changes.append(f"num_machines {job.number('num_machines')} -> 1")
    values |= {"num_processes": ranks, "num_machines": 1}
    if section := job.section("parallelism_config"):
        replicas = 2 if hybrid else ranks if copies > 1 else 1
        values["parallelism_config"] = {**section, **hybrid_mesh(replicas, ranks)}
        changes.append(f"mesh {copies} x {shards} -> {replicas} x {ranks // replicas}")
    return JobConfig(values), changes


def machines_of(job: JobConfig) -> int:
    """The machines that the ranks of a scaled job represent: two if each can hold a copy of the model in shards."""
    ranks = job.number("num_processes")
    return 2 if _is_hybrid_of_fsdp1(job) and ranks > PROCESSES and ranks % 2 == 0 else 1


def _is_hybrid_of_fsdp1(job: JobConfig) -> bool:
    return job.engine is Engine.FSDP1 and job.strategy in HYBRID


def check_processes(processes: int, least: int = PROCESSES) -> None:
    """Checks that a job can be sharded over `processes`; `least` is 4 if copies of the model are sharded."""
    if processes >= least and processes % (least // PROCESSES) == 0:
        return
    raise UsageError(
        f"--processes {processes}",
        why=f"copies of a model that is sharded need an even number of processes, {least} or more"
        if least > PROCESSES
        else f"nothing is sharded over fewer than {least}",
        fix=f"accel-fsdp rehearse FILE --processes {least}",
    )


def _refuse_unknown(job: JobConfig) -> None:
    mesh = from_yaml.mesh_of(job)
    if others := [f"{axis}_size" for axis in OTHER_AXES if mesh[axis] > 1]:
        raise CannotRehearse(
            f"{others[0]} can't be rehearsed",
            why="only data-parallel meshes run on CPU here",
            fix=f"rehearse the job without {others[0]}",
        )
    if job.engine in (Engine.TPU, Engine.NONE):
        raise CannotRehearse(
            f"{job.engine.label} can't be rehearsed",
            why="there is nothing that several CPU processes could share",
            fix="a YAML with distributed_type: FSDP, MULTI_GPU or DEEPSPEED",
        )


def without_mesh(job: JobConfig, processes: int) -> JobConfig:
    """The job on another number of ranks, which share one copy of the model, or two under FSDP1's hybrid."""
    values = {key: value for key, value in job.values.items() if key != "parallelism_config"}
    return JobConfig({**values, "num_processes": processes})


def by_size(job: JobConfig) -> bool:
    """Whether FSDP chooses units by their number of weights."""
    return job.engine is Engine.FSDP1 and job.wrap_policy == "SIZE_BASED_WRAP"


def with_smaller_units(job: JobConfig, real: int, small: int) -> tuple[JobConfig, list[str]]:
    """Adapts the size of units to a layer of `small` weights instead of `real`, for as many units in each layer."""
    before = job.fsdp(SMALLEST_UNIT) if by_size(job) else 0
    if not (isinstance(before, int) and before > 0 and real > small > 0):
        return job, []
    fewer = max(1, before * small // real)
    section = {**job.section("fsdp_config"), SMALLEST_UNIT: fewer}
    return JobConfig({**job.values, "fsdp_config": section}), [f"{SMALLEST_UNIT} {before} -> {fewer}"]
