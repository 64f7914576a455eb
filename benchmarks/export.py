"""`accel-fsdp export` against `accelerate merge-weights`: `python benchmarks/export.py [--sizes 1 4 8] [--write]`.

Both merge the same checkpoints of random Llamas, whole commands with all imports, in turns, best of `--repeat`; neither
waits for the disk, and each begins with the checkpoint in the page cache and nothing left to write. Memory is the peak
of all processes of a command together. The durable export is held against what `dd conv=fdatasync` writes.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import results

RANKS = (2, 8, 64)
POLL_SECONDS = 0.02
EXPORT = (sys.executable, "-m", "accel_fsdp", "export")
MERGE = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights")


@dataclass(frozen=True)
class Measured:
    """One command: wall seconds, the peak of its processes' resident memory, and CPU seconds outside of the kernel."""

    seconds: float
    peak_bytes: int
    user_seconds: float


def measured(commands: Sequence[Sequence[str | Path]], inner: Path, out: Path, repeat: int) -> list[Measured]:
    """The fastest run of each command, in turns; what they write is removed."""
    runs: list[list[Measured]] = [[] for _ in commands]
    for _ in range(repeat):
        for words, of_command in zip(commands, runs, strict=True):
            for path in inner.iterdir():  # merging 8 GB takes 24 GB, and pushes the checkpoint out of the page cache
                subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
            of_command.append(once(words, out))
    return [min(of_command, key=lambda run: run.seconds) for of_command in runs]


def once(words: Sequence[str | Path], out: Path) -> Measured:
    """Runs a command on a disk that has nothing left to write."""
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as output:
        process = psutil.Popen([str(word) for word in words], stdout=output, stderr=output, env=env)
        while process.poll() is None:
            peak = max(peak, _resident(process))
            time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - started
        output.seek(0)
        assert process.returncode == 0, output.read().decode()
    shutil.rmtree(out, ignore_errors=True)
    return Measured(seconds, peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)


def _resident(process: psutil.Popen) -> int:
    total = 0
    for child in (process, *process.children(recursive=True)):
        try:
            total += child.memory_info().rss
        except psutil.Error:
            continue
    return total


def write_run(folder: Path, size_gb: float, ranks: int) -> Path:
    """The inner folder of a checkpoint, made by a process of its own."""
    call = f"sharded.make(Path({str(folder)!r}), sharded.llama({size_gb}), {ranks})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
    subprocess.run(
        [sys.executable, "-c", f"import sharded; from pathlib import Path; {call}"],
        check=True,
        env=env,
        capture_output=True,
    )
    return folder / "checkpoint-1" / "pytorch_model_fsdp_0"


def compare(place: Path, size_gb: float, repeat: int) -> str:
    """One row: both tools on one checkpoint."""
    inner, out = write_run(place / "run", size_gb, 2), place / "out"
    export = [*EXPORT, inner, out, "--no-sync", "--dtype"]
    kinds = (["float32", "--verify", "bytes"], ["bfloat16", "--verify", "bytes"], ["float32"])
    merge, *exports = measured([[*MERGE, inner, out], *([*export, *kind] for kind in kinds)], inner, out, repeat)
    shutil.rmtree(place / "run")
    cells = [f"{size_gb:g} GB", f"{merge.seconds:.1f} s, {merge.peak_bytes / 1e9:.2f} GB"]
    cells += [
        f"{run.seconds:.1f} s, **{merge.seconds / run.seconds:.1f}x**, {run.peak_bytes / 1e9:.2f} GB" for run in exports
    ]
    return "| " + " | ".join(cells) + " |"


def durable(place: Path, size_gb: float, repeat: int) -> str:
    """What the disk takes, and how much of it the default export reaches."""
    inner, out = write_run(place / "run", size_gb, 2), place / "out"
    count = sum(path.stat().st_size for path in inner.glob("*.distcp"))
    copy = ["dd", "if=/dev/zero", f"of={place / 'zeros'}", "bs=16M", f"count={count >> 24}", "conv=fdatasync"]
    raw, streamed, proven = [], [], []
    for _ in range(repeat):
        raw.append(once(copy, place / "none").seconds)
        (place / "zeros").unlink()
        export = [*EXPORT, inner, out, "--dtype", "float32"]
        streamed.append(once([*export, "--verify", "bytes"], out).seconds)
        proven.append(once(export, out).seconds)
    shutil.rmtree(place / "run")
    disk, ours, checked = (count / min(seconds) / 1e9 for seconds in (raw, streamed, proven))
    return (
        f"Durable, {size_gb:g} GB to float32, where `dd conv=fdatasync` writes {disk:.2f} GB/s: {ours:.2f} GB/s with "
        f"`--verify bytes`, **{ours / disk:.0%}** of it; {checked:.2f} GB/s with all checks, **{checked / disk:.0%}**."
    )


def by_ranks(place: Path, size_gb: float, repeat: int) -> str:
    """The same model written by more ranks, read in turns that begin with another each time."""
    inner, out = {ranks: write_run(place / f"run-{ranks}", size_gb, ranks) for ranks in RANKS}, place / "out"
    fast = ("--no-sync", "--dtype", "float32", "--verify", "bytes")
    runs_by_ranks: dict[int, list[Measured]] = {ranks: [] for ranks in RANKS}
    for turn in range(2 * repeat):
        for ranks in (*RANKS[turn % len(RANKS) :], *RANKS[: turn % len(RANKS)]):
            runs_by_ranks[ranks].append(once([*EXPORT, inner[ranks], out, *fast], out))
    wall = ", ".join(f"{ranks} ranks {min(run.seconds for run in runs_by_ranks[ranks]):.1f} s" for ranks in RANKS)
    user = ", ".join(f"{min(run.user_seconds for run in runs_by_ranks[ranks]):.2f}" for ranks in RANKS)
    return f"{size_gb:g} GB written by {wall}; outside of the kernel {user} s of a core."


def main() -> None:
    """Prints the table; with --write keeps it in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="*", default=[1, 4, 8])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--ranks-size", type=float, default=4)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = [
        "| float32, 2 ranks | `accelerate merge-weights` | to float32 | to bfloat16 | float32, all checks |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix="export-") as name:
        place = Path(name)
        for size in options.sizes:
            lines.append(compare(place, size, options.repeat))
            print(lines[-1], flush=True)
        if options.ranks_size:
            for measure in (durable, by_ranks):
                text = measure(place, options.ranks_size, options.repeat)
                lines += ["", text]
                print(text, flush=True)
    if options.write:
        write(lines)


def write(lines: list[str]) -> None:
    """Replaces this benchmark's part of RESULTS.md."""
    head = ["## Export against `accelerate merge-weights`", "", "`python benchmarks/export.py --write`", ""]
    notes = [
        "",
        "Whole commands on 2 cores, float32 and bfloat16 with `--verify bytes`: checksums and hashes. Wall times are",
        "the best of several. In a virtual machine those of writers depend on whether the host has taken back the",
        "memory that the run before freed: half a second of sleep before the first write costs the 2-rank export one.",
    ]
    results.keep("export", [*head, *lines, *notes])


if __name__ == "__main__":
    main()
