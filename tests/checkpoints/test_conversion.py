"""`accel-fsdp convert` on files alone: what it writes, as torch and DeepSpeed read it, and what it refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, files_of_at_most, here, peak_bytes
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from reference import equal
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accel_fsdp import conversion
from accel_fsdp.checkpoints import Origin, completeness
from accel_fsdp.errors import UserError

STEP = 4
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "fused": None}


def state_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and optimizer as FSDP2 stores them, the moments with random numbers."""
    torch.manual_seed(1)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moments = {
        name: {"exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        for name, weight in weights.items()
    }
    for state in moments.values():
        state["step"] = torch.tensor(float(STEP))
    decaying = [name for name in weights if "norm" not in name]
    others = [name for name in weights if "norm" in name]
    groups = [{**SETTINGS, "params": decaying}, {**SETTINGS, "weight_decay": 0.0, "params": others}]
    return weights, {"state": moments, "param_groups": groups}


def write(checkpoint: Path, weights: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> Path:
    checkpoint.mkdir(parents=True)
    with warnings.catch_warnings(action="ignore"):  # that this is a single process
        for name, content in {"pytorch_model_fsdp": {"model": weights}, "optimizer": {"optimizer": optimizer}}.items():
            dcp.save(content, checkpoint_id=checkpoint / f"{name}_0", no_dist=True)  # type: ignore[attr-defined]
    torch.save({"last_epoch": STEP}, checkpoint / "scheduler.pt")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": STEP, "log_history": []}))
    return checkpoint


@pytest.fixture
def source(tmp_path: Path, tiny_model: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    shutil.copytree(tiny_model, tmp_path / "run" / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    checkpoint = write(tmp_path / "run" / f"checkpoint-{STEP}", *state_of(model))
    settings = {"precision": {"mixed_precision": "no"}}
    completeness.seal(checkpoint, Origin("FSDP", ranks=2, rows_per_step=8, settings=settings))
    return checkpoint


def convert(source: Path, out: Path, to: str, **flags: Any) -> None:
    assert conversion.convert(conversion.ConvertCommand(source, out, to=to, **flags)) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 5])
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_reads_the_weights(stage: int, ranks: int, source: Path, tiny_model: Path, tmp_path: Path) -> None:
    """With DeepSpeed's own script; on three and five ranks the groups are padded."""
    convert(source, tmp_path / "new" / source.name, f"zero{stage}", ranks=ranks)
    loaded = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "new" / source.name)
    expected = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_there_and_back_again(source: Path, tmp_path: Path) -> None:
    """FSDP to ZeRO-3, ZeRO-2 and FSDP: read by torch, all is as it was, with settings, schedule and origin."""
    convert(source, tmp_path / "three" / source.name, "zero3", ranks=3)
    three, two, fsdp = (tmp_path / name / source.name for name in ("three", "two", "fsdp"))
    convert(three, two, "zero2", ranks=4, model=source.parent / "model")
    convert(two, fsdp, "fsdp1")
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        contents = []
        for checkpoint in (source, fsdp):
            dcp_to_torch_save(checkpoint / folder, tmp_path / "whole.pt")
            contents.append(torch.load(tmp_path / "whole.pt", weights_only=True))
        assert equal(*contents)
    assert (fsdp / "scheduler.pt").read_bytes() == (source / "scheduler.pt").read_bytes()
    markers = [json.loads((checkpoint / "complete.json").read_text()) for checkpoint in (fsdp, source)]
    assert markers[0]["origin"] == markers[1]["origin"]


def test_what_is_not_told_is_as_in_the_files_of_src(source: Path, tmp_path: Path) -> None:
    """The marker tells of the run that was trained, on two ranks and without bf16; the files are the newer truth."""
    first, second = (tmp_path / name / source.name for name in ("first", "second"))
    convert(source, first, "zero2", ranks=3, mixed_precision="bf16")
    convert(first, second, "zero3", model=str(source.parent / "model"))
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)]
    assert sorted(path.name for path in second.glob("global_step4/*optim_states.pt")) == names


