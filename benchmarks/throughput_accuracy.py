"""Predicted against published training throughput, by group: `python benchmarks/throughput_accuracy.py`.

`--held-out` also leaves out each source in turn (two minutes); `--write` keeps all of it in RESULTS.md.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import results

from accel_fsdp.hardware import gpus
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction import Step, speed, step_time
from accel_fsdp.prediction.memory import Block, ModelShape, Parameter

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
    note: str = ""
    source: str = ""

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
    return tuple(_case(row, content) for row in content["rows"])


def _case(row: Mapping[str, Any], content: Mapping[str, Any]) -> Case:
    recipe = Recipe(**row["recipe"])
    dimensions = content["models"][row["model"]]
    gpu = gpus.find(row["gpu"], row["memory_gib"])
    return Case(
        row["id"],
        row["group"],
        BUILDERS[dimensions["kind"]](row["model"], dimensions, recipe.length),
        recipe,
        Layout(**row["layout"]),
        gpu,
        row["tokens_per_s_per_gpu"],
        row.get("note", ""),
        content["sources"][row["source"]].split()[0].partition("#")[0],
    )


def gated(name: str, of: Mapping[str, Any], length: int) -> ModelShape:
    """A decoder of the Llama family: grouped attention, gated MLP, rotary positions of any length.

    With `experts` the MLP is one of Mixtral's kind; transformers before 5 looped over its experts (`loops`), each of
    which was three linear layers.
    """
    hidden, inner, query, key = (
        of["hidden"],
        of["intermediate"],
        *(of[n] * of["head_dim"] for n in ("heads", "kv_heads")),
    )
    sizes = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
    linear = [Parameter(f"self_attn.{part}_proj.weight", size, "linear") for part, size in sizes.items()]
    gates = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if "experts" not in of:
        linear += [Parameter(f"mlp.{part}_proj.weight", size, "linear") for part, size in gates.items()]
    elif of.get("loops"):
        for number in range(of["experts"]):
            linear += [Parameter(f"mlp.experts.{number}.{part}", size, "experts") for part, size in gates.items()]
    else:
        joined = {"gate_up_proj": (of["experts"], 2 * inner, hidden), "down_proj": (of["experts"], hidden, inner)}
        linear += [Parameter(f"mlp.experts.{part}", size, "experts") for part, size in joined.items()]
    norms = tuple(Parameter(f"{norm}_layernorm.weight", (hidden,), "norm") for norm in ("input", "post_attention"))
    if of.get("qk_norm"):
        norms += tuple(Parameter(f"self_attn.{part}_norm.weight", (of["head_dim"],), "norm") for part in "qk")
    outer = (Parameter("embedding", (of["vocab"], hidden), "embedding"), Parameter("norm", (hidden,), "norm"))
    head = () if of["tied"] else (Parameter("head", (of["vocab"], hidden), "head"),)
    shape = _shape(name, of, (*linear, *norms), outer + head, of["tied"])
    return dataclasses.replace(shape, experts=of.get("experts", 0), experts_used=of.get("experts_used", 0))


def gelu(name: str, of: Mapping[str, Any], length: int) -> ModelShape:
    """A decoder of the GPT-2 family with biases, tied embeddings and learned positions: MPT as trained, santacoder.

    MPT's parameter counts are those that its table prints, to the element.
    """
    hidden, key = of["hidden"], of["kv_heads"] * of["hidden"] // of["heads"]
    sizes = {"attn.c_attn": (hidden + 2 * key, hidden), "attn.c_proj": (hidden, hidden)}
    sizes |= {"mlp.c_fc": (4 * hidden, hidden), "mlp.c_proj": (hidden, 4 * hidden)}
    outer = (
        Parameter("embedding", (of["vocab"], hidden), "embedding"),
        Parameter("positions", (length, hidden), "other"),
        *_layer_norm("norm", hidden),
    )
    return _shape(name, of, (*_linear(sizes), *_layer_norm("ln_1", hidden), *_layer_norm("ln_2", hidden)), outer, True)


BUILDERS = {"gated": gated, "gelu": gelu}


def _linear(sizes: Mapping[str, tuple[int, int]]) -> Iterable[Parameter]:
    for part, size in sizes.items():
        yield Parameter(f"{part}.weight", size, "linear")
        yield Parameter(f"{part}.bias", size[:1], "other")


def _layer_norm(name: str, hidden: int) -> Iterable[Parameter]:
    yield from (Parameter(f"{name}.{part}", (hidden,), "norm") for part in ("weight", "bias"))


def _shape(
    name: str, of: Mapping[str, Any], inside: tuple[Parameter, ...], outer: tuple[Parameter, ...], tied: bool
) -> ModelShape:
    block = Block("Layer", tuple(range(of["layers"])), inside)
    head_dim = of.get("head_dim", of["hidden"] // of["heads"])
    return ModelShape(name, name, of["hidden"], of["vocab"], of["heads"], head_dim, (block,), outer, tied)


def table(rows: Iterable[Case]) -> Iterable[str]:
    """Median and worst error of each group and of all, how often the range holds the measurement."""
    groups: dict[str, list[Case]] = {}
    every = list(rows)
    for case in every:
        groups.setdefault(case.group, []).append(case)
    yield "| rows | n | median | median of absolute errors | worst | in range |"
    yield "|---|---|---|---|---|---|"
    for name, members in sorted(groups.items()):
        yield _line(name, members)
    yield _line("all", every)


KINDS: Mapping[str, Callable[[Case], bool]] = {
    "LoRA": lambda case: case.recipe.method == "lora",
    "QLoRA": lambda case: case.recipe.method == "qlora",
    "MoE": lambda case: case.shape.experts > 0,
}
"""Across the groups: what was predicted badly before each had physics of its own."""


def _line(name: str, members: list[Case]) -> str:
    errors = [case.error for case in members]
    numbers = (median(errors), median(map(abs, errors)), max(errors, key=abs), _share_in_range(members))
    return f"| {name} | {len(members)} | " + " | ".join(f"{number:.1%}" for number in numbers) + " |"


def _share_in_range(rows: list[Case]) -> float:
    def holds(case: Case) -> bool:
        shortest, longest = case.step().range_seconds
        tokens = case.recipe.rows * case.recipe.length * case.recipe.accumulation
        return shortest <= tokens / case.tokens_per_s_per_gpu <= longest

    return sum(map(holds, rows)) / len(rows)


CALIBRATED: tuple[tuple[Any, str], ...] = (
    (speed, "ATTENTION_EFFICIENCY"),
    (speed, "OLDER_INSTRUCTIONS"),
    (speed, "LAUNCH_SECONDS"),
    (speed, "UNIT_SECONDS"),
    (speed, "UNPACKING_FLOPS"),
)
"""All constants that published rows decide, besides one efficiency for each chip."""


def held_out(rows: tuple[Case, ...]) -> Iterator[str]:
    """For each source: the constants found again without it, and how well its rows are then met.

    A chip that no other source has is taken to have the efficiency of uncalibrated ones.
    """
    yield "| left out | n | median of absolute errors | worst | within 30 % |"
    yield "|---|---|---|---|---|"
    every: list[float] = []
    for source in sorted({case.source for case in rows}):
        errors = _errors_without(source, rows)
        every += errors
        yield _held_out_line(source, errors)
    yield _held_out_line("all", every)


def _held_out_line(name: str, errors: list[float]) -> str:
    worst, near = max(errors, key=abs), sum(abs(error) <= 0.3 for error in errors) / len(errors)
    return f"| {name} | {len(errors)} | {median(map(abs, errors)):.1%} | {worst:.1%} | {near:.1%} |"


def _errors_without(source: str, rows: tuple[Case, ...]) -> list[float]:
    """Coordinate descent from the values in use on the errors of sources, weighted by the root of how many each has."""
    others = tuple(case for case in rows if case.source != source)
    chips = {case.gpu.name: case.gpu.efficiency for case in others}
    known = [getattr(module, name) for module, name in CALIBRATED]
    best = _loss(others, chips)
    try:
        for step in (1.08, 1.03):
            for place in (*CALIBRATED, *chips):
                best = _improved(place, step, others, chips, best)
        return [_with_efficiency(case, chips).error for case in rows if case.source == source]
    finally:
        for (module, name), value in zip(CALIBRATED, known, strict=True):
            setattr(module, name, value)


def _improved(place: Any, step: float, rows: tuple[Case, ...], chips: dict[str, float], best: float) -> float:
    """Moves one constant, or one chip's efficiency, as long as the loss falls."""

    def get() -> float:
        return chips[place] if isinstance(place, str) else float(getattr(*place))

    def put(value: float) -> None:
        if isinstance(place, str):
            chips[place] = min(value, 1.0)
        else:
            setattr(*place, value)

    for factor in (step, 1 / step):
        while True:
            before = get()
            put(before * factor)
            loss = _loss(rows, chips)
            if loss >= best - 1e-6:
                put(before)
                break
            best = loss
    return best


