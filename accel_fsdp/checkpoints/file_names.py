"""The names of files and folders in runs, checkpoints and exports, each with who writes it. Patterns are those of glob.

`discover` decides what a folder with some of these files is.
"""

import re
from collections.abc import Iterable
from pathlib import Path

SAFETENSORS = ".safetensors"
"""The ending of files of the safetensors library."""
ALL_SAFETENSORS = f"*{SAFETENSORS}"
TORCH_SAVED = (".pth", ".bin", ".pt")
"""Endings of files that torch.save writes."""

CONFIG = "config.json"
"""Transformers: what a model is built from."""
MODEL = "model.safetensors"
"""Transformers: a model's weights in one file."""
MODELS = "model*.safetensors"
"""Transformers: the same, in one file or several."""
INDEX_END = f"{SAFETENSORS}.index.json"
INDEX = f"model{INDEX_END}"
"""Transformers: which of several files holds which tensor; and the ending of any such index."""
TORCH_STEM = "pytorch_model"
"""Transformers before safetensors, and Accelerate: the beginning of model weights that torch.save writes."""
TORCH_MODELS, TORCH_INDEX = f"{TORCH_STEM}*.bin", "*.bin.index.json"
"""Transformers before safetensors: the weights, and which of several files holds which tensor."""
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
"""Transformers: the tokenizer itself, and what `from_pretrained` makes of it."""
CHAT_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""Transformers: the chat template of a tokenizer, and a folder of others."""
ADAPTER_STEM = "adapter_model"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", f"{ADAPTER_STEM}.safetensors"
"""PEFT: the settings of an adapter, and its weights."""
TORCH_MODEL = "model.pth"
"""This project's exports: a state dict as torch.save writes it."""
CARD = "README.md"
"""The model card, as the hub shows it."""

DCP_METADATA, DCP_PART = ".metadata", ".distcp"
"""torch's distributed checkpoints: what each part holds, written last, and the ending of the ranks' parts."""
DCP_PARTS = f"*{DCP_PART}"
READABLE = frozenset({SAFETENSORS, *TORCH_SAVED, DCP_PART})
"""Endings of files from which this project reads weights."""
FSDP_MODEL = f"{TORCH_STEM}_fsdp"
"""Accelerate: the beginning of FSDP's model weights."""
OPTIMIZER = "optimizer"
"""Trainer, Accelerate, this project's exports: the beginning of an optimizer's states."""
SHARDED_MODEL, SHARDED_OPTIMIZER = f"{FSDP_MODEL}_0", f"{OPTIMIZER}_0"
"""Accelerate: the folders of SHARDED_STATE_DICT."""
FULL_MODEL, FULL_OPTIMIZER = f"{FSDP_MODEL}.bin", f"{OPTIMIZER}.bin"
"""Accelerate: the files of FULL_STATE_DICT."""
SHARDED = {"model": SHARDED_MODEL, OPTIMIZER: SHARDED_OPTIMIZER}
FULL = {"model": FULL_MODEL, OPTIMIZER: FULL_OPTIMIZER}
LOCAL_MODELS = f"{FSDP_MODEL}_rank*.bin"
"""Accelerate: the ranks' files of LOCAL_STATE_DICT."""
RANDOM_STATES = "random_states"
"""`Accelerator.save_state`: the beginning of random states."""

LATEST, GLOBAL_STEP = "latest", "global_step"
"""DeepSpeed: the file that names the folder of the ranks' files, and the beginning of that folder's name."""
ZERO_MODELS, ZERO_OPTIMIZERS = "*_model_states.pt", "*_optim_states.pt"
"""DeepSpeed: the ranks' files."""
ZERO_RANK = "zero_pp_rank_"
BF16 = "bf16_"
"""DeepSpeed: the beginning of the names of optimizer files under bf16."""
ZERO_PARTITIONS = f"*{ZERO_RANK}{ZERO_OPTIMIZERS}"
"""DeepSpeed: those that each hold one rank's part of the optimizer."""

