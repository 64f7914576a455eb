"""Finds this machine's number and the number of machines, from flags, SLURM, Kubernetes or SkyPilot.

Only this module reads the engines' variables. The names are those of `accelerate launch`.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accel_fsdp import command_line, console
from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.units import counted

SCONTROL_SECONDS = 30
FIRST_PORT, PORTS = 20_000, 10_000
"""For SLURM jobs, by job number, so that two on a machine don't clash; below the ports that Linux hands out itself."""
FLAGS = ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port")
"""The parts of a place, by the names of `accel-fsdp launch` and `accelerate launch`."""


@dataclass(frozen=True)
class SourcedValue:
    """A value with its source: a variable, a flag or a key. `at_most`: a flag may lower it."""

    value: Any
    source: str
    at_most: bool = False


@dataclass(frozen=True)
class Place:
    """The known parts of a machine's place, by the names of FLAGS; `engine` is empty if none has set variables."""

    engine: str = ""
    known: Mapping[str, SourcedValue] = field(default_factory=dict)

    def value(self, name: str, default: Any = None) -> Any:
        return self.known[name].value if name in self.known else default

    def beside(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value.value for name, value in self.known.items() if str(values.get(name)) != str(value.value)}

    def sources(self, values: Mapping[str, Any]) -> dict[str, str]:
        """The sources of the parts in which the place differs from the YAML."""
        return {name: self.known[name].source for name in self.beside(values)}

    def applied(self, job: JobConfig) -> JobConfig:
        return replace(job, values={**job.values, **self.beside(job.values)})

    @property
    def machines(self) -> int:
        return int(self.value("num_machines", 1))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value.value} ({value.source})" for name, value in self.known.items())


NOWHERE = Place()
"""A place without known parts: a launch on one machine."""


def find(variables: Mapping[str, str]) -> Place:
    """The place according to the engine that started this process."""
    for engine, reader in ENGINES.items():
        if values := reader(Variables(engine, variables)):
            return Place(engine, values)
    return NOWHERE


def settle(place: Place, flags: Mapping[str, Any], values: Mapping[str, Any], file: str) -> Place:
    """The place of this launch: flags, else the engine, else the YAML's `values`.

    Raises:
        UserError: a flag or the YAML contradicts the engine, or the rank of this machine among several is unknown.
    """
    by_flag = {
        name: SourcedValue(value, command_line.flag_of(name)) for name, value in flags.items() if value is not None
    }
    in_file = {name: value for name in FLAGS if (value := _value_in_file(name, values.get(name), file)) is not None}
    if JobConfig(values).is_alone:
        in_file.pop("num_processes", None)  # one process is started in any case
    if place.engine:
        for name in by_flag.keys() & place.known.keys():
            _refuse_contradiction(place, name, by_flag[name], "leave out the flag")
    stated = {**place.known, **by_flag}
    gpus, fewer = stated.get("num_processes"), in_file.get("num_processes")
    if gpus and fewer and gpus.at_most and fewer.value < gpus.value:
        console.say(f"note: num_processes {fewer.value} in {file} uses some of {gpus.value} GPUs ({gpus.source})")
        stated["num_processes"] = fewer
    for name in [flag for flag in FLAGS if flag in in_file and flag in stated]:
        _compare_with_file(place, name, stated[name], in_file[name])
    settled = Place(place.engine, {name: value for name in FLAGS if (value := stated.get(name) or in_file.get(name))})
    _check_rank(settled, stated, in_file, file)
    if isinstance(processes := settled.value("num_processes"), int):
        ranks_per_machine(settled.machines, processes, ": accel-fsdp launch --num-processes N FILE SCRIPT")
    return settled


def _value_in_file(name: str, value: Any, file: str) -> SourcedValue | None:
    """The YAML's value; None if it is missing or of a wrong type, which Accelerate's parser refuses."""
    if name == "main_process_ip":
        return SourcedValue(value, file) if isinstance(value, str) and value else None
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    return SourcedValue(number, file) if isinstance(number, int) and not isinstance(number, bool) else None


