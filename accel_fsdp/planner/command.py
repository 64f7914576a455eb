"""The command `accel-fsdp plan`: read the model and the machine, search, show."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, get_args

from accel_fsdp import atomic_files, console, flag_words, linter
from accel_fsdp.config import Method, Precision, made_with, read_config, yaml_file
from accel_fsdp.errors import UsageError, is_installed
from accel_fsdp.hardware import Gpu, MachineFacts, gpus, machines
from accel_fsdp.job import Layout, Recipe, from_arguments, from_yaml
from accel_fsdp.linter.rules import Subject
from accel_fsdp.models import catalogue, config_json
from accel_fsdp.planner import proposal, text_report, workload
from accel_fsdp.planner.flags import PlanCommand
from accel_fsdp.planner.proposal import Proposer
from accel_fsdp.planner.text_report import PlanReport
from accel_fsdp.planner.workload import Prices
from accel_fsdp.prediction import Candidate, PlanJob, capacity, cost, search, speed, trace_store
from accel_fsdp.prediction.memory import ModelShape
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.units import counted

DEFAULT_LENGTH = 2048
MOST_TOKENS = 1_000_000_000
"""More tokens in a step are taken for a typing error: the largest known steps have some 100 million."""
ReadShape: TypeAlias = Callable[[str, Recipe], tuple[ModelShape, by_name.Recorded]]


@dataclass(frozen=True)
class PlanOptions:
    """The command's options. `rows` None: the table has one sequence per GPU, and the search chooses the micro-batch.
    `length` None: 2048 tokens, or the model's positions if it has fewer. `global_rows` are the sequences of one
    optimizer step on all GPUs, None for any number.

    `output` is the path of the recommended YAML, `html` that of the plan as a page. `args` are the script's arguments,
    together with a `config`. `work` is the amount of training to price, None without a cost report, at `prices`.
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
    global_rows: int | None = None
    host_gib: int | None = None
    output: Path | None = None
    args: Path | None = None
    work: cost.CostInputs | None = None
    prices: Prices | float | None = None


def options_of(command: PlanCommand) -> PlanOptions:
    """The options of a command line, with defaults for missing flags.

    Raises:
        UsageError: flags contradict each other, or a value is invalid.
    """
    command = _with_header(command)
    if not command.model:
        raise UsageError(
            "--model is missing", why="memory and time follow from it", fix="--model llama-3.1-8b, a hub id or a folder"
        )
    if command.gpus is None:
        raise UsageError(
            "--gpus is missing",
            why="a plan is for a machine",
            fix="--gpus 8xH100-80GB, or --compare 8xH100-80GB,16xA100-40GB for several",
        )
    _refuse_beside_args(command)
    prices = workload.prices_of(command)
    workload.refuse_idle_prices(command)
    usual: Precision = "bf16" if machines.has_bf16(machines.parse(command.gpus)[0]) else "fp16"
    recipe = Recipe(
        command.method,
        command.precision or usual,
        command.dtype or ("float32" if command.method == "full" else "bfloat16"),
        accumulation=command.accumulation,
        optimizer=command.optimizer,
        checkpointing=command.checkpointing,
        chunked_loss=command.chunked_loss,
        lora_rank=command.lora_rank,
        attention=command.attention,
        kernels=command.kernels,
    )
    return PlanOptions(
        model=command.model,
        gpus=command.gpus,
        nodes=command.nodes,
        recipe=recipe,
        rows=command.batch,
        length=command.seq_len,
        json=command.json,
        config=command.config,
        html=command.html,
        force=command.force,
        global_rows=command.global_batch,
        host_gib=command.host_memory,
        output=command.output,
        args=command.args,
        work=workload.job_of(command),
        prices=prices,
    )


def _with_header(command: PlanCommand) -> PlanCommand:
    """The flags, completed from the command in the header of `--config`; the method too if the model comes from it."""
    if command.config is None or str(command.config) == yaml_file.STDIN or (command.model and command.gpus):
        return command
    config, _ = read_config(command.config)
    made = made_with(config.source)
    gpus = command.gpus or from_yaml.gpus_in_header(config) or None
    if command.model or command.args:
        return replace(command, model=command.model or made.get("--model", ""), gpus=gpus)
    method = next((name for name in get_args(Method) if name == made.get("--method")), command.method)
    return replace(command, model=made.get("--model", ""), gpus=gpus, method=method)


SAID_BY_ARGUMENTS = (
    *("seq_len", "batch", "global_batch", "accumulation", "method", "dtype", "precision", "optimizer", "checkpointing"),
    *("lora_rank", "chunked_loss", "attention", "kernels", "tokens"),
)
"""The flags that the arguments of a script decide."""


