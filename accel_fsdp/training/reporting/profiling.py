"""Profiles some steps of a run, `--profile_steps`: torch's trace, a memory snapshot on GPUs, and the page of the last.

A step that isn't profiled runs as it would without. In one that is, hooks note where each unit begins, so that the
trace can be read unit by unit (`step_trace`) and laid beside the prediction (`step_report`). Nothing of it changes what
is computed.
"""

import contextlib
import gc
import gzip
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback, TrainerState, TrainingArguments

from accel_fsdp import atomic_files, console
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError, in_a_line
from accel_fsdp.launch.ranks import holding
from accel_fsdp.library_internals import Internal
from accel_fsdp.prediction import by_unit, workspace_bytes
from accel_fsdp.prediction.memory import variant_of
from accel_fsdp.prediction.tracing import model_shape
from accel_fsdp.training.reporting import profile_flag, progress, run_plan, step_page, step_report, step_trace
from accel_fsdp.training.reporting.progress import ProgressReport
from accel_fsdp.training.reporting.step_trace import Mark, Span, StepTrace

if TYPE_CHECKING:
    from torch import nn

RELIES_ON = (
    Internal("torch.cuda.memory:_record_memory_history", "enabled *"),
    Internal("torch.cuda.memory:_dump_snapshot", "filename *"),
    Internal("torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data", "self"),
)
MOST_ENTRIES = 200_000
"""Of a memory snapshot: the newest are kept."""


@dataclass(frozen=True)
class ProfiledLayer:
    """A block of the model: its path and its module before anything wrapped it."""

    path: str
    module: "nn.Module"
    place: int

    @property
    def kind(self) -> str:
        """The class as it is written; `fully_shard` makes another one of it."""
        return holding.class_name(self.module)


def layers_of(model: "nn.Module") -> list[ProfiledLayer]:
    """The blocks that text goes through, in the order of the forward pass. Call before anything wraps them.

    Raises:
        UserError: no layer repeats.
    """
    blocks = model_shape.blocks_of(model)
    return [ProfiledLayer(*blocks[index], place) for place, index in enumerate(sorted(model_shape.text_layers(model)))]


@dataclass
class OpenProfile:
    """A profiled step while it runs, and what was noted: marks, the GPU's clock at each, the batch of each micro-batch.

    `before_bytes` were allocated when it began, `waited` are the seconds since the step before.
    """

    number: int
    profiler: Any
    before_bytes: int
    waited: float
    marks: list[Mark] = field(default_factory=list)
    clocks: list[Any] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    backward: bool = False


@dataclass(frozen=True)
class ProfiledStep:
    """A profiled step as it was measured on this rank. `unaccounted_bytes` are alive at its end and not in the trace.

    `quick_seconds` are those of the steps before, without the profiler.
    """

    number: int
    trace: StepTrace
    batches: tuple[tuple[int, int], ...]
    waited: float
    unaccounted_bytes: int
    quick_seconds: tuple[float, ...]


