"""Finds collectives of the script that mix different shards of a weight, or of its gradient. Pure."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from accel_fsdp.ranks import RankEvent
from accel_fsdp.rehearsal.blame import Failure, mistake

OF_GRADIENTS = "leave it out: FSDP has averaged the gradients over ranks; grad.full_tensor() of FSDP2 is a whole one"
OF_WEIGHTS = (
    "set_seed on all ranks before the model is made, or this call before accelerator.prepare, while each rank has "
    "whole weights; param.full_tensor() of FSDP2 is a whole one"
)


def find(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Yields the first line that takes different shards on two ranks of one group."""
    calls = [event for event in events if event.kind == "shard-given"]
    for first, other in combinations(sorted(calls, key=lambda call: call.rank), 2):
        content, other_content = first.content, other.content
        if any(content[key] != other_content[key] for key in ("line", "ranks")) or first.rank == other.rank:
            continue
        if content["start"] != other_content["start"] and (name := content["name"] or other_content["name"]):
            sizes = " and ".join("x".join(map(str, call["shape"])) for call in (content, other_content))
            yield mistake(
                f"{content['call']} gets {name}, of which ranks {first.rank} and {other.rank} hold different parts "
                f"({sizes})",
                OF_GRADIENTS if name.startswith("the gradient") else OF_WEIGHTS,
                content["line"],
            )
            return
