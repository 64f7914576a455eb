"""Connects the machines of a job: collects their facts, and tests the connections of every pair and of all ranks."""

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, python_child
from accel_fsdp.launch import Address
from accel_fsdp.launch.doctor import probing
from accel_fsdp.launch.doctor.facts import Facts
from accel_fsdp.time_limits import comes_true

FOLDER_SECONDS = 3.0
"""Seconds until the other machines see a new file of machine 0 in a shared folder (NFS caches folder listings)."""
LEAVE_SECONDS = 10.0
NO_ANSWER = "no answer"
SLOW = 0.5
"""The share of the others' bandwidth below which a machine is slow; a busy network varies by less than that."""
BUSY = 0.1
"""The share of time that a process waited for a CPU from which its bandwidth no longer measures the network."""
MARK = ".accel-fsdp-doctor-"


@dataclass(frozen=True)
class MachineGroup:
    address: Address
    machine: int
    machines: int
    ranks_each: int
    on_gpus: bool
    seconds: float


@dataclass
class NetworkResults:
    """The results of the tests of all machines; `facts` by machine, `pairs` by their numbers."""

    facts: dict[int, Facts] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    clock_seconds: dict[int, float] = field(default_factory=dict)
    folder_unseen: list[int] = field(default_factory=list)
    pairs: list[probing.PairResult] = field(default_factory=list)
    collectives: list[probing.CollectiveResult] = field(default_factory=list)
    failed_ranks: dict[int, str] = field(default_factory=dict)
    ranks: int = 0
    communicated: bool = False
    """Whether every pair of machines has exchanged data, and all ranks together."""

    @property
    def can_join(self) -> bool:
        numbers = [facts.asks_for for facts in self.facts.values()]
        is_even = all(count == numbers[0] for count in numbers)
        return is_even and not self.missing and not any(pair.error for pair in self.pairs)

    @property
    def least_bandwidth(self) -> float:
        """Bytes per second of the slowest pair; 0 for one machine."""
        return min((pair.bytes_per_second for pair in self.pairs), default=0.0)

    def slow_machines(self) -> list[int]:
        """Machines of three or more that weren't busy, and whose best pair is far below the others' best."""
        best: dict[int, float] = {}
        for pair in self.pairs:
            for machine in (pair.first, pair.second):
                best[machine] = max(best.get(machine, 0.0), pair.bytes_per_second)
        if len(best) < 3:
            return []
        others = {number: statistics.median(best[peer] for peer in best if peer != number) for number in best}
        idle = {machine for pair in self.pairs if pair.waited < BUSY for machine in (pair.first, pair.second)}
        return [machine for machine, speed in others.items() if machine in idle and 0 < best[machine] < SLOW * speed]