def _compare_with_file(place: Place, name: str, stated: SourcedValue, in_file: SourcedValue) -> None:
    """Refuses contradictions with the file. Flags replace its values, except a rank, which may be another machine's.

    An address in a file may be an older job's. `accelerate config` writes machine_rank: 0 into files for all machines.
    """
    if name in ("main_process_ip", "main_process_port") or stated.value == in_file.value:
        return
    if name == "machine_rank":
        if in_file.value != 0:
            raise UsageError(
                f"{stated.source} {stated.value}, and machine_rank: {in_file.value} in {in_file.source}",
                why="one of them is another machine's",
                fix="remove machine_rank from the YAML, which all machines can then share",
            )
    elif not stated.source.startswith("--"):
        _refuse_contradiction(
            place, name, in_file, f"{name}: {stated.value} in the YAML, or {command_line.flag_of(name)} {stated.value}"
        )


def _refuse_contradiction(place: Place, name: str, stated: SourcedValue, fix: str) -> None:
    known_value = place.known.get(name)
    if known_value is None or known_value.value == stated.value:
        return
    is_flag = stated.source.startswith("--")
    if known_value.at_most and is_flag and stated.value < known_value.value:
        return
    by_flag = f"{stated.source} {stated.value} is on the command line"
    in_file = f"{name}: {stated.value} is in {stated.source}"
    raise UserError(
        f"{place.engine} says {name} {known_value.value} ({known_value.source}), and {by_flag if is_flag else in_file}",
        why="some ranks would wait for others that never start, or each machine would train alone",
        fix=fix,
    )


def _check_rank(
    settled: Place, stated: Mapping[str, SourcedValue], in_file: Mapping[str, SourcedValue], file: str
) -> None:
    machines, rank = settled.machines, settled.value("machine_rank")
    fix = f"accel-fsdp launch --machine-rank N FILE SCRIPT, with N from 0 to {machines - 1}, another on each machine"
    if rank is None and machines > 1:
        raise UsageError(
            f"{file} is for {machines} machines, and the number of this machine is unknown",
            why="each would start as the first one, and wait for the others until a timeout",
            fix=fix,
        )
    if rank is not None and not 0 <= rank < machines and ("machine_rank" in stated or machines > 1):
        raise UsageError(
            f"{settled.known['machine_rank'].source} {rank} of {counted(machines, 'machine')}",
            why="the machines are numbered from 0",
            fix=fix if machines > 1 else "num_machines in the YAML, or --num-machines, is the number of machines",
        )


def ranks_per_machine(machines: int, processes: int, fix: str) -> int:
    """The number of processes that each machine starts; `fix` is what to type if they can't be divided evenly."""
    if processes % machines:
        raise UsageError(
            f"num_processes {processes} on {counted(machines, 'machine')}",
            why="each machine starts as many as the others",
            fix=f"a multiple of {machines}{fix}",
        )
    return processes // machines


class Variables:
    def __init__(self, engine: str, variables: Mapping[str, str]) -> None:
        self.engine, self.all = engine, variables

    def number(self, *names: str) -> SourcedValue | None:
        """The value of the first variable that is set."""
        text = self.text(*names)
        if text is None:
            return None
        if not text.value.isdecimal():
            raise UserError(
                f"{text.source}={text.value} is not a number",
                why=f"{self.engine} gives the number of processes or machines with it, or the number of this one",
                fix=(
                    f"set {text.source} to a number, or use torchrun, which accepts other values: torchrun train/sft.py"
                ),
            )
        return SourcedValue(int(text.value), text.source)

    def text(self, *names: str) -> SourcedValue | None:
        return next(
            (SourcedValue(self.all[name].strip(), name) for name in names if self.all.get(name, "").strip()), None
        )


def _known_values(**values: SourcedValue | None) -> dict[str, SourcedValue]:
    return {name: value for name, value in values.items() if value is not None}


def _total(per_node: SourcedValue | None, machines: SourcedValue | None, at_most: bool = True) -> SourcedValue | None:
    """The number of processes on all machines, one per GPU."""
    if per_node is None or machines is None or not per_node.value:
        return None
    return SourcedValue(per_node.value * machines.value, f"{per_node.source} x {machines.source}", at_most)