def _refuse_beside_args(command: PlanCommand) -> None:
    if command.args is None:
        return
    if command.config is None:
        raise UsageError(
            "--args without --config",
            why="a job is its YAML and its script's arguments; a search takes flags",
            fix="--config FILE --args FILE",
        )
    defaults = PlanCommand(command.model)
    changed = [name for name in SAID_BY_ARGUMENTS if getattr(command, name) != getattr(defaults, name)]
    if changed:
        flag = flag_words.flag_of(changed[0])
        raise UsageError(f"{flag} beside --args", why="the script's arguments say it", fix=f"leave out {flag}")


def show_plan(options: PlanOptions) -> int:
    """Prints the plan; returns 0 if something fits, else 1.

    Raises:
        UserError: the model or the GPUs are unknown, a number is invalid, or a file can't be written.
    """
    _refuse_files(options)
    report = make_plan(options)
    if options.json:
        console.put(json.dumps(report.as_json(), indent=2), lines=True)
    else:
        report.show()
    _write(options, report)
    return 0 if report.plan.choice else 1


def make_plan(options: PlanOptions) -> PlanReport:
    """The plan of a command line: the best one found, or that of the given YAML.

    Raises:
        UserError: the model or the GPUs are unknown, or a number is invalid.
    """
    if options.config is not None:
        return _judged(options, options.config)
    job, proposer = search_job(options)
    plan = search.make_plan(job)
    return PlanReport(job, plan, proposer, spent=spent_on(options, job, plan.choice))


def search_job(options: PlanOptions, shape: ReadShape = by_name.read_shape) -> tuple[PlanJob, Proposer]:
    """The job to search layouts for, which refuses those that don't work, and the writer of a candidate's YAML.

    Raises:
        UserError: as `make_plan`.
    """
    job = make_job(options, read_shape=shape)
    every = list(search.layouts(job.ranks, job.ranks_per_node))
    proposer = _proposer(options, job).over(job.recipe, every)
    return replace(job, refuses=proposer.refuses), proposer


def _judged(options: PlanOptions, path: Path) -> PlanReport:
    subject, _ = linter.read_subject(path, linter.Sources(model=options.model, args=options.args))
    if options.args is None:
        written = from_yaml.predictable(subject, recipe=options.recipe)
    else:
        arguments = dict(subject.args or {})
        _refuse_other_model(options, arguments)
        from_arguments.refuse_unreadable(arguments)
        written = from_yaml.predictable(subject, arguments)
        options = _of_arguments(options, arguments, written.recipe)
    job = make_job(replace(options, recipe=written.recipe), written.layout, subject.number("num_machines") or 1)
    if options.args is not None:
        job = replace(job, notes=(*job.notes, *from_arguments.notes(subject.args or {})))
        job = _without_dropout(job)
    job = _as_written(job, subject)
    plan = search.judge(job, written.layout)
    return PlanReport(job, plan, None, path, spent_on(options, job, plan.choice, subject), options.args)


def _of_arguments(options: PlanOptions, arguments: Mapping[str, Any], recipe: Recipe) -> PlanOptions:
    """The options with batch, length and schedule of the script's arguments."""
    inputs, schedule = options.work or cost.CostInputs(cost.Work()), from_arguments.schedule_of(arguments)
    inputs = replace(inputs, work=cost.work_of(schedule, inputs.work.rows), schedule=schedule)
    return replace(options, rows=recipe.rows, length=recipe.length, work=inputs)


def _refuse_other_model(options: PlanOptions, arguments: Mapping[str, Any]) -> None:
    named = str(arguments.get("model_name_or_path", options.model))
    flag_model, argument_model = catalogue.canonical(options.model), catalogue.canonical(named)
    if flag_model and argument_model and flag_model != argument_model:
        raise UsageError(
            f"--model {options.model}, and {options.args} has model_name_or_path {named}",
            why="one of them is another job's",
            fix=f"--model {named}, or other arguments",
        )


def _without_dropout(job: PlanJob) -> PlanJob:
    """Leaves out adapters' dropout, which the bundled tapes lack, if no tape can be recorded."""
    if not job.recipe.lora_dropout or all(is_installed(library) for library in trace_store.TRACED_WITH):
        return job
    note = f"Without {' and '.join(trace_store.TRACED_WITH)} installed, lora_dropout's masks are not counted."
    return replace(job, recipe=replace(job.recipe, lora_dropout=False), notes=(*job.notes, note))


