"""Combinations that fail: engine with optimizer, method, checkpointing and more, each with its reason. Pure.

The linter, the planner, the wizard and the training script all call `clashes(job)`. Unknown parts of a job keep their
defaults, which match no row. Each row was observed on real ranks, or found in the libraries' source (accelerate 1.15,
transformers 5.23, peft 0.21, torch 2.13, bitsandbytes 0.50).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from accel_fsdp.config import Engine
from accel_fsdp.job.job import Job
from accel_fsdp.job.layout import FSDP_KINDS, SHARDING_KINDS

Effect = Literal["stops", "stops when it saves", "trains something else", "saves nothing"]

BITSANDBYTES = re.compile(r"adamw_8bit|.*_bnb(_.*)?|(paged_)?(lion|ademamix|adamw)_(8|32)bit|ademamix")
"""Trainer's optimizers from bitsandbytes (transformers, `_BITSANDBYTES_OPTIMIZERS`), without those of torchao."""
ADAPTABLE = frozenset(
    {
        *("awq", "gptq", "aqlm", "quanto", "eetq", "hqq", "compressed-tensors", "torchao", "fp8", "mxfp8", "sinq"),
        *("bitsandbytes", "bitnet", "fouroversix"),
    }
)
"""Quantisations that Trainer accepts under an adapter (transformers, `HfQuantizer.is_trainable`)."""
ORIGINAL = "the model's 16-bit original"
ADAMW = "--optim adamw_torch_fused"
UNLESS_SFT = ", unless the script is train/sft.py"
"""The ending of a text about a bug that train/sft.py works around."""
QLORA_ZERO = "ZeRO-3 can't partition 4-bit weights, and with ZeRO-1 and ZeRO-2 they are untried"
FLAGS = ("use_dora", "load_in_8bit", "predict_with_generate", "save_only_model")
"""Boolean arguments of a script that the table checks."""


@dataclass(frozen=True)
class Clash:
    """Two or more parts of a job that can't be combined.

    `parts` are the clashing fields of `Job` that a fix can change, so never the engine. `what` is a whole sentence
    without its full stop, `effect` the kind of harm, `why` the consequence, `fix` what to type. `mended` means that
    train/sft.py trains the combination correctly.
    """

    name: str
    parts: tuple[str, ...]
    effect: Effect
    what: str
    why: str
    fix: str
    matches: Callable[[Job], bool]
    mended: bool = False


def clashes(job: Job) -> list[Clash]:
    """The rows of the table that match this job, the worst first."""
    return [clash for clash in TABLE if clash.matches(job)]


def why_not(job: Job, mended: bool = False) -> str:
    """Why training a job fails, in a sentence without its full stop; empty if it doesn't.

    `mended`: the script is train/sft.py, which trains some combinations correctly that others don't.
    """
    if job.engine is Engine.DEEPSPEED and job.method == "qlora":
        return QLORA_ZERO
    failing = (clash for clash in clashes(job) if not (mended and clash.mended))
    return next((f"{clash.what}: {clash.why}" for clash in failing), "")


def names_about(part: str, effect: Effect) -> tuple[str, ...]:
    """The names of the rows about one part of a job alone, with this effect."""
    return tuple(clash.name for clash in TABLE if (clash.parts, clash.effect) == ((part,), effect))


def _optimizer(pattern: str, *engines: Engine) -> Callable[[Job], bool]:
    return lambda job: job.engine in engines and re.fullmatch(pattern, job.optimizer) is not None


def _saved(pattern: str, *engines: Engine) -> Callable[[Job], bool]:
    """Whether checkpoints hold the state of such an optimizer."""
    is_used = _optimizer(pattern, *engines)
    return lambda job: is_used(job) and "save_only_model" not in job.flags


def _flag(name: str, *engines: Engine) -> Callable[[Job], bool]:
    return lambda job: job.engine in engines and name in job.flags


