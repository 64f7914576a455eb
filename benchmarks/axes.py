"""Peaks under tensor and expert parallelism, predicted against a rank's of the CPU: `python benchmarks/axes.py`.

`--write` keeps the table in RESULTS.md. The models are small, so one layer's gathered experts are a large part of them.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from older_libraries import tapes_of
from results import keep

from accel_fsdp.config import Engine
from accel_fsdp.hardware import gpus
from accel_fsdp.job import Job, Layout, Recipe
from accel_fsdp.prediction import capacity
from accel_fsdp.prediction.memory import GRADIENTS, OPTIMIZER, PARAMETERS, step, variant_for
from accel_fsdp.prediction.speed import step_time
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.units import GIB

TRACKED = Path(__file__).parents[1] / "tests" / "tracked_axes.py"
SIZES = {
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "tie_word_embeddings": False},
}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 32},
    "qwen3_moe": {"model_type": "qwen3_moe", **SIZES, **EXPERTS, "head_dim": 32},
    "mixtral": {"model_type": "mixtral", **SIZES, **EXPERTS},
}
MESHES = {
    "tp 2": {"tp_size": 2},
    "tp 2 x fsdp 2": {"tp_size": 2, "fsdp_size": 2},
    "tp 2 x replicate 2": {"dp_replicate_size": 2, "tp_size": 2},
    "fsdp 2, ep 2": {"fsdp_size": 2, "ep_size": 2},
    "fsdp 4, ep 2": {"fsdp_size": 4, "ep_size": 2},
    "tp 2, ep 2": {"tp_size": 2, "ep_size": 2},
    "tp 2 x fsdp 2, ep 2": {"tp_size": 2, "fsdp_size": 2, "ep_size": 2},
    "tp 2 x fsdp 2, ep 4": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
}


def settings(
    models: Sequence[str], meshes: Sequence[str], batch: tuple[int, int] = (2, 64)
) -> Iterator[dict[str, Any]]:
    """Each model on each mesh that it has plans for, with and without checkpointing."""
    for model in models:
        for mesh in meshes:
            for checkpointing in ("none", "full"):
                if "ep_size" in MESHES[mesh] and "num_experts" not in CONFIGS[model]:
                    continue
                how = {"checkpointing": checkpointing, "precision": "no", "dtype": "float32"}
                sizes = {"rows": 2, "length": 64}
                where = {"mesh": MESHES[mesh], "name": mesh}
                yield {"model": model, "config": CONFIGS[model], **where, **how, **sizes}


def layout_of(sizes: dict[str, int]) -> Layout:
    copies, shards, tensor = (sizes.get(f"{axis}_size", 1) for axis in ("dp_replicate", "fsdp", "tp"))
    ranks = math.prod((copies, shards, tensor))
    mesh = {"dp_replicate": copies, "dp_shard": shards, "tp": tensor, "cp": 1, "sp": 1}
    return Layout(**{**vars(Layout.fsdp2(True, ranks, ranks).on_mesh(mesh)), "experts": sizes.get("ep_size", 1)})


def measured(asked: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, int]]:
    """What one rank held in each setting."""
    words = [sys.executable, str(TRACKED), json.dumps(asked), str(folder)]
    finished = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("TRACKED ")]
    if not lines:
        raise RuntimeError(finished.stderr[-3000:])
    found: list[dict[str, int]] = json.loads(lines[0].removeprefix("TRACKED "))
    return found


def predicted(setting: dict[str, Any]) -> dict[str, int]:
    """The same, as the planner has it."""
    from transformers import AutoConfig

    keys = ("rows", "length", "checkpointing", "precision", "dtype")
    recipe = Recipe(**{key: setting[key] for key in keys}, attention="eager")
    layout, options = layout_of(setting["mesh"]), dict(setting["config"])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    shape, tapes = tapes_of(setting["model"], config, variant_for(recipe, layout))
    made = step.predict(shape, tapes, recipe, layout)
    return {
        "parameters": made.moments[0].live[PARAMETERS],
        "gradients": made.moments[-1].live[GRADIENTS],
        "peak": max(moment.total - moment.live[OPTIMIZER] for moment in made.moments[:-1]),
    }


def table(asked: Sequence[dict[str, Any]], real: Sequence[dict[str, int]]) -> Iterator[str]:
    yield "| model | mesh | without checkpointing | with |"
    yield "|---|---|---|---|"
    errors = [predicted(setting)["peak"] / seen["peak"] - 1 for setting, seen in zip(asked, real, strict=True)]
    for place in range(0, len(errors), 2):
        setting = asked[place]
        yield f"| {setting['model']} | {setting['name']} | {errors[place]:+.1%} | {errors[place + 1]:+.1%} |"
    within = sum(abs(error) <= 0.025 for error in errors)
    yield ""
    yield f"{within} of {len(errors)} are within 2.5 %."


PEERS = (
    "Published runs of other frameworks, whose plans and kernels differ: torchtitan also divides the norms' inputs by",
    "sequence and the loss by vocabulary, its second run compiles regions, and NeMo's adapters are fused. A step's",
    "time under tensor parallelism is calibrated by none of them, and is as far off as this table shows.",
)
PUBLISHED: tuple[dict[str, Any], ...] = (
    {
        **{"id": "torchtitan 6a74d747c", "model": "meta-llama/Llama-3.1-8B", "gpu": "B200", "mesh": (2, 2)},
        **{"recipe": Recipe(length=8192), "gib": 67.19, "tokens": 9569},
    },
    {
        **{"id": "torchtitan a364b4b4f", "model": "meta-llama/Llama-3.1-8B", "gpu": "H100", "mesh": (4, 2)},
        **{"recipe": Recipe(length=8192, checkpointing="selective"), "gib": 40.51, "tokens": 6876},
    },
    {
        **{"id": "NeMo AutoModel, 8 GPUs", "model": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "gpu": "H100"},
        **{"mesh": (4, 2), "recipe": Recipe("lora", dtype="bfloat16", rows=2, length=4096, accumulation=4,
                                            checkpointing="full"), "tokens": 1091.85},
    },
    {
        **{"id": "NeMo AutoModel, 16 GPUs", "model": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "gpu": "H100"},
        **{"mesh": (8, 2), "recipe": Recipe("lora", dtype="bfloat16", rows=2, length=4096, accumulation=2,
                                            checkpointing="full"), "tokens": 984.85},
    },
)  # fmt: skip
"""Runs with tensor parallelism whose batch is printed: shards, tensor-parallel ranks, reserved GiB, tokens/s per GPU.