def spent_on(
    options: PlanOptions, job: PlanJob, choice: Candidate | None, subject: Subject | None = None
) -> cost.Cost | None:
    """The cost of the job with the chosen candidate; None without a cost report, or if nothing fits."""
    if choice is None or options.work is None:
        return None
    host = capacity.host(job.shape, choice.recipe, choice.layout, job.ram_efficient)
    inputs = replace(options.work, price=workload.price_for(options.prices, job.gpu))
    twice = subject is not None and subject.is_fsdp and subject.full_state_dict and choice.recipe.method == "full"
    checkpoint = host.checkpoint + host.gathering * twice  # once for the engine, once for Hugging Face
    evaluated = replace(choice.recipe, rows=choice.recipe.eval_batch)
    forward = speed.forward_seconds(job.shape, evaluated, choice.layout, job.gpu) if evaluated.rows else 0
    return cost.cost(inputs, choice.recipe, choice.layout, choice.step, job.gpu, checkpoint, forward)


def _refuse_files(options: PlanOptions) -> None:
    for flag, path, what in (
        ("--html", options.html, "it may be the page of another plan"),
        ("--output", options.output, "it may be the YAML of another run"),
    ):
        if path and not options.force:
            atomic_files.refuse_existing(path, what, flag)
    if options.output and options.html and options.output.resolve() == options.html.resolve():
        raise UsageError(
            f"-o and --html are both {options.output}", why="one would replace the other", fix="another name for one"
        )
    if options.output and options.config:
        raise UsageError(
            "-o beside --config",
            why="a plan for a YAML recommends no other one",
            fix="leave out --config to search, or -o",
        )


def _write(options: PlanOptions, report: PlanReport) -> None:
    """Writes the page, and the recommended YAML."""
    if options.html:
        from accel_fsdp.planner import html_report

        atomic_files.write_text(
            options.html, html_report.make_page(report.job, report.plan, report.headline(), list(report.advice()))
        )
        console.say(f"written: {options.html}")
    if options.output and (text := report.yaml()):
        atomic_files.write_text(options.output, text)
        console.say(f"written: {options.output}")
    elif options.output:
        there = ", and what is there is older" if atomic_files.is_taken(options.output) else ""
        console.say(f"warning: {options.output} was NOT written: nothing fits{there}", style="bold red")


def _as_written(job: PlanJob, subject: Subject) -> PlanJob:
    """The job of a YAML: its notes, and what the linter says against it."""
    efficient = not subject.is_fsdp or subject.on("fsdp_cpu_ram_efficient_loading")

    def refuses(recipe: Recipe, layout: Layout) -> str:
        return proposal.first_error(subject, recipe, layout)

    return replace(job, ram_efficient=efficient, notes=(*job.notes, *from_yaml.notes(subject)), refuses=refuses)


def _proposer(options: PlanOptions, job: PlanJob) -> Proposer:
    machine, _ = machines.parse(options.gpus)
    layers = tuple(dict.fromkeys(block.name for block in job.shape.blocks))
    return Proposer(job.shape.name, machines.as_named(machine), machine.count, layers)


def make_job(
    options: PlanOptions,
    layout: Layout | None = None,
    machines_there: int = 0,
    read_shape: ReadShape = by_name.read_shape,
) -> PlanJob:
    """What is to be planned; with the layout of a YAML on as many GPUs and machines as it has.

    Raises:
        UserError: as `show_plan`.
    """
    machine, described = machines.parse(options.gpus)
    gpu = gpu_of(machine)
    _check_attention(options.recipe, gpu)
    nodes = _nodes(options.nodes, described)
    _check_numbers(options, nodes)
    shape, tapes = read_shape(options.model, options.recipe)
    ranks = machine.count * nodes
    if layout is not None:
        _check_layout(options, machine, nodes, layout, machines_there)
    accumulation = _accumulation(options, ranks)
    recipe = replace(
        options.recipe,
        rows=options.rows or 1,
        length=_length(options, shape),
        accumulation=accumulation,
        attention="sdpa" if shape.eager_only else options.recipe.attention,
    )
    _check_step(recipe, options.global_rows or 0)
    return PlanJob(
        *(shape, tapes, recipe, gpu, ranks, layout.ranks_per_node if layout else machine.count),
        fixed_rows=layout is not None or options.rows is not None,
        notes=text_report.model_notes(
            shape, options.recipe, config_json.quant_method(tapes.config.get("quantization_config"))
        ),
        global_rows=options.global_rows or 0,
        host_gib=options.host_gib or 0,
    )


def gpu_of(machine: MachineFacts, flag: str = "--gpus") -> Gpu:
    """The GPU of a machine that a flag describes.

    Raises:
        UsageError: the machine has no GPU, or an unknown one.
    """
    if machine.accelerator is None:
        raise UsageError(
            f"{flag} cpu has no GPU memory to plan for", why="a plan is about GPUs", fix=f"{flag} 8xH100-80GB"
        )
    return gpus.find(machine.accelerator, machine.memory_gib)


