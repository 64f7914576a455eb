"""Predicted against published peak memory: `python benchmarks/memory_accuracy.py [--rows] [--write]`.

The rows are in `data/memory.json`, each with its source. Allocated and active rows are compared byte by byte, reserved
ones with the allocator's simulation, and so is what nvidia-smi showed, after the context and the communicators. A third
table counts the planner's verdicts: all these runs fitted on their cards, those of `data/throughput.json` too, and
`data/verdicts.json` has more, most of which ran out of memory. Models and variants that aren't bundled are traced once,
which needs the test extra.
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
import older_libraries
from older_libraries import Published, tapes_of, variant_of
from results import keep

from accel_fsdp.config import Engine
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import Gpu, gpus
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction import capacity, trace_store
from accel_fsdp.prediction.memory import ModelShape, Tapes, losses, reservation, step
from accel_fsdp.units import GIB

DATA = Path(__file__).parent / "data" / "memory.json"
THROUGHPUT = DATA.with_name("throughput.json")
VERDICTS = DATA.with_name("verdicts.json")
REPORTED_GIB = {(gpu.name, gpu.memory_gib): gpu.reported_gib for gpu in gpus.GPUS if gpu.reported_gib}
"""The memory of cards of which a report is known, by their names and the memory that they are sold with."""
One = TypeVar("One")


@dataclass(frozen=True)
class Run:
    """One published run as the model takes it."""

    shape: ModelShape
    tapes: Tapes
    recipe: Published
    layout: Layout
    expandable: bool
    card_bytes: int
    gpu: Gpu | None

    @property
    def outside_bytes(self) -> int:
        """What the context and the communicators hold."""
        return capacity.outside_bytes(self.gpu, self.layout.ranks)

    @property
    def prediction(self) -> step.Prediction:
        """One step, as PyTorch's allocator gives it out."""
        return step.predict(self.shape, self.tapes, self.recipe, self.layout, capacity.WORKSPACE_BYTES)

    def device(self) -> capacity.Device:
        """What the planner says of the card."""
        replay = None if self.layout.engine is Engine.DEEPSPEED else self.replay
        return capacity.device(self.prediction, self.layout, self.card_bytes, self.gpu, replay)

    def reserve(self) -> reservation.Reservation:
        """Simulates the allocator on what the context and the communicators leave of the card."""
        return self.replay(False, self.card_bytes - self.outside_bytes)

    def replay(self, expandable: bool, room_bytes: int | None) -> reservation.Reservation:
        """Simulates the allocator on a card of any size; a run that had expandable segments keeps them."""
        given = (self.shape, self.tapes, self.recipe, self.layout, capacity.WORKSPACE_BYTES)
        return reservation.reserve(*given, expandable or self.expandable, room_bytes, exports=False)


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

    `reserved` and `outside` are the predicted bytes of the allocator, and of the context and the communicators;
    `reserved` is 0 where what is allocated leaves no doubt. `share` is what is needed without any cache, of the card.
    """

    row: Mapping[str, Any]
    fits: bool
    said: capacity.Verdict
    why: str
    reserved: int
    outside: int
    share: float

    def against(self, kind: str) -> tuple[int, int] | None:
        """Predicted and published bytes of one kind: "reserved", or "smi" with all that the driver counts."""
        if kind == "smi":
            measured = self.row.get("smi_bytes")
            return measured and (self.reserved + self.outside, measured)
        measured = self.row["peak_bytes"] if self.row.get("kind") == "reserved" else self.row.get("reserved_bytes")
        return measured and (self.reserved, measured)


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
    names = {field.name for field in fields(Published)}
    recipe = Published(**{name: value for name, value in row.items() if name in names})
    ranks, node = row["gpus"], row.get("gpus_per_node", row["gpus"])
    layout = Layout(row["engine"], row.get("strategy", 1), ranks, node, row["offload"])
    wide = recipe.wide if recipe.method == "qlora" and layout.engine in (Engine.NONE, Engine.DDP) else "none"
    shape, tapes = model(row["model"], variant_of(recipe, layout.engine), wide)
    shape = replace(shape, buffers_bytes=shape.buffers_bytes + row.get("more_buffers_bytes", 0))
    known = dict(row.get("quirks", {}))
    if "loss" in known:
        known["loss"] = _loss(known["loss"])
    recipe = replace(older_libraries.with_versions(recipe, row["versions"], shape.model_type), **known)
    card = REPORTED_GIB.get((row["gpu"], row["card_gib"]), row["card_gib"])
    expandable = row.get("expandable_segments", False)
    return Run(shape, tapes, recipe, layout, expandable, round(card * GIB), _gpu(row["gpu"]))


def _gpu(name: str) -> Gpu | None:
    """A GPU of the planner's table, or None for an older one."""
    try:
        return gpus.find(name)
    except UsageError:
        return None


