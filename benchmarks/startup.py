"""How long a user waits for the first sign of life: `python benchmarks/startup.py --write`.

Medians of 9, as multiples of an empty Python process and of importing torch, beside Accelerate's own command line. One
start of each comes first, which leaves bytecode behind and files in memory.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pexpect
import results

ROOT = Path(__file__).parent.parent
REPEATS = 9
FILE = str(ROOT / "accelerate_configs" / "fsdp2.yaml")
TOOL = [str(Path(sys.executable).with_name("accel-fsdp"))]
MODEL = ["plan", "--model", "llama-3.1-8b", "--seq-len", "4096"]
MACHINES = "8xH100,16xA100-40GB,8xRTX4090,2x8xH200,1xT4,8xL40S,4x8xB200,64x8xH100"


def finished(*words: str) -> Callable[[], None]:
    """Runs a command to its end."""
    return lambda: subprocess.run(words, capture_output=True, cwd=ROOT, check=False) and None


def first_prompt() -> None:
    """Starts the wizard in a terminal and waits for its first question."""
    child = pexpect.spawn(TOOL[0], [*TOOL[1:], "config", "-o", "never-written.yaml"], cwd=str(ROOT), encoding="utf-8")
    child.expect("Which model")
    child.close(force=True)


TORCH = "import torch"
CASES: dict[str, Callable[[], None]] = {
    "an empty Python process": finished(sys.executable, "-c", "pass"),
    "accel-fsdp --help": finished(*TOOL, "--help"),
    "accel-fsdp config, first question": first_prompt,
    "accel-fsdp check FILE": finished(*TOOL, "check", FILE),
    "accel-fsdp plan (bundled model)": finished(*TOOL, *MODEL, "--gpus", "8xH100-80GB"),
    "accel-fsdp plan for 1,024 GPUs": finished(*TOOL, *MODEL, "--gpus", "128x8xH100-80GB"),
    "accel-fsdp plan --compare of 8 machines": finished(*TOOL, *MODEL, "--compare", MACHINES),
    TORCH: finished(sys.executable, "-c", "import torch"),
    "accelerate --help": finished(sys.executable, "-m", "accelerate.commands.accelerate_cli", "--help"),
}


def seconds(case: Callable[[], None]) -> float:
    """The median time of one case."""
    case()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        case()
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    """Prints the table, and keeps it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    times = {name: seconds(case) for name, case in CASES.items()}
    empty, torch = next(iter(times.values())), times[TORCH]
    rows = [f"| {name} | {taken:.2f} | {taken / empty:.1f} | {taken / torch:.2f} |" for name, taken in times.items()]
    print("\n".join(rows))
    if write:
        head = ["## Startup", "", f"`python benchmarks/startup.py --write`: medians of {REPEATS}, files in memory.", ""]
        results.keep(
            "startup",
            [*head, "| | seconds | times an empty process | times import torch |", "|---|---|---|---|", *rows],
        )


if __name__ == "__main__":
    main()
