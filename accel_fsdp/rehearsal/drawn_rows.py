"""Judges which rows of the data each rank trained on: shared by ranks, lost, or in the same order in each epoch. Pure.

It doesn't judge samplers that repeat rows on purpose, data sets that differ between ranks or contain duplicates, and
the filling of an epoch's last batch for equal numbers on all ranks.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, combinations, islice
from typing import Any, TypeAlias

from accel_fsdp.ranks import RankEvent, script
from accel_fsdp.rehearsal.absent import names_a_rank, names_of_rank, parsed
from accel_fsdp.rehearsal.blame import Failure, mistake
from accel_fsdp.units import counted

FEWEST = 4
"""The fewest rows from whose order something can be concluded."""
FEWEST_BY_CONTENT = 12
"""The fewest distinct rows of a rank from which content alone, without indices, allows a conclusion."""
SHARE_OF_PARTS = 1 / 5
"""The share of its rows that a rank shares with another, of separate data sets: two random halves share about 1/2."""
SPLITTING = ("shard", "select", "Subset", "split_dataset_by_node", "range")
"""Functions that take a part of a data set."""
DRAWING = ("random_split(", "train_test_split(", "shuffle(", "permutation(", "randperm(", "sample(")
"""Calls that order or divide a data set at random."""
SEEDED = "one seed on all ranks before random_split and shuffle, and in samplers, so that ranks take parts of one order"
OfRanks: TypeAlias = "dict[int, Mapping[str, Any]]"
"""What each rank recorded of an epoch of a loader."""


def find(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Yields the most serious mistake, of the first loader and epoch that has one."""
    by_loader: dict[tuple[int, str, int], OfRanks] = {}
    for rank, rows in ((event.rank, event.content) for event in events if event.kind == "drawn"):
        by_loader.setdefault((rows["epoch"], rows["line"], rows["loader"]), {})[rank] = rows
    epochs = sorted(by_loader.items())
    checks = [look(of_ranks) for look in (_shared, _sharded_twice, _split_twice) for _, of_ranks in epochs]
    checks += [
        _not_shuffled(by_loader.get((epoch - 1, line, number), {}), now) for (epoch, line, number), now in epochs
    ]
    yield from islice(chain.from_iterable(checks), 1)


def _sharded_twice(of_ranks: OfRanks) -> Iterator[Failure]:
    """A sampler gives each rank a part of the rows, and `prepare` gives it a part of that."""
    records = list(of_ranks.values())
    first = records[0]
    if all(rows["once"] and len(rows["sharders"]) > 1 for rows in records):
        rows = f"of {counted(first['length'], 'row')} the ranks take only {sum(rows['planned'] for rows in records)}"
        what = f"{rows} in an epoch: {' and '.join(first['sharders'])} both give each rank a part"
        fix = "leave out the DistributedSampler: accelerator.prepare(dataloader) gives each rank its part"
        yield mistake(what, fix, first["line"])


def _split_twice(of_ranks: OfRanks) -> Iterator[Failure]:
    """The script gives each rank different rows, and each rank takes only a part of these."""
    records = list(of_ranks.values())
    first = records[0]
    if not all(rows["once"] and rows["sharders"] and rows["planned"] < rows["length"] for rows in records):
        return
    starts = {(rows["start"], rows["fingerprint"]) for rows in records}
    files = (first["line"].rpartition(":")[0], first["script"])  # a module of the project may make the loader
    file, line = next(((file, line) for file in files if (line := line_of_split(file))), ("", 0))
    if len(starts) == len(records) > 1 and line:
        what = (
            f"of its {counted(first['length'], 'row')} a rank takes only {first['planned']} in an epoch: the script "
            f"gives each rank its part, and {first['sharders'][0]} gives it a part of that"
        )
        fix = "the same rows on all ranks: accelerator.prepare(dataloader) or a DistributedSampler gives each its part"
        yield mistake(what, fix, f"{file}:{line}")


