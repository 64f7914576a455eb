"""The plan in words and numbers: table, recommendation, requirements, assumptions."""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_fsdp import console
from accel_fsdp.config import Engine
from accel_fsdp.job import Layout, combinations, from_arguments
from accel_fsdp.planner import cost_report, proposal
from accel_fsdp.planner.proposal import Proposer
from accel_fsdp.prediction import (
    Candidate,
    Change,
    Plan,
    Problem,
    capacity,
    checkpointing_in,
    cost,
    remedies,
    rows_in,
    search,
    step_traffic,
)
from accel_fsdp.prediction.memory import KINDS, LETTERS, Resume, resumed
from accel_fsdp.units import GIB, about_gb, about_gib, counted, gib_of, gib_or_mib, number_in_figure

SCHEMA_VERSION = 4
"""The version of the `--json` output, raised whenever a key is removed or changes its meaning."""
COLUMNS = ("strategy", "GiB", "of one GPU", "fits", "step s", "tokens/s per GPU")
TIMES = ("step_seconds", "tokens_per_s_per_gpu", "mfu", "bound")
"""The fields of a step in the `--json` output, null where its time is not predicted."""
WIDE, BAR_CELLS, NARROW_CELLS = 104, 20, 12
LORA_RATE = (
    f"The arguments have --learning_rate {from_arguments.LORA_RATE}: an adapter takes about ten times the rate of full "
    "training, which Trainer's default is for."
)
IN_PLACE = {
    Engine.FSDP1: "FSDP2 loads in place, and resumes FSDP1's checkpoints: accel-fsdp migrate FILE --to fsdp2.",
    Engine.FSDP2: "Sharded checkpoints are loaded in place: fsdp_state_dict_type: SHARDED_STATE_DICT.",
}
"""What resumes with less memory."""
COLOURS = dict(
    zip(KINDS, ("blue", "magenta", "yellow", "cyan", "green", "red", "bright_black", "bright_black"), strict=True)
)


def _is_usual(layout: Layout) -> bool:
    return layout.engine is Engine.DDP or (layout.engine is Engine.FSDP2 and layout.strategy in (1, 2))


