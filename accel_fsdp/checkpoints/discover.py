"""Finds checkpoints, says what kind they are and what they lack. The only module that knows their folders' layout."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import completeness, deepspeed, file_names, safetensors_header, summary, tensor_names
from accel_fsdp.errors import UsageError, UserError

CheckpointKind = Literal["sharded (DCP)", "FSDP full", "safetensors", "adapter", "ZeRO", "torch.save"]
OPTIMIZERS = ("optim", file_names.OPTIMIZER)
DEPTH = 2
EXPORTED = ("safetensors", "adapter")


@dataclass(frozen=True)
class CheckpointLocation:
    """A checkpoint or model: what kind, the folder that a user would name, where its weights lie, and what it lacks."""

    kind: CheckpointKind
    folder: Path
    weights: Path
    missing: tuple[str, ...] = ()
    optimizer: Path | None = None

    @property
    def number(self) -> int:
        named = file_names.NUMBERED.fullmatch(self.folder.name)
        return int(named[1]) if named else -1

    @property
    def size_bytes(self) -> int:
        paths = self.weights.iterdir() if self.weights.is_dir() else [self.weights]
        return sum(path.stat().st_size for path in paths if path.is_file() and path.suffix in file_names.READABLE)

    def __str__(self) -> str:
        lacks = f", lacks {', '.join(self.missing)}" if self.missing else ""
        return f"{self.weights if self.weights.is_file() else self.folder}: {self.kind}{lacks}"


def look(folder: Path) -> CheckpointLocation | None:
    """What `folder` itself is: a checkpoint, an exported model, or the inner folder of one; None if none of them."""
    for read in (_zero, _sharded, _safetensors, _adapter, _full, _single):
        found = read(folder)
        if found is not None:
            lacks = (*found.missing, *([completeness.ITS_END] if _is_temporary(folder) else []))
            return replace(found, missing=tuple({one.split(" (")[0]: one for one in lacks}.values()))  # each once
    return None


def _is_temporary(folder: Path) -> bool:
    """What `atomic_files.replaced_folder` was writing when its process was killed."""
    return folder.name.startswith(".") and folder.name.endswith(".tmp")


def _sharded(folder: Path) -> CheckpointLocation | None:
    inner = [path for path in _folders(folder) if _is_dcp(path) and not path.name.startswith(OPTIMIZERS)]
    named = [path for path in inner if path.name.startswith(file_names.FSDP_MODEL)]
    named = named or [path for path in inner if not path.name[-1].isdecimal()]  # step-10 is a checkpoint of its own
    if _is_dcp(folder):
        named = [folder]
    if not named or folder.name.startswith(OPTIMIZERS):
        return None
    place = named[0]
    optimizer = next((path for path in _folders(folder) if _is_dcp(path) and path.name.startswith(OPTIMIZERS)), None)
    lacking = [] if completeness.is_whole_dcp(place) else [f"{place.name}/{file_names.DCP_METADATA}"]
    lacking += [] if any(place.glob(file_names.DCP_PARTS)) else [f"{place.name}/{file_names.DCP_PARTS}"]
    outer = folder.parent if place == folder and folder.name.startswith(file_names.FSDP_MODEL) else folder
    return CheckpointLocation("sharded (DCP)", outer, place, (*lacking, *completeness.unfinished(outer)), optimizer)


def _is_dcp(folder: Path) -> bool:
    return completeness.is_whole_dcp(folder) or any(folder.glob(file_names.DCP_PARTS))


def check_bytes(found: CheckpointLocation, optimizer: bool = False) -> None:
    """Holds the weights' files, and the optimizer's where it is wanted, against the hashes that `complete.json` has."""
    places = [found.weights, *([found.optimizer] if optimizer and found.optimizer else [])]

    def read(name: str) -> bool:
        path = found.folder / name
        return any(path == place or place in path.parents for place in places) or (
            path.parent == found.folder
            and path.suffix in (*file_names.READABLE, ".json")
            and not name.startswith(file_names.SPARED)
        )

    if what := completeness.damage(found.folder, read):
        raise UserError(
            f"{found.folder} is damaged: {what}",
            why="the model would be another than was trained",
            fix="copy the checkpoint again from where it was written, or export an older one",
        )


def _safetensors(folder: Path) -> CheckpointLocation | None:
    try:
        names = _names(folder)
    except UserError as error:
        return CheckpointLocation("safetensors", folder, folder, (f"an index that can be read: {error.what}",))
    if not names:
        return None
    lacking = [name for name in names if not (folder / name).is_file()]
    return CheckpointLocation("safetensors", folder, folder, (*lacking, *completeness.unfinished(folder)))


def _names(folder: Path) -> list[str]:
    """The safetensors files that a folder stands for: those of from_pretrained, else each rank's."""
    return summary.model_files(folder)[0] or [path.name for path in folder.glob(file_names.RANKS_MODEL)]


