"""What the hashes of a checkpoint's files cost, beside the save and the load that they go with.

    python benchmarks/hashes.py --gib 2 --write

By the clock: a sharded checkpoint written by torch and flushed to disk, then hashed as each rank does right after its
save; and before a resume, with nothing of it in memory (posix_fadvise), read by torch alone, and hashed first.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import results
import torch
import torch.distributed.checkpoint as dcp

from accel_fsdp import atomic_files
from accel_fsdp.checkpoints import Origin, completeness, marker
from accel_fsdp.units import GIB

TENSORS = 16


def seconds(act: Callable[[], object]) -> float:
    """By the clock."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def drop_from_memory(folder: Path) -> None:
    """So that the next one who reads waits for the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def once(gib: float, place: Path) -> dict[str, float]:
    """One save and one load."""
    folder = place / "checkpoint-1"
    state = {f"layer.{number}": torch.rand(int(gib * GIB) // 4 // TENSORS) for number in range(TENSORS)}

    def save() -> None:
        completeness.begin(folder)
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        atomic_files.sync_folder(folder)

    names = lambda: [path.name for path in folder.iterdir()]  # noqa: E731
    times = {"save": seconds(save), "hash": seconds(lambda: marker.hashes_of(folder, names()))}
    completeness.seal(folder, Origin("FSDP"))
    drop_from_memory(folder)
    times["load"] = seconds(lambda: dcp.load(state, checkpoint_id=folder, no_dist=True))
    drop_from_memory(folder)

    def checked() -> None:
        assert marker.damage(folder) == ""
        dcp.load(state, checkpoint_id=folder, no_dist=True)

    times["checked load"] = seconds(checked)
    shutil.rmtree(folder)
    return times


def main() -> None:
    """Prints the table, and keeps it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hashes-", dir=Path.cwd()) as place:
        turns = [once(given.gib, Path(place)) for _ in range(given.turns)]
    took = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    lines = [
        "## Hashes of a checkpoint's files",
        "",
        f"`python benchmarks/hashes.py --gib {given.gib:g} --write`",
        "",
        f"One process, {os.cpu_count()} CPU cores, a checkpoint of {given.gib:g} GiB; medians of {given.turns} turns.",
        "",
        "| | seconds | with hashes | more |",
        "|---|---|---|---|",
        f"| save, flushed to disk | {took['save']:.2f} | {took['save'] + took['hash']:.2f} "
        f"| {took['hash'] / took['save']:.1%} |",
        f"| load, nothing in memory before | {took['load']:.2f} | {took['checked load']:.2f} "
        f"| {took['checked load'] / took['load'] - 1:.1%} |",
    ]
    print("\n".join(lines))
    if given.write:
        results.keep("hashes", lines)


if __name__ == "__main__":
    main()
