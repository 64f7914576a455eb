"""Untrusted checkpoints: makes torch read pickles as data when a run resumes, without running code.

`torch.distributed.checkpoint` loads `.metadata` with `pickle.load`, and the values beside tensors, such as learning
rates, with `torch.load(weights_only=False)` (torch 2.13). `enable()` restricts both to the types that they need.
"""

import io
import pickle
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from accel_fsdp.checkpoints import dcp
from accel_fsdp.library_internals import Internal, patch

CODE = "an untrusted checkpoint would run code when a run resumes from it"


@cache
def enable() -> None:
    """Makes torch read distributed checkpoints without running the code that they name. Idempotent."""
    read_metadata_as_data()
    read_values_as_data()


class _Unpickler(pickle.Unpickler):
    """Finds DCP's own types alone, for a `.metadata` file that was read as inert values before."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in dcp.ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} is not a type of DCP's metadata")
        return _format if name == "getattr" else super().find_class(module, name)


def _format(formats: Any, name: str) -> Any:
    """The memory format that `.metadata` names; the earlier check has refused any other name."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING[name]


def _load(file: IO[bytes]) -> Any:
    content = file.read(dcp.LARGEST_METADATA + 1)
    dcp.unpickled(content, Path(file.name))
    return _Unpickler(io.BytesIO(content)).load()


@patch(
    Internal("torch.distributed.checkpoint.filesystem:pickle"),
    Internal("torch.distributed.checkpoint.filesystem:FileSystemReader.read_metadata", "self *"),
    Internal("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING"),
    why=CODE,
)
def read_metadata_as_data() -> None:
    """torch loads `.metadata` with `pickle.load`, which calls whatever the file names."""
    from torch.distributed.checkpoint import filesystem

    filesystem.pickle = SimpleNamespace(load=_load, dump=pickle.dump)  # type: ignore[attr-defined, assignment]


@patch(
    Internal("torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes", "self read_item value"),
    Internal("torch.distributed.checkpoint._traverse:set_element", "root_dict path value"),
    why=CODE,
)
def read_values_as_data() -> None:
    """torch loads values beside tensors with `weights_only=False`, which calls whatever they name."""
    import torch
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from transformers.trainer_pt_utils import safe_globals

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        with safe_globals():
            loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
