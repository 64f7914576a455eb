"""Starts a job through Accelerate's own launcher, with the failures that a user can read."""

import copy
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from accel_fsdp import config
from accel_fsdp.errors import UserError
from accel_fsdp.facts import first_line

REFUSALS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, ConnectionError, RuntimeError)
"""How the launcher stops at what it can't use."""

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""What torchrun hands on to the ranks, and SLURM's warning, which would else end the launcher and not the ranks."""


def launcher_args(config_file: Path, script: Path, script_args: tuple[str, ...]) -> Any:
    """Accelerate's own parsed launch arguments for this YAML and script.

    Raises:
        UserError: the YAML can't be read, or Accelerate's parser refuses it; or there is no such script.
    """
    config.load(config_file)
    if not script.is_file():
        raise UserError(
            f"script {script} does not exist",
            why="there is nothing to launch",
            fix="give the path of a training script",
        )
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    words = ["--config_file", str(config_file), str(script), *script_args]
    try:
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    except REFUSALS as error:
        raise _refused(config_file, error) from error
    if args.main_process_port is None and args.num_machines == 1:
        args.main_process_port = 0  # a free port, so that two jobs on one machine don't meet
    return args


def _refused(config_file: Path, error: Exception) -> UserError:
    return UserError(
        f"Accelerate refuses {config_file}: {first_line(error)}",
        why="no process was started",
        fix="correct the file, or make a new one: accel-fsdp config",
    )


def environment(args: Any) -> dict[str, str]:
    """The variables that Accelerate's launcher would set for the ranks, without those that are set already.

    Raises:
        UserError: the launcher stops at a value.
    """
    from accelerate.utils import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_tpu

    try:
        if args.tpu:
            prepared = prepare_tpu(args, {})[1]
        elif args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ""  # launch_command sets it for the launch itself
            prepared = prepare_deepspeed_cmd_env(args)[1]
        else:
            prepared = prepare_multi_gpu_env(args)
    except REFUSALS as error:
        raise _refused(args.config_file, error) from error
    return {name: value for name, value in prepared.items() if os.environ.get(name) != value}


def rank_environment(config_file: Path, script: Path) -> dict[str, str]:
    """The variables for a rank that torchrun started: how many processes and machines there are is torchrun's to say.

    Raises:
        UserError: the YAML can't be read, or Accelerate refuses it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = launcher_args(config_file, script, ())
        args.num_machines, args.main_process_port = 1, 0  # else it would look for the port, which torchrun may hold
        return environment(args)


def command(config_file: Path, script: Path, script_args: tuple[str, ...]) -> list[str]:
    """The words that a shell would need for the same launch."""
    return ["accelerate", "launch", "--config_file", str(config_file), str(script), *script_args]


def launch(args: Any) -> int:
    """Runs the job and returns its exit code. The ranks say what went wrong; the launcher's traceback is dropped.

    Raises:
        UserError: the launcher stops at a value before any rank starts.
    """
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if args.use_fsdp or args.use_deepspeed or args.multi_gpu:
        with warnings.catch_warnings():  # the launcher itself repeats them
            warnings.simplefilter("ignore")
            environment(copy.copy(args))
    args.signals_to_handle = SIGNALS
    logging.disable(logging.ERROR)  # torchrun's account of which process it ended; this process logs nothing else
    try:
        launch_command(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"accel-fsdp: rank {rank} ended with exit code {failure.exitcode}", file=sys.stderr)
        return int(failure.exitcode) if failure.exitcode > 0 else 128 - int(failure.exitcode)
    except ImportError as error:  # DeepSpeed
        raise _refused(args.config_file, error) from error
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