def _with_efficiency(case: Case, chips: Mapping[str, float]) -> Case:
    efficiency = chips.get(case.gpu.name, gpus.ASSUMED_EFFICIENCY)
    return dataclasses.replace(case, gpu=dataclasses.replace(case.gpu, efficiency=efficiency))


def _loss(rows: Iterable[Case], chips: Mapping[str, float]) -> float:
    by_source: dict[str, list[float]] = {}
    for case in rows:
        by_source.setdefault(case.source, []).append(min(0.5, abs(_with_efficiency(case, chips).error)))
    return sum(mean(errors) * len(errors) ** 0.5 for errors in by_source.values())


def range_of(rows: Iterable[Case]) -> tuple[float, float]:
    """Between which multiples of the predicted step 9 of 10 measured ones lie."""
    ratios = sorted(1 + case.error for case in rows)
    return ratios[round(0.05 * len(ratios))], ratios[round(0.95 * len(ratios)) - 1]


def main() -> None:
    """Prints the tables; with --write keeps them in RESULTS.md."""
    known = cases()
    lines = list(table(known))
    print(*lines, "", sep="\n")
    low, high = range_of(known)
    print(f"9 of 10 measured steps are {low:.2f} to {high:.2f} of the predicted ones")
    without = list(held_out(known)) if "--held-out" in sys.argv or "--write" in sys.argv else []
    print(*without, sep="\n")
    if "--write" in sys.argv:
        part = ["## Step time, predicted against published", "", "`python benchmarks/throughput_accuracy.py --write`"]
        part += ["", *lines, "", ABOUT, "", HELD_OUT, "", *without]
        results.keep("time", part)


ABOUT = """Errors are of tokens per second: above zero the prediction is too fast. Sources, and what each says of its
machine, are in `data/throughput.json`."""
HELD_OUT = """Each source left out in turn: the calibrated constants (five, and one efficiency for each chip) are found
again without it, starting from the values in use. A chip that no other source has is then taken for one that nobody
measured. The counts of bytes and kernels have no constant to find, but were written with all rows at hand."""

if __name__ == "__main__":
    main()
