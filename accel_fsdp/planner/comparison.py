"""`accel-fsdp plan --compare`: the best layout on each of several machines, the cheapest and the fastest of them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from accel_fsdp import console
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import Gpu, machines
from accel_fsdp.planner import command, cost_report, workload
from accel_fsdp.planner.flags import PlanCommand
from accel_fsdp.prediction import Candidate, Problem, checkpointing_in, cost, rows_in, search
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.units import about_gib, distinguishable, gib_of, parameters, two_digits

SCHEMA_VERSION = 1
"""The version of the `--json` output, raised whenever a key is removed or changes its meaning."""
USUAL = cost.Work(tokens=10**9)
"""The compared amount of training, if none is given."""
NOT_BESIDE = ("gpus", "nodes", "config", "args", "output", "html")
"""Flags about one machine."""
COLUMNS = ("machine", "strategy", "batch", "checkpointing", "tokens/s", "hours", "GPU-hours", "cost", "")


@dataclass(frozen=True)
class Machine:
    """One row: a machine as the user named it, and its best candidate; `why` gives the reason if there is none."""

    name: str
    gpu: Gpu
    ranks: int
    choice: Candidate | None = None
    spent: cost.Cost | None = None
    why: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.choice.tokens_per_s * self.ranks if self.choice else 0


@dataclass(frozen=True)
class Comparison:
    """All machines in the order they were named.

    `problem` is the first machine's; `assumed`: no amount of training was given.
    """

    problem: Problem
    work: cost.Work
    machines: tuple[Machine, ...]
    assumed: bool

    @property
    def fastest(self) -> Machine | None:
        """The machine that needs the fewest hours; None if nothing fits on any."""
        return self._machine_with_least(lambda spent: spent.hours)

    @property
    def cheapest(self) -> Machine | None:
        """The machine with the lowest cost; None if no price is known."""
        return self._machine_with_least(lambda spent: spent.money)

    @property
    def _spent(self) -> list[tuple[Machine, cost.Cost]]:
        return [(machine, machine.spent) for machine in self.machines if machine.spent]

    def _machine_with_least(self, amount: Callable[[cost.Cost], cost.Span | None]) -> Machine | None:
        pairs = [(span.expected, machine) for machine, spent in self._spent if (span := amount(spent))]
        return min(pairs, key=lambda pair: pair[0])[1] if pairs else None

    def headline(self) -> str:
        """The compared job, in a sentence."""
        shape, recipe, work = self.problem.shape, self.problem.job.recipe, self.work
        amount = f"{work.tokens:,} tokens" if work.tokens else f"{work.rows:,} rows, {work.epochs:g} times"
        note = ", the default without --tokens or --dataset-rows" if self.assumed else ""
        return (
            f"{shape.name}: {parameters(shape.numel, shape.language)}, {recipe.method} training on {amount}{note}, "
            f"{recipe.length:,} tokens per sequence; all of it predicted."
        )

    def rows(self) -> list[list[str]]:
        return [self._cells(machine) for machine in self.machines]

    def _cells(self, machine: Machine) -> list[str]:
        if machine.choice is None or machine.spent is None:
            return [machine.name, "nothing fits", *[""] * (len(COLUMNS) - 2)]
        money = machine.spent.money
        marks = [word for word, best in (("cheapest", self.cheapest), ("fastest", self.fastest)) if best is machine]
        return [
            machine.name,
            machine.choice.layout.name,
            str(machine.choice.recipe.rows),
            machine.choice.recipe.checkpointing,
            f"{machine.tokens_per_s:,.0f}",
            cost_report.span(machine.spent.hours),
            cost_report.span(machine.spent.gpu_hours),
            cost_report.span(money) if money else "",
            ", ".join(marks),
        ]

    def sentences(self) -> Iterator[str]:
        """Explains the table and its omissions; a sentence or two per line."""
        for word, best, amount in (
            ("Cheapest", self.cheapest, lambda spent: spent.money),
            ("Fastest", self.fastest, lambda spent: spent.hours),
        ):
            if best:
                yield f"{word}: {best.name}, {self._time_and_money(best)}.{self._indistinguishable(best, amount)}"
        for machine in self.machines:
            if machine.why:
                yield f"{machine.name}: {machine.why}."
        if unpriced := [machine.name for machine, spent in self._spent if spent.money is None]:
            names = ", ".join(unpriced)
            yield f"{names}: --prices FILE has no price{'.' if self.cheapest else ', or none was given.'}"
        yield from self._energy()
        best = self.cheapest or self.fastest
        if best:
            yield f"accel-fsdp plan with --gpus {best.name} says more, and writes its YAML."
        yield "Assumed: " + " ".join((*dict.fromkeys(self._assumptions()), cost_report.FULL_ROWS))

    def _time_and_money(self, machine: Machine) -> str:
        assert machine.spent is not None
        money = machine.spent.money
        price = f", {cost_report.span(money)} at {cost_report.price(machine.spent)} per GPU-hour" if money else ""
        return f"{cost_report.hours(machine.spent.hours)}{price}"

    def _indistinguishable(self, best: Machine, amount: Callable[[cost.Cost], Any]) -> str:
        """Names the machines whose predictions equal the best within the prediction's error."""
        assert best.spent is not None
        lowest = amount(best.spent).expected
        spans = [(machine.name, amount(spent)) for machine, spent in self._spent if machine is not best]
        near = [name for name, span in spans if span and span.expected * search.TIE <= lowest]
        return f" A prediction can't distinguish it from {', '.join(near)}." if near else ""

    def _energy(self) -> Iterator[str]:
        energies = [f"{machine.name} {two_digits(spent.most_kwh)}" for machine, spent in self._spent]
        if energies:
            yield (
                f"Energy in kWh, at most: {'; '.join(energies)}. This assumes every GPU at its datasheet's power "
                "for the longest of these times; CPUs, network and cooling are not counted."
            )

    def _assumptions(self) -> Iterator[str]:
        yield from self.problem.notes
        for machine in self.machines:
            yield from self.problem.assumptions(machine.choice) if machine.choice else ()

    def show(self) -> None:
        console.put(self.headline(), wrap=True)
        console.show_table(COLUMNS, self.rows(), [""] * len(self.machines), whole=True)
        for line in self.sentences():
            console.put(line, wrap=True)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.problem.shape.name,
            "method": self.problem.job.method,
            "sequence_length": self.problem.job.recipe.length,
            "machines": [self._row(machine) for machine in self.machines],
            "cheapest": self.cheapest.name if self.cheapest else None,
            "fastest": self.fastest.name if self.fastest else None,
        }

    def _row(self, machine: Machine) -> dict[str, Any]:
        choice = machine.choice
        row: dict[str, Any] = {"machine": machine.name, "gpu": machine.gpu.name, "gpus": machine.ranks}
        row["fits"] = bool(choice)
        if choice is None:
            return row | {"why": machine.why}
        return row | {
            "strategy": choice.layout.name,
            "batch_per_gpu": choice.recipe.rows,
            "accumulation": choice.recipe.accumulation,
            "checkpointing": choice.recipe.checkpointing,
            "precision": choice.recipe.precision,
            "peak_bytes": choice.prediction.peak.total,
            "step_seconds": choice.step.step_seconds if choice.step else None,
            "tokens_per_s": machine.tokens_per_s,
            "assumptions": self.problem.assumptions(choice),
            "cost": cost_report.as_json(machine.spent, machine.gpu) if machine.spent else None,
        }


