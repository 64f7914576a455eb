"""Checks a checkpoint's pickles safely, before libraries load them when a run resumes.

torch and DeepSpeed unpickle some of them without restrictions: an untrusted checkpoint would run code.
"""

from contextlib import closing
from pathlib import Path

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import dcp, deepspeed, file_names, torch_zip
from accel_fsdp.checkpoints.safe_unpickle import Inert
from accel_fsdp.checkpoints.tensor_storage import FileReader
from accel_fsdp.errors import UserError

NUMPY = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Inert for core in ("core", "_core")},
    ("numpy", "ndarray"): Inert,
}
"""Types in random states besides tensors and plain data."""
STATES = (file_names.SCHEDULER, f"{file_names.RNG_STATE}*.pth", f"{file_names.SCALER}*.pt")
ZERO = "*_states.pt"
"""DeepSpeed: all files of its ranks, also those of experts and of the stages of a pipeline."""


def refusal(checkpoint: Path, part: int = 0, of: int = 1) -> UserError | None:
    """Why a checkpoint's pickles can't be loaded: one is damaged or could run code; None if all are fine.

    Every `of`-th file is read, from `part` on, so that ranks share the work. Weights and optimizer states in single
    files are left out: torch itself loads them as tensors alone.
    """
    try:
        _check_folder_of_zero(checkpoint)
        metadata = [path for place in ("", "*/") for path in checkpoint.glob(f"{place}*{file_names.DCP_METADATA}")]
        states = [path for name in STATES for path in checkpoint.glob(name)]
        paths = sorted(path for path in (*metadata, *states, *checkpoint.rglob(ZERO)) if path.exists())
        with closing(FileReader()) as reader:
            for path in paths[part::of]:
                if path.name.endswith(file_names.DCP_METADATA):
                    dcp.unpickled(dcp.read_bytes(path), path)
                else:
                    torch_zip.load(reader, path, {**NUMPY, **deepspeed.ADMITTED})
    except UserError as error:
        return error
    return None


def _check_folder_of_zero(checkpoint: Path) -> None:
    """Refuses a `latest` that names a folder outside of the checkpoint, which DeepSpeed would follow."""
    name = deepspeed.latest(checkpoint)
    if name is not None:
        untrusted_files.inside(checkpoint, name, file_names.LATEST)
