"""A plan as one HTML page: the answer, the table of strategies, and the recommended step. Loads nothing. Pure."""

from collections.abc import Iterable, Iterator
from html import escape

from accel_fsdp import __version__
from accel_fsdp.job import Job
from accel_fsdp.planner import html_page, svg
from accel_fsdp.planner.svg import Capacity, Words
from accel_fsdp.planner.text_report import PlanReport
from accel_fsdp.prediction import Candidate, Problem, checkpointing_in, rows_in, workspace_bytes
from accel_fsdp.prediction.memory import KINDS, LETTERS, step, variant_for
from accel_fsdp.units import GIB, gib_in_figure, number_in_figure

COLUMNS = ("strategy", "memory", "GiB", "fits", "step s", "tokens/s per GPU")
SHORT_PHASES = " Between steps (idle), forward (fwd), loss, backward (bwd) of two micro-batches, optimizer step (step)."


def make_page(report: PlanReport) -> str:
    return html_page.page(title_of(report.problem), "predicted memory", sections(report))


def title_of(problem: Problem) -> str:
    return f"{problem.shape.name} on {problem.ranks} x {problem.gpu.name}"


def sections(report: PlanReport) -> Iterator[str]:
    """Yields the sections of the page: the answer, the table, the step, the sentences of the terminal."""
    yield (
        f"<header><h1>{escape(title_of(report.problem))}</h1>"
        f'<p class="answer"><strong>{escape(report.answer())}</strong></p>'
        f'<p class="dim">{escape(report.headline())}</p></header>'
    )
    yield _table(report)
    yield _step(report)
    yield _advice(report)
    yield (
        f"<footer><p>accel-fsdp {__version__}. All sizes are predicted: GiB (1,073,741,824 bytes) that "
        "a GPU needs at the peak of a step; the figure is without the part of CUDA and NCCL.</p></footer>"
    )


def _table(report: PlanReport) -> str:
    """The table of strategies with a bar each, the recommended one first."""
    plan, choice, limit = report.plan, report.plan.choice, _capacity(report.problem)
    others = [candidate for candidate in plan.rows if choice is None or candidate.job != choice.job]
    rows = [choice, *others] if choice else others
    top = limit.top(max(candidate.prediction.peak.total for candidate in rows) / GIB)
    note = f"<small>recommended: {rows_in(choice.recipe)}, {checkpointing_in(choice.recipe)}</small>" if choice else ""
    cells = [_cells(candidate, note if candidate is choice else "", limit, top) for candidate in rows]
    table = html_page.table(COLUMNS, cells, "strategies chosen" if choice else "strategies")
    batch = f"{'Others: ' if choice else ''}{_batch(report.problem.job)}"
    line = f"Red line: all {gib_in_figure(limit.gib)}, of which CUDA and NCCL need some."
    return f'<section>{table}<p class="dim">{batch}. {line}</p></section>'


def _cells(candidate: Candidate, note: str, limit: Capacity, top: float) -> list[str]:
    peak = candidate.prediction.peak
    parts = [(LETTERS[kind], kind, size / GIB) for kind, size in peak.live.items() if size]
    return [
        escape(candidate.layout.name) + note,
        svg.cell_bar(parts, limit, top),
        f'<data value="{candidate.device.needed}">{number_in_figure(candidate.device.needed / GIB)}</data>',
        candidate.verdict,
        *candidate.pace,
    ]


def _step(report: PlanReport) -> str:
    """The figure of one step of the recommended candidate, or of the smallest."""
    problem, plan = report.problem, report.plan
    candidate = plan.choice or min(plan.rows, key=lambda row: row.prediction.peak.total)
    tapes = problem.tapes[variant_for(candidate.recipe, candidate.layout)]
    workspace = workspace_bytes(problem.gpu)
    samples = step.timeline(problem.shape, tapes, candidate.recipe, candidate.layout, workspace)
    phases = [(moment.phase, {LETTERS[kind]: size / GIB for kind, size in moment.live.items()}) for moment in samples]
    name = f"{candidate.layout.name}, {_batch(candidate.job)}"
    peaks = "; ".join(f"{moment.phase}: {gib_in_figure(moment.total / GIB)}" for moment in candidate.prediction.moments)
    words = Words(f"Memory over one step: {name}", f"Highest point of each phase: {peaks}")
    figure = html_page.figure(
        lambda width: svg.areas(words, phases, _capacity(problem), width),
        "Predicted. From left to right the events in their order, not seconds: for each unit (embedding, block, "
        "head) its peak and what remains allocated. The dot is the highest peak."
        + (SHORT_PHASES if candidate.recipe.accumulation > 1 else ""),
    )
    lead = f"{'Recommended' if plan.choice else 'Nothing fits; the smallest is shown'}: {name}."
    key = _key(kind for kind in KINDS if any(moment.live[kind] for moment in samples))
    return html_page.section("One step, unit by unit", lead, figure + key)


def _key(kinds: Iterable[str]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 20 18" aria-hidden="true"><rect class="{LETTERS[kind]}" width="20" height="18"/>'
        f'<text class="on-{LETTERS[kind]}" x="10" y="14" text-anchor="middle">{LETTERS[kind]}</text></svg>{kind}</li>'
        for kind in kinds
    )
    return f'<ul class="key">{items}</ul>'


def _advice(report: PlanReport) -> str:
    """The sentences that explain the answer, and what to copy."""
    sentences = "".join(f"<p>{escape(line)}</p>" for line in report.details())
    copied = "".join(f"<pre>{escape(line)}</pre>" for line in report.to_copy())
    return f'<section class="advice">{sentences}{copied}</section>'


def _capacity(problem: Problem) -> Capacity:
    return Capacity(f"one {problem.gpu.name}", problem.gpu.usable_gib)


def _batch(job: Job) -> str:
    recipe = job.recipe
    return f"{rows_in(recipe)} x {recipe.length:,} tokens per GPU, {checkpointing_in(recipe)}"
