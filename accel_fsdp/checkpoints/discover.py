"""Finds checkpoints, with their kind and missing files. The only module that knows the layout of their folders."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import completeness, file_names, marker, safetensors_header, tensor_names
from accel_fsdp.errors import UserError

CheckpointKind = Literal["sharded (DCP)", "FSDP full", "safetensors", "adapter", "ZeRO", "files of ranks", "torch.save"]
OPTIMIZERS = ("optim", file_names.OPTIMIZER)
DEPTH = 2
EXPORTED = ("safetensors", "adapter")


@dataclass(frozen=True)
class CheckpointLocation:
    """A checkpoint or model: its kind, the folder that a user would name, the path of the weights, missing files.

    `refused` says why an existing part that counts as missing can't be read.
    """

    kind: CheckpointKind
    folder: Path
    weights: Path
    missing: tuple[str, ...] = ()
    optimizer: Path | None = None
    refused: UserError | None = None

    @property
    def number(self) -> int:
        match = file_names.NUMBERED.fullmatch(self.folder.name)
        return int(match[1]) if match else -1

    @property
    def model_name(self) -> str:
        """The name of the file or folder of the weights, which tells several models of one folder apart."""
        return file_names.MODEL if self.weights == self.folder else self.weights.name

    @property
    def size_bytes(self) -> int:
        if self.weights.is_file():
            return self.weights.stat().st_size
        names = (path.name for path in self.weights.iterdir() if path.suffix in file_names.READABLE and path.is_file())
        return sum((self.weights / name).stat().st_size for name in names if file_names.is_exported(name))

    def __str__(self) -> str:
        missing = f", lacks {', '.join(self.missing)}" if self.missing else ""
        return f"{self.weights if self.weights.is_file() else self.folder}: {self.kind}{missing}"


def look(folder: Path) -> CheckpointLocation | None:
    """The checkpoint or exported model in `folder`, which may be its inner folder; None if there is none."""
    for reader in (_zero, _sharded, _safetensors, _named, _ranks, _single):
        if (checkpoint := reader(folder)) is not None:
            return _judged(checkpoint)
    return None


def _judged(checkpoint: CheckpointLocation) -> CheckpointLocation:
    """Adds what a checkpoint lacks by its marker or its name."""
    name, unfinished = checkpoint.folder.name, completeness.unfinished(checkpoint.folder)
    if checkpoint.kind == "torch.save" and unfinished == (file_names.TRAINER_STATE,):  # another program's, complete
        unfinished = ()
    if name.startswith(".") and name.endswith(".tmp"):  # left by `replaced_folder` when its process was killed
        unfinished = (*unfinished, completeness.ITS_END)
    missing = {lack.split(" (")[0]: lack for lack in (*checkpoint.missing, *unfinished)}
    return replace(checkpoint, missing=tuple(missing.values()))


def _sharded(folder: Path) -> CheckpointLocation | None:
    inner = [path for path in _folders(folder) if _is_dcp(path) and not path.name.startswith(OPTIMIZERS)]
    folders = [path for path in inner if path.name.startswith(file_names.FSDP_MODEL)]
    folders = folders or [path for path in inner if not path.name[-1].isdecimal()]  # step-10 is a separate checkpoint
    if _is_dcp(folder):
        folders = [folder]
    if not folders or folder.name.startswith(OPTIMIZERS):
        return None
    place = folders[0]
    optimizer = next((path for path in _folders(folder) if _is_dcp(path) and path.name.startswith(OPTIMIZERS)), None)
    missing = [] if completeness.is_whole_dcp(place) else [f"{place.name}/{file_names.DCP_METADATA}"]
    missing += [] if any(place.glob(file_names.DCP_PARTS)) else [f"{place.name}/{file_names.DCP_PARTS}"]
    outer = folder.parent if place == folder and folder.name.startswith(file_names.FSDP_MODEL) else folder
    return CheckpointLocation("sharded (DCP)", outer, place, tuple(missing), optimizer)


def _is_dcp(folder: Path) -> bool:
    return completeness.is_whole_dcp(folder) or any(folder.glob(file_names.DCP_PARTS))


def check_bytes(checkpoint: CheckpointLocation, needed: Callable[[str], bool] = file_names.is_exported) -> None:
    """Compares the `needed` files with the hashes in `complete.json`."""
    if what := marker.damage(checkpoint.folder, needed):
        raise UserError(
            f"{checkpoint.folder} is damaged: {what}",
            why="what is made of it would differ from what was trained",
            fix="copy the checkpoint again from where it was written, or take an older one",
        )


def _safetensors(folder: Path) -> CheckpointLocation | None:
    try:
        names = safetensors_header.model_files(folder)[0]
        missing = [name for name in names if not _has(folder, name)]
    except UserError as error:
        return CheckpointLocation(
            "safetensors", folder, folder, (f"a file that can be read: {error.what}",), refused=error
        )
    return CheckpointLocation("safetensors", folder, folder, tuple(missing)) if names else None


def _has(folder: Path, name: str) -> bool:
    """Whether a file that the folder's index names exists; raises UserError if it may not be read."""
    try:
        untrusted_files.check(untrusted_files.inside(folder, name, file_names.INDEX), folder)
    except FileNotFoundError:
        return False
    return True


