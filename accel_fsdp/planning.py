"""The command `accel-fsdp plan`: read the model and the machine, search, show."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_fsdp import files, gpus, layouts, machines, overheads, page, plan, render, tracing
from accel_fsdp.errors import UsageError
from accel_fsdp.inputs import read_subject
from accel_fsdp.meter import KINDS, LETTERS
from accel_fsdp.overheads import GIB
from accel_fsdp.plan import Candidate, Job, Plan, checkpointing_in, name_of, rows_in
from accel_fsdp.traffic import step_traffic
from accel_fsdp.types import Layout, Recipe

BAR_CELLS = 20
DEFAULT_LENGTH = 2048
COLUMNS = ("strategy", "GiB", "of one GPU", "fits", "peak in", "sent GB", "step s", "tokens/s")
WIDE, WIDE_ONLY = 104, ("peak in", "sent GB")
COLOURS = dict(
    zip(KINDS, ("blue", "magenta", "yellow", "cyan", "green", "red", "bright_black", "bright_black"), strict=True)
)


@dataclass(frozen=True)
class Options:
    """What the command takes. `rows` None: the table has one row per GPU, the search finds the largest that fits.
    `length` None: 2048 tokens, or the model's positions where it has fewer.

    `html` is where the plan is also written as a page.
    """

    model: str
    gpus: str
    nodes: int | None
    recipe: Recipe
    rows: int | None = None
    length: int | None = None
    json: bool = False
    config: Path | None = None
    html: Path | None = None
    force: bool = False


def show_plan(options: Options) -> int:
    """Prints the plan; returns 0 where something fits, 1 where nothing does.

    Raises:
        UserError: the model or the GPUs are not known, the numbers can't be, or the page can't be written.
    """
    if options.html and not options.force:
        files.refuse_existing(options.html, "it may be the page of another plan", "--html")
    layout = subject = None
    machines_there = 0
    if options.config is not None:
        subject, _ = read_subject(options.config)
        layout, recipe = layouts.of_subject(subject, options.recipe)
        options = replace(options, recipe=recipe)
        machines_there = subject.number("num_machines") or 1
    job = make_job(options, layout, machines_there)
    if subject is not None:
        efficient = not subject.is_fsdp or subject.on("fsdp_cpu_ram_efficient_loading")
        job = replace(job, ram_efficient=efficient, notes=layouts.notes(subject))
    found = plan.make_plan(job) if layout is None else plan.judge(job, layout)
    if options.json:
        render.put(json.dumps(as_json(job, found), indent=2))
    else:
        _show(job, found)
    if options.html:
        files.write_text(options.html, page.make_page(job, found, _headline(job), list(_recommendation(job, found))))
        render.say(f"written: {options.html}")
    return 0 if found.choice else 1


def make_job(options: Options, layout: Layout | None = None, machines_there: int = 0) -> Job:
    """What is to be planned; with the layout of a YAML on as many GPUs and machines as it has.

    Raises:
        UserError: as `show_plan`.
    """
    machine, described = machines.parse(options.gpus)
    if machine.accelerator is None:
        raise UsageError(
            "--gpus cpu has no GPU memory to plan for", why="a plan is about GPUs", fix="--gpus 8xH100-80GB"
        )
    gpu = gpus.find(machine.accelerator, machine.memory_gib)
    nodes = _nodes(options.nodes, described)
    given = options.recipe
    rows = 1 if options.rows is None else options.rows
    numbers = {"--nodes": nodes, "--batch": rows, "--accumulation": given.accumulation, "--lora-rank": given.lora_rank}
    for flag, value in {**numbers, "--seq-len": 1 if options.length is None else options.length}.items():
        _positive(flag, value)
    shape, tapes = tracing.read_shape(options.model, options.recipe)
    length = options.length or min(DEFAULT_LENGTH, shape.positions or DEFAULT_LENGTH)
    if shape.positions and length > shape.positions:
        raise UsageError(
            f"--seq-len {length} is longer than the {shape.positions} positions of {shape.name}",
            why="the model was not made for them",
            fix=f"--seq-len {shape.positions} or less",
        )
    recipe = replace(options.recipe, rows=rows, length=length)
    if layout is not None:
        if machine.count * nodes != layout.ranks:
            raise UsageError(
                f"--gpus {options.gpus} is {machine.count * nodes} GPUs, the YAML has {layout.ranks} processes",
                why="each process drives one GPU",
                fix=f"--gpus {layout.ranks}x{machine.accelerator}, or change num_processes",
            )
        if nodes != machines_there:
            raise UsageError(
                f"--gpus {options.gpus} is {nodes} machines, the YAML has num_machines: {machines_there}",
                why="the links between machines decide the speed",
                fix=f"--gpus {layout.ranks // machines_there}x{machine.accelerator} --nodes {machines_there}",
            )
        return Job(shape, tapes, recipe, gpu, layout.ranks, layout.ranks_per_node, True)
    return Job(shape, tapes, recipe, gpu, machine.count * nodes, machine.count, options.rows is not None)


def _nodes(asked: int | None, described: int) -> int:
    if asked is not None and described > 1 and asked != described:
        raise UsageError(
            f"--nodes {asked}, and --gpus names {described} machines",
            why="one of them is wrong",
            fix="leave out --nodes",
        )
    return described if asked is None else asked


def _positive(flag: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{flag} {value} is less than 1", why="there would be nothing to train", fix=f"{flag} 1")


def as_json(job: Job, found: Plan) -> dict[str, Any]:
    """The plan as numbers; bytes are bytes, seconds seconds."""
    return {
        "model": job.shape.name,
        "parameters": overheads.model_numel(job.shape),
        "method": job.recipe.method,
        "precision": job.recipe.precision,
        "sequence_length": job.recipe.length,
        "gpu": job.gpu.name,
        "gpu_memory_bytes": job.capacity_bytes,
        "gpus": job.ranks,
        "gpus_per_machine": job.ranks_per_node,
        "strategies": [_row_json(job, one) for one in found.rows],
        "choice": _row_json(job, found.choice) if found.choice else None,
        "runner_up": _row_json(job, found.runner_up) if found.runner_up else None,
        "reason": found.reason,
        "longest_sequence": found.longest,
        "changes": list(found.changes),
    }


def _row_json(job: Job, one: Candidate) -> dict[str, Any]:
    peak, traffic = one.prediction.peak, step_traffic(job.shape, one.recipe, one.layout)
    host = overheads.host(job.shape, one.recipe, one.layout, job.ram_efficient)
    return {
        "strategy": name_of(one.layout),
        "rows": one.recipe.rows,
        "checkpointing": one.recipe.checkpointing,
        "fits": one.device.verdict,
        "peak_bytes": peak.total,
        "peak_phase": peak.phase,
        "breakdown_bytes": {kind: size for kind, size in peak.live.items() if size},
        "steady_bytes": one.prediction.steady,
        "reserved_bytes": one.device.reserved,
        "device_bytes": one.device.used,
        "host_loading_bytes": host.loading,
        "host_offload_bytes": host.offload,
        "host_gathering_bytes": host.gathering,
        "checkpoint_bytes": host.checkpoint,
        "export_bytes": host.export,
        "phases": {moment.phase: moment.total for moment in one.prediction.moments},
        "sent_bytes": {
            "intra-node": traffic.intra_bytes,
            "inter-node": traffic.inter_bytes,
            "pcie": traffic.pcie_bytes,
        },
        "step_seconds": one.step.step_seconds,
        "step_seconds_range": one.step.range_seconds,
        "tokens_per_s_per_gpu": one.tokens_per_s,
        "mfu": one.step.mfu,
        "bound": one.step.bound,
        "assumptions": (*job.notes, *one.step.assumptions),
    }


def _headline(job: Job) -> str:
    recipe = job.recipe
    millions = overheads.model_numel(job.shape) / 1e6
    return (
        f"{job.shape.name}: {millions:,.1f} M parameters, {recipe.method} training on "
        f"{job.ranks} x {job.gpu.name} with {job.gpu.usable_gib:.1f} GiB, "
        f"{recipe.rows} x {recipe.length:,} tokens per GPU; all of it predicted."
    )


def _show(job: Job, found: Plan) -> None:
    render.put(_headline(job), wrap=True)
    shown = COLUMNS if render.data.width >= WIDE else tuple(name for name in COLUMNS if name not in WIDE_ONLY)
    rows = [_cells(job, one) for one in found.rows]
    render.show_bars(shown, [[row[name] for name in shown] for row in rows], _legend())
    for line in _recommendation(job, found):
        render.put(line, wrap=True)


def _cells(job: Job, one: Candidate) -> dict[str, Any]:
    traffic = step_traffic(job.shape, one.recipe, one.layout)
    sent = (traffic.intra_bytes + traffic.inter_bytes + traffic.pcie_bytes) / 1e9
    parts = [(LETTERS[kind], COLOURS[kind], size) for kind, size in one.prediction.peak.live.items() if size]
    cells = (
        name_of(one.layout),
        f"{one.device.allocated / GIB:,.1f}",
        render.bar(parts, job.capacity_bytes, BAR_CELLS),
        one.device.verdict,
        one.prediction.peak.phase,
        f"{sent:,.1f}",
        f"{one.step.step_seconds:.2f}",
        f"{one.tokens_per_s:,.0f}",
    )
    return dict(zip(COLUMNS, cells, strict=True))


def _legend() -> list[tuple[str, str, str]]:
    return [(LETTERS[kind], COLOURS[kind], kind) for kind in KINDS]


def _recommendation(job: Job, found: Plan) -> Iterator[str]:
    choice, second = found.choice, found.runner_up
    if choice is None:
        yield f"Nothing fits into {job.gpu.usable_gib:.1f} GiB per GPU. What would:"
        yield from (f"  {change}" for change in found.changes or ("a smaller model, or more machines",))
        return
    how = f"{rows_in(choice.recipe)} per GPU, {checkpointing_in(choice.recipe)}"
    yield f"Take {name_of(choice.layout)} with {how}. {found.reason}"
    if second:
        times = choice.tokens_per_s / second.tokens_per_s
        slower = f"{times - 1:.1%} slower" if times < 1.5 else f"{times:.1f} times as slow"
        used = second.device.allocated / GIB
        other = f"{rows_in(second.recipe)}, {checkpointing_in(second.recipe)}"
        yield f"Next is {name_of(second.layout)} ({other}): {used:.1f} GiB, {slower}."
    whose = ", the model's limit" if found.longest == job.shape.positions else ""
    yield f"The longest sequence that fits this way has {found.longest:,} tokens{whose}."
    host = overheads.host(job.shape, choice.recipe, choice.layout, job.ram_efficient)
    offload = f", {_short(host.offload / GIB)} GiB to train from" if host.offload else ""
    yield (
        f"Each machine needs {_short(host.loading / GIB)} GiB of memory to load the model{offload}; a checkpoint takes "
        f"{_short(host.checkpoint / 1e9)} GB of disk, the exported model {_short(host.export / 1e9)} GB."
    )
    if choice.layout.offload and found.changes:
        yield "Where machines have less memory than that: " + "; or ".join(found.changes) + "."
    yield "Assumed: " + " ".join((*job.notes, *choice.step.assumptions))


def _short(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:,.1f}"
