"""`accel-fsdp checkpoints`: what a run holds, what is deleted, and how the weights of two checkpoints differ."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from conftest import Finished
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from accel_fsdp import atomic_files, cli, exporter
from accel_fsdp.checkpoints import FileReader, differences, open_checkpoint
from accel_fsdp.checkpoints_command import checkpoints
from accel_fsdp.errors import UsageError, UserError

Sft = Callable[..., Finished]


@pytest.fixture
def run(sft: Sft, tiny_model: Path, text_data: Path, tmp_path: Path) -> Path:
    """A run of six steps with a checkpoint and a held-out loss at each second one."""
    folder = tmp_path / "run"
    flags = "--max_steps 6 --save_steps 2 --eval_steps 2 --eval_strategy steps --logging_steps 1 --learning_rate 0.01"
    data = ["--dataset_name", text_data, "--dataset_test_split", "train", "--max_length", "32"]
    ended = sft("--model_name_or_path", tiny_model, "--output_dir", folder, *data, *flags.split())
    assert ended.code == 0, ended.output
    return folder


def printed(capfd: pytest.CaptureFixture[str], *words: str | Path) -> str:
    capfd.readouterr()
    assert cli.call(["checkpoints", *map(str, words)]) == 0
    return capfd.readouterr().out


def test_a_table_a_comparison_and_what_is_deleted(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = json.loads((run / "checkpoint-6/trainer_state.json").read_text())["log_history"]
    held_out = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
    losses = {entry["step"]: entry["loss"] for entry in log if "loss" in entry}
    rows = {row["step"]: row for row in json.loads(printed(capfd, run, "--json"))}
    assert list(rows) == [2, 4, 6]
    assert {step: row["eval_loss"] for step, row in rows.items()} == held_out
    assert {step: row["loss"] for step, row in rows.items()} == {step: losses[step] for step in rows}
    assert all(row["complete"] and row["engine"] == "DDP" and row["ranks"] == 1 for row in rows.values())
    size = sum(path.stat().st_size for path in (run / "checkpoint-2").rglob("*") if path.is_file())
    assert rows[2]["size_bytes"] == size
    best = min(held_out, key=lambda step: held_out[step])
    assert [step for step, row in rows.items() if row["is_best"]] == [best]

    shown = json.loads(printed(capfd, run, "--diff", "2,6", "--json"))
    before, after = (load_file(run / f"checkpoint-{step}/model.safetensors") for step in (2, 6))
    assert {row["name"] for row in shown} == set(before)
    for row in shown:
        old, new = before[row["name"]].double(), after[row["name"]].double()
        assert row["share"] == float((old != new).double().mean())
        assert row["largest"] == float((new - old).abs().max())
        assert row["relative"] == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-9)

    (run / "checkpoint-4/optimizer.pt").unlink()
    table = printed(capfd, run)
    assert "optimizer.pt is missing" in table
    assert "complete, newest" in table
    assert "would be deleted" in printed(capfd, run, "--delete", "2", "--dry-run")
    assert (run / "checkpoint-2").is_dir()
    worse = run / ("checkpoint-2" if held_out[6] < held_out[2] else "none")
    printed(capfd, run, "--keep-best", "1")
    assert sorted(run.glob("checkpoint-*")) == [
        path for path in (run / "checkpoint-2", run / "checkpoint-6") if path != worse
    ]
    with pytest.raises(UserError, match=r"no complete checkpoint of .* would be left"):
        cli.call(["checkpoints", str(run), "--delete", ",".join(path.name[11:] for path in run.glob("checkpoint-*"))])
    assert not list(run.glob(".checkpoint*"))


def test_what_is_wrong_deletes_nothing(run: Path, tmp_path: Path) -> None:
    for words, said in {
        ("--delete", "40"): "holds no checkpoint-40. Did you mean 4?",
        ("--diff", "2,5"): "holds no checkpoint-5",
        ("--delete", "2", "--keep-best", "1"): "--delete and --keep-best together",
        ("--keep-best", "0"): "--keep-best 0",
    }.items():
        with pytest.raises(UsageError) as refused:
            cli.call(["checkpoints", str(run), *words])
        assert said in refused.value.what
    for folder, said in (
        (tmp_path, "holds no checkpoint-N"),
        (tmp_path / "none", "is not a folder"),
        (run / "checkpoint-2", "is a checkpoint"),
    ):
        with pytest.raises(UsageError, match=said):
            cli.call(["checkpoints", str(folder)])
    (run / "checkpoint-6/complete.json").write_text('{"complete": false}')  # as while it is written
    held = atomic_files.only_run(run)
    with pytest.raises(UserError, match="another run is writing"):
        cli.call(["checkpoints", str(run), "--delete", "6"])
    held.release()
    assert [item.step for item in checkpoints(run)] == [2, 4, 6]
    cli.call(["checkpoints", str(run), "--delete", "6"])
    assert [item.step for item in checkpoints(run)] == [2, 4]


def test_shards_are_compared_with_any_other_kind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "architectures": ["LlamaForCausalLM"]}
    sizes = {"vocab_size": 509, "hidden_size": 36, "intermediate_size": 70, "num_hidden_layers": 2}
    sharded.make(tmp_path / "run", LlamaConfig(**sizes, **heads, dtype="float32"), ranks=3)
    exporter.run(exporter.ExportCommand(tmp_path / "run", tmp_path / "out", verify="bytes", no_sync=True))
    words = ["--diff", f"{tmp_path / 'run/checkpoint-1'},{tmp_path / 'out'}"]
    rows = json.loads(printed(capfd, tmp_path / "run", *words, "--json"))
    assert len(rows) > 20
    assert all(row["share"] == 0 for row in rows)
    tensors = load_file(tmp_path / "out/model.safetensors")
    tensors["lm_head.weight"][7, 3] += 1
    tensors["model.norm.weight"][0] = float("nan")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].half()
    save_file(tensors, tmp_path / "out/model.safetensors", {"format": "pt"})
    shown = printed(capfd, tmp_path / "run", *words)
    assert "model.layers.0.mlp.up_proj.weight is only in the first" in shown
    assert "model.layers.1.mlp.up_proj.weight is float32, then float16" in shown
    assert "model.norm.weight has NaN or infinite numbers in one of the two alone" in shown
    assert [line.split()[0] for line in shown.splitlines()[-1:]] == ["lm_head.weight"]


def test_large_tensors_are_compared_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "BLOCK_ELEMENTS", 7)
    torch.manual_seed(0)
    before: dict[str, Any] = {"a": torch.randn(5, 11), "b": torch.zeros(3), "c": torch.ones(0, 2)}
    after = before | {"a": before["a"] * 1.5, "b": torch.ones(3)}
    for name, tensors in (("first", before), ("second", after)):
        save_file(tensors, tmp_path / name)
    passed: list[int] = []
    stored = [
        open_checkpoint.of_file(shutil.move(tmp_path / name, tmp_path / f"{name}.safetensors"))
        for name in ("first", "second")
    ]
    found = {item.name: item for item in differences.differences(*stored, FileReader(), passed.append)}  # type: ignore[call-arg, arg-type]
    assert found["a"].relative == pytest.approx(0.5)
    assert (found["b"].relative, found["b"].share, found["b"].largest) == (None, 1, 1)
    assert found["c"].is_equal
    assert sum(passed) == differences.total_bytes(*stored) == 4 * 58
