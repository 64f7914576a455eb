"""The command `accel-fsdp plan`: read the model and the machine, search, show."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, console, linter
from accel_fsdp.config import EXPERT_FIELD, header
from accel_fsdp.errors import UsageError, is_installed
from accel_fsdp.hardware import Gpu, MachineFacts, machines
from accel_fsdp.job import Job, Layout, Recipe, from_arguments, from_yaml
from accel_fsdp.models import config_json
from accel_fsdp.planner import model_notes, proposal, workload
from accel_fsdp.planner.flags import PlanCommand
from accel_fsdp.planner.proposal import Proposer
from accel_fsdp.planner.text_report import PlanReport
from accel_fsdp.prediction import Candidate, Problem, cost, length_of, search, trace_store, written
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.units import counted

SAID_BY_ARGUMENTS = (
    *("seq_len", "batch", "global_batch", "accumulation", "method", "dtype", "precision", "optimizer", "checkpointing"),
    *("lora_rank", "attention", "liger", "tokens"),
)
"""The flags that the arguments of a script decide."""


UNKNOWN_TO_WIZARD = (
    *("batch", "global_batch", "accumulation", "dtype", "optimizer", "checkpointing", "lora_rank", "attention"),
    *("liger", "host_memory"),
)
"""The flags that change the recommended job, and that the wizard doesn't know or takes for an answer."""


def show_plan(flags: PlanCommand) -> int:
    """Prints the plan; returns 0 if something fits, else 1.

    Raises:
        UserError: the model or the GPUs are unknown, a number is invalid, or a file can't be written.
    """
    _refuse_files(flags)
    report = make_plan(flags)
    if flags.json:
        console.put(json.dumps(report.as_json(), indent=2), lines=True)
    else:
        report.show(flags.details)
    _write(flags, report)
    return 0 if report.plan.choice else 1


def make_plan(flags: PlanCommand) -> PlanReport:
    """The plan of a command line: the best one found, or that of the given YAML.

    Raises:
        UserError: the model or the GPUs are unknown, a number is invalid, or flags contradict each other.
    """
    work = workload.work_of(flags)
    if flags.config is not None:
        return _judge_yaml(flags, flags.config, work)
    if flags.args is not None:
        why = "a job is its YAML and its script's arguments; a search takes flags"
        raise UsageError("--args without --config", why=why, fix="--config FILE --args FILE")
    problem = make_problem(flags)
    plan = search.make_plan(problem)
    return PlanReport(problem, plan, _proposer(problem, flags), spent=spent_on(plan.choice, work, flags))


def _proposer(problem: Problem, flags: PlanCommand) -> Proposer:
    machine, _ = machines_of(flags)
    usual, defaults = length_of(problem.shape, None), PlanCommand(flags.model)
    by_default = all(getattr(flags, name) == getattr(defaults, name) for name in UNKNOWN_TO_WIZARD)
    return Proposer(problem.shape.name, machines.as_named(machine), machine.count, usual, by_default)


def machines_of(flags: PlanCommand) -> tuple[MachineFacts, int]:
    """The machine of `--gpus`, and the number of machines.

    Raises:
        UsageError: it can't be read, or the model or the GPUs are missing.
    """
    if not flags.model:
        raise UsageError(
            "--model is missing", why="memory and time follow from it", fix="--model llama-3.1-8b, a hub id or a folder"
        )
    if flags.gpus is None:
        raise UsageError(
            "--gpus is missing",
            why="a plan is for a machine",
            fix="--gpus 8xH100-80GB, or --compare 8xH100-80GB,16xA100-40GB for several",
        )
    return machines.parse(flags.gpus)


