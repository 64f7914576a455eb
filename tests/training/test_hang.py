"""Ranks that stop, leave out a collective or raise: the job ends, and names them with their stacks."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, Finished, accelerate_launch, at_once, made_yaml
from reference import job_words

from accel_fsdp.checkpoints import completeness
from accel_fsdp.launch import hangs
from accel_fsdp.launch.beats import COMPUTES, GONE, Beat
from accel_fsdp.launch.hangs import LastSeen, Patience, PeerState

HANGING = ROOT / "tests" / "hanging.py"
SECONDS, STEPS, SAVED, FAULT_AFTER = 8, 8, 2, 3
NO_STEP = r"error: no rank has finished a step for \d+ s"
SAID = {
    "stop": (
        r"error: .*rank 1 of \S+ \(process (\d+)\) has been stopped by a signal for \d+ s; kill -CONT \1 lets it go on",
        rf"rank 1 of \S+ was last seen after step {FAULT_AFTER} at tests/hanging.py:\d+ in on_step_end, \d+ s ago; "
        r"rank 0 of \S+ waits",
        r"--- rank 1 of \S+, last seen after .*\n(  .*\n)+  File .*hanging.py.* in on_step_end\n",
    ),
    "skip": (
        rf"{NO_STEP}\n",
        rf"rank 0 of \S+ waits after step {FAULT_AFTER} in barrier at tests/hanging.py:\d+ in take_part",
        r"--- rank 0 of \S+, after .*last collective: gloo:barrier.*\n(  .*\n)+  File .*hanging.py.* in take_part\n",
    ),
    "raise": (
        r"error: rank 1 of \S+ failed: ValueError: a fault of one rank\n",
        r"\nrank 1 of \S+ failed: ValueError: a fault of one rank\n",
        r"failed: ValueError: a fault of one rank\n(  .*\n)+  File .*hanging.py.* in on_step_end\n",
    ),
}


@pytest.fixture(scope="module")
def faulty(
    tiny_model: Path, text_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Finished]]:
    """A run with each fault, all at the same time: their folder, and how they ended."""
    folder = tmp_path_factory.mktemp("faulty")
    config = folder / "job.yaml"
    config.write_text(made_yaml(model=str(tiny_model), num_processes="2", mixed_precision="no", fsdp_version="2"))

    def launch(kind: str) -> Finished:
        flags = job_words(tiny_model, text_data, folder / kind, STEPS, 2, save_steps=SAVED)
        fault = {"HANG": kind, "HANG_RANK": "1", "HANG_STEP": str(FAULT_AFTER)}
        return accelerate_launch(config, HANGING, *flags, "--hang_timeout", str(SECONDS), **fault)

    return folder, dict(zip(SAID, at_once([partial(launch, kind) for kind in SAID]), strict=True))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", SAID)
def test_a_rank_with_a_fault_is_named(kind: str, faulty: tuple[Path, dict[str, Finished]]) -> None:
    run, ended = faulty[0] / kind, faulty[1][kind]
    assert ended.code == 1, ended.output
    for text in SAID[kind]:
        assert re.search(text, ended.output), ended.output
    assert set(re.findall(r"exitcode +: (-?\d+)", ended.output)) == {"1"}
    newest = run / f"checkpoint-{SAVED}"
    assert f"{newest} is the newest complete checkpoint" in ended.output
    assert "--resume_from_checkpoint true" in ended.output
    assert completeness.choose(run).newest == newest
    if kind == "skip":
        assert sorted(path.name for path in (run / "hang").iterdir()) == ["rank_0", "rank_1"]


def test_how_long_a_step_may_take() -> None:
    """As docs/train.md says."""
    patience = Patience()
    assert (patience.seconds(""), patience.seconds("a save")) == (600, 1800)
    patience.steps.extend([90.0, *[40.0] * 19])
    assert (patience.seconds(""), patience.seconds("a save")) == (1800, 5400)
    patience.steps.append(40.0)  # the slowest is none of the last 20 any more
    assert patience.seconds("") == 800
    assert (Patience(30).seconds(""), Patience(30).seconds("the start"), Patience(30).silence) == (30, 90, 30)
    assert (patience.silence, Patience(100).silence) == (40, 40)


def seen(*, moves: bool = False, silent: float = 0.0, mates: dict[str, str] | None = None) -> dict[int, PeerState]:
    """Two ranks on one host without a step for 700 s; the second one silent for so long."""
    still = 1.0 if moves else 700.0
    beats = [Beat(rank, "n1", "n1", 7 + rank, idle=700.0 - silent * rank, still=still) for rank in range(2)]
    return {0: PeerState(dataclasses.replace(beats[0], mates=mates or {}), 0.0), 1: PeerState(beats[1], silent)}


def test_what_is_no_hang() -> None:
    """Ranks that move, or have not waited long enough; a silent one that others see compute."""
    assert hangs.verdict(seen(), Patience()) == "no rank has finished a step for 700 s"
    assert hangs.verdict(seen(moves=True), Patience()) == ""
    assert hangs.verdict(seen(), Patience(800)) == ""
    assert hangs.verdict(seen(silent=50), Patience(800)) == "no heartbeat of rank 1 of n1 (process 8) for 50 s"
    assert hangs.verdict(seen(silent=50, moves=True), Patience(800)) == ""
    assert hangs.verdict(seen(silent=30), Patience(800)) == ""
    assert hangs.verdict(seen(silent=50, mates={"1": COMPUTES}), Patience(800)) == ""
    two = {
        rank: PeerState(Beat(rank, f"n{rank // 2}", f"n{rank // 2}", 7, idle=60, still=60), 0.0) for rank in range(4)
    }
    two |= {rank: dataclasses.replace(two[rank], silent=silent) for rank, silent in {2: 41.0, 3: 39.5}.items()}
    vanished = "no heartbeat of n1 (ranks 2, 3) for 41 s"
    assert hangs.verdict(two, Patience()) == vanished
    off = hangs.verdict(two, Patience(), lambda beat: False)
    on = hangs.verdict(two, Patience(), lambda beat: True)
    assert off == f"{vanished}; the machine doesn't answer either: switched off or unreachable"
    assert on == f"{vanished}; the machine itself answers: its processes have ended, or were stopped"
    gone = hangs.verdict(seen(silent=50, mates={"1": GONE}), Patience(800))
    assert gone == "rank 1 of n1 (process 8) is gone: killed, or ended by itself"


def test_what_is_said_of_ranks_is_what_was_seen() -> None:
    """One that failed is told by its exception, a silent one by its last sign, only the others by their place."""
    beats = [
        Beat(rank, f"n{rank // 2}", "", 7, step=8, collective="all_gather", caller="a.py:1 in f") for rank in range(4)
    ]
    states = {rank: LastSeen(beat, "") for rank, beat in enumerate(beats)}
    states[3] = LastSeen(dataclasses.replace(beats[3], step=6, doing="a save"), "", ago=41.2)
    states[1] = LastSeen(
        dataclasses.replace(beats[1], collective="", caller="data.py:9 in __getitem__"), "", failed=True
    )
    assert hangs.differences(states) == (
        "rank 1 of n0 failed after step 8 at data.py:9 in __getitem__; "
        "rank 3 of n1 was last seen after step 6, a save in all_gather at a.py:1 in f, 41 s ago; "
        "the others wait after step 8 in all_gather at a.py:1 in f"
    )
