"""Lets the ranks of this machine stand for several machines."""

import os

from accel_fsdp.launch_environment import LaunchEnvironment

NODES = "ACCEL_FSDP_NODES"
"""The variable that says how many."""


def stand_for_several() -> None:
    """Numbers the ranks by node, which is all that a rank knows of machines."""
    nodes = int(os.environ.get(NODES, "1"))
    launch = LaunchEnvironment.now()
    if nodes > 1 and launch.is_rank:
        each = launch.world_size // nodes
        os.environ |= {"LOCAL_WORLD_SIZE": str(each), "LOCAL_RANK": str(launch.rank % each)}
