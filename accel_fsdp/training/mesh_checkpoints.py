"""Checkpoints of a model that transformers has sharded, which Trainer refuses to write (transformers 5.23).

They have the files and names of Accelerate's sharded checkpoints of FSDP2: jobs can resume from them on other meshes,
and with Accelerate sharding the model.
"""

import contextlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import parts

RELIES_ON = (
    *parts.RELIES_ON,
    Internal("torch.distributed.tensor.placement_types:_StridedShard"),
    Internal("accelerate.utils.fsdp_utils:_get_model_state_dict", "model adapter_only sd_options"),
    Internal("accelerate.utils.fsdp_utils:_set_model_state_dict", "model state_dict adapter_only sd_options"),
)
OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas")
"""The values that torch's schedules store for each group of parameters."""
GROUPS = "param_groups"
ADAPTER_NAME = re.compile(r"\.default(?=\.|$)")
"""Accelerate's whole files name the adapter, in names that PEFT gives and takes without it."""


def save_weights(model: Any, checkpoint: Path) -> None:
    """Writes each rank's part of the weights, or of the adapter alone. Collective."""
    _write({"model": _contiguous(_weights(model))}, checkpoint / file_names.SHARDED_MODEL)


def load_weights(model: Any, checkpoint: Path) -> None:
    """Reads the weights that `save_weights` or Accelerate has written. Collective."""
    from accelerate.utils.fsdp_utils import _set_model_state_dict

    loaded = _read("model", _weights(model), checkpoint)
    _set_model_state_dict(model, loaded, adapter_only=True, sd_options=states.StateDictOptions())


def save_optimizer(trainer: Any, checkpoint: Path) -> None:
    """Writes each rank's part of the optimizer's states, and the schedule of learning rates. Collective.

    Trainer has a group of parameters for each part of the mesh. They are stored as on other meshes: parameters with
    weight decay and those without.
    """
    content: dict[str, Any] = dict(states.get_optimizer_state_dict(trainer.model, trainer.optimizer))
    decaying = set(trainer.get_decay_parameter_names(trainer.model))
    groups = [{**content[GROUPS][index], "params": list[str]()} for index in (0, -1)]
    for group in content[GROUPS]:
        groups[not decaying.issuperset(group["params"][:1])]["params"] += group["params"]  # one of two may be empty
    stored = {"state": _contiguous(content["state"]), GROUPS: groups}
    _write({"optimizer": stored}, checkpoint / file_names.SHARDED_OPTIMIZER)
    if trainer.args.should_save:
        schedule = trainer.lr_scheduler.state_dict()
        of_groups = {name: [schedule[name][index] for index in (0, -1)] for name in OF_GROUPS if name in schedule}
        torch.save({**schedule, **of_groups}, checkpoint / file_names.SCHEDULER)


def load_optimizer(trainer: Any, checkpoint: Path) -> None:
    """Reads the states that `save_optimizer` or Accelerate has written. Collective."""
    own_state: dict[str, Any] = dict(states.get_optimizer_state_dict(trainer.model, trainer.optimizer))
    loaded = _read("optimizer", own_state, checkpoint)
    settings = {name: group for group in loaded[GROUPS] for name in group["params"]}
    given = own_state[GROUPS]
    groups = [{**settings.get((*group["params"], "")[0], group), "params": group["params"]} for group in given]
    filled = {"state": loaded["state"], GROUPS: groups}
    states.set_optimizer_state_dict(trainer.model, trainer.optimizer, filled)
    schedule = torch.load(checkpoint / file_names.SCHEDULER, weights_only=True)
    of_groups = {name: schedule[name][:1] * len(groups) for name in OF_GROUPS if name in schedule}  # all equal
    trainer.lr_scheduler.load_state_dict({**schedule, **of_groups})