TABLE: tuple[Clash, ...] = (
    Clash(
        "bitsandbytes-fsdp2", ("optimizer",), "stops",
        "bitsandbytes' optimizers can't work on FSDP2's parameters",
        "the first step stops: does not have a sharding strategy registered",
        ADAMW,
        _optimizer(BITSANDBYTES.pattern, Engine.FSDP2),
    ),
    Clash(
        "adafactor-fsdp2", ("optimizer",), "stops",
        "Adafactor can't work on FSDP2's parameters",
        "the first step stops: got mixed torch.Tensor and DTensor", ADAMW,
        _optimizer("adafactor", Engine.FSDP2),
    ),
    Clash(
        "layerwise", ("optimizer",), "stops",
        "layerwise optimizers are for one process",
        "Trainer stops: Layer-wise optimizer does not support DDP", ADAMW,
        _optimizer(".*_layerwise", *SHARDING_KINDS, Engine.DDP),
    ),
    Clash(
        "low-rank-fsdp1", ("optimizer",), "stops",
        "GaLore and APOLLO read the shapes of weights that FSDP1 has flattened",
        "the first step stops: tuple index out of range", ADAMW,
        _optimizer("(galore|apollo)_.*(?<!_layerwise)", Engine.FSDP1),
    ),
    Clash(
        "bitsandbytes-fsdp1", ("optimizer",), "stops when it saves",
        "FSDP1 can't gather the state of bitsandbytes' optimizers",
        "the first checkpoint stops: Boolean value of Tensor is ambiguous",
        ADAMW,
        _saved(BITSANDBYTES.pattern, Engine.FSDP1),
    ),
    Clash(
        "torchao-fsdp1", ("optimizer",), "stops when it saves",
        "FSDP1 can't gather the state of torchao's optimizers",
        "the first checkpoint stops: aten.cat, or invalid python storage", f"{ADAMW}, or fsdp_version: 2",
        _saved("adamw_torch_(8|4)bit", Engine.FSDP1),
    ),
    Clash(
        "adafactor-fsdp1", ("optimizer",), "stops when it saves",
        "Adafactor keeps a number on each rank that FSDP1 wants equal on all",
        "the first checkpoint stops: Rank 1 has different values for RMS", ADAMW,
        _saved("adafactor", Engine.FSDP1),
    ),
    Clash(
        "state-fsdp2", ("optimizer",), "stops when it saves",
        "FSDP2's checkpoints can't hold this optimizer's state",
        "the first checkpoint stops", ADAMW,
        _saved("adagrad|grokadamw|galore_.*(?<!_layerwise)", Engine.FSDP2),
    ),
    Clash(
        "qlora-tpu", ("method",), "stops",
        "bitsandbytes has no TPU kernels", "loading stops", "LoRA, without --load_in_4bit",
        lambda job: job.engine is Engine.TPU and job.method == "qlora",
    ),
    Clash(
        "quantised-full", ("base",), "stops",
        "quantised weights can't be trained themselves", "Trainer stops: attach trainable adapters on top",
        f"--use_peft, or {ORIGINAL}",
        lambda job: job.base != "" and job.method == "full",
    ),
    Clash(
        "quantised-adapter", ("base",), "stops",
        "Trainer trains no adapter on weights that are quantised this way",
        "it stops, or transformers skips a quantisation that it doesn't know", ORIGINAL,
        lambda job: job.base != "" and job.adapter and job.base not in ADAPTABLE,
    ),
    Clash(
        "quantised-twice", ("base",), "stops",
        "weights that are quantised otherwise can't be quantised to 4 bits by bitsandbytes",
        "loading stops: two kinds of quantization_config", f"LoRA, without --load_in_4bit, or {ORIGINAL}",
        lambda job: job.base in ADAPTABLE - {"bitsandbytes"} and job.method == "qlora",
    ),
    Clash(
        "recompute-without-policy", ("recompute", "wrap_policy"), "stops",
        "Accelerate checkpoints what the wrap policy names, and NO_WRAP names nothing",
        "FSDP2 stops, FSDP1 checkpoints every submodule",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        lambda job: job.engine in FSDP_KINDS and job.recompute == "engine" and job.wrap_policy == "NO_WRAP",
    ),
    Clash(
        "size-based-fsdp2", ("wrap_policy",), "stops",
        "SIZE_BASED_WRAP under FSDP2 also picks lists of layers, which have no forward",
        "prepare stops: fully_shard does not support containers that do not implement forward",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        lambda job: job.engine is Engine.FSDP2 and job.wrap_policy == "SIZE_BASED_WRAP",
    ),
    Clash(
        "no-embedding-fsdp2", ("embeddings",), "stops",
        "Accelerate makes a unit of the input embedding under FSDP2, and this model names none",
        "prepare stops: get_input_embeddings not auto-handled", "fsdp_version: 1",
        lambda job: job.engine is Engine.FSDP2 and job.embeddings == "none",
    ),
    Clash(
        "shared-embedding-fsdp2", ("embeddings",), "stops",
        "Accelerate makes units of input embedding and head under FSDP2, and this model shares their weights with "
        "other modules",
        "the first step stops: is shared with a parameter already managed by another FSDP group", "fsdp_version: 1",
        lambda job: job.engine is Engine.FSDP2 and job.embeddings == "shared",
    ),
    Clash(
        "scalars-fsdp1", ("scalars",), "stops",
        "FSDP1 can't shard this model's parameters without a dimension, such as logit_scale",
        "prepare stops: FSDP doesn't support scalar parameters", "fsdp_version: 2",
        lambda job: job.engine is Engine.FSDP1 and job.scalars,
    ),
    Clash(
        "local-state-fsdp2", ("state_dict",), "stops",
        "FSDP2 does not support LOCAL_STATE_DICT", "Accelerate stops",
        "fsdp_state_dict_type: SHARDED_STATE_DICT",
        lambda job: job.engine is Engine.FSDP2 and job.state_dict == "LOCAL_STATE_DICT",
    ),
    Clash(
        "dora-fsdp1", ("flags",), "stops",
        "DoRA reads weights that FSDP1 has flattened", "the first step fails", "fsdp_version: 2",
        _flag("use_dora", Engine.FSDP1),
    ),
    Clash(
        "dora-mesh", ("flags",), "stops",
        "DoRA can't work on a model that transformers shards, as for tp or experts",
        "the first step stops: got mixed torch.Tensor and DTensor", "LoRA, without --use_dora",
        lambda job: job.layout.is_by_transformers and "use_dora" in job.flags,
    ),
    Clash(
        "fp16-mesh", ("precision",), "trains something else",
        "transformers, which divides layers and experts, has no fp16",
        "it computes in float32, in twice the memory and several times the time", "mixed_precision: bf16",
        lambda job: job.layout.is_by_transformers and job.recipe.precision == "fp16",
    ),
    Clash(
        "eight-bit-fsdp1", ("flags",), "stops",
        "FSDP1 can't shard an 8-bit base", "Accelerate stops: Must flatten tensors with uniform dtype",
        f"{ORIGINAL} with --load_in_4bit and a floating bnb_4bit_quant_storage",
        _flag("load_in_8bit", Engine.FSDP1),
    ),
    Clash(
        "generate-fsdp1", ("flags",), "stops",
        "generate does not work below FSDP1's wrappers", "evaluation fails: 'weight' must be 2-D", "fsdp_version: 2",
        _flag("predict_with_generate", Engine.FSDP1),
    ),
    Clash(
        "label-smoothing-fsdp2", ("flags", "method"), "trains something else",
        "under FSDP2 Trainer doesn't shift the labels that --label_smoothing_factor compares with",
        "each token learns to say itself, and the logged loss looks better",
        f"no --label_smoothing_factor, or fsdp_version: 1{UNLESS_SFT}",
        lambda job: job.engine is Engine.FSDP2 and not job.adapter and "label_smoothing_factor" in job.flags,
        mended=True,
    ),
    Clash(
        "adapter-recompute", ("recompute", "method"), "saves nothing",
        "PEFT loses the adapter under FSDP's activation checkpointing",
        f"the exported adapter has no tensors{UNLESS_SFT}",
        "fsdp_activation_checkpointing: false and --gradient_checkpointing true",
        lambda job: job.engine in FSDP_KINDS and job.adapter and job.recompute == "engine",
        mended=True,
    ),
    Clash(
        "adapter-fsdp1", ("method",), "saves nothing",
        "PEFT loses the adapter under FSDP1",
        f"the exported adapter has no tensors{UNLESS_SFT}",
        "fsdp_version: 2",
        lambda job: job.engine is Engine.FSDP1 and job.adapter,
        mended=True,
    ),
)  # fmt: skip
