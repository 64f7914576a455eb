"""`--profile_steps` on real ranks: torch's traces are written, and the steps train as without them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SFT, Finished, accelerate_launch
from test_training import RANKS, make_config, sft_args

from accel_fsdp.errors import UserError
from accel_fsdp.training import arguments
from accel_fsdp.training.reporting import run_record

STEP = "Optimizer.step#"


def profiled_steps(trace: Path) -> int:
    """The steps of the optimizer that a trace holds."""
    with gzip.open(trace, "rt", encoding="utf-8") as text:
        events = json.load(text)["traceEvents"]
    return sum(str(event["name"]).startswith(STEP) and event.get("cat") == "user_annotation" for event in events)


def test_each_rank_has_a_trace_and_the_steps_train_the_same(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, tiny_model)
    runs = {}
    for name, flags in (("profiled", ("--profile_steps", "2:3")), ("plain", ())):
        args = sft_args(tiny_model, text_data, tmp_path / name, "--save_strategy", "no", *flags)
        runs[name] = accelerate_launch(config, SFT, *args)
        assert runs[name].code == 0, runs[name].output
    folder = tmp_path / "profiled" / "profile"
    traces = {f"trace-rank{rank}.json.gz" for rank in range(RANKS)}
    assert {path.name for path in folder.iterdir()} == traces
    assert [profiled_steps(folder / name) for name in sorted(traces)] == [2] * RANKS
    assert "https://ui.perfetto.dev" in runs["profiled"].output
    logs = [run_record.read(tmp_path / name)["log"] for name in runs]
    first, other = ([(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry] for log in logs)
    assert first == other
    assert not (tmp_path / "plain" / "profile").exists()


def test_a_run_that_ends_early_has_the_steps_until_there(
    sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """A resumed run profiles the steps that are left; a run without any of them says so."""
    args = sft_args(tiny_model, text_data, tmp_path / "run", "--save_steps", "2")
    first = sft(*args, "--max_steps", "2", "--profile_steps", "3")
    assert first.code == 0
    assert "no step is profiled, as step 2 was the last one" in first.output
    assert not (tmp_path / "run" / "profile").exists()
    finished = sft(*args, "--resume_from_checkpoint", "true", "--profile_steps", "2:9")
    assert finished.code == 0, finished.output
    assert profiled_steps(tmp_path / "run" / "profile" / "trace-rank0.json.gz") == 2


@pytest.mark.parametrize("steps", ["5:3", "0:3", "3-5"])
def test_other_steps_are_refused_before_anything_is_loaded(
    steps: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    args = ("--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["sft.py", *args, "--profile_steps", steps])
    with pytest.raises(UserError, match="it has to be FIRST:LAST, from 1 on"):
        arguments.parse()
