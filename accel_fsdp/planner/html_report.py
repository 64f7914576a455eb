"""A plan as one HTML page: the recommendation, the memory of each GPU, and the reasons. Loads nothing. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from accel_fsdp import __version__, html_page, svg
from accel_fsdp.config import Engine
from accel_fsdp.job import Job, Layout, Recipe
from accel_fsdp.planner.text_report import PlanReport
from accel_fsdp.prediction import (
    Candidate,
    Plan,
    Problem,
    checkpointing_in,
    rows_in,
    workspace_bytes,
)
from accel_fsdp.prediction.memory import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    KINDS,
    LETTERS,
    LOSS,
    OPTIMIZER,
    PARAMETERS,
    step,
    variant_for,
)
from accel_fsdp.svg import Capacity, Curve, Part, Range, Words
from accel_fsdp.units import GIB, gib_in_figure, number_in_figure, two_digits

MOST_GPUS, LEAST_TOKENS, MOST_TOKENS = 1024, 256, 32_768
CURVES: dict[str, tuple[Engine, int]] = {
    "DDP": (Engine.DDP, 1),
    "FULL_SHARD": (Engine.FSDP2, 1),
    "SHARD_GRAD_OP": (Engine.FSDP2, 2),
}
AGAINST = {kind: kind for kind in (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS)} | {
    GATHERED: "gathered units (FSDP alone)",
    BUFFERS: "buffers (DDP: its buckets)",
}
ALONE = "one GPU"
TOO_THIN = 0.01
CASTS = " DDP's are larger here: it keeps tensors in two dtypes where FSDP computes in one."
SHORT_PHASES = " Between steps (idle), forward (fwd), loss, backward (bwd) of two micro-batches, optimizer step (step)."


@dataclass(frozen=True)
class Series:
    """The peak in bytes for each strategy along an axis of growing numbers; `here` is the job's own number."""

    axis: str
    here: tuple[int, str]
    sizes: Sequence[int]
    peaks: Mapping[str, Sequence[int]]


def make_page(report: PlanReport) -> str:
    return html_page.page(title_of(report.problem), "predicted memory", sections(report))


def make_comparison(
    title: str,
    headline: str,
    advice: Sequence[str],
    figures: Mapping[str, Sequence[Range]],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
) -> str:
    """The page of several machines: the sentences of the terminal, one figure for each amount, and the table."""
    titles, rows = table
    body = (
        f"<header><h1>{escape(title)}</h1><p>{escape(headline)}</p></header>",
        f'<section class="advice">{"".join(f"<p>{escape(line)}</p>" for line in advice)}</section>',
        *(_ranges(name, ranges) for name, ranges in figures.items()),
        html_page.section(
            "The numbers",
            "All predicted: the expected value, and in brackets the minimum and maximum.",
            html_page.table(titles, [[escape(cell) for cell in row] for row in rows]),
        ),
        f"<footer><p>accel-fsdp {__version__}.</p></footer>",
    )
    return html_page.page(title, "predicted cost", body)


def _ranges(name: str, rows: Sequence[Range]) -> str:
    summary = "; ".join(f"{row.name}: {two_digits(row.expected)}" for row in rows)
    words = Words(f"{name} on each machine", summary)
    return html_page.section(
        name,
        "The best way on each machine where something fits.",
        html_page.figure(
            lambda width: svg.ranges(words, rows, width),
            "Predicted. A bar is the expected value; the line goes from the minimum to the maximum.",
        ),
    )


def title_of(problem: Problem) -> str:
    return f"{problem.shape.name} on {problem.ranks} x {problem.gpu.name}"