def _adapter(folder: Path) -> CheckpointLocation | None:
    if not (folder / file_names.ADAPTER).is_file():
        return None
    lacking = () if (folder / file_names.ADAPTER_CONFIG).is_file() else (file_names.ADAPTER_CONFIG,)
    return CheckpointLocation(
        "adapter", folder, folder / file_names.ADAPTER, (*lacking, *completeness.unfinished(folder))
    )


def adapter_beside(found: CheckpointLocation) -> CheckpointLocation | None:
    """The adapter in the folder of a whole model, which is the one that the folder's name stands for."""
    return _adapter(found.folder) if found.kind == "safetensors" and found.weights == found.folder else None


def _full(folder: Path) -> CheckpointLocation | None:
    path = folder / file_names.FULL_MODEL
    return CheckpointLocation("FSDP full", folder, path, completeness.unfinished(folder)) if path.is_file() else None


def _zero(folder: Path) -> CheckpointLocation | None:
    place = deepspeed.folder_of(folder)
    if place is None:
        return None
    lacking = [name for name in (file_names.ZERO_MODELS, file_names.ZERO_OPTIMIZERS) if not any(place.glob(name))]
    outer = folder.parent if place == folder and folder.name.startswith(file_names.GLOBAL_STEP) else folder
    return CheckpointLocation(
        "ZeRO", outer, place, (*(f"{place.name}/{name}" for name in lacking), *completeness.unfinished(outer))
    )


def _single(folder: Path) -> CheckpointLocation | None:
    paths = [path for kind in file_names.TORCH_SAVED for path in sorted(folder.glob(f"*{kind}")) if is_single(path)]
    return CheckpointLocation("torch.save", folder, paths[0]) if len(paths) == 1 else None


def is_single(path: Path) -> bool:
    return path.suffix in file_names.TORCH_SAVED and not path.name.startswith(file_names.NOT_WEIGHTS)


def _folders(folder: Path) -> list[Path]:
    """Those of a folder that count: hidden ones are being written, or are on their way to be deleted."""
    inner = folder.iterdir() if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) else ()
    return sorted(path for path in inner if path.is_dir() and not path.name.startswith("."))


def listed(run: Path) -> list[CheckpointLocation]:
    """The checkpoints and models in a run's folder, oldest first; the folder itself if it is one."""
    found = look(run)
    if found is not None and found.kind != "torch.save":
        return [found]
    inner = [one for path in _folders(run) if _is_trained(path) and (one := look(path)) is not None]
    if found is not None and all(one.kind in EXPORTED for one in inner):
        return [found]
    if inner and not _is_run(run) and any(map(_is_run, _all_below(run, DEPTH))):
        return []  # which of them is meant can't be guessed, and what lies beside them is no run's
    return sorted(inner, key=lambda one: (one.number, one.folder.stat().st_mtime))


def _is_trained(folder: Path) -> bool:
    """Whether a run's folder may be its result: not the model it began with, nor an export."""
    return folder.name != file_names.DESCRIBED and not (folder / file_names.REPORT).is_file()


def _is_run(folder: Path) -> bool:
    return any(file_names.NUMBERED.fullmatch(path.name) and look(path) for path in _folders(folder))


def _all_below(folder: Path, depth: int) -> Iterator[Path]:
    for path in _folders(folder):
        yield path
        yield from _all_below(path, depth - 1) if depth > 1 else ()


def find(path: Path) -> tuple[CheckpointLocation, list[CheckpointLocation]]:
    """The checkpoint that `path` means, of a run the newest complete one, and those newer that were passed over.

    Raises:
        UserError: there is none, or the one that was named is incomplete.
    """
    place = _meant(path)
    single = _of_file(place)
    found = [single] if single else listed(place)
    if not found:
        raise _nothing(path, place)
    whole = [one for one in found if not one.missing]
    if not whole:
        raise UserError(
            f"{found[-1].folder} lacks {', '.join(found[-1].missing)}",
            why="it is half-written, or its other half lies on another machine",
            fix="export an older checkpoint; on several machines train to a shared disk",
        )
    _check_links(whole[-1], place if place.is_dir() else place.parent)
    return whole[-1], found[found.index(whole[-1]) + 1 :]


