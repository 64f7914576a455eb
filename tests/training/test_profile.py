"""`--profile_steps` on real ranks: torch's traces are written, and the steps train as without them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

from conftest import Finished
from jobs import RANKS

from accel_fsdp.training.reporting import run_record

STEP = "Optimizer.step#"


def profiled_steps(trace: Path) -> int:
    """The steps of the optimizer that a trace holds."""
    with gzip.open(trace, "rt", encoding="utf-8") as text:
        events = json.load(text)["traceEvents"]
    return sum(str(event["name"]).startswith(STEP) and event.get("cat") == "user_annotation" for event in events)


def test_each_rank_has_a_trace_and_the_steps_train_the_same(launches: Callable[..., Finished], tmp_path: Path) -> None:
    profiled = launches("--save_strategy", "no", "--profile_steps", "2:3", into="profiled")
    launches("--save_strategy", "no", into="plain")
    folder = tmp_path / "profiled" / "profile"
    traces = {f"trace-rank{rank}.json.gz" for rank in range(RANKS)}
    assert {path.name for path in folder.iterdir()} == traces
    assert [profiled_steps(folder / name) for name in sorted(traces)] == [2] * RANKS
    assert "https://ui.perfetto.dev" in profiled.output
    logs = [run_record.read(tmp_path / name)["log"] for name in ("profiled", "plain")]
    first, other = ([(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry] for log in logs)
    assert first == other
    assert not (tmp_path / "plain" / "profile").exists()


def test_a_run_that_ends_early_has_the_steps_until_there(trains: Callable[..., Finished], tmp_path: Path) -> None:
    """A resumed run profiles the steps that are left; a run without any of them says so."""
    saved = ("--save_steps", "2")
    first = trains(*saved, "--max_steps", "2", "--profile_steps", "3")
    assert "no step is profiled, as step 2 was the last one" in first.output
    assert not (tmp_path / "run" / "profile").exists()
    trains(*saved, "--resume_from_checkpoint", "true", "--profile_steps", "2:9")
    assert profiled_steps(tmp_path / "run" / "profile" / "trace-rank0.json.gz") == 2
