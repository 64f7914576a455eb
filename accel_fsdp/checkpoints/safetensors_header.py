"""The headers and indexes of safetensors files: names, dtypes and shapes, read by their own library without torch."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names
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
TIED = (("lm_head.weight", "model.embed_tokens.weight"), ("lm_head.weight", "transformer.wte.weight"))


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
        untrusted_files.check(path)  # refuses links out of the folder, pipes and devices
        return safe_open(path, framework)
    except FileNotFoundError:
        raise untrusted_files.broken(path, "is missing") from None
    except (SafetensorError, OSError) as error:
        raise untrusted_files.broken(path, f"is damaged: {error}") from error


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name. Raises as `opened`."""
    file = opened(path)
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it isn't a mapping
    return {name: Tensor(path, name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of all `model*.safetensors` in a folder, without broken files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob(file_names.MODELS)):
        with suppress(UserError):
            tensors |= read(path)
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
    if untrusted_files.read_json(folder / file_names.CONFIG, folder).get("transformers_weights") is not None:
        raise untrusted_files.broken(folder / file_names.CONFIG, "names other files: transformers_weights")
    if (folder / file_names.MODEL).is_file():
        return [file_names.MODEL], {}
    path = folder / file_names.INDEX
    index = untrusted_files.read_json(path)
    if not index and not path.exists():
        return [], {}
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise untrusted_files.broken(path, "is damaged: no list of tensors and their files")
    return sorted(set(listed.values())), listed