def _named(folder: Path) -> CheckpointLocation | None:
    """A checkpoint in one file with a name of its own."""
    kinds: dict[str, CheckpointKind] = {file_names.ADAPTER: "adapter", file_names.FULL_MODEL: "FSDP full"}
    return next((_file(kind, folder / name) for name, kind in kinds.items() if (folder / name).is_file()), None)


def _file(kind: CheckpointKind, path: Path) -> CheckpointLocation:
    """A checkpoint whose weights are one file. PEFT's need its settings beside them."""
    settings = path.with_name(file_names.ADAPTER_CONFIG)
    lacks_settings = path.name.startswith(file_names.ADAPTER_STEM) and not settings.is_file()
    return CheckpointLocation(kind, path.parent, path, (settings.name,) if lacks_settings else ())


def _zero(folder: Path) -> CheckpointLocation | None:
    place = _zero_folder(folder)
    if place is None:
        return None
    needed = (file_names.ZERO_MODELS, file_names.ZERO_OPTIMIZERS)
    missing = [f"{place.name}/{name}" for name in needed if not any(place.glob(name))]
    is_inner = folder.name.startswith(file_names.GLOBAL_STEP)
    is_inner = is_inner or completeness.deepspeed_latest(folder.parent) == folder.name
    outer = folder.parent if place == folder and is_inner else folder
    return CheckpointLocation("ZeRO", outer, place, tuple(missing))


def _zero_folder(checkpoint: Path) -> Path | None:
    """The folder of the ranks' files: the one that `latest` names, else the highest `global_stepN`; None without one.

    `Accelerator.save_state` names it `pytorch_model`, Trainer `global_stepN`.
    """
    if any(checkpoint.glob(file_names.ZERO_OPTIMIZERS)):
        return checkpoint
    name = completeness.deepspeed_latest(checkpoint)
    if name and Path(name).name == name and any((checkpoint / name).glob(file_names.ZERO_OPTIMIZERS)):
        return checkpoint / name
    steps = list(checkpoint.glob(f"{file_names.GLOBAL_STEP}*"))  # verl names its own so
    whole = [path for path in steps if any(path.glob(file_names.ZERO_OPTIMIZERS))]
    parts = [path for path in steps if any(path.glob(file_names.ZERO_MODELS))]
    return max(whole or parts, key=lambda path: file_names.numbers(path.name), default=None)