def show_comparison(flags: PlanCommand) -> int:
    """Prints the comparison; returns 0 if something fits on a machine, else 1."""
    comparison = compare(flags)
    if flags.json:
        console.put(json.dumps(comparison.as_json(), indent=2), lines=True)
    else:
        comparison.show()
    return 0 if comparison.fastest else 1


def compare(flags: PlanCommand) -> Comparison:
    """The best candidate on each machine."""
    described = machines.parse_list(flags.compare or "", "--compare")
    kinds = {name: command.gpu_of(machine, "--compare") for name, (machine, _) in described.items()}
    _refuse_twice({name: (kinds[name], machine.count, count) for name, (machine, count) in described.items()})
    _refuse_beside(flags, {gpu.name for gpu in kinds.values()})
    inputs = [workload.inputs_of(flags, gpu) for gpu in kinds.values()]
    is_default = inputs[0].work == cost.Work()
    results: list[Machine] = []
    problems: list[Problem] = []
    errors: list[UsageError] = []
    read = cache(by_name.read_shape)
    for (name, (machine, count)), work in zip(described.items(), inputs, strict=True):
        try:
            problem, _ = command.search_problem(replace(flags, gpus=name), read)
        except UsageError as error:  # such as attention that a GPU doesn't support: its row reports it
            errors.append(error)
            results.append(Machine(name, kinds[name], machine.count * count, why=f"{error.what}: {error.why}"))
            continue
        problems.append(problem)
        results.append(_best_on(name, problem, replace(work, work=USUAL) if is_default else work))
    if not problems:
        raise errors[0]
    return Comparison(problems[0], USUAL if is_default else inputs[0].work, tuple(results), is_default)


