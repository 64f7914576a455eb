"""What a script saved is judged by what the ranks reported of it; what can't be judged passes."""

from pathlib import Path
from typing import Any

import pytest
from rehearsals import FSDP1, FSDP2

from accel_fsdp.config import JobConfig
from accel_fsdp.ranks import RankEvent
from accel_fsdp.rehearsal import saved

FIRST, NOW = {"a.weight": (1.0, 2.0), "b.weight": (3.0, 4.0)}, {"a.weight": (1.5, 2.5), "b.weight": (3.5, 4.5)}
MEAN = {name: (0.9 * FIRST[name][0] + 0.1 * NOW[name][0], 0.9 * FIRST[name][1] + 0.1 * NOW[name][1]) for name in NOW}


def of_file(values: dict[str, tuple[float, float]], prefix: str = "", **more: Any) -> dict[str, Any]:
    """What a rank reports of a file with these sums and norms."""
    weights = {f"{prefix}{name}": [[2, 2], "float32", *sums] for name, sums in values.items()}
    return {"shards": 0, "count": 2, "is_bare": True, "has_optimizer": False, "tensors": weights, **more}


def save(path: str = "/model.pt", *files: dict[str, Any], call: str = "torch.save", **more: Any) -> dict[str, Any]:
    at = {"line": "", "step": 2, "barriers": 0, "machine": 0}
    return {
        "call": call,
        "path": path,
        **at,
        "weights": None,
        "files": [{"path": path, **file} for file in files],
        **more,
    }


def reported(
    *saves: dict[str, Any], others: tuple[dict[str, Any], ...] = (), loaded: str = "", names: tuple[str, ...] = ()
) -> list[str]:
    """The mistakes in the saves of rank 0 and of rank 1, under DDP."""
    contents: list[tuple[str, dict[str, Any]]] = [("began", {})]
    for step, values in ((0, FIRST), (2, NOW)):
        held = {name: [[0, 0], *sums] for name, sums in values.items()}
        shapes = {name: [2, 2] for name in values}
        contents.append(
            ("weights", {"model": 0, "step": step, "held": held, "shapes": shapes, "names": [*values, *names]})
        )
    reported = [(rank, *content) for rank in (0, 1) for content in contents]
    reported += [(rank, "saved", content) for rank, several in enumerate((saves, others)) for content in several]
    reported += [(0, "loaded", {"path": loaded})]
    events = [RankEvent(rank, 0.0, kind, content) for rank, kind, content in reported]
    return [failure.what for failure in saved.failures(events, {}, JobConfig({}))]


def test_a_file_for_each_rank_may_hold_its_part() -> None:
    shards = of_file({}, shards=3)
    assert not reported(save("/rank-0.pt", shards), others=(save("/rank-1.pt", shards),))
    assert reported(save("/model.pt", shards), others=(save("/model.pt", shards, barriers=1),))
    assert reported(save("/model.pt", shards))


def test_ranks_may_write_a_file_in_turn() -> None:
    metrics = of_file({})
    assert "ranks 0 and 1 write one file" in reported(save("/a.pt", metrics), others=(save("/a.pt", metrics),))[0]
    assert not reported(save("/a.pt", metrics), others=(save("/a.pt", metrics, barriers=1),))
    assert not reported(save("/a.pt", metrics), others=(save("/a.pt", metrics, step=1),))
    assert not reported(
        save("/a.pt", metrics), others=(save("/a.pt", metrics, machine=1),)
    )  # each on a disk of its own
    of_ranks = save("/a", metrics, call="torch.distributed.checkpoint.save")
    assert not reported(of_ranks, others=(of_ranks,))


WRAPPED = of_file(NOW, "module.")


@pytest.mark.parametrize(
    ("files", "loaded", "names", "is_wrong"),
    [
        ((WRAPPED,), "", (), True),
        ((WRAPPED | {"is_bare": False},), "", (), False),
        ((WRAPPED, of_file({}, has_optimizer=True)), "", (), False),
        ((WRAPPED,), "/model.pt", (), False),
        ((WRAPPED,), "", ("module.c.weight",), False),
        ((of_file(MEAN, "module."),), "", (), False),
        ((of_file(NOW | {"n_averaged": (1.0, 1.0)}, "module."),), "", (), False),
    ],
    ids=["alone", "in a dict", "with an optimizer", "read", "names of the model's own", "an average", "more names"],
)
def test_names_of_wrappers(
    files: tuple[dict[str, Any], ...], loaded: str, names: tuple[str, ...], is_wrong: bool
) -> None:
    saves = [save("/model.pt" if number == 0 else "/optimizer.pt", file) for number, file in enumerate(files)]
    assert bool(reported(*saves, loaded=loaded, names=names)) == is_wrong


def test_values() -> None:
    first, now, mean = (save(f"/{n}.pt", of_file(of)) for n, of in (("first", FIRST), ("now", NOW), ("mean", MEAN)))
    assert "2 steps with the weights from before the first one" in reported(first)[0]
    assert not reported(first, now)
    assert not reported(first, mean)
    assert not reported(first, save("/backbone.pt", of_file({"layer.weight": (1.0, 1.0)})))
    assert not reported(first | {"step": 0})
    assert not reported(now)
    assert not reported(mean)


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
    held = {"model": 0, "step": 0, "held": {}, "shapes": {}, "names": [weight]}
    contents = {"began": {}, "weights": held, "saved": save(str(tmp_path / "final"), call="Trainer.save_model")}
    events = [RankEvent(rank, 0.0, kind, content) for rank in (0, 1) for kind, content in contents.items()]
    job = JobConfig({"distributed_type": "FSDP", "fsdp_config": fsdp})
    assert [failure.key for failure in saved.failures(events, {}, job)] == ([key] if key else [])
    written = RankEvent(0, 0.0, "saved", save(str(tmp_path / "final"), of_file(NOW), call="Trainer.save_model"))
    assert not list(saved.failures([*events, written], {}, job))
