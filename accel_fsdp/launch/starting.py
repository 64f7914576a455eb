"""Runs any script as one rank, exactly as Python would."""

import os
import sys
from datetime import timedelta

from accel_fsdp import library_internals
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import script, stacks

GROUPS = "torch.distributed.distributed_c10d"
RELIES_ON = (Internal(f"{GROUPS}:default_pg_timeout"), Internal(f"{GROUPS}:default_pg_nccl_timeout"))


def run() -> None:
    """Runs the script on the command line, and exits as Python would."""
    del sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has none
        sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
    stacks.begin()
    if seconds := LaunchEnvironment.now().hang_timeout:
        _limit_collectives(timedelta(seconds=seconds))
    try:
        script.run(sys.argv[0])
    except Exception as error:
        stacks.keep(error)
        script.show_error(error)
        sys.exit(1)


def _limit_collectives(limit: timedelta) -> None:
    """Sets the timeout of process groups for which the script gives none; torch has no variable for it."""
    library_internals.check(*RELIES_ON, why="the limit of --hang-timeout would not hold for collectives")
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = limit
    distributed_c10d.default_pg_nccl_timeout = limit  # type: ignore[attr-defined]
