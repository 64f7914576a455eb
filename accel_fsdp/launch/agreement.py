"""What the machines of a job must share, as settings of a launcher or a rank, and the table of those that differ."""

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_fsdp.errors import UserError, one_line, versions
from accel_fsdp.units import first_few

Settings = Mapping[str, str | None]
"""Values by name; None for a value that this member doesn't know, which is not compared."""

VARIABLES = re.compile(
    r"(?!\w*_(DIR|PATH|HOME|CACHE|DEBUG)$)"
    r"((ACCELERATE|FSDP|PARALLELISM_CONFIG|CUBLAS|CUDNN|TORCHINDUCTOR|DS|LIGER|TRITON|NVTE|XLA)_\w+"
    r"|NVIDIA_TF32_OVERRIDE|NCCL_(ALGO|PROTO)|MKL_CBWR|(ONEDNN|DNNL)_DEFAULT_FPMATH_MODE)"
)
"""Environment variables that change results, or which collectives a rank calls."""
OWN_ARGUMENTS = re.compile(
    r"(\w+_)?(out|output|log|logging|cache|tmp|scratch)_(dir|path|folder|file)|(local|node|machine)_(rank|id)"
    r"|host(_?name)?|(gpu|device)(s|_ids?)?|(\w+_)?(addr|address|ip|port)|run_name|project|report_to|hub_token"
    r"|disable_tqdm|log_level(_replica)?|log_on_each_node|accelerate_config|dataset_num_proc"
    r"|dataloader_(num_workers|pin_memory|persistent_workers|prefetch_factor)|(ddp|hang)_timeout"
)
"""Arguments that may differ between machines: places, logs, trackers, how fast data are read, how long to wait."""
SECRET = re.compile(r"(^|[._])(token|key|secret|password)$")
"""Flags and variables whose values are compared, but not shown."""
MAY_DIFFER = "ACCEL_FSDP_MAY_DIFFER"
"""The variable that names, on any machine, other settings that may differ."""


def of_job(variables: Mapping[str, str], script: Path, words: Sequence[str] = ()) -> Settings:
    """The settings of a job with any script, on this machine; `variables` are those of its ranks."""
    return {
        **{name: _text(name, value) for name, value in sorted(variables.items()) if VARIABLES.fullmatch(name)},
        **of_arguments(_by_flag(words)),
        "script": digest_of(script),
        "python": platform.python_version(),
        **versions(),
        MAY_DIFFER: variables.get(MAY_DIFFER, ""),
    }


def of_arguments(arguments: Mapping[str, object]) -> Settings:
    """The arguments as text, without those that may differ."""
    return {name: _text(name, value) for name, value in arguments.items() if not OWN_ARGUMENTS.fullmatch(_key(name))}


def digest_of(content: Path | bytes) -> str:
    """A short hash of bytes or of a file's content; "missing" for a file that can't be read."""
    try:
        data = content if isinstance(content, bytes) else content.read_bytes()
    except OSError:
        return "missing"
    return hashlib.sha256(data).hexdigest()[:16]


def _by_flag(words: Sequence[str]) -> dict[str, str]:
    """The values of a command line by flag, or by the name before `=`."""
    values: dict[str, list[str]] = {}
    flag = "arguments"
    for word in words:
        name, equals, value = word.partition("=")
        if re.fullmatch(r"--?[A-Za-z][\w.-]*" + (r"|[A-Za-z_+][\w./@]*" if equals else ""), name):
            flag = name
            values.setdefault(flag, []).extend([value] if equals else [])
        else:
            values.setdefault(flag, []).append(word)
    return {flag: " ".join(given) or "given" for flag, given in values.items()}


def _text(name: str, value: object) -> str:
    """A value as other machines may print it: of a secret and a config file the digest, of a path its last part."""
    if name.endswith("_CONFIG_FILE"):
        return digest_of(Path(str(value)))
    if SECRET.search(_key(name)):
        return f"digest {digest_of(str(value).encode())}"
    return re.sub(r"(?<![^\s,])(~|\.{0,2})/([^\s,]*/)?(?=[^\s,])", "", str(value))


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


class Differs(UserError):
    """What all members say; `table` has a line for each value of a setting that differs."""

    def __init__(self, what: str, *, why: str, fix: str, table: Sequence[str] = ()) -> None:
        super().__init__(what, why=why, fix=fix)
        self.table = table

    def __str__(self) -> str:
        what, *rest = super().__str__().split("\n")
        return "\n".join([what, *(f"    {one_line(line)}" for line in self.table), *rest])


def difference(members: Sequence[tuple[str, Settings]]) -> Differs | None:
    """The error of a job whose members have different settings; none if all are equal, or a member allows it.

    A member is the rank and name of its machine, with its settings.
    """
    words = (word for _, settings in members for word in re.split(r"[,\s]+", settings.get(MAY_DIFFER) or ""))
    allowed = {_key(word) for word in (MAY_DIFFER, *words)}
    rows, differing = [("what", "value", "machine")], []
    for name in dict.fromkeys(name for _, settings in members for name in settings):
        holders: dict[str, dict[str, None]] = {}
        for machine, settings in members:
            if (value := settings.get(name, "not set")) is not None:
                holders.setdefault(value, {})[machine] = None
        if len(holders) > 1 and _key(name) not in allowed:
            differing.append(_key(name))
            shown = (first_few(list(machines), 4) for machines in holders.values())
            rows += zip((name, *[""] * (len(holders) - 1)), holders, shown, strict=True)
    if not differing:
        return None
    name_width, value_width = (max(len(row[column]) for row in rows) for column in range(2))
    return Differs(
        "the machines of this job have different settings",
        why="the ranks would train parts of one model with different settings, and the result would look complete",
        fix="use the same files, arguments, versions and environment on all machines; "
        f"{MAY_DIFFER}={','.join(differing)} on one of them if they should differ",
        table=[f"{name:{name_width}}  {value:{value_width}}  {machines}" for name, value, machines in rows],
    )
