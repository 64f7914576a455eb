"""Predicted against published peak memory: `python benchmarks/memory_accuracy.py [--rows] [--write]`.

The rows are in `data/memory.json`, each with its source. Allocated and active rows are compared byte by byte, reserved
ones with the allocator's simulation, and so is what nvidia-smi showed, after the context and the communicators. A third
table counts right verdicts: all these runs fitted on their cards, those of `data/throughput.json` too, and
`data/verdicts.json` has more. Models and variants that aren't bundled are traced once, which needs the test extra.
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

from accel_fsdp.hardware import gpus
from accel_fsdp.prediction import capacity, trace_store
from accel_fsdp.prediction.memory import (
    Layout,
    ModelShape,
    Recipe,
    Tapes,
    losses,
    quirks_of,
    reservation,
    step,
    variant_of,
)
from accel_fsdp.prediction.memory.allocator import AllocatorSettings
from accel_fsdp.prediction.memory.library_versions import Quirks
from accel_fsdp.units import GIB

DATA = Path(__file__).parent / "data" / "memory.json"
THROUGHPUT = DATA.with_name("throughput.json")
VERDICTS = DATA.with_name("verdicts.json")
One = TypeVar("One")


@dataclass(frozen=True)
class Run:
    """One published run as the model takes it."""

    shape: ModelShape
    tapes: Tapes
    recipe: Recipe
    layout: Layout
    quirks: Quirks
    settings: AllocatorSettings
    card_bytes: int
    outside_bytes: int

    def reserve(self) -> reservation.Reservation:
        """Simulates the allocator on what the context and the communicators leave of the card."""
        free = self.card_bytes - self.outside_bytes
        workspace = capacity.WORKSPACE_BYTES
        given = (self.shape, self.tapes, self.recipe, self.layout, workspace, self.quirks, self.settings, free)
        return reservation.reserve(*given, exports=False)


@dataclass(frozen=True)
class Result:
    """One row: relative errors of peak and steady state, None where nothing was published."""

    row: dict[str, Any]
    peak: float
    steady: float | None
    phase: str


@dataclass(frozen=True)
class Verdict:
    """Whether one run fits: as published, and as predicted; `why` says where it would run out, or what went wrong.

    `reserved` and `outside` are the predicted bytes of the allocator, and of the context and the communicators.
    """

    row: Mapping[str, Any]
    fits: bool
    predicted: bool | None
    why: str
    reserved: int
    outside: int

    def against(self, kind: str) -> tuple[int, int] | None:
        """Predicted and published bytes of one kind: "reserved", or "smi" with all that the driver counts."""
        if kind == "smi":
            measured = self.row.get("smi_bytes")
            return measured and (self.reserved + self.outside, measured)
        measured = self.row["peak_bytes"] if self.row.get("kind") == "reserved" else self.row.get("reserved_bytes")
        return measured and (self.reserved, measured)


def content() -> dict[str, Any]:
    """The file."""
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found


def results() -> Iterator[Result]:
    """All rows that have what torch's allocator gave out."""
    for row in content()["rows"]:
        if row["kind"] != "reserved":
            yield result(row)


def result(row: dict[str, Any]) -> Result:
    """Predicts one row."""
    run = run_of(row)
    made = step.predict(run.shape, run.tapes, run.recipe, run.layout, capacity.WORKSPACE_BYTES, run.quirks)
    steady = made.steady / row["steady_bytes"] - 1 if "steady_bytes" in row else None
    return Result(row, made.peak.total / row["peak_bytes"] - 1, steady, made.peak.phase)


def run_of(row: Mapping[str, Any]) -> Run:
    """What a row of the file says."""
    names = {field.name for field in fields(Recipe)}
    recipe = Recipe(**{name: value for name, value in row.items() if name in names})
    ranks, node = row["gpus"], row.get("gpus_per_node", row["gpus"])
    syncs = row.get("sync_each_batch", False)
    layout = Layout(row["engine"], row.get("strategy", 1), ranks, node, row["offload"], syncs)
    shape, tapes = model(row["model"], variant_of(recipe, layout.engine))
    shape = replace(shape, buffers_bytes=shape.buffers_bytes + row.get("more_buffers_bytes", 0))
    known = dict(row.get("quirks", {}))
    if "loss" in known:
        known["loss"] = _loss(known["loss"])
    quirks = replace(quirks_of(row["versions"], shape.model_type, recipe), **known)
    settings = AllocatorSettings(expandable_segments=row.get("expandable_segments", False))
    card = round(row["card_gib"] * GIB)
    return Run(
        shape, tapes, recipe, layout, quirks, settings, card, capacity.outside_bytes(gpus.find(row["gpu"]), ranks)
    )