def _check_attention(recipe: Recipe, gpu: Gpu) -> None:
    """Refuses a kernel that the GPU doesn't run."""
    if recipe.attention == "flash" and not gpu.has_flash:
        raise UsageError(
            f"--attention flash doesn't run on {gpu.name}",
            why="flash_attention_2 needs compute capability 8.0, which GPUs have from Ampere (A100) on",
            fix="--attention sdpa, which takes PyTorch's own memory-efficient kernel there",
        )


def _length(options: PlanOptions, shape: ModelShape) -> int:
    length = options.length or min(DEFAULT_LENGTH, shape.positions or DEFAULT_LENGTH)
    flag = "--max_length" if options.args else "--seq-len"
    if shape.positions and length > shape.positions:
        raise UsageError(
            f"{flag} {length} is longer than the {shape.positions} positions of {shape.name}",
            why=f"the model has no positions beyond {shape.positions}",
            fix=f"{flag} {shape.positions} or less",
        )
    return length


def _accumulation(options: PlanOptions, ranks: int) -> int:
    """Micro-batches per step; a global batch decides them."""
    total, rows = options.global_rows, options.rows or 1
    if total is None:
        return options.recipe.accumulation
    if options.recipe.accumulation != 1:
        raise UsageError(
            "--accumulation beside --global-batch",
            why="the micro-batches per step follow from the global batch",
            fix="leave out one of them",
        )
    if total % (ranks * rows):
        nearest = max(total // (ranks * rows), 1) * ranks * rows
        raise UsageError(
            f"--global-batch {total} can't be shared by {counted(ranks, 'GPU')}"
            + (f" with {counted(rows, 'sequence')} each" if options.rows else ""),
            why=f"each GPU takes the same number: it must be a multiple of {ranks * rows}",
            fix=f"--global-batch {nearest}, or {nearest + ranks * rows}",
        )
    return total // (ranks * rows)


def _check_layout(options: PlanOptions, machine: MachineFacts, nodes: int, layout: Layout, machines_there: int) -> None:
    """Refuses GPUs that differ from those of the YAML."""
    if machine.count * nodes != layout.ranks:
        raise UsageError(
            f"--gpus {options.gpus} is {counted(machine.count * nodes, 'GPU')}, the YAML has "
            f"{counted(layout.ranks, 'process', 'processes')}",
            why="each process drives one GPU",
            fix=f"--gpus {layout.ranks}x{machine.accelerator}, or change num_processes",
        )
    if nodes != machines_there:
        raise UsageError(
            f"--gpus {options.gpus} is {counted(nodes, 'machine')}, the YAML has num_machines: {machines_there}",
            why="the links between machines decide the speed",
            fix=f"--gpus {layout.ranks // machines_there}x{machine.accelerator} --nodes {machines_there}",
        )


def _nodes(asked: int | None, described: int) -> int:
    if asked is not None and described > 1 and asked != described:
        raise UsageError(
            f"--nodes {asked}, and --gpus names {described} machines",
            why="one of them is wrong",
            fix="leave out --nodes",
        )
    return described if asked is None else asked


def _check_numbers(options: PlanOptions, nodes: int) -> None:
    numbers = {
        "--nodes": nodes,
        "--batch": options.rows,
        "--accumulation": options.recipe.accumulation,
        "--lora-rank": options.recipe.lora_rank,
        "--seq-len": options.length,
        "--global-batch": options.global_rows,
        "--host-memory": options.host_gib,
    }
    for flag, value in numbers.items():
        if value is not None and value < 1:
            memory = flag == "--host-memory"
            why = "a machine has some memory to load the model" if memory else "there would be nothing to train"
            raise UsageError(f"{flag} {value} is less than 1", why=why, fix=f"{flag} {512 if memory else 1}")


def _check_step(recipe: Recipe, global_rows: int) -> None:
    """Refuses steps that the table's columns can't hold.

    Raises:
        UsageError: a step has too many tokens.
    """
    rows = {"--batch": recipe.rows, "--accumulation": recipe.accumulation, "--global-batch": global_rows}
    flag, most = max(rows.items(), key=lambda row: row[1])
    tokens = max(recipe.rows * recipe.accumulation, global_rows) * recipe.length
    if tokens > MOST_TOKENS:
        raise UsageError(
            f"{flag} {most} makes a step of {tokens:,} tokens",
            why=f"a step of more than {MOST_TOKENS:,} takes days",
            fix=f"{flag} {max(most * MOST_TOKENS // tokens, 1)} or less",
        )
