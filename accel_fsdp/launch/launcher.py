"""Starts a job through Accelerate's launcher, and reports failures with what the user can do."""

import copy
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_fsdp import ranks
from accel_fsdp.command_line import values_by_name
from accel_fsdp.config import DEFAULT_PORT, DISTRIBUTED_TYPES, MULTI_CPU, Engine, JobConfig, yaml_file
from accel_fsdp.errors import Stopped, UserError, first_line, require
from accel_fsdp.launch import child_process, last_places, meeting
from accel_fsdp.launch.place import NOWHERE, Place
from accel_fsdp.launch_environment import (
    ALLOCATOR_VARIABLES,
    EXPANDABLE_SEGMENTS,
    HANG_TIMEOUT,
    STACKS,
    USE_CPU,
    LaunchEnvironment,
)
from accel_fsdp.ranks import cpu

REFUSALS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError, RuntimeError)
"""Exceptions that the launcher raises for values that it can't use, and for a missing mpirun."""

TORCHRUNS = frozenset({"MASTER_ADDR", "MASTER_PORT"})
"""The variables that torchrun sets for the ranks itself."""

ON_CPU = str(Path(ranks.__file__).with_name("__main__.py"))
"""The program that prepares CPU processes for sharding and then runs the script; it goes before the script's path."""

LEAVES_STACKS = str(Path(__file__).with_name("__main__.py"))
"""The program that runs a script, as Python would, and leaves stacks if it fails; it goes before the script's path."""

BY_TORCHRUN = "--multi_gpu"
"""The flag with which Accelerate calls torchrun also for MULTI_CPU."""

MAKES_GLOO_A_DEVICE = re.compile(
    r"^\s*(import\b[^#\n]*\s|from\s+)accel_fsdp\.(ranks\.cpu|training)\b"
    r"|^\s*from\s+accel_fsdp(\.ranks)?\s+import\s+(\([^)]*|[^#\n]*)\b(cpu|training)\b",
    re.MULTILINE,
)
"""Matches a script's import of `accel_fsdp.ranks.cpu` or `accel_fsdp.training`, with which FSDP runs on gloo."""
ASKS_FOR_CPU = re.compile(r"cpu\s*=\s*True")
"""Matches a script that asks Accelerate or Trainer for the CPU."""


def launcher_args(config_file: Path, script: Path, script_args: tuple[str, ...]) -> Any:
    """Accelerate's parsed launch arguments for this YAML and script, on as many machines as the YAML says."""
    yaml_file.load(config_file)  # its errors name the line
    return parse(config_file, launcher_words(config_file, script, script_args))


def parse(config_file: Path, words: list[str], place: Place = NOWHERE) -> Any:
    """Parses the words of an `accelerate launch` command with Accelerate's parser."""
    require("starting a job", "accelerate", "torch")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    try:
        args, defaults, mp_from_flag = _validate_launch_command(launch_command_parser().parse_args(words))
    except REFUSALS as error:
        raise _refusal(config_file, error) from error
    if args.main_process_port is None and args.num_machines == 1 and distributed(args):
        args.main_process_port = 0  # a free port, so that two jobs on one machine don't clash
    fields = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if mp_from_flag else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)  # as launch_command does
    args.launcher_words, args.place = words, place
    is_local = defaults is None or defaults.compute_environment == "LOCAL_MACHINE"
    args.starts_directly = is_local and not (distributed(args) or args.tpu)
    args.on_cpus = args.multi_gpu and defaults.distributed_type == MULTI_CPU
    return args


