"""The command `accel-fsdp init`: the training script, a YAML and a short README in the user's own project."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from accel_fsdp import atomic_files, console
from accel_fsdp.command_line import arg, positional
from accel_fsdp.config import SCRIPT, THIS_FILE, header, script_arguments
from accel_fsdp.errors import UsageError, UserError, did_you_mean

CONFIG = "fsdp2"
CHOSEN = (
    *("--model_name_or_path", "--dataset_name", "--output_dir"),
    *("--per_device_train_batch_size", "--gradient_accumulation_steps", "--max_length"),
)
"""The flags of a YAML's launch command whose values are the user's to choose."""
NATIVE, README = "train/native.py", "train/README.md"
SCHEMA = "accelerate_configs/schema.json"


@dataclass(frozen=True)
class InitCommand:
    folder: Annotated[Path, positional("The project; made if need be.", "DIR")]
    config: Annotated[str, arg("Which of the ready-made YAMLs: fsdp2, fsdp2_lora, zero3, ddp, ...", "NAME")] = CONFIG
    native: Annotated[bool, arg("Also native.py, the same job in plain PyTorch.")] = False


def configs() -> dict[str, Path]:
    return {path.stem: path for path in sorted((header.shipped() / "accelerate_configs").glob("*.yaml"))}


def init(command: InitCommand) -> int:
    """Copies the files and prints the next command; returns 0. Writes nothing if one of the files exists."""
    target, config, native = command.folder, command.config, command.native
    contents = _contents(config, native)
    _refuse_file(target)
    existing = [str(target / name) for name in contents if atomic_files.is_taken(target / name)]
    if existing:
        raise UserError(
            f"{', '.join(existing)} {'exists' if len(existing) == 1 else 'exist'}",
            why="nothing was written, since your own changes may be in there",
            fix="move them away, or choose another folder",
        )
    for name, text in contents.items():
        atomic_files.write_text(target / name, text)
        console.say(f"written: {target / name}")
    needed = _needed(contents[_yaml(config)], _yaml(config))
    console.put(
        f"cd {shlex.quote(str(target))} && accelerate launch --config_file {_yaml(config)} {SCRIPT} {needed}--help"
    )
    return 0


def _needed(text: str, path: str) -> str:
    """The flags that the script needs besides model and data for this YAML at `path`, from the YAML's comment.

    For an adapter that is `--use_peft `: without it every weight would be trained.
    """
    arguments = iter(script_arguments(text))
    needed = []
    for word in arguments:
        if word in CHOSEN:
            next(arguments)
        else:
            needed.append(path if word == THIS_FILE else word)
    return "".join(f"{word} " for word in needed)


def _refuse_file(target: Path) -> None:
    """Raises if the target, or a folder above it, is a file."""
    for place in (target, *target.parents):
        if os.path.exists(place) and not os.path.isdir(place):  # atomic_files reports a folder without permission
            raise UserError(
                f"{place} is a file, and DIR must be a folder",
                why="the files of the project go into it",
                fix="accel-fsdp init DIR, with a folder that is there or can be made",
            )


def _yaml(config: str) -> str:
    return f"accelerate_configs/{config}.yaml"


def _contents(config: str, native: bool) -> dict[str, str]:
    available = configs()
    if config not in available:
        raise UsageError(
            f"--config {config} is not a ready-made YAML.{did_you_mean(config, available)}",
            why="there is nothing to copy",
            fix=f"one of {', '.join(available)}; or make your own: accel-fsdp config -o FILE.yaml",
        )
    names = [SCRIPT, *([NATIVE] if native else []), SCHEMA]
    texts = {name: (header.shipped() / name).read_text(encoding="utf-8") for name in names}
    texts[_yaml(config)] = available[config].read_text(encoding="utf-8")
    return {**texts, README: _readme(config, _needed(texts[_yaml(config)], "fsdp.yaml"), native)}


def _readme(config: str, needed: str, native: bool) -> str:
    note = f"\n`{NATIVE}` is the same job in plain PyTorch, without Accelerate and Trainer.\n" if native else ""
    return f"""# Fine-tuning with FSDP

`{SCRIPT}` is yours to change; what it is made of comes with `pip install 'accel-fsdp[train]'`.

```bash
accel-fsdp config -o fsdp.yaml          # a YAML for your model and machine, or edit {_yaml(config)}
accel-fsdp check fsdp.yaml              # what Accelerate would drop or misread
accelerate launch --config_file fsdp.yaml {SCRIPT} \\
    {needed}--model_name_or_path MODEL --dataset_name DATA --output_dir runs/first
```

`runs/first/final` then holds the model, verified; `runs/first/run.json` says how the run went.
{note}"""
