"""The flags of `accel-fsdp plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

import tyro

from accel_fsdp.config import DTYPES, Method, Precision, Search
from accel_fsdp.job import Attention, Checkpointing, Kernels
from accel_fsdp.models import optimizers
from accel_fsdp.wizard import SeqLen


@dataclass(frozen=True)
class PlanCommand:
    """The whole command."""

    model: Annotated[
        str,
        tyro.conf.arg(
            metavar="ID_OR_FOLDER",
            help="A hub id, a local folder, or a catalogue name: llama-3.1-8b.",
            help_behavior_hint="(required, unless --config was made by accel-fsdp config)",
        ),
    ] = ""
    gpus: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="NxNAME[-MEMORYGB]",
            help="8xH100-80GB; 2x8xA100-40GB: two machines.",
            help_behavior_hint="(required, unless --compare, or as with --model)",
        ),
    ] = None
    nodes: Annotated[
        Optional[int], tyro.conf.arg(metavar="N", help="Machines of that kind.", help_behavior_hint="(default: 1)")
    ] = None
    compare: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="NxNAME,NxNAME,...",
            help="In place of --gpus: the best way on each of these machines, in one table: 8xH100,2x8xA100-40GB.",
        ),
    ] = None
    seq_len: SeqLen = None
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
    optimizer: Annotated[optimizers.OptimizerName, tyro.conf.arg(help="Trainer's name of the optimizer.")] = (
        "adamw_torch_fused"
    )
    checkpointing: Annotated[Checkpointing, tyro.conf.arg(help="Activation checkpointing in the table.")] = "none"
    lora_rank: Annotated[int, tyro.conf.arg(help="Rank of the adapters.")] = 16
    chunked_loss: Annotated[bool, tyro.conf.arg(help="A loss that never holds all logits (Liger, chunked NLL).")] = (
        False
    )
    attention: Annotated[Attention, tyro.conf.arg(help="Attention; flash is flash_attention_2.")] = "sdpa"
    kernels: Annotated[
        Kernels, tyro.conf.arg(help="Fused kernels: Trainer's use_liger_kernel, or fms-acceleration's foak.")
    ] = "none"
    search: Annotated[
        Search,
        tyro.conf.arg(
            help="all: also divides layers and experts among GPUs, by default where FSDP alone doesn't fit or experts "
            "are many; plain: never."
        ),
    ] = "auto"
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
    args: Annotated[
        Optional[Path],
        tyro.conf.arg(
            metavar="FILE",
            help="With --config: the script's arguments, a YAML or JSON mapping or a command line. The very job is "
            "predicted: its steps, checkpoints and evaluations too.",
        ),
    ] = None
    tokens: Annotated[
        Optional[str],
        tyro.conf.arg(metavar="COUNT", help="Tokens to train on, such as 500M, 2B, 1.5T: says hours and energy."),
    ] = None
    dataset_rows: Annotated[
        Optional[int],
        tyro.conf.arg(metavar="N", help="Instead of --tokens: rows of the data set, each of --seq-len tokens."),
    ] = None
    epochs: Annotated[
        Optional[float],
        tyro.conf.arg(metavar="E", help="How often the rows are trained on.", help_behavior_hint="(default: 1)"),
    ] = None
    price: Annotated[
        Optional[float], tyro.conf.arg(metavar="MONEY", help="Of one GPU for an hour, in any currency.")
    ] = None
    prices: Annotated[
        Optional[Path],
        tyro.conf.arg(metavar="FILE", help="Instead of --price: your own TOML, with lines such as H100 = 2.5."),
    ] = None
    disk_speed: Annotated[
        Optional[float],
        tyro.conf.arg(
            metavar="GB/S",
            help="The checkpoint disk's speed by accel-fsdp doctor: says how long training waits for a save.",
        ),
    ] = None
    eval_rows: Annotated[
        Optional[int],
        tyro.conf.arg(metavar="N", help="With --args: rows of the evaluation split: says how long it takes."),
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
