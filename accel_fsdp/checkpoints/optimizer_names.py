"""The parameters of an FSDP optimizer when it was saved, and those of them that had a state; no state is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints import dcp, file_names, torch_zip
from accel_fsdp.checkpoints.safe_unpickle import ERRORS
from accel_fsdp.checkpoints.tensor_names import clean_name
from accel_fsdp.checkpoints.tensor_storage import FileReader, damaged

STATES, GROUPS, MEMBERS = "state", "param_groups", "params"
"""The keys of an optimizer's state dict, and of what each group trains."""


@dataclass(frozen=True)
class OptimizerNames:
    """The names of parameters: those that it trained, and those that had a state."""

    trained: frozenset[str]
    with_state: frozenset[str]


def read(checkpoint: Path) -> OptimizerNames:
    """Reads the list of a sharded optimizer, or the pickle of a full one."""
    sharded, full = checkpoint / file_names.SHARDED_OPTIMIZER, checkpoint / file_names.FULL_OPTIMIZER
    reader = FileReader()
    try:
        return _of_folder(sharded, reader) if sharded.is_dir() else _of_state_dict(torch_zip.load(reader, full))
    except ERRORS as error:
        raise damaged(sharded if sharded.is_dir() else full, f"is damaged: {type(error).__name__}") from error
    finally:
        reader.close()


def _of_folder(folder: Path, reader: FileReader) -> OptimizerNames:
    """Paths begin with Accelerate's name for an optimizer."""
    listed = dcp.listed(folder, reader, lambda path: path[1:2] == (GROUPS,) and path[-1] == MEMBERS)
    with_state = [path[2] for path in listed if path[1:2] == (STATES,)]
    return _names([name for members in listed.values() for name in members or ()], with_state)


def _of_state_dict(content: Any) -> OptimizerNames:
    return _names([name for group in content[GROUPS] for name in group[MEMBERS]], list(content[STATES]))


def _names(trained: list[str], with_state: list[str]) -> OptimizerNames:
    return OptimizerNames(*(frozenset(map(clean_name, names)) for names in (trained, with_state)))
