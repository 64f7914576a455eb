"""What the machines of a job must share, as settings of a launcher or a rank, and the table of those that differ."""

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_fsdp.errors import UserError, versions
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
    r"(?i)(\w+_)?(out|output|log|logging|cache|tmp|scratch)_(dir|path|folder|file)|(local|node|machine)_(rank|id)"
    r"|host(_?name)?|(gpu|device)(s|_ids?)?|(\w+_)?(addr|address|ip|port)|run_name|project|report_to"
    r"|disable_tqdm|log_level(_replica)?|log_on_each_node|accelerate_config|dataset_num_proc"
    r"|dataloader_(num_workers|pin_memory|persistent_workers|prefetch_factor)|(ddp|hang)_timeout"
)
"""Arguments that may differ between machines: places, logs, trackers, how fast data are read, how long to wait."""
SECRET = re.compile(r"(?i)token|(.*[._])?((hub|hf|auth|access|api)[._]?(token|key)|password|secret)")
"""Arguments that are neither compared nor shown."""
MAYBE_SECRET = re.compile(r"(?i)(.*[._])?(token|key|secret|password)")
"""Arguments whose values are compared, but not shown."""
WORD = re.compile(r"(--?[A-Za-z][\w.-]*|[A-Za-z_+][\w./@]*(?==))(=|\Z)")
"""The beginning of a word that names an argument: `--flag`, `--flag=value` or `name=value`."""
MAY_DIFFER = "ACCEL_FSDP_MAY_DIFFER"
"""The variable that names, on any machine, other settings that may differ."""


def of_job(variables: Mapping[str, str], script: Path, words: Sequence[str] = ()) -> Settings:
    """The settings of a job with any script, on this machine; `variables` are those of its ranks."""
    return {
        **{name: _text(name, value) for name, value in sorted(variables.items()) if VARIABLES.fullmatch(name)},
        **of_arguments(_by_name(words)),
        "script": digest_of(script),
        "python": platform.python_version(),
        **versions(),
        MAY_DIFFER: variables.get(MAY_DIFFER, ""),
    }


def of_arguments(arguments: Mapping[str, object]) -> Settings:
    """The arguments as text, without secrets and those that may differ."""
    kept = (name for name in arguments if not (OWN_ARGUMENTS.fullmatch(name) or SECRET.fullmatch(name)))
    return {name: _text(name, arguments[name]) for name in kept}


def digest_of(content: Path | bytes) -> str:
    """A short hash of bytes or of a file's content; "missing" for a file that can't be read."""
    try:
        data = content if isinstance(content, bytes) else content.read_bytes()
    except OSError:
        return "missing"
    return hashlib.sha256(data).hexdigest()[:16]


def _by_name(words: Sequence[str]) -> dict[str, str]:
    """The values of a command line, by the name that an argument parser gives them."""
    values, name = dict[str, list[str]](), "arguments"
    for word in words:
        if begins := WORD.match(word):
            name, word = _name(begins[1]), word[begins.end() :]
        values.setdefault(name, []).append(word)
    return {name: " ".join(filter(None, given)) or "given" for name, given in values.items()}


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _text(name: str, value: object) -> str:
    """A value as other machines may print it: of a secret and a config file the digest, of a path the last part."""
    if MAYBE_SECRET.fullmatch(name):
        return f"digest {digest_of(str(value).encode())}"
    if name.endswith("_CONFIG_FILE"):
        return digest_of(Path(str(value)))
    return re.sub(r"(?<![^\s,])(~|\.{0,2})/([^\s,]*/)?(?=[^\s,])", "", str(value))


def difference(members: Sequence[tuple[str, Settings]]) -> UserError | None:
    """The error of a job whose members have different settings; none if all are equal, or a member allows it.

    A member is the rank and name of its machine, with its settings.
    """
    words = (word for _, settings in members for word in re.split(r"[,\s]+", settings.get(MAY_DIFFER) or ""))
    allowed, differing, rows = {MAY_DIFFER, *map(_name, words)}, [], [("what", "value", "machine")]
    for name in dict.fromkeys(name for _, settings in members for name in settings):
        holders: dict[str, dict[str, None]] = {}
        for machine, settings in members:
            if (value := settings.get(name, "not set")) is not None:
                holders.setdefault(value, {})[machine] = None
        if len(holders) > 1 and name not in allowed:
            differing.append(name)
            shown = (first_few(list(machines), 4) for machines in holders.values())
            rows += zip((name, *[""] * (len(holders) - 1)), holders, shown, strict=True)
    if not differing:
        return None
    name_width, value_width = (max(len(row[column]) for row in rows) for column in range(2))
    return UserError(
        "the machines of this job have different settings",
        why="the ranks would train parts of one model with different settings, and the result would look complete",
        fix="use the same files, arguments, versions and environment on all machines; "
        f"{MAY_DIFFER}={','.join(differing)} on one of them if they should differ",
        table=[f"{name:{name_width}}  {value:{value_width}}  {machines}" for name, value, machines in rows],
    )
