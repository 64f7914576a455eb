"""safetensors files and checkpoint folders, read by name, size and JSON header: no torch, nothing unpickled."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names, safetensors_header
from accel_fsdp.checkpoints.completeness import CheckpointFacts
from accel_fsdp.checkpoints.safetensors_header import Tensor
from accel_fsdp.errors import UsageError, UserError

TIED = (("lm_head.weight", "model.embed_tokens.weight"), ("lm_head.weight", "transformer.wte.weight"))


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


def is_tied_apart(tensors: dict[str, Tensor]) -> bool:
    """Whether head and embedding are both stored, and differ. Needs torch where both are."""
    for head, embedding in ((tensors.get(head), tensors.get(embedding)) for head, embedding in TIED):
        if head and embedding:
            return head.dtype != embedding.dtype or not head.load().equal(embedding.load())
    return False


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
    """A JSON mapping; empty if there is no such file. `within` as in `untrusted_files.opened`."""
    return untrusted_files.read_json(path, within) or {}


def facts_of(folder: Path) -> CheckpointFacts:
    """Reads this folder without its subfolders; what isn't a plain file or folder of its own doesn't count."""
    if not folder.is_dir():
        raise UsageError(
            f"checkpoint {folder} is not a folder",
            why="there is nothing to look at",
            fix="the path of RUN/checkpoint-N",
        )
    paths = [path for path in sorted(folder.iterdir()) if _is_plain(path)]
    names = {path.name for path in paths}
    sharded = [path for path in paths if path.is_dir() and any(path.glob(file_names.DCP_PARTS))]
    return CheckpointFacts(
        name=str(folder),
        sharded=any(path.name.startswith(file_names.TORCH_STEM) for path in sharded),
        full=file_names.FULL_MODEL in names,
        hub=any(Path(name).suffix in file_names.WEIGHTS and not name.startswith(file_names.STATE) for name in names),
        optimizer=any(name.startswith(file_names.OPTIMIZER) for name in names),
        scheduler=file_names.SCHEDULER in names,
        by_accelerator=any(name.startswith(f"{file_names.RANDOM_STATES}_") for name in names),
    )


def _is_plain(path: Path) -> bool:
    """Whether a path is a folder or plain file that can be opened, and no link out of its folder."""
    try:
        if path.is_dir():
            untrusted_files.check_folder(path, path.parent)
        else:
            untrusted_files.check(path)
    except (FileNotFoundError, UserError):
        return False
    return True
