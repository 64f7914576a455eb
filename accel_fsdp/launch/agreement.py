"""Compares the settings that all machines of a job must share, before anything is trained.

Each member (a launcher, a rank) reads the settings of all; if they differ, all members end with the same table.
"""

import hashlib
import json
import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from accel_fsdp import __version__
from accel_fsdp.errors import UserError, one_line, versions_of
from accel_fsdp.units import first_few

Settings = Mapping[str, Mapping[str, Any]]
"""Names and values, by the group that they belong to."""

LIBRARIES = (
    *("torch", "accelerate", "transformers", "tokenizers", "datasets", "peft", "trl", "safetensors", "numpy"),
    *("deepspeed", "bitsandbytes", "liger-kernel", "flash-attn", "torchao", "triton", "kernels", "xformers"),
    *("flash-linear-attention", "causal-conv1d", "mamba-ssm", "transformer-engine"),
)
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""The packages with NCCL that torch's wheels depend on."""
VARIABLES = re.compile(
    r"(ACCELERATE|FSDP|PARALLELISM_CONFIG|CUBLAS|CUBLASLT|CUDNN|TORCHINDUCTOR|TORCHDYNAMO|TORCH_COMPILE|DS|LIGER"
    r"|FLASH_ATTENTION|ROCBLAS|HIPBLASLT|MIOPEN|TRITON|NVTE|PYTORCH_TUNABLEOP|TORCH_BLAS_PREFER)_\w+"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|DISABLE_ADDMM_CUDA_LT|NCCL_(ALGO|PROTO|NVLS_ENABLE)"
    r"|XLA_(FLAGS|USE_BF16|DOWNCAST_BF16)|(ONEDNN|DNNL)_DEFAULT_FPMATH_MODE|ATEN_CPU_CAPABILITY|MKL_CBWR"
    r"|HCCL_DETERMINISTIC|USE_HUB_KERNELS|TRANSFORMERS_(SDPA|DISABLE)_\w+"
)
"""Environment variables that change results, or which collectives a rank calls."""
OWN_VARIABLES = re.compile(
    r"\w+_(DIR|PATH|HOME|FILE|ADDR|PORT|ACCELERATOR)|(\w+_)?(CACHE|LOG(S|GING|INFO|DEST)?|DEBUG)(_\w+)?|ACCELERATE_(TORCH_DEVICE|ENABLE_RICH)"
    r"|TORCHINDUCTOR_COMPILE_THREADS|DS_BUILD_\w+"
)
"""Exceptions, which may differ between machines: paths, caches, logs, devices."""
CONFIG_FILES = ("ACCELERATE_DEEPSPEED_CONFIG_FILE",)
"""Variables that name a file; its content is compared."""
OWN_ARGUMENTS = re.compile(
    r"(out|output|log|logs|logging|cache|tmp)|(\w+_)?(out|output|log|logs|logging|cache|tmp|temp|scratch)"
    r"_(dir|path|folder|root|file)"
    r"|(local|node|machine)_?(rank|id|index)|host|host_?name|node_?name"
    r"|(gpu|device)(s|_ids?)?|(\w+_)?(addr|address|ip|port)"
    r"|run_name|project|report_to|hub_token|disable_tqdm|log_level(_replica)?|log_on_each_node|accelerate_config"
    r"|dataset_num_proc|(dataloader_)?(num_workers|pin_memory|persistent_workers|prefetch_factor)"
    r"|ddp_timeout|hang_timeout"
)
"""Arguments that may differ between machines: places, logs, trackers, how fast data are read, how long to wait."""
SECRET_FLAGS = re.compile(r"([\w.]*[_.])?(token|password|secret|key)")
"""Flags whose values are compared, but not shown."""
SECRET_VARIABLES = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
"""Variables whose values are compared, but not shown."""
MAY_DIFFER = "ACCEL_FSDP_MAY_DIFFER"
"""The variable that names, on any machine, other settings that may differ."""
NAMED = ("arguments", "environment", "versions")
"""Groups whose settings the variable names one by one; of other groups it names the whole group."""
SHOWN_NAMES = 6
"""The most names that are shown of each group: thousands of tensors may differ."""
SHOWN_MACHINES = 4
LONGEST_VALUE = 60


