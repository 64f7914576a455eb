"""The flags of `accel-fsdp plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

import tyro

from accel_fsdp.config import DTYPES, Method, Precision
from accel_fsdp.prediction.memory import Attention, Checkpointing, Kernels, OptimizerName


@dataclass(frozen=True)
class PlanCommand:
    """The whole command."""

    model: Annotated[
        str, tyro.conf.arg(metavar="ID_OR_FOLDER", help="A hub id, a local folder, or a catalogue name: llama-3.1-8b.")
    ]
    gpus: Annotated[str, tyro.conf.arg(metavar="NxNAME[-MEMORYGB]", help="8xH100-80GB; 2x8xA100-40GB: two machines.")]
    nodes: Annotated[
        Optional[int], tyro.conf.arg(metavar="N", help="Machines of that kind.", help_behavior_hint="(default: 1)")
    ] = None
    seq_len: Annotated[
        Optional[int],
        tyro.conf.arg(
            metavar="TOKENS",
            help="Tokens per sequence.",
            help_behavior_hint="(default: 2048, or the model's positions if fewer)",
        ),
    ] = None
    batch: Annotated[
        Optional[int],
        tyro.conf.arg(
            metavar="N",
            help="Micro-batch: sequences per GPU (per_device_train_batch_size).",
            help_behavior_hint="(default: 1 in the table, searched otherwise)",
        ),
    ] = None
    global_batch: Annotated[
        Optional[int],
        tyro.conf.arg(
            metavar="N",
            help="Sequences per optimizer step on all GPUs; the best way to it is searched.",
            help_behavior_hint="(default: any)",
        ),
    ] = None
    accumulation: Annotated[int, tyro.conf.arg(help="Micro-batches per step (gradient_accumulation_steps).")] = 1
    method: Annotated[Method, tyro.conf.arg(help="What is trained.")] = "full"
    precision: Annotated[
        Optional[Precision],
        tyro.conf.arg(
            metavar="{bf16,fp16,no}",
            help="Mixed precision.",
            help_behavior_hint="(default: bf16, or fp16 on GPUs without it)",
        ),
    ] = None
    dtype: Annotated[
        Optional[Literal["float32", "bfloat16", "float16"]],
        tyro.conf.arg(
            metavar="{" + ",".join(DTYPES) + "}",
            help="Dtype of the loaded weights.",
            help_behavior_hint="(default: float32, with LoRA bfloat16)",
        ),
    ] = None
    optimizer: Annotated[OptimizerName, tyro.conf.arg(help="Trainer's name of the optimizer.")] = "adamw_torch_fused"
    checkpointing: Annotated[Checkpointing, tyro.conf.arg(help="Activation checkpointing in the table.")] = "none"
    lora_rank: Annotated[int, tyro.conf.arg(help="Rank of the adapters.")] = 16
    chunked_loss: Annotated[bool, tyro.conf.arg(help="A loss that never holds all logits (Liger, chunked NLL).")] = (
        False
    )
    attention: Annotated[Attention, tyro.conf.arg(help="Attention; flash is flash_attention_2.")] = "sdpa"
    kernels: Annotated[
        Kernels, tyro.conf.arg(help="Fused kernels: Trainer's use_liger_kernel, or fms-acceleration's foak.")
    ] = "none"
    host_memory: Annotated[
        Optional[int],
        tyro.conf.arg(
            metavar="GIB",
            help="Memory of one machine, which bounds offload.",
            help_behavior_hint="(default: 3 times that of its GPUs)",
        ),
    ] = None
    config: Annotated[
        Optional[Path], tyro.conf.arg(metavar="FILE", help="Predict for this Accelerate YAML instead of searching.")
    ] = None
    output: Annotated[
        Optional[Path],
        tyro.conf.arg(
            aliases=["-o"],
            metavar="FILE",
            help="Also write the YAML of what is recommended; where nothing fits, none is written.",
        ),
    ] = None
    json: Annotated[bool, tyro.conf.arg(help="The plan as JSON.")] = False
    html: Annotated[
        Optional[Path], tyro.conf.arg(metavar="FILE", help="Also write the plan as one HTML page with figures.")
    ] = None
    force: Annotated[bool, tyro.conf.arg(help="Overwrite an existing FILE.")] = False
