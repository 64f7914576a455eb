"""Predicted against published peak memory: `python benchmarks/memory_accuracy.py [--rows] [--write]`.

The rows are in `data/memory.json`, each with its source, and compared byte by byte. A second table counts the planner's
verdicts: all these runs fitted on their cards, and `data/verdicts.json` has more, most of which ran out of memory.
Models and variants that aren't bundled are traced once, which needs the test extra.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import lightning_demo
from results import keep

from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import Gpu, gpus
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction import capacity, trace_store
from accel_fsdp.prediction.memory import ModelShape, Tapes, step, variant_of
from accel_fsdp.units import GIB

DATA = Path(__file__).parent / "data" / "memory.json"
VERDICTS = DATA.with_name("verdicts.json")
REPORTED_GIB = {(gpu.name, gpu.memory_gib): gpu.reported_gib for gpu in gpus.GPUS if gpu.reported_gib}
"""The memory of cards of which a report is known, by their names and the memory that they are sold with."""
One = TypeVar("One")


@dataclass(frozen=True)
class Run:
    """One published run as the model takes it."""

    shape: ModelShape
    tapes: Tapes
    recipe: Recipe
    layout: Layout
    expandable: bool
    card_bytes: int
    gpu: Gpu | None

    @property
    def prediction(self) -> step.Prediction:
        """One step, as PyTorch's allocator gives it out."""
        return step.predict(self.shape, self.tapes, self.recipe, self.layout, capacity.WORKSPACE_BYTES)

    def device(self) -> capacity.Device:
        """What the planner says of the card, with the allocator as it ran."""
        return capacity.device(self.prediction, self.layout, self.card_bytes, self.gpu, self.expandable)


@dataclass(frozen=True)
class Result:
    """One row: relative errors of peak and steady state, None where nothing was published."""

    row: dict[str, Any]
    peak: float
    steady: float | None
    phase: str


@dataclass(frozen=True)
class Verdict:
    """Whether one run fits: as published, and as the planner says of it; `why` is where memory runs out, or may.

    `share` is what is needed, of the card.
    """

    row: Mapping[str, Any]
    fits: bool
    said: capacity.Verdict
    why: str
    share: float


def content() -> dict[str, Any]:
    """The file."""
    rows: dict[str, Any] = json.loads(DATA.read_text())
    return rows


def results() -> Iterator[Result]:
    """All rows that have what torch's allocator gave out."""
    for row in content()["rows"]:
        if row["kind"] != "reserved":
            yield result(row)


def result(row: dict[str, Any]) -> Result:
    """Predicts one row."""
    run = run_of(row)
    prediction = run.prediction
    steady = prediction.steady / row["steady_bytes"] - 1 if "steady_bytes" in row else None
    return Result(row, prediction.peak.total / row["peak_bytes"] - 1, steady, prediction.peak.phase)


def run_of(row: Mapping[str, Any]) -> Run:
    """What a row of the file says."""
    names = {field.name for field in fields(Recipe)}
    recipe = Recipe(**{name: value for name, value in row.items() if name in names})
    ranks, node = row["gpus"], row.get("gpus_per_node", row["gpus"])
    layout = Layout(row["engine"], row.get("strategy", 1), ranks, node, row["offload"])
    shape, tapes = model(row["model"], variant_of(recipe, layout.engine))
    shape = replace(shape, buffers_bytes=shape.buffers_bytes + row.get("more_buffers_bytes", 0))
    card = REPORTED_GIB.get((row["gpu"], row["card_gib"]), row["card_gib"])
    expandable = row.get("expandable_segments", False)
    return Run(shape, tapes, recipe, layout, expandable, round(card * GIB), _gpu(row["gpu"]))


def _gpu(name: str) -> Gpu | None:
    """A GPU of the planner's table, or None for an older one."""
    try:
        return gpus.find(name)
    except UsageError:
        return None


def verdicts() -> Iterator[Verdict]:
    """The planner's verdict on all published runs."""
    for row in [*content()["rows"], *verdict_rows()]:
        yield verdict(row)


def verdict_rows() -> list[dict[str, Any]]:
    """The rows of `data/verdicts.json`."""
    rows: list[dict[str, Any]] = json.loads(VERDICTS.read_text())["rows"]
    return rows


def verdict(row: Mapping[str, Any]) -> Verdict:
    """The planner's verdict on one run."""
    run = run_of(row)
    device = run.device()
    return Verdict(row, row.get("fits", True), device.verdict, device.runs_out, device.needed / run.card_bytes)


@cache
def _models() -> dict[str, Any]:
    return {**json.loads(VERDICTS.read_text())["models"], **content()["models"]}


