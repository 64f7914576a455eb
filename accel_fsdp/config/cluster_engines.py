"""The engines that run a job on a cluster, as `accel-fsdp script` knows them. Pure.

A job file's text is in `launch/script/`, the variables in which an engine places a machine in `launch/place.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ClusterWord = Literal["slurm", "kubernetes", "skypilot", "torchrun"]


@dataclass(frozen=True)
class ClusterEngine:
    """`submit` is the command that takes its job file.

    `takes` are the flags of `accel-fsdp script` that this engine supports, and some others don't.

    `places`: whether `accel-fsdp launch` reads a machine's number and the first machine's address from the engine's
    variables. Otherwise the user gives them.
    """

    title: str
    submit: str
    places: bool = True
    takes: frozenset[str] = frozenset()


CLUSTER_ENGINES: Mapping[ClusterWord, ClusterEngine] = {
    "slurm": ClusterEngine("SLURM", "sbatch"),
    "kubernetes": ClusterEngine("Kubernetes", "kubectl create -f", takes=frozenset({"--image"})),
    "skypilot": ClusterEngine("SkyPilot", "sky jobs launch", takes=frozenset({"--image", "--spot"})),
    "torchrun": ClusterEngine("torchrun", "bash", places=False),
}
PLACING = [engine.title for engine in CLUSTER_ENGINES.values() if engine.places]


def engines_taking(flag: str) -> list[str]:
    return [word for word, engine in CLUSTER_ENGINES.items() if flag in engine.takes]
