"""The steps of a rehearsal with `train/sft.py`, in order. Each returns what it proved, or raises why it failed."""

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp import command_line, exporter, untrusted_files
from accel_fsdp.checkpoints import completeness, file_names
from accel_fsdp.config import EXPERT_FIELD, SCRIPT, Engine, JobConfig
from accel_fsdp.ranks import cpu
from accel_fsdp.rehearsal import mistakes, repeated, scaled, verdict
from accel_fsdp.rehearsal.blame import Failure, judge, of_outcome
from accel_fsdp.rehearsal.job import Outcome, Rehearsed
from accel_fsdp.rehearsal.prepare import Prepared
from accel_fsdp.rehearsal.small_run import PLACES, SAVED, STEPS, SmallRun, readable, replaced

if TYPE_CHECKING:
    import torch

EXACT = 1e-4
"""The relative tolerance of losses in float32: the order of sums differs."""
EXACT_LOGITS = 1e-3
"""The tolerance of logits: Adam turns the rounding of a gradient near zero into a whole step. 1.3e-4 was measured."""
ROUNDED = 2e-2
"""The tolerance of both in 16 bits, after updates at a rehearsal's rate: each layer and norm rounds to 3 digits."""
WRITTEN: Mapping[str, str] = {"max_steps": "2", "save_strategy": "no", "learning_rate": "1e-8"}
"""Arguments in the YAML's precision; at this rate weights hardly change, so the second loss has not collapsed."""
TOKENS = 32
"""The tokens of which exported models compute logits."""
ALONE = "alone"
"""The run in one process."""


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
        if self.job.engine is Engine.DEEPSPEED:
            yield "compare with one process", self.compare
        else:
            yield "resume on 1 rank", self.resume_on_one_rank
        yield "export and reload", self.export

    @property
    def job(self) -> JobConfig:
        return self.small.job

    @property
    def run(self) -> SmallRun:
        return self.small.run

    @property
    def ranks(self) -> int:
        return self.job.number("num_processes")

    @property
    def precision(self) -> str:
        return str(self.job.top("mixed_precision"))

    @cached_property
    def in_float32(self) -> JobConfig:
        """The job without mixed precision, so that losses can be compared."""
        return self.job if self.run.quantized else JobConfig({**self.job.values, "mixed_precision": "no"})

    @property
    def tolerance(self) -> float:
        return ROUNDED if self.run.quantized and self.precision != "no" else EXACT

    def read_arguments(self) -> str:
        """Reads all of the user's arguments as the real job would; later steps replace some of them."""
        places = (word for name, value in self._places("read").items() for word in (f"--{name}", value))
        words = [*readable(self.given), *places]
        self.launcher.call("read", _parse, words, ACCELERATE_MIXED_PRECISION=self.precision)
        flags = replaced(self.given)
        return f"{SCRIPT} takes them" + (f"; set or left out here: {', '.join(flags)}" if flags else "")

    def train_as_written(self) -> str:
        """Trains two steps in the YAML's precision; both are repeated in one process."""
        steady = {"lora_dropout": "0"} if self.run.adapter else {}
        words = self._words("written", self.ranks, exact=False, **{**WRITTEN, **steady})
        outcome = self._launch("written", self.job, words)
        losses = [event.content["value"] for event in outcome.of("loss")]
        if not losses or not all(map(math.isfinite, losses)):
            raise Failure(f"losses {losses}", key="mixed_precision", fix="bf16, which has the range of float32")
        return self._check_shards(outcome)

    def train_and_save(self) -> str:
        """Trains up to a checkpoint; then every process is killed."""
        checkpoint = self._output("run") / f"{file_names.CHECKPOINT}{SAVED}"
        words = self._words("run", self.ranks)
        outcome = self._launch("saved", self.in_float32, words, kill_after=checkpoint)
        is_killed = outcome.code is None  # in a step after a complete checkpoint
        if not is_killed and (flaw := self.launcher.call("complete", completeness.flaw, checkpoint)):
            raise Failure(f"{checkpoint.name} is not complete: {flaw}", output=outcome.tail)
        shutil.copytree(checkpoint, self._output(ALONE) / checkpoint.name)
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
        """Trains all steps in one process, without DeepSpeed, and compares the losses."""
        precision = self.in_float32.top("mixed_precision")
        values = {"distributed_type": "NO", "num_processes": 1, "num_machines": 1, "mixed_precision": precision}
        shutil.rmtree(self._output(ALONE))
        self._launch(ALONE, JobConfig(values), self._words(ALONE, 1))
        return _compare_losses(self._losses("run"), self._losses(ALONE), range(1, STEPS + 1), self.tolerance)

    def resume_on_one_rank(self) -> str:
        """Resumes the first checkpoint in one process, which has no shards, and compares the losses."""
        checkpoint = self._output(ALONE) / f"{file_names.CHECKPOINT}{SAVED}"
        words = self._words(ALONE, 1, resume_from_checkpoint=str(checkpoint))
        self._launch(ALONE, scaled.without_mesh(self.in_float32, 1), words)
        steps = range(SAVED + 1, STEPS + 1)
        return _compare_losses(self._losses("run"), self._losses(ALONE), steps, self.tolerance)

    def export(self) -> str:
        """Exports the killed run's checkpoint, and compares the logits of the run's final/ with those of one process.

        Both in a new process.
        """
        out = self.launcher.folder / "exported"
        folders = [self._output(name) / file_names.FINAL for name in ("run", ALONE)]
        words = [str(self._output("killed")), str(out), "--model", str(self.small.model.folder), "--verify", "load"]
        words += ["--merge-adapter"] if self.run.adapter else []
        difference, largest = self.launcher.call("export", _difference, words, *folders)
        if difference > max(self.tolerance, EXACT_LOGITS) * max(largest, 1):
            raise Failure(f"logits differ by {difference:.2g} from those of one process, of up to {largest:.2g}")
        same = f"the logits of final/ are those of one process (apart by {difference:.1g} of {largest:.2g})"
        return f"every tensor read back, and from_pretrained loads it; {same}"

    def _output(self, name: str) -> Path:
        return self.launcher.folder / "runs" / name

    def _places(self, name: str) -> dict[str, str]:
        return dict(zip(PLACES, map(str, (self.small.model.folder, self.small.rows, self._output(name))), strict=True))

    def _words(self, name: str, ranks: int, exact: bool = True, **more: str) -> list[str]:
        if ranks == self.ranks and self.small.layout.experts > 1:
            more[EXPERT_FIELD] = str(self.small.layout.experts)
        # fewer ranks take as many rows together as those of the mesh
        rows = self.run.rows if ranks == self.ranks else self.small.layout.rows_of_all(self.run.rows) // ranks
        words = self.run.words(self._places(name), rows, **more)
        return self.run.exact(words) if exact else words

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


