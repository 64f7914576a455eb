"""The steps of a rehearsal with `train/sft.py`, in order. Each returns what it proved, or raises why it failed."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints import completeness, file_names
from accel_fsdp.config import EXPERT_FIELD, SCRIPT, Engine, JobConfig
from accel_fsdp.models import config_json
from accel_fsdp.rehearsal import mistakes, repeated, scaled, verdict
from accel_fsdp.rehearsal.blame import Failure, judge, of_outcome
from accel_fsdp.rehearsal.job import Outcome, Rehearsed
from accel_fsdp.rehearsal.prepare import Prepared
from accel_fsdp.rehearsal.small_run import PLACES, SAVED, STEPS, SmallRun, readable, replaced
from accel_fsdp.training.reporting import run_record
from accel_fsdp.units import counted

EXACT = 1e-4
"""The relative tolerance of losses in float32: the order of sums differs."""
EXACT_LOGITS = 1e-3
"""The tolerance of logits: Adam turns the rounding of a gradient near zero into a whole step. 1.3e-4 was measured."""
ROUNDED = 2e-2
"""The tolerance of both in 16 bits, after updates at a rehearsal's rate: each layer and norm rounds to 3 digits."""
AUTOCAST = 2e-4
"""The tolerance of 16-bit losses before weights differ: random rounding cancels out over a step's tokens."""
AUTOCAST_MIXTURE = 1.5e-3
"""AUTOCAST for mixtures of experts: rounding sends some tokens to another expert. 1e-3 was measured with 32 tokens."""
WRITTEN: Mapping[str, str] = {"max_steps": "2", "save_strategy": "no", "learning_rate": "1e-8"}
"""Arguments in the YAML's precision; the rate hardly changes weights, as ZeRO's bfloat16 weights lose small updates."""
WRITTEN_ROWS = 8
"""Rows per rank and step in the YAML's precision: more tokens than bfloat16 can count one by one."""
READS = "accel_fsdp.rehearsal.read_arguments"


