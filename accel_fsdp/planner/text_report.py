"""The plan in words and numbers: table, recommendation, requirements, assumptions."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp import console
from accel_fsdp.config import Engine
from accel_fsdp.job import Layout, combinations
from accel_fsdp.planner import cost_report, proposal
from accel_fsdp.planner.proposal import Proposer
from accel_fsdp.prediction import (
    Candidate,
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
from accel_fsdp.prediction.memory import KINDS, LETTERS, shards
from accel_fsdp.units import GIB, about_gb, about_gib, counted, gib_or_mib, number_in_figure, parameters

SCHEMA_VERSION = 3
"""The version of the `--json` output, raised whenever a key is removed or changes its meaning."""
COLUMNS = ("strategy", "GiB", "of one GPU", "fits", "peak in", "sent GB", "step s", "tokens/s per GPU")
WIDE, WIDE_ONLY = 104, ("peak in", "sent GB")
TIMES = ("step_seconds", "tokens_per_s_per_gpu", "mfu", "bound")
"""The fields of a step in the `--json` output, null where its time is not predicted."""
BAR_CELLS, NARROW_CELLS = 20, 12
MOST_PADDING = 1.1
COPIED = ("  accel-fsdp ", "  --per_device_train_batch_size ")
"""Lines that stay whole, so that they can be copied."""
COLOURS = dict(
    zip(KINDS, ("blue", "magenta", "yellow", "cyan", "green", "red", "bright_black", "bright_black"), strict=True)
)


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
        if not choice or not self.proposer or choice.job.engine is Engine.NONE:  # the wizard would write FSDP for it
            return ""
        return self.proposer.command(choice.job)

    def headline(self) -> str:
        """The planned job, in a sentence."""
        problem, shape, recipe = self.problem, self.problem.shape, self.problem.job.recipe
        return (
            f"{shape.name}: {parameters(shape.numel, shape.language)}, {recipe.method} training on "
            f"{problem.job.layout.ranks} x {problem.gpu.name} with {gib_or_mib(problem.capacity_bytes)}, "
            f"{recipe.rows} x {recipe.length:,} tokens per {problem.job.layout.row_owner}"
            + (f", {recipe.accumulation} times a step" if recipe.accumulation > 1 else "")
            + "; all of it predicted."
        )

    def show(self) -> None:
        console.put(self.headline(), wrap=True)
        is_wide = console.data.width >= WIDE
        columns = COLUMNS if is_wide else tuple(name for name in COLUMNS if name not in WIDE_ONLY)
        rows = [self._cells(candidate, BAR_CELLS if is_wide else NARROW_CELLS) for candidate in self.plan.rows]
        legend = [(LETTERS[kind], COLOURS[kind], kind) for kind in KINDS]
        console.show_bars(columns, [[row[name] for name in columns] for row in rows], legend)
        for line in (*self._fits_legend(), *self.advice()):
            console.put(line, wrap=not line.startswith(COPIED))

    def _cells(self, candidate: Candidate, width: int) -> dict[str, Any]:
        by_link = self._sent_bytes(candidate) or {}
        sent = sum(by_link.values()) / 1e9
        parts = [(LETTERS[kind], COLOURS[kind], size) for kind, size in candidate.prediction.peak.live.items() if size]
        cells = (
            candidate.layout.name,
            number_in_figure(candidate.device.allocated / GIB),
            console.bar(parts, self.problem.capacity_bytes, width),
            candidate.verdict,
            candidate.prediction.peak.phase,
            f"{sent:,.1f}" if by_link else "-",
            *candidate.pace,
        )
        return dict(zip(COLUMNS, cells, strict=True))

    def _sent_bytes(self, candidate: Candidate) -> dict[str, float] | None:
        """The bytes that a rank sends in a step by link, None if they are not predicted."""
        if candidate.step is None:
            return None
        traffic = step_traffic(self.problem.shape, candidate.recipe, candidate.layout)
        return {"intra-node": traffic.intra_bytes, "inter-node": traffic.inter_bytes, "pcie": traffic.pcie_bytes}

    def _fits_legend(self) -> Iterator[str]:
        """Explains the words that occur in the column `fits`."""
        outside_size = gib_or_mib(self.plan.rows[0].device.outside, gib_from=GIB / 10)
        verdicts = {candidate.verdict for candidate in self.plan.rows}
        nccl = " and NCCL" if self.problem.job.layout.ranks > 1 else ""
        words = [f"yes with {outside_size} more for CUDA{nccl} and {self._spared()}"]
        if "tight" in verdicts:
            words.append("tight with less to spare, so it may run out")
        yield f"fits: {'; '.join(words)}."
        reasons: dict[str, list[str]] = {}
        for candidate in self.plan.rows:
            if candidate.refused:
                reasons.setdefault(candidate.refused, []).append(candidate.layout.name)
        if not self.config:
            for why, names in reasons.items():
                is_fixed = why.endswith(combinations.UNLESS_SFT)
                fails = f"fails{combinations.UNLESS_SFT if is_fixed else ''}"
                yield f"{fails}: {', '.join(names)}. {why.removesuffix(combinations.UNLESS_SFT)}."

    def _spared(self) -> str:
        """The margin in words."""
        if self.problem.gpu.has_expandable_segments:
            return f"{capacity.MARGIN:.0%} to spare"
        return f"{capacity.FRAGMENTED - 1:.0%} for gaps, as expandable segments may hang under ROCm"

    def advice(self) -> Iterator[str]:
        """The recommendation with its reasons, or changes that would make the job fit; a sentence or two per line."""
        problem, choice = self.problem, self.plan.choice
        answer = " ".join(filter(None, self.answer()))
        if choice is None:
            yield from self._what_would_fit(answer)
            return
        yield answer
        yield self._one_step(choice)
        if self.spent:
            yield cost_report.sentence(self.spent)
        elif self.args and choice.step:
            yield cost_report.UNKNOWN
        yield from self._alternatives(choice)
        yield self._longest_sequence(choice)
        yield self._host(choice)
        if choice.layout.offload and (remedy_list := list(remedies.remedies(problem, choice.layout))):
            yield "Where machines have less memory than that: " + "; or ".join(remedy_list) + "."
        yield from self._padding_warning()
        if command := self.command():
            yield "Its YAML (or -o FILE):"
            yield f"  {command}"
        if self.proposer:
            yield "The script's arguments:"
            yield f"  {proposal.argument_line(choice.job)}"
        if assumptions := (*problem.assumptions(choice), *((cost_report.FULL_ROWS,) if self.spent else ())):
            yield "Assumed: " + " ".join(assumptions)

    def answer(self) -> tuple[str, str]:
        """What to take, or that nothing fits; and the reason, empty if the first sentence has it."""
        choice = self.plan.choice
        if choice is not None:
            how = f"{rows_in(choice.recipe)} per {choice.layout.row_owner}, {checkpointing_in(choice.recipe)}"
            needs = " (pip install accel-fsdp[deepspeed])" if choice.layout.engine is Engine.DEEPSPEED else ""
            return f"Take {choice.layout.name}{needs} with {how}.", self.plan.reason
        given = self.plan.rows[0] if self.config else None
        if given and given.refused:
            lack = self.problem.host_lack(given.job)
            if given.refused == lack:
                return "It doesn't fit.", f"{lack}."
            return f"This YAML doesn't work, regardless of memory: {given.refused}.", ""
        phase = given.device.runs_out if given else ""
        what = f"It doesn't fit: memory runs out in the {phase}." if phase else "Nothing fits."
        return what, f"Each GPU has {gib_or_mib(self.problem.capacity_bytes)}."

    def _what_would_fit(self, answer: str) -> Iterator[str]:
        """The answer where nothing fits, and the changes with which something would."""
        if answer.startswith("This YAML doesn't work"):
            yield answer
            yield f"  accel-fsdp check {self.config} --model {self.problem.shape.name}"
            return
        yield f"{answer} What would fit:"
        changes = list(remedies.remedies(self.problem, self._layout())) or ["a smaller model, or GPUs with more memory"]
        yield from (f"  {change}" for change in changes)
        yield from self._padding_warning()
        yield from self.problem.notes

    def _one_step(self, choice: Candidate) -> str:
        recipe, rows = choice.recipe, choice.job.rows_per_step
        times = [
            str(choice.layout.data_ranks),
            *([str(recipe.accumulation)] if recipe.accumulation > 1 else []),
            str(recipe.rows),
        ]
        what = (
            f"One optimizer step takes {' x '.join(times)} = {counted(rows, 'sequence')} "
            f"({rows * recipe.length:,} tokens)"
        )
        if choice.step is None:
            return f"{what}. Its time is not predicted under tensor, expert or context parallelism."
        shortest, longest = choice.step.range_seconds
        return f"{what} in about {_seconds(choice.step.step_seconds)} s ({_seconds(shortest)} to {_seconds(longest)})."

    def _alternatives(self, choice: Candidate) -> Iterator[str]:
        if self.plan.ties:
            equals = ", ".join(f"{tie.layout.name} ({_settings_and_memory(tie)})" for tie in self.plan.ties)
            better = search.advantages(choice, self.plan.ties)
            yield f"Equally fast within the error of a prediction, which may be {1 - search.TIE:.0%} off: {equals}." + (
                f" {choice.layout.name} {'; and it '.join(better)}." if better else ""
            )
        if second := self.plan.runner_up:
            ratio = choice.tokens_per_s / second.tokens_per_s
            slower = f"{1 - 1 / ratio:.0%} slower" if ratio < 2 else f"a step takes {ratio:.1f} times as long"
            yield f"Next is {second.layout.name} ({_settings_and_memory(second)}): {slower}."

    def _longest_sequence(self, choice: Candidate) -> str:
        (chosen, alone), limit = self.plan.longest, self.problem.shape.positions
        note = ", the model's limit" if limit else ""

        def tokens(count: int) -> str:
            return f"{count:,} tokens" + (note if count == limit else "")

        if choice.recipe.rows == 1 or chosen == alone:
            return f"The longest sequence that fits this way has {tokens(alone)}."
        return (
            f"The longest sequences that fit this way have {tokens(chosen)} with {rows_in(choice.recipe)} per "
            f"GPU, {tokens(alone)} with one."
        )

    def _host(self, choice: Candidate) -> str:
        host = self.problem.host(choice.job)
        offload = f" and {about_gib(host.offload)} to train, offloaded" if host.offload else ""
        staging = f", and {about_gib(host.staging)} for --async_checkpoints" if host.staging else ""
        return (
            f"Each machine needs {about_gib(host.loading)} of its own memory to load the model{offload}{staging}; "
            f"a checkpoint takes {about_gb(host.checkpoint)} of disk, the exported model "
            f"{about_gb(host.export)}."
        )

    def _padding_warning(self) -> Iterator[str]:
        """Warns of FSDP2's padding, which takes memory and traffic; other engines have none."""
        fsdp2 = (candidate for candidate in self.plan.rows if candidate.layout.engine is Engine.FSDP2)
        worst = max(fsdp2, default=None, key=self._padded)
        if worst is None or (ratio := self._padded(worst)) < MOST_PADDING:
            return
        shape, layout = self.problem.shape, worst.layout
        padded = f"a layer's {shape.experts} experts" if shape.experts else "a tensor's rows"
        yield (
            f"FSDP2 distributes {padded} whole, so on {layout.shard_ranks} GPUs each holds and sends {ratio:.1f} times "
            "its share, padding; FSDP1 and ZeRO-3 cut through them, and hybrid sharding shares among fewer GPUs."
        )

    def _padded(self, candidate: Candidate) -> float:
        units = shards.all_units(self.problem.shape, candidate.recipe, candidate.layout)
        params = [(param, unit.count) for unit in units for param in unit.parameters]
        padded_elements = sum(shards.padded_numel(param, candidate.layout) * count for param, count in params)
        return padded_elements / sum(param.numel * count for param, count in params)

    def as_json(self) -> dict[str, Any]:
        problem, plan, choice = self.problem, self.plan, self.plan.choice
        shape, recipe, layout = problem.shape, problem.job.recipe, problem.job.layout
        changes = [] if choice and not choice.layout.offload else list(remedies.remedies(problem, self._layout()))
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
            "longest_sequence": plan.longest[0],
            "longest_sequence_alone": plan.longest[1],
            "config_command": self.command(),
            "script_arguments": proposal.arguments(choice.job) if choice else {},
            "changes": changes,
            "cost": cost_report.as_json(self.spent) if self.spent else None,
        }

    def _layout(self) -> Layout | None:
        if self.plan.choice:
            return self.plan.choice.layout
        return self.plan.rows[0].layout if self.config else None

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        peak, host = candidate.prediction.peak, self.problem.host(candidate.job)
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
    recipe, size = candidate.recipe, gib_or_mib(candidate.device.allocated)
    return f"{rows_in(recipe)}, {checkpointing_in(recipe)}, {size}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