def test_an_optimizer_without_state(source: Path, tmp_path: Path) -> None:
    """Plain SGD; a group without members, which DeepSpeed drops, isn't missed."""

    def strip(_: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> None:
        optimizer["state"] = {}
        optimizer["param_groups"].append({**SETTINGS, "params": []})

    rewritten(strip)(source)
    convert(source, tmp_path / "zero" / source.name, "zero1", ranks=2, mixed_precision="no")
    convert(tmp_path / "zero" / source.name, tmp_path / "fsdp" / source.name, "fsdp2")
    dcp_to_torch_save(tmp_path / "fsdp" / source.name / "optimizer_0", tmp_path / "whole.pt")
    groups = torch.load(tmp_path / "whole.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [16, 5]


def unmarked(*parts: str) -> Callable[[Path], None]:
    """A checkpoint without a marker and without these parts of it."""

    def remove(checkpoint: Path) -> None:
        (checkpoint / "complete.json").unlink()
        for part in parts:
            (checkpoint / part).rename(checkpoint.with_name("removed"))

    return remove


def of_fp16(checkpoint: Path) -> None:
    torch.save({"scale": 65536.0}, checkpoint / "scaler.pt")
    (checkpoint / "complete.json").unlink()


def flipped(checkpoint: Path) -> None:
    path = checkpoint / "optimizer_0" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(checkpoint: Path) -> None:
    os.truncate(checkpoint / "pytorch_model_fsdp_0" / "__0_0.distcp", 100)


def rewritten(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Callable[[Path], None]:
    """A checkpoint with another state, changed before it is written."""

    def rewrite(checkpoint: Path) -> None:
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(checkpoint.parent / "model"))
        weights, optimizer = state_of(model.float())
        change(weights, optimizer)
        shutil.rmtree(checkpoint)
        write(checkpoint, weights, optimizer)

    return rewrite


def narrow_moments(_: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> None:
    for state in optimizer["state"].values():
        state["exp_avg"] = state["exp_avg"].bfloat16()


def freeze_one(_: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> None:
    optimizer["param_groups"][0]["params"].remove("lm_head.weight")
    del optimizer["state"]["lm_head.weight"]


def grow_one(weights: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> None:
    for tensors in (weights, optimizer["state"]["lm_head.weight"]):
        for name in tensors.keys() & {"lm_head.weight", "exp_avg", "exp_avg_sq"}:
            tensors[name] = torch.zeros(600, 36)


def adapt(weights: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] = torch.zeros(2, 36)


def of_a_larger_model(checkpoint: Path) -> None:
    path = checkpoint.parent / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))


TWO: dict[str, Any] = {"ranks": 2, "mixed_precision": "no"}
REFUSED: dict[str, tuple[Callable[[Path], None], str, dict[str, Any], str]] = {
    "no schedule": (unmarked("scheduler.pt"), "fsdp2", {}, "has no scheduler.pt that can be read"),
    "no optimizer": (unmarked("optimizer_0"), "fsdp2", {}, "holds no optimizer whose state names the parameters"),
    "fp16": (of_fp16, "zero1", {"ranks": 2}, "is of fp16"),
    "a flipped bit": (flipped, "fsdp2", {}, "is damaged: optimizer_0/__0_0.distcp has changed"),
    "a cut file": (cut, "fsdp2", {}, r"lacks pytorch_model_fsdp_0/__0_0.distcp \(has 100 of [\d,]+ bytes\)"),
    "no number of ranks": (unmarked(), "zero2", {}, "--to zero2 without --ranks"),
    "no precision": (unmarked(), "zero2", {"ranks": 2}, "--to zero2 without --mixed-precision"),
    "no rank": (unmarked(), "zero2", {"ranks": 0}, "--ranks 0"),
    "moments in bf16": (rewritten(narrow_moments), "zero3", TWO, "aren't in float32"),
    "frozen": (rewritten(freeze_one), "zero3", TWO, "lm_head.weight is not trained"),
    "another model": (
        *(rewritten(grow_one), "zero1", TWO),
        r"lm_head.weight has the shape \(600, 36\) in the checkpoint, and \(509, 36\) in the model",
    ),
    "a larger model": (of_a_larger_model, "zero1", {}, "model.layers.2.* has the shape of no weight"),
    "ranks for FSDP": (lambda checkpoint: None, "fsdp2", {"ranks": 2}, "--ranks with --to fsdp2"),
    "an adapter": (rewritten(adapt), "fsdp2", {}, "is of an adapter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_converted_is_refused_and_leaves_nothing(name: str, source: Path, tmp_path: Path) -> None:
    prepare, to, flags, message = REFUSED[name]
    prepare(source)
    out = tmp_path / "new" / source.name
    out.parent.mkdir()
    with pytest.raises(UserError, match=message):
        convert(source, out, to, **flags)
    assert list(out.parent.iterdir()) == []


def test_what_is_there_is_not_replaced(source: Path) -> None:
    before = sorted(source.rglob("*"))
    with pytest.raises(UserError, match="exists"):
        convert(source, source, "zero1", ranks=2)
    with pytest.raises(UserError, match="is inside of SRC"):
        convert(source, source / "new", "zero1", ranks=2)
    with pytest.raises(UserError, match=re.escape("SRC is s3://bucket/run/checkpoint-4, which is not a folder")):
        convert(Path("s3://bucket/run/checkpoint-4"), source.parent / "new", "zero1", ranks=2)
    assert sorted(source.rglob("*")) == before


def large(run: Path, layers: int) -> Path:
    """A checkpoint with so many layers of 38 MB."""
    sizes = {"hidden_size": 512, "intermediate_size": 1365, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=512, num_hidden_layers=layers, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(run / "model")
    return write(run / f"checkpoint-{STEP}", *state_of(LlamaForCausalLM(config)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_early_end_leaves_no_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    source, out = large(tmp_path / "run", 4), tmp_path / "new" / f"checkpoint-{STEP}"
    words: list[str | Path] = [sys.executable, "-m", "accel_fsdp", "convert", source, out, "--to", "fsdp2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not any(out.parent.rglob("*.distcp")) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[number], output
    assert not out.exists()
    if number != signal.SIGKILL:
        assert "nothing is left of OUT" in output
        assert not any(out.parent.iterdir())


@pytest.mark.parametrize("to", ["fsdp2", "zero3"])
def test_a_file_that_can_not_be_written(to: str, source: Path, tmp_path: Path) -> None:
    """A limit for the size of files ends a library's write as a full disk does."""
    with files_of_at_most(200_000):
        finished = here("convert", source, tmp_path / "new" / source.name, "--to", to)
    assert finished.code == 1
    assert "error: cannot write" in finished.output
    assert not any((tmp_path / "new").iterdir())


@pytest.mark.parametrize("to", ["fsdp2", "zero3"])
def test_an_end_inside_of_torchs_archive_is_no_failure_to_write(
    to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There torch (2.13) raises an error of its own: the end of the process is its context."""

    def save(*_: Any, **__: Any) -> None:
        try:
            raise SystemExit(143)
        except SystemExit:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(SystemExit, match="143"):
        convert(source, tmp_path / "new" / source.name, to)
    assert not any((tmp_path / "new").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process's peak memory there")
def test_memory_holds_some_tensors(tmp_path: Path) -> None:
    """Of states of 0.9 and 1.8 GB."""
    sources = {layers: large(tmp_path / f"run{layers}", layers) for layers in (24, 48)}
    peaks = [peak_bytes("convert", src, tmp_path / f"{layers}", "--to", "fsdp2") for layers, src in sources.items()]
    assert peaks[1] < 1.3 * peaks[0]
