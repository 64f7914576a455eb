"""The headers of safetensors files, read by their own library: names, dtypes and shapes, without torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.errors import UserError

TORCH_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"},
    **{"I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn"},
    **{"F8_E5M2": "float8_e5m2", "C64": "complex64", "U64": "uint64", "U32": "uint32", "U16": "uint16"},
    **{"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}
"""torch's names of the dtypes of headers."""
ITEM_BYTES = {short: int(re.sub(r"\D+(\d+).*", r"\1", short.replace("BOOL", "U8"))) // 8 for short in TORCH_NAMES}
DTYPES = {name: short for short, name in TORCH_NAMES.items()}


@dataclass(frozen=True)
class Tensor:
    """One tensor in a safetensors file, with its dtype as the format spells it (BF16)."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def load(self) -> Any:
        return opened(self.file, "pt").get_tensor(self.name)


def opened(path: Path, framework: str = "np") -> Any:
    """An open safetensors file.

    Raises:
        UserError: the file is missing, cut short or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with untrusted_files.opened(path):  # refuses links out of the folder, pipes and devices
            return safe_open(path, framework)
    except FileNotFoundError:
        raise damaged(path, "missing") from None
    except (SafetensorError, OSError) as error:
        raise damaged(path, str(error)) from error


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name. Raises as `opened`."""
    file = opened(path)
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it isn't a mapping
    return {name: Tensor(path, name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} is {what}" if what == "missing" else f"{path} is damaged: {what}",
        why="its tensors would differ from the written ones",
        fix="copy that file again from where it was written",
    )
