"""Finds the rank that is missing from a collective in which others wait: where its calls differ first, and why.

Besides the ranks' calls it only reads the script.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, combinations, takewhile
from typing import NamedTuple

from accel_fsdp.ranks import Call, RankEvent, calls_of
from accel_fsdp.units import counted

Calls = Mapping[int, Sequence[Call]]
RANKS = frozenset(
    (
        *("rank", "local_rank", "global_rank", "world_rank", "get_rank", "get_local_rank", "get_node_local_rank"),
        *("process_index", "local_process_index", "is_main_process", "is_local_main_process", "is_last_process"),
        *("is_main", "is_master", "main_process", "is_world_process_zero", "is_local_process_zero", "is_rank_zero"),
    )
)
"""Names of a process's number, and of conditions on it."""
EQUAL_SIZES = ("all_gather", "_all_gather_base", "all_reduce", "reduce", "gather")
"""Collectives whose tensors have one size on all ranks."""
PRIORITY = ("barrier", "generate", "save", "gather")
"""Kinds of calls that a single rank makes by mistake, the likeliest first."""
FIXES: Mapping[str, str] = {
    "barrier": "call it on every rank: wait_for_everyone outside of what one rank does alone",
    "save": "save on all ranks: accelerator.save_state(folder); only rank 0 writes what get_state_dict(model) gathers",
    "generate": "generate on every rank, on prompts of its own, with synced_gpus=True: each token gathers the weights",
    "forward": "run the model on every rank, also to evaluate, as each pass gathers the weights from all ranks",
    "gather": "every rank must call what all of them do together: no collective behind `if rank == 0`",
    "sizes": "accelerator.pad_across_processes(tensor, dim=1) before gather; or accelerator.gather_for_metrics",
    "uneven": "the same number of steps on every rank: even_batches=True or DataLoader(drop_last=True), under DDP "
    "accelerator.join_uneven_inputs([model]); no break or continue that a rank takes alone",
    "gradients": "use the same weights on all ranks in each step, as by drawing the task from one seed for all; or add "
    "the unused outputs to the loss: loss + 0 * other.sum()",
    "other": "every rank must call the same in the same order: what decides it must be equal on all ranks, as after "
    "accelerator.reduce or broadcast",
}


class Absence(NamedTuple):
    """A sentence on what one rank did alone, the fix, and the script's line."""

    what: str
    fix: str
    line: str


class _Mismatch(NamedTuple):
    """The first collective in which two ranks differ; `call` is the one of `rank` alone.

    `is_new`: whether the other rank has never called it from there.
    """

    rank: int
    call: Call
    other: int
    other_call: Call | None
    is_new: bool


def absence(events: Sequence[RankEvent]) -> Absence | None:
    """The missing or differing collective that the ranks' calls show, or None."""
    calls = {event.rank: calls_of(event) for event in events if event.kind == "calls"}
    silent = sorted({event.rank for event in events if event.kind == "began"} - calls.keys())
    aborted = {event.rank: calls_of(event)[-1] for event in events if event.kind == "aborted"}
    mismatch = next(chain(_mismatches(calls), _mismatches_with(silent, calls, aborted)), None)
    return Absence(*_sentence(mismatch, events), mismatch.call.lines[-1]) if mismatch else None


def _mismatches(calls: Calls) -> Iterator[_Mismatch]:
    """The first differing calls of two ranks in each group, after the last call that both made at the same line."""
    for ranks in combinations(sorted(calls), 2):
        for group in dict.fromkeys(call.group for call in calls[ranks[0]]):
            numbered = [{call.number: call for call in calls[rank] if call.group == group} for rank in ranks]
            if not numbered[1]:
                continue
            common = numbered[0].keys() & numbered[1].keys()
            same = [number for number in common if _is_same(*(of_rank[number] for of_rank in numbered))]
            position = max(same, default=max(map(min, numbered)) - 1) + 1
            own = {rank: of_rank.get(position) for rank, of_rank in zip(ranks, numbered, strict=True)}
            own = {rank: call for rank, call in own.items() if call and call.lines}  # none after the script's end
            mismatches = [
                _Mismatch(
                    rank, call, other, own.get(other), all(earlier.lines != call.lines for earlier in calls[other])
                )
                for rank, other in (ranks, ranks[::-1])
                if (call := own.get(rank))
            ]
            if mismatches:
                yield min(mismatches, key=_order)


def _is_same(call: Call, other: Call) -> bool:
    keys = ("group", "name", "lines", *(("sizes",) if call.name in EQUAL_SIZES else ()))
    return all(getattr(call, key) == getattr(other, key) for key in keys)


def _order(mismatch: _Mismatch) -> tuple[bool, bool, int, int]:
    """The rank whose call the other never made comes first, then the one under a condition on its rank."""
    kind = mismatch.call.kind
    likeliest = PRIORITY.index(kind) if kind in PRIORITY else len(PRIORITY)
    return not mismatch.is_new, not _branch(mismatch.call), likeliest, mismatch.rank


