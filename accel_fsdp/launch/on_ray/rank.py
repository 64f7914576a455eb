"""`python -m accel_fsdp.launch.on_ray.rank WORKER FILE SCRIPT [arguments]`: becomes one rank of a job on Ray.

It reads the Accelerate YAML as `accelerate launch` does, and then executes the script in its place. WORKER is the
process number of Ray's worker, with which it ends.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from accel_fsdp.errors import guard
from accel_fsdp.launch import launcher

PR_SET_PDEATHSIG = 1
RAYS = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Variables that Ray itself sets for ranks; a YAML's gpu_ids count a machine's GPUs, not those that Ray assigned."""


def main() -> None:
    """Replaces this process by the script, unless it would train unsharded."""
    worker, file, script, *words = sys.argv[1:]
    end_with(int(worker))
    launcher.check_shards(Path(file), Path(script), tuple(words))
    variables = launcher.rank_environment(Path(file), Path(script))
    os.environ.update({name: value for name, value in variables.items() if name not in RAYS})
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, script, *words])


def end_with(parent: int) -> None:
    """Has Linux end this process when its parent ends, however that happens; elsewhere Ray ends it, where it can.

    It ends by SIGKILL: Ray starts the ranks again at once, and a rank that went on, or saved, would hold the GPU and
    the folder.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(guard(main))
