"""Checkpoints of a model that transformers has sharded, which Trainer refuses to write (transformers 5.23).

They have the files and names of Accelerate's sharded checkpoints of FSDP2: jobs can resume from them on other meshes,
and with Accelerate sharding the model.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal

RELIES_ON = (
    Internal("torch.distributed.tensor.placement_types:_StridedShard"),
    Internal("accelerate.utils.fsdp_utils:_get_model_state_dict", "model adapter_only sd_options"),
    Internal("accelerate.utils.fsdp_utils:_set_model_state_dict", "model state_dict adapter_only sd_options"),
)
OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas")
"""What torch's schedules store of each group of parameters."""


def save_weights(model: Any, checkpoint: Path) -> None:
    """Writes each rank's part of the weights, or of the adapter alone. Collective."""
    _write({"model": _contiguous(_weights(model))}, checkpoint / file_names.SHARDED_MODEL)


def load_weights(model: Any, checkpoint: Path) -> None:
    """Reads the weights that `save_weights` or Accelerate has written. Collective."""
    from accelerate.utils.fsdp_utils import _set_model_state_dict

    if not (checkpoint / file_names.SHARDED_MODEL).is_dir():
        raise UserError(
            f"{checkpoint} holds the whole model in one file",
            why="a mesh of tensor or expert parallelism reads sharded checkpoints only",
            fix="resume it once without tensor and expert parallelism, with fsdp_state_dict_type: "
            "SHARDED_STATE_DICT and one more --max_steps; then go on from the checkpoint that it writes",
        )
    own = _weights(model)
    loaded = _read("model", own, checkpoint / file_names.SHARDED_MODEL)
    _set_model_state_dict(model, loaded, adapter_only=True, sd_options=states.StateDictOptions())


def save_optimizer(trainer: Any, checkpoint: Path) -> None:
    """Writes each rank's part of the optimizer's states, and the schedule of learning rates. Collective.

    Trainer has a group of parameters for each part of the mesh. They are stored as on other meshes: parameters with
    weight decay and those without.
    """
    content: dict[str, Any] = dict(states.get_optimizer_state_dict(trainer.model, trainer.optimizer))
    decaying = set(trainer.get_decay_parameter_names(trainer.model))
    groups = [{**content["param_groups"][place], "params": list[str]()} for place in (0, -1)]
    for group in content["param_groups"]:
        groups[not decaying.issuperset(group["params"][:1])]["params"] += group["params"]  # one of them may have none
    stored = {"state": _contiguous(content["state"]), "param_groups": groups}
    _write({"optimizer": stored}, checkpoint / file_names.SHARDED_OPTIMIZER)
    if trainer.args.should_save:
        schedule = trainer.lr_scheduler.state_dict()
        of_groups = {name: [schedule[name][place] for place in (0, -1)] for name in OF_GROUPS if name in schedule}
        torch.save({**schedule, **of_groups}, checkpoint / file_names.SCHEDULER)


def load_optimizer(trainer: Any, checkpoint: Path) -> None:
    """Reads the states that `save_optimizer` or Accelerate has written. Collective."""
    own: dict[str, Any] = dict(states.get_optimizer_state_dict(trainer.model, trainer.optimizer))
    loaded = _read("optimizer", own, checkpoint / file_names.SHARDED_OPTIMIZER)
    settings = {name: group for group in loaded["param_groups"] for name in group["params"]}
    given = own["param_groups"]
    groups = [{**settings.get((*group["params"], "")[0], group), "params": group["params"]} for group in given]
    filled = {"state": loaded["state"], "param_groups": groups}
    states.set_optimizer_state_dict(trainer.model, trainer.optimizer, filled)
    schedule = torch.load(checkpoint / file_names.SCHEDULER, weights_only=True)
    of_groups = {name: schedule[name][:1] * len(groups) for name in OF_GROUPS if name in schedule}  # all are equal
    trainer.lr_scheduler.load_state_dict({**schedule, **of_groups})


@contextlib.contextmanager
def gathered(trainer: Any, state_dict: dict[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    """All weights for `save_pretrained`, on the first rank, if transformers has sharded the model. Collective."""
    if not trainer.by_transformers:
        yield state_dict
        return
    options = states.StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=hasattr(trainer.model, "peft_config")
    )
    whole = states.get_model_state_dict(trainer.model, options=options)
    with as_whole(trainer.model):
        yield whole


@contextlib.contextmanager
def allowed(args: Any) -> Iterator[None]:
    """Hides whole checkpoints from Trainer's constructor, which refuses them (transformers 5.23)."""
    before, by_transformers = args.save_only_model, LaunchEnvironment.now().by_transformers
    args.save_only_model = by_transformers or before
    try:
        yield
    finally:
        args.save_only_model = before


@contextlib.contextmanager
def as_whole(model: Any) -> Iterator[None]:
    """Makes libraries treat the given tensors as whole: they would gather the model again."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    sharding, size = getattr(inner.config, "distributed_config", None), inner._tp_size
    if sharding is not None:
        inner.config.distributed_config, inner._tp_size = None, None
    try:
        yield
    finally:
        if sharding is not None:
            inner.config.distributed_config, inner._tp_size = sharding, size


def _weights(model: Any) -> dict[str, Any]:
    from accelerate.utils.fsdp_utils import _get_model_state_dict

    weights: dict[str, Any] = _get_model_state_dict(model, adapter_only=True, sd_options=states.StateDictOptions())
    return weights


def _write(content: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save(content, storage_writer=FileSystemWriter(folder))


def _read(name: str, own: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content of a folder for the tensors of `own`, with their placements, and the stored groups of parameters."""
    reader = FileSystemReader(folder)
    tensors = {part: value for part, value in own.items() if part != "param_groups"}
    content = _contiguous(tensors)
    if "param_groups" in own:
        content["param_groups"] = _stored_groups(reader)
    load({name: content}, storage_reader=reader)
    return {**content, **_placed_as({part: content[part] for part in tensors}, tensors)}


def _stored_groups(reader: FileSystemReader) -> list[dict[str, Any]]:
    """Empty groups of parameters, with the checkpoint's number of groups and their keys."""
    keys: dict[int, dict[str, Any]] = {}
    for name in reader.read_metadata().state_dict_metadata:
        if found := re.fullmatch(r"optimizer\.param_groups\.(\d+)\.(.+)", name):
            keys.setdefault(int(found[1]), {})[found[2]] = None
    return [keys[place] for place in sorted(keys)]


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


def _placed_as(content: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Undoes `_contiguous`: the tensors with the placements of `own`."""

    def placed(value: Any, like: Any) -> Any:
        return value.redistribute(placements=like.placements) if isinstance(value, DTensor) else value

    restored: dict[str, Any] = tree_map(placed, content, own)
    return restored