def _judge_yaml(flags: PlanCommand, path: Path, work: cost.Work) -> PlanReport:
    """The plan of the job that a YAML, the launch line in its header, --args and the other flags describe together."""
    subject, _ = linter.read_subject(path, linter.Sources(model=flags.model or None, args=flags.args))
    arguments = dict(subject.args or {})
    flags = replace(
        flags,
        model=flags.model or written.model_of(subject, arguments),
        gpus=flags.gpus or from_yaml.gpus_in_header(subject) or None,
    )
    machine, described = machines_of(flags)
    from_arguments.refuse_unreadable(arguments)
    if subject.args is None:
        arguments = from_arguments.arguments_of(Job(Layout.alone(), recipe_of(flags))) | {EXPERT_FIELD: subject.experts}
    else:
        if header.sft_line(subject.source) and subject.uses_sft and not flags.json:
            console.say(linter.from_header(path, flags.args is not None or bool(_changed(flags))))
        work = cost.Work(work.tokens, from_arguments.positive_int(arguments.get("max_steps")))
    arguments |= _changed(flags)
    job, left_out = _as_recordable(from_yaml.predictable(subject, arguments))
    nodes, gpus = _nodes(flags.nodes, described), machines.as_named(machine)
    named = gpus if nodes == 1 else f"{nodes}x{gpus}"
    _check_attention(job.recipe, written.gpu_of(machine))
    _check_numbers(flags, job.recipe, nodes)
    is_default = subject.args is None and flags.seq_len is None
    problem = written.problem_of(subject, job, flags.model, named, by_name.read_shape, is_default)
    job = problem.job.with_recipe(accumulation=_accumulation(flags, job.recipe, job.layout.ranks))
    fault, about_keys = proposal.errors(subject, job)
    notes = (*_model_notes(problem, job.recipe), *from_arguments.notes(arguments), *left_out, *from_yaml.notes(subject))
    problem = replace(problem, job=job, fault=fault, notes=(*notes, *about_keys), host_gib=flags.host_memory or 0)
    plan = search.judge(problem)
    return PlanReport(problem, plan, None, path, spent_on(plan.choice, work, flags), flags.args)


def _changed(flags: PlanCommand) -> dict[str, Any]:
    """The script's arguments that the plan's flags change."""
    defaults, recipe = PlanCommand(), recipe_of(flags)
    fields = {
        "length" if name == "seq_len" else "rows" if name == "batch" else name
        for name in SAID_BY_ARGUMENTS
        if getattr(flags, name) != getattr(defaults, name)
    }
    rows = (row for row in from_arguments.ROWS if row.field in fields)
    return {name: value for row in rows for name, value in row.write(recipe).items()}


def _as_recordable(job: Job) -> tuple[Job, tuple[str, ...]]:
    """Leaves out the mask of packed rows, with a message, where what it allocates can't be recorded."""
    if not job.recipe.masks_documents or all(is_installed(library) for library in trace_store.TRACED_WITH):
        return job, ()
    libraries = " and ".join(trace_store.TRACED_WITH)
    note = f"Without {libraries} installed, the mask of packed rows is not counted."
    return job.with_recipe(packed=False), (note,)


def spent_on(choice: Candidate | None, work: cost.Work, flags: PlanCommand) -> cost.Cost | None:
    """The cost of the job with the chosen candidate; None if nothing fits or a number is unknown."""
    return cost.cost(work, choice.job, choice.step, flags.price) if choice else None


def _refuse_files(flags: PlanCommand) -> None:
    for flag, path, what in (
        ("--html", flags.html, "it may be the page of another plan"),
        ("--output", flags.output, "it may be the YAML of another run"),
    ):
        if path and not flags.force:
            atomic_files.refuse_existing(path, what, flag)
    if flags.output and flags.config:
        raise UsageError(
            "-o beside --config",
            why="a plan for a YAML recommends no other one",
            fix="leave out --config to search, or -o",
        )


def _write(flags: PlanCommand, report: PlanReport) -> None:
    """Writes the page, and the recommended YAML."""
    if flags.html:
        from accel_fsdp.planner import html_report

        atomic_files.write_text(flags.html, html_report.make_page(report))
        console.say(f"written: {flags.html}")
    if flags.output and (text := report.yaml()):
        atomic_files.write_text(flags.output, text)
        console.say(f"written: {flags.output}")
        if note := header.missing_here(header.launch_words(text)):
            console.say(note, style="yellow", wrap=True)
    elif flags.output:
        note = ", and the existing file is older" if atomic_files.is_taken(flags.output) else ""
        console.say(f"warning: {flags.output} was NOT written: nothing fits{note}", style="bold red")