TRAINER_STATE = "trainer_state.json"
"""Trainer: the log of all steps, written last."""
SCHEDULER = "scheduler.pt"
"""Trainer: the learning rate's schedule."""
RNG_STATE = "rng_state"
"""Trainer: the beginning of random states."""
TRAINING_ARGS = "training_args.bin"
"""Trainer: its arguments as a pickle."""

SCALER = "scaler"
"""Trainer, Accelerate: the beginning of the state of fp16's loss scaling."""

MARKER = "complete.json"
"""This project's checkpoints: sizes and hashes of all files, once they are on disk."""
REPORT = "export.json"
"""This project's exports: the checks that passed. A run's folder never counts as the export inside it."""
RUN = "run.json"
"""This project's runs: the account of the run."""
DESCRIBED, FINAL = "model", "final"
"""Folders of this project's runs: the model that is trained, described before the first step and never what was
trained; and the result."""

OF_RANK = re.compile(rf"(?:__|{RNG_STATE}_|{ZERO_RANK}|fsdp_rank)(\d+)")
"""The number of the rank that wrote a file, in its name, with any library."""
CHECKPOINT = "checkpoint-"
"""The beginning of the names of checkpoint folders, of Trainer and train/native.py; the step follows."""
NUMBERED = re.compile(r"(?:checkpoint|ckpt|step|epoch|iter)[-_]?(\d+)")
"""A checkpoint's folder by its step, of any program."""
STATE = (FSDP_MODEL, OPTIMIZER, Path(SCHEDULER).stem, Path(TRAINING_ARGS).stem, RNG_STATE, SCALER)
"""Beginnings of files that end like weights but that `from_pretrained` can't load."""
NOT_WEIGHTS = (*STATE, RANDOM_STATES, "rng", "optim", "train_state", "dataloader", "extra_state")
"""Beginnings of the names of files without weights, of any library."""

RANK_FILE = re.compile(r"(?:.*world_size_(?P<ranks>\d+)_|(?:.*[_-])?)rank[_-]?(?P<rank>\d+)\.(?:pt|pth|bin)")
"""verl, SkyRL and loops: the file of a rank's part of the model."""
RANKS_CONFIG = "huggingface"
"""verl: the folder of the model's config and tokenizer beside the ranks' files."""


def of_ranks(folder: Path) -> dict[int, Path]:
    """The ranks' files of a model in a folder, in the order of their ranks."""
    matches = {path: RANK_FILE.fullmatch(path.name) for path in folder.glob("*") if path.is_file() or path.is_symlink()}
    by_rank = {int(m["rank"]): path for path, m in matches.items() if m and not path.name.startswith(NOT_WEIGHTS)}
    return dict(sorted(by_rank.items()))


def is_exported(name: str) -> bool:
    """Whether an export reads a file of a checkpoint, by its path relative to it; people delete optimizers."""
    return name.startswith(FSDP_MODEL) or not name.startswith(NOT_WEIGHTS)


def rng_state(rank: int, ranks: int) -> str:
    """Trainer: the file of a rank's random states, which has no number where there is one rank."""
    return f"{RNG_STATE}_{rank}.pth" if ranks > 1 else f"{RNG_STATE}.pth"


def numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def step(name: str) -> int:
    """The step in the name of a checkpoint's folder as Trainer names it; -1 for any other name."""
    number = name.removeprefix(CHECKPOINT)
    return int(number) if name.startswith(CHECKPOINT) and number.isdecimal() else -1


def numbered(names: Iterable[str]) -> list[str]:
    """The names of checkpoint folders as Trainer names them, in the order of their numbers."""
    return sorted((name for name in names if step(name) >= 0), key=step)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint-N folders of a run, complete or not, in the order of their numbers."""
    return [run / name for name in numbered(path.name for path in run.glob("*"))]
