"""What a run says of itself: rate and memory, advice when memory is used up, the best model, and what it leaves."""

import json
import os
import re
import stat
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, Finished, here
from huggingface_hub import ModelCard
from jobs import PER_RANK, RANKS, STEPS, TOLERANCE, save
from reference import train
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from accel_fsdp.config import Engine
from accel_fsdp.hardware import gpus
from accel_fsdp.job import Job, Layout, Recipe, from_run, from_yaml
from accel_fsdp.linter import read_subject
from accel_fsdp.prediction import trace_store
from accel_fsdp.training import export
from accel_fsdp.training.reporting import beginning, model_card, run_plan, run_record
from accel_fsdp.units import GIB, gib_or_mib

Launches = Trains = Callable[..., Finished]
SCARCE = ROOT / "tests" / "scarce.py"
LLAMA = "meta-llama/Llama-3.1-8B"
SHARDED = Layout(Engine.FSDP2, 1, 8, 8)


def llama(**recipe: object) -> run_plan.Forecast:
    stored = trace_store.find(LLAMA)
    assert stored
    return run_plan.Forecast(Job(SHARDED, Recipe(**recipe), model=LLAMA), *stored)  # type: ignore[arg-type]


def test_mfu_follows_the_rule_of_six() -> None:
    """6 FLOPs per weight and token, and 12 · layers · width · keys of attention, half of them masked."""
    config = {"layers": 32, "width": 4096, "head_and_blocks": 8_030_261_248 - 128_256 * 4096, "length": 4096}
    norms = (2 * 32 + 1) * 4096
    per_token = 6 * (config["head_and_blocks"] - norms) + 12 * 32 * 4096 * config["length"] / 2
    h100 = gpus.find("H100")
    assert llama().mfu(80_000, 4096, h100) == pytest.approx(80_000 * per_token / (8 * 989.4e12), rel=1e-9)


def test_advice_frees_what_the_plan_then_says_less() -> None:
    forecast = llama(rows=4, length=4096)
    now = forecast.peak_bytes(4, 4096, None)
    advice = forecast.advice(4, 4096)
    recomputed = llama(rows=4, length=4096, checkpointing="full").peak_bytes(4, 4096, None)
    freed = gib_or_mib(now - recomputed, gib_from=GIB / 10)
    assert f"{freed} less: fsdp_activation_checkpointing: true" in advice
    sizes = [float(line.split()[0].replace(",", "")) for line in advice]
    assert sizes == sorted(sizes, reverse=True)
    assert not any("fsdp_reshard_after_forward" in line for line in advice)  # it is on


def test_what_a_run_says_of_itself_without_being_told(trains: Trains, tmp_path: Path) -> None:
    """A tenth of the lines in a short run, the first and the last step among them; and nothing that tells nothing."""
    more = ("--max_steps", "25", "--save_strategy", "no", "--logging_steps", "0")
    output = trains(*more, "--gradient_accumulation_steps", "2", "--use_peft").output
    trained = sum(tensor.numel() for tensor in load_file(tmp_path / "run/final/adapter_model.safetensors").values())
    assert f"trained: {trained / 1e6:.2f} M of 0." in output
    batch = "4 rows per step (2 per process x 1 process x 2 micro-batches); 12 steps per epoch, 25 in all"
    assert f"batch: {batch}" in output
    assert "1 step per epoch, 2 in all" in beginning(1, 1, (48, 1, 1), (1, 0, 2))[1]
    assert "one process, which holds the whole model" in output
    for nothing in ("MFU", "the plan", "as the YAML says", "00:00 left", "PAD/BOS/EOS", "1 rows"):
        assert nothing not in output


def test_packed_weights_are_counted_as_what_they_stand_for(trains: Trains, tiny_model: Path, tmp_path: Path) -> None:
    output = trains("--max_steps", "1", "--save_strategy", "no", "--use_peft", "--load_in_4bit").output
    files = tiny_model / "model.safetensors", tmp_path / "run/final/adapter_model.safetensors"
    base, trained = (sum(tensor.numel() for tensor in load_file(file).values()) for file in files)
    both = f"{trained / 1e6:.2f} M of {(base + trained) / 1e6:.2f} M parameters, {trained / (base + trained):.2%}"
    assert f"trained: {both}" in output