def _ranks(folder: Path) -> CheckpointLocation | None:
    """The files that each rank wrote: all of those that the highest number, or the number of ranks, implies."""
    by_rank = file_names.of_ranks(folder)
    if not by_rank:
        return None
    first = next(iter(by_rank.values())).name
    match = file_names.RANK_FILE.fullmatch(first)
    ranks = max(int((match and match["ranks"]) or 0), max(by_rank) + 1)
    absent = [re.sub(r"(rank[_-]?)\d+", rf"\g<1>{rank}", first) for rank in range(ranks) if rank not in by_rank]
    return CheckpointLocation("files of ranks", folder, folder, tuple(absent))


def models(checkpoint: CheckpointLocation) -> list[CheckpointLocation]:
    """Each of the models that one `Accelerator.save_state` wrote, in their order; of a single one the checkpoint."""
    folder, place = checkpoint.folder, checkpoint.weights
    place = folder / file_names.MODEL if place == folder else place
    base = re.sub(r"_\d+$", "", place.stem)
    name = re.compile(rf"{re.escape(base)}(?:_(\d+))?{re.escape(place.suffix)}")
    paths = [path for path in folder.glob(f"{base}*") if path.is_dir() == place.is_dir()]
    numbered = {int(match[1] or 0): path for path in paths if (match := name.fullmatch(path.name))}
    if len(numbered) < 2 or not any(folder.glob(f"{file_names.RANDOM_STATES}*")):
        return [checkpoint]
    optimizers = {number: folder / f"{file_names.OPTIMIZER}_{number}" for number in numbered}
    return [
        replace(checkpoint, weights=path, optimizer=optimizers[number] if optimizers[number].is_dir() else None)
        for number, path in sorted(numbered.items())
    ]


def _single(folder: Path) -> CheckpointLocation | None:
    paths = [path for kind in file_names.TORCH_SAVED for path in sorted(folder.glob(f"*{kind}")) if _is_single(path)]
    return _file("torch.save", paths[0]) if len(paths) == 1 else None


def _is_single(path: Path) -> bool:
    return path.suffix in file_names.TORCH_SAVED and not path.name.startswith(file_names.NOT_WEIGHTS)


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, without hidden ones: those are being written or deleted."""
    inner = folder.iterdir() if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) else ()
    return sorted(path for path in inner if path.is_dir() and not path.name.startswith("."))


def listed(run: Path) -> list[CheckpointLocation]:
    """The checkpoints and models in a run's folder, oldest first; the folder itself if it is one."""
    run_folder = look(run)
    if run_folder is not None and run_folder.kind != "torch.save":
        return [run_folder]
    inner = [checkpoint for path in _folders(run) if _is_trained(path) and (checkpoint := look(path)) is not None]
    if run_folder is not None and all(checkpoint.kind in EXPORTED for checkpoint in inner):
        return [run_folder]
    if inner and not _is_run(run) and any(map(_is_run, _all_below(run, DEPTH))):
        return []  # the folder holds several runs, and which one is meant can't be guessed
    return sorted(inner, key=lambda checkpoint: (checkpoint.number, checkpoint.folder.stat().st_mtime))


def _is_trained(folder: Path) -> bool:
    """Whether a run's folder may hold its result, rather than the model it began with or an export."""
    return folder.name != file_names.DESCRIBED and not (folder / file_names.REPORT).is_file()


def _is_run(folder: Path) -> bool:
    return any(file_names.NUMBERED.fullmatch(path.name) and look(path) for path in _folders(folder))


def _all_below(folder: Path, depth: int) -> Iterator[Path]:
    for path in _folders(folder):
        yield path
        yield from _all_below(path, depth - 1) if depth > 1 else ()