def _mismatches_with(silent: Sequence[int], calls: Calls, aborted: Mapping[int, Call]) -> Iterator[_Mismatch]:
    """The mismatches with a rank that reported no calls: it has ended, or gloo aborted it in the call of `aborted`.

    The call that the other rank makes alone is then its last one under a condition on its rank.
    """
    for rank, own_calls in sorted(calls.items()) if silent else ():
        if own_calls and own_calls[-1].lines:
            by_number = next((call for call in reversed(own_calls) if _branch(call)), None)
            yield _Mismatch(rank, by_number or own_calls[-1], silent[0], aborted.get(silent[0]), by_number is not None)


def _sentence(mismatch: _Mismatch, events: Sequence[RankEvent]) -> tuple[str, str]:
    """What one rank did alone, and the fix."""
    rank, call, other, other_call, is_new = mismatch
    alone, loop = f"rank {rank} alone calls {call.function}", _loop(call)
    fix = FIXES.get(call.kind, FIXES["other"])
    if branch := _branch(call):
        return f"{alone}, under {branch}", fix
    if loop and not is_new and not any(_holds(loop, line) for line in (other_call.lines if other_call else ())):
        passes = sum(event.kind == "loss" and event.rank == other for event in events)
        after = counted(passes, "backward pass", "backward passes")
        left = f"rank {other} left the loop of line {loop.lineno} after {after}, and rank {rank} goes on in it"
        return left, FIXES["uneven"]
    if other_call is None:
        return alone, fix
    if other_call.lines == call.lines and call.kind == "backward":
        what = f"{call.function} averages gradients of other weights on rank {rank} than on rank {other}"
        return f"{what}, such as of a head that one rank alone uses", FIXES["gradients"]
    if other_call.lines == call.lines:
        sizes = f"{_shape(call)} on rank {rank} and {_shape(other_call) or 'others'} on rank {other}"
        return f"{call.function} gets tensors of different sizes: {sizes}", FIXES["sizes"]
    place = f"where rank {other} calls {other_call.function} at {other_call.lines[-1]}"
    if is_new and call.kind in PRIORITY:
        return f"{alone}, {place}", fix
    return f"rank {rank} calls {call.function} {place}", FIXES["other"]


def _shape(call: Call) -> str:
    return ", ".join("x".join(map(str, size)) or "a number" for size in call.sizes)


def _branch(call: Call) -> str:
    """The condition on a rank under which the script makes a call; empty if there is none."""
    for line in reversed(call.lines):
        names = names_of_rank(parsed(line.rpartition(":")[0]))
        for node in _parents(line):
            if isinstance(node, ast.If) and names_a_rank(node.test, names):
                is_else = any(_holds(inner, line) for inner in node.orelse)
                return f"{'the else of ' if is_else else ''}`if {ast.unparse(node.test)}` in line {node.lineno}"
    return ""


def names_of_rank(tree: ast.Module) -> frozenset[str]:
    """`RANKS` and the names that a script computes from them, without those that it only assigns other values."""
    assigned: list[tuple[set[str], ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            left = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned.append(({target.id for target in left if isinstance(target, ast.Name)}, node.value))
    others = {name for targets, _ in assigned for name in targets}
    others -= {name for targets, value in assigned if names_a_rank(value, RANKS) for name in targets}
    names = RANKS - others
    for _ in range(3):  # names computed from the rank, and names computed from those
        for targets, value in assigned:
            if names_a_rank(value, names):
                names |= targets
    return names


def names_a_rank(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether an expression has one of these names, or the name of a variable such as "RANK"."""
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in names:
                return True
            case ast.Constant(value="RANK" | "LOCAL_RANK" | "SLURM_PROCID"):
                return True
    return False


def _loop(call: Call) -> ast.For | ast.While | None:
    """The innermost loop of the script that makes a call."""
    loops = (node for line in reversed(call.lines) for node in _parents(line) if isinstance(node, ast.For | ast.While))
    return next(loops, None)


def _parents(line: str) -> list[ast.stmt]:
    """The statements around a line, innermost first; a function ends them."""
    nodes = ast.walk(parsed(line.rpartition(":")[0]))
    around = [node for node in nodes if isinstance(node, ast.stmt) and _holds(node, line)]
    return list(takewhile(lambda node: not isinstance(node, ast.FunctionDef | ast.ClassDef), around[::-1]))


def _holds(node: ast.stmt, line: str) -> bool:
    number = int(line.rpartition(":")[2])
    return node.lineno <= number <= (node.end_lineno or number)


@cache
def parsed(file: str) -> ast.Module:
    """A script's syntax; without statements if it can't be read."""
    try:
        with open(file, encoding="utf-8") as script:
            return ast.parse(script.read())
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
