"""What a run says of a checkpoint before it loads anything, and which ones it keeps. No launches."""

import io
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evil import Evil
from torch.distributed.checkpoint.metadata import Metadata

from accel_fsdp.checkpoints import Origin, completeness, discover, file_names, marker, open_checkpoint
from accel_fsdp.errors import UserError
from accel_fsdp.training import SftTrainer, loading, resuming

HERE = Origin("FSDP", ranks=2, rows_per_step=8)
SHARDED = ("pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata", "optimizer_0/__0_0.distcp")
REST = ("optimizer_0/.metadata", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")
WHOLE = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth")
ZERO = tuple(f"global_step4/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def content_of(name: str) -> bytes:
    """A file of that name that a resume can read; the tensors' files are never opened here."""
    if name.endswith(".metadata"):
        return pickle.dumps(Metadata({}, storage_data={}))
    if name.endswith(".pth") or name == "scheduler.pt":
        return saved({})
    return b"{}" if name.endswith(".safetensors") else b'{"global_step": 4}'


def written(folder: Path, *names: str, origin: Origin | None = HERE) -> Path:
    """A checkpoint of these files; without origin as plain Trainer leaves it."""
    folder.mkdir(parents=True)
    if origin:
        completeness.begin(folder)
    for name in (*names, "trainer_state.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content_of(name))
    if origin:
        completeness.seal(folder, origin)
    return folder


def run_of(folder: Path, *steps: int) -> list[Path]:
    return [written(folder / f"checkpoint-{step}", *SHARDED, *REST) for step in steps]


@pytest.mark.parametrize(
    ("names", "origin", "here", "message"),
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
        (("pytorch_model_fsdp_rank0.bin", "optimizer_0/.metadata", "scheduler.pt"), HERE, HERE, "by 1 rank,"),
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
    names: tuple[str, ...], origin: Origin | None, here: Origin, message: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "checkpoint-4", *names, origin=origin)
    if any(name.startswith("global_step") for name in names):
        (folder / "latest").write_text("global_step4")
    if not message:
        resuming.check(folder, here)
        return
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        resuming.check(folder, here)


def test_data_that_start_anew_need_no_place(tmp_path: Path) -> None:
    folder = written(tmp_path / "checkpoint-4", *SHARDED, *REST)
    resuming.check(folder, Origin("FSDP", 3, 12), skips_data=False)
    with pytest.raises(UserError, match="by 2 ranks, this run has 4"):
        resuming.check(folder, Origin("FSDP", 4, 8), order_depends_on_ranks=True)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """What of Trainer's arguments a resume looks at, on one of two ranks with two rows."""
    monkeypatch.setattr(resuming, "gather_object", list)
    fixed = {"output_dir": str(tmp_path), "world_size": 2, "process_index": 0, "train_batch_size": 2}
    fixed |= {"save_on_each_node": False, "should_save": True, "checkpoint_uri": None, "auto_find_batch_size": False}
    fixed |= {"gradient_accumulation_steps": 2, "ignore_data_skip": False}
    return lambda **changed: SimpleNamespace(**{**fixed, **changed})


@pytest.mark.parametrize("wanted", ["true", "checkpoint-4"])
def test_steps_of_another_size_are_refused_before_anything_is_loaded(
    wanted: str, arguments: Callable[..., SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "checkpoint-4", *SHARDED, *REST)  # steps of 8 rows
    resume = "true" if wanted == "true" else str(folder)
    with pytest.raises(UserError, match="counts steps of 8 rows, this run steps of 16"):
        resuming.chosen(arguments(resume_from_checkpoint=resume, train_batch_size=4))
    assert resuming.chosen(arguments(resume_from_checkpoint=resume)) == str(folder)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")  # both ranks have a part of the same rows
    assert resuming.chosen(arguments(resume_from_checkpoint=resume, train_batch_size=4)) == str(folder)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pytorch_model_fsdp_0/.metadata", pickle.dumps, "names posix.system"),
        ("optimizer_0/.metadata", pickle.dumps, "names posix.system"),
        ("optimizer_0/__1.metadata", pickle.dumps, "names posix.system"),
        ("scheduler.pt", saved, "names posix.system"),
        ("scheduler.pt", lambda _: b"cut", "scheduler.pt is damaged: not a file of torch.save"),
        ("rng_state_1.pth", lambda _: saved({"cpu": 1})[:-30], "rng_state_1.pth is damaged"),
        ("global_step4/mp_rank_00_model_states.pt", saved, "names posix.system"),
        ("latest", lambda _: b"../other", "outside of its folder"),
    ],
)
def test_what_a_strangers_checkpoint_names_is_not_run(
    name: str, content: Any, message: str, marked: bool, arguments: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    """It is refused before a library opens it, whether the marker fits or there is none."""
    folder = written(tmp_path / "checkpoint-4", *SHARDED, *REST, origin=None)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content(Evil(tmp_path / "proof")))
    if marked:
        completeness.seal(folder, HERE)
    reasons = []
    for rank in range(2):  # each reads its share, and in a run every rank hears of it
        try:
            resuming.chosen(arguments(process_index=rank, resume_from_checkpoint=str(folder)))
        except UserError as error:
            reasons.append(error.why)
    assert any(message in why for why in reasons), reasons
    refused = open_checkpoint.refusal(folder)
    assert refused is not None
    assert message in refused.what
    assert not (tmp_path / "proof").exists()


def test_the_newest_complete_one_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    first, second, cut, short, begun = run_of(tmp_path, 2, 4, 6, 8, 10)
    (cut / "scheduler.pt").unlink()
    (short / "optimizer_0" / "__0_0.distcp").write_text("{")
    completeness.begin(tmp_path / "checkpoint-12")
    (begun / file_names.MARKER).write_text(json.dumps({"complete": False}))
    choice = completeness.choose(tmp_path)
    assert choice.newest == second
    assert list(choice.skipped) == [tmp_path / "checkpoint-12", begun, short, cut]
    assert choice.skipped[cut] == "scheduler.pt is missing"
    assert choice.skipped[short] == "__0_0.distcp has 1 of 18 bytes"
    assert choice.skipped[begun] == "its run ended while it was written"
    assert first.exists()


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
    completeness.retire(tmp_path, keep, f"elsewhere/checkpoint-{best}" if best else None)
    assert sorted(int(path.name.partition("-")[2]) for path in tmp_path.iterdir()) == left


def test_other_bytes_of_the_right_size_are_seen_by_one_of_the_ranks(tmp_path: Path) -> None:
    """A flipped bit; each rank reads its share, and the shares cover everything once."""
    folder = written(tmp_path / "checkpoint-4", *SHARDED, *REST)
    assert marker.damage(folder) == ""
    path = folder / "optimizer_0" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert completeness.flaw(folder) == ""  # sizes alone don't tell
    assert "has changed since it was written" in marker.damage(folder)
    assert sum(bool(marker.damage(folder, part=rank, of=3)) for rank in range(3)) == 1


def test_each_rank_hashes_what_it_wrote(tmp_path: Path) -> None:
    names = (*SHARDED, *REST, "pytorch_model_fsdp_0/__1_0.distcp", *ZERO, "checkpoint.json")
    folder = written(tmp_path / "checkpoint-4", *names)
    parts = [marker.own_hashes(folder, rank, 2) for rank in range(2)]
    assert set(parts[1]) == {"rng_state_1.pth", "pytorch_model_fsdp_0/__1_0.distcp", ZERO[1]}
    whole = marker.read(folder)
    assert whole is not None
    assert {**parts[0], **parts[1]} == whole.hashes
    assert whole.hashes.keys() == whole.sizes.keys()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "3", '{"complete": true}', '{"complete": true, "files": []}', '{"complete": 1}'),
        '{"complete": true, "files": {"a": "1"}}',
        '{"complete": true, "files": {"../../x": 1}}',
        '{"complete": true, "files": {"/etc/shadow": 1}}',
        '{"complete": true, "files": {}, "hashes": {"scheduler.pt": 3}}',
        '{"complete": true, "files": {}, "origin": []}',
        '{"complete": true, "files": {}, "origin": [1]}',
        '{"complete": true, "files": {}, "origin": {"engine": "FSDP", "ranks": "two"}}',
        '{"complete": true, "files": {}, "origin": {"engine": "FSDP", "before": [3]}}',
        '{"complete": true, "files": {}, "origin": {"other": 1}}',
        "[" * 100_000,
    ],
)
def test_a_marker_that_is_cut_or_odd_is_damaged_and_not_none(text: str, tmp_path: Path) -> None:
    older, folder = run_of(tmp_path, 2, 4)
    (folder / file_names.MARKER).write_text(text)
    choice = completeness.choose(tmp_path)
    if text == '{"complete": true, "files": {}, "origin": []}':  # says nothing of the run, as earlier versions did
        assert choice.newest == folder
        return
    assert choice.newest == older
    assert "complete.json" in choice.skipped[folder]
    assert "damaged" in choice.skipped[folder]
    with pytest.raises(UserError, match="damaged"):
        marker.read(folder)
    location, passed = discover.find(tmp_path)
    assert location.folder == older
    assert "marker" in str(passed[0])


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (1, 1)])
def test_the_first_rank_goes_on_from_its_random_state(
    before: int, now: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainer has another name for it where there is one rank, and a list of the GPUs' where there are several."""
    trainer = object.__new__(SftTrainer)
    trainer.args = SimpleNamespace(process_index=0, world_size=before, output_dir=str(tmp_path), parallel_mode=None)
    torch.manual_seed(7)
    trainer._save_rng_state(str(tmp_path))
    [name] = [path.name for path in tmp_path.iterdir()]
    assert name == ("rng_state.pth" if before == 1 else "rng_state_0.pth")
    expected = torch.rand(3), random.random()
    trainer.args.world_size = now
    trainer._load_rng_state(str(tmp_path))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert "no random state" not in capsys.readouterr().err


def test_a_new_rank_begins_with_a_random_state_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model may have no dropout, which alone would differ."""
    trainer = object.__new__(SftTrainer)
    trainer.args = SimpleNamespace(process_index=1, world_size=2, seed=3, output_dir=str(tmp_path), parallel_mode=None)
    trainer.state = SimpleNamespace(global_step=4)
    trainer._load_rng_state(str(tmp_path))
    seen = torch.rand(3)
    torch.manual_seed(3 + 4 * 2 + 1)
    assert torch.equal(seen, torch.rand(3))
    message = " ".join(capsys.readouterr().err.split())
    assert f"rank 1: no random state in {tmp_path}; dropout masks differ" in message


def test_deepspeed_reads_as_data_while_it_loads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes `weights_only=False`, as a script may for files of its own."""
    monkeypatch.delenv(loading.RESTRICTED, raising=False)
    own = saved({"run": print})
    with loading.as_data(by_deepspeed=True), pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(own), weights_only=False)
    assert torch.load(io.BytesIO(own), weights_only=False) == {"run": print}