def launcher_words(
    config_file: Path,
    script: Path,
    script_args: tuple[str, ...],
    on_cpu: bool = False,
    place: Place = NOWHERE,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """The arguments of `accelerate launch` for this script, with the flags that `place` adds to the YAML's `values`.

    Raises:
        UserError: the script is missing, or the place doesn't fit the YAML.
    """
    if not script.is_file():
        raise UserError(
            f"script {script} does not exist",
            why="there is nothing to launch",
            fix="give the path of a training script",
        )
    flags = [BY_TORCHRUN] if _needs_torchrun(place, values) else []
    flags += [*_place_flags(place, values), "--config_file", str(config_file)]
    return [*flags, *([ON_CPU] if on_cpu else []), str(script), *script_args]


def _needs_torchrun(place: Place, values: Mapping[str, Any]) -> bool:
    """Whether Accelerate would start one process for MULTI_CPU, because it doesn't call mpirun."""
    is_several = values.get("distributed_type") == MULTI_CPU and place.value("num_processes", 1) > 1
    return is_several and not JobConfig(values).by_mpirun


def _place_flags(place: Place, values: Mapping[str, Any]) -> list[str]:
    """The flags for this machine's place that the YAML leaves open.

    Raises:
        UserError: DeepSpeed would start the other machines' ranks, which an engine does already.
    """
    words = [word for name, value in place.beside(values).items() for word in (f"--{name}", str(value))]
    section = values.get("deepspeed_config")
    launcher = section.get("deepspeed_multinode_launcher", "pdsh") if isinstance(section, Mapping) else "pdsh"
    is_deepspeed = values.get("distributed_type") == DISTRIBUTED_TYPES[Engine.DEEPSPEED]
    if place.machines > 1 and place.engine and is_deepspeed and launcher != "standard":
        raise UserError(
            f"{place.engine} starts this command on each machine, and DeepSpeed's {launcher} would do so again",
            why="every rank would be started several times",
            fix="deepspeed_multinode_launcher: standard, in the YAML's deepspeed_config",
        )
    return words


def _refusal(config_file: Path, error: Exception) -> UserError:
    return UserError(
        f"Accelerate refuses {config_file}: {first_line(error)}",
        why="no process was started",
        fix="correct the file, or make a new one: accel-fsdp config",
    )


def environment(args: Any) -> dict[str, str]:
    """The variables of the ranks that Accelerate's launcher or this one sets, except those that are set already."""
    from accelerate.utils import (
        check_cuda_p2p_ib_support,
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_tpu,
    )
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    try:
        if args.use_deepspeed:  # in the order of launch_command
            prepared = prepare_deepspeed_cmd_env(args)[1]
        elif distributed(args):
            prepared = prepare_multi_gpu_env(args)
        elif args.tpu:
            prepared = prepare_tpu(args, dict(os.environ))[1]
        else:
            prepared = prepare_simple_launcher_cmd_env(args)[1]
    except REFUSALS as error:
        raise _refusal(args.config_file, error) from error
    if args.on_cpus:
        prepared[USE_CPU] = "true"
    if distributed(args) and not check_cuda_p2p_ib_support():
        prepared = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", **prepared}
    prepared |= allocator_variables(args)
    return {name: value for name, value in prepared.items() if os.environ.get(name) != value}


def allocator_variables(args: Any) -> Mapping[str, str]:
    """The allocator's setting for ranks on GPUs; empty if a person has set one."""
    uses_cpu = args.use_cpu and not (args.use_deepspeed or distributed(args))  # which don't hand it on
    on_cpu = args.cpu or uses_cpu or args.on_cpus or args.training_script == ON_CPU
    is_set = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    return {} if on_cpu or args.tpu or is_set or not _has_expandable_segments() else EXPANDABLE_SEGMENTS


def _has_expandable_segments() -> bool:
    """Whether they can be tried: a copy may hang under ROCm, and the first allocation may fail under WSL.

    (pytorch/pytorch, issues 192259 and 192330.)
    """
    import torch

    return torch.version.hip is None and "microsoft" not in platform.uname().release.lower()


def distributed(args: Any) -> bool:
    return bool(args.use_fsdp or args.use_deepspeed or args.use_megatron_lm or args.multi_gpu)


def _has_torchruns_ranks(args: Any) -> bool:
    """Whether torchrun starts several ranks, here or on all machines."""
    by_deepspeed = args.use_deepspeed and args.num_machines > 1 and args.deepspeed_multinode_launcher != "standard"
    return distributed(args) and args.num_processes not in (0, 1) and not by_deepspeed


def rank_environment(config_file: Path, script: Path) -> dict[str, str]:
    """The variables for a rank of torchrun, which sets the numbers of processes and machines itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = launcher_args(config_file, script, ())
        args.num_machines, args.main_process_port = 1, 0  # otherwise it checks the port, which torchrun may hold
        return {name: value for name, value in environment(args).items() if name not in TORCHRUNS}


def _refuse_unsharded(args: Any) -> None:
    """Raises a UserError if every rank would train the whole model alone.

    Without an accelerator Accelerate runs no FSDP or DDP, unless the script asks for `cpu.enable`.
    """
    if args.training_script == ON_CPU or not cpu.is_needed():
        return
    text = Path(args.training_script).read_text(encoding="utf-8", errors="replace")
    if MAKES_GLOO_A_DEVICE.search(text):
        return
    asks_for_cpu = ASKS_FOR_CPU.search(text) or "--use_cpu" in args.training_script_args
    on_cpu = LaunchEnvironment.now().uses_cpu or asks_for_cpu  # plain DDP works on the CPU
    if on_cpu and not (args.use_fsdp or args.use_deepspeed):
        return
    raise UserError(
        f"{args.training_script} would train unsharded: Accelerate shards on accelerators, and this machine has none",
        why=f"each of {args.num_processes} processes would train the whole model by itself, into the same folder",
        fix="start it where there are GPUs; or, to try it here, accel-fsdp launch --cpu FILE SCRIPT",
    )


def _check_ranks(args: Any) -> None:
    """Checks that this machine's ranks can start and shard."""
    if distributed(args) or args.starts_directly:
        with warnings.catch_warnings():  # the launcher repeats them
            warnings.simplefilter("ignore")
            environment(copy.copy(args))
    if distributed(args):
        _refuse_unsharded(args)


def _address(args: Any) -> str:
    """Where torchrun's launchers on several machines find machine 0; empty for one machine."""
    is_one_of_several = args.place.machines > 1 and _has_torchruns_ranks(args)
    return str(args.place.value("main_process_ip", "")) if is_one_of_several else ""


def launch(args: Any, wait_seconds: float = 600.0, hang_seconds: float | None = None) -> int:
    """Runs the job and returns its exit code. The ranks report what went wrong; the launcher's traceback is dropped.

    Machines wait for each other for `wait_seconds` before any rank starts. `hang_seconds`: how long ranks wait in a
    collective, and a step of Trainer may take; None or 0: as the script says.

    Raises:
        UserError: the launcher stops at a value before any rank starts, or the machines can't connect.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if args.on_cpus:
        os.environ[USE_CPU] = "true"
    os.environ.update(allocator_variables(args))
    _check_ranks(args)
    child_process.say_ignored()
    os.environ[HANG_TIMEOUT] = str(hang_seconds or 0)
    if args.starts_directly:
        return _start(args)
    parsed = launch_command_parser().parse_args(args.launcher_words)  # a new object, because validation changes it
    parsed.main_process_port = args.main_process_port
    parsed.signals_to_handle = ",".join(child_process.forwarded())
    folder, is_kept = Path(tempfile.mkdtemp(prefix="accel-fsdp-stacks-")), False
    if _has_torchruns_ranks(args):
        os.environ[STACKS] = str(folder)
        os.environ.update({name: os.environ.get(name, value) for name, value in last_places.recorder(folder).items()})
        words = [parsed.training_script, *parsed.training_script_args]
        parsed.training_script, parsed.training_script_args = LEAVES_STACKS, words
    try:
        _meet(args, wait_seconds)
        logging.disable(logging.ERROR)  # torchrun's report of which process it ended; this process logs nothing else
        with tempfile.TemporaryDirectory(prefix="accel-fsdp-", ignore_cleanup_errors=True) as logs:
            parsed.log_dir = parsed.log_dir or logs  # otherwise torchrun leaves its own folder behind
            launch_command(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = _show_end(f"rank {rank}", failure.exitcode)
        is_kept = code != Stopped.exit_code and _show_places(folder)
        return code
    except subprocess.CalledProcessError as error:
        return _show_end("DeepSpeed's launcher", error.returncode)
    except (ImportError, ValueError) as error:  # no DeepSpeed, or no GPUs for torchrun to count
        raise _refusal(args.config_file, error) from error
    except SignalException as error:
        print(f"\naccel-fsdp: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    except DistError as error:
        if not _address(args):
            raise
        print(f"accel-fsdp: the launchers of the machines lost each other: {first_line(error)}", file=sys.stderr)
        return 1
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _start(args: Any) -> int:
    """Starts the script as Accelerate's simple launcher does, which handles no signal."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, variables = prepare_simple_launcher_cmd_env(args)
    return _show_end("the script", child_process.run(command, variables))


def _show_end(who: str, returncode: int) -> int:
    """Prints how a process failed; returns its exit code."""
    if returncode:
        print(f"accel-fsdp: {who} ended with {child_process.described(returncode)}", file=sys.stderr)
    return child_process.exit_code(returncode)


def _show_places(folder: Path) -> bool:
    """Prints where each rank of this machine was; returns whether any has left its stack."""
    if lines := last_places.lines(folder):
        print("\n".join(["accel-fsdp: " + lines[0], *lines[1:]]), file=sys.stderr)
    return bool(lines)


def _meet(args: Any, seconds: float) -> None:
    """Waits until all machines have come, and compares their settings."""
    if not (address := _address(args)):
        return
    with warnings.catch_warnings():  # the launcher repeats them
        warnings.simplefilter("ignore")
        variables = {**os.environ, **environment(copy.copy(args))}
    words = [args.training_script, *args.training_script_args]
    script, *words = words[1:] if words[0] == ON_CPU else words
    place: Place = args.place
    rank, port = int(place.value("machine_rank", 0)), int(place.value("main_process_port", DEFAULT_PORT))
    processes = place.value("num_processes")
    numbers = {"num_machines": str(place.machines), "num_processes": None if processes is None else str(processes)}
    settings = {**numbers, **meeting.of_job(variables, values_by_name(words), Path(script))}
    meeting.meet(rank, place.machines, address, port, settings, seconds)