def _from_skypilot(variables: Variables) -> dict[str, SourcedValue]:
    """The first of the addresses is machine 0's."""
    count, hosts = variables.number("SKYPILOT_NUM_NODES"), variables.text("SKYPILOT_NODE_IPS")
    if count is None:
        return {}
    return _known_values(
        num_machines=count,
        num_processes=_total(variables.number("SKYPILOT_NUM_GPUS_PER_NODE"), count),
        machine_rank=variables.number("SKYPILOT_NODE_RANK"),
        main_process_ip=SourcedValue(hosts.value.split()[0], hosts.source) if hosts else None,
    )


def _from_kubeflow(variables: Variables) -> dict[str, SourcedValue]:
    """Reads variables of Kubeflow's Trainer, which torchrun uses as defaults of its flags."""
    nodes = variables.text("PET_NNODES")
    if nodes is None:
        return {}
    if ":" in nodes.value:
        raise UserError(
            f"PET_NNODES={nodes.value}: an elastic job, of as many machines as there are",
            why="Accelerate's launcher starts a fixed number",
            fix="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun train/sft.py --accelerate_config FILE ... "
            "--resume_from_checkpoint auto, which reads the same variables; or a number of machines",
        )
    machines, per_node = variables.number("PET_NNODES"), variables.text("PET_NPROC_PER_NODE")
    numeric = per_node is not None and per_node.value not in ("auto", "gpu", "cpu")  # torchrun counts devices for these
    return _known_values(
        num_machines=machines,
        num_processes=_total(variables.number("PET_NPROC_PER_NODE"), machines, at_most=False) if numeric else None,
        machine_rank=variables.number("PET_NODE_RANK", "PET_GROUP_RANK"),
        main_process_ip=variables.text("PET_MASTER_ADDR"),
        main_process_port=variables.number("PET_MASTER_PORT"),
    )


def _from_slurm(variables: Variables) -> dict[str, SourcedValue]:
    machines = variables.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    job = variables.number("SLURM_JOB_ID")
    if machines is None or job is None:
        return {}
    if machines.value > 1 and "SLURM_STEP_ID" not in variables.all:
        raise UserError(
            f"a SLURM job of {machines.value} machines, and this is its batch script itself",
            why="it runs on the first machine alone, which would wait for the others",
            fix="srun --ntasks-per-node=1 accel-fsdp launch FILE SCRIPT",
        )
    tasks = variables.number("SLURM_STEP_NUM_TASKS")
    if tasks is not None and tasks.value > machines.value:
        raise UserError(
            f"{tasks.value} tasks on {counted(machines.value, 'machine')} (SLURM_STEP_NUM_TASKS)",
            why="each would start all ranks of its machine",
            fix="srun --ntasks-per-node=1: the launcher starts a process for each GPU",
        )
    return _known_values(
        num_machines=machines,
        num_processes=_total(variables.number("SLURM_GPUS_ON_NODE"), machines),
        machine_rank=variables.number("SLURM_NODEID"),
        main_process_ip=_first_host(variables) if machines.value > 1 else None,
        main_process_port=SourcedValue(FIRST_PORT + job.value % PORTS, job.source) if machines.value > 1 else None,
    )


def _first_host(variables: Variables) -> SourcedValue | None:
    """The step's first machine. SLURM shortens the list, as n[1-4,7]; scontrol expands every form of it."""
    hosts = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if hosts is None or not re.search(r"[\[,]", hosts.value):
        return hosts
    if shutil.which("scontrol"):
        words = ["scontrol", "show", "hostnames", hosts.value]
        process = subprocess.run(words, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False)
        if process.returncode == 0 and process.stdout.split():
            return SourcedValue(process.stdout.split()[0], hosts.source)
    return SourcedValue(_first_of(hosts.value), hosts.source)


def _first_of(hosts: str) -> str:
    """The first name of n[01-04,7],m1, without scontrol."""
    match = re.match(r"(?P<before>[^\[,]*)(?:\[(?P<first>\d+)[^\]]*\](?P<behind>[^\[,]*))?", hosts)
    return "".join(part or "" for part in match.group("before", "first", "behind")) if match else hosts


ENGINES: Mapping[str, Callable[[Variables], dict[str, SourcedValue]]] = {
    "SkyPilot": _from_skypilot,
    "Kubeflow": _from_kubeflow,
    "SLURM": _from_slurm,
}
"""The engines that may have started this process. SkyPilot comes first, as it may run on the others."""


def now() -> Place:
    return find(os.environ)
