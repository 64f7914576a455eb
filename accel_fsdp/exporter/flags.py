"""The flags of `accel-fsdp export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

from accel_fsdp.command_line import arg, positional
from accel_fsdp.config import DTYPES


@dataclass(frozen=True)
class ExportCommand:
    """The flags that the command and the API share."""

    src: Annotated[
        Path,
        positional("A run's folder, a checkpoint in it, or a file or folder of its weights.", "SRC"),
    ]
    out: Annotated[Optional[Path], positional("The folder to write.", "OUT", hint="(not with --list or --check)")] = (
        None
    )
    list: Annotated[bool, arg("Show which checkpoints SRC holds, and what they lack.")] = False
    check: Annotated[bool, arg("Verify SRC, a folder that was exported.")] = False
    model: Annotated[
        Optional[str],
        arg(
            "The model that was trained: its config, tokenizer and dtype.",
            "ID_OR_FOLDER",
            default="what the run's folder or the adapter says",
        ),
    ] = None
    dtype: Annotated[
        Optional[str],
        arg("Dtype of the weights.", "{" + ",".join(DTYPES) + "}", default="the model's that was trained"),
    ] = None
    max_shard_size: Annotated[str, arg("Largest file, such as 5GB.", "SIZE")] = "50GB"
    merge_adapter: Annotated[bool, arg("Merge the adapter into the base model.")] = False
    which: Annotated[
        Optional[str], arg("Which model, where SRC holds several, by its file or folder in --list.", "NAME")
    ] = None
    format: Annotated[Literal["safetensors", "pth"], arg("pth: a single file for torch.load, model.pth.")] = (
        "safetensors"
    )
    verify: Annotated[
        Literal["bytes", "load"],
        arg("bytes: names, files and hashes; load: from_pretrained too."),
    ] = "load"
    allow_non_finite: Annotated[bool, arg("Accept weights that are NaN or infinite; count them.")] = False
    no_sync: Annotated[bool, arg("Don't wait until the disk has it all.")] = False
    force: Annotated[bool, arg("Replace an existing model in OUT.")] = False
    json: Annotated[bool, arg("The report, or the list, as JSON.")] = False
    push_to_hub: Annotated[Optional[str], arg("Upload OUT to this repository.", "REPO")] = None
    private: Annotated[bool, arg("Make that repository private.")] = False