def _loss(said: str | Mapping[str, str]) -> losses.Loss:
    """One of the known sequences by its name, or one spelt out."""
    known: losses.Loss = getattr(losses, said) if isinstance(said, str) else losses.Loss(**said)
    return known


def verdicts() -> Iterator[Verdict]:
    """Simulates the allocator for all published runs."""
    for row in [*content()["rows"], *_throughput_rows(), *json.loads(VERDICTS.read_text())["rows"]]:
        yield verdict(row)


def verdict(row: Mapping[str, Any]) -> Verdict:
    """Simulates one run."""
    run, fits = run_of(row), row.get("fits", True)
    try:
        made = run.reserve()
    except MemoryError as error:
        return Verdict(row, fits, False, str(error) or "loading", run.card_bytes, run.outside_bytes)
    except (AssertionError, StopIteration) as error:
        return Verdict(row, fits, None, f"not simulated: {type(error).__name__}", 0, run.outside_bytes)
    return Verdict(row, fits, not made.failed_at, made.failed_at, made.reserved, run.outside_bytes)


def _throughput_rows() -> Iterator[dict[str, Any]]:
    """The runs that only tokens per second are published of, in the words of `data/memory.json`."""
    found, decided = json.loads(THROUGHPUT.read_text()), json.loads(VERDICTS.read_text())
    known, groups = {row["id"] for row in content()["rows"]} | decided["left_out"].keys(), tuple(decided["throughput"])
    for row in found["rows"]:
        if row["id"] not in known and row["model"] in _models() and row["group"].startswith(groups):
            layout = row["layout"]
            yield {
                **{key: row[key] for key in ("id", "group", "model", "gpu")},
                **{key: layout[key] for key in ("engine", "strategy")},
                **{"gpus": layout["ranks"], "gpus_per_node": layout["ranks_per_node"]},
                **{"offload": layout.get("offload", False), "card_gib": row["memory_gib"], "versions": {}},
                **{"method": "full", **row["recipe"]},
                **next((more for group, more in decided["throughput"].items() if row["group"].startswith(group)), {}),
            }


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
        found = trace_store.find(known)
        assert found is not None
        if variant in found[1]:
            return found[0], found[1][variant]
        from accel_fsdp.models import catalogue

        known = catalogue.entries()[known]["config"]
    from transformers import AutoConfig

    from accel_fsdp.prediction.tracing import tapes_of

    kind = known["model_type"]
    return tapes_of(name, AutoConfig.for_model(kind, **{k: v for k, v in known.items() if k != "model_type"}), variant)


