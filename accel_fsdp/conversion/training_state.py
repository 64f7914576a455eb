"""What a checkpoint holds for a resume, whoever wrote it: weights, moments, and the optimizer's groups, by name."""

from dataclasses import dataclass
from typing import Any

from accel_fsdp.checkpoints import (
    CheckpointLocation,
    Stored,
    dcp,
    deepspeed,
    discover,
    file_names,
    open_checkpoint,
    saved_files,
)
from accel_fsdp.errors import UserError

PARAMS, GROUPS = "params", "param_groups"
"""torch: the names of a group's parameters, and the groups, in the state of an optimizer."""
STATE = "state."
"""The beginning of the path of each parameter's state."""
Group = dict[str, Any]
"""A group of the optimizer's parameters: their names under PARAMS, and settings such as `lr` and `weight_decay`."""


@dataclass(frozen=True)
class TrainingState:
    """Nothing is read of the tensors yet. `moments` has those of each parameter, by name and key (`exp_avg`, `step`).

    A moment has the shape of its weight, or no dimension.
    """

    weights: dict[str, Stored]
    moments: dict[str, dict[str, Stored]]
    groups: list[Group]

    @property
    def filled_groups(self) -> list[Group]:
        """The groups that have parameters: DeepSpeed removes others."""
        return [group for group in self.groups if group[PARAMS]]

    @property
    def trained(self) -> set[str]:
        return {name for group in self.groups for name in group[PARAMS]}

    @property
    def tensors(self) -> dict[str, Stored]:
        """All tensors, by names that tell weights and moments apart."""
        moments = {f"{key} of {name}": part for name, of_name in self.moments.items() for key, part in of_name.items()}
        return {**self.weights, **moments}


def read(checkpoint: CheckpointLocation) -> TrainingState:
    """Finds a checkpoint's training state.

    Raises:
        UserError: it has no optimizer, only an adapter, or its optimizer doesn't name its parameters or holds more
        than tensors.
    """
    content, models = open_checkpoint.read(checkpoint, optimizer=True), discover.models(checkpoint)
    if len(models) > 1:
        raise refused(f"{checkpoint.folder} holds {len(models)} models", "a conversion is of one and its optimizer")
    if content.adapter:
        raise refused(f"{checkpoint.folder} is of an adapter", "only checkpoints of full training are converted")
    groups, paths = _groups(checkpoint)
    all_paths = (*paths, *content.optimizer)
    if odd := [path for path in all_paths if path not in content.optimizer or not path.startswith(STATE)]:
        raise refused(
            f"the optimizer's {odd[0]} is of an unexpected kind",
            "its state must be tensors, and its settings plain numbers, as those of torch's optimizers",
        )
    if not groups:
        raise refused(
            f"{checkpoint.folder} holds no optimizer whose state names the parameters",
            "one process and DDP number them, --save_only_model leaves it out, and a single file isn't all",
        )
    moments: dict[str, dict[str, Stored]] = {}
    for path, stored in content.optimizer.items():
        name, _, key = path.removeprefix(STATE).rpartition(".")
        moments.setdefault(name, {})[key] = stored
    return TrainingState(content.tensors, moments, groups)


def refused(what: str, why: str) -> UserError:
    """The error for a checkpoint that isn't converted; a new run from its weights always works."""
    fix = "accel-fsdp export (--which, --merge-adapter), then a new run: train/sft.py --model_name_or_path OUT"
    return UserError(what, why=why, fix=fix)


def _groups(checkpoint: CheckpointLocation) -> tuple[list[Group], list[str]]:
    """The optimizer's groups whose parameters have names, and the paths of its state, tensors or not."""
    if checkpoint.kind == "ZeRO":
        return deepspeed.groups(checkpoint.weights), []
    if checkpoint.optimizer is not None:
        listed = dcp.listed(checkpoint.optimizer, lambda path: GROUPS in path)
        by_number: dict[int, dict[str, Any]] = {}
        for path, value in listed.items():
            if len(path) >= 3 and path[-3] == GROUPS and path[-2].isdecimal():
                by_number.setdefault(int(path[-2]), {})[path[-1]] = value
        stored = [by_number[number] for number in sorted(by_number)]
        paths = [open_checkpoint.optimizer_name(path) for path in listed if "state" in path[:-1]]
    else:
        file = checkpoint.folder / file_names.FULL_OPTIMIZER
        content = saved_files.load(file) if file.is_file() else {}
        stored = content.get(GROUPS, [])
        paths = [f"{STATE}{name}.{key}" for name, state in content.get("state", {}).items() for key in state]
    groups = [group for group in stored if isinstance(group.get(PARAMS), list)]
    return [group for group in groups if all(isinstance(name, str) for name in group[PARAMS])], paths
