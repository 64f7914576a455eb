"""A plan as one HTML page: what to take, what each GPU holds, and why. Nothing is loaded from elsewhere. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from accel_fsdp import __version__, svg
from accel_fsdp.prediction import (
    Candidate,
    Plan,
    PlanJob,
    checkpointing_in,
    name_of,
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
    Layout,
    Recipe,
    step,
    variant_of,
)
from accel_fsdp.svg import Bar, Capacity, Curve, Part, Words
from accel_fsdp.units import GIB, gib_in_figure, number_in_figure

WIDTHS = (720, 360)
"""Each figure is drawn twice, for a window and for a phone; the style sheet shows one."""
MOST_GPUS, LEAST_TOKENS, MOST_TOKENS = 1024, 256, 32_768
CURVES: dict[str, tuple[Literal["ddp", "fsdp2"], int]] = {
    "DDP": ("ddp", 1),
    "FULL_SHARD": ("fsdp2", 1),
    "SHARD_GRAD_OP": ("fsdp2", 2),
}
AGAINST = {kind: kind for kind in (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS)} | {
    GATHERED: "gathered units (FSDP alone)",
    BUFFERS: "buffers (DDP: its buckets)",
}
TOO_THIN = 0.01
LOGARITHMIC = "Each mark is twice the one before, on both axes."
CASTS = " DDP's are larger here: it keeps tensors in two dtypes where FSDP computes in one."
SHORT_PHASES = " Between steps (idle), forward (fwd), loss, backward (bwd) of two micro-batches, optimizer step (step)."
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
OWN_STYLE = """
:root{color-scheme:light dark;--back:#fff;--ink:#1b1f24;--dim:#57606a;--rule:#d0d7de;--soft:#f3f5f7;--limit:#a40e26;
--c1:#b34700;--c2:#0072b2;--c3:#007a5a}
@media(prefers-color-scheme:dark){:root{--back:#14171c;--ink:#e6e9ee;--dim:#9aa4b0;--rule:#3a424c;--soft:#1e232a;--limit:#ff8f8f;
--c1:#ff9a4d;--c2:#63b9ee;--c3:#3fcf9f}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px 16px 48px;max-width:832px;background:var(--back);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 8px;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:40px 0 4px}h3{font-size:1rem;margin:24px 0 4px}p{margin:4px 0 12px}
.dim,figcaption,footer{color:var(--dim)}.advice{border-left:4px solid var(--c2);padding-left:12px}
pre{margin:4px 0 12px;padding:8px 10px;border-radius:6px;background:var(--soft);font-size:.8125rem;
white-space:pre-wrap;overflow-wrap:anywhere}
figure{margin:12px 0}figcaption{font-size:.875rem;margin-top:6px}svg{display:block;width:100%;overflow:visible}
.w360{display:none;max-width:480px}
.key{display:flex;flex-wrap:wrap;gap:4px 14px;list-style:none;padding:0;margin:8px 0;font-size:.875rem}
.key svg{display:inline-block;width:20px;height:18px;vertical-align:-4px;margin-right:5px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
td{white-space:nowrap}th,td{padding:4px 6px;text-align:right;border-bottom:1px solid var(--rule)}
thead th{vertical-align:bottom}
th:first-child{text-align:left;padding-left:0;min-width:9em;position:sticky;left:0;background:var(--back)}
summary{cursor:pointer;margin:12px 0}
@media(min-width:1100px){.wide{margin:0 calc((800px - min(1240px,100vw - 56px))/2)}
.wide table{font-size:.75rem}.wide th:first-child{min-width:15em}}
@media(max-width:719px){.w720{display:none}.w360{display:block}}
"""
STYLE = f"{OWN_STYLE}{svg.STYLE}"
"""The style sheet of the whole page, figures included."""


@dataclass(frozen=True)
class Series:
    """The highest point in bytes, by the name of the strategy, for growing numbers of something."""

    sizes: Sequence[int]
    peaks: Mapping[str, Sequence[int]]


def make_page(job: PlanJob, found: Plan, headline: str, advice: Sequence[str]) -> str:
    """The whole page; `headline` and `advice` are the sentences of the terminal."""
    title = title_of(job)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}: predicted memory</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(sections(job, found, headline, advice))
        + "\n</main></body></html>\n"
    )


def title_of(job: PlanJob) -> str:
    """The model and the GPUs."""
    return f"{job.shape.name} on {job.ranks} x {job.gpu.name}"


def sections(job: PlanJob, found: Plan, headline: str, advice: Sequence[str]) -> Iterator[str]:
    """What the page consists of, in its order: the answer and the figures first, what takes longest last."""
    shown = found.choice or min(found.rows, key=lambda one: one.prediction.peak.total)
    yield f"<header><h1>{escape(title_of(job))}</h1><p>{escape(headline)}</p></header>"
    yield f'<section class="advice">{"".join(map(_advised, advice))}</section>'
    if job.ranks > 1:
        yield _against(job)
    yield _strategies(job, found)
    yield _step(job, shown, chosen=found.choice is not None)
    yield _numbers(job, found)
    by_gpus = _over_gpus(job, shown.recipe)
    yield _more_gpus(job, shown, by_gpus)
    by_tokens = _over_tokens(job, shown.recipe)
    yield _longer(job, shown, by_tokens)
    yield _more_numbers(shown, by_gpus, by_tokens)
    yield (
        f"<footer><p>accel-fsdp {__version__}. All sizes are predicted: GiB (1,073,741,824 bytes) that "
        "torch.cuda.max_memory_allocated would count on the fullest GPU, without the CUDA context.</p></footer>"
    )


def _advised(line: str) -> str:
    """A sentence; what is indented is to be copied."""
    kind = "pre" if line.startswith("  ") else "p"
    return f"<{kind}>{escape(line.strip())}</{kind}>"


def _against(job: PlanJob) -> str:
    layouts = (Layout(*CURVES[name], job.ranks, job.ranks_per_node) for name in ("DDP", "FULL_SHARD"))
    ddp, fsdp = (_timeline(job, job.recipe, layout).most for layout in layouts)
    least = max(ddp.values()) * TOO_THIN
    kinds = [kind for kind in AGAINST if max(ddp[kind], fsdp[kind]) > least]
    rows = [(LETTERS[kind], AGAINST[kind], ddp[kind] / GIB, fsdp[kind] / GIB) for kind in kinds]
    said = "; ".join(
        f"{name}: {gib_in_figure(one)} with DDP, {gib_in_figure(other)} with FSDP" for _, name, one, other in rows
    )
    words = Words("Parameters, gradients, optimizer state, activations per GPU: DDP against FSDP", said)
    return _section(
        words.title,
        "DDP keeps everything on every GPU. FSDP keeps a share of the model's state on each and gathers one unit at a "
        "time to compute with it. Activations are not sharded."
        + (CASTS if ddp[ACTIVATIONS] > 1.05 * fsdp[ACTIVATIONS] else ""),
        _figure(
            [svg.pairs(words, rows, ("DDP", "FULL_SHARD"), width) for width in WIDTHS],
            f"Predicted for FSDP2 on {job.ranks:,} GPUs, {_how(job.recipe)}. Each kind where it is highest; they are "
            "not all at their highest at once.",
        ),
    )


def _strategies(job: PlanJob, found: Plan) -> str:
    rows = [_bar(one, name_of(one.layout)) for one in found.rows]
    how = f"The highest point of one step, {_how(job.recipe)}."
    if found.choice and found.choice.recipe != job.recipe:
        rows.insert(0, _bar(found.choice, f"Recommended, {rows_in(found.choice.recipe)}"))
        how += f" The recommended one: {name_of(found.choice.layout)}, {_how(found.choice.recipe)}."
    said = "; ".join(f"{row.name}: {row.note}" for row in rows)
    words = Words("Memory of one GPU at the highest point of a step, by strategy", said)
    return _section(
        "All strategies",
        how,
        _key(KINDS)
        + _figure(
            [svg.bars(words, rows, _capacity(job), width) for width in WIDTHS],
            "Predicted. The dashed line is the whole memory of one GPU. CUDA and NCCL need some of it too, so a bar "
            "that ends just before it is over. An arrow: the bar goes on beyond the edge.",
        ),
    )


def _bar(one: Candidate, name: str) -> Bar:
    live = one.prediction.peak.live
    fits = {"yes": "fits", "tight": "tight", "no": "over", "fails": "fails"}[one.verdict]
    parts = [Part(LETTERS[kind], kind, size / GIB) for kind, size in live.items() if size]
    return Bar(name, f"{gib_in_figure(one.prediction.peak.total / GIB)}, {fits}", parts)


def _step(job: PlanJob, shown: Candidate, chosen: bool) -> str:
    samples = _timeline(job, shown.recipe, shown.layout).samples
    drawn = [(one.phase, {LETTERS[kind]: size / GIB for kind, size in one.live.items()}) for one in samples]
    name = f"{name_of(shown.layout)}, {_how(shown.recipe)}"
    peaks = "; ".join(f"{one.phase}: {gib_in_figure(one.total / GIB)}" for one in shown.prediction.moments)
    words = Words(f"Memory over one step: {name}", f"Highest point of each phase: {peaks}")
    seen = [kind for kind in KINDS if any(one.live[kind] for one in samples)]
    return _section(
        "One step, unit by unit",
        f"{'Recommended' if chosen else 'Nothing fits; the smallest is shown'}: {name}.",
        _key(seen)
        + _figure(
            [svg.areas(words, drawn, _capacity(job), width) for width in WIDTHS],
            "Predicted. From left to right the events in their order, not seconds: for each unit (embedding, block, "
            "head) its highest point and what it leaves. The dot is the highest point of all."
            + (SHORT_PHASES if shown.recipe.accumulation > 1 else ""),
        ),
    )


def _more_gpus(job: PlanJob, shown: Candidate, by_gpus: Series) -> str:
    here = "1 GPU" if job.ranks == 1 else f"{job.ranks:,} GPUs"
    return _section(
        "More GPUs",
        f"With {_kept(shown)}. More GPUs make the sharded state smaller, not the activations.",
        _figure(
            _lines(job, by_gpus, "GPUs", (job.ranks, here)),
            f"Predicted, {shown.recipe.length:,} tokens per sequence. {LOGARITHMIC}",
        ),
    )


def _longer(job: PlanJob, shown: Candidate, by_tokens: Series) -> str:
    gpus, tokens = "1 GPU" if job.ranks == 1 else f"{job.ranks:,} GPUs", shown.recipe.length
    return _section(
        "Longer sequences",
        f"With {_kept(shown)}. Longer sequences make the activations larger.",
        _figure(
            _lines(job, by_tokens, "tokens per sequence", (tokens, f"{tokens:,} tokens")),
            f"Predicted, on {gpus}. {LOGARITHMIC}",
        ),
    )


def _kept(shown: Candidate) -> str:
    """What stays as it is while a number grows."""
    how = f"{rows_in(shown.recipe)} per GPU, {checkpointing_in(shown.recipe)}"
    return f"{how}; sharded by FSDP2, without offload"


def _lines(job: PlanJob, series: Series, axis: str, here: tuple[int, str]) -> list[str]:
    curves = [
        Curve(name, f"c{number}", [(x, peak / GIB) for x, peak in zip(series.sizes, peaks, strict=True)])
        for number, (name, peaks) in enumerate(series.peaks.items(), start=1)
    ]
    said = "; ".join(
        f"{one.name}: {number_in_figure(one.points[0][1])} to {gib_in_figure(one.points[-1][1])}" for one in curves
    )
    span = f"from {series.sizes[0]:,} to {series.sizes[-1]:,} {axis}"
    words = Words(f"Highest memory of one GPU by number of {axis}", f"{span}: {said}")
    return [svg.lines(words, curves, _capacity(job), here, axis, width) for width in WIDTHS]


def _over_gpus(job: PlanJob, recipe: Recipe) -> Series:
    counts = _doublings(1, MOST_GPUS, job.ranks)
    return Series(counts, {name: [_peak(job, recipe, name, count) for count in counts] for name in CURVES})


def _over_tokens(job: PlanJob, recipe: Recipe) -> Series:
    most = min(MOST_TOKENS, job.shape.positions or MOST_TOKENS)
    lengths = _doublings(min(LEAST_TOKENS, most), most, recipe.length)
    names = CURVES if job.ranks > 1 else ("one GPU",)
    recipes = [replace(recipe, length=length) for length in lengths]
    return Series(lengths, {name: [_peak(job, one, name, job.ranks) for one in recipes] for name in names})


def _doublings(first: int, last: int, here: int) -> list[int]:
    powers = [first * 2**power for power in range((last // first).bit_length())]
    return sorted({*powers, last, here})


def _peak(job: PlanJob, recipe: Recipe, name: str, ranks: int) -> int:
    layout = Layout("single", 1, 1, 1)
    if ranks > 1:
        layout = Layout(*CURVES[name], ranks, min(ranks, job.ranks_per_node))
    return job.predicted(recipe, layout).peak.total


def _timeline(job: PlanJob, recipe: Recipe, layout: Layout) -> step.Timeline:
    tapes = job.tapes[variant_of(recipe, layout.engine)]
    return step.timeline(job.shape, tapes, recipe, layout, workspace_bytes(job.gpu))


def _numbers(job: PlanJob, found: Plan) -> str:
    titles = ("strategy", "batch", "checkpointing", "fits", "GiB", *KINDS, "highest in", "step s", "tokens/s per GPU")
    rows = [_cells(one, name_of(one.layout)) for one in found.rows]
    if found.choice:
        rows.insert(0, _cells(found.choice, f"{name_of(found.choice.layout)} (recommended)"))
    return _section(
        "The numbers",
        f"All predicted, {job.recipe.length:,} tokens per sequence. GiB at the highest point of the step, then what is "
        "alive there.",
        _table(titles, rows, "wide"),
    )


def _cells(one: Candidate, name: str) -> list[str]:
    peak = one.prediction.peak
    how = (f"{one.recipe.rows}", one.recipe.checkpointing)
    sizes = [_cell(peak.total), *(_cell(peak.live[kind]) for kind in KINDS)]
    speed = [f"{one.step.step_seconds:.2f}", f"{one.tokens_per_s:,.0f}"]
    return [escape(name), *how, one.verdict, *sizes, peak.phase, *speed]


def _more_numbers(shown: Candidate, by_gpus: Series, by_tokens: Series) -> str:
    phases = [[one.phase, _cell(one.total)] for one in shown.prediction.moments]
    folded = (
        ("One step: the highest point of each phase", _table(("phase", "GiB"), phases)),
        ("Number of GPUs", _series_table("GPUs", by_gpus)),
        ("Sequence length", _series_table("tokens per sequence", by_tokens)),
    )
    return "".join(f"<details><summary>{name}, predicted</summary>{table}</details>" for name, table in folded)


def _series_table(axis: str, series: Series) -> str:
    rows = [
        [f"{size:,}", *(_cell(peaks[place]) for peaks in series.peaks.values())]
        for place, size in enumerate(series.sizes)
    ]
    return _table((axis, *(f"{name}, GiB" for name in series.peaks)), rows)


def _cell(size: int) -> str:
    return f'<data value="{size}">{number_in_figure(size / GIB)}</data>'


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="scroll {style}" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _section(title: str, lead: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(lead)}</p>{content}</section>"


def _figure(drawings: Sequence[str], caption: str) -> str:
    return f"<figure>{''.join(drawings)}<figcaption>{escape(caption)}</figcaption></figure>"


def _key(kinds: Iterable[str]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 20 18" aria-hidden="true"><rect class="{LETTERS[kind]}" width="20" height="18"/>'
        f'<text class="on-{LETTERS[kind]}" x="10" y="14" text-anchor="middle">{LETTERS[kind]}</text></svg>{kind}</li>'
        for kind in kinds
    )
    return f'<ul class="key">{items}</ul>'


def _capacity(job: PlanJob) -> Capacity:
    return Capacity(f"one {job.gpu.name}", job.gpu.usable_gib)


def _how(recipe: Recipe) -> str:
    return f"{rows_in(recipe)} x {recipe.length:,} tokens per GPU, {checkpointing_in(recipe)}"
