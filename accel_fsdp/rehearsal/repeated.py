"""Judges the updates that were repeated in one plain process: differences, and updates without an effect. Pure."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_fsdp.ranks import RankEvent
from accel_fsdp.rehearsal.blame import Failure, mistake
from accel_fsdp.rehearsal.records import Records
from accel_fsdp.units import counted

UNCOMPARED = "not repeated in one process: "
"""What `summary` says before the reason why nothing was compared."""
NEAR = 0.01
"""How near a ratio must be to one that has a meaning, relative to it."""


@dataclass(frozen=True)
class Text:
    """What a difference is, with the names of an event's values in braces, and its fix."""

    what: str
    fix: str

    def __call__(self, content: Mapping[str, Any]) -> Failure:
        return mistake(self.what.format(**content), self.fix, content["line"])


def differences(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Yields the first difference between the ranks and one process, or why no update had an effect."""
    records = Records(events)
    if first := records.first("otherwise"):
        if not _may_part(records, first):
            yield TEXTS[first["what"]](first)
        return
    yield from _without_effect(events)


def _may_part(records: Records, difference: Mapping[str, Any] | None) -> bool:
    """Whether the ranks may train separately on purpose, as where the script averages their weights at intervals."""
    return difference is not None and difference["what"].startswith("other ") and records.combines


def summary(events: Sequence[RankEvent]) -> str:
    """The compared values, as the end of a sentence; empty if nothing was recorded."""
    records = Records(events)
    if _may_part(records, records.first("otherwise")):
        return f"; {UNCOMPARED}the ranks' copies part, and the script combines the ranks' tensors itself"
    if unrepeated := records.first("unrepeated"):
        return f"; {UNCOMPARED}{unrepeated['why']}"
    updates = [event.content for event in records.of("repeated")]
    if not updates:
        return ""
    difference = max(update["apart"] for update in updates)
    compared = "gradients and weights of" if not any(update["steps"] for update in updates) else "gradients of"
    compared = "gradients after backward in" if any(update["changed"] for update in updates) else compared
    notes = "".join(f"; its step was not repeated: {update['steps']}" for update in updates[:1] if update["steps"])
    if _rate_is_0(events):
        notes += "; the learning rate is 0 in them, so that no weight moves"
    if any(update["changed"] for update in updates):
        notes += "; not repeated: what the script changes in them before the step"
    steps = f"the first {len(updates)} steps" if len(updates) > 1 else "the first step"
    return f"; {compared} {steps} are those of one process (apart by {difference:.0e}){notes}"


def _gradient(content: Mapping[str, Any]) -> Failure:
    name, ratio = content["name"], content["ratio"]
    if ratio == 0:
        name = name if content["all"] else "any weight"
        what = f"no gradient reaches {name}, unlike in one process"
    elif meaning := _meaning(ratio, content):
        what = f"the gradient of {name} is {ratio:.4g} times that of one process: {meaning}"
    else:
        what = f"the gradient of {name} differs from that of one process by {content['apart']:.2g} of its norm"
    fix = "see what changes gradients between forward and step: hooks of the script, no_sync, a divide factor; dropout "
    fix += "that activation checkpointing draws anew; or a library is at fault"
    if content["kept"]:
        what += ": the step's last backward pass keeps gradients on each rank"
        fix = "turn their reduction on before the forward pass of a step's last micro-batch: outside of no_sync, or by "
        fix += "set_requires_gradient_sync(True)"
    return mistake(what, fix, content["line"])


def _meaning(ratio: float, content: Mapping[str, Any]) -> str:
    ranks, batches = content["ranks"], content["accumulation"]
    meanings = (
        (ranks, "it is summed over ranks, not averaged"),
        (1 / ranks, "it is averaged over ranks twice"),
        (batches, "it is multiplied by the number of micro-batches"),
        (1 / batches, "it is divided by the number of micro-batches twice"),
        (ranks * batches, "it is summed over ranks and micro-batches"),
        (1 / ranks / batches, "it is divided by the ranks and by the micro-batches once more"),
    )
    near = (text for value, text in meanings if value != 1 and math.isclose(ratio, value, rel_tol=NEAR))
    return next(near, "")


def _counted(content: Mapping[str, Any]) -> Failure:
    ratio = content["ratio"]
    what = f"gradients are {ratio:.4g} times those of the mean over the step's tokens: {_meaning(ratio, content)}"
    fix = "divide the loss by the tokens of all ranks once; Trainer multiplies it by the ranks, as FSDP averages"
    return mistake(what, fix, content["line"])


def _without_effect(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """No recorded update changed a weight, and a plain run's would."""
    updates = [event.content for event in events if event.kind == "repeated"]
    if not updates or all(update["idle"] for update in updates):
        return
    line = updates[0]["line"]
    if all(update["cleared"] for update in updates):
        what = f"the optimizer gets no gradient in {counted(len(updates), 'step')}"
        fix = "backward, then optimizer.step(), then zero_grad(); and the last micro-batch of a step outside of no_sync"
        yield mistake(what, fix, updates[0]["cleared_at"] or line)
    elif not _rate_is_0(events) and not _moves(events):
        yield mistake("no weight moved in any step", "see the optimizer's rate and its schedule", line)


def _moves(events: Sequence[RankEvent]) -> bool:
    """Whether a weight has changed since the first step; also if nothing is known of them."""
    held: dict[tuple[int, int], list[Any]] = {}
    for event in (event for event in events if event.kind == "weights"):
        held.setdefault((event.rank, event.content["model"]), []).append(event.content["held"])
    return not held or any(len(reports) < 2 or reports[0] != reports[-1] for reports in held.values())


def _rate_is_0(events: Sequence[RankEvent]) -> bool:
    """Whether the learning rate is 0 in all steps, as at the start of a warm-up: a plain run trains nothing either."""
    return {rate for event in events if event.kind == "repeated" for rate in event.content["rates"]} == {0.0}


def _other_step(content: Mapping[str, Any]) -> Failure:
    batches = counted(content["batches"], "batch", "batches")
    what = f"each step has {batches}, and each loss is divided by {content['accumulation']}"
    fix = "with accelerator.accumulate(model): around each batch, or leave out gradient_accumulation_steps"
    return Failure(what, "gradient_accumulation_steps", fix, content["line"])


TEXTS: Mapping[str, Callable[[Mapping[str, Any]], Failure]] = {
    "gradient": _gradient,
    "counted": _counted,
    "other-step": _other_step,
    "clipped-early": Text(
        "gradients are clipped before the backward pass that makes them: the step takes them unclipped",
        "clip between backward and optimizer.step()",
    ),
    "clipped-apart": Text(
        "between backward and step gradients are multiplied by {factors[0]:.4g} on rank {ranks[0]} and by "
        "{factors[1]:.4g} on rank {ranks[1]}, as clipping by the norm of a rank's own shards does",
        "accelerator.clip_grad_norm_(model.parameters(), norm)",
    ),
    "clipped-otherwise": Text(
        "clipping multiplies gradients by {factors[0]:.4g}, and in one process by {factors[1]:.4g}",
        "accelerator.clip_grad_norm_(model.parameters(), norm)",
    ),
    "divided": Text(
        "losses are divided by gradient_accumulation_steps twice: gradients are 1/{accumulation} of those of the mean",
        "accelerator.backward(loss) divides it: leave out the script's own",
    ),
    "undivided": Text(
        "losses are not divided by gradient_accumulation_steps: gradients are {accumulation} times those of the mean",
        "accelerator.backward(loss), which divides it; with Trainer, whose Accelerator doesn't, divide the loss by "
        "self.current_gradient_accumulation_steps or, in compute_loss, a sum by num_items_in_batch",
    ),
    "dropped": Text(
        "losses are divided by {accumulation}, and all but the last of {accumulation} gradients are cleared before "
        "the step",
        "zero_grad() after optimizer.step() alone, not with each micro-batch",
    ),
    "frozen": Text(
        "no weight of the model needs gradients: its optimizer's steps change nothing",
        "requires_grad_(True) for what should be trained; PeftModel.from_pretrained(..., is_trainable=True)",
    ),
    "hidden": Text(
        "the gradient of {name} is NaN or infinite after backward, and is replaced before the step",
        "see what makes it so, such as torch.where with a branch that has no finite derivative; then leave it out",
    ),
    "multiplied": Text(
        "the loss is multiplied by the {ranks} ranks, and gradients are averaged over these",
        "leave it out, or divide by the tokens or rows of all ranks",
    ),
    "step": Text(
        "{optimizer} changes {name} by other values than in one process, apart by {apart:.2g} of their norm",
        "an optimizer that works on each element, such as AdamW, or FSDP2, which gives it whole weights as DTensors",
    ),
    "unscaled": Text(
        "the model computes in fp16, and nothing scales the loss: small gradients become 0",
        "torch.amp.GradScaler, under FSDP1 its ShardedGradScaler; or bf16, which has the range of float32",
    ),
    "other gradients": Text(
        "ranks {ranks[0]} and {ranks[1]} step with different gradients of {name}: they are not averaged",
        "leave no_sync before the last micro-batch of a step",
    ),
    "other weights": Text(
        "{name} has different values on rank {ranks[1]} than on rank {ranks[0]} before step {update}",
        "change weights on all ranks in the same way, or only by the optimizer",
    ),
    "summed-again": Text(
        "between backward and step gradients are multiplied by {ranks}, the number of ranks",
        "leave it out: DDP and FSDP have averaged them over ranks",
    ),
    "ignored": Text(
        "ranks {ranks[0]} and {ranks[1]} step with different gradients of {name}, which is in no unit: they are not "
        "averaged",
        "leave it out of ignored_modules, ignored_states and ignored_params; or requires_grad_(False) for it",
    ),
    "unprepared": Text(
        "the optimizer steps before the last micro-batch of a step, with gradients that were kept on each rank: it is "
        "not prepared",
        "model, optimizer = accelerator.prepare(model, optimizer)",
    ),
}
"""The failure for each kind of difference."""
