"""The flags of `accel-fsdp plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

from accel_fsdp.command_line import arg
from accel_fsdp.config import DTYPES, Method, Precision
from accel_fsdp.job import Attention, Checkpointing
from accel_fsdp.models import optimizers
from accel_fsdp.wizard import SeqLen


@dataclass(frozen=True)
class PlanCommand:
    """The whole command."""

    model: Annotated[
        str,
        arg(
            "A hub id, a local folder, or a catalogue name: llama-3.1-8b.",
            "ID_OR_FOLDER",
            hint="(required, unless --config or --args has it)",
        ),
    ] = ""
    gpus: Annotated[
        Optional[str],
        arg(
            "8xH100-80GB; 2x8xA100-40GB: two machines.",
            "NxNAME[-MEMORYGB]",
            hint="(required, unless --compare, or as with --model)",
        ),
    ] = None
    nodes: Annotated[Optional[int], arg("Machines of that kind.", "N", default="1")] = None
    compare: Annotated[
        Optional[str],
        arg(
            "In place of --gpus: the best layout on each of these machines, in one table: 8xH100,2x8xA100-40GB.",
            "NxNAME,NxNAME,...",
        ),
    ] = None
    seq_len: SeqLen = None
    batch: Annotated[
        Optional[int],
        arg(
            "Micro-batch: sequences per GPU (per_device_train_batch_size).",
            "N",
            default="1 in the table, searched otherwise",
        ),
    ] = None
    global_batch: Annotated[
        Optional[int],
        arg("Sequences per optimizer step on all GPUs; the best way to it is searched.", "N", default="any"),
    ] = None
    accumulation: Annotated[int, arg("Micro-batches per step (gradient_accumulation_steps).")] = 1
    method: Annotated[Method, arg("What is trained.")] = "full"
    precision: Annotated[
        Optional[Precision], arg("Mixed precision.", "{bf16,fp16,no}", default="bf16, or fp16 on GPUs without it")
    ] = None
    dtype: Annotated[
        Optional[Literal["float32", "bfloat16", "float16"]],
        arg("Dtype of the loaded weights.", "{" + ",".join(DTYPES) + "}", default="float32, with LoRA bfloat16"),
    ] = None
    optimizer: Annotated[optimizers.OptimizerName, arg("Trainer's name of the optimizer.")] = "adamw_torch_fused"
    checkpointing: Annotated[Checkpointing, arg("Activation checkpointing in the table.")] = "none"
    lora_rank: Annotated[int, arg("Rank of the adapters.")] = 16
    attention: Annotated[Attention, arg("Attention; flash is flash_attention_2.")] = "sdpa"
    liger: Annotated[bool, arg("Liger's fused kernels (use_liger_kernel), whose loss never holds all logits.")] = False
    host_memory: Annotated[
        Optional[int], arg("Memory of one machine, which bounds offload.", "GIB", default="3 times that of its GPUs")
    ] = None
    config: Annotated[Optional[Path], arg("Predict for this Accelerate YAML instead of searching.", "FILE")] = None
    args: Annotated[
        Optional[Path],
        arg(
            "With --config: the script's arguments, a YAML or JSON mapping or a command line. The very job is "
            "predicted, with its steps.",
            "FILE",
        ),
    ] = None
    tokens: Annotated[Optional[str], arg("Tokens to train on, such as 500M, 2B, 1.5T: says hours.", "COUNT")] = None
    price: Annotated[Optional[float], arg("Of one GPU for an hour, in any currency.", "MONEY")] = None
    output: Annotated[
        Optional[Path],
        arg("Also write the YAML of what is recommended; where nothing fits, none is written.", "FILE", alias="-o"),
    ] = None
    details: Annotated[bool, arg("All strategies, and what explains the plan.")] = False
    json: Annotated[bool, arg("The plan as JSON.")] = False
    html: Annotated[Optional[Path], arg("Also write the plan as one HTML page with figures.", "FILE")] = None
    force: Annotated[bool, arg("Overwrite an existing FILE.")] = False