def _parse(words: Sequence[str]) -> None:
    """Parses the words as `train/sft.py` does on a rank."""
    from accel_fsdp.training import arguments

    cpu.begin_rank()
    sys.argv = [SCRIPT, *words]
    arguments.parse()


def _difference(words: Sequence[str], one: Path, other: Path) -> tuple[float, float]:
    """Runs `accel-fsdp export WORDS`; returns the largest difference of the logits of both folders, and the largest.

    Raises:
        SystemExit: the export failed, which has printed why.
    """
    if code := exporter.run(command_line.parse("accel-fsdp export", exporter.ExportCommand, [*words])):
        sys.exit(code)
    first, second = _logits(str(one)), _logits(str(other))
    return float((first - second).abs().max()), float(second.abs().max())


def _logits(folder: str) -> "torch.Tensor":
    import torch

    from accel_fsdp.models import model_class, read_config

    base = untrusted_files.read_json(Path(folder, file_names.ADAPTER_CONFIG)).get("base_model_name_or_path", folder)
    model = model_class(read_config(base)).from_pretrained(folder, trust_remote_code=False).eval()
    tokens = torch.arange(1, TOKENS + 1).remainder(model.config.get_text_config().vocab_size)[None]
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens).logits
    return logits.float()


def _compare_losses(losses: Mapping[int, float], alone: Mapping[int, float], steps: range, tolerance: float) -> str:
    """Compares the losses of a run, by their steps, with those of one process."""
    differences = {step: abs(losses[step] - alone[step]) / abs(alone[step]) for step in steps}
    worst = max(differences, key=lambda step: differences[step])
    if differences[worst] > tolerance:
        comparison = f"{losses[worst]:.6f}, and {alone[worst]:.6f} in one process"
        raise Failure(f"step {worst} has a loss of {comparison}", fix="compare the two jobs")
    return f"losses of steps {steps[0]} to {steps[-1]} are those of one process (apart by {differences[worst]:.0e})"