def _loss(measured: str | Mapping[str, str]) -> losses.Loss:
    """One of the known sequences by its name, or one spelt out."""
    known: losses.Loss = getattr(older_libraries, measured) if isinstance(measured, str) else losses.Loss(**measured)
    return known


def verdicts() -> Iterator[Verdict]:
    """The planner's verdict on all published runs."""
    for row in [*content()["rows"], *_throughput_rows(), *verdict_rows()]:
        yield verdict(row)


def verdict_rows() -> list[dict[str, Any]]:
    """The rows of `data/verdicts.json`."""
    rows: list[dict[str, Any]] = json.loads(VERDICTS.read_text())["rows"]
    return rows


def verdict(row: Mapping[str, Any]) -> Verdict:
    """The planner's verdict on one run, and what the allocator reserves if it says that there is room for that."""
    run, fits = run_of(row), row.get("fits", True)
    device = run.device()
    reserved = run.reserve().reserved if fits else device.replayed
    share = device.needed / run.card_bytes
    return Verdict(row, fits, device.verdict, device.runs_out, reserved, device.outside, share)


def _throughput_rows() -> Iterator[dict[str, Any]]:
    """The runs that only tokens per second are published of, in the words of `data/memory.json`."""
    runs, decided = json.loads(THROUGHPUT.read_text()), json.loads(VERDICTS.read_text())
    known, groups = {row["id"] for row in content()["rows"]} | decided["left_out"].keys(), tuple(decided["throughput"])
    for row in runs["rows"]:
        if row["id"] not in known and row["model"] in _models() and row["group"].startswith(groups):
            layout = row["layout"]
            yield {
                **{key: row[key] for key in ("id", "group", "model", "gpu")},
                **{key: layout[key] for key in ("engine", "strategy")},
                **{"gpus": layout["ranks"], "gpus_per_node": layout["ranks_per_node"]},
                **{"offload": layout.get("offload", False), "card_gib": row["memory_gib"], "versions": {}},
                **{"method": "full", "rows": Recipe.rows, "length": Recipe.length, **row["recipe"]},
                **next((more for group, more in decided["throughput"].items() if row["group"].startswith(group)), {}),
            }


@cache
def _models() -> dict[str, Any]:
    return {**json.loads(VERDICTS.read_text())["models"], **content()["models"]}


@cache
def model(name: str, variant: str, wide: str = "none") -> tuple[ModelShape, Tapes]:
    """The shape and tapes of one of the files' models, bundled or recorded."""
    if name == lightning_demo.NAME:
        return lightning_demo.shape_and_tapes()
    known = _models()[name]
    if isinstance(known, str):
        stored = trace_store.find(known)
        assert stored is not None
        if variant in stored[1] and wide == "none":
            return stored[0], stored[1][variant]
        from accel_fsdp.models import catalogue

        known = catalogue.entries()[known]["config"]
    from transformers import AutoConfig

    config = AutoConfig.for_model(known["model_type"], **{k: v for k, v in known.items() if k != "model_type"})
    return tapes_of(name, config, variant, wide)