def sections(report: PlanReport) -> Iterator[str]:
    """Yields the sections of the page: the answer, the table and a figure first, the slowest last."""
    problem, plan = report.problem, report.plan
    choice = plan.choice or min(plan.rows, key=lambda candidate: candidate.prediction.peak.total)
    yield from summary(report)
    yield _step(problem, choice, chosen=plan.choice is not None)
    yield _advice(report)
    if problem.ranks > 1:
        yield _strategy_bars(problem)
    yield _numbers(problem, plan)
    by_gpus = _over_gpus(problem, choice.recipe)
    lead, details = "More GPUs make the sharded state smaller, not the activations.", f"{choice.recipe.length:,} tokens"
    yield _growth("More GPUs", lead, f"{details} per sequence", problem, choice, by_gpus)
    by_tokens = _over_tokens(problem, choice.recipe)
    lead, details = "Longer sequences make the activations larger.", f"on {_gpus(problem)}"
    yield _growth("Longer sequences", lead, details, problem, choice, by_tokens)
    yield _more_numbers(choice, by_gpus, by_tokens)
    yield (
        f"<footer><p>accel-fsdp {__version__}. All sizes are predicted: GiB (1,073,741,824 bytes) that "
        "torch.cuda.max_memory_allocated would count on the fullest GPU, without the CUDA context.</p></footer>"
    )


def summary(report: PlanReport) -> Iterator[str]:
    """Yields the answer and the table of strategies, which the page in a browser shows first."""
    what, why = map(escape, report.answer())
    yield (
        f'<header><h1>{escape(title_of(report.problem))}</h1><p class="answer"><strong>{what}</strong> {why}</p>'
        f'<p class="dim">{escape(report.headline())}</p></header>'
    )
    yield _strategies(report.problem, report.plan)


def _advice(report: PlanReport) -> str:
    """The sentences after the answer; indented text becomes a block to copy."""
    first, *lines = report.advice()
    lines.insert(0, first.removeprefix(" ".join(filter(None, report.answer()))))
    kinds = (("pre" if line.startswith("  ") else "p", escape(line.strip())) for line in lines if line.strip())
    return f'<section class="advice">{"".join(f"<{kind}>{text}</{kind}>" for kind, text in kinds)}</section>'


def _strategy_bars(problem: Problem) -> str:
    jobs = (_curve(problem, problem.job.recipe, name, problem.ranks) for name in ("DDP", "FULL_SHARD"))
    ddp, fsdp = (_timeline(problem, job).most for job in jobs)
    minimum = max(ddp.values()) * TOO_THIN
    kinds = [kind for kind in AGAINST if max(ddp[kind], fsdp[kind]) > minimum]
    rows = [(LETTERS[kind], AGAINST[kind], ddp[kind] / GIB, fsdp[kind] / GIB) for kind in kinds]
    summary = "; ".join(
        f"{name}: {gib_in_figure(ddp_gib)} with DDP, {gib_in_figure(fsdp_gib)} with FSDP"
        for _, name, ddp_gib, fsdp_gib in rows
    )
    words = Words("Parameters, gradients, optimizer state, activations per GPU: DDP against FSDP", summary)
    return html_page.section(
        words.title,
        "DDP keeps everything on every GPU. FSDP keeps a share of the model's state on each and gathers one unit at a "
        "time to compute with it. Activations are not sharded."
        + (CASTS if ddp[ACTIVATIONS] > 1.05 * fsdp[ACTIVATIONS] else ""),
        html_page.figure(
            lambda width: svg.pairs(words, rows, ("DDP", "FULL_SHARD"), width),
            f"Predicted for FSDP2 on {problem.ranks:,} GPUs, {_batch(problem.job)}. Each kind at its own peak; "
            "the peaks are not all at the same time.",
        ),
    )


def _strategies(problem: Problem, plan: Plan) -> str:
    """The table of strategies with a bar each, the recommended one first."""
    choice, limit = plan.choice, _capacity(problem)
    rows = [candidate for candidate in plan.rows if choice is None or candidate.job != choice.job]
    rows = [choice, *rows] if choice else rows
    top = limit.top(max(candidate.prediction.peak.total for candidate in rows) / GIB)
    titles = ("strategy", "memory", "GiB", "fits", "step s", "tokens/s per GPU")
    note = f"<small>recommended: {rows_in(choice.recipe)}, {checkpointing_in(choice.recipe)}</small>" if choice else ""
    cells = [
        (
            escape(candidate.layout.name) + (note if candidate is choice else ""),
            svg.cell_bar(_parts(candidate), limit, top),
            number_in_figure(candidate.prediction.peak.total / GIB),
            candidate.verdict,
            f"{candidate.step.step_seconds:.2f}",
            f"{candidate.tokens_per_s:,.0f}",
        )
        for candidate in rows
    ]
    others = f"{'Others: ' if choice else ''}{_batch(problem.job)}"
    line = f"Red line: all {gib_in_figure(limit.gib)}, of which CUDA and NCCL need some."
    table = html_page.table(titles, cells, "strategies chosen" if choice else "strategies")
    return f'<section>{table}<p class="dim">{others}. {line}</p></section>'


