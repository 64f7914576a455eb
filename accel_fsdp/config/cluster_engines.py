"""The engines that run a job on a cluster, as `accel-fsdp script` knows them. Pure.

A job file's text is in `launch/script/`, the variables in which an engine places a machine in `launch/place.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ClusterWord = Literal["slurm", "kubernetes", "skypilot", "dstack", "ray", "torchrun"]


@dataclass(frozen=True)
class ClusterEngine:
    """`takes` are the flags of `accel-fsdp script` that this engine supports, and some others don't.

    `places` is the source of a machine's number and the first machine's address: "launch", which reads the engine's
    variables, the job file's own "driver", or "" if the user gives them.
    """

    title: str
    places: Literal["launch", "driver", ""] = "launch"
    takes: frozenset[str] = frozenset()


CLUSTER_ENGINES: Mapping[ClusterWord, ClusterEngine] = {
    "slurm": ClusterEngine("SLURM"),
    "kubernetes": ClusterEngine("Kubernetes", takes=frozenset({"--image", "--api"})),
    "skypilot": ClusterEngine("SkyPilot", takes=frozenset({"--image", "--spot"})),
    "dstack": ClusterEngine("dstack", takes=frozenset({"--image", "--spot"})),
    "ray": ClusterEngine("Ray", places="driver"),
    "torchrun": ClusterEngine("torchrun", places=""),
}
PLACING = [engine.title for engine in CLUSTER_ENGINES.values() if engine.places]
LAUNCH_PLACES = [engine.title for engine in CLUSTER_ENGINES.values() if engine.places == "launch"]


def engines_taking(flag: str) -> list[str]:
    return [word for word, engine in CLUSTER_ENGINES.items() if flag in engine.takes]