def _shared(of_ranks: OfRanks) -> Iterator[Failure]:
    """Rows that two ranks train on in one epoch, where a plain run trains on each once."""
    once = [(rank, rows) for rank, rows in sorted(of_ranks.items()) if rows["once"]]
    for (first, record), (other, other_record) in combinations(once, 2):
        first_places, other_places = {*_places(record)}, {*_places(other_record)}
        if same_data := _same_data(record, other_record):
            shared, of_other = first_places & other_places, other_places
            is_mistake = bool(shared)
        else:
            first_rows, of_other = _contents(record), _contents(other_record)
            shared, fewest = first_rows & of_other, min(len(first_rows), len(of_other))
            is_mistake = fewest >= FEWEST_BY_CONTENT and len(shared) >= SHARE_OF_PARTS * fewest
        if is_mistake:
            what = (
                f"rank {other} trained on {len(shared)} of {counted(len(of_other), 'row')} that rank {first} had too, "
                f"in epoch {record['epoch']}"
            )
            are_apart = same_data is False or first_places.isdisjoint(other_places)
            line = other_record["line"]
            prepare = "" if record["sharders"] else "accelerator.prepare(dataloader), or a DistributedSampler; "
            yield mistake(what, prepare + SEEDED, script.nearest_line(line, *DRAWING) if are_apart else line)
            return


def _same_data(record: Mapping[str, Any], other_record: Mapping[str, Any]) -> bool | None:
    """Whether two ranks' data sets hold the same rows at the same indices; None if unknown."""
    if record["length"] != other_record["length"]:
        return False
    if record["fingerprint"] and record["fingerprint"] == other_record["fingerprint"]:
        return True
    first_rows, other_rows = (
        {place: content for place, content in rows["rows"] if content} for rows in (record, other_record)
    )
    common = first_rows.keys() & other_rows.keys()
    if any(first_rows[place] != other_rows[place] for place in common):
        return False
    tells_apart = all(2 * len(set(rows.values())) > len(rows) for rows in (first_rows, other_rows))
    return True if common and tells_apart else None


def _not_shuffled(last_of_ranks: OfRanks, of_ranks: OfRanks) -> Iterator[Failure]:
    """A sampler shuffles by its epoch, and its `set_epoch` was not called."""
    for rank, now in sorted(of_ranks.items()):
        last = last_of_ranks.get(rank, now)
        count = min(len(last["rows"]), len(now["rows"]))
        order = _places(now)[:count]
        is_known = last is not now and last["sampler_epoch"] == now["sampler_epoch"] is not None and count >= FEWEST
        if is_known and order == _places(last)[:count] != sorted(order):
            what = f"epoch {now['epoch']} has the rows of epoch {last['epoch']} in the same order"
            fix = "sampler.set_epoch(epoch) at the start of each epoch: it shuffles by that number"
            yield mistake(f"{what}, {count} on rank {rank}", fix, now["loop"])


def _places(rows: Mapping[str, Any]) -> list[int]:
    return [place for place, _ in rows["rows"]]


def _contents(rows: Mapping[str, Any]) -> set[int]:
    """The rows' checksums until one repeats, as in the next epoch; empty if rows can't be distinguished."""
    seen: set[int] = set()
    for _, content in rows["rows"]:
        if content is None or content in seen:
            break
        seen.add(content)
    return seen


@cache
def line_of_split(script: str) -> int:
    """The first line with a slice or a call of `SPLITTING` that depends on the rank; 0 if there is none."""
    tree = parsed(script)
    by_rank = names_of_rank(tree)
    nodes = (node for node in ast.walk(tree) if any(names_a_rank(part, by_rank) for part in _choosing(node)))
    return min((getattr(node, "lineno", 0) for node in nodes), default=0)


def _choosing(node: ast.AST) -> list[ast.AST]:
    """The parts of an expression that choose rows."""
    if isinstance(node, ast.Subscript):  # not the name of a variable: os.environ["RANK"]
        return [] if isinstance(node.slice, ast.Constant) else [node.slice]
    name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    return list(ast.iter_child_nodes(node)) if name in SPLITTING else []
