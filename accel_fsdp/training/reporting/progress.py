"""The progress that a run reports while it trains: rate, MFU, memory compared with the plan, advice."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather
from tqdm import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import has_length

from accel_fsdp import console
from accel_fsdp.errors import UserError, in_a_line
from accel_fsdp.hardware import host
from accel_fsdp.job import Job
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.training.data import IGNORED
from accel_fsdp.training.reporting import run_plan
from accel_fsdp.training.reporting.run_plan import Forecast
from accel_fsdp.units import GIB, gib_or_mib, millions

if TYPE_CHECKING:
    from accelerate import Accelerator

COMPARE_AFTER_STEPS = 2
"""The optimizer's state is made in the first step, so the second is the first whole one."""
LOGGING_STEPS = 10
"""Steps per line; a shorter run gets this many lines."""
CPU_IS_FULL = "DefaultCPUAllocator: can't allocate memory"


class Tally:
    """Counts what one rank trains: tokens without padding, documents, steps, and the time spent training.

    A row is one document unless it is packed; then positions restart at 0 in each document. `rows` and `length` are
    those of the largest micro-batch so far, padding included.
    """

    def __init__(self) -> None:
        self.rows = self.length = 0
        self.all_tokens = self.all_seconds = 0.0
        self._clear()

    def _clear(self) -> None:
        self.seconds, self.steps = 0.0, 0
        self._counted: torch.Tensor | float = 0.0
        self._since = time.perf_counter()

    def count(self, inputs: Mapping[str, Any]) -> None:
        """Adds a micro-batch.

        The sums stay on its device, because reading them would make the host wait for the GPU.
        """
        ids = inputs["input_ids"]
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        tokens = ids.new_tensor(ids.numel()) if mask is None or mask.dim() != 2 else (mask != 0).sum()
        documents = ids.new_tensor(ids.shape[0]) if positions is None else (positions == 0).sum()
        if mask is None and positions is not None and "labels" in inputs:
            padding = _padding(positions, inputs["labels"])
            tokens, documents = tokens - padding.sum(), documents - (padding > 0).sum()
        trained = (inputs["labels"] != IGNORED).any() if "labels" in inputs else 1  # else it fills a rank's last step
        self._counted = self._counted + torch.stack([tokens, documents]).double() * trained
        if ids.numel() > self.rows * self.length:
            self.rows, self.length = ids.shape[0], ids.numel() // ids.shape[0]

    def skip(self) -> None:
        """Leaves out the time since the last step, for example that of an evaluation."""
        self._since = time.perf_counter()

    def pass_time(self, steps: int = 0) -> None:
        """Counts the time since the last call as training that completed `steps` steps."""
        now = time.perf_counter()
        self.seconds, self.steps, self._since = self.seconds + now - self._since, self.steps + steps, now

    def take(
        self, accelerator: "Accelerator", peak_bytes: int, score: torch.Tensor | float = 0.0
    ) -> tuple[list[float], int, float]:
        """Returns what the ranks counted since the last take, in one copy to the host; collective.

        The sums of tokens, documents, correctly predicted and scored tokens, then the largest peak, then seconds.
        """
        pairs = [
            torch.as_tensor(pair, dtype=torch.double, device=accelerator.device).expand(2)
            for pair in (self._counted, score)
        ]
        ranks = accelerator.gather(torch.cat([*pairs, pairs[0].new_tensor([peak_bytes])])[None]).cpu()
        self.pass_time()
        sums, seconds = ranks[:, :4].sum(0).tolist(), self.seconds
        self.all_tokens, self.all_seconds = self.all_tokens + sums[0], self.all_seconds + seconds
        self._clear()
        return sums, int(ranks[:, 4].max()), seconds


