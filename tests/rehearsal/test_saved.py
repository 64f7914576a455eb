"""What a script saved is judged by what the ranks reported of it; what can't be judged passes."""

from pathlib import Path
from typing import Any

import pytest
from rehearsals import FSDP1, FSDP2

from accel_fsdp.config import JobConfig
from accel_fsdp.ranks import RankEvent
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
NAMED: dict[str, tuple[dict[str, Any], bool]] = {
    "a plain model": ({}, False),
    "a compiled model": (WRAPPED, True),
    "a file that the script may read, or that has more than a model": (WRAPPED | {"is_result": False}, False),
    "a folder, which a wrapped model never reads": (WRAPPED | {"is_result": False, "call": saved.FOLDERS[2]}, True),
    "a state that Accelerate reads back": (WRAPPED | {"is_result": False, "call": saved.FOLDERS[0]}, False),
}


@pytest.mark.parametrize("name", NAMED)
def test_names_of_a_wrapper_are_a_mistake(name: str) -> None:
    values, is_mistake = NAMED[name]
    assert [what.partition(", such as")[0].rpartition(" with ")[2] for what in reported(save(**values))] == (
        ["names of a wrapper"] if is_mistake else []
    )


def test_a_file_beside_an_optimizers_may_have_a_wrappers_names() -> None:
    files = [*save(**WRAPPED)["files"], *save("/optimizer.pt")["files"]]
    assert not reported(save() | {"files": files})


FIRST, MOVED, AVERAGED = (0.2, 1.0), (0.4, 1.1), (0.3, 1.05)
VALUES: dict[str, tuple[dict[str, Any], bool]] = {
    "the weights from before training": ({"values": [(FIRST, MOVED, FIRST), (FIRST, FIRST, FIRST)]}, True),
    "the trained weights": ({"values": [(FIRST, MOVED, MOVED)]}, False),
    "an average of both": ({"values": [(FIRST, MOVED, AVERAGED)]}, False),
    "one weight of the trained ones": ({"values": [(FIRST, MOVED, FIRST), (FIRST, MOVED, MOVED)]}, False),
    "weights that have not moved, as in warm-up": ({"values": [(FIRST, FIRST, FIRST)]}, False),
    "before the first step": ({"values": [(FIRST, MOVED, FIRST)], "step": 0}, False),
    "another model": ({}, False),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_from_before_training_are_a_mistake(name: str) -> None:
    values, is_mistake = VALUES[name]
    found = ["torch.save wrote the weights from before training into /model.pt"] if is_mistake else []
    assert reported(save(**values)) == found


def test_the_first_weights_may_be_saved_beside_the_trained_ones() -> None:
    values = {"/first": [(FIRST, MOVED, FIRST)], "/trained": [(FIRST, MOVED, MOVED)]}
    assert not reported(*(save(path, values=of_file) for path, of_file in values.items()))
