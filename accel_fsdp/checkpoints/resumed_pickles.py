"""Checks a checkpoint's pickles safely, before libraries load them when a run resumes; no torch.

torch and DeepSpeed unpickle some of them without restrictions: an untrusted checkpoint would run code.
"""

import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import dcp, deepspeed_files, file_names
from accel_fsdp.checkpoints.safe_pickles import ERRORS, SETTINGS, Inert, damaged, unpickle
from accel_fsdp.checkpoints.safetensors_header import DTYPES
from accel_fsdp.errors import UserError

TENSORS = (
    *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter"),
    *("torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage"),
    *("torch.Size", "torch.Tensor", "torch.device", "_codecs.encode"),
    *(f"torch.{name}" for name in DTYPES),
    *(f"torch.{kind}Storage" for kind in ("Double", "Float", "Half", "BFloat16", "Untyped", "Bool")),
    *(f"torch.{kind}Storage" for kind in ("Long", "Int", "Short", "Char", "Byte")),
)
STATES: Mapping[str, Any] = {
    **dict.fromkeys(TENSORS, Inert),
    **SETTINGS,
    **dict.fromkeys(deepspeed_files.CLASSES, Inert),
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
}
"""The names that a schedule, random states and DeepSpeed's files may contain."""
ZIP = b"PK\x03\x04"
SAVED = (file_names.SCHEDULER, f"{file_names.RNG_STATE}*.pth", f"{file_names.SCALER}*.pt")
ZERO = "*_states.pt"
"""DeepSpeed: all files of its ranks, also those of experts and of the stages of a pipeline."""


def check_saved(path: Path) -> None:
    """Refuses a file of torch.save that is damaged, or whose pickle names more than states need."""
    try:
        with untrusted_files.opened(path) as file:
            if file.read(len(ZIP)) != ZIP:
                raise damaged(path, "is not a file of torch.save's zip format (torch 1.6 or newer)")
            archive = zipfile.ZipFile(file)
            pickles = [record for record in archive.infolist() if record.filename.lower().endswith("/data.pkl")]
            if len(pickles) != 1:  # torch ignores the case of records' names
                raise damaged(path, "is damaged: it holds no pickle, or two")
            pickles[0].CRC = None  # type: ignore[assignment]  # torch may leave it out, and doesn't compare it
            content = archive.read(pickles[0])
    except (zipfile.BadZipFile, NotImplementedError, *ERRORS) as error:
        raise damaged(path, f"is damaged: {type(error).__name__} in its archive") from error
    unpickle(content, STATES, path)


def refusal(checkpoint: Path, part: int = 0, of: int = 1) -> UserError | None:
    """Why a checkpoint's pickles can't be loaded: one is damaged or could run code; None if all are fine.

    Every `of`-th file is read, from `part` on, so that ranks share the work. Weights and optimizer states in single
    files are left out: torch itself loads them as tensors alone.
    """
    try:
        latest = deepspeed_files.latest(checkpoint)
        if latest is not None:  # DeepSpeed would follow it out of the checkpoint
            untrusted_files.inside(checkpoint, latest, file_names.LATEST)
        metadata = [path for place in ("", "*/") for path in checkpoint.glob(f"{place}*{file_names.DCP_METADATA}")]
        states = [path for name in SAVED for path in checkpoint.glob(name)]
        paths = sorted(path for path in (*metadata, *states, *checkpoint.rglob(ZERO)) if path.exists())
        for path in paths[part::of]:
            if path.name.endswith(file_names.DCP_METADATA):
                dcp.unpickled(dcp.read_bytes(path), path)
            else:
                check_saved(path)
    except UserError as error:
        return error
    return None