def _check_links(found: CheckpointLocation, named: Path) -> None:
    """Refuses parts of a checkpoint that a link puts there, from outside of what the user named."""
    for part in (found.folder, found.weights, found.optimizer):
        if part is not None and part.is_relative_to(named):
            untrusted_files.check_folder(part, named)


def of_adapter(found: CheckpointLocation, name: str) -> CheckpointLocation:
    """One of the adapters that PEFT has saved in one folder: `default` in the folder itself, others in their own."""
    untrusted_files.check_folder(found.folder / name, found.folder)
    inner = _adapter(found.folder / name)
    if inner is None and name != "default":
        held = ["default", *others(found)]
        raise UsageError(
            f"--adapter {name}: {found.folder} holds {', '.join(held)}",
            why="there is no adapter of that name to export",
            fix=f"--adapter {held[-1]}",
        )
    return inner or found


def others(found: CheckpointLocation) -> list[str]:
    return [path.name for path in _folders(found.folder) if found.kind == "adapter" and _adapter(path)]


def _meant(path: Path) -> Path:
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise UserError(
            f"cannot read {path}: Permission denied",
            why="its content can't be read",
            fix="give yourself read and execute permission on it",
        )
    if not path.exists():
        raise UserError(f"{path} does not exist", why="there is nothing to export", fix="accel-fsdp export RUN --list")
    place = path.resolve() if path.is_file() else path  # a file may be named by a link to it
    if place.is_file() and (place.suffix == file_names.DCP_PART or place.name == file_names.DCP_METADATA):
        return place.parent
    return place


def _of_file(path: Path) -> CheckpointLocation | None:
    if not path.is_file():
        return None
    if path.name == file_names.FULL_MODEL:
        return CheckpointLocation("FSDP full", path.parent, path, completeness.unfinished(path.parent))
    if path.suffix == file_names.SAFETENSORS and not path.name.startswith(file_names.NOT_WEIGHTS):
        return _of_safetensors(path)
    if is_single(path):
        return CheckpointLocation("torch.save", path.parent, path, completeness.unfinished(path.parent))
    return None


def _of_safetensors(path: Path) -> CheckpointLocation | None:
    """The model or adapter that a file is, or is a part of; never what another file beside it holds.

    Raises:
        UserError: it is a part of a model whose other parts aren't known, or aren't what its folder stands for.
    """
    folder = path.parent
    if path.name == file_names.ADAPTER:
        return _adapter(folder)
    if path.name in _names(folder):
        return _safetensors(folder)
    if file_names.PART.search(path.name):
        other = (folder / file_names.MODEL).is_file()
        raise UserError(
            f"{path} is a part of a model, "
            + (f"and {file_names.MODEL} beside it is what the folder stands for" if other else "and no index lists it"),
            why="the other parts of the model would be missing",
            fix=f"move {file_names.MODEL} away, or name that" if other else f"put {file_names.INDEX} beside it",
        )
    kind: CheckpointKind = "adapter" if tensor_names.is_adapted(safetensors_header.read(path)) else "safetensors"
    return CheckpointLocation(kind, folder, path, completeness.unfinished(folder))


def _nothing(path: Path, place: Path) -> UserError:
    if place.name.startswith(OPTIMIZERS):
        return UserError(
            f"{path} holds optimizer state, no weights",
            why="there is nothing to export",
            fix=f"give the checkpoint's folder: {place.parent}",
        )
    if any(
        any(folder.glob(file_names.LOCAL_MODELS))
        for folder in (place if place.is_dir() else place.parent, *_folders(place))
    ):
        return UserError(
            f"{path} is of LOCAL_STATE_DICT: {file_names.LOCAL_MODELS}",
            why="each rank wrote its own part, in a form that only the same rank of the same job can load",
            fix="resume with the same ranks and YAML, and save once under fsdp_state_dict_type: SHARDED_STATE_DICT",
        )
    near = sorted(_below(place, DEPTH), key=lambda one: one.number < 0)[:3]
    return UserError(
        f"{path} holds no checkpoint" + (" itself" if near else ""),
        why=f"{'one checkpoint lies' if len(near) == 1 else 'several checkpoints lie'} below it"
        if near
        else "there is nothing to export",
        fix=f"give {'one of them' if len(near) > 1 else 'it'}: {', '.join(str(one.folder) for one in near)}"
        if near
        else "give the folder of a run, train/sft.py --output_dir, or one of its checkpoints",
    )


def _below(folder: Path, depth: int) -> Iterator[CheckpointLocation]:
    for path in _folders(folder):
        found = listed(path) if path.name != file_names.DESCRIBED else []
        yield from found[-1:]
        if not found and depth > 1:
            yield from _below(path, depth - 1)