Of the same sources, one prints no length, one has another model, and one keeps what its own graph compiler chooses.
"""


def published() -> Iterator[str]:
    yield "| run | mesh | GiB, predicted of reserved | tokens/s per GPU, predicted of published |"
    yield "|---|---|---|---|"
    for row in PUBLISHED:
        shards, tensor = row["mesh"]
        gpu = gpus.find(row["gpu"])
        layout = Layout(Engine.FSDP2, 1, shards * tensor, 8, tensor=tensor)
        shape, tapes = by_name.read_shape(row["model"], row["recipe"])
        job = Job(layout, row["recipe"])
        made = capacity.predicted(shape, tapes, job, gpu).peak.total / GIB
        speed = step_time(shape, job.recipe, layout, gpu).tokens_per_s_per_gpu
        memory = f"{made:.1f} of {row['gib']:.1f} ({made / row['gib'] - 1:+.0%})" if "gib" in row else "-"
        pace = f"{speed:,.0f} of {row['tokens']:,.0f} ({speed / row['tokens'] - 1:+.0%})"
        yield f"| {row['id']} | tp {tensor} x fsdp {shards} | {memory} | {pace} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    asked = list(settings(list(CONFIGS), list(MESHES)))
    with tempfile.TemporaryDirectory() as folder:
        lines = list(table(asked, measured(asked, Path(folder))))
    print("\n".join(lines))
    if options.write:
        title = "## Peaks under tensor and expert parallelism"
        about = (
            "Highest point of forward and backward on one rank, predicted against torch's profiler on the CPU "
            "(float32, eager attention, 2 x 64 tokens, four layers; `benchmarks/axes.py`). Parameters at rest are "
            "exact. FSDP by transformers gathers and reduces a tied table twice, which isn't counted."
        )
        keep("axes", [title, "", about, "", *lines, "", *PEERS, "", *published()])


if __name__ == "__main__":
    main()