def _parts(candidate: Candidate) -> list[Part]:
    live = candidate.prediction.peak.live
    return [Part(LETTERS[kind], kind, size / GIB) for kind, size in live.items() if size]


def _step(problem: Problem, candidate: Candidate, chosen: bool) -> str:
    samples = _timeline(problem, candidate.job).samples
    phases = [(moment.phase, {LETTERS[kind]: size / GIB for kind, size in moment.live.items()}) for moment in samples]
    name = f"{candidate.layout.name}, {_batch(candidate.job)}"
    peaks = "; ".join(f"{moment.phase}: {gib_in_figure(moment.total / GIB)}" for moment in candidate.prediction.moments)
    words = Words(f"Memory over one step: {name}", f"Highest point of each phase: {peaks}")
    kinds = [kind for kind in KINDS if any(moment.live[kind] for moment in samples)]
    return html_page.section(
        "One step, unit by unit",
        f"{'Recommended' if chosen else 'Nothing fits; the smallest is shown'}: {name}.",
        html_page.figure(
            lambda width: svg.areas(words, phases, _capacity(problem), width),
            "Predicted. From left to right the events in their order, not seconds: for each unit (embedding, block, "
            "head) its peak and what remains allocated. The dot is the highest peak."
            + (SHORT_PHASES if candidate.recipe.accumulation > 1 else ""),
        )
        + _key(kinds),
    )


def _growth(title: str, lead: str, predicted: str, problem: Problem, candidate: Candidate, series: Series) -> str:
    """A figure of the peak against one number, with everything else fixed."""
    setting = (
        f"{rows_in(candidate.recipe)} per GPU, {checkpointing_in(candidate.recipe)}; sharded by FSDP2, without offload"
    )
    curves = [
        Curve(name, f"c{number}", [(x, peak / GIB) for x, peak in zip(series.sizes, peaks, strict=True)])
        for number, (name, peaks) in enumerate(series.peaks.items(), start=1)
    ]
    summary = "; ".join(
        f"{curve.name}: {number_in_figure(curve.points[0][1])} to {gib_in_figure(curve.points[-1][1])}"
        for curve in curves
    )
    span = f"from {series.sizes[0]:,} to {series.sizes[-1]:,} {series.axis}"
    words = Words(f"Highest memory of one GPU by number of {series.axis}", f"{span}: {summary}")
    figure = html_page.figure(
        lambda width: svg.lines(words, curves, _capacity(problem), series.here, series.axis, width),
        f"Predicted, {predicted}. Each mark is twice the one before, on both axes.",
    )
    return html_page.section(title, f"With {setting}. {lead}", figure)


def _over_gpus(problem: Problem, recipe: Recipe) -> Series:
    counts = _doublings(1, MOST_GPUS, problem.ranks)
    peaks = {name: [_peak(problem, _curve(problem, recipe, name, count)) for count in counts] for name in CURVES}
    return Series("GPUs", (problem.ranks, _gpus(problem)), counts, peaks)


def _over_tokens(problem: Problem, recipe: Recipe) -> Series:
    longest = min(MOST_TOKENS, problem.shape.positions or MOST_TOKENS)
    lengths = _doublings(min(LEAST_TOKENS, longest), longest, recipe.length)
    jobs = {name: _curve(problem, recipe, name, problem.ranks) for name in (CURVES if problem.ranks > 1 else [ALONE])}
    peaks = {name: [_peak(problem, job.with_recipe(length=length)) for length in lengths] for name, job in jobs.items()}
    return Series("tokens per sequence", (recipe.length, f"{recipe.length:,} tokens"), lengths, peaks)