@pytest.mark.parametrize(
    ("implementation", "attention"), [("eager", "eager"), ("sdpa", "sdpa"), ("flash_attention_2", "flash")]
)
def test_the_plan_hears_of_attention_and_kernels(implementation: str, attention: str, tmp_path: Path) -> None:
    config = SimpleNamespace(_name_or_path=LLAMA, _attn_implementation=implementation)
    model = SimpleNamespace(dtype=torch.float32, config=config)
    alone = SimpleNamespace(value="NO")
    accelerator = SimpleNamespace(num_processes=1, mixed_precision="no", distributed_type=alone, state=None)
    given = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for uses in (False, True):
        given.use_liger_kernel = uses
        job = from_run.job_of(model, given, accelerator)  # type: ignore[arg-type]
        assert job is not None
        assert (job.recipe.attention, job.recipe.liger) == (attention, uses)


def test_out_of_memory_ends_in_advice(launches: Launches, tiny_model: Path, tmp_path: Path) -> None:
    """From one rank only, with the strategy and the batch of this run, and no traceback."""
    settings = AutoConfig.from_pretrained(tiny_model, num_hidden_layers=4)
    deeper = save(AutoModelForCausalLM.from_config(settings), tmp_path / "deeper", tiny_model)
    # whose activations are what half a batch frees
    how = {"script": SCARCE, "SCARCE": "gpu", "XDG_CACHE_HOME": str(tmp_path), "answers": {"strategy": "2"}}
    output = launches(model=deeper, fails=True, **how).output
    assert "error: out of memory" in output
    assert re.search(r"the plan says [\d.]+ MiB for 2 x \d+ tokens per rank, FSDP2 SHARD_GRAD_OP", output)
    errors = re.split(r"\berror: ", output)[1:]
    for error in (error for error in errors if not error.startswith("a collective failed")):  # as another rank says
        assert error.startswith("out of memory")
        for change in ("--per_device_train_batch_size 1 --gradient_accumulation", "fsdp_activation_checkpointing"):
            assert re.search(rf"[\d.]+ [GM]iB less: {change}", error), error
    assert "[rank1]: Traceback" not in output
    assert not (tmp_path / "run" / "final").exists()
    assert run_record.read(tmp_path / "run")["status"] == "running"


def test_a_host_too_small_for_the_model_keeps_a_checkpoint(launches: Launches, tmp_path: Path) -> None:
    out, answers = tmp_path / "run", {"fsdp_version": "1", "state_dict_type": "FULL_STATE_DICT"}
    short = ("--save_strategy", "no", "--max_steps", "2")
    finished = launches(*short, answers=answers, script=SCARCE, fails=True, SCARCE="host")
    assert "of host memory, 0.0 MiB are free" in finished.output
    assert f"accel-fsdp export {out / 'checkpoint-2'} {out / 'final'}" in finished.output
    assert (out / "checkpoint-2" / "pytorch_model_fsdp_0" / ".metadata").is_file()
    assert not (out / "final").exists()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("version", ["2", "1"])
def test_a_host_too_small_for_the_model_streams_the_export(version: str, launches: Launches, tmp_path: Path) -> None:
    """Bit-equal to the model that another host gathers, with the same card, and verified."""
    args, how = ("--save_strategy", "no", "--max_steps", "2", "--export_dtype", "bfloat16"), {"fsdp_version": version}
    launches(*args, into="gathered", answers=how)
    streamed = launches(*args, "--final_export", "stream", into="streamed", answers=how, script=SCARCE, SCARCE="host")
    final = tmp_path / "streamed" / "final"
    assert f"exported and verified: {final}" in streamed.output
    whole, parts = (load_file(folder / "model.safetensors") for folder in (tmp_path / "gathered/final", final))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert (final / "README.md").read_text().startswith("---")
    assert here("export", "--check", final).code == 0
    AutoTokenizer.from_pretrained(final)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("version", ["1", "2"])
def test_early_stopping_exports_the_best_model(
    version: str, launches: Launches, tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """The highest loss is taken for the best, so the first step's model is; the second evaluation then stops it.

    Trainer alone doesn't note a best model whose shards are only being written, and may hang.
    """
    low, out = tmp_path / "low", tmp_path / "run"
    save(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16), low, tiny_model)
    every_step = ("--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1", "--dataset_test_split", "train")
    every_step += ("--report_to", "tensorboard") if version == "2" else ()
    stop = ("--early_stopping_patience", "1", "--metric_for_best_model", "loss", "--greater_is_better", "true")
    finished = launches(*every_step, *stop, model=low, answers={"fsdp_version": version})
    assert not (out / "checkpoint-3").exists()
    assert f"stopped early: after step 2 of {STEPS}\nthe best model is exported: checkpoint-1, " in finished.output
    best = train(low, text_data, steps=1, global_batch=PER_RANK * RANKS).weights
    assert "tensors, float32 weights rounded to bfloat16; --export_dtype float32 keeps them)" in finished.output
    assert "exports them rounded to bfloat16" in (out / "final" / "README.md").read_text()
    exported = load_file(out / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}  # the base model's
    settings = json.loads((out / "final" / "config.json").read_text())
    assert (settings["dtype"], settings["use_cache"]) == ("bfloat16", True)
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, best[name].bfloat16(), atol=TOLERANCE, rtol=1e-2)
    held_out = run_record.read(out)["results"]["held-out loss"]
    assert held_out["last"] < held_out["first"]
    assert_accounted_for(out, tmp_path / "fsdp.yaml", finished, low, text_data, steps=2)
    if version == "2":
        assert_on_the_board(out, run_record.read(out))


