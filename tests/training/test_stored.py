"""`--checkpoint_uri`: runs whose checkpoints are in an object store, which a real S3 server holds here."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import SFT, accel_fsdp, accelerate_launch
from stores import KEYS, S3, s3  # noqa: F401  # a fixture
from test_training import make_config, sft_args

from accel_fsdp.checkpoints import completeness, file_names, marker

STEPS = ("--max_steps", "6", "--save_steps", "2", "--lr_scheduler_type", "constant")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in marker.files_in(folder)}


def test_a_run_goes_on_from_the_store_alone(s3: S3, tiny_model: Path, text_data: Path, tmp_path: Path) -> None:  # noqa: F811
    """The first machine is lost with its disk after four steps; the second one has an empty disk and other ranks."""
    config, uri = make_config(tmp_path, tiny_model), s3.make("bucket")
    lost, here, straight = (tmp_path / name for name in ("lost", "here", "straight"))
    whole = accelerate_launch(config, SFT, *sft_args(tiny_model, text_data, straight, *STEPS))
    assert whole.code == 0, whole.output

    stop = ("--max_steps", "4", "--checkpoint_uri", uri, "--save_total_limit", "1", "--async_checkpoints")
    first = accelerate_launch(config, SFT, *sft_args(tiny_model, text_data, lost, *STEPS, *stop))
    assert first.code == 0, first.output
    assert re.search(rf"checkpoint-4 is at {uri}: [\d.]+ MB in", first.output)
    there = {name.removeprefix("runs/first/"): size for name, size in s3.names("bucket").items()}
    kept = {name: size for name, size in there.items() if name.startswith("checkpoint-")}
    assert {name.partition("/")[0] for name in kept} == {"checkpoint-4"}
    assert kept == {f"checkpoint-4/{name}": len(text) for name, text in content(lost / "checkpoint-4").items()}
    for name, text in content(lost / "checkpoint-4").items():
        assert s3.read("bucket", f"runs/first/checkpoint-4/{name}") == text
    assert [path.name for path in file_names.checkpoints(lost)] == ["checkpoint-4"]
    local = content(lost / "checkpoint-4")

    exported = accel_fsdp("export", lost, tmp_path / "local", "--verify", "bytes")
    assert exported.code == 0, exported.output
    shutil.rmtree(lost)
    exported = accel_fsdp("export", uri, tmp_path / "stored", "--verify", "bytes")
    assert exported.code == 0, exported.output
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("local", "stored")]
    assert weights[0] == weights[1]
    assert not list(tmp_path.glob(".fetched-*"))

    again = sft_args(tiny_model, text_data, here, *STEPS, "--checkpoint_uri", uri)
    refused = accelerate_launch(config, SFT, *again)
    assert refused.code == 1
    assert f"error: {uri} already holds a run" in refused.output
    resumed = accelerate_launch(config, SFT, *again, "--resume_from_checkpoint", "auto")
    assert resumed.code == 0, resumed.output
    assert f"fetching checkpoint-4 from {uri}" in resumed.output
    assert content(here / "checkpoint-4") == local
    ends = [(run / "final" / "model.safetensors").read_bytes() for run in (straight, here)]
    assert ends[0] == ends[1]
    assert not list(here.glob(".*arriving"))
    assert "runs/first/checkpoint-6/complete.json" in s3.names("bucket")
    for output in (first.output, resumed.output, *(path.read_text() for path in here.glob("run.json"))):
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in output
