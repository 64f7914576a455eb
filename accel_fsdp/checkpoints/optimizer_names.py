"""Reads which parameters a saved FSDP optimizer trained, and which of them had a state; no state is read."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from accel_fsdp.checkpoints import dcp, file_names, torch_zip
from accel_fsdp.checkpoints.safe_unpickle import ERRORS
from accel_fsdp.checkpoints.tensor_names import clean_name
from accel_fsdp.checkpoints.tensor_storage import FileReader, damaged

STATES, GROUPS, MEMBERS = "state", "param_groups", "params"
"""The keys of an optimizer's state dict, and the key of the parameters in each group."""


@dataclass(frozen=True)
class OptimizerNames:
    """The names of parameters: those that it trained, and those that had a state."""

    trained: frozenset[str]
    with_state: frozenset[str]


def read(checkpoint: Path) -> OptimizerNames:
    """Reads the list of a sharded optimizer, or the pickle of a full one."""
    sharded, full = checkpoint / file_names.SHARDED_OPTIMIZER, checkpoint / file_names.FULL_OPTIMIZER
    try:
        with closing(FileReader()) as reader:
            if sharded.is_dir():  # paths begin with Accelerate's name for an optimizer
                listed = dcp.listed(sharded, reader, lambda path: path[1:2] == (GROUPS,) and path[-1] == MEMBERS)
                trained = [name for members in listed.values() for name in members or ()]
                with_state = [path[2] for path in listed if path[1:2] == (STATES,)]
            else:
                content = torch_zip.load(reader, full)
                trained = [name for group in content[GROUPS] for name in group[MEMBERS]]
                with_state = list(content[STATES])
            return OptimizerNames(frozenset(map(clean_name, trained)), frozenset(map(clean_name, with_state)))
    except ERRORS as error:
        raise damaged(sharded if sharded.is_dir() else full, f"is damaged: {type(error).__name__}") from error