def _padding(positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The padding of each packed row: its last document, if no token of it is trained (see `data.batching`)."""
    places = torch.arange(positions.shape[-1], device=positions.device)
    last_begin = torch.where(positions == 0, places, -1).amax(-1)
    last_label = torch.where(labels != IGNORED, places, -1).amax(-1)
    return (positions.shape[-1] - last_begin) * (last_label < last_begin)


class ProgressReport(TrainerCallback):  # type: ignore[misc]
    """Adds to Trainer's log, prints a line of it, and compares the second step's memory with the plan."""

    def __init__(self, job: Job | None, accelerator: "Accelerator", parameters: tuple[int, int] = (0, 0)) -> None:
        """`parameters`: those that are trained, and all."""
        self.job, self.accelerator, self.tally, self.parameters = job, accelerator, Tally(), parameters
        self.gpu, self.why_unknown = run_plan.gpu_here()
        self.forecast: Forecast | None = None
        self.why_no_plan = ""
        self.steps_here = 0
        self.seconds_per_step = 0.0
        self.peaks: dict[str, int] = {}
        """Measured and predicted bytes of the second step, as far as they are known."""

    def plan(self) -> dict[str, Any]:
        """The plan of the run for its record; empty if the planner doesn't support the run."""
        if self.job is None:
            return {}
        recipe = asdict(self.job.recipe)
        del recipe["rows"], recipe["length"]  # known only when batches were seen
        return {"strategy": self.job.layout.name, "layout": asdict(self.job.layout), "recipe": recipe}

    def totals(self) -> dict[str, Any]:
        """The totals of this session's training, without evaluations and saves, and the second step's memory."""
        tokens, seconds = self.tally.all_tokens, self.tally.all_seconds
        rate = {"tokens": int(tokens), "training_seconds": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
        return {**rate, "peak_memory_bytes": self.peaks}

    def replace_printers(self, trainer: Trainer) -> None:
        """Replaces Trainer's log lines; its progress bar stays unless `--disable_tqdm`."""
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(self)
        if not trainer.args.disable_tqdm:
            trainer.add_callback(_Bar)

    def add_metrics(self, logs: dict[str, float], score: torch.Tensor | float = 0.0) -> None:
        """Adds rate, MFU, memory and accuracy to the log of the loss, so that every tracker gets them; collective.

        `score`: this rank's correctly predicted and scored tokens since the last log of a loss.
        """
        steps = self.tally.steps
        on_gpu = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() if on_gpu else host.peak_memory()
        (tokens, documents, correct, scored), peak, seconds = self.tally.take(self.accelerator, peak, score)
        self.seconds_per_step = seconds / max(steps, 1)
        logs["tokens_per_second"] = tokens / seconds
        if self.forecast and self.gpu and documents:
            logs["mfu"] = self.forecast.mfu(tokens / seconds, tokens / documents, self.gpu)
        logs["peak_memory_gib" if on_gpu else "peak_host_memory_gib"] = peak / GIB
        if scored:
            logs["mean_token_accuracy"] = correct / scored  # TRL's name

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Logs the run's size and the host memory that loading took; on GPUs reads the plan's forecast."""
        if args.logs_often:
            args.logging_steps = state.logging_steps = logging_steps(state.max_steps)
        peaks = gather(torch.tensor([host.peak_memory()], device=args.device)).tolist()
        if state.is_world_process_zero:
            for text in beginning(*self.parameters, *_batch_and_steps(args, state, kwargs.get("train_dataloader"))):
                console.say(text, style="cyan")
            others = f", of the others at most {gib_or_mib(max(peaks[1:]))}" if peaks[1:] else ""
            console.say(f"host memory while loading: peak of rank 0 {gib_or_mib(peaks[0])}{others}", style="cyan")
            if self.gpu is None and torch.cuda.is_available():
                console.say(f"MFU: unknown, {self.why_unknown}")
            if torch.cuda.is_available():
                self.read_plan()
        self.tally.skip()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Counts the step; logs the peak memory after the second one."""
        self.tally.pass_time(steps=1)
        self.steps_here += 1
        if self.steps_here == COMPARE_AFTER_STEPS - 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # loading and sharding may have taken more
        reports = self.steps_here == 1 or control.should_training_stop or state.global_step >= state.max_steps
        if reports and args.logging_strategy != "no":
            control.should_log = True
        if self.steps_here == COMPARE_AFTER_STEPS and state.is_world_process_zero:
            say(f"peak memory after step {state.global_step:,}: {self._comparison()}", "cyan")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tally.skip()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tally.skip()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts the steps after the last log line too."""
        self.tally.skip()
        self.tally.take(self.accelerator, 0)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        text = line(logs or {}, state.global_step, state.max_steps, self.seconds_per_step)
        if state.is_world_process_zero and text:
            say(text)

    def read_plan(self) -> None:
        """Reads the forecast, or logs why there is none: an error of the planner must not stop a run."""
        if self.forecast is not None or self.why_no_plan:
            return
        try:
            self.forecast = run_plan.read(self.job) if self.job is not None else None
            self.why_no_plan = "" if self.forecast else "unknown for this engine, optimizer or dtype"
        except Exception as error:
            self.why_no_plan = f"unknown, {in_a_line(error)}"
        if self.why_no_plan:
            console.say(f"plan: {self.why_no_plan}", style="yellow")

    def _comparison(self) -> str:
        batch = f"{self.tally.rows} x {self.tally.length:,} tokens"
        if not torch.cuda.is_available():
            return f"{gib_or_mib(host.peak_memory())} of host memory on rank 0"
        self.peaks["measured"] = torch.cuda.max_memory_allocated()
        peak = f"{gib_or_mib(self.peaks['measured'])} with {batch}"
        if self.forecast is None:
            return f"{peak}; the plan's is unknown"
        self.peaks["predicted"] = self.forecast.peak_bytes(self.tally.rows, self.tally.length, self.gpu)
        return f"{peak}; the plan said {gib_or_mib(self.peaks['predicted'])}"

    @contextlib.contextmanager
    def explains_out_of_memory(self) -> Iterator[None]:
        """Converts an out-of-memory error into the plan's advice.

        Raises: UserError: out of memory, with the changes that would free the most.
        """
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and CPU_IS_FULL not in str(error):
                raise
            raise self._out_of_memory(error) from error

    def _out_of_memory(self, error: RuntimeError) -> UserError:
        self.read_plan()
        plan = self.forecast
        rows, length = max(self.tally.rows, 1), max(self.tally.length, 1)
        advice = plan.advice(rows, length) if plan else []
        what = str(error).split(". ")[0].splitlines()[0]
        why = f"a step of {rows} x {length:,} tokens per rank doesn't fit"
        if plan:
            size = plan.peak_bytes(rows, length, self.gpu)
            why = f"the plan says {gib_or_mib(size)} for {rows} x {length:,} tokens per rank, {plan.job.layout.name}"
        fix = "one of these, by what the plan says it frees: " + "; ".join(advice) if advice else HALVE
        return UserError(f"out of memory: {what}", why=why, fix=fix)


def say(text: str, style: str = "") -> None:
    """Prints a message, above the progress bar if there is one."""
    with tqdm.external_write_mode(file=sys.stderr):
        console.say(text, style=style)


HALVE = "a smaller --per_device_train_batch_size, a shorter --max_length, or more GPUs"


class _Bar(ProgressCallback):  # type: ignore[misc]
    """Trainer's progress bar without its lines."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Prints nothing: `ProgressReport` prints the log lines."""


def line(logs: Mapping[str, float], step: int, max_steps: int, seconds_per_step: float) -> str:
    """One line of output for a log entry of Trainer; empty if it has no loss."""
    start = f"step {step:,}/{max_steps:,}"
    if "eval_loss" in logs:
        return f"{start}  held-out loss {logs['eval_loss']:.4f}{_accuracy(logs, 'eval_')}"
    if "loss" not in logs:
        return ""
    words = [start, f"loss {logs['loss']:.4f}{_accuracy(logs)}", f"lr {logs['learning_rate']:.3g}"]
    words += [f"grad norm {logs['grad_norm']:.3g}"] if "grad_norm" in logs else []
    words.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
    words += [f"MFU {logs['mfu']:.1%}"] if "mfu" in logs else []
    for name, suffix in (("peak_memory_gib", ""), ("peak_host_memory_gib", " of host memory")):
        words += [f"{gib_or_mib(logs[name] * GIB)}{suffix}"] if name in logs else []
    remaining = seconds_per_step * (max_steps - step)
    return "  ".join([*words, *([f"{tqdm.format_interval(remaining)} left"] if remaining >= 1 else [])])


def _accuracy(logs: Mapping[str, float], prefix: str = "") -> str:
    share = logs.get(f"{prefix}mean_token_accuracy")
    return "" if share is None else f"  accuracy {share:.1%}"


def logging_steps(max_steps: int) -> int:
    """The default number of steps between two lines of the log."""
    return max(1, min(LOGGING_STEPS, max_steps // LOGGING_STEPS))


def _batch_and_steps(
    args: TrainingArguments, state: TrainerState, loader: Any
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    micro, ranks = args.gradient_accumulation_steps, LaunchEnvironment.now().with_rows(range(args.world_size))
    per_epoch = max(-(-len(loader) // micro), 1) if has_length(loader) else state.max_steps
    rows = state.train_batch_size if args.auto_find_batch_size else args.train_batch_size  # a resumed state has its own
    return (int(rows or 1), micro, len(ranks)), (per_epoch, state.global_step, state.max_steps)


def beginning(trained: int, parameters: int, batch: tuple[int, int, int], steps: tuple[int, int, int]) -> list[str]:
    """Describes the run that is about to begin, in two lines.

    `trained` of the `parameters`; `batch` is rows per rank, micro-batches and ranks; `steps` are those per epoch, those
    done and those to do in all.
    """
    total = f"{millions(parameters)} parameters"
    part = f"{millions(trained)} of {total}, {trained / max(parameters, 1):.2%}"
    rows, micro, ranks = batch
    per_epoch, completed_steps, last = steps
    accumulated = f" x {micro} micro-batches" if micro > 1 else ""
    composition = f"{rows} per process x {ranks} process{'es' if ranks > 1 else ''}{accumulated}"
    size = rows * micro * ranks
    return [
        f"trained: {f'all {total}' if trained == parameters else part}",
        f"batch: {size:,} row{'s' if size > 1 else ''} per step ({composition}); "
        f"{per_epoch:,} step{'s' if per_epoch != 1 else ''} per epoch, "
        f"{last:,} in all{f', {completed_steps:,} of them done' if completed_steps else ''}",
    ]


def summary(state: TrainerState, takes_best: bool) -> list[str]:
    """The first and last value of each loss that Trainer logged, one line each, and a line if the run ended early."""
    lines = []
    for key, name in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        values = [float(entry[key]) for entry in state.log_history if key in entry]
        if values:
            last = f" -> {values[-1]:.4f}" if values[1:] else ""
            lines.append(f"{name}: {values[0]:.4f}{last}")
    if state.global_step < state.max_steps:
        lines.append(f"stopped early: after step {state.global_step} of {state.max_steps}")
    if takes_best and state.best_model_checkpoint:
        name = Path(state.best_model_checkpoint).name
        lines.append(f"the best model is exported: {name}, {state.best_metric:.4f}")
    return lines