@dataclass(frozen=True)
class Member:
    """A process that takes part in the comparison: its number and its machine."""

    number: int
    machine: int
    host: str = field(default_factory=socket.gethostname)
    may_differ: Sequence[str] = field(default_factory=lambda: may_differ())

    @property
    def place(self) -> str:
        return f"{self.machine} ({self.host})"


def may_differ() -> list[str]:
    """The settings that a person here has allowed to differ."""
    return [_key(name) for name in re.split(r"[,\s]+", os.environ.get(MAY_DIFFER, "")) if name]


def _value_text(value: Any) -> str:
    """The value as text, in full: two long values may differ only at their ends."""
    if isinstance(value, float):
        return f"{value:.12g}"
    return "none" if value is None or value == "" else str(value)


# The compared settings


def versions() -> dict[str, str]:
    installed = versions_of((*LIBRARIES, *NCCL))
    return {"accel-fsdp": __version__} | {"nccl" if name in NCCL else name: installed[name] for name in installed}


@cache
def code_digest() -> str:
    """A hash of this package's code: in a clone it changes without its version."""
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    return digest_of("".join(f"{file.relative_to(package)} {digest_of(file)}\n" for file in files).encode())


def is_compared(variable: str) -> bool:
    """Whether an environment variable must have the same value on all machines."""
    return bool(VARIABLES.fullmatch(variable)) and not OWN_VARIABLES.fullmatch(variable)


def is_own(argument: str) -> bool:
    """Whether an argument, given by its flag or name, may differ between machines."""
    return bool(OWN_ARGUMENTS.fullmatch(_key(argument)))


def digest_of_settings(settings: Settings) -> str:
    return digest_of(json.dumps(settings, sort_keys=True, default=str).encode())


def of_job(variables: Mapping[str, str], script: Path, words: Sequence[str] = ()) -> Settings:
    """The settings of a job with any script, on this machine; `variables` are those of its ranks."""
    plain = {name: _printable_value(name, value) for name, value in variables.items() if is_compared(name)}
    files = {name: digest_of(Path(value)) for name, value in variables.items() if name in CONFIG_FILES}
    return {
        "environment": dict(sorted({**plain, **files}.items())),
        "script": {script.name: digest_of(script)},
        "arguments": flags_of(words),
        "versions": {"python": platform.python_version(), **versions(), "accel-fsdp-code": code_digest()},
    }


def digest_of(content: Path | bytes) -> str:
    """A short hash of bytes or of a file's content; "missing" for a file that can't be read."""
    try:
        data = content if isinstance(content, bytes) else content.read_bytes()
    except OSError:
        return "missing"
    return hashlib.sha256(data).hexdigest()[:16]


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flattened.update({f"{name}.{key}": inner for key, inner in flat(value).items()})
        else:
            flattened[name] = value if value is None or isinstance(value, (str, int, float)) else str(value)
    return flattened


def flags_of(words: Sequence[str]) -> dict[str, str]:
    """The arguments of a script by flag, or by the name before `=`, without those that may differ.

    The values of a flag that is given several times are divided by its name.
    """
    values_of: dict[str, list[str]] = {}
    flag = "arguments"
    for word in words:
        name, _, value = word.partition("=")
        if re.match(r"--?[A-Za-z]", word):
            flag = name if name.startswith("--") else word
            earlier = [flag] if flag in values_of else []
            values_of.setdefault(flag, []).extend(earlier + ([value] if value and flag == name else []))
        elif value and re.fullmatch(r"[A-Za-z_][\w.]*", name):
            values_of.setdefault(name, []).append(value)
        else:
            values_of.setdefault(flag, []).append(word)
    flags = {}
    for flag, values in values_of.items():
        if not is_own(flag):
            value = " ".join(map(portable, values)) or "given"
            flags[flag] = digest_of(value.encode()) if SECRET_FLAGS.fullmatch(_key(flag)) else value
    return flags


def _printable_value(variable: str, value: str) -> str:
    """A variable's value as other machines may print it: a secret is replaced by its hash."""
    return f"a secret ({digest_of(value.encode())[:6]})" if SECRET_VARIABLES.search(variable) else portable(value)


