"""Predicted against published training throughput, by group: `python benchmarks/throughput_accuracy.py`.

`--write` keeps the table in RESULTS.md. `--fit` also prints, for each GPU with published rows, the efficiency at which
its median error would be least.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import results

from accel_fsdp.hardware import gpus
from accel_fsdp.prediction import Step, step_time
from accel_fsdp.prediction.memory import Block, Layout, ModelShape, Parameter, Recipe

DATA = Path(__file__).parent / "data" / "throughput.json"


@dataclasses.dataclass(frozen=True)
class Case:
    """One published run."""

    id: str
    group: str
    shape: ModelShape
    recipe: Recipe
    layout: Layout
    gpu: gpus.Gpu
    tokens_per_s_per_gpu: float

    def step(self) -> Step:
        """What is predicted for it."""
        return step_time(self.shape, self.recipe, self.layout, self.gpu)

    @property
    def error(self) -> float:
        """Predicted / published throughput - 1."""
        return self.step().tokens_per_s_per_gpu / self.tokens_per_s_per_gpu - 1


def cases() -> tuple[Case, ...]:
    """All rows of the data file."""
    content = json.loads(DATA.read_text(encoding="utf-8"))
    return tuple(_case(row, content["models"][row["model"]]) for row in content["rows"])


def _case(row: Mapping[str, Any], dimensions: Mapping[str, Any]) -> Case:
    recipe = Recipe(**row["recipe"])
    build = gated if dimensions["kind"] == "gated" else gelu
    return Case(
        row["id"],
        row["group"],
        build(row["model"], dimensions, recipe.length),
        recipe,
        Layout(**row["layout"]),
        gpus.find(row["gpu"], row["memory_gib"]),
        row["tokens_per_s_per_gpu"],
    )


def gated(name: str, of: Mapping[str, Any], length: int) -> ModelShape:
    """A decoder of the Llama family: grouped attention, gated MLP, rotary positions of any length."""
    hidden, inner, query, key = (
        of["hidden"],
        of["intermediate"],
        *(of[n] * of["head_dim"] for n in ("heads", "kv_heads")),
    )
    sizes = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
    sizes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    linear = tuple(Parameter(weight, size, "linear") for weight, size in sizes.items())
    norms = tuple(Parameter(norm, (hidden,), "norm") for norm in ("attention_norm", "mlp_norm"))
    outer = (Parameter("embedding", (of["vocab"], hidden), "embedding"), Parameter("norm", (hidden,), "norm"))
    head = () if of["tied"] else (Parameter("head", (of["vocab"], hidden), "head"),)
    return _shape(name, of, linear + norms, outer + head, of["tied"])


def gelu(name: str, of: Mapping[str, Any], length: int) -> ModelShape:
    """A decoder of the GPT-2 family with biases, tied embeddings and learned positions: MPT as trained, santacoder.

    MPT's parameter counts are those that its table prints, to the element.
    """
    hidden, key = of["hidden"], of["kv_heads"] * of["hidden"] // of["heads"]
    sizes = {"qkv": (hidden + 2 * key, hidden), "o": (hidden, hidden), "up": (4 * hidden, hidden)}
    sizes |= {"down": (hidden, 4 * hidden)}
    linear = tuple(Parameter(weight, size, "linear") for weight, size in sizes.items())
    biases = tuple(Parameter(f"{weight}_bias", size[:1], "other") for weight, size in sizes.items())
    norms = tuple(Parameter(norm, (2 * hidden,), "norm") for norm in ("attention_norm", "mlp_norm"))
    outer = (
        Parameter("embedding", (of["vocab"], hidden), "embedding"),
        Parameter("positions", (length, hidden), "other"),
        Parameter("norm", (2 * hidden,), "norm"),
    )
    return _shape(name, of, linear + biases + norms, outer, tied=True)


def _shape(
    name: str, of: Mapping[str, Any], inside: tuple[Parameter, ...], outer: tuple[Parameter, ...], tied: bool
) -> ModelShape:
    block = Block("Layer", tuple(range(of["layers"])), inside)
    head_dim = of.get("head_dim", of["hidden"] // of["heads"])
    return ModelShape(name, name, of["hidden"], of["vocab"], of["heads"], head_dim, (block,), outer, tied)


def table(rows: Iterable[Case]) -> Iterable[str]:
    """Median and worst absolute error of each group and of all, and how often the range holds the measurement."""
    groups: dict[str, list[Case]] = {}
    for case in rows:
        groups.setdefault(case.group, []).append(case)
    yield "| rows | n | median | median of absolute errors | worst | in range |"
    yield "|---|---|---|---|---|---|"
    for name, members in [*sorted(groups.items()), ("all", [case for group in groups.values() for case in group])]:
        errors = [case.error for case in members]
        numbers = (median(errors), median(map(abs, errors)), max(errors, key=abs), _share_in_range(members))
        yield f"| {name} | {len(members)} | " + " | ".join(f"{number:.1%}" for number in numbers) + " |"


def _share_in_range(rows: list[Case]) -> float:
    def holds(case: Case) -> bool:
        shortest, longest = case.step().range_seconds
        tokens = case.recipe.rows * case.recipe.length * case.recipe.accumulation
        return shortest <= tokens / case.tokens_per_s_per_gpu <= longest

    return sum(map(holds, rows)) / len(rows)


def fit(rows: tuple[Case, ...]) -> Iterable[str]:
    """The best efficiency of each GPU, in steps of 0.01."""
    for name in sorted({case.gpu.name for case in rows}):
        own = [case for case in rows if case.gpu.name == name]
        best = min((_median_error(own, percent / 100), percent / 100) for percent in range(30, 100))
        yield f"{name}: {best[1]:.2f} has a median error of {best[0]:.1%}, the table has {own[0].gpu.efficiency:.2f}"


def _median_error(rows: list[Case], efficiency: float) -> float:
    changed = (dataclasses.replace(case, gpu=dataclasses.replace(case.gpu, efficiency=efficiency)) for case in rows)
    return median(abs(case.error) for case in changed)


if __name__ == "__main__":
    known = cases()
    lines = list(table(known))
    print(*lines, sep="\n")
    if "--write" in sys.argv:
        title, command = (
            "## Step time, predicted against published",
            "`python benchmarks/throughput_accuracy.py --write`",
        )
        results.keep("time", [title, "", command, "", *lines])
    if "--fit" in sys.argv:
        print(*fit(known), sep="\n")
