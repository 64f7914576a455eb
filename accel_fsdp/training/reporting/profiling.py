"""Profiles steps of a run, `--profile_steps`: torch's trace, a memory snapshot on GPUs, a page for the last step.

Other steps run unchanged. In a profiled step, hooks mark the beginning of each unit, so that the trace can be read unit
by unit (`step_trace`) and compared with the prediction (`step_report`). The computation stays the same.
"""

import contextlib
import gc
import gzip
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback, TrainerState, TrainingArguments

from accel_fsdp import atomic_files, console
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError, in_a_line
from accel_fsdp.launch.ranks import holding
from accel_fsdp.library_internals import Internal
from accel_fsdp.prediction import by_unit
from accel_fsdp.prediction.tracing import model_shape
from accel_fsdp.training.reporting import profile_flag, progress, step_page, step_report, step_trace
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
"""The largest number of entries in a memory snapshot; the newest are kept."""


@dataclass(frozen=True)
class ProfiledLayer:
    """A block of the model before it is wrapped: its path, its module, and its index among the blocks."""

    path: str
    module: "nn.Module"
    place: int

    @property
    def kind(self) -> str:
        """The name of the class in the source, from which `fully_shard` derives another."""
        return holding.class_name(self.module)


@dataclass
class ProfiledStep:
    """A profiled step: its marks, the GPU's clock at each, the shape of each micro-batch; at its end the trace.

    `before_bytes` were allocated when it began.
    """

    number: int
    profiler: Any
    before_bytes: int
    marks: list[Mark] = field(default_factory=list)
    clocks: list[Any] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    backward: bool = False
    trace: StepTrace | None = None

    def stop(self) -> None:
        self.profiler.stop()
        for hook in self.hooks:
            hook.remove()


