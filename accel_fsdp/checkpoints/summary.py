"""safetensors files and checkpoint folders, read by name, size and JSON header: no torch, nothing unpickled."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import completeness, file_names, resumed_pickles, safetensors_header
from accel_fsdp.checkpoints.safetensors_header import Tensor
from accel_fsdp.errors import UsageError, UserError

TIED = (("lm_head.weight", "model.embed_tokens.weight"), ("lm_head.weight", "transformer.wte.weight"))


@dataclass(frozen=True)
class CheckpointFacts(completeness.Parts):
    """The content of a checkpoint or export folder, by names, sizes and safetensors headers; nothing is unpickled.

    `without_metadata` are sharded folders that lack `.metadata`; `broken` says which files can't be read, and why.
    `adapter_tensors` is None where there is no adapter file. `empty_tensor` names a tensor without elements.
    `tied_twice` says that a tied model's embeddings are stored twice. `has_config` counts a tokenizer's as well.
    `unfinished` is the flaw that its marker shows, as a resume judges it; empty without a flaw or without a marker.
    `refused` is why the states beside the weights can't be loaded, or must not be, because they would run code.
    `zero`: DeepSpeed wrote it.
    """

    rng_states: int = 0
    without_metadata: tuple[str, ...] = ()
    broken: tuple[UserError, ...] = ()
    adapter_tensors: int | None = None
    empty_tensor: str = ""
    tied_twice: bool = False
    cache_off: bool = False
    architecture: str = ""
    has_config: bool = False
    private: str = ""
    unfinished: str = ""
    refused: UserError | None = None
    zero: bool = False


def tensors_of(path: Path) -> dict[str, Tensor] | None:
    """The tensors of one safetensors file by name; None if it isn't one or is cut short."""
    try:
        return safetensors_header.read(path)
    except UserError:
        return None


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of all `model*.safetensors` in a folder, without broken files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob(file_names.MODELS)):
        tensors |= tensors_of(path) or {}
    return tensors


def tied_pair(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    pairs = (pair for pair in TIED if pair[0] in tensors and pair[1] in tensors)
    return next(((tensors[head], tensors[embedding]) for head, embedding in pairs), None)


def equal(first: Tensor, second: Tensor) -> bool:
    return (first.dtype, first.shape) == (second.dtype, second.shape) and _bytes(first) == _bytes(second)


def _bytes(tensor: Tensor) -> bytes:
    with untrusted_files.opened(tensor.file) as file:
        file.seek(tensor.start)
        return file.read(tensor.end - tensor.start)


def model_files(folder: Path) -> tuple[list[str], Mapping[str, str]]:
    """The safetensors files that `from_pretrained` opens in a model's folder, and what their index lists, if any.

    They are the single file, else the files of the index.
    """
    if read_json(folder / file_names.CONFIG, folder).get("transformers_weights") is not None:
        raise untrusted_files.broken(folder / file_names.CONFIG, "names other files: transformers_weights")
    if (folder / file_names.MODEL).is_file():
        return [file_names.MODEL], {}
    listed = weight_map(folder / file_names.INDEX)
    return sorted(set(listed.values())), listed


def weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, as an index lists them; empty without an index."""
    index = untrusted_files.read_json(path)
    if index is None:
        return {}
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise untrusted_files.broken(path, "is damaged: no list of tensors and their files")
    return listed


def read_json(path: Path, within: Path | None = None) -> dict[str, Any]:
    """A JSON mapping; empty if there is no such file. `within` as in `untrusted_files.open_file`."""
    return untrusted_files.read_json(path, within) or {}


def read_checkpoint(folder: Path) -> CheckpointFacts:
    """Reads a checkpoint or export; in a run's folder the checkpoint with the highest number, as Trainer does."""
    _check_folder(folder)
    numbered = file_names.checkpoints(folder)
    holds_model = any(folder.glob(file_names.ALL_SAFETENSORS)) or any(folder.glob(f"{file_names.TORCH_STEM}*"))
    checkpoint = numbered[-1] if numbered and not holds_model else folder
    return replace(facts_of(checkpoint), refused=resumed_pickles.refusal(checkpoint))


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(
            f"checkpoint {folder} is not a folder",
            why="there is nothing to look at",
            fix="--checkpoint RUN/checkpoint-N, or the folder of an export",
        )


def facts_of(folder: Path) -> CheckpointFacts:
    """Reads this folder without its subfolders."""
    _check_folder(folder)
    refusals = {path: _refusal(path) for path in sorted(folder.iterdir())}
    broken = [error for error in refusals.values() if error]
    counted_paths = [path for path, error in refusals.items() if error is None]
    names = {path.name for path in counted_paths}
    sharded = [path for path in counted_paths if path.is_dir() and any(path.glob(file_names.DCP_PARTS))]
    read: dict[Path, Mapping[str, Tensor]] = {}
    for path in counted_paths:
        try:
            if path.suffix == file_names.SAFETENSORS:
                read[path] = {}
                read[path] = safetensors_header.read(path)
            elif path.name.endswith(file_names.INDEX_END):
                for name in sorted(set(weight_map(path).values())):
                    if not os.path.lexists(untrusted_files.inside(path.parent, name, path.name)):
                        raise untrusted_files.broken(path, f"lists {name}, which is missing")
        except UserError as error:
            broken.append(error)
    adapter = read.get(folder / file_names.ADAPTER)
    everything = {name: tensor for tensors in read.values() for name, tensor in tensors.items()}
    config = read_json(folder / file_names.CONFIG)
    pair, listed = tied_pair(everything), config.get("architectures")
    return CheckpointFacts(
        name=str(folder),
        sharded=any(path.name.startswith(file_names.TORCH_STEM) for path in sharded),
        full=file_names.FULL_MODEL in names,
        hub=any(Path(name).suffix in file_names.WEIGHTS and not name.startswith(file_names.STATE) for name in names),
        optimizer=any(name.startswith(file_names.OPTIMIZER) for name in names),
        scheduler=file_names.SCHEDULER in names,
        by_accelerator=any(name.startswith(f"{file_names.RANDOM_STATES}_") for name in names),
        exported=file_names.REPORT in names,
        unfinished=completeness.flaw(folder) if (folder / file_names.MARKER).exists() else "",
        trainer_state=completeness.has_trainer_state(folder),
        zero=completeness.by_deepspeed(folder),
        rng_states=sum(name.startswith(file_names.RNG_STATE) for name in names),
        without_metadata=tuple(path.name for path in sharded if not completeness.is_whole_dcp(path)),
        broken=tuple(broken),
        adapter_tensors=None if adapter is None else len(adapter),
        empty_tensor=next((name for name, stored in everything.items() if 0 in stored.shape), ""),
        tied_twice=bool(config.get("tie_word_embeddings")) and pair is not None and equal(*pair),
        cache_off=config.get("use_cache") is False,
        architecture=listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else "",
        has_config=bool(names & {file_names.CONFIG, file_names.TOKENIZER, file_names.TOKENIZER_CONFIG}),
        private=next((path.name for path in read if not path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)), ""),
    )


def _refusal(path: Path) -> UserError | None:
    """Why a path can't be opened as a folder or plain file, or is a link out of its folder; else None."""
    try:
        if path.is_dir():
            untrusted_files.check_folder(path, path.parent)
        else:
            os.close(untrusted_files.open_file(path))
    except FileNotFoundError:
        return untrusted_files.unreadable(path, "it is gone")
    except UserError as error:
        return error
    return None
