"""What the light installation saves: `make dist`, then `python benchmarks/installation.py`.

Installs each set into a new virtual environment with the tested versions, and runs the same commands there, beside
Accelerate alone. Downloads are part of the time, and depend on the network and on pip's cache.
"""

import subprocess
import sys
import tempfile
import time
from importlib.metadata import Distribution, distributions
from pathlib import Path
from statistics import median

from results import keep

ROOT = Path(__file__).parent.parent
WHEEL = next((ROOT / "dist").glob("*.whl"), None)
SETS = {
    "light: the wheel alone": [[f"{WHEEL}"]],
    "whole: the wheel with `[train]`": [["torch"], [f"{WHEEL}[train]"]],
    "`pip install accelerate`": [["torch"], ["accelerate"]],
}
HELP = ["--help"]
CHECK = ["check", str(ROOT / "accelerate_configs" / "fsdp2.yaml")]
PLAN = ["plan", "--model", "llama-3.1-8b", "--gpus", "8xH100-80GB"]
REPEATS = 5
NOT_OURS = {"pip", "setuptools"}


def seconds(*words: str | Path) -> float:
    """How long a command takes that must succeed."""
    start = time.perf_counter()
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    return time.perf_counter() - start


def unpacked_bytes(distribution: Distribution) -> int:
    """What pip unpacked of a distribution, without the bytecode that Python makes of it."""
    paths = (Path(str(distribution.locate_file(part))) for part in distribution.files or () if part.suffix != ".pyc")
    return sum(path.stat().st_size for path in paths if path.is_file())


def row(name: str, steps: list[list[str]], folder: Path) -> str:
    """Installs a set and measures it."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    took = sum(seconds(*pip, *step) for step in steps)
    site = str(next(folder.glob("lib/python*/site-packages")))
    installed = [
        distribution for distribution in distributions(path=[site]) if distribution.metadata["Name"] not in NOT_OURS
    ]
    size = sum(map(unpacked_bytes, installed))
    command = folder / "bin" / "accel-fsdp"
    program, runs = (command, (HELP, CHECK, PLAN)) if command.exists() else (command.with_name("accelerate"), (HELP,))
    times = [f"{median(seconds(program, *words) for _ in range(REPEATS)):.2f} s" for words in runs]
    shown = " | ".join([*times, *["-"] * (3 - len(times))])
    return f"| {name} | {len(installed)} | {size / 1e6:,.0f} MB | {took:.0f} s | {shown} |"


def main() -> None:
    """Measures all sets and keeps the table."""
    lines = ["## Installation", "", *(__doc__ or "").strip().splitlines()[2:], ""]
    if WHEEL is None:
        raise SystemExit("dist/ has no wheel: make dist")
    lines += [f"The wheel, {WHEEL.name}, has {WHEEL.stat().st_size / 1e6:.1f} MB.", ""]
    lines += ["| set | packages | unpacked | installed in | `--help` | `check FILE` | `plan` |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, steps in SETS.items():
        with tempfile.TemporaryDirectory() as folder:
            lines.append(row(name, steps, Path(folder)))
            print(lines[-1], flush=True)
    keep("installation", [*lines, "", "`unpacked` is without pip and without bytecode. torch is a build for CPUs."])


if __name__ == "__main__":
    main()