def portable(value: str) -> str:
    """A value without its machine's own parts: paths become their last parts, this host's name becomes HOST.

    A host name that is a plain word, such as train, stays: the word may mean something else.
    """
    host = socket.gethostname()
    text = re.sub(rf"\b{re.escape(host)}\b", "HOST", value) if re.search(r"[\d.-]", host) else value
    return ",".join(map(_last_part, text.split(",")))


def _last_part(word: str) -> str:
    """The last part of a path, relative or absolute; a word that isn't a path here, such as a hub id, stays."""
    is_path = word.startswith(("/", "./", "../", "~")) or os.path.exists(word)
    return os.path.basename(os.path.abspath(os.path.expanduser(word))) if is_path else word


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


# The comparison


class Differs(UserError):
    """Raised by all members; `lines` make the table."""

    def __init__(self, what: str, *, why: str, fix: str, lines: Sequence[str] = ()) -> None:
        super().__init__(what, why=why, fix=fix)
        self.lines = lines

    def __str__(self) -> str:
        first, *lines = super().__str__().split("\n")
        return "\n".join([first, *(f"    {one_line(line)}" for line in self.lines), *lines])


def compare(members: Iterable[tuple[Member, Settings]]) -> None:
    """Raises Differs, the same on all members, if their settings differ and none of them allows it.

    A group of settings is compared among the members that have it.
    """
    settings = sorted(members, key=lambda pair: pair[0].number)
    allowed = {_key(name) for member, _ in settings for name in member.may_differ}
    rows, names, counts = [("what", "value", "machine")], list[str](), Counter[str]()
    for group in dict.fromkeys(group for _, own in settings for group in own):
        tables = [(member, own[group]) for member, own in settings if group in own]
        for name in dict.fromkeys(name for _, table in tables for name in table):
            holders: dict[str, list[Member]] = {}
            for member, table in tables:
                holders.setdefault(_value_text(table.get(name)), []).append(member)
            if len(holders) == 1 or {_key(name), _key(group)} & allowed:
                continue
            names.append(_key(name) if group in NAMED else group)
            counts[group] += 1
            rows += _rows(f"{group}: {name}", holders) if counts[group] <= SHOWN_NAMES else []
    rows += [(f"{group}: {count - SHOWN_NAMES} more", "", "") for group, count in counts.items() if count > SHOWN_NAMES]
    if names:
        shown = ",".join(list(dict.fromkeys(names))[:SHOWN_NAMES]) + (",..." if len({*names}) > SHOWN_NAMES else "")
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        raise Differs(
            "the machines of this job have different settings",
            lines=[f"{name:{widths[0]}}  {value:{widths[1]}}  {place}".rstrip() for name, value, place in rows],
            why="the ranks would train parts of one model with different settings, and the result would look complete",
            fix="use the same files, arguments, versions and environment on all machines; "
            f"{MAY_DIFFER}={shown} on one of them if they should differ",
        )


def _rows(name: str, holders: Mapping[str, Sequence[Member]]) -> list[tuple[str, str, str]]:
    """A row for each value of a setting, the value of the first machine first."""
    places = [{member.place for member in members} for members in holders.values()]
    by_rank = len(set().union(*places)) < sum(map(len, places))
    values = zip(_shortened(list(holders)), holders.values(), strict=True)
    rows = [(value, _place_names(members, by_rank)) for value, members in values]
    return [(name if not number else "", *row) for number, row in enumerate(rows)]


def _place_names(members: Sequence[Member], by_rank: bool) -> str:
    """Names the machines, or the ranks if those of one machine differ."""
    places = list(dict.fromkeys(f"{m.place} rank {m.number}" if by_rank else m.place for m in members))
    return first_few(places, SHOWN_MACHINES)


def _shortened(values: list[str]) -> list[str]:
    """The values shortened for the table: if one is long, the part of each around the first difference."""
    if max(map(len, values)) <= LONGEST_VALUE:
        return values
    common = len(os.path.commonprefix(values))  # noqa: RUF071  # letter by letter
    start = max(common - LONGEST_VALUE // 3, 0)
    end = start + LONGEST_VALUE
    return [f"{'...' if start else ''}{value[start:end]}{'...' if value[end:] else ''}" for value in values]
