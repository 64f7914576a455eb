"""Finds the line of a script that divides rows by rank."""

import ast
from functools import cache

from accel_fsdp.rehearsal.absent import OF_RANK

SPLITTING = ("shard", "select", "Subset", "split_dataset_by_node")
"""Functions that take a part of a data set."""


@cache
def line_of_split(script: str) -> int:
    """The first line with a slice or a call of `SPLITTING` that depends on the rank; 0 if there is none."""
    try:
        with open(script, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return 0
    by_rank: set[str] = set()
    for _ in range(3):  # names computed from the rank, and names computed from those
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _has_rank(node.value, by_rank):
                by_rank |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr) and _splits(node, by_rank)]
    return min(lines, default=0)


def _splits(node: ast.expr, by_rank: set[str]) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Slice) and _has_rank(node.slice, by_rank)
    called = (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    return called in SPLITTING and any(_has_rank(inner, by_rank) for inner in ast.iter_child_nodes(node))


def _has_rank(node: ast.AST, by_rank: set[str]) -> bool:
    names = [getattr(inner, "attr", "") or getattr(inner, "id", "") for inner in ast.walk(node)]
    return any(name in by_rank or OF_RANK.search(name) for name in names)
