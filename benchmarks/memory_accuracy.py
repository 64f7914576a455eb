"""Predicted against published peak memory: `python benchmarks/memory_accuracy.py [--rows] [--write]`.

The rows are in `data/memory.json`, each with its source. Allocated and active rows are compared byte by byte, reserved
ones with the predicted range. Models and variants that aren't bundled are traced once, which needs the test extra.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import lightning_demo
from results import keep

from accel_fsdp.prediction import capacity, trace_store
from accel_fsdp.prediction.memory import Layout, ModelShape, Recipe, Tapes, quirks_of, step, variant_of

DATA = Path(__file__).parent / "data" / "memory.json"


@dataclass(frozen=True)
class Result:
    """One row: relative errors of peak and steady state, None where nothing was published; or the range it lies in."""

    row: dict[str, Any]
    peak: float
    steady: float | None
    phase: str
    within: bool | None


def content() -> dict[str, Any]:
    """The file."""
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found


def results() -> Iterator[Result]:
    """All rows that the model covers."""
    for row in content()["rows"]:
        yield result(row)


def result(row: dict[str, Any]) -> Result:
    """Predicts one row."""
    names = {field.name for field in fields(Recipe)}
    recipe = Recipe(**{name: value for name, value in row.items() if name in names})
    layout = Layout(row["engine"], row.get("strategy", 1), row["gpus"], row["gpus"], offload=row["offload"])
    shape, tapes = model(row["model"], variant_of(recipe, layout.engine))
    known = replace(quirks_of(row["versions"], shape.model_type, recipe), **row.get("quirks", {}))
    made = step.predict(shape, tapes, recipe, layout, capacity.WORKSPACE_BYTES, known)
    peak = made.peak.total
    within = None
    if row["kind"] == "reserved":
        low, high = (round(peak * factor) for factor in capacity.RESERVED[layout.engine])
        within = low <= row["peak_bytes"] <= high
    steady = made.steady / row["steady_bytes"] - 1 if "steady_bytes" in row else None
    return Result(row, peak / row["peak_bytes"] - 1, steady, made.peak.phase, within)


@cache
def model(name: str, variant: str) -> tuple[ModelShape, Tapes]:
    """The shape and tapes of one of the file's models, bundled or recorded."""
    if name == lightning_demo.NAME:
        return lightning_demo.shape_and_tapes()
    known = content()["models"][name]
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
        "| rows | n | median | worst | within 1 % | within 4 % | steady, worst | in range |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups = dict.fromkeys((one.row["group"], one.row["method"], one.row["engine"], one.row["kind"]) for one in found)
    for group in groups:
        mine = [
            one for one in found if (one.row["group"], one.row["method"], one.row["engine"], one.row["kind"]) == group
        ]
        lines.append(_line(f"{group[0]}, {group[1]}, {group[2]}, {group[3]}", mine))
    exact = [one for one in found if one.within is None]
    return [*lines, _line("all allocated and active", exact)]


def _line(name: str, mine: list[Result]) -> str:
    errors = [abs(one.peak) for one in mine]
    steady = [abs(one.steady) for one in mine if one.steady is not None]
    inside = [one.within for one in mine if one.within is not None]
    counted = [f"{sum(error <= limit for error in errors)}/{len(mine)}" for limit in (0.01, 0.04)]
    cells = [name, str(len(mine)), f"{median(errors):.2%}", f"{max(errors):.2%}", *counted]
    cells += [f"{max(steady):.2%}" if steady else "", f"{sum(inside)}/{len(inside)}" if inside else ""]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the table; with --rows each row, with --write keeps the table in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = list(results())
    if options.rows:
        for one in found:
            steady = "" if one.steady is None else f"{one.steady:+.2%}"
            place = [one.row[key] for key in ("id", "model", "method", "engine", "gpus", "rows", "length")]
            print(*place, f"{one.peak:+.2%}", steady, one.phase, "" if one.within is None else one.within)
    lines = table(found)
    print("\n".join(lines))
    if options.write:
        write(found, lines)


def _outside(found: list[Result]) -> Iterator[str]:
    """What is further off than 1 % (peak) or 0.5 % (between steps), with the best explanation."""
    for one in found:
        why = one.row.get("note", "not explained")
        if one.within is None and abs(one.peak) > 0.01:
            yield f"- {one.row['id']} {one.peak:+.2%}: {why}"
        if one.steady is not None and abs(one.steady) > 0.005:
            yield f"- {one.row['id']} {one.steady:+.2%} between steps: {why}"


def write(found: list[Result], lines: list[str]) -> None:
    """Replaces this benchmark's part of RESULTS.md."""
    left = content()["left_out"]
    reasons = {why: [name for name in left if left[name] == why] for why in dict.fromkeys(left.values())}
    part = [
        "## Peak memory, predicted against published",
        "",
        "`python benchmarks/memory_accuracy.py --write`",
        "",
        *lines,
        "",
        "`steady, worst`: error between steps, where published; `in range`: reserved bytes inside the predicted range.",
        "",
        "Allocated and active rows whose peak is outside of 1 %, or whose steady state is outside of 0.5 %:",
        "",
    ]
    part += _outside(found)
    if reasons:
        part += ["", "Left out:", "", *(f"- {', '.join(names)}: {why}" for why, names in reasons.items())]
    keep("memory", part)


if __name__ == "__main__":
    main()