def make_problem(flags: PlanCommand) -> Problem:
    """The problem to plan: a job in any layout.

    Raises:
        UserError: as `show_plan`.
    """
    machine, described = machines_of(flags)
    gpu, recipe = written.gpu_of(machine), recipe_of(flags)
    _check_attention(recipe, gpu)
    nodes = _nodes(flags.nodes, described)
    _check_numbers(flags, recipe, nodes)
    shape, tapes = by_name.read_shape(flags.model, recipe)
    ranks = machine.count * nodes
    recipe = replace(
        recipe,
        length=length_of(shape, flags.seq_len),
        accumulation=_accumulation(flags, recipe, ranks),
        attention="sdpa" if shape.eager_only else recipe.attention,
    )
    problem = Problem(
        *(shape, tapes, gpu, Job(Layout.ddp(ranks, machine.count) if ranks > 1 else Layout.alone(), recipe)),
        fixed_rows=flags.batch is not None,
        global_rows=flags.global_batch or 0,
        host_gib=flags.host_memory or 0,
    )
    return replace(problem, notes=_model_notes(problem, recipe))


def _model_notes(problem: Problem, recipe: Recipe) -> tuple[str, ...]:
    config = getattr(problem.tapes, "config", {})
    return model_notes.model_notes(problem.shape, recipe, config_json.quant_method(config.get("quantization_config")))


def recipe_of(flags: PlanCommand) -> Recipe:
    """The recipe of the flags, with the script's defaults; its length is that of `--seq-len`, or the plan's default."""
    has_bf16 = flags.gpus is None or machines.has_bf16(machines.parse(flags.gpus)[0])
    usual = from_arguments.planned_recipe(flags.method, flags.precision or ("bf16" if has_bf16 else "fp16"))
    return replace(
        usual,
        dtype=flags.dtype or usual.dtype,
        rows=flags.batch or 1,
        length=flags.seq_len or usual.length,
        accumulation=flags.accumulation,
        optimizer=flags.optimizer,
        checkpointing=flags.checkpointing,
        lora_rank=flags.lora_rank,
        attention=flags.attention,
        liger=flags.liger,
    )


def _check_attention(recipe: Recipe, gpu: Gpu) -> None:
    """Refuses a kernel that the GPU doesn't run."""
    if recipe.attention == "flash" and not gpu.has_bf16:
        raise UsageError(
            f"--attention flash doesn't run on {gpu.name}",
            why="flash_attention_2 needs compute capability 8.0, which GPUs have from Ampere (A100) on",
            fix="--attention sdpa, which takes PyTorch's own memory-efficient kernel there",
        )


def _accumulation(flags: PlanCommand, recipe: Recipe, ranks: int) -> int:
    """Micro-batches per step; a global batch decides them."""
    total, rows = flags.global_batch, recipe.rows
    if total is None:
        return recipe.accumulation
    if flags.accumulation != 1:
        raise UsageError(
            "--accumulation beside --global-batch",
            why="the micro-batches per step follow from the global batch",
            fix="leave out one of them",
        )
    if total % (ranks * rows):
        nearest = max(total // (ranks * rows), 1) * ranks * rows
        raise UsageError(
            f"--global-batch {total} can't be shared by {counted(ranks, 'GPU')}"
            + (f" with {counted(rows, 'sequence')} each" if flags.batch else ""),
            why=f"each GPU takes the same number: it must be a multiple of {ranks * rows}",
            fix=f"--global-batch {nearest}, or {nearest + ranks * rows}",
        )
    return total // (ranks * rows)


def _nodes(flag_nodes: int | None, described: int) -> int:
    if flag_nodes is not None and described > 1 and flag_nodes != described:
        raise UsageError(
            f"--nodes {flag_nodes}, and --gpus names {described} machines",
            why="one of them is wrong",
            fix="leave out --nodes",
        )
    return described if flag_nodes is None else flag_nodes


def _check_numbers(flags: PlanCommand, recipe: Recipe, nodes: int) -> None:
    numbers = {
        "--nodes": nodes,
        "--batch": flags.batch,
        "--accumulation": recipe.accumulation,
        "--lora-rank": recipe.lora_rank,
        "--seq-len": flags.seq_len,
        "--global-batch": flags.global_batch,
        "--host-memory": flags.host_memory,
    }
    for flag, value in numbers.items():
        if value is not None and value < 1:
            is_memory = flag == "--host-memory"
            why = "a machine has some memory to load the model" if is_memory else "there would be nothing to train"
            raise UsageError(f"{flag} {value} is less than 1", why=why, fix=f"{flag} {512 if is_memory else 1}")