class StepProfiler(TrainerCallback):  # type: ignore[misc]
    """Begins and ends the profile of each step that was asked for, and writes it. Call on all ranks.

    `wrapped` gives the model as it is trained with. `reporter` gets the last step on the first rank.

    Raises:
        UserError: this is neither a GPU nor a CPU.
    """

    def __init__(
        self,
        steps: range,
        layers: Sequence[ProfiledLayer],
        args: Any,
        wrapped: Callable[[], Any],
        during: Callable[[str], AbstractContextManager[None]],
        reporter: "Reporter",
    ) -> None:
        self.steps, self.layers, self.args, self.wrapped, self.during = steps, layers, args, wrapped, during
        self.reporter = reporter
        self.folder, self.rank = Path(args.output_dir) / file_names.PROFILE, int(args.process_index)
        self.on_gpu = args.device.type == "cuda"
        if args.device.type not in ("cuda", "cpu"):
            raise UserError(
                f"--profile_steps on {args.device.type}",
                why="the memory of its units can't be told from a trace",
                fix="leave it out, or profile on a GPU or a CPU",
            )
        self.step: OpenProfile | None = None
        self._newest: ProfiledStep | None = None
        self._warming: Any = None
        self._ended = time.perf_counter()
        self.quick_seconds: list[float] = []
        """Of the steps before the profiled ones, to see what the profiler costs."""
        self._began = self._ended

    # When

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Refuses steps that never come. Those that a resumed run has done are left out: a restart must not fail."""
        self._drop()
        if not self.steps:
            return
        profile_flag.check_reached(self.steps, state.max_steps)
        left = range(max(self.steps.start, state.global_step + 1), self.steps.stop)
        if left != self.steps and self.rank == 0:
            rest = f"step {left.start} is the first profiled one" if left else "none is profiled"
            done = f"--profile_steps begins at {self.steps.start}, and {state.global_step:,} steps are done"
            console.say(f"{done}: {rest}", style="yellow")
        self.steps = left
        if self.rank == 0 and left:
            self.reporter.prepare()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of each start and stop

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begins a profile, or warms up in the step before the first one."""
        number = state.global_step + 1
        if number in self.steps:
            self._begin(number, self.wrapped())
        elif self.steps and number == self.steps.start - 1:
            self._warming = _profiler(self.on_gpu)
            self._warming.start()
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The gradients are clipped."""
        self.mark("update", by_unit.UPDATE)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The weights are new."""
        self.mark("rest", "clearing gradients")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Ends the profile of the step and writes it."""
        self._ended = time.perf_counter()
        if self._warming is not None:  # an evaluation that it saw as well would fill the memory
            self._warming.stop()
            self._warming = None
        if self.step is None:
            if self.steps and state.global_step < self.steps.start - 1:  # neither profiled nor the one that warms up
                self.quick_seconds.append(self._ended - self._began)
            return
        self.mark("end", "")
        step, self.step = self.step, None
        step.profiler.stop()
        for hook in step.hooks:
            hook.remove()
        with self.during("writing the profile"):
            with self._told(step.number):
                self._newest = self._write(step, self.wrapped())
            if step.number == self.steps[-1]:
                self._conclude()
        self.reporter.report.tally.skip()
        self._ended = time.perf_counter()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Training may end before the last of the steps: the newest that was profiled is shown then."""
        if not self.steps or state.global_step >= self.steps[-1]:
            return
        if self.rank == 0:
            ended = f"--profile_steps {self.args.profile_steps}, and training ended after step {state.global_step:,}"
            console.say(f"{ended}: none is profiled" if state.global_step < self.steps.start else ended, style="yellow")
        self._conclude()

    def _conclude(self) -> None:
        """Writes what is of all steps, and shows the newest."""
        newest, self._newest = self._newest, None
        number = newest.number if newest else self.steps[-1]
        try:
            with self._told(number):
                if self.on_gpu and newest:
                    self._dump()
        finally:
            self._remember(False)
        if newest and self.rank == 0:
            with self._told(number):
                self.reporter.show(newest, self.wrapped())

    @contextlib.contextmanager
    def _told(self, number: int) -> Iterator[None]:
        """Whatever keeps a profile from being written or shown must not stop a run."""
        try:
            yield
        except Exception as error:
            message = f"rank {self.rank}: the profile of step {number} is not complete: {in_a_line(error)}"
            console.say(message, style="yellow")

    # What a run tells

    def micro_batch(self, inputs: Mapping[str, Any]) -> None:
        if self.step is not None:
            ids = inputs["input_ids"]
            self.step.batches.append((ids.shape[0], ids.numel() // max(ids.shape[0], 1)))
            self.step.backward = False
            self.mark("forward", by_unit.EMBEDDING)

    def forward_ended(self) -> None:
        """The loss is there, and backward begins."""
        if self.step is not None and self.step.batches:
            self.step.backward = True
            self.mark("backward", by_unit.HEAD)

    def backward_ended(self) -> None:
        """All gradients of the step are there."""
        self.mark("update", "gradient norm")

    def mark(self, phase: Span, unit: str, name: str = "", layer: int | None = None) -> None:
        """A stretch begins here, unless it has begun already."""
        step = self.step
        if step is None:
            return
        begun = Mark(len(step.marks), len(step.batches), phase, unit, name, layer)
        if step.marks and step.marks[-1].title == begun.title and phase in ("forward", "backward"):
            return
        step.marks.append(begun)
        if self.on_gpu:
            clock = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            clock.record()
            step.clocks.append(clock)
        with record_function(f"{step_trace.MARK}{begun.number}"):
            pass

    # How a step is profiled

    def _begin(self, number: int, model: "nn.Module") -> None:
        before = torch.cuda.memory_allocated() if self.on_gpu else live_bytes(model)
        if number == self.steps.start:
            self._remember(True)
        step = OpenProfile(number, _profiler(self.on_gpu), before, time.perf_counter() - self._ended)
        step.hooks = list(self._hooks(model))
        step.profiler.start()
        self.step = step
        self.mark("start", "")

    def _drop(self) -> None:
        """Ends what an earlier try at training has begun: Trainer may begin again with smaller batches."""
        if self._warming is not None:
            self._warming.stop()
        if self.step is not None:
            self.step.profiler.stop()
            for hook in self.step.hooks:
                hook.remove()
        self._warming = self.step = self._newest = None
        self.quick_seconds.clear()
        self._remember(False)

    def _remember(self, on: bool) -> None:
        """Begins or ends the history of a GPU's memory."""
        if self.on_gpu and on:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST_ENTRIES)
        elif self.on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _hooks(self, model: "nn.Module") -> Iterator[Any]:
        """Around each block, outside of what wraps it: its gathering is part of it."""
        outermost: dict[str, Any] = {}
        for path, module in model.named_modules():
            outermost.setdefault(holding.user_name(path), module)
        for layer in self.layers:
            outer = outermost[holding.user_name(layer.path)]
            begins = partial(self._layer_begins, layer)
            yield outer.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
            yield layer.module.register_forward_hook(partial(self._layer_ends, layer), prepend=True)
        last = outermost[holding.user_name(self.layers[-1].path)]
        yield last.register_forward_hook(self._layers_end)

    def _layer_begins(self, layer: ProfiledLayer, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step is None:
            return
        if self.step.backward:  # it is computed again
            self._backward(layer, None)
            return
        self.mark("forward", layer.kind, layer.path, layer.place)
        tensor = next((value for value in (*args, *kwargs.values()) if _has_gradient(value)), None)
        if layer.place == 0 and tensor is not None:
            tensor.register_hook(self._embedding_backward)

    def _layer_ends(self, layer: ProfiledLayer, module: Any, args: Any, output: Any) -> None:
        """Its backward begins when the gradient of its output is there. FSDP's own hook on that comes later."""
        first = output[0] if isinstance(output, (tuple, list)) else output
        if self.step is not None and not self.step.backward and _has_gradient(first):
            first.register_hook(partial(self._backward, layer))

    def _layers_end(self, module: Any, args: Any, output: Any) -> None:
        if self.step is not None and not self.step.backward:
            self.mark("forward", by_unit.HEAD)

    def _backward(self, layer: ProfiledLayer, gradient: Any) -> None:
        self.mark("backward", layer.kind, layer.path, layer.place)

    def _embedding_backward(self, gradient: Any) -> None:
        self.mark("backward", by_unit.EMBEDDING)

    # What is written

    def _write(self, step: OpenProfile, model: "nn.Module") -> ProfiledStep:
        device = torch.cuda.current_device() if self.on_gpu else -1
        seconds = None
        if self.on_gpu:
            torch.cuda.synchronize()
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in zip(step.clocks, step.clocks[1:], strict=False)]
        target = self.folder / f"trace-step{step.number}-rank{self.rank}.json.gz"
        with atomic_files.new_file(target) as place:
            plain = place.with_name("plain.json")
            step.profiler.export_chrome_trace(str(plain))
            with plain.open(encoding="utf-8") as file:
                events = json.load(file)
            trace = step_trace.read(events, step.marks, step.before_bytes, seconds, device)
            with gzip.open(place, "wt", encoding="utf-8", compresslevel=3) as packed:
                json.dump(step_trace.annotated(events, trace), packed)
        alive = torch.cuda.memory_allocated() if self.on_gpu else live_bytes(model)
        return ProfiledStep(
            step.number, trace, tuple(step.batches), step.waited, alive - trace.end_bytes, tuple(self.quick_seconds)
        )

    def _dump(self) -> None:
        with atomic_files.new_file(self.folder / f"memory-rank{self.rank}.pickle") as place:
            torch.cuda.memory._dump_snapshot(str(place))  # type: ignore[no-untyped-call]


def _profiler(on_gpu: bool) -> Any:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    return profile(activities=kinds, record_shapes=True, profile_memory=True)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()


def live_bytes(model: "nn.Module") -> int:
    """What is allocated on the CPU: all storages that Python's tensors have, and the buckets that DDP keeps inside."""
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor) or _stands_for_others(type(item)):
            continue
        with contextlib.suppress(RuntimeError, NotImplementedError):  # it has no storage, or a parted one
            if item.device.type == "cpu":
                storage = item.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    sizes.pop(0, None)
    return sum(sizes.values()) + sum(bucket_sizes(model))