def assert_on_the_board(folder: Path, account: dict) -> None:
    """TensorBoard has what was printed."""
    [events] = folder.rglob("events.out.*")
    accumulator = EventAccumulator(str(events)).Reload()
    for name, tag in (("loss", "train/loss"), ("tokens_per_second", "train/tokens_per_second")):
        logged = [entry[name] for entry in account["log"] if name in entry]
        assert [event.value for event in accumulator.Scalars(tag)] == pytest.approx(logged)
    assert accumulator.Scalars("train/peak_host_memory_gib")


def assert_accounted_for(out: Path, config: Path, finished: Finished, model: Path, data: Path, steps: int) -> None:
    """run.json, the curve and the card say what the YAML, the log and the data say."""
    account = json.loads((out / "run.json").read_text())
    assert account["status"] == "finished"
    assert Layout(**account["plan"]["layout"]) == from_yaml.layout_of(read_subject(config)[0])
    state = json.loads((out / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert [entry["loss"] for entry in account["log"] if "loss" in entry] == losses
    assert account["results"]["training loss"] == {"first": losses[0], "best": min(losses), "last": losses[-1]}
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["text"] for line in data.read_text().splitlines()][: steps * PER_RANK * RANKS]
    assert account["results"]["tokens"] == sum(len(tokenizer(row)["input_ids"]) + 1 for row in rows)
    assert set(account["timings_seconds"]) == {"data", "model", "training", "export"}
    assert account["versions"]["torch"] == metadata.version("torch")
    lines = re.findall(rf"step \d/{STEPS}  loss [\d.]+ .* tokens/s  [\d.]+ [GM]iB of host", finished.output)
    assert len(lines) == steps
    assert len(re.findall(r"while loading: peak of rank 0 .*, of the others at most ", finished.output)) == 1
    assert "peak memory after step 2: " in finished.output
    card = ModelCard.load(out / "final" / "README.md")
    assert card.data.library_name == "transformers"
    assert f"| training loss | {losses[0]:.4f} |" in card.text
    assert str(out) not in card.content
    readable = 0o666 & ~current_umask()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (out / "final").iterdir()} == {readable}
    assert not list((out / "final").glob("*.bin"))


def test_a_card_names_the_ranks_of_each_stretch() -> None:
    given = {"model": {"model_name_or_path": "me/model", "model_revision": "main", "use_peft": False}}
    given |= {"data": {"dataset_name": "me/data", "dataset_train_split": "train"}, "training": {"max_steps": 2}}
    machine = {"ranks": 3, "device": "cpu"}
    run: dict[str, Any] = {"arguments": given, "versions": {}, "plan": {"strategy": "FSDP2 FULL_SHARD"}}
    run["machine"] = machine
    assert "- trained with FSDP2 FULL_SHARD on 3 ranks, cpu" in model_card.text(run, [])
    run["segments"] = [
        {"first_step": first, "last_step": first, "settings": {"ranks": {"ranks": ranks}}}
        for first, ranks in ((1, 2), (2, 3), (3, 3))
    ]
    card = model_card.text(run, [])
    assert "- trained with FSDP2 FULL_SHARD on 2, then 3 ranks, cpu" in card
    assert "| 1 to 1 | 2 |\n| 2 to 2 | 3 |" in card


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_collectives_get_the_time_that_writing_takes(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert export.lengthen_timeouts(10**9, least_seconds=1800) == 1800
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert backend.options._timeout.total_seconds() == 1800
        export.lengthen_timeouts(280 * 10**9, least_seconds=1800)  # 70 B parameters in float32, at 50 MB/s
        assert backend.options._timeout.total_seconds() == 5600
    finally:
        dist.destroy_process_group()
