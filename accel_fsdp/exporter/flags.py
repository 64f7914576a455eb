"""The flags of `accel-fsdp export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

import tyro

from accel_fsdp.config import DTYPES

Verify = Literal["bytes", "load", "logits"]


@dataclass(frozen=True)
class ExportCommand:
    """The flags that the command and the API share."""

    src: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(metavar="SRC", help="A run's folder, a checkpoint in it, or a file or folder of its weights."),
    ]
    out: Annotated[
        tyro.conf.Positional[Optional[Path]],
        tyro.conf.arg(metavar="OUT", help="The folder to write.", help_behavior_hint="(not with --list or --check)"),
    ] = None
    list: Annotated[bool, tyro.conf.arg(help="Show which checkpoints SRC holds, and what they lack.")] = False
    check: Annotated[bool, tyro.conf.arg(help="Verify SRC, a folder that was exported.")] = False
    model: Annotated[
        Optional[str],
        tyro.conf.arg(
            metavar="ID_OR_FOLDER",
            help="The model that was trained: its config, tokenizer and dtype.",
            help_behavior_hint="(default: what the run's folder or the adapter says)",
        ),
    ] = None
    dtype: Annotated[
        Optional[str],  # tyro would offer None beside the names of a Literal
        tyro.conf.arg(
            metavar="{" + ",".join(DTYPES) + "}",
            help="Dtype of the weights.",
            help_behavior_hint="(default: the model's that was trained)",
        ),
    ] = None
    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE", help="Largest file, such as 5GB.")] = "50GB"
    merge_adapter: Annotated[bool, tyro.conf.arg(help="Merge LoRA or DoRA into the base model.")] = False
    adapter: Annotated[
        Optional[str],
        tyro.conf.arg(metavar="NAME", help="Which adapter, where SRC holds several, as PEFT calls them: default, ..."),
    ] = None
    format: Annotated[
        Literal["safetensors", "pth"], tyro.conf.arg(help="pth: a single file for torch.load, model.pth.")
    ] = "safetensors"
    with_optimizer: Annotated[bool, tyro.conf.arg(help="Also write the optimizer's state: optimizer.safetensors.")] = (
        False
    )
    verify: Annotated[
        Verify,
        tyro.conf.arg(
            help="bytes: names, files and hashes; load: from_pretrained too; "
            "logits: against the checkpoint loaded by torch, whole."
        ),
    ] = "load"
    allow_non_finite: Annotated[bool, tyro.conf.arg(help="Accept weights that are NaN or infinite; count them.")] = (
        False
    )
    no_sync: Annotated[bool, tyro.conf.arg(help="Don't wait until the disk has it all.")] = False
    force: Annotated[bool, tyro.conf.arg(help="Replace an existing model in OUT.")] = False
    json: Annotated[bool, tyro.conf.arg(help="The report, or the list, as JSON.")] = False
    push_to_hub: Annotated[Optional[str], tyro.conf.arg(metavar="REPO", help="Upload OUT to this repository.")] = None
    private: Annotated[bool, tyro.conf.arg(help="Make that repository private.")] = False