@dataclass(frozen=True)
class SftRehearsal:
    """`given` are the user's own arguments."""

    launcher: Rehearsed
    small: Prepared
    given: tuple[str, ...]

    def steps(self) -> Iterator[tuple[str, Any]]:
        """Yields each step's name and function, which returns what it proved or raises `Failure`."""
        yield "read the arguments", self.read_arguments
        if self.precision != "no":
            yield f"train in {self.precision}", self.train_as_written
        yield "train and save", self.train_and_save
        yield "resume after SIGKILL", self.resume
        yield "compare with one process", self.compare
        if self.job.engine is not Engine.DEEPSPEED:
            yield f"resume on {counted(self.fewer_ranks, 'rank')}", self.resume_on_fewer_ranks
        yield "export", self.export
        yield "reload", self.reload

    @property
    def job(self) -> JobConfig:
        return self.small.job

    @property
    def run(self) -> SmallRun:
        return self.small.run

    @property
    def ranks(self) -> int:
        return self.job.number("num_processes")

    def rows_for(self, ranks: int, each: int) -> int:
        """The rows for each of `ranks`, which take as many together as those of the mesh with `each`."""
        return each if ranks == self.ranks else self.small.layout.rows_of_all(each) // ranks

    @property
    def precision(self) -> str:
        return str(self.job.top("mixed_precision"))

    @property
    def fewer_ranks(self) -> int:
        return self.ranks // 2

    @cached_property
    def in_float32(self) -> JobConfig:
        """The job without mixed precision, so that losses can be compared."""
        return self.job if self.run.quantized else JobConfig({**self.job.values, "mixed_precision": "no"})

    @property
    def tolerance(self) -> float:
        return ROUNDED if self.run.quantized and self.precision != "no" else EXACT

    @property
    def autocast_tolerance(self) -> float:
        settings = config_json.settings_in(self.small.model.folder)
        parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]
        counts = [part.get(name) or 0 for part in parts for name in config_json.EXPERTS]
        return AUTOCAST_MIXTURE if max(counts) > 1 else AUTOCAST

    def read_arguments(self) -> str:
        """Reads all of the user's arguments as the real job would; later steps replace some of them."""
        places = (word for name, value in self._places("read").items() for word in (f"--{name}", value))
        words = [*readable(self.given), *places]
        outcome = self.launcher.python("read", READS, words, ACCELERATE_MIXED_PRECISION=self.precision)
        if outcome.code:
            raise of_outcome(outcome)
        flags = replaced(self.given)
        return f"{SCRIPT} takes them" + (f"; set or left out here: {', '.join(flags)}" if flags else "")

    def train_as_written(self) -> str:
        """Trains two steps in the YAML's precision; in bfloat16 compares losses with one process under autocast."""
        outcome = self._launch("written", self.job, self._words_as_written("written", self.ranks))
        if not outcome.losses or not all(map(math.isfinite, outcome.losses)):
            raise Failure(f"losses {outcome.losses}", key="mixed_precision", fix="bf16, which has the range of float32")
        sharded = self._check_shards(outcome)
        if self.precision != "bf16" or self.run.draws_noise:
            return sharded
        self._launch("autocast", self._one_process_job(self.precision), self._words_as_written("autocast", 1))
        losses, alone = (dict(enumerate(self._logged_losses(name), 1)) for name in ("written", "autocast"))
        return f"{sharded}; {_compare_losses(losses, alone, range(1, len(alone) + 1), self.autocast_tolerance)}"

    def train_and_save(self) -> str:
        """Trains up to a checkpoint; then every process is killed."""
        checkpoint = self._output("run") / f"{file_names.CHECKPOINT}{SAVED}"
        words = self._words("run", self.ranks)
        outcome = self._launch("saved", self.in_float32, words, kill_after=checkpoint)
        if flaw := completeness.flaw(checkpoint):
            raise Failure(f"{checkpoint.name} is not complete: {flaw}", output=outcome.tail)
        shutil.copytree(checkpoint, self._output("elsewhere") / checkpoint.name)
        shutil.copytree(self._output("run"), self._output("killed"))
        return self._check_shards(outcome)

    def resume(self) -> str:
        """Trains from that checkpoint to the end, on the same number of ranks."""
        behind = str(self.run.saves_in_background).lower()
        words = self._words("run", self.ranks, resume_from_checkpoint="true", async_checkpoints=behind)
        outcome = self._launch("resumed", self.in_float32, words)
        losses = self._losses("run")
        repeated_steps = repeated.summary(outcome.events)
        return f"steps {SAVED + 1} to {STEPS}, loss {losses[SAVED + 1]:.4f} -> {losses[STEPS]:.4f}{repeated_steps}"

    def compare(self) -> str:
        """Trains all steps in one process, without sharding, and compares the losses."""
        self._launch("alone", self._one_process_job(self.in_float32.top("mixed_precision")), self._words("alone", 1))
        return _compare_losses(self._losses("run"), self._losses("alone"), range(1, STEPS + 1), self.tolerance)

    def resume_on_fewer_ranks(self) -> str:
        """Resumes the first checkpoint with another world size."""
        checkpoint = self._output("elsewhere") / f"{file_names.CHECKPOINT}{SAVED}"
        job = scaled.without_mesh(self.in_float32, self.fewer_ranks)
        words = self._words("elsewhere", self.fewer_ranks, resume_from_checkpoint=str(checkpoint))
        self._launch("elsewhere", job, words)
        steps = range(SAVED + 1, STEPS + 1)
        return _compare_losses(self._losses("elsewhere"), self._losses("alone"), steps, self.tolerance)

    def export(self) -> str:
        out = self.launcher.folder / "exported"
        words = ["export", str(self._output("killed")), str(out), "--model", str(self.small.model.folder)]
        merged = ["--merge-adapter"] if self.run.adapter else []
        outcome = self.launcher.python("export", "accel_fsdp", [*words, "--verify", "load", *merged])
        if outcome.code:
            raise Failure("the checkpoint can't be exported", output=outcome.tail)
        return "every tensor read back, and from_pretrained loads it"

    def reload(self) -> str:
        """Loads the run's export in a new process, and compares its logits with those of one process."""
        folders = [str(self._output(name) / file_names.FINAL) for name in ("run", "alone")]
        outcome = self.launcher.python("reload", "accel_fsdp.rehearsal.reload", folders)
        if outcome.code:
            raise Failure("the run's export can't be loaded", output=outcome.tail)
        difference, largest = (float(word) for word in outcome.output.split()[-2:])
        if difference > max(self.tolerance, EXACT_LOGITS) * max(largest, 1):
            raise Failure(f"logits differ by {difference:.2g} from those of one process, of up to {largest:.2g}")
        return f"final/ loads; its logits are those of one process (apart by {difference:.1g} of {largest:.2g})"

    def _output(self, name: str) -> Path:
        return self.launcher.folder / "runs" / name

    def _places(self, name: str) -> dict[str, str]:
        return dict(zip(PLACES, map(str, (self.small.model.folder, self.small.rows, self._output(name))), strict=True))

    def _words(self, name: str, ranks: int, exact: bool = True, **more: str) -> list[str]:
        if ranks == self.ranks and self.small.layout.experts > 1:
            more[EXPERT_FIELD] = str(self.small.layout.experts)
        words = self.run.words(self._places(name), self.rows_for(ranks, self.run.rows), **more)
        return self.run.exact(words) if exact else words

    def _words_as_written(self, name: str, ranks: int) -> list[str]:
        rows = {"per_device_train_batch_size": str(self.rows_for(ranks, WRITTEN_ROWS))}
        steady = {"lora_dropout": "0"} if self.run.adapter else {}
        return self._words(name, ranks, exact=False, **{**WRITTEN, **rows, **steady})

    def _one_process_job(self, precision: object) -> JobConfig:
        values = {"distributed_type": "NO", "num_processes": 1, "num_machines": 1, "mixed_precision": precision}
        return JobConfig(values)

    def _launch(self, name: str, job: JobConfig, words: list[str], kill_after: Path | None = None) -> Outcome:
        outcome = self.launcher.launch(name, job, words, kill_after)
        if outcome.hang or outcome.code:
            raise next(mistakes.find(outcome.events), of_outcome(outcome))
        for difference in repeated.differences(outcome.events):
            raise difference
        return outcome

    def _check_shards(self, outcome: Outcome) -> str:
        judge(self.job, self.small.model.layer_classes, outcome, self.small.layout.experts)
        return verdict.summary(outcome.holdings) + repeated.summary(outcome.events)

    def _losses(self, name: str) -> Mapping[int, float]:
        """The losses that Trainer logged, by step."""
        path = self._output(name) / f"{file_names.CHECKPOINT}{STEPS}" / file_names.TRAINER_STATE
        state = json.loads(path.read_text(encoding="utf-8"))
        return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}

    def _logged_losses(self, name: str) -> list[float]:
        return [entry["loss"] for entry in run_record.read(self._output(name))["log"] if "loss" in entry]


def _compare_losses(losses: Mapping[int, float], alone: Mapping[int, float], steps: range, tolerance: float) -> str:
    """Compares the losses of a run, by their steps, with those of one process."""
    differences = {step: abs(losses[step] - alone[step]) / abs(alone[step]) for step in steps}
    worst = max(differences, key=lambda step: differences[step])
    if differences[worst] > tolerance:
        comparison = f"{losses[worst]:.6f}, and {alone[worst]:.6f} in one process"
        raise Failure(f"step {worst} has a loss of {comparison}", fix="compare the two jobs")
    return f"losses of steps {steps[0]} to {steps[-1]} are those of one process (apart by {differences[worst]:.0e})"
