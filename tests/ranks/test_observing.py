"""A rank whose libraries have changed inside: what can't be watched is named, and all the rest goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import run, warm_python

CHANGED = {
    "torch.utils.data.dataloader:_BaseDataLoaderIter._next_index": "rows that loaders give",
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state": "what each rank holds",
    "torch.distributed.tensor.placement_types:_StridedShard._split_tensor": "weights around each step",
}
SCRIPT = """
from importlib import import_module
import sys, transformers.trainer, torch, accelerate
module, _, name = sys.argv[1].partition(":")
owner = import_module(module)
*parts, last = name.split(".")
for part in parts:
    owner = getattr(owner, part)
setattr(owner, last, lambda another: None)
from accel_fsdp.ranks import watch
end = watch.begin()
weight = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
weight(torch.ones(2)).sum().backward()
optimizer.step()
end()
print("went on")
"""


def watched(folder: Path, changed: str) -> tuple[str, list[dict[str, Any]]]:
    warm = warm_python()
    variables = {**warm, "ACCEL_FSDP_EVENTS": str(folder), "RANK": "0"}
    code = f"import sys; sys.argv = ['own.py', {changed!r}]\n{SCRIPT}"
    done = run([warm["PYTHON_EXEC"], "-c", code], **variables)
    assert done.code == 0, done.output
    events = [json.loads(line) for line in (folder / "0.jsonl").read_text().splitlines()]
    return done.output, events


@pytest.mark.parametrize("changed", CHANGED)
def test_what_cannot_be_watched_is_named(changed: str, tmp_path: Path) -> None:
    output, events = watched(tmp_path, changed)
    off = [event["what"] for event in events if event["kind"] == "unwatched"]
    assert off == [CHANGED[changed]], output
    assert f"accel-fsdp: not watched: {CHANGED[changed]}; " in output
    assert output.count("not watched") == 1
    assert "went on" in output
    assert [event["steps"] for event in events if event["kind"] == "trained"] == [1]


def test_nothing_is_named_that_is_watched(tmp_path: Path) -> None:
    output, events = watched(tmp_path, "torch:nothing_of_that_name")
    assert "not watched" not in output
    assert {"loss", "step", "trained"} <= {event["kind"] for event in events}
