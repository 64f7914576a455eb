"""What a script saved is judged by what the ranks reported of it; what can't be judged passes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearsals import FSDP1, FSDP2

from accel_fsdp.config import JobConfig
from accel_fsdp.ranks import RankEvent, script
from accel_fsdp.ranks.saves import ObservedSaves
from accel_fsdp.ranks.steps import ObservedSteps
from accel_fsdp.rehearsal import saved


def save(path: str = "/model.pt", shards: int = 0, call: str = "torch.save", **more: Any) -> dict[str, Any]:
    """What a rank reports of a save in one file."""
    at = {"line": "", "step": 2, "barriers": 0, "machine": 0, "is_whole": True}
    file = {"path": path, "shards": shards, "count": 2, "values": [], "wrapped": "", "is_result": False}
    return {
        "call": call,
        "path": path,
        **at,
        "files": [file | {key: more.pop(key) for key in file if key in more}],
        **more,
    }


def reported(*of_ranks: dict[str, Any]) -> list[str]:
    """The mistakes in a save of each rank."""
    events = [RankEvent(rank, 0.0, "saved", content) for rank, content in enumerate(of_ranks)]
    return [failure.what for failure in saved.failures(events, {}, JobConfig({}))]


def test_a_file_for_each_rank_may_hold_its_part() -> None:
    assert not reported(save("/rank-0.pt", 3), save("/rank-1.pt", 3))
    assert reported(save(shards=3), save(shards=3, barriers=1))
    assert reported(save(shards=3))


def test_ranks_may_write_a_file_in_turn() -> None:
    assert "ranks 0 and 1 write one file" in reported(save(), save())[0]
    for other in ({"barriers": 1}, {"step": 1}, {"machine": 1}):  # each machine may have its own disk
        assert not reported(save(), save(**other))
    of_ranks = save("/a", call="torch.distributed.checkpoint.save")
    assert not reported(of_ranks, of_ranks)


@pytest.mark.parametrize(
    ("fsdp", "weight", "key"),
    [
        (FSDP2, "a.weight", "fsdp_state_dict_type"),
        (FSDP1, "a.weight", "fsdp_state_dict_type"),
        (FSDP1, "base_model.model.a.lora_A.weight", "fsdp_version"),
        (FSDP2 | {"fsdp_state_dict_type": "FULL_STATE_DICT"}, "a.weight", ""),  # a folder that was deleted
    ],
)
def test_a_trainer_that_saves_nothing(fsdp: dict[str, Any], weight: str, key: str, tmp_path: Path) -> None:
    written = save(str(tmp_path / "final"), call="Trainer.save_model")
    weights = RankEvent(0, 0.0, "weights", {"model": 0, "held": {weight: [0, 0.0, 0.0]}})
    job = JobConfig({"distributed_type": "FSDP", "fsdp_config": fsdp})

    def keys(*saves: dict[str, Any]) -> list[str]:
        events = [weights, *(RankEvent(rank, 0.0, "saved", content) for rank, content in enumerate(saves))]
        return [failure.key for failure in saved.failures(events, {}, job)]

    assert keys(written | {"files": []}, written | {"files": []}) == ([key] if key else [])
    assert not keys(written, written | {"files": []})


WRAPPED = {"wrapped": "_orig_mod.a.weight", "is_result": True}
FIRST, MOVED, AVERAGED = (0.2, 1.0), (0.4, 1.1), (0.3, 1.05)
OLD, TRAINED = (FIRST, MOVED, FIRST), (FIRST, MOVED, MOVED)
CONTENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a plain model": ({}, ""),
    "a compiled model": (WRAPPED, "names of a wrapper"),
    "a file that the script may read, or that has more than a model": (WRAPPED | {"is_result": False}, ""),
    "a folder, which a wrapped model never reads": (WRAPPED | {"call": saved.FOLDERS[2]}, "names of a wrapper"),
    "a state that Accelerate reads back": (WRAPPED | {"is_result": False, "call": saved.FOLDERS[0]}, ""),
    "the weights from before training": ({"values": [OLD, (FIRST, FIRST, FIRST)]}, "from before training"),
    "the trained weights": ({"values": [TRAINED]}, ""),
    "an average of both": ({"values": [(FIRST, MOVED, AVERAGED)]}, ""),
    "one weight of the trained ones": ({"values": [OLD, TRAINED]}, ""),
    "weights that have not moved, as in warm-up": ({"values": [(FIRST, FIRST, FIRST)]}, ""),
    "weights before the first step": ({"values": [OLD], "step": 0}, ""),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_names_of_a_wrapper_and_values_from_before_training_are_mistakes(name: str) -> None:
    values, says = CONTENTS[name]
    found = reported(save(**values))
    assert len(found) == bool(says)
    assert all(says in what for what in found)


def test_what_is_saved_beside_a_file_decides() -> None:
    """The optimizer's states, or the trained weights, with which the first ones are compared."""
    files = [*save(**WRAPPED)["files"], *save("/optimizer.pt")["files"]]
    assert not reported(save() | {"files": files})
    assert not reported(save("/first", values=[OLD]), save("/trained", values=[TRAINED]))


def test_what_a_rank_reports_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_FSDP_EVENTS", str(tmp_path))
    monkeypatch.setattr(script, "_started", script.Project(str(tmp_path), str(tmp_path), is_relative=False))
    model, observed = torch.nn.Linear(2, 2), ObservedSteps()
    first, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.1)
    observed.sees_weights = True
    model(torch.ones(2)).sum().backward()
    observed.begin([model], optimizer)
    optimizer.step()
    states = (first, model.state_dict(), {f"module.{name}": value for name, value in model.state_dict().items()})
    old, trained, wrapped = (ObservedSaves(observed)._content(state, by_dcp=False) for state in states)
    assert all(of_file == began != now for began, now, of_file in old["values"])
    assert all(began != now == of_file for began, now, of_file in trained["values"])
    assert [len(content["values"]) for content in (old, trained, wrapped)] == [2, 2, 2]
    assert (trained["wrapped"], wrapped["wrapped"], wrapped["is_result"]) == ("", "module.weight", True)
    both = ObservedSaves(observed)._content({"model": states[2], "optimizer": optimizer.state_dict()}, by_dcp=False)
    assert (both["wrapped"], both["is_result"]) == ("module.weight", False)


def test_what_fsdp1_gives_to_dcp_is_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's ShardedTensor, which refuses to be asked for its size; here its weight is on other ranks."""

    class ShardedTensor:
        def numel(self) -> int:
            raise RuntimeError("torch function 'numel' not supported for ShardedTensor!")

    observed = ObservedSaves(ObservedSteps())
    monkeypatch.setattr(observed, "_modules", lambda: [torch.nn.Linear(2, 2)])
    content = observed._content({"model": {"weight": ShardedTensor()}}, by_dcp=True)
    assert (content["shards"], content["count"]) == (0, 1)