def find(path: Path) -> tuple[CheckpointLocation, list[CheckpointLocation]]:
    """The checkpoint at `path`, in a run's folder the newest complete one, and the newer incomplete ones.

    Raises:
        UserError: there is none, or the named checkpoint is incomplete.
    """
    place = _checked_path(path)
    single = _checkpoint_in_file(place)
    checkpoints = [_judged(single)] if single else listed(place)
    if not checkpoints:
        raise _not_found(path, place)
    complete = [checkpoint for checkpoint in checkpoints if not checkpoint.missing]
    if not complete:
        raise checkpoints[-1].refused or UserError(
            f"{checkpoints[-1].folder} lacks {', '.join(checkpoints[-1].missing)}",
            why="it is half-written, or its other half is on another machine",
            fix="take an older checkpoint; on several machines train to a shared disk",
        )
    newest, named = complete[-1], place if place.is_dir() else place.parent
    if newest.kind == "files of ranks" and len([part for part in complete if part.number == newest.number]) > 1:
        raise _not_found(path, place)  # verl's actor and critic stand side by side
    for part in (newest.folder, newest.weights, newest.optimizer):
        if part is not None and part.is_relative_to(named):  # no link in it leads out of what the user named
            untrusted_files.check_folder(part, named)
    return newest, checkpoints[checkpoints.index(newest) + 1 :]


def _checked_path(path: Path) -> Path:
    if path.is_symlink() and not path.exists():
        raise untrusted_files.leads_nowhere(path)
    if not path.exists():
        raise UserError(f"{path} does not exist", why="there is nothing to read", fix="accel-fsdp export RUN --list")
    place = path.resolve() if path.is_file() else path  # a file may be named by a link to it
    if place.is_file() and (place.suffix == file_names.DCP_PART or place.name == file_names.DCP_METADATA):
        return place.parent
    return place


def _checkpoint_in_file(path: Path) -> CheckpointLocation | None:
    """The model or adapter that a file holds, or is a part of by an index or by its number."""
    if not path.is_file():
        return None
    if re.fullmatch(rf"{file_names.FSDP_MODEL}(_\d+)?\.bin", path.name):
        return _file("FSDP full", path)
    if path in file_names.of_ranks(path.parent).values():
        return _ranks(path.parent)
    if path.name == file_names.ADAPTER:
        return _file("adapter", path)
    if path.suffix != file_names.SAFETENSORS or path.name.startswith(file_names.NOT_WEIGHTS):
        return _file("torch.save", path) if _is_single(path) else None
    if path.name in safetensors_header.model_files(path.parent)[0]:
        return _safetensors(path.parent)
    return _file("adapter" if tensor_names.is_adapted(safetensors_header.read(path)) else "safetensors", path)


def _not_found(path: Path, place: Path) -> UserError:
    for link in sorted(place.glob("*")):
        if link.suffix in file_names.READABLE and link.is_symlink() and not link.exists():
            return untrusted_files.leads_nowhere(link)
    if place.name.startswith(OPTIMIZERS):
        what, fix = "holds optimizer state instead of weights", f"give the checkpoint's folder: {place.parent}"
        return UserError(f"{path} {what}", why="there is nothing to read", fix=fix)
    places = (place if place.is_dir() else place.parent, *_folders(place))
    if any(any(folder.glob(file_names.LOCAL_MODELS)) for folder in places):
        return UserError(
            f"{path} is of LOCAL_STATE_DICT: {file_names.LOCAL_MODELS}",
            why="each rank wrote its own part, in a form that only the same rank of the same job can load",
            fix="resume with the same ranks and YAML, and save once under fsdp_state_dict_type: SHARDED_STATE_DICT",
        )
    below = [checkpoint for inner in _all_below(place, DEPTH + 1) if _is_trained(inner) and (checkpoint := look(inner))]
    near = dict.fromkeys(checkpoint.folder for checkpoint in sorted(below, key=lambda item: -item.number))
    if not near:
        fix = "give the folder of a run, train/sft.py --output_dir, or one of its checkpoints"
        return UserError(f"{path} holds no checkpoint", why="there is nothing to read", fix=fix)
    return UserError(
        f"{path} holds no checkpoint itself",
        why="it is unclear which of those below it is meant",
        fix=f"give {' or '.join(map(str, list(near)[:3]))}",
    )
