"""What connects the workers and the driver of a job: shared GPUs for the ranks, and an actor for messages."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from accel_fsdp.errors import UsageError

MOST_WORKERS = 100_000
"""Calls that the actor may have open; each worker has one. Ray's default is 1000."""


def shared_devices() -> Any:
    """The `torch_config` of `TorchTrainer`: each worker sees the GPUs of all workers of its machine.

    So LOCAL_RANK counts them as under torchrun. Ray's own `TorchConfig` would also make a process group and a CUDA
    context in each worker, which trains nothing: half a GB of the GPU, whose rank is a separate process, and 200 MB of
    the host's memory for torch.
    """
    from ray.train.backend import Backend, BackendConfig

    class SharedDevices(Backend):  # type: ignore[misc]
        share_cuda_visible_devices = True

    class Ranks(BackendConfig):  # type: ignore[misc]
        backend = "gloo"  # TorchTrainer's choice where nothing is set

        @property
        def backend_cls(self) -> Any:
            return SharedDevices

    return Ranks()


@dataclass
class Messages:
    """The actor of a job: the driver's signals to the workers, and how their ranks ended.

    It runs on the driver's node, and ends with the driver.
    """

    starts: int = 0
    running: bool = False
    over: int | None = None
    """The exit code of the job, once its ranks will not be started again."""
    ranks: int = 0
    done: int = 0
    failures: list[tuple[int, int]] = field(default_factory=list)
    """Rank and exit code of each failure since the last start, oldest first."""
    signal: int = 0

    def __post_init__(self) -> None:
        self._signalled = asyncio.Event()

    async def begin(self, ranks: int) -> None:
        """Records that all workers have started; rank 0 calls it."""
        self.starts += 1
        self.ranks, self.running, self.done, self.failures = ranks, True, 0, []

    async def ended(self, rank: int, code: int) -> bool:
        """Records how a rank ended; returns whether Ray should start all ranks again after this failure.

        It should not if the driver has told them to stop, or after a wrong flag, which would fail again.
        """
        if code == 0:
            self.done += 1
            if self.done == self.ranks:
                self.over = 0
            return False
        self.failures.append((rank, code))
        self.running = False
        if self.over is None and (self.signal or code == UsageError.exit_code):
            self.over = code
        return self.over is None

    async def stop(self, number: int) -> bool:
        """Forwards a signal to all ranks; returns whether there are any."""
        self.signal = number
        self._signalled.set()
        return self.running

    async def next_signal(self) -> int:
        """Waits for a signal from the driver, and returns it."""
        await self._signalled.wait()
        return self.signal

    async def outcome(self) -> tuple[int, int | None, list[tuple[int, int]]]:
        """The number of starts of the ranks, the job's exit code, and the last failures."""
        return self.starts, self.over, self.failures


def open_messages() -> Any:
    """Creates the actor, in the driver, after `ray.init`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    kind = ray.remote(Messages).options(
        name=_actor_name(), num_cpus=0, max_concurrency=MOST_WORKERS, scheduling_strategy=this_node
    )
    return kind.remote()


def messages() -> Any:
    import ray

    return ray.get_actor(_actor_name())


def _actor_name() -> str:
    """The actor's name, with Ray's job id, because several jobs may share a namespace."""
    import ray

    return f"accel-fsdp-{ray.get_runtime_context().get_job_id()}"
