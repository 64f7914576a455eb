"""Mistakes that people make, planted one by one: a rehearsal fails on each and names the key, argument or line of it.

docs/rehearse.md shows the lines.
"""

import json
import re
import socket
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, accel_fsdp

from accel_fsdp.config import JobConfig
from accel_fsdp.hardware import host
from accel_fsdp.ranks import RankEvent, drawn_rows, gradients, measure, read, script
from accel_fsdp.rehearsal import blame, effects, job, mistakes, own_script, repeated, replicas
from accel_fsdp.rehearsal.job import Outcome

SCRIPT = ROOT / "tests/rehearsal/mistaken.py"
FSDP1 = {
    "fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_use_orig_params": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": False,
}  # fmt: skip
FSDP2 = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}  # fmt: skip
AT = re.compile(r"mistaken\.py:(\d+)$")


def yaml_file(folder: Path, fsdp: dict[str, Any], **top: Any) -> Path:
    """Of a job with FSDP; with DDP where nothing is said of it."""
    path = folder / "fsdp.yaml"
    engine = {"distributed_type": "FSDP", "fsdp_config": fsdp} if fsdp else {"distributed_type": "MULTI_GPU"}
    common = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "num_machines": 1, "num_processes": 8}
    path.write_text(yaml.safe_dump({**common, **engine, **top}))
    return path


def rehearsed(folder: Path, model: Path, mistake: str, fsdp: dict[str, Any], **top: Any) -> dict[str, Any]:
    """The report on the script with a mistake."""
    words = ["--json", yaml_file(folder, fsdp, **top), "--script", SCRIPT, "--", mistake, model, folder / "saved"]
    finished = accel_fsdp("rehearse", *words)
    report: dict[str, Any] = json.loads(finished.output[finished.output.index("{\n") :])
    assert finished.code == (0 if report["passed"] else 1)
    return report