@contextlib.contextmanager
def gathered(trainer: Any, state_dict: dict[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    """Yields all weights for `save_pretrained` on the first rank, if transformers has sharded the model. Collective."""
    if not trainer.by_transformers:
        yield state_dict
        return
    options = states.StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=hasattr(trainer.model, "peft_config")
    )
    whole = states.get_model_state_dict(trainer.model, options=options)
    with as_whole(trainer.model):
        yield whole


def past_constructor(args: Any) -> AbstractContextManager[Any]:
    """Makes Trainer's constructor take whole checkpoints on a mesh, which it refuses (transformers 5.23)."""
    return patch.object(args, "save_only_model", LaunchEnvironment.now().by_transformers or args.save_only_model)


@contextlib.contextmanager
def as_whole(model: Any) -> Iterator[None]:
    """Makes libraries treat the given tensors as whole: they would gather the model again."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(inner.config, "distributed_config", None) is None:
        yield
        return
    with patch.object(inner.config, "distributed_config", None), patch.object(inner, "_tp_size", None):
        yield


def _weights(model: Any) -> dict[str, Any]:
    from accelerate.utils.fsdp_utils import _get_model_state_dict

    weights: dict[str, Any] = _get_model_state_dict(model, adapter_only=True, sd_options=states.StateDictOptions())
    return weights


def _write(content: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(content, storage_writer=FileSystemWriter(folder))  # type: ignore[attr-defined]


def _read(name: str, own: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds for the tensors of `own`, with their placements, and its own groups of parameters."""
    folder = checkpoint / file_names.SHARDED[name]
    tensors = {part: value for part, value in own.items() if part != GROUPS}
    if not folder.is_dir():
        whole = _load_whole_file(checkpoint / file_names.FULL[name])
        return {**_own_parts(tensors, whole), **({GROUPS: whole[GROUPS]} if GROUPS in own else {})}
    reader = FileSystemReader(folder)
    content = _contiguous(tensors)
    if GROUPS in own:
        content[GROUPS] = _stored_groups(reader)
    load({name: content}, storage_reader=reader)
    return {**content, **tree_map(parts.placed_as, {part: content[part] for part in tensors}, tensors)}


def _load_whole_file(file: Path) -> dict[str, Any]:
    """A file of FULL_STATE_DICT, of which each rank reads from the disk what it uses."""
    if not file.is_file():
        raise UserError(
            f"{file.parent} has neither shards nor {file.name}",
            why="a mesh of tensor or expert parallelism resumes from checkpoints of FSDP",
            fix=f"train/sft.py --model_name_or_path OUT, after accel-fsdp export {file.parent} OUT",
        )
    return {ADAPTER_NAME.sub("", name): value for name, value in torch.load(file, weights_only=True, mmap=True).items()}


def _own_parts(own: Any, whole: Any) -> Any:
    """This rank's parts of whole values, placed as `own`."""
    if isinstance(own, dict):
        return {name: _own_parts(value, whole[name]) for name, value in own.items()}
    if not isinstance(own, DTensor):
        return whole
    return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None).clone()


def _stored_groups(reader: FileSystemReader) -> list[dict[str, Any]]:
    """Empty groups of parameters, with the checkpoint's number of groups and their keys."""
    keys: dict[int, dict[str, Any]] = {}
    for name in reader.read_metadata().state_dict_metadata:
        if match := re.fullmatch(r"optimizer\.param_groups\.(\d+)\.(.+)", name):
            keys.setdefault(int(match[1]), {})[match[2]] = None
    return [keys[number] for number in sorted(keys)]


def _contiguous(content: dict[str, Any]) -> dict[str, Any]:
    """The tensors as torch's distributed checkpoints can describe them: each rank's part in one piece (torch 2.13).

    A strided part would be stored at the offset of one piece, without an error.
    """

    def placed(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        whole = [Shard(place.dim) if isinstance(place, _StridedShard) else place for place in value.placements]
        return value.redistribute(placements=whole)

    contiguous: dict[str, Any] = tree_map(placed, content)
    return contiguous
