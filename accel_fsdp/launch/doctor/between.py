"""Judges the connections between machines, from the facts of each and from measurements."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accel_fsdp.launch import agreement
from accel_fsdp.launch.doctor.facts import Facts
from accel_fsdp.launch.doctor.network_tests import BUSY, NetworkResults
from accel_fsdp.launch.doctor.probing import PAIR_SECONDS, SMALL_BYTES, PairResult
from accel_fsdp.launch.doctor.rows import Row, Verdict
from accel_fsdp.units import counted, kib_or_mib, per_second

CLOCK_SECONDS = 1.0
SLOW_LINK = 125e6 / 2
"""Bytes per second of half a link of 1 Gbit/s: too slow to train over, whatever the other pairs have."""
PER_MACHINE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PET_NODE_RANK", "CUDA_VISIBLE_DEVICES")
"""Variables that may differ between machines."""
LOSSY, LEAST_RESENT = 0.01, 20
"""Packets count as lost from this share, and this number, of retransmitted TCP segments."""
PING = (
    "ping -M do -s 1472 HOST between them shows it, and with a smaller -s the size that passes: 28 more than that is "
    "the MTU to set on both, on the interface that ip route get HOST names; or the network's MTU everywhere"
)


def judge(results: NetworkResults) -> list[Row]:
    checks: tuple[Callable[[NetworkResults], Iterator[Row]], ...] = (
        _missing,
        _differing_counts,
        _versions,
        _hardware,
        _variables,
        _clocks,
        _folder,
        _pairs,
        _collectives,
    )
    return [row for check in checks for row in check(results)]


def _missing(results: NetworkResults) -> Iterator[Row]:
    for machine in results.missing:
        what = f"machine {machine} has not connected"
        why = "the command wasn't started there, has ended, can't reach machine 0, or was given another number"
        fix = f"accel-fsdp doctor there; its --machine-rank must be {machine}, and the port of machine 0 be open"
        yield Row("machines", "error", what, why, fix)
    if not results.missing and len(results.facts) > 1:
        yield Row("machines", "ok", ", ".join(f"{number} is {facts.name}" for number, facts in results.facts.items()))


def _differing(results: NetworkResults, setting_of: Callable[[Facts], Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The names of the settings that differ between machines, with the values and their machines."""
    for diff in agreement.differences({number: {"": setting_of(facts)} for number, facts in results.facts.items()}):
        values = (
            f"{value} on {counted(len(machines), 'machine')} ({', '.join(map(str, machines))})"
            for value, machines in diff.values.items()
        )
        yield diff.name, "; ".join(values)


def _differing_counts(results: NetworkResults) -> Iterator[Row]:
    for name, values in _differing(results, lambda facts: facts.asks_for):
        why = "some ranks would wait for others that never start"
        yield Row("job", "error", f"{name}: {values}", why, "the same YAML and flags on all machines")


def _versions(results: NetworkResults) -> Iterator[Row]:
    differing = list(_differing(results, lambda facts: {"python": facts.python, **facts.versions}))
    for name, values in differing:
        why = "ranks of different code hang, or disagree on what they send"
        fix = "the same environment on all machines: a shared folder or an image"
        yield Row("versions", "error", f"{name}: {values}", why, fix)
    if not differing and len(results.facts) > 1:
        yield Row("versions", "ok", "the same on all machines")


def _hardware(results: NetworkResults) -> Iterator[Row]:
    counts = {len(facts.gpus) for facts in results.facts.values()}
    for _, values in _differing(results, lambda facts: {"GPUs": facts.gpus_in_words}):
        why = "each machine starts as many ranks as the others" if len(counts) > 1 else "all wait for the slowest"
        yield Row("GPUs", "error" if len(counts) > 1 else "warning", values, why, "machines of one kind")


def _variables(results: NetworkResults) -> Iterator[Row]:
    for name, values in _differing(results, lambda facts: facts.variables):
        if name not in PER_MACHINE:
            why = "the ranks of one machine may compute or send something else"
            verdict: Verdict = "error" if agreement.is_compared(name) else "warning"
            yield Row("variables", verdict, f"{name}: {values}", why, f"export {name} alike on all machines")


def _clocks(results: NetworkResults) -> Iterator[Row]:
    for number, ahead in results.clock_seconds.items():
        if abs(ahead) > CLOCK_SECONDS:
            what = f"machine {number} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} machine 0"
            why = "logs can't be compared, and of several checkpoints the newest may be another"
            yield Row("clocks", "warning", what, why, "timedatectl set-ntp true")


def _folder(results: NetworkResults) -> Iterator[Row]:
    if results.folder_unseen:
        what = f"a file of machine 0 isn't seen by {', '.join(f'machine {number}' for number in results.folder_unseen)}"
        why = "each machine's shards of a checkpoint would be on its own disk, and no resume would find all"
        fix = "--output_dir, and --folder here, in a folder that all machines share"
        yield Row("folder", "warning", what, why, fix)