@cache
def model(name: str, variant: str) -> tuple[ModelShape, Tapes]:
    """The shape and tapes of one of the files' models, bundled or recorded."""
    if name == lightning_demo.NAME:
        return lightning_demo.shape_and_tapes()
    known = _models()[name]
    if isinstance(known, str):
        stored = trace_store.find(known)
        assert stored is not None
        if variant in stored[1]:
            return stored[0], stored[1][variant]
        from accel_fsdp.models import catalogue

        known = catalogue.entries()[known]["config"]
    from transformers import AutoConfig

    config = AutoConfig.for_model(known["model_type"], **{k: v for k, v in known.items() if k != "model_type"})
    return tapes_of(name, config, variant)


def tapes_of(name: str, config: Any, variant: str) -> tuple[ModelShape, Tapes]:
    """The shape of a config's model and its tapes in one variant, from the cache if they were recorded before."""

    def anew() -> trace_store.TraceRecord:
        from accel_fsdp.prediction.tracing import fit

        return fit.record_model(name, config, (variant,))

    shape, tapes = trace_store.cached_or_recorded(config.to_dict(), variant, anew)
    return replace(shape, name=name), tapes


def table(results: list[Result]) -> list[str]:
    """One line per group and method."""
    lines = [
        "| rows | n | median | worst | within 1 % | steady, worst |",
        "|---|---|---|---|---|---|",
    ]
    for group, mine in _grouped(results, lambda finding: (*_group(finding.row), finding.row["kind"])):
        lines.append(_line(", ".join(group), mine))
    return [*lines, _line("all", results)]


def _group(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["group"], row["method"], row["engine"]


def _grouped(
    items: Iterable[One], key: Callable[[One], tuple[str, ...]]
) -> Iterable[tuple[tuple[str, ...], list[One]]]:
    groups: dict[tuple[str, ...], list[One]] = {}
    for finding in items:
        groups.setdefault(key(finding), []).append(finding)
    return groups.items()


def _line(name: str, mine: list[Result]) -> str:
    errors = [abs(result.peak) for result in mine]
    steady = [abs(result.steady) for result in mine if result.steady is not None]
    within = f"{sum(error <= 0.01 for error in errors)}/{len(mine)}"
    cells = [name, str(len(mine)), f"{median(errors):.2%}", f"{max(errors):.2%}", within]
    cells += [f"{max(steady):.2%}" if steady else ""]
    return "| " + " | ".join(cells) + " |"


def verdict_table(verdicts: list[Verdict]) -> list[str]:
    """What the planner says of each group's runs."""
    titles = ("said to fit", "in doubt", "said not to")
    lines = [f"| rows | {' | '.join(('fitted', *titles, 'ran out', *titles))} |", "|---" * 9 + "|"]
    for group, mine in [*_grouped(verdicts, lambda finding: (finding.row["group"],)), (("all",), verdicts)]:
        lines.append("| " + " | ".join([group[0], *_counted(mine, True), *_counted(mine, False)]) + " |")
    return lines


def _counted(mine: list[Verdict], fits: bool) -> list[str]:
    some = [result.said for result in mine if result.fits is fits]
    counts = [len(some), *(sum(verdict == kind for verdict in some) for kind in ("yes", "tight", "no"))]
    return [str(count) for count in counts] if some else [""] * 4


def main() -> None:
    """Prints the table; with --rows each row, with --write keeps the table in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    runs, decided = list(results()), list(verdicts())
    if options.rows:
        _print_rows(runs, decided)
    tables = table(runs), verdict_table(decided)
    print("\n\n".join("\n".join(lines) for lines in tables))
    if options.write:
        write(*tables)


def _print_rows(results: list[Result], decided: list[Verdict]) -> None:
    keys = ("id", "model", "method", "engine", "gpus", "rows", "length")
    for finding in results:
        steady = "" if finding.steady is None else f"{finding.steady:+.2%}"
        print(*(finding.row[key] for key in keys), f"{finding.peak:+.2%}", steady, finding.phase)
    for each in decided:
        print(
            *(each.row[key] for key in keys),
            f"{each.share:.0%}",
            "fitted" if each.fits else "ran out",
            each.said,
            each.why,
        )


def write(allocated: list[str], decided: list[str]) -> None:
    """Replaces this benchmark's part of RESULTS.md."""
    part = [
        "## Peak memory, predicted against published",
        "",
        "`python benchmarks/memory_accuracy.py --write`",
        "",
        *allocated,
        "",
        "`steady, worst`: error between steps, where published.",
        "",
        "Whether published runs fit on their cards:",
        "",
        *decided,
    ]
    keep("memory", part)


if __name__ == "__main__":
    main()