class StepProfiler(TrainerCallback):  # type: ignore[misc]
    """Begins, ends and writes the profile of each requested step. Call on all ranks.

    Create it before `model` is wrapped; `wrapped` returns the wrapped model. `during` tells the watchdog what happens,
    and `report` has the plan's prediction.

    Raises:
        UserError: this is neither a GPU nor a CPU, or no layer of the model repeats.
    """

    def __init__(
        self,
        args: Any,
        model: "nn.Module",
        wrapped: Callable[[], Any],
        during: Callable[[str], AbstractContextManager[None]],
        report: ProgressReport,
    ) -> None:
        self.steps = profile_flag.steps_asked(args.profile_steps)
        self.args, self.wrapped, self.during, self.report = args, wrapped, during, report
        self.folder, self.rank = Path(args.output_dir) / file_names.PROFILE, int(args.process_index)
        self.on_gpu = args.device.type == "cuda"
        if args.device.type not in ("cuda", "cpu"):
            raise UserError(
                f"--profile_steps on {args.device.type}",
                why="the memory of its units can't be read from a trace",
                fix="leave it out, or profile on a GPU or a CPU",
            )
        blocks, text = model_shape.blocks_of(model), sorted(model_shape.text_layers(model))
        self.layers = [ProfiledLayer(*blocks[index], place) for place, index in enumerate(text)]
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        self.embedding = next((path for path, module in model.named_modules() if module is embedding), "")
        self.step: ProfiledStep | None = None
        self._newest: ProfiledStep | None = None
        self._warming: Any = None
        self._began = 0.0
        self.quick_seconds: list[float] = []
        """Durations of the steps before the profiled ones, to measure the profiler's overhead."""

    # When

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Refuses steps that the run won't reach. Steps before a resume are left out: a restart must not fail."""
        self._drop()
        if not self.steps:
            return
        profile_flag.check_reached(self.steps, state.max_steps)
        remaining = range(max(self.steps.start, state.global_step + 1), self.steps.stop)
        if remaining != self.steps:
            note = f"step {remaining.start} is the first profiled one" if remaining else "none is profiled"
            self._warn(
                f"--profile_steps begins at {self.steps.start}, and {state.global_step:,} steps are done: {note}"
            )
        self.steps = remaining
        if self.rank == 0 and remaining:
            self.report.read_plan()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto logs each start and stop

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begins a profile, or warms up in the step before the first one."""
        number = state.global_step + 1
        if number in self.steps:
            self._begin(number, self.wrapped())
        elif self.steps and number == self.steps.start - 1:
            self._warming = self._profiler()
            self._warming.start()
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Marks that the gradients are clipped."""
        self.mark("update", by_unit.UPDATE)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Marks that the weights are updated."""
        self.mark("rest", "clearing gradients")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._warming is not None:  # recording an evaluation too would fill the memory
            self._warming.stop()
            self._warming = None
        elif self.step is None and self.steps and state.global_step < self.steps.start:
            self.quick_seconds.append(time.perf_counter() - self._began)
        if self.step is None:
            return
        self.mark("end", "")
        step, self.step = self.step, None
        step.stop()
        with self.during("writing the profile"):
            with self._reporting_errors(step.number):
                self._write(step)
                self._newest = step
            if step.number == self.steps[-1]:
                self._conclude()
        self.report.tally.skip()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Shows the newest profiled step if training ends before the last one."""
        if self.steps and state.global_step < self.steps[-1]:
            note = ": none is profiled" if state.global_step < self.steps.start else ""
            requested_steps = self.args.profile_steps
            self._warn(f"--profile_steps {requested_steps}, and training ended after step {state.global_step:,}{note}")
            self._conclude()

    def _conclude(self) -> None:
        """Writes the tables of all steps, and shows the newest."""
        newest, self._newest = self._newest, None
        if newest and self.on_gpu:
            with (
                self._reporting_errors(newest.number),
                atomic_files.new_file(self.folder / f"memory-rank{self.rank}.pickle") as place,
            ):
                torch.cuda.memory._dump_snapshot(str(place))  # type: ignore[no-untyped-call]
        if newest and self.rank == 0:
            with self._reporting_errors(newest.number):
                self._show(newest)
        self._record_memory(None)

    @contextlib.contextmanager
    def _reporting_errors(self, number: int) -> Iterator[None]:
        """Prints errors of writing or showing a profile, because they must not stop a run."""
        try:
            yield
        except Exception as error:
            message = f"rank {self.rank}: the profile of step {number} is not complete: {in_a_line(error)}"
            console.say(message, style="yellow")

    def _warn(self, text: str) -> None:
        if self.rank == 0:
            console.say(text, style="yellow")

    # Reports of the run

    def micro_batch(self, inputs: Mapping[str, Any]) -> None:
        if self.step is not None:
            ids = inputs["input_ids"]
            self.step.batches.append((ids.shape[0], ids.numel() // max(ids.shape[0], 1)))
            self.step.backward = False
            self.mark("forward", by_unit.EMBEDDING)

    def forward_ended(self) -> None:
        """Called once the loss is computed, before backward."""
        if self.step is not None and self.step.batches:
            self.step.backward = True
            self.mark("backward", by_unit.HEAD)

    def backward_ended(self) -> None:
        """Called once all gradients of the step are computed."""
        self.mark("update", "gradient norm")

    def mark(self, phase: Span, unit: str, name: str = "", layer: int | None = None) -> None:
        """Begins a span of the profile, unless it is the current one."""
        step = self.step
        if step is None:
            return
        start = Mark(len(step.marks), len(step.batches), phase, unit, name, layer)
        if step.marks and step.marks[-1].title == start.title and phase in ("forward", "backward"):
            return
        step.marks.append(start)
        if self.on_gpu:
            clock = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            clock.record()
            step.clocks.append(clock)
        with record_function(f"{step_trace.MARK}{start.number}"):
            pass

    # How a step is profiled

    def _profiler(self) -> Any:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        return profile(activities=kinds, record_shapes=True, profile_memory=True)

    def _begin(self, number: int, model: "nn.Module") -> None:
        before = torch.cuda.memory_allocated() if self.on_gpu else live_bytes(model)
        if number == self.steps.start:
            self._record_memory("all")
        self.step = ProfiledStep(number, self._profiler(), before)
        self.step.hooks = list(self._hooks(model))
        self.step.profiler.start()
        self.mark("start", "")

    def _drop(self) -> None:
        """Drops the profile of an earlier try: Trainer may begin again with smaller batches."""
        for record in filter(None, (self._warming, self.step)):
            record.stop()
        self._warming = self.step = self._newest = None
        self.quick_seconds.clear()
        self._record_memory(None)

    def _record_memory(self, enabled: Literal["all"] | None) -> None:
        """Begins or ends the history of a GPU's memory."""
        if self.on_gpu:
            torch.cuda.memory._record_memory_history(enabled, stacks="python", max_entries=MOST_ENTRIES)

    def _hooks(self, model: "nn.Module") -> Iterator[Any]:
        """Marks each block outside of its wrapper, so that gathering is part of it."""
        outermost: dict[str, Any] = {}
        for path, module in model.named_modules():
            outermost.setdefault(holding.user_name(path), module)
        for layer in self.layers:
            outer = outermost[holding.user_name(layer.path)]
            begins = partial(self._layer_begins, layer)
            yield outer.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
            yield layer.module.register_forward_hook(partial(self._layer_ends, layer), prepend=True)
        yield outer.register_forward_hook(self._layers_end)

    def _layer_begins(self, layer: ProfiledLayer, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step is None:
            return
        if self.step.backward:  # activation checkpointing recomputes it
            self._backward(layer, None)
            return
        self.mark("forward", layer.kind, layer.path, layer.place)
        tensor = next((value for value in (*args, *kwargs.values()) if _has_gradient(value)), None)
        if layer.place == 0 and tensor is not None:
            tensor.register_hook(lambda gradient: self.mark("backward", by_unit.EMBEDDING))

    def _layer_ends(self, layer: ProfiledLayer, module: Any, args: Any, output: Any) -> None:
        """Marks the layer's backward, which begins with the gradient of its output, before FSDP's own hook."""
        first = output[0] if isinstance(output, (tuple, list)) else output
        if self.step is not None and not self.step.backward and _has_gradient(first):
            first.register_hook(partial(self._backward, layer))

    def _layers_end(self, module: Any, args: Any, output: Any) -> None:
        if self.step is not None and not self.step.backward:
            self.mark("forward", by_unit.HEAD)

    def _backward(self, layer: ProfiledLayer, gradient: Any) -> None:
        self.mark("backward", layer.kind, layer.path, layer.place)

    # Written files

    def _write(self, step: ProfiledStep) -> None:
        device, seconds = -1, None
        if self.on_gpu:
            torch.cuda.synchronize()
            device = torch.cuda.current_device()
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(step.clocks)]
        with atomic_files.new_file(self.folder / f"trace-step{step.number}-rank{self.rank}.json.gz") as place:
            plain = place.with_name("plain.json")
            step.profiler.export_chrome_trace(str(plain))
            events = json.loads(plain.read_text(encoding="utf-8"))
            step.trace = step_trace.read(events, step.marks, step.before_bytes, seconds, device)
            with gzip.open(place, "wt", encoding="utf-8", compresslevel=3) as packed:
                json.dump(step_trace.annotated(events, step.trace), packed)

    def _show(self, step: ProfiledStep) -> None:
        assert step.trace is not None
        comparison = step_report.compare(step.number, step.batches, step.trace, self._trace_context(step))
        numbers = json.dumps(comparison.numbers(), indent=1)
        atomic_files.write_text(self.folder / file_names.STEP_NUMBERS, f"{numbers}\n")
        page = self.folder / file_names.STEP_PAGE
        atomic_files.write_text(page, step_page.page(comparison))
        for line in step_report.lines(comparison, str(page)):
            progress.say(line)

    def _trace_context(self, step: ProfiledStep) -> step_report.Known:
        report, model = self.report, self.wrapped()
        gpu = report.gpu if self.on_gpu else None  # a run with --use_cpu may see GPUs too
        predicted, why = None, f"the plan is {report.why_no_plan}"
        if report.forecast is not None:
            why = report.why_unknown if self.on_gpu else "there is no GPU"
            largest = step_report.largest(step.batches)
            predicted = report.forecast.unit_steps(*largest, len(step.batches), gpu, self.on_gpu)
        layers = {holding.user_name(layer.path): layer.kind for layer in self.layers}
        own_engine = getattr(report.accelerator.state, "deepspeed_plugin", None) is not None
        sharded_units = () if own_engine else holding.measure(model).units
        return step_report.Known(
            predicted=predicted,
            why_unknown=why,
            gpu=gpu,
            on_gpu=self.on_gpu,
            ranks=report.accelerator.num_processes,
            units=step_report.unit_names(sharded_units, layers, holding.user_name(self.embedding)),
            buckets=bucket_sizes(model),
            own_engine=own_engine,
            quick_seconds=self.quick_seconds,
        )


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()


def live_bytes(model: "nn.Module") -> int:
    """Bytes allocated on the CPU: the storages of all tensors in Python, and DDP's internal buckets."""
    sizes: dict[int, int] = {}
    for tensor in gc.get_objects():
        kind = type(tensor)  # DTensors and traced tensors have no storage of their own: they dispatch to other tensors
        if not issubclass(kind, torch.Tensor) or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            continue
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without storage, or with several
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    sizes.pop(0, None)
    return sum(sizes.values()) + sum(bucket_sizes(model))


def bucket_sizes(model: "nn.Module") -> list[int]:
    """The bytes of each of DDP's buckets; empty for other engines."""
    if not isinstance(model, DistributedDataParallel):
        return []
    facts = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = str(facts.get("rebuilt_bucket_sizes") or facts.get("bucket_sizes") or "")
    return [int(size) for size in sizes.split(",") if size.strip().isdecimal()]