def _pairs(results: NetworkResults) -> Iterator[Row]:
    failed = [pair for pair in results.pairs if pair.error]
    dead, slow = _unreachable_machines(results, failed), results.slow_machines()
    for machine in dead:
        pair = next(pair for pair in failed if machine in (pair.first, pair.second))
        yield _unreachable(f"machine {machine}", "none of the others reaches it, or it ended", pair)
    for pair in failed:
        if not {pair.first, pair.second} & set(dead):
            is_silent = not pair.failed_bytes
            yield _unreachable(_name(pair), "they can't reach each other", pair) if is_silent else _cut_off(pair)
    yield from (_slow_machine(results, machine) for machine in slow)
    for pair in results.pairs:
        if not pair.error and not {pair.first, pair.second} & set(slow):
            yield from _speed_row(pair)


def _unreachable_machines(results: NetworkResults, failed: list[PairResult]) -> list[int]:
    """The machines, of three or more, that reach no other machine while others do."""
    if len(results.facts) < 3 or len(failed) == len(results.pairs):
        return []
    return [
        number for number in results.facts if all(p in failed for p in results.pairs if number in (p.first, p.second))
    ]


def _name(pair: PairResult) -> str:
    return f"machines {pair.first} and {pair.second}"


def _unreachable(subject: str, what: str, pair: PairResult) -> Row:
    first = pair.error.strip().splitlines()[0] if pair.error.strip() else "no answer"
    fix = "another interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or a firewall that opens all ports above 1024"
    return Row(subject, "error", f"{what}: {first}", "ranks on them would hang", fix)


def _cut_off(pair: PairResult) -> Row:
    """The row for a message that didn't come back after smaller ones had."""
    arrived, failed = kib_or_mib(pair.arrived_bytes), kib_or_mib(pair.failed_bytes)
    what = f"a message of {failed} didn't come back in {PAIR_SECONDS:.0f} s"
    if not pair.arrived_bytes:
        return Row(_name(pair), "error", f"{what}, and single numbers did", "ranks on them would hang", PING)
    if pair.arrived_bytes <= SMALL_BYTES:
        why = (
            "packets of full size are lost on the way: often a switch or tunnel carries a smaller MTU than the machines"
        )
        return Row(_name(pair), "error", f"messages of {arrived} come back, and {what}", why, PING)
    slow = per_second(2 * pair.failed_bytes / PAIR_SECONDS)
    why = f"the link carries less than {slow}, or it was cut meanwhile"
    return Row(
        _name(pair),
        "error",
        f"{what}, and one of {arrived} did",
        why,
        "ethtool of the interface that ip route get HOST names; another interface",
    )


def _slow_machine(results: NetworkResults, machine: int) -> Row:
    fastest = per_second(max(pair.bytes_per_second for pair in results.pairs if machine in (pair.first, pair.second)))
    others = per_second(
        max(pair.bytes_per_second for pair in results.pairs if machine not in (pair.first, pair.second))
    )
    what = f"{fastest} to the others at best, which have {others} between them"
    why = "all ranks wait for the slowest machine in each collective"
    fix = "ethtool eth0 there (its link may have come up slow); another job or a backup on its network; leave it out"
    return Row(f"machine {machine}", "error", what, why, fix)


def _speed_row(pair: PairResult) -> Iterator[Row]:
    what = f"{per_second(pair.bytes_per_second)}, {pair.latency_seconds * 1e6:,.0f} us"
    if pair.bytes_per_second >= SLOW_LINK:
        yield Row(_name(pair), "ok", what)
    elif pair.waited >= BUSY:
        what += f", while its processes waited for a CPU for {pair.waited:.0%} of the time"
        why = "other programs keep the machines busy, so the network wasn't measured"
        yield Row(_name(pair), "unknown", what, why, "accel-fsdp doctor again, when nothing else runs there")
    else:
        why = "a step sends the model's size several times: accel-fsdp plan says how long that takes"
        yield Row(_name(pair), "warning", what, why, "another interface: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME")
    if pair.resent >= max(LEAST_RESENT, LOSSY * pair.segments):
        share = pair.resent / pair.segments
        what = f"{pair.resent:,} of {pair.segments:,} TCP segments ({share:.1%}) were sent again"
        why = "packets are lost on the way: a cable, a port, or a link with more to carry than it can"
        yield Row(_name(pair), "warning", what, why, "ip -s link and ethtool -S eth0 on both count errors and drops")


def _collectives(results: NetworkResults) -> Iterator[Row]:
    if results.ranks < 2:
        return
    if not results.can_join:
        yield Row("collectives", "unknown", "not tested: the machines can't form one job yet")
        return
    silent = [rank for rank, failure in results.failed_ranks.items() if failure.endswith("no answer")]
    for rank, failure in results.failed_ranks.items():
        if silent and rank not in silent:
            continue  # they failed because of the silent machines
        first, fix = failure.strip().splitlines()[0], "NCCL_DEBUG=INFO accel-fsdp doctor shows what NCCL tried"
        yield Row(f"rank {rank}", "error", first, "a job would hang or stop there", fix)
    if not results.failed_ranks:
        yield Row("collectives", "ok", f"{counted(results.ranks, 'rank')}: each collective gives the right result")
