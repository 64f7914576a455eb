"""What a script saved is judged by what the ranks reported of it; what can't be judged passes."""

from typing import Any

import pytest

from accel_fsdp.config import JobConfig
from accel_fsdp.ranks import RankEvent
from accel_fsdp.rehearsal import saved

NAMES = ["a.weight", "b.weight"]


def of_file(prefix: str = "", **more: Any) -> dict[str, Any]:
    """What a rank reports of a file with the model's weights."""
    content = {"shards": 0, "count": 2, "is_model": True, "has_optimizer": False}
    return {**content, "names": [f"{prefix}{name}" for name in NAMES], **more}


def save(path: str = "/model.pt", *files: dict[str, Any], call: str = "torch.save", **more: Any) -> dict[str, Any]:
    at = {"line": "", "step": 2, "barriers": 0, "machine": 0, "is_whole": True}
    return {"call": call, "path": path, **at, "files": [{"path": path, **file} for file in files], **more}


def reported(
    *saves: dict[str, Any], others: tuple[dict[str, Any], ...] = (), loaded: str = "", names: tuple[str, ...] = ()
) -> list[str]:
    """The mistakes in the saves of rank 0 and of rank 1, under DDP."""
    reported = [(rank, "weights", {"names": [*NAMES, *names]}) for rank in (0, 1)]
    reported += [(rank, "saved", content) for rank, several in enumerate((saves, others)) for content in several]
    reported += [(0, "loaded", {"path": loaded})]
    events = [RankEvent(rank, 0.0, kind, content) for rank, kind, content in reported]
    return [failure.what for failure in saved.failures(events, {}, JobConfig({}))]


def test_a_file_for_each_rank_may_hold_its_part() -> None:
    shards = of_file(shards=3)
    assert not reported(save("/rank-0.pt", shards), others=(save("/rank-1.pt", shards),))
    assert reported(save("/model.pt", shards), others=(save("/model.pt", shards, barriers=1),))
    assert reported(save("/model.pt", shards))


def test_ranks_may_write_a_file_in_turn() -> None:
    first = save("/a.pt", of_file())
    assert "ranks 0 and 1 write one file" in reported(first, others=(first,))[0]
    for other in ({"barriers": 1}, {"step": 1}, {"machine": 1}):  # each machine may have its own disk
        assert not reported(first, others=(first | other,))
    of_ranks = save("/a", of_file(), call="torch.distributed.checkpoint.save")
    assert not reported(of_ranks, others=(of_ranks,))


WRAPPED = of_file("module.")


@pytest.mark.parametrize(
    ("files", "loaded", "names", "is_wrong"),
    [
        ((WRAPPED,), "", (), True),
        ((WRAPPED, of_file(has_optimizer=True)), "", (), False),
        ((WRAPPED,), "/model.pt", (), False),
        ((WRAPPED,), "", ("module.c.weight",), False),
        ((of_file("module.", is_model=False),), "", (), False),
    ],
    ids=["alone", "with an optimizer", "read", "names of the model's own", "an average"],
)
def test_names_of_wrappers(
    files: tuple[dict[str, Any], ...], loaded: str, names: tuple[str, ...], is_wrong: bool
) -> None:
    saves = [save("/model.pt" if number == 0 else "/optimizer.pt", file) for number, file in enumerate(files)]
    assert bool(reported(*saves, loaded=loaded, names=names)) == is_wrong