@dataclass(frozen=True)
class PlanReport:
    """A plan with its problem, for printing. `proposer` writes the recommended YAML; None where `config` is judged.

    `spent` is the cost of the job with the chosen candidate, None if not requested. `args` are the script's arguments.
    """

    problem: Problem
    plan: Plan
    proposer: Proposer | None
    config: Path | None = None
    spent: cost.Cost | None = None
    args: Path | None = None

    def yaml(self) -> str:
        """The recommended YAML; empty if there is none."""
        choice = self.plan.choice
        return self.proposer.written(choice.job) if choice and self.proposer else ""

    def command(self) -> str:
        """The command that writes the recommended YAML; empty if there is none."""
        choice = self.plan.choice
        return self.proposer.command(choice.job) if choice and self.proposer else ""

    def headline(self) -> str:
        """The planned job, in a sentence."""
        problem, shape, recipe = self.problem, self.problem.shape, self.problem.job.recipe
        return (
            f"{shape.name}: {recipe.method} training on {problem.job.layout.ranks} x {problem.gpu.name} with "
            f"{gib_or_mib(problem.capacity_bytes)}, {recipe.rows} x {recipe.length:,} tokens per GPU"
            + (f", {recipe.accumulation} micro-batches a step" if recipe.accumulation > 1 else "")
            + "; all predicted."
        )

    def show(self, details: bool = False) -> None:
        """Prints the table, what to copy, and the verdict last; with `details` also all that explains them."""
        console.put(self.headline(), wrap=True)
        bar_cells = BAR_CELLS if console.data.width >= WIDE else NARROW_CELLS
        shown = self.plan.rows if details else self._rows_shown()
        legend = [(LETTERS[kind], COLOURS[kind], kind) for kind in KINDS] if details else []
        console.show_bars(COLUMNS, [self._cells(candidate, bar_cells) for candidate in shown], legend)
        left_out = len(self.plan.rows) - len(shown)
        if not details:
            more = f"{counted(left_out, 'more strategy', 'more strategies')}, " if left_out else ""
            console.put(f"--details: {more}assumptions, host memory, and why.", wrap=True)
        explained = (self._explained(), self.details()) if details else (self._failures(shown),)
        for line in (line for lines in explained for line in lines):
            console.put(line, wrap=True)
        for line in self.to_copy():
            console.put(line)
        console.put(self.answer(), wrap=True)

    def _rows_shown(self) -> tuple[Candidate, ...]:
        """The rows of DDP, FSDP2 on all GPUs and the choice, or the only one."""
        chosen = replace(self.plan.choice.layout, offload=False) if self.plan.choice else None
        shown = tuple(row for row in self.plan.rows if row.layout == chosen or _is_usual(row.layout))
        return shown or self.plan.rows

    def to_copy(self) -> Iterator[str]:
        """The command that writes the recommended YAML, and the script's arguments."""
        if command := self.command():
            yield command
        if self.plan.choice and self.proposer:
            yield shlex.join(proposal.argument_words(self.plan.choice.job))

    def _cells(self, candidate: Candidate, width: int) -> list[Any]:
        parts = [(LETTERS[kind], COLOURS[kind], size) for kind, size in candidate.prediction.peak.live.items() if size]
        return [
            candidate.layout.name,
            number_in_figure(candidate.device.needed / GIB),
            console.bar(parts, self.problem.capacity_bytes, width),
            candidate.verdict,
            *candidate.pace,
        ]

    def _sent_bytes(self, candidate: Candidate) -> dict[str, float] | None:
        """The bytes that a rank sends in a step by link, None if they are not predicted."""
        if candidate.step is None:
            return None
        traffic = step_traffic(self.problem.shape, candidate.recipe, candidate.layout)
        return {"intra-node": traffic.intra_bytes, "inter-node": traffic.inter_bytes, "pcie": traffic.pcie_bytes}

    def _explained(self) -> Iterator[str]:
        """Explains the numbers and words of the table."""
        outside_size = gib_or_mib(self.plan.rows[0].device.outside, gib_from=GIB / 10)
        nccl = " and NCCL" if self.problem.job.layout.ranks > 1 else ""
        yield f"GiB: what a GPU needs at the peak of a step, with {outside_size} for CUDA{nccl}."
        tight = "; tight: with less, and may run out" if any(row.verdict == "tight" for row in self.plan.rows) else ""
        yield f"yes: it fits with {self._margin()}{tight}."
        yield from self._failures(self.plan.rows)

    def _failures(self, rows: Iterable[Candidate]) -> Iterator[str]:
        """Why strategies fail regardless of GPU memory, a sentence for each reason."""
        reasons: dict[str, list[str]] = {}
        for candidate in rows:
            if candidate.refused and not self.config:
                reasons.setdefault(candidate.refused, []).append(candidate.layout.name)
        for why, names in reasons.items():
            for engine in Engine:  # all of an engine's strategies at once
                own = [row.layout.name for row in self.plan.rows if row.layout.engine is engine]
                if len(own) > 1 and {row.refused for row in self.plan.rows if row.layout.engine is engine} == {why}:
                    names = [engine.label, *(name for name in names if name not in own)]
            is_fixed = why.endswith(combinations.UNLESS_SFT)
            fails = f"fails{combinations.UNLESS_SFT if is_fixed else ''}"
            yield f"{fails}: {', '.join(names)}. {why.removesuffix(combinations.UNLESS_SFT)}."

    def _margin(self) -> str:
        """The margin in words."""
        if self.problem.gpu.has_expandable_segments:
            return f"a margin of {capacity.MARGIN:.0%}"
        return f"{capacity.FRAGMENTED - 1:.0%} for fragmentation, as expandable segments may hang under ROCm"

    def details(self) -> Iterator[str]:
        """What explains the recommendation: alternatives, needs, assumptions; a sentence or two per line."""
        problem, choice = self.problem, self.plan.choice
        if choice is None:
            yield from problem.notes
            return
        if not self.config:
            yield self.plan.reason
        yield from self._alternatives(choice)
        yield self._longest_sequence()
        yield self._host(choice)
        yield from self._resume_lines(choice)
        if choice.job.adapter and self.proposer:
            yield LORA_RATE
        if assumptions := (*problem.assumptions(choice), *((cost_report.FULL_ROWS,) if self.spent else ())):
            yield "Assumed: " + " ".join(assumptions)

    def answer(self) -> str:
        """The verdict: what to take, or that nothing fits, and what would."""
        choice, given = self.plan.choice, self.plan.rows[0] if self.config else None
        if choice is not None:
            return " ".join(filter(None, (self._taken(choice), self._one_step(choice), self._cost())))
        if given and given.refused and given.refused != self.problem.host_lack(given.job):
            command = f"accel-fsdp check {self.config} --model {self.problem.shape.name}"
            return f"This YAML doesn't work, regardless of memory: {given.refused}. See {command}"
        return f"{self._misfit(given)} {self._what_would_fit()}"

    def _taken(self, choice: Candidate) -> str:
        memory = gib_of(choice.device.needed, choice.device.capacity)
        how = f"{rows_in(choice.recipe)} per GPU, {checkpointing_in(choice.recipe)}"
        if self.config:
            return f"It fits: {memory} with {how}{self.plan.reason}."
        if choice.layout.engine is Engine.NONE:
            return f"It fits with {how}: {memory}, {choice.tokens_per_s:,.0f} tokens/s."
        needs = " (pip install accel-fsdp[deepspeed])" if choice.layout.engine is Engine.DEEPSPEED else ""
        return f"Take {choice.layout.name}{needs} with {how}: {memory}, {choice.tokens_per_s:,.0f} tokens/s per GPU."

    def _cost(self) -> str:
        if self.spent:
            return cost_report.sentence(self.spent)
        return cost_report.UNKNOWN if self.args and self.plan.choice and self.plan.choice.step else ""

    def _misfit(self, given: Candidate | None) -> str:
        if given is None:
            return f"Nothing fits: each GPU has {gib_or_mib(self.problem.capacity_bytes)}."
        if given.refused:
            return f"It doesn't fit: {given.refused}."
        where = f"; memory runs out in the {given.device.runs_out}" if given.device.runs_out else ""
        lead = "It may run out of memory" if given.verdict == "tight" else "It doesn't fit"
        return f"{lead}: it {given.words}{where}."

    def _what_would_fit(self) -> str:
        changes = self._in_words(self._changes())
        return f"What would fit: {'; or '.join(changes) or 'a smaller model, or GPUs with more memory'}."

    def _in_words(self, changes: list[Change]) -> list[str]:
        return [change.words.replace("FILE", str(self.config)) if self.config else change.flags for change in changes]

    def _changes(self) -> list[Change]:
        """The changes with which it would fit: of the given job, or of the plan's in the strategy that shards all."""
        job = self.problem.job
        if not self.config and job.layout.ranks > 1:
            job = job.with_layout(engine=Engine.FSDP2, strategy=1)
        return [] if self.plan.choice else remedies(self.problem, job)

    def _one_step(self, choice: Candidate) -> str:
        rows = choice.job.rows_per_step
        shortest, longest = choice.step.range_seconds if choice.step else (0, 0)
        tokens = f"{counted(rows, 'sequence')} ({rows * choice.recipe.length:,} tokens)"
        if not choice.step:
            return f"A step trains on {tokens}; its time is not predicted."
        return f"A step of {tokens} takes {_seconds(shortest)} to {_seconds(longest)} s."

    def _alternatives(self, choice: Candidate) -> Iterator[str]:
        if self.plan.ties:
            equals = ", ".join(f"{tie.layout.name} ({_settings_and_memory(tie)})" for tie in self.plan.ties)
            yield (
                f"Equally fast within the error of a prediction, which may be {1 - search.TIE:.0%} off: {equals}. "
                f"{search.PREFERRED}"
            )
        if second := self.plan.runner_up:
            ratio = choice.tokens_per_s / second.tokens_per_s
            slower = f"{1 - 1 / ratio:.0%} slower" if ratio < 2 else f"a step takes {ratio:.1f} times as long"
            yield f"Next is {second.layout.name} ({_settings_and_memory(second)}): {slower}."

    def _longest_sequence(self) -> str:
        longest = self.plan.longest
        note = ", the model's limit" if longest == self.problem.shape.positions else ""
        return f"The longest sequences that fit this way have {longest:,} tokens{note}."

    def _host(self, choice: Candidate) -> str:
        host = self.problem.host(choice.job)
        offload = f" and {about_gib(host.offload)} to train, offloaded" if host.offload else ""
        staging = f", and {about_gib(host.staging)} for --async_checkpoints" if host.staging else ""
        return (
            f"Each machine needs {about_gib(host.loading)} of its own memory to load the model{offload}{staging}; "
            f"a checkpoint takes {about_gb(host.checkpoint)} of disk, the exported model "
            f"{about_gb(host.export)}."
        )

    def _resume(self, candidate: Candidate) -> Resume | None:
        job = candidate.job
        return resumed(self.problem.shape, job.recipe, job.layout, candidate.prediction, job.state_dict)

    def _resume_lines(self, choice: Candidate) -> Iterator[str]:
        """The peak of a resume, with a remedy where it is above that of a step."""
        loaded, step = self._resume(choice), choice.prediction.peak.total
        if loaded is None:
            return
        size, room = gib_or_mib(loaded.device), self.problem.capacity_bytes - choice.device.outside
        reads = loaded.host > self.problem.host(choice.job).training
        host = f", and reads it into {about_gib(loaded.host)} of a machine's own memory" if reads else ""
        if loaded.device <= step:
            yield f"A resume loads its checkpoint with {size} on each GPU, less than a step takes{host}."
            return
        yield f"A resume loads its checkpoint with {size} on each GPU, a step takes {gib_or_mib(step)}{host}." + (
            f" That doesn't fit. {IN_PLACE[choice.layout.engine]}" if loaded.device > room else ""
        )

    def as_json(self) -> dict[str, Any]:
        problem, plan, choice = self.problem, self.plan, self.plan.choice
        shape, recipe, layout = problem.shape, problem.job.recipe, problem.job.layout
        return {
            "schema_version": SCHEMA_VERSION,
            "model": shape.name,
            "parameters": shape.numel,
            "language_parameters": shape.language or shape.numel,
            "method": recipe.method,
            "precision": recipe.precision,
            "sequence_length": recipe.length,
            "gpu": problem.gpu.name,
            "gpu_memory_sold_gib": problem.gpu.memory_gib,
            "gpu_memory_usable_bytes": problem.capacity_bytes,
            "host_memory_bytes": problem.host_bytes,
            "gpus": layout.ranks,
            "gpus_per_machine": layout.ranks_per_node,
            "strategies": [self._row(candidate) for candidate in plan.rows],
            "choice": self._row(choice) if choice else None,
            "ties": [self._row(candidate) for candidate in plan.ties],
            "runner_up": self._row(plan.runner_up) if plan.runner_up else None,
            "reason": plan.reason,
            "longest_sequence": plan.longest,
            "config_command": self.command(),
            "script_arguments": proposal.arguments(choice.job) if choice else {},
            "changes": self._in_words(self._changes()),
            "cost": cost_report.as_json(self.spent) if self.spent else None,
        }

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        peak, host = candidate.prediction.peak, self.problem.host(candidate.job)
        loaded = self._resume(candidate)
        return {
            "strategy": candidate.layout.name,
            "tensor_parallel": candidate.layout.tensor,
            "expert_parallel": candidate.layout.experts,
            "batch_per_gpu": candidate.recipe.rows,
            "accumulation": candidate.recipe.accumulation,
            "global_batch": candidate.job.rows_per_step,
            "checkpointing": candidate.recipe.checkpointing,
            "fits": candidate.verdict,
            "runs_out": candidate.device.runs_out,
            "refused": candidate.refused,
            "peak_bytes": peak.total,
            "peak_phase": peak.phase,
            "breakdown_bytes": {kind: size for kind, size in peak.live.items() if size},
            "steady_bytes": candidate.prediction.steady,
            "resume_bytes": loaded.device if loaded else None,
            "needed_bytes": candidate.device.needed,
            "host_loading_bytes": host.loading,
            "host_offload_bytes": host.offload,
            "host_gathering_bytes": host.gathering,
            "host_staging_bytes": host.staging,
            "checkpoint_bytes": host.checkpoint,
            "export_bytes": host.export,
            "phases": {moment.phase: moment.total for moment in candidate.prediction.moments},
            "sent_bytes": self._sent_bytes(candidate),
            **{name: getattr(candidate.step, name, None) for name in TIMES},
            "assumptions": self.problem.assumptions(candidate),
        }


def _settings_and_memory(candidate: Candidate) -> str:
    recipe, size = candidate.recipe, gib_or_mib(candidate.device.needed)
    return f"{rows_in(recipe)}, {checkpointing_in(recipe)}, {size}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