def _gpus(problem: Problem) -> str:
    return "1 GPU" if problem.ranks == 1 else f"{problem.ranks:,} GPUs"


def _doublings(first: int, last: int, here: int) -> list[int]:
    powers = [first * 2**power for power in range((last // first).bit_length())]
    return sorted({*powers, last, here})


def _curve(problem: Problem, recipe: Recipe, name: str, ranks: int) -> Job:
    """The recipe in one of `CURVES` on `ranks` ranks."""
    if ranks == 1:
        return Job(Layout.alone(), recipe)
    return Job(Layout(*CURVES[name], ranks, min(ranks, problem.job.layout.ranks_per_node)), recipe)


def _peak(problem: Problem, job: Job) -> int:
    return problem.predicted(job).peak.total


def _timeline(problem: Problem, job: Job) -> step.Timeline:
    tapes = problem.tapes[variant_for(job.recipe, job.layout)]
    return step.timeline(problem.shape, tapes, job.recipe, job.layout, workspace_bytes(problem.gpu))


def _numbers(problem: Problem, plan: Plan) -> str:
    titles = ("strategy", "batch", "checkpointing", "fits", "GiB", *KINDS, "highest in", "step s", "tokens/s per GPU")
    rows = [_cells(candidate, candidate.layout.name) for candidate in plan.rows]
    if plan.choice:
        rows.insert(0, _cells(plan.choice, f"{plan.choice.layout.name} (recommended)"))
    return html_page.section(
        "The numbers",
        f"All predicted, {problem.job.recipe.length:,} tokens per sequence. GiB at the highest point of the step, then "
        "what is alive there.",
        html_page.table(titles, rows, "wide"),
    )


def _cells(candidate: Candidate, name: str) -> list[str]:
    peak = candidate.prediction.peak
    how = (f"{candidate.recipe.rows}", candidate.recipe.checkpointing)
    sizes = [_cell(peak.total), *(_cell(peak.live[kind]) for kind in KINDS)]
    speed = [f"{candidate.step.step_seconds:.2f}", f"{candidate.tokens_per_s:,.0f}"]
    return [escape(name), *how, candidate.verdict, *sizes, peak.phase, *speed]


def _more_numbers(candidate: Candidate, by_gpus: Series, by_tokens: Series) -> str:
    phases = [[moment.phase, _cell(moment.total)] for moment in candidate.prediction.moments]
    folded = (
        ("One step: the highest point of each phase", html_page.table(("phase", "GiB"), phases)),
        ("Number of GPUs", _series_table(by_gpus)),
        ("Sequence length", _series_table(by_tokens)),
    )
    return "".join(f"<details><summary>{name}, predicted</summary>{table}</details>" for name, table in folded)


def _series_table(series: Series) -> str:
    rows = [
        [f"{size:,}", *(_cell(peaks[index]) for peaks in series.peaks.values())]
        for index, size in enumerate(series.sizes)
    ]
    return html_page.table((series.axis, *(f"{name}, GiB" for name in series.peaks)), rows)


def _cell(size: int) -> str:
    return f'<data value="{size}">{number_in_figure(size / GIB)}</data>'


def _key(kinds: Iterable[str]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 20 18" aria-hidden="true"><rect class="{LETTERS[kind]}" width="20" height="18"/>'
        f'<text class="on-{LETTERS[kind]}" x="10" y="14" text-anchor="middle">{LETTERS[kind]}</text></svg>{kind}</li>'
        for kind in kinds
    )
    return f'<ul class="key">{items}</ul>'


def _capacity(problem: Problem) -> Capacity:
    return Capacity(f"one {problem.gpu.name}", problem.gpu.usable_gib)


def _batch(job: Job) -> str:
    recipe = job.recipe
    return f"{rows_in(recipe)} x {recipe.length:,} tokens per {job.layout.row_owner}, {checkpointing_in(recipe)}"
