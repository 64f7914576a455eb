"""The predicted highest point of forward and backward, against what torch's profiler counts of real FSDP on the CPU."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, run
from memory_accuracy import tapes_of
from packaging.version import Version

from accel_fsdp.job import Job, Layout, Recipe
from accel_fsdp.prediction import capacity
from accel_fsdp.prediction.memory import GRADIENTS, OPTIMIZER, PARAMETERS, ModelShape, engines, step, variant_of

RANKS = 4  # as in tracked.py
SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
SIZES = {**SMALL, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": False},
    "tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "classifier": {"model_type": "llama", **SIZES, "architectures": ["LlamaForSequenceClassification"]},
    "qwen3": {"model_type": "qwen3", **SIZES, "hidden_size": 256, "vocab_size": 1024, "head_dim": 64},
    "gemma2": {"model_type": "gemma2", **SIZES, "head_dim": 32, "sliding_window": 4096},
    "moe": {
        **{"model_type": "qwen3_moe", **SIZES, "moe_intermediate_size": 64, "num_experts": 8},
        **{"num_experts_per_tok": 2, "head_dim": 32, "tie_word_embeddings": False},
    },
}
WITHIN = 0.025
"""Eager attention's mask is counted to the end of the step, and only the first block's: Gemma 2 has one more."""


def settings() -> Iterator[dict[str, Any]]:
    full = {"precision": "no", "dtype": "float32"}
    mixed = {"precision": "bf16", "dtype": "float32"}
    for engine, strategy, checkpointing in product(("fsdp1", "fsdp2"), (1, 2), ("none", "full", "reentrant")):
        how = {"engine": engine, "strategy": strategy, "checkpointing": checkpointing}
        yield {"model": "llama", "rows": 2, "length": 128, **how, **full}
        if checkpointing != "reentrant":
            yield {"model": "tied", "rows": 1, "length": 64, **how, **mixed}
    for checkpointing, dtypes in (("none", full), ("full", full), ("full", mixed)):
        how = {"engine": "fsdp1", "strategy": 3, "checkpointing": checkpointing}
        yield {"model": "llama" if dtypes is full else "tied", "rows": 1, "length": 64, **how, **dtypes}
    for engine, strategy, accumulation in (*product(("fsdp1", "fsdp2"), (1, 2), (2, 3)), ("ddp", 3, 1), ("ddp", 3, 2)):
        how = {"engine": engine, "strategy": strategy, "checkpointing": "none", "accumulation": accumulation}
        yield {"model": "llama", "rows": 2, "length": 128, **how, **full}
    for engine, checkpointing in product(("fsdp2", "ddp"), ("none", "full")):
        how = {"engine": engine, "strategy": 1, "checkpointing": checkpointing}
        yield {"model": "classifier", "rows": 2, "length": 128, **how, **full}
    for model, strategy, checkpointing in product(("qwen3", "gemma2", "moe"), (1, 2), ("none", "full")):
        how = {"engine": "fsdp2", "strategy": strategy, "checkpointing": checkpointing}
        yield {"model": model, "rows": 1, "length": 64, **how, **full}
    for model, strategy, dtypes in product(("llama", "tied", "qwen3"), (1, 2), (full, mixed)):
        how = {"engine": "fsdp2", "strategy": strategy, "checkpointing": "full", "offloads_inputs": True}
        yield {"model": model, "rows": 2, "length": 512, **how, **dtypes}


def name(setting: dict[str, Any]) -> str:
    keys = ("model", "engine", "strategy", "checkpointing", "accumulation", "offloads_inputs", "precision")
    return "-".join(str(setting[key]) for key in keys if key in setting)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What one rank held, by setting."""
    folder = tmp_path_factory.mktemp("tracked")
    asked = [{**setting, "config": CONFIGS[setting["model"]]} for setting in settings()]
    words = [sys.executable, ROOT / "tests" / "tracked.py", json.dumps(asked), folder]
    finished = run(words, CUDA_VISIBLE_DEVICES="")
    assert finished.code == 0, finished.output[-3000:]
    line = next(line for line in finished.output.splitlines() if line.startswith("TRACKED "))
    tracked = json.loads(line.removeprefix("TRACKED "))
    return {name(setting): result for setting, result in zip(settings(), tracked, strict=True)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def predicted(setting: dict[str, Any]) -> tuple[step.Prediction, ModelShape]:
    from transformers import AutoConfig

    keys = ("rows", "length", "checkpointing", "precision", "dtype")
    recipe = Recipe(
        **{key: setting[key] for key in keys},
        attention="eager",
        accumulation=setting.get("accumulation", 1),
        offloads_inputs=setting.get("offloads_inputs", False),
    )
    layout = Layout(setting["engine"], setting["strategy"], RANKS, RANKS)
    options = dict(CONFIGS[setting["model"]])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    shape, tapes = tapes_of(setting["model"], config, variant_of(recipe, layout.engine))
    return step.predict(shape, tapes, recipe, layout), shape


@pytest.mark.slow(but=8)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("setting", list(settings()), ids=name)
def test_the_highest_point_is_where_a_real_step_has_it(
    setting: dict[str, Any], seen: dict[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan counts the outputs of all-gathers as torch before 2.15 frees them."""
    installed = Version(metadata.version("torch")).release
    monkeypatch.setattr(engines.Fsdp2, "frees_output_late", installed < (2, 15))
    real = seen[name(setting)]
    prediction, _ = predicted(setting)
    first, last = prediction.moments[0].live, prediction.moments[-1].live
    assert first[PARAMETERS] == real["parameters"]
    assert last[GRADIENTS] == real["gradients"]
    peak = max(moment.total - moment.live[OPTIMIZER] for moment in prediction.moments[:-1])
    assert abs(peak / real["peak"] - 1) <= (0.05 if setting["model"] == "gemma2" else WITHIN), (peak, real["peak"])


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("setting", [setting for setting in settings() if "offloads_inputs" in setting], ids=name)
def test_offloaded_inputs_are_in_the_hosts_memory(setting: dict[str, Any], seen: dict[str, dict[str, int]]) -> None:
    _, shape = predicted(setting)
    recipe = Recipe(**{key: setting[key] for key in ("rows", "length", "precision", "dtype", "checkpointing")})
    with_inputs, alone = (
        capacity.host(shape, Job(Layout("fsdp2", 1, RANKS, RANKS), replace(recipe, offloads_inputs=offloads))).offload
        for offloads in (True, False)
    )
    assert with_inputs - alone == RANKS * seen[name(setting)]["host"]