def table(results: list[Result]) -> list[str]:
    """One line per group and method."""
    lines = [
        "| rows | n | median | worst | within 1 % | within 4 % | steady, worst |",
        "|---|---|---|---|---|---|---|",
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
    counted = [f"{sum(error <= limit for error in errors)}/{len(mine)}" for limit in (0.01, 0.04)]
    cells = [name, str(len(mine)), f"{median(errors):.2%}", f"{max(errors):.2%}", *counted]
    cells += [f"{max(steady):.2%}" if steady else ""]
    return "| " + " | ".join(cells) + " |"


def reserved_table(verdicts: list[Verdict]) -> list[str]:
    """One line per group, method and what was measured."""
    lines = [
        "| rows | measured | n | median | within 5 % | within 10 % | worst | measured - predicted, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in ("reserved", "smi"):
        mine = [finding for finding in verdicts if finding.against(kind)]
        for group, some in _grouped(mine, lambda finding: _group(finding.row)):
            lines.append(_reserved_line(", ".join(group), kind, some))
        lines.append(_reserved_line("all", kind, mine))
    return lines


def _reserved_line(name: str, kind: str, mine: list[Verdict]) -> str:
    pairs = [pair for result in mine if (pair := result.against(kind))]
    errors = [predicted / measured - 1 for predicted, measured in pairs]
    counted = [f"{sum(abs(error) <= limit for error in errors)}/{len(mine)}" for limit in (0.05, 0.1)]
    short = median(measured - predicted for predicted, measured in pairs) / GIB
    cells = [name, {"smi": "nvidia-smi"}.get(kind, kind), str(len(mine)), f"{median(map(abs, errors)):.1%}", *counted]
    return "| " + " | ".join([*cells, f"{max(errors, key=abs):+.1%}", f"{short:+.2f} GiB"]) + " |"


DOUBTS = ("expandable", "tight")
VERDICT_WORDS = (
    'Said to fit: the verdict "yes". In doubt: "tight", less than 5 % to spare, or "expandable", which fits with '
    'expandable segments alone. Said not to: "no".'
)


def verdict_table(verdicts: list[Verdict]) -> list[str]:
    """What the planner says of each group's runs, then those of which it is wrong, and those in doubt that ran out."""
    titles = ("said to fit", "in doubt", "said not to")
    lines = [f"| rows | {' | '.join(('fitted', *titles, 'ran out', *titles))} |", "|---" * 9 + "|"]
    for group, mine in [*_grouped(verdicts, lambda finding: (finding.row["group"],)), (("all",), verdicts)]:
        lines.append("| " + " | ".join([group[0], *_counted(mine, True), *_counted(mine, False)]) + " |")
    wrong = [finding for finding in verdicts if finding.said == ("no" if finding.fits else "yes")]
    doubted = [finding for finding in verdicts if not finding.fits and finding.said in DOUBTS]
    for title, some in (("Wrong:", wrong), ("In doubt, and ran out:", doubted)):
        lines += ["", title, "", *(_line_of(result) for result in some)] if some else []
    return [*lines, "", VERDICT_WORDS, *_near(verdicts)]


def _near(verdicts: list[Verdict]) -> list[str]:
    """How many of those that ran out were near to fitting: far ones prove little."""
    shares = [finding.share for finding in verdicts if not finding.fits]
    near = [f"{sum(share < limit for share in shares)} needed less than {limit:g} times" for limit in (1.25, 1.5, 2)]
    return ["", f"Of the {len(shares)} that ran out, {', '.join(near)} their card."] if shares else []


def _counted(mine: list[Verdict], fits: bool) -> list[str]:
    some = [result.said for result in mine if result.fits is fits]
    counts = [len(some), *(sum(verdict in kinds for verdict in some) for kinds in (("yes",), DOUBTS, ("no",)))]
    return [str(count) for count in counts] if some else [""] * 4


def _line_of(finding: Verdict) -> str:
    row, what = finding.row, "fitted" if finding.fits else "ran out of memory"
    words = [f"{row[key]}" for key in ("id", "model", "method", "engine")]
    size = f"{row['rows']} x {row['length']} on {row['gpus']} x {row['gpu']} of {row['card_gib']} GiB"
    where = f" ({finding.why})" if finding.why else ""
    note = f"; {row['note']}" if "note" in row else ""
    return f"- {' '.join(words)}, {size}: {what}, said: {finding.said}{where}{note}"


def main() -> None:
    """Prints the table; with --rows each row, with --write keeps the table in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    runs, decided = list(results()), list(verdicts())
    if options.rows:
        _print_rows(runs, decided)
    tables = table(runs), reserved_table(decided), verdict_table(decided)
    print("\n\n".join("\n".join(lines) for lines in tables))
    if options.write:
        write(runs, *tables)


def _print_rows(results: list[Result], decided: list[Verdict]) -> None:
    keys = ("id", "model", "method", "engine", "gpus", "rows", "length")
    for finding in results:
        steady = "" if finding.steady is None else f"{finding.steady:+.2%}"
        print(*(finding.row[key] for key in keys), f"{finding.peak:+.2%}", steady, finding.phase)
    for each in decided:
        sizes = [
            f"{kind} {pair[0] / GIB:.2f} of {pair[1] / GIB:.2f} GiB, {pair[0] / pair[1] - 1:+.1%}"
            for kind in ("reserved", "smi")
            if (pair := each.against(kind))
        ]
        print(*(each.row[key] for key in keys), *sizes or [f"reserved {each.reserved / GIB:.2f} GiB"], end=" ")
        print("fitted" if each.fits else "ran out", each.said, each.why)


def _outside(results: list[Result]) -> Iterator[str]:
    """What is further off than 1 % (peak) or 0.5 % (between steps), with the best explanation."""
    for finding in results:
        why = finding.row.get("note", "not explained")
        if abs(finding.peak) > 0.01:
            yield f"- {finding.row['id']} {finding.peak:+.2%}: {why}"
        if finding.steady is not None and abs(finding.steady) > 0.005:
            yield f"- {finding.row['id']} {finding.steady:+.2%} between steps: {why}"


def write(results: list[Result], allocated: list[str], reserved: list[str], decided: list[str]) -> None:
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
        *_outside(results),
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
