"""What a run says of a checkpoint before it loads anything, and which ones it keeps. No launches."""

import json
from pathlib import Path

import pytest

from accel_fsdp import complete, resuming
from accel_fsdp.complete import Origin
from accel_fsdp.errors import UserError

HERE = Origin("FSDP", ranks=2, rows_per_step=8)
SHARDED = ("pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata", "optimizer_0/__0_0.distcp")
REST = ("optimizer_0/.metadata", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")
WHOLE = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth")
ZERO = tuple(f"global_step4/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))


def written(folder: Path, *names: str, origin: Origin | None = HERE) -> Path:
    """A checkpoint of these files; without origin as plain Trainer leaves it."""
    folder.mkdir(parents=True)
    if origin:
        complete.begin(folder)
    for name in (*names, "trainer_state.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}" if name.endswith(".safetensors") else '{"global_step": 4}')
    if origin:
        complete.seal(folder, origin)
    return folder


def run_of(folder: Path, *steps: int) -> list[Path]:
    return [written(folder / f"checkpoint-{step}", *SHARDED, *REST) for step in steps]


@pytest.mark.parametrize(
    ("names", "origin", "here", "said"),
    [
        ((*SHARDED, *REST), HERE, Origin("FSDP", 3, 8), ""),
        ((*SHARDED, *REST), None, HERE, ""),
        ((*SHARDED, *REST), HERE, Origin("FSDP", 3, 12), "counts steps of 8 rows, this run steps of 12"),
        ((*SHARDED, *REST), HERE, Origin("DDP", 2, 8), "was written under FSDP, this run is under DDP"),
        (WHOLE, None, HERE, "was written under DDP, this run is under FSDP"),
        (("model.safetensors",), None, HERE, "holds no optimizer state and no schedule"),
        (SHARDED[:2], HERE, HERE, "holds no optimizer state and no schedule"),
        ((*SHARDED, REST[0]), HERE, HERE, "holds no schedule (scheduler.pt)"),
        ((*SHARDED[2:], *REST), HERE, HERE, "holds no model weights"),
        (("pytorch_model_fsdp_rank0.bin", "optimizer_0/.metadata", "scheduler.pt"), HERE, HERE, "by 1 ranks"),
        ((*ZERO, "latest"), Origin("ZeRO-2", 2, 8), Origin("ZeRO-2", 4, 8), "holds no model weights"),
        (
            (*ZERO, "global_step4/mp_rank_00_model_states.pt"),
            Origin("ZeRO-2", 2, 8),
            Origin("ZeRO-2", 4, 8),
            "by 2 ranks",
        ),
        ((*ZERO, "global_step4/mp_rank_00_model_states.pt"), Origin("ZeRO-2", 2, 8), Origin("ZeRO-3", 2, 8), "ZeRO-3"),
    ],
)
def test_a_checkpoint_is_held_against_the_run(
    names: tuple[str, ...], origin: Origin | None, here: Origin, said: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "checkpoint-4", *names, origin=origin)
    if any(name.startswith("global_step") for name in names):
        (folder / "latest").write_text("global_step4")
    if not said:
        resuming.check(folder, here)
        return
    with pytest.raises(UserError, match=said.replace("(", r"\(").replace(")", r"\)")):
        resuming.check(folder, here)


def test_data_that_start_anew_need_no_place(tmp_path: Path) -> None:
    folder = written(tmp_path / "checkpoint-4", *SHARDED, *REST)
    resuming.check(folder, Origin("FSDP", 3, 12), skips_data=False)
    with pytest.raises(UserError, match="by 2 ranks, this run has 4"):
        resuming.check(folder, Origin("FSDP", 4, 8), order_depends_on_ranks=True)


def test_the_newest_complete_one_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    first, second, cut, short, begun = run_of(tmp_path, 2, 4, 6, 8, 10)
    (cut / "scheduler.pt").unlink()
    (short / "optimizer_0" / "__0_0.distcp").write_text("{")
    complete.begin(tmp_path / "checkpoint-12")
    (begun / complete.MARKER).write_text(json.dumps({"complete": False}))
    choice = complete.choose(tmp_path)
    assert choice.newest == second
    assert list(choice.skipped) == [tmp_path / "checkpoint-12", begun, short, cut]
    assert choice.skipped[cut] == "scheduler.pt is missing"
    assert choice.skipped[short] == "__0_0.distcp has 1 of 18 bytes"
    assert choice.skipped[begun] == "its run ended while it was written"
    assert first.exists()


def test_plain_trainers_checkpoints_are_judged_by_what_is_written_last(tmp_path: Path) -> None:
    folder = written(tmp_path / "checkpoint-4", *SHARDED, *REST, origin=None)
    assert complete.flaw(folder) == ""
    (folder / "trainer_state.json").write_text('{"global_')
    assert "cut short" in complete.flaw(folder)
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    (folder / "optimizer_0" / ".metadata").unlink()
    assert complete.flaw(folder) == "optimizer_0/.metadata is missing"


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (None, None, [2, 4, 6, 8, 10]),
        (1, None, [6, 8, 10]),
        (2, None, [4, 6, 8, 10]),
        (1, 2, [2, 6, 8, 10]),
        (2, 2, [2, 6, 8, 10]),
    ],
)
def test_the_last_complete_one_is_never_deleted(
    keep: int | None, best: int | None, left: list[int], tmp_path: Path
) -> None:
    """8 and 10 are half-written: they are newer than the last complete one and may be being written."""
    *_, eight, ten = run_of(tmp_path, 2, 4, 6, 8, 10)
    for folder in (eight, ten):
        (folder / "scheduler.pt").unlink()
    complete.retire(tmp_path, keep, f"elsewhere/checkpoint-{best}" if best else None)
    assert sorted(int(path.name.partition("-")[2]) for path in tmp_path.iterdir()) == left


def test_a_step_saved_again_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    (folder,) = run_of(tmp_path, 4)
    complete.begin(folder)
    assert complete.flaw(folder)
    assert not complete.flaw(tmp_path / ".checkpoint-4.old")
    complete.retire(tmp_path, 1, None)
    (folder / "trainer_state.json").write_text("{}")
    complete.seal(folder, HERE)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
