"""What a rank holds under tensor and expert parallelism: by the planner, and of real ranks or one of a fake group.

The models are small, so one layer's gathered experts are a large part of them.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_accuracy import tapes_of

from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import build
from accel_fsdp.prediction.memory import GRADIENTS, OPTIMIZER, PARAMETERS, shards, step, variant_for
from accel_fsdp.prediction.tracing.model_shape import shape_of

TESTS = Path(__file__).parents[1]
SIZES = {
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "tie_word_embeddings": False},
}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", **SIZES, **EXPERTS},
}
MESHES = {
    "tp 2": {"tp_size": 2},
    "tp 2 x fsdp 2": {"tp_size": 2, "fsdp_size": 2},
    "fsdp 2, ep 2": {"fsdp_size": 2, "ep_size": 2},
    "tp 2, ep 2": {"tp_size": 2, "ep_size": 2},
    "tp 2 x fsdp 2, ep 4": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
}
ODD = {
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 72},
    **{"hidden_size": 36, "intermediate_size": 48, "moe_intermediate_size": 24, "max_position_embeddings": 64},
}
FEW = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
PADDED: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **ODD, "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", **ODD, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **ODD, **FEW, "tie_word_embeddings": False},
    "mixtral": {"model_type": "mixtral", **ODD, **FEW, "tie_word_embeddings": False},
}
"""Models whose shards are padded."""


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
    copies, divided, tensor = (sizes.get(f"{axis}_size", 1) for axis in ("dp_replicate", "fsdp", "tp"))
    ranks, mesh = ranks_of(sizes), {"dp_replicate": copies, "dp_shard": divided, "tp": tensor, "cp": 1, "sp": 1}
    return Layout(**{**vars(Layout.fsdp2(True, ranks, ranks).on_mesh(mesh)), "experts": sizes.get("ep_size", 1)})


def ranks_of(sizes: dict[str, int]) -> int:
    return math.prod(sizes.get(f"{axis}_size", 1) for axis in ("dp_replicate", "fsdp", "tp"))


def held(ranks: int, folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    """The bytes that one of so many real ranks holds after a step, by model and mesh."""
    meshes = {name: sizes for name, sizes in MESHES.items() if ranks_of(sizes) == ranks}
    asked = {
        kind: {
            "config": config,
            "meshes": {
                name: sizes for name, sizes in meshes.items() if "ep_size" not in sizes or "num_experts" in config
            },
        }
        for kind, config in PADDED.items()
    }
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(TESTS / "held_axes.py")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(TESTS.parent)}
    return _reported("HELD", [*words, json.dumps(asked), str(folder)], environment)


def resting(kind: str, mesh: str) -> dict[str, int]:
    """The same, as the planner has it."""
    from transformers import AutoConfig

    options, recipe, layout = dict(PADDED[kind]), Recipe(precision="no"), layout_of(MESHES[mesh])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    stored, optimizer, _ = shards.resting_bytes(shape_of(kind, config, build(kind, config)), recipe, layout)
    return {"parameters": stored, "optimizer": optimizer}


def _reported(word: str, words: Sequence[str], environment: Mapping[str, str] | None = None) -> Any:
    """What a Python program prints as JSON after this word."""
    finished = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in finished.stdout.splitlines() if f"{word} " in line]
    if not lines:
        raise RuntimeError(finished.stderr[-3000:])
    return json.loads(lines[0].partition(f"{word} ")[2])


def measured(asked: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, int]]:
    """What one rank held in each setting."""
    tracked: list[dict[str, int]] = _reported(
        "TRACKED", [str(TESTS / "tracked_axes.py"), json.dumps(asked), str(folder)]
    )
    return tracked


def predicted(setting: dict[str, Any]) -> dict[str, int]:
    """The same, as the planner has it."""
    from transformers import AutoConfig

    keys = ("rows", "length", "checkpointing", "precision", "dtype")
    recipe = Recipe(**{key: setting[key] for key in keys}, attention="eager")
    layout, options = layout_of(setting["mesh"]), dict(setting["config"])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    shape, tapes = tapes_of(setting["model"], config, variant_for(recipe, layout))
    prediction = step.predict(shape, tapes, recipe, layout)
    return {
        "parameters": prediction.moments[0].live[PARAMETERS],
        "gradients": prediction.moments[-1].live[GRADIENTS],
        "peak": max(moment.total - moment.live[OPTIMIZER] for moment in prediction.moments[:-1]),
    }