def _best_on(name: str, problem: Problem, work: cost.CostInputs) -> Machine:
    choice = search.best(problem)
    why = "" if choice else _why_not(problem)
    spent = command.spent_on(work, problem, choice)
    return Machine(name, problem.gpu, problem.job.layout.ranks, choice, spent, why)


def _why_not(problem: Problem) -> str:
    """Why nothing fits: the memory of the smallest candidate, or the reason why no candidate works."""
    smallest = search.least(problem)
    if smallest.refused:
        return f"no strategy works: {smallest.refused}"
    how = f"{smallest.layout.name}, {rows_in(smallest.recipe)} per GPU and {checkpointing_in(smallest.recipe)}"
    need = f"the least that a GPU needs are {gib_of(smallest.device.needed, problem.capacity_bytes)}, with {how}"
    offloaded = smallest.job.with_layout(offload=smallest.layout.is_fsdp)
    loading, hosted, host = problem.host(smallest.job).loading, problem.host(offloaded).training, problem.host_bytes
    if smallest.fits and loading > host:
        return "{}; loading needs {} of each machine's memory, and {} are there".format(
            need, *distinguishable(about_gib, loading, host)
        )
    if offloaded != smallest.job and hosted > host:
        need += "; offload needs {} of each machine's memory, and {} are there".format(
            *distinguishable(about_gib, hosted, host)
        )
    return need


def _refuse_twice(kinds: dict[str, tuple[Gpu, int, int]]) -> None:
    names: dict[tuple[Gpu, int, int], str] = {}
    for name, kind in kinds.items():
        if (first := names.setdefault(kind, name)) != name:
            raise UsageError(
                f"--compare has {first} and {name}",
                why="they are the same machine",
                fix=f"--compare with {first} alone",
            )


def _refuse_beside(flags: PlanCommand, kinds: set[str]) -> None:
    plain = PlanCommand(flags.model)
    for name in NOT_BESIDE:
        if getattr(flags, name) != getattr(plain, name):
            flag = f"--{name}"
            raise UsageError(
                f"{flag} beside --compare", why=f"{flag} is about one machine", fix=f"leave out {flag}, or --compare"
            )
    if flags.price is not None and len(kinds) > 1:
        raise UsageError(
            f"--price beside --compare with {', '.join(sorted(kinds))}",
            why="they don't cost the same",
            fix="--prices FILE, a TOML with a line for each, such as H100 = 2.5",
        )