def line_of(text: str) -> int:
    """Where the mistake is made."""
    return next(number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize("fsdp", [FSDP1, FSDP2], ids=["fsdp1", "fsdp2"])
def test_without_a_mistake_it_passes(fsdp: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    report = rehearsed(tmp_path, tiny_model, "none", fsdp)
    assert report["passed"], report
    assert re.fullmatch(r"step 0: loss [\d.]+\nstep 1: loss [\d.]+", report["steps"][-1]["output"])
    sentence = report["steps"][-1]["said"]
    assert re.match(rf"FSDP{fsdp['fsdp_version']}.* units; a rank holds at most [\d,]+ of [\d,]+ weights", sentence)


WITHOUT_STRATEGY = {key: value for key, value in FSDP1.items() if key != "fsdp_sharding_strategy"}
BY_YAML = {
    "wrong layer class": (
        FSDP1 | {"fsdp_transformer_layer_cls_to_wrap": "LlamaLayer"},
        "Could not find",
        "cls_to_wrap",
    ),
    "misspelt key": (FSDP1 | {"fsdp_shardign_strategy": 2}, "AF1", "fsdp_shardign_strategy"),
    "key of the other version, which changes the strategy": (
        WITHOUT_STRATEGY | {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
        "AF302",
        "fsdp_reshard_after_forward",
    ),
    "SIZE_BASED_WRAP under FSDP2": (
        FSDP2 | {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
        "AF",
        "fsdp_auto_wrap_policy",
    ),
}


@pytest.mark.parametrize("name", BY_YAML)
def test_of_the_yaml(name: str, tiny_model: Path, tmp_path: Path) -> None:
    fsdp, message, key = BY_YAML[name]
    failed = rehearsed(tmp_path, tiny_model, "none", fsdp)["steps"][-1]
    assert not failed["passed"]
    assert message in failed["said"]
    assert key in failed["key"]
    assert name in DOCS
    assert in_docs(failed["said"]), failed


BY_SCRIPT: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "LoRA with FSDP2's checkpointing": (
        "adapter", FSDP2 | {"fsdp_activation_checkpointing": True}, "fsdp_activation_checkpointing", "state_dict=state",
    ),
    "LoRA under FSDP1": ("adapter", FSDP1, "fsdp_version", "state_dict=state"),
    "save_state on rank 0 alone": ("saves on one rank", FSDP2, "the script", "accelerator.save_state"),
    "state_dict on rank 0 alone": ("state dict on one rank", FSDP2, "the script", "    accelerator.get_state_dict("),
    "state_dict on rank 0 alone, and end_training": (
        "state dict on one rank, others end", FSDP2, "the script", "    accelerator.get_state_dict(",
    ),
    "an error caught on one rank": ("swallows an error", FSDP2, "the script", "loss = model(input_ids"),
    "an error of the script's own, caught on one rank": (
        "swallows its own error", FSDP2, "the script", "raise ValueError(",
    ),
    "evaluation on rank 0 alone": ("evaluates on one rank", FSDP2, "the script", "evaluated = model("),
    "a barrier on rank 0 alone": ("barrier on one rank", FSDP2, "the script", "accelerator.wait_for_everyone()"),
    "generate on one rank alone": ("generates on one rank", FSDP2, "the script", "model.generate(rows[:1], max_new"),
    "generate of other lengths on each rank": ("generates other lengths", FSDP2, "the script", "synced_gpus=False"),
    "gather of other sizes on each rank": ("gathers other sizes", {}, "the script", "accelerator.gather("),
    "shards of gradients summed over ranks": ("sums shards", FSDP2, "the script", "all_reduce(parameter.grad.to_local"),
    "shards of weights sent to all ranks": ("sends shards", FSDP1, "the script", "broadcast(parameter.data"),
    "statistics of each rank": (
        "statistics of each rank", FSDP2 | {"fsdp_cpu_ram_efficient_loading": False}, "the script", "self.mean.lerp_(",
    ),
    "a head for each rank": ("task of each rank", FSDP2, "the script", "accelerator.backward(loss * scale"),
    "fewer batches on one rank": ("uneven batches", FSDP2, "the script", "loss = model(input_ids"),
    "use_orig_params: false with frozen layers": (
        "frozen layers", FSDP1 | {"fsdp_use_orig_params": False}, "fsdp_use_orig_params", "model, optimizer, loader)",
    ),
    "optimizer of other weights": ("optimizer of other weights", FSDP1, "the script", "AdamW([nn.Parameter("),
    "clipping by torch's function under FSDP1": ("torch clips", FSDP1, "the script", "torch.nn.utils.clip_grad_norm_"),
    "tied weights in different units": (
        "tied", FSDP1 | {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,Embedding"},
        "fsdp_transformer_layer_cls_to_wrap", "",
    ),
    "generate outside of a gathered context": ("generate", FSDP1, "the script", "generate(rows"),
    "forward of a part of the model": ("part of the model", FSDP2, "the script", "model.embed_tokens(batch)"),
    "other control flow on a rank": ("control flow", FSDP1, "the script", "loss = model(input_ids"),
    "experts as units, routed by rank": (
        "experts", FSDP2 | {"fsdp_transformer_layer_cls_to_wrap": "LlamaMLP"}, "fsdp_transformer_layer_cls_to_wrap", "",
    ),
    "dropout drawn again under checkpointing": ("forgotten random state", FSDP1, "preserve_rng_state", ""),
    "dropout with FSDP2's checkpointing": (
        "dropout", FSDP2 | {"fsdp_activation_checkpointing": True}, "fsdp_activation_checkpointing", "labels=batch, **",
    ),
    "a rank that ends itself": ("exits", FSDP1, "the script", "sys.exit(3)"),
    "a dataloader not prepared": ("dataloader not prepared", FSDP2, "the script", "labels=batch, **counts"),
    "sharded twice": ("sharded twice", FSDP2, "the script", "sampler=DistributedSampler(rows))"),
    "rows split by hand, and by prepare": ("split by hand", FSDP2, "the script", "own_rows = rows["),
    "another shuffle on each rank": ("another shuffle", FSDP1, "the script", "shuffle=True, generator=order)"),
    "an own sampler with another seed on each rank": ("another order", FSDP2, "the script", "sampler=Shuffled())"),
    "fewer rows on one rank": ("fewer rows", FSDP2, "the script", "batch_size=2 - accelerator.process_index"),
    "a head in no optimizer": ("head forgotten", FSDP2, "the script", "AdamW(model.model.parameters()"),
    "layers unfrozen later, in no optimizer": ("unfrozen late", FSDP2, "the script", "AdamW(trained or"),
    "layers unfrozen later, added as they were before prepare": (
        "stale group", FSDP2, "the script", "add_param_group({",
    ),
    "groups of an optimizer by dimensions": (
        "decay by dimensions", FSDP1, "the script", "if parameter.dim() == 1]",
    ),
    "a hook on a weight, before prepare": ("hook lost", FSDP2, "the script", "lambda gradient: 0 *"),
    "a hook on a weight, before prepare, under FSDP1": ("hook lost", FSDP1, "the script", "lambda gradient: 0 *"),
    "a hook on a weight, after prepare": ("hook of a shard", FSDP2, "the script", "register_hook(torch.zeros_like)"),
    "set_epoch() forgotten": ("same order", {}, "the script", "# twice"),
    "shards saved as a model": ("saves shards", FSDP1, "the script", "save_pretrained(FOLDER)"),
    "optimizer.step() on rank 0 alone": ("steps on one rank", FSDP2, "the script", "optimizer.step()"),
    "optimizer.step() forgotten": ("no step", FSDP1, "the script", "accelerator.backward(loss * scale"),
    "another learning rate on each rank": ("rates apart", FSDP2, "the script", "model.parameters(), lr=rate"),
    "another learning rate on each rank, under FSDP1": (
        "rates apart", FSDP1, "the script", "model.parameters(), lr=rate",
    ),
    "zero_grad() forgotten": ("never cleared", FSDP2, "the script", "optimizer.step()"),
    "zero_grad() forgotten, under FSDP1": ("never cleared", FSDP1, "the script", "optimizer.step()"),
    "another seed on each rank": (
        "other seeds", FSDP2 | {"fsdp_cpu_ram_efficient_loading": False}, "the script", "model, optimizer, loader)",
    ),
    "another seed on each rank, under FSDP1": (
        "other seeds", FSDP1 | {"fsdp_sync_module_states": False}, "the script", "model, optimizer, loader)",
    ),
    "torch.save of shards": ("torch saves shards", FSDP2, "the script", "torch.save("),
    "torch.save of shards, under FSDP1": ("torch saves shards", FSDP1, "the script", "torch.save("),
    "local tensors saved as a model": ("saves local tensors", FSDP2, "the script", "save_file({name"),
    "local tensors in a sharded checkpoint": ("checkpoints local tensors", FSDP2, "the script", "checkpoint.save({"),
    "one rank's values, and zeros": ("saves a part, and zeros", FSDP2, "the script", "# as a model"),
    "whole weights summed over ranks": ("sums whole weights", FSDP2, "the script", "# as a model"),
    "a state dict from before training": ("state dict from before training", FSDP2, "the script", "# as a model"),
    "names of a wrapper": ("wrapped names", {}, "the script", "save_model(model"),
    "names of PEFT in a model's folder": ("adapted model", FSDP2, "the script", "model.save_pretrained(FOLDER"),
    "flat weights saved": ("flat weights", FSDP1, "the script", "accelerator.save(state, f"),
    "one file written by all ranks": ("one file by all ranks", FSDP2, "the script", "torch.save(accelerator.get_"),
    "whole weights loaded after prepare": ("loads whole weights", FSDP2, "the script", "model.load_state_dict("),
    "weights changed after evaluation": ("weights after evaluation", FSDP2, "the script", "parameter.copy_(average)"),
    "two optimizers saved": ("two optimizers", FSDP1, "the script", "# with both"),
    "two optimizers saved, under FSDP2": ("two optimizers", FSDP2, "the script", "# with both"),
    "an attribute of a wrapped model": ("attribute of a wrapped model", {}, "the script", "model.config.use_cache"),
    "a misspelt method": ("method of no model", FSDP2, "the script", "model.prepare_for_traning()"),
    "a loss that is NaN": ("loss is NaN", FSDP1, "the script", "accelerator.backward(loss * scale"),
    "a tracker that isn't installed": ("tracker", FSDP2, "the script", "log_with="),
    "clipping before backward": ("clips before backward", FSDP2, "the script", "accelerator.clip_grad_norm_"),
    "clipping by another of torch's functions": ("clips by another function", FSDP1, "the script", "optimizer.step()"),
    "no_sync around every step": ("not synced", FSDP2, "the script", "synced.enter_context("),
    "no_sync around every step, under FSDP1": ("not synced", FSDP1, "the script", "optimizer.step()"),
    "no_sync around every step, under DDP": ("not synced", {}, "the script", "synced.enter_context("),
    "no_sync around every step, and weights that are compared": (
        "not synced, but compared", {}, "the script", "synced.enter_context(",
    ),
    "gradients reduced in the first micro-batch alone": (
        "syncs the first", FSDP2, "the script", "set_requires_gradient_sync(",
    ),
    "an optimizer that is not prepared": ("optimizer not prepared", {}, "the script", "optimizer.step()"),
    "trained weights that FSDP ignores": ("head ignored", FSDP1, "the script", "prepare(model, optimizer, loader)"),
    "losses not divided by the accumulation steps": ("not divided", FSDP1, "the script", "loss.backward()"),
    "losses divided twice": ("divided twice", FSDP2, "the script", "accelerator.backward(loss / ACCUMULATED)"),
    "losses divided by the tokens of all ranks and micro-batches, and again": (
        "tokens of all, divided", FSDP2, "the script", "# which divides it again",
    ),
    "zero_grad() before the step": ("cleared before the step", FSDP2, "the script", "optimizer.step()"),
    "a learning rate of 0": ("rate of 0", FSDP1, "the script", "optimizer.step()"),
    "a rate that ends too early": ("rate ends early", FSDP2, "the script", "LinearLR("),
    "a rate that rises again": ("rate rises again", FSDP2, "the script", "T_max=4"),
    "a rate that is left before its end": ("rate for all ranks", FSDP2, "the script", "optimizer.optimizer, moves"),
    "parts of a stream, prepared": ("parts of a stream", FSDP2, "the script", "DataLoader(Stream("),
    "a scheduler of another optimizer": ("scheduler of another optimizer", FSDP1, "the script", "ConstantLR("),
    "no weight that needs gradients": ("nothing trained", FSDP2, "the script", "optimizer.step()"),
    "gradients cleared with each micro-batch": ("each batch cleared", FSDP2, "the script", "set_to_none=NAME"),
    "an epoch's last batch without a step": ("batch left over", {}, "the script", "optimizer.step()"),
    "a state before prepare": ("loads before prepare", FSDP2, "the script", "accelerator.load_state(MODEL)"),
    "a step before all its batches": (
        "steps early", FSDP2, "gradient_accumulation_steps", "accelerator.backward(loss * scale)",
    ),
    "gradients summed again": ("summed again", {}, "the script", "all_reduce(parameter.grad)"),
    "a learned weight of a loss, not prepared, under FSDP2": (
        "learned weight of a loss", FSDP2, "the script", "prepare(model, optimizer, loader)",
    ),
    "a NaN loss replaced": ("NaN hidden", FSDP2, "the script", "torch.nan_to_num(model"),
    "a NaN loss replaced after a step": ("NaN hidden late", FSDP2, "the script", "torch.nan_to_num(mean)"),
    "a NaN loss masked after a step": ("NaN masked late", FSDP2, "the script", "torch.where(mean.isnan()"),
    "a number instead of a NaN loss": ("NaN left out late", FSDP2, "the script", "accelerator.backward(loss * scale)"),
    "NaN gradients replaced": ("NaN replaced", {}, "the script", "nan_to_num_()"),
    "evaluation mode on one rank": ("evaluates on", FSDP2, "the script", "accelerator.backward(loss * scale)"),
    "evaluation mode to the end": ("stays in evaluation", FSDP2, "the script", "# and no train()"),
    "a loss times the number of ranks": ("times ranks", {}, "the script", "accelerator.backward(loss * scale)"),
    "a forward pass past the wrapper": ("past the wrapper", {}, "the script", "model.module("),
    "a method past the wrapper": ("method past the wrapper", {}, "the script", "head.module.predict("),
    "a learned weight of a loss, not prepared": ("learned weight of a loss", {}, "the script", "loss = scaled(loss)"),
    "weights drawn again on a rank": ("begins apart", FSDP2, "the script", ".normal_()"),
    "gradients summed over ranks": ("sums over ranks", {}, "the script", "accelerator.backward(loss * scale)"),
    "gradients that one rank alone changes": ("noise on a rank", FSDP2, "the script", ".add_(torch.tensor"),
    "a step that one rank skips": ("skips a step", {}, "the script", "optimizer.step()"),
    "steps after other batches on each rank": ("other batches", {}, "the script", "optimizer.step()"),
    "a schedule of each rank's own, under DDP": ("rate of each rank", {}, "the script", "scheduler.step()"),
    "weights unfrozen after DDP's wrap": ("unfrozen copies", {}, "the script", "# after DDP has wrapped it"),
    "weights unfrozen after DDP's wrap, later": ("unfrozen copies late", {}, "the script", "# that DDP had frozen"),
    "weights that rank 0 alone reloads": ("reloads", {}, "the script", "model.load_state_dict(best)"),
    "no_sync from the third step on": ("not synced late", {}, "the script", "accelerator.backward(loss * scale)"),
    "weights that rank 0 alone changes": ("rank 0 writes", FSDP2, "the script", ".mul_(1.1)"),
}  # fmt: skip
DOCS = " ".join((ROOT / "docs/rehearse.md").read_text().split())


def in_docs(message: str) -> bool:
    """Whether docs/rehearse.md shows this line, whatever the paths, the numbers and torch's collectives are."""
    plain = re.sub(r"/\S+/(saved|mistaken\.py)(:\d+)?", lambda at: at[1], message)
    shown, plain_text = (re.sub(r"waits in \w+", "waits", re.sub(r"[\d,]+", "N", text)) for text in (DOCS, plain))
    return plain_text in shown


@pytest.mark.slow(but=12)
@pytest.mark.parametrize("name", BY_SCRIPT)
def test_of_the_script(name: str, tiny_model: Path, tmp_path: Path) -> None:
    mistake, fsdp, key, line = BY_SCRIPT[name]
    failed = rehearsed(tmp_path, tiny_model, mistake, fsdp)["steps"][-1]
    assert not failed["passed"]
    assert failed["key"] == key, failed
    assert name in DOCS
    assert in_docs(failed["said"]), failed
    assert "/ranks/" not in failed["output"]
    if mistake == "adapter":  # as TRL's sft.py --use_peft leaves one
        assert "with 0 tensors" in failed["said"]
        assert "PEFT" in failed["fix"]
    if line:
        match = AT.search(failed["line"])
        assert match, failed
        assert abs(int(match[1]) - line_of(line)) <= 2


def test_a_count_that_fsdp_rounds_is_a_mistake(tiny_model: Path, tmp_path: Path) -> None:
    """It casts what the model's forward takes to bfloat16, which has no 271: all gradients are 271/272 of the right."""
    failed = rehearsed(tmp_path, tiny_model, "count in forward", FSDP2, mixed_precision="bf16")["steps"][-1]
    assert (failed["passed"], failed["key"]) == (False, "mixed_precision")
    assert "gradients are 0.99" in failed["said"]
    assert in_docs(failed["said"])


@pytest.mark.parametrize("fsdp", [FSDP1 | {"fsdp_sync_module_states": True}, FSDP2], ids=["fsdp1", "fsdp2"])
def test_other_seeds_are_no_mistake_where_rank_0_sends_its_weights(
    fsdp: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    """As FSDP1's syncing does, and Accelerate's loading on rank 0, which FSDP2 has where no key says otherwise."""
    report = rehearsed(tmp_path, tiny_model, "other seeds", fsdp)
    assert report["passed"], report


def mistakes_of(*events: tuple[str, dict[str, Any]]) -> list[str]:
    """The mistakes of a script of two ranks, of which each told the first event, or one told each."""
    others = [] if events[0][0] == "trained" else [trained()]
    event_rows = [
        (0, *events[0]),
        (1, *events[-1]),
        *((rank, *event) for event in [("began", {}), *others] for rank in (0, 1)),
    ]
    return [
        event.what
        for event in mistakes.find([RankEvent(rank, 0.0, kind, content) for rank, kind, content in event_rows])
    ]


def trained(**values: int | bool) -> tuple[str, dict[str, Any]]:
    """What a rank told at its end."""
    counts = {"optimizers": 1, "backwards": 2, "steps": 2, "common_steps": 2, "kept": False, "not_numbers": 0}
    return "trained", {**counts, "backward_line": "", "hidden_at": "", **values}


def test_the_last_lines_of_a_script_are_few_and_short() -> None:
    printed = "\n".join(f"line {number}" for number in range(9)) + "\n\n 1%\r100%\n" + "a" * 500
    assert own_script.last_lines(printed).split("\n") == ["line 6", "line 7", "line 8", "100%", "a" * 160]
    assert own_script.last_lines("") == ""


def test_lines_of_no_file_are_not_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPT.parent)
    monkeypatch.setattr("sys.argv", [SCRIPT.name])
    scope: dict[str, Any] = {"line_of_stack": script.line_of_stack, "_getframe": sys._getframe}
    exec(compile("line = line_of_stack(_getframe())", "<frozen runpy>", "exec"), scope)
    assert "<frozen" not in scope["line"]


def test_gradients_alone_may_be_what_a_script_wants() -> None:
    none = {"steps": 0, "common_steps": 0}
    assert mistakes_of(trained(**none, kept=True))
    assert not mistakes_of(trained(**none, kept=True, optimizers=0))  # as for maps of what a model looks at
    assert not mistakes_of(trained(**none, kept=False))  # updated by hand, or loaded
    assert not mistakes_of(trained())


def test_weights_in_no_optimizer_may_be_meant() -> None:
    def is_reported(trained: int, still: tuple[list[str], list[str]] = (["head", "a"], ["head"])) -> bool:
        content = {"uncovered": ["head"], "trained": trained, "line": "", "cleared": False}
        event_rows = [
            RankEvent(rank, 0.0, "weights", {"moved": True, "still": names}) for rank, names in enumerate(still)
        ]
        event_rows.append(RankEvent(0, 0.0, "moved", {}))  # of a rank that had waited
        return bool(list(repeated.differences([RankEvent(0, 0.0, "repeated", content), *event_rows])))

    assert is_reported(3)
    assert not is_reported(2)  # a head alone is trained
    assert not is_reported(3, (["head"], []))  # later, or by the script


def test_weights_may_be_left_out_of_optimizers_on_purpose() -> None:
    def is_reported(count: int, trained: tuple[str, ...] = (), thawed: tuple[str, ...] = ()) -> bool:
        content = {"kept": ["head"], "trained": list(trained), "thawed": list(thawed), "count": count}
        content |= {"strange": 0, "added_at": ""}
        return bool(list(effects.mistakes([RankEvent(0, 0.0, "uncovered", content)])))

    assert is_reported(3)
    assert not is_reported(2)  # a head alone is trained
    assert is_reported(2, thawed=("head",))
    assert not is_reported(3, trained=("head",))  # on another rank


def test_a_loss_may_be_nan_where_a_batch_has_no_labels() -> None:
    def is_reported(passes: int, hidden: int, in_a_row: int) -> bool:
        content = {"passes": passes, "hidden": hidden, "in_a_row": in_a_row, "by": "where", "line": ""}
        return bool(list(effects.mistakes([RankEvent(0, 0.0, "hidden-nan", content)])))

    assert is_reported(20, 3, 3)
    assert is_reported(4, 2, 0)
    assert not is_reported(2, 1, 1)
    assert not is_reported(20, 6, 2)


Clears = Callable[[list[torch.optim.Optimizer], list[torch.nn.Module]], object]
CLEARED: dict[str, tuple[Clears, bool]] = {
    "never": (lambda optimizers, models: None, True),
    "by the other optimizer": (lambda optimizers, models: optimizers[1].zero_grad(), True),
    "to None": (lambda optimizers, models: optimizers[0].zero_grad(), False),
    "to zeros": (lambda optimizers, models: optimizers[0].zero_grad(set_to_none=False), False),
    "by the model": (lambda optimizers, models: models[0].zero_grad(), False),
    "faded": (lambda optimizers, models: [p.grad.mul_(0.9) for p in models[0].parameters() if p.grad is not None],
              False),
}  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["after the step", "before backward"])
@pytest.mark.parametrize("how", CLEARED)
def test_gradients_may_be_cleared_in_many_ways(
    how: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches make a step, and another optimizer steps with the same models in turn."""
    monkeypatch.setenv("ACCEL_FSDP_EVENTS", str(tmp_path))
    observed = gradients.ObservedGradients()
    clears, is_kept = CLEARED[how]
    models: list[torch.nn.Module] = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        if late and step:
            clears(optimizers, models)
        for _ in range(2):
            loss = models[1](models[0](torch.ones(2))).square().sum()
            observed.before_backward()
            loss.backward()
            observed.ran_backward()
        for optimizer in optimizers[: 2 - step % 2]:
            observed.before_step(optimizer)
            optimizer.step()
        if not late:
            clears(optimizers, models)
    first = [event.content["kept"] for event in read(tmp_path) if event.content["step"] == 2][:1]
    assert first == [is_kept]


@pytest.mark.parametrize(
    ("steps", "cleared", "is_left"),
    [
        ((2, 4, 7, 9), (), True),
        ((2, 4, 6, 8, 10), (), False),
        ((2, 4, 5, 7, 9, 10), (), False),
        ((2, 4, 7), (5,), False),
    ],
    ids=["left over", "count goes on", "step at the end", "cleared at the end"],
)
def test_gradients_may_be_kept_over_epochs(
    steps: tuple[int, ...], cleared: tuple[int, ...], is_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of epochs of five batches."""
    monkeypatch.setenv("ACCEL_FSDP_EVENTS", str(tmp_path))
    rows = drawn_rows.ObservedRows()
    observed, loader = gradients.LeftoverGradients(rows), drawn_rows._Loader()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for number in range(1, 11):
        if number % 5 == 1:
            rows.last = drawn_rows._Pass(loader, weakref.ref(weight), drawn_rows.DrawnRows("", ""))
        observed.before_backward()
        weight.square().sum().backward()
        observed.ran_backward()
        if number in steps:
            observed.before_step(optimizer)
            optimizer.step()
        if number in (*steps, *cleared):
            optimizer.zero_grad()
    assert bool(read(tmp_path)) == is_left


def test_ranks_that_run_other_units_are_told_before_backward_hangs() -> None:
    def units(*names: str) -> RankEvent:
        content = {"names": ["", *names], "lines": ["mine.py:7", *(f"mine.py:{name}" for name in names)]}
        return RankEvent(int(names[0]), 0.0, "units", content)

    (mistake,) = mistakes.find([units("0", "2"), units("1", "2")])
    assert (mistake.what, mistake.key) == (
        "the ranks run different units: rank 0 runs 0 where rank 1 runs 1",
        "the script",
    )
    assert mistake.line == "mine.py:0"
    prepared = RankEvent(0, 0.0, "prepared", {"holding": asdict(measure(torch.nn.Linear(2, 2))), "shared": []})
    (by_yaml,) = mistakes.find([prepared, units("0", "2"), units("1", "2")])
    assert by_yaml.key == "fsdp_transformer_layer_cls_to_wrap"


def test_rates_that_part_later_are_the_schedules() -> None:
    def settings(rank: int, step: int, rate: float) -> RankEvent:
        groups, lines = [{"lr": [rate]}], {"line": "mine.py:1", "moved_at": "mine.py:2"}
        return RankEvent(rank, 0.0, "settings", {"step": step, "groups": groups, **lines})

    apart = [settings(0, 2, 0.1), settings(1, 2, 0.2)]
    (made,), (moved,) = (
        [mistake.line for mistake in mistakes.find(events)]
        for events in (apart, [settings(0, 1, 0.1), settings(1, 1, 0.1), *apart])
    )
    assert (made, moved) == ("mine.py:1", "mine.py:2")


def test_copies_may_part_for_a_while() -> None:
    def is_reported(last: float, end: float, *more: str) -> bool:
        def sums(values: tuple[float, float]) -> dict[str, Any]:
            kinds = {kind: {"head": [value, 1.0]} for kind, value in zip(("last", "end"), values, strict=True)}
            return {"number": 1, "unfrozen": [], "unfrozen_at": "", "backward_line": "", **kinds}

        both = [(rank, "copies", sums(values)) for rank, values in enumerate([(0.1, 0.1), (last, end)])]
        others = [(rank, kind, {}) for rank in (0, 1) for kind in ("began", *more)]
        return bool(list(replicas.mistakes([RankEvent(rank, 0.0, *event) for rank, *event in both + others])))

    assert is_reported(0.2, 0.2)
    assert not is_reported(0.1, 0.2)  # a rank that loads its best weights, to evaluate them
    assert not is_reported(0.2, 0.1)  # one that had fewer batches, to which DDP's join sends the weights
    assert not is_reported(0.2, 0.2, "averaged")


def test_a_rank_may_have_a_model_of_its_own() -> None:
    assert mistakes_of(trained(), trained(common_steps=1))
    assert not mistakes_of(trained(steps=5, backwards=5), trained())


def test_ranks_that_hang_may_still_have_stepped_apart() -> None:
    def losses(*steps: int) -> list[tuple[str, dict[str, Any]]]:
        return [("loss", {"value": 1.0, "step": step}) for step in steps]

    def is_reported(ours: list[tuple[str, dict[str, Any]]], theirs: list[tuple[str, dict[str, Any]]]) -> list[str]:
        began = [("began", {})]
        both = [(rank, *event) for rank, several in enumerate((ours, theirs)) for event in began + several]
        return [mistake.what for mistake in mistakes.find([RankEvent(rank, 0.0, *event) for rank, *event in both])]

    assert is_reported(losses(1, 2), losses(1, 1))
    assert not is_reported(losses(1, 2), losses(1, 2))
    assert not is_reported(losses(1, 2), losses(1))  # which hangs in its second backward
    assert not is_reported(losses(1, 1, 2), losses(1, 2))  # rank 0 has a model of its own


def begun(total: float | None, ranks: tuple[int, ...] = (0, 1)) -> tuple[str, dict[str, Any]]:
    """What a rank told of the one weight that it began with."""
    sums = None if total is None else [total, 1.0]
    return "begun", {"units": [{"ranks": list(ranks), "weights": [["lm_head.weight", sums]]}], "line": ""}


def test_weights_that_are_loaded_later_may_begin_apart() -> None:
    assert mistakes_of(begun(1), begun(2))
    assert not mistakes_of(begun(1), begun(1))
    assert not mistakes_of(begun(1), begun(1 + 1e-6))  # rounded elsewhere
    assert not mistakes_of(begun(1), begun(None))  # rank 0 sent its own
    assert not mistakes_of(begun(1, (0,)), begun(2, (1,)))  # experts: each rank has others


def test_a_taken_port_is_not_the_scripts_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import torch\ntorch.distributed.init_process_group('gloo')\n")
    values = yaml.safe_load(yaml_file(tmp_path, {}).read_text()) | {"num_processes": 2}
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        ports = iter([other.getsockname()[1], host.free_port()])
        monkeypatch.setattr(host, "free_port", lambda: next(ports))
        outcome = job.Rehearsed(tmp_path, script, cold=True).launch("script", JobConfig(values), ())
    assert outcome.code == 0, outcome.output


def still(rank: int, collective: str, line: str = "mine.py:7", long: bool = False) -> RankEvent:
    return RankEvent(rank, 1.0, "still", {"collective": collective, "line": line, "stack": "", "long": long})


ENDED = RankEvent(1, 0.5, "ended", {"code": 0, "error": "", "line": ""})
STANDS: dict[str, tuple[list[RankEvent], bool]] = {
    "one has ended": ([still(0, "barrier"), ENDED, RankEvent(1, 2.0, "moved", {"moved": True})], True),
    "at different lines": ([still(0, "barrier"), still(1, "barrier", "mine.py:9")], True),
    "in different collectives": ([still(0, "barrier"), still(1, "all_gather")], True),
    "in one, on a slow machine": ([still(0, "all_gather"), still(1, "all_gather")], False),
    "in one, for long": ([still(0, "all_gather", long=True), still(1, "all_gather", long=True)], True),
    "one goes on": ([still(0, "barrier"), still(1, "all_gather"), RankEvent(1, 2.0, "went-on", {})], False),
    "one is slow outside": ([still(0, "barrier", long=True), RankEvent(1, 0.0, "loss", {})], False),
    "one downloads": ([still(0, "barrier", long=True), still(1, "", long=True)], True),
    "both download": ([still(0, "", long=True), still(1, "", long=True)], False),
}


@pytest.mark.parametrize("name", STANDS)
def test_a_hang_is_sure_early_where_nothing_can_move(name: str) -> None:
    events, is_hang = STANDS[name]
    assert (job.hang_in(events, 2) is not None) == is_hang


def test_a_loop_without_an_end_is_named_where_time_is_over() -> None:
    events = [ENDED, RankEvent(0, 9.0, "at", {"collective": "", "line": "mine.py:4", "stack": ""})]
    failure = blame.of_hang(replace(job.hang_of(events), in_time=False), events)
    assert failure.what == "the launch took too long and was ended: rank 0 is at mine.py:4; rank 1 has ended"
    assert (failure.key, failure.line) == ("the script", "mine.py:4")
    slow = [RankEvent(rank, 9.0, "at", {"collective": "", "line": "mine.py:4", "stack": ""}) for rank in (0, 1)]
    assert blame.of_hang(replace(job.hang_of(slow), in_time=False), slow).key == "--timeout"


def test_errors_that_all_ranks_skip_or_that_end_the_script_are_its_own_affair() -> None:
    raised = "raised", {"error": "RuntimeError: out of memory", "line": "mine.py:7"}
    assert mistakes_of(raised, ("loss", {"value": 1.0, "step": 1}))
    assert not mistakes_of(raised)
    failed = RankEvent(0, 2.0, "failed", {"follows": ["ValueError: no step", raised[1]["error"]]})
    events = [RankEvent(0, 1.0, *raised), failed, *(RankEvent(rank, 0.0, "began", {}) for rank in (0, 1))]
    assert not list(mistakes.find(events))


def test_the_end_of_a_long_output_begins_at_a_line() -> None:
    lines = [f"line {number}" for number in range(1000)]
    tail = Outcome(1, [], "\n".join(lines)).tail
    assert tail.splitlines() == lines[-len(tail.splitlines()) :]
    assert Outcome(1, [], "short\nlog").tail == "short\nlog"
