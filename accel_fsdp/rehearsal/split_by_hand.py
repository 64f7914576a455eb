"""Finds the lines of a script that divide rows by rank or at random, or give a Trainer its loader."""

import ast
from functools import cache
from itertools import chain

from accel_fsdp.rehearsal.absent import OF_RANK, parsed

SPLITTING = ("shard", "select", "Subset", "split_dataset_by_node")
"""Functions that take a part of a data set."""
DRAWING = ("random_split", "train_test_split", "shuffle", "permutation", "randperm", "sample")
"""Functions that order or divide a data set at random."""


@cache
def line_of_split(script: str) -> int:
    """The first line with a slice or a call of `SPLITTING` that depends on the rank; 0 if there is none."""
    tree = parsed(script)
    by_rank: set[str] = set()
    for _ in range(3):  # names computed from the rank, and names computed from those
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _has_rank(node.value, by_rank):
                by_rank |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr) and _splits(node, by_rank)]
    return min(lines, default=0)


def line_of_draw(line: str) -> str:
    """The last call of `DRAWING` before a line of the script, as file:line; the line itself if there is none."""
    script, _, number = line.rpartition(":")
    calls = (node for node in ast.walk(parsed(script)) if isinstance(node, ast.Call) and _name(node) in DRAWING)
    return f"{script}:{max((call.lineno for call in calls if call.lineno <= int(number)), default=number)}"


@cache
def line_of_own_loader(script: str) -> int:
    """Where a Trainer's own `get_train_dataloader` returns; 0 if there is none."""
    functions = (node for node in ast.walk(parsed(script)) if isinstance(node, ast.FunctionDef))
    nodes = chain.from_iterable(ast.walk(node) for node in functions if node.name == "get_train_dataloader")
    return max((node.lineno for node in nodes if isinstance(node, ast.Return)), default=0)


def _splits(node: ast.expr, by_rank: set[str]) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Slice) and _has_rank(node.slice, by_rank)
    is_split = isinstance(node, ast.Call) and _name(node) in SPLITTING
    return is_split and any(_has_rank(inner, by_rank) for inner in ast.iter_child_nodes(node))


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _has_rank(node: ast.AST, by_rank: set[str]) -> bool:
    names = [getattr(inner, "attr", "") or getattr(inner, "id", "") for inner in ast.walk(node)]
    return any(name in by_rank or OF_RANK.search(name) for name in names)
