"""Kills training at random instants and resumes it: `python benchmarks/kills.py [--write]`, about half an hour.

A chain is one run of `train/sft.py` on CPU processes under one engine and method; one changes between two and four
ranks. SIGKILL ends all ranks at once, at a random instant of training or as soon as a checkpoint is half-written, the
last chain's in the store to which it uploads; there its disk is lost as well. At last the run goes to its end. Each
resume must start from the newest complete checkpoint, the losses of the whole run must be those of one that was never
killed, and no half-written checkpoint may be left. What a run does is read from its folder and its output.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import results
from children import environment
from saving import write_model

from accel_fsdp.checkpoints import completeness
from accel_fsdp.wizard import interview, to_yaml

SFT = Path(__file__).parent.parent / "train" / "sft.py"
SEED, STEPS, SAVE_STEPS, ROWS = 20240817, 120, 3, 4
LIFE_SECONDS = 180
STEP = re.compile(r"^step (\d+)/", re.MULTILINE)


@dataclass(frozen=True)
class Chain:
    """A run: its number of ranks in turn, and the kills at random instants, in saves and in uploads."""

    name: str
    version: str
    kills: Mapping[str, int]
    ranks: Sequence[int] = (2,)
    words: Sequence[str] = ()


CHAINS = (
    Chain("FSDP1, full", "1", {"any": 2, "save": 3}),
    Chain("FSDP2, full", "2", {"any": 2, "save": 3}),
    Chain("FSDP2, LoRA", "2", {"any": 2, "save": 2}, words=("--use_peft",)),
    Chain("FSDP2 on 2 and 4 ranks in turn", "2", {"any": 2, "save": 3}, ranks=(2, 4)),
    Chain(
        "FSDP2, in the background, to a store", "2", {"any": 2, "save": 3, "upload": 3}, words=("--async_checkpoints",)
    ),
)


class Run:
    """A chain's run in a folder, killed again and again."""

    def __init__(self, chain: Chain, work: Path) -> None:
        self.chain, self.work = chain, work
        write_model(work / "model", 1.2e6, width=64)
        rows = (json.dumps({"text": f"{number} " * (3 + number % 9)}) for number in range(STEPS * ROWS))
        (work / "rows.jsonl").write_text("\n".join(rows) + "\n")

    def start(self, run: str, ranks: int) -> "subprocess.Popen[str]":
        """A launch that goes on from the newest complete checkpoint; its output goes to a file."""
        flags = {"model": str(self.work / "model"), "num_processes": str(ranks), "fsdp_version": self.chain.version}
        answers = interview.answers(interview.interview({**flags, "mixed_precision": "no"}, {}, defaults=True))
        (yaml := self.work / "job.yaml").write_text(to_yaml.to_text(answers))
        fixed = {
            **{"model_name_or_path": self.work / "model", "dataset_name": self.work / "rows.jsonl"},
            **{"output_dir": self.work / run, "max_steps": STEPS, "save_steps": SAVE_STEPS, "save_total_limit": 2},
            **{"per_device_train_batch_size": ROWS // ranks, "learning_rate": 1e-3, "logging_steps": 1},
            **{"disable_tqdm": "true", "resume_from_checkpoint": "auto"},
        }
        if "upload" in self.chain.kills:
            fixed["checkpoint_uri"] = f"file://{self.work}/store/{run}"
        words = [word for name, value in fixed.items() for word in (f"--{name}", str(value))]
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
        with (self.work / "output").open("w") as output:
            return subprocess.Popen(
                [*launch, str(yaml), str(SFT), *words, *self.chain.words],
                env=environment(OMP_NUM_THREADS="1"),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    @property
    def output(self) -> str:
        return (self.work / "output").read_text()

    def newest(self) -> int:
        """The step of the newest complete checkpoint, here or in the store."""
        found = (completeness.choose(place / "killed").newest for place in (self.work, self.work / "store"))
        return max(completeness.step_of(checkpoint) if checkpoint else 0 for checkpoint in found)

    def half_written(self, place: Path) -> list[Path]:
        return [path for path in place.glob("checkpoint-*") if completeness.flaw(path)]

    def killed(self, kind: str, ranks: int, delay: float) -> dict[str, int]:
        """Starts or resumes the run and kills it, at an instant of that kind; what it lost and left."""
        before = self.newest()
        place = (self.work / "store" if kind == "upload" else self.work) / "killed"
        known = set(self.half_written(place))
        launcher = self.start("killed", ranks)
        deadline = time.monotonic() + LIFE_SECONDS
        while not STEP.search(self.output) or (kind != "any" and not set(self.half_written(place)) - known):
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.chain.name}, {kind}: {self.output[-3000:]}")
            time.sleep(0.002)
        time.sleep(delay if kind == "any" else 0)
        for process in psutil.Process(launcher.pid).children(recursive=True):
            process.kill()
        launcher.wait()
        half = len(self.half_written(self.work / "killed")) + len(self.half_written(self.work / "store" / "killed"))
        if kind == "upload":
            shutil.rmtree(self.work / "killed")
        steps = [int(step) for step in STEP.findall(self.output)]
        row = {"before": before, "resumed": min(steps) - 1, "half": half, "lost": max(steps) - self.newest()}
        print(self.chain.name, kind, row, flush=True)
        return row

    def losses(self, run: str) -> list[float]:
        """All losses of a run that has gone to its end."""
        return [
            entry["loss"] for entry in completeness.logged(self.work / run / f"checkpoint-{STEPS}") if "loss" in entry
        ]

    def lived(self) -> str:
        """The chain's row of the table."""
        dice = random.Random(SEED)
        kinds = [kind for kind, count in self.chain.kills.items() for _ in range(count)]
        dice.shuffle(kinds)
        ranks = [self.chain.ranks[number % len(self.chain.ranks)] for number in range(len(kinds) + 1)]
        kills = [self.killed(kind, count, dice.uniform(0, 1)) for kind, count in zip(kinds, ranks, strict=False)]
        for run in ("killed", "straight"):
            if self.start(run, ranks[-1]).wait(LIFE_SECONDS):
                raise RuntimeError(self.output[-3000:])
        left = sorted(path.name for path in (self.work / "killed").iterdir() if "checkpoint" in path.name)
        assert left == [f"checkpoint-{step}" for step in (STEPS - SAVE_STEPS, STEPS)], left
        apart = max(abs(a - b) for a, b in zip(self.losses("killed"), self.losses("straight"), strict=True))
        right = sum(kill["resumed"] == kill["before"] for kill in kills)
        half, lost = sum(kill["half"] > 0 for kill in kills), max(kill["lost"] for kill in kills)
        return f"| {self.chain.name} | {len(kills)} | {half} | {right}/{len(kills)} | {lost} | {apart:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = []
    for chain in CHAINS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(Run(chain, Path(folder)).lived())
            print(rows[-1], flush=True)
    table = [
        "## Kills",
        "",
        "`python benchmarks/kills.py --write`",
        "",
        f"SIGKILL to all ranks; seed {SEED}, a checkpoint every {SAVE_STEPS} steps of {STEPS}.",
        "",
        "| run | kills | left half-written | resumed from the newest complete | steps lost, most | losses apart |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    print("\n".join(table))
    if options.write:
        results.keep("kills", table)


if __name__ == "__main__":
    main()
