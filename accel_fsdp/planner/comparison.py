"""`accel-fsdp plan --compare`: the best layout on each of several machines, the fastest and the cheapest of them."""

import json
from dataclasses import dataclass, replace
from typing import Any

from accel_fsdp import console
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import machines
from accel_fsdp.planner import command, cost_report, workload
from accel_fsdp.planner.flags import PlanCommand
from accel_fsdp.prediction import Candidate, cost, search, written
from accel_fsdp.units import GIB, number_in_figure

NOT_BESIDE = ("gpus", "nodes", "config", "args", "output", "html")
"""Flags about one machine."""


@dataclass(frozen=True)
class Machine:
    """One row: a machine as the user named it, its best candidate, None if nothing fits, and that one's cost."""

    name: str
    choice: Candidate | None
    spent: cost.Cost | None

    @property
    def tokens_per_s(self) -> float:
        return self.choice.tokens_per_s * self.choice.layout.ranks if self.choice else 0

    def cells(self) -> dict[str, str]:
        """The row of the table, by title, without unknown amounts."""
        if self.choice is None:
            return {"machine": self.name, "fits": "no"}
        row = {"machine": self.name, "fits": self.choice.verdict, "strategy": self.choice.layout.name}
        row["GiB"] = number_in_figure(self.choice.device.needed / GIB)
        row["tokens/s"] = f"{self.tokens_per_s:,.0f}"
        if self.spent:
            row["hours"] = cost_report.span(self.spent.hours)
            row |= {"cost": cost_report.span(self.spent.money)} if self.spent.money else {}
        return row

    def as_json(self) -> dict[str, Any]:
        if self.choice is None:
            return {"machine": self.name, "fits": "no"}
        return {
            **{"machine": self.name, "fits": self.choice.verdict, "strategy": self.choice.layout.name},
            **{"batch_per_gpu": self.choice.recipe.rows, "checkpointing": self.choice.recipe.checkpointing},
            **{"peak_bytes": self.choice.prediction.peak.total, "tokens_per_s": self.tokens_per_s},
            "cost": cost_report.as_json(self.spent) if self.spent else None,
        }


@dataclass(frozen=True)
class Comparison:
    """All machines, in the order they were named."""

    machines: tuple[Machine, ...]

    @property
    def best(self) -> dict[str, list[str]]:
        """The fastest machines, and with a price the cheapest, that a prediction can't distinguish from the first."""
        seconds = {machine.name: 1 / machine.tokens_per_s for machine in self.machines if machine.choice}
        spent = {machine.name: machine.spent.money for machine in self.machines if machine.spent}
        money = {name: amount[0] for name, amount in spent.items() if amount}
        return {"fastest": _lowest(seconds), "cheapest": _lowest(money)}

    def show(self) -> None:
        rows = [machine.cells() for machine in self.machines]
        titles = max(map(list, rows), key=len)  # columns without any entry are left out
        cells = [[row.get(title, "") for title in titles] for row in rows]
        console.show_table(titles, cells, [""] * len(rows), whole=True)
        verdict = [f"{word.title()}: {' or '.join(names)}." for word, names in self.best.items() if names]
        console.put(" ".join(verdict or ["Nothing fits."]), wrap=True)

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": 1, "machines": [machine.as_json() for machine in self.machines], **self.best}


def _lowest(amounts: dict[str, float]) -> list[str]:
    ranked = sorted(amounts, key=amounts.__getitem__)
    return [name for name in ranked if amounts[name] * search.TIE <= amounts[ranked[0]]]


def show_comparison(flags: PlanCommand) -> int:
    """Prints the comparison; returns 0 if something fits on a machine, else 1."""
    comparison = compare(flags)
    if flags.json:
        console.put(json.dumps(comparison.as_json(), indent=2), lines=True)
    else:
        comparison.show()
    return 0 if comparison.best["fastest"] else 1


def compare(flags: PlanCommand) -> Comparison:
    """The best candidate on each machine."""
    described = machines.parse_list(flags.compare or "", "--compare")
    kinds = {written.gpu_of(machine, "--compare").name for machine, _ in described.values()}
    if others := [name for name in NOT_BESIDE if getattr(flags, name)]:
        flag = f"--{others[0]}"
        raise UsageError(f"{flag} beside --compare", why=f"{flag} is about one machine", fix=f"leave out {flag}")
    if flags.price is not None and len(kinds) > 1:
        fix = "leave out --price, and multiply the hours of each machine by its own price"
        what = f"--price beside --compare with {', '.join(sorted(kinds))}"
        raise UsageError(what, why="they don't cost the same", fix=fix)
    work = workload.work_of(flags)
    choices = {name: search.best(command.make_problem(replace(flags, gpus=name))) for name in described}
    rows = (Machine(name, choice, command.spent_on(choice, work, flags)) for name, choice in choices.items())
    return Comparison(tuple(rows))