class NetworkTests:
    """One machine's part in the tests. Every method raises RuntimeError if machine 0 can't be reached."""

    def __init__(self, group: MachineGroup) -> None:
        self.group, self.results = group, NetworkResults(ranks=group.machines * group.ranks_each)
        self.store = group.address.open(group.seconds)

    def gather(self, facts: Facts, folder: Path) -> None:
        """Publishes this machine's facts; machine 0 collects those of all machines."""
        self.store.put(f"facts/{self.group.machine}", asdict(facts))
        if self.group.machine:
            self._answer(facts, folder)
            return
        mark: Any = contextlib.nullcontext()
        with contextlib.suppress(OSError):  # then no file is looked for
            mark = tempfile.NamedTemporaryFile(prefix=MARK, dir=atomic_files.existing_part(folder))  # noqa: SIM115
        with mark as file:
            self._collect_facts(os.path.basename(file.name) if file else "")

    def _collect_facts(self, mark: str) -> None:
        results = self.results
        own_facts = self._from_machines("facts", range(self.group.machines), self.group.seconds)
        results.facts = {number: Facts(**facts) for number, facts in own_facts.items()}
        results.missing = [number for number in range(self.group.machines) if number not in own_facts]
        self.store.put("present", {"machines": sorted(own_facts), "mark": mark, "clock": time.time()})
        others = [number for number in own_facts if number]
        answers = self._from_machines("sees", others, FOLDER_SECONDS + LEAVE_SECONDS)
        results.folder_unseen = [number for number, answer in answers.items() if not answer["mark"]]
        results.clock_seconds = {number: answer["ahead"] for number, answer in answers.items()}

    def _from_machines(self, name: str, numbers: Iterable[int], seconds: float) -> dict[int, Any]:
        """The values that these machines have stored under a name and that arrive in time."""
        keys = {f"{name}/{number}": number for number in numbers}
        values = self.store.wait(keys, seconds)
        return {number: values[key] for key, number in keys.items() if key in values}

    def _answer(self, facts: Facts, folder: Path) -> None:
        present = self.store.wait(["present"], self.group.seconds + LEAVE_SECONDS).get("present")
        if present is None or self.group.machine not in present["machines"]:
            raise RuntimeError("machine 0 continued without this machine")
        offset = time.time() - present["clock"]
        self.store.put(f"sees/{self.group.machine}", {"ahead": offset, "mark": _sees_file(folder, present["mark"])})
        self.results.facts = dict.fromkeys(present["machines"], facts)

    def test_network(self) -> None:
        """Tests every pair of machines; then, if all pairs work, all ranks together."""
        group, store, present = self.group, self.store, sorted(self.results.facts)
        longest = 0.0
        if len(present) > 1:
            count = len(list(probing.rounds(present)))
            longest = probing.START_SECONDS + count * probing.PAIR_SECONDS * 2
            self._run([group.machine], "pairs", present, longest)
            if group.machine == 0:
                self.results.pairs = [self._pair(first, second) for first, second in combinations(present, 2)]
        if group.machine == 0:
            joins = self.results.can_join and self.results.ranks > 1
            store.put("all ranks", self.results.least_bandwidth if joins else None)
        bandwidth = store.wait(["all ranks"], longest + LEAVE_SECONDS).get("all ranks")
        if bandwidth is not None:
            own_ranks = range(group.machine * group.ranks_each, (group.machine + 1) * group.ranks_each)
            longest = probing.START_SECONDS + 2 * probing.COLLECTIVE_SECONDS
            self._run(own_ranks, "collectives", list(range(self.results.ranks)), longest, bandwidth)
            if group.machine == 0:
                self._collect_collectives()

    def _run(
        self, numbers: Sequence[int], task: str, members: list[int], seconds: float, bandwidth: float = 0.0
    ) -> None:
        """Starts this machine's processes for a task, and ends those that hang."""
        group = self.group
        address = replace(group.address, port=self.store.port, hosts=False)
        started: list[subprocess.Popen[bytes]] = []
        with tempfile.TemporaryFile() as output:
            try:
                for local_rank, number in enumerate(numbers):
                    device = f"cuda:{local_rank}" if group.on_gpus else "cpu"
                    process_task = probing.Task(task, address, number, members, device, bandwidth)
                    words = python_child.module(probing.__name__, json.dumps(asdict(process_task)))
                    env = {**os.environ, "OMP_NUM_THREADS": "1"}
                    started.append(
                        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output, stderr=output, env=env)
                    )
                deadline = time.monotonic() + seconds
                for process in started:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(deadline - time.monotonic(), 0))
            finally:
                for process in started:
                    process.kill()
                    process.wait()

    def _pair(self, first: int, second: int) -> probing.PairResult:
        """The results that both machines have written."""
        keys = [probing.pair_key(first, second, side) for side in range(2)]
        results = self.store.wait(keys, 1.0)
        sides = [probing.PairResult(**results[key]) if key in results else None for key in keys]
        return (sides[0] or probing.PairResult(first, second, error=NO_ANSWER)).with_other(sides[1])

    def _collect_collectives(self) -> None:
        results, store = self.results, self.store
        answers = store.wait(map(probing.done_key, range(results.ranks)), LEAVE_SECONDS)
        for rank in range(results.ranks):
            failure = answers.get(
                probing.done_key(rank), f"{store.get(probing.at_key(rank)) or 'the start'}: {NO_ANSWER}"
            )
            if failure:
                results.failed_ranks[rank] = failure
        results.communicated = not results.failed_ranks
        sizes = probing.sizes(self.group.on_gpus, results.least_bandwidth)
        keys = [probing.collective_key(name, size) for name in probing.COLLECTIVES for size in sizes]
        results.collectives = [probing.CollectiveResult(**result) for key in keys if (result := store.get(key))]

    def end(self, healthy: bool) -> bool:
        """Publishes machine 0's result and waits until the others have read it; on the others, returns that result."""
        if self.group.machine == 0:
            self.store.put("healthy", [healthy, self.results.communicated])
            self._from_machines("left", filter(None, self.results.facts), LEAVE_SECONDS)
            return healthy
        healthy_all, self.results.communicated = self.store.wait(["healthy"], self.group.seconds).get(
            "healthy", (False, False)
        )
        self.store.put(f"left/{self.group.machine}", True)
        return healthy and bool(healthy_all)


def _sees_file(folder: Path, mark: str) -> bool:
    """Whether this machine sees machine 0's file; true if there is none."""
    return comes_true(lambda: not mark or (atomic_files.existing_part(folder) / mark).exists(), FOLDER_SECONDS)