def _stands_for_others(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class have no storage of their own, as DTensors and those of a trace haven't."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def bucket_sizes(model: "nn.Module") -> list[int]:
    """The bytes of each of DDP's buckets; empty for other engines."""
    if not isinstance(model, DistributedDataParallel):
        return []
    facts = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = str(facts.get("rebuilt_bucket_sizes") or facts.get("bucket_sizes") or "")
    return [int(size) for size in sizes.split(",") if size.strip().isdecimal()]


class Reporter:
    """Writes the page and the numbers of a profiled step, and prints what differs; for the first rank."""

    def __init__(
        self, report: ProgressReport, folder: Path, layers: Sequence[ProfiledLayer], model: "nn.Module"
    ) -> None:
        self.report, self.folder, self.layers = report, folder / file_names.PROFILE, layers
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        self.embedding = next((path for path, module in model.named_modules() if module is embedding), "")
        self.forecast: run_plan.Forecast | None = None
        self.why_unknown = "the plan knows no such engine, optimizer or dtype"

    def prepare(self) -> None:
        """Reads the prediction before training, as it may take a while; whatever keeps it from being made is noted."""
        if self.report.job is None:
            return
        try:
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            with torch.random.fork_rng(devices):
                self.forecast = self.report.forecast or run_plan.read(self.report.job)
                self.forecast.tapes[variant_of(self.forecast.job.recipe, self.forecast.job.layout.engine)]
        except Exception as error:
            self.why_unknown = in_a_line(error)

    def show(self, taken: ProfiledStep, model: "nn.Module") -> None:
        comparison = self._compared(taken, model)
        numbers = json.dumps(comparison.numbers(), indent=1)
        atomic_files.write_text(self.folder / file_names.STEP_NUMBERS, f"{numbers}\n")
        page = self.folder / file_names.STEP_PAGE
        atomic_files.write_text(page, step_page.page(comparison))
        for line in step_report.lines(comparison, str(page)):
            progress.say(line)

    def _compared(self, taken: ProfiledStep, model: "nn.Module") -> step_report.StepComparison:
        trace, ranks = taken.trace, self.report.accelerator.num_processes
        rows, length = step_report.largest(taken.batches)
        on_gpu = self.report.accelerator.device.type == "cuda"  # a run with --use_cpu may see GPUs too
        gpu = self.report.gpu if on_gpu else None
        predicted = None
        if self.forecast is not None:
            job = self.forecast.job
            recipe = replace(job.recipe, rows=rows, length=length, accumulation=len(taken.batches))
            tapes = self.forecast.tapes[variant_of(recipe, job.layout.engine)]
            workspace = workspace_bytes(gpu) if on_gpu else 0
            predicted = by_unit.unit_steps(self.forecast.shape, tapes, recipe, job.layout, gpu, workspace)
        layers = {holding.user_name(layer.path): layer.kind for layer in self.layers}
        own_engine = getattr(self.report.accelerator.state, "deepspeed_plugin", None) is not None
        sharded_units = () if own_engine else holding.measure(model).units
        units = step_report.unit_names(sharded_units, layers, holding.user_name(self.embedding))
        why = self.report.why_unknown if on_gpu else "there is no GPU"
        known = step_report.Known(
            *(predicted, self.why_unknown, gpu, why, on_gpu, ranks, units, bucket_sizes(model), own_engine),
        )
        notes = (
            *step_report.notes_of(known, trace, taken.number, taken.batches),
            *step_report.cost_of_profiling(trace.seconds, taken.quick_seconds, taken.waited),
            *step_report.unaccounted(taken.unaccounted_bytes, trace.highest_bytes),
        )
        return step_report.compare(taken.number, taken.batches, trace, known, notes)