def table(found: list[Result]) -> list[str]:
    """One line per group and method."""
    lines = [
        "| rows | n | median | worst | within 1 % | within 4 % | steady, worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for group, mine in _grouped(found, lambda one: (*_group(one.row), one.row["kind"])):
        lines.append(_line(", ".join(group), mine))
    return [*lines, _line("all", found)]


def _group(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["group"], row["method"], row["engine"]


def _grouped(
    found: Iterable[One], key: Callable[[One], tuple[str, ...]]
) -> Iterable[tuple[tuple[str, ...], list[One]]]:
    groups: dict[tuple[str, ...], list[One]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return groups.items()


def _line(name: str, mine: list[Result]) -> str:
    errors = [abs(one.peak) for one in mine]
    steady = [abs(one.steady) for one in mine if one.steady is not None]
    counted = [f"{sum(error <= limit for error in errors)}/{len(mine)}" for limit in (0.01, 0.04)]
    cells = [name, str(len(mine)), f"{median(errors):.2%}", f"{max(errors):.2%}", *counted]
    cells += [f"{max(steady):.2%}" if steady else ""]
    return "| " + " | ".join(cells) + " |"


def reserved_table(found: list[Verdict]) -> list[str]:
    """One line per group, method and what was measured."""
    lines = [
        "| rows | measured | n | median | within 5 % | within 10 % | worst | measured - predicted, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in ("reserved", "smi"):
        mine = [one for one in found if one.predicted is not None and one.against(kind)]
        for group, some in _grouped(mine, lambda one: _group(one.row)):
            lines.append(_reserved_line(", ".join(group), kind, some))
        lines.append(_reserved_line("all", kind, mine))
    return lines


def _reserved_line(name: str, kind: str, mine: list[Verdict]) -> str:
    pairs = [pair for one in mine if (pair := one.against(kind))]
    errors = [predicted / measured - 1 for predicted, measured in pairs]
    counted = [f"{sum(abs(error) <= limit for error in errors)}/{len(mine)}" for limit in (0.05, 0.1)]
    short = median(measured - predicted for predicted, measured in pairs) / GIB
    cells = [name, {"smi": "nvidia-smi"}.get(kind, kind), str(len(mine)), f"{median(map(abs, errors)):.1%}", *counted]
    return "| " + " | ".join([*cells, f"{max(errors, key=abs):+.1%}", f"{short:+.2f} GiB"]) + " |"


def verdict_table(found: list[Verdict]) -> list[str]:
    """How many verdicts of each group are right, then the wrong ones."""
    lines = ["| rows | fitted | predicted to | ran out | predicted to |", "|---|---|---|---|---|"]
    groups = [*_grouped(found, lambda one: (one.row["group"],)), (("all",), found)]
    for group, mine in groups:
        cells = [group[0]]
        for fits in (True, False):
            some = [one for one in mine if one.fits is fits]
            cells += [str(len(some)), f"{sum(one.predicted is fits for one in some)}"] if some else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    wrong = [one for one in found if one.predicted is not one.fits]
    return [*lines, "", "Wrong:", "", *(_wrong(one) for one in wrong)] if wrong else lines


def _wrong(one: Verdict) -> str:
    row, what = one.row, "fitted" if one.fits else "ran out of memory"
    words = [f"{row[key]}" for key in ("id", "model", "method", "engine")]
    size = f"{row['rows']} x {row['length']} on {row['gpus']} x {row['gpu']} of {row['card_gib']} GiB"
    said = "" if one.predicted else f"; predicted to run out: {one.why}" if one.predicted is False else f"; {one.why}"
    return f"- {' '.join(words)}, {size}: {what}{said}"


def main() -> None:
    """Prints the table; with --rows each row, with --write keeps the table in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found, decided = list(results()), list(verdicts())
    if options.rows:
        _print_rows(found, decided)
    tables = table(found), reserved_table(decided), verdict_table(decided)
    print("\n\n".join("\n".join(lines) for lines in tables))
    if options.write:
        write(found, *tables)


def _print_rows(found: list[Result], decided: list[Verdict]) -> None:
    keys = ("id", "model", "method", "engine", "gpus", "rows", "length")
    for one in found:
        steady = "" if one.steady is None else f"{one.steady:+.2%}"
        print(*(one.row[key] for key in keys), f"{one.peak:+.2%}", steady, one.phase)
    for each in decided:
        sizes = [
            f"{kind} {pair[0] / GIB:.2f} of {pair[1] / GIB:.2f} GiB, {pair[0] / pair[1] - 1:+.1%}"
            for kind in ("reserved", "smi")
            if (pair := each.against(kind))
        ]
        print(*(each.row[key] for key in keys), *sizes or [f"reserved {each.reserved / GIB:.2f} GiB"], each.why)


def _outside(found: list[Result]) -> Iterator[str]:
    """What is further off than 1 % (peak) or 0.5 % (between steps), with the best explanation."""
    for one in found:
        why = one.row.get("note", "not explained")
        if abs(one.peak) > 0.01:
            yield f"- {one.row['id']} {one.peak:+.2%}: {why}"
        if one.steady is not None and abs(one.steady) > 0.005:
            yield f"- {one.row['id']} {one.steady:+.2%} between steps: {why}"


def write(found: list[Result], allocated: list[str], reserved: list[str], decided: list[str]) -> None:
    """Replaces this benchmark's part of RESULTS.md."""
    left = content()["left_out"] | json.loads(VERDICTS.read_text())["left_out"]
    reasons = {why: [name for name in left if left[name] == why] for why in dict.fromkeys(left.values())}
    part = [
        "## Peak memory, predicted against published",
        "",
        "`python benchmarks/memory_accuracy.py --write`",
        "",
        *allocated,
        "",
        "`steady, worst`: error between steps, where published.",
        "",
        "Rows whose peak is outside of 1 %, or whose steady state is outside of 0.5 %:",
        "",
        *_outside(found),
        "",
        "What the allocator reserves, simulated; for nvidia-smi with context and communicators:",
        "",
        *reserved,
        "",
        "Whether published runs fit on their cards:",
        "",
        *decided,
    ]
    if reasons:
        part += ["", "Left out:", "", *(f"- {', '.join(names)}: {why}" for why, names in reasons.items())]
    keep("memory", part)


if __name__ == "__main__":
    main()
