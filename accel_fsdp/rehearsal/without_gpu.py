"""Recognizes script lines that need a GPU, and suggests what to write instead."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

RAISED = re.compile(
    r"Torch not compiled with \w+ enabled|No CUDA GPUs are available|Found no NVIDIA driver|invalid device ordinal"
    r"|Cannot access accelerator device when none is available|compiled without CUDA|requires CUDA support|CUDA error:"
    r"|CUDA driver initialization failed|invalid argument to reset_|NVTX functions not installed"
    r"|dummy base class|'_cuda_\w+'|Cannot get CUDA generator|deserialize object on a CUDA device|NCCL|nccl"
)
"""torch's errors without a GPU, in builds with and without CUDA."""
ASKED = "the script asks for a GPU, and a rehearsal has none"
BACKEND = "init_process_group() without a backend: torch then takes gloo on CPU and NCCL on GPUs"
CALL = "if torch.cuda.is_available(): before the call"
DEVICE = 'accelerator.device, or model.to(torch.device("cpu")) where torch.cuda.is_available() is false'
GO_ON = 'let it go on without a GPU: device "cpu", backend "gloo"'
CALLED = re.compile(r"\bcuda\.\w+\(|\btorch\.accelerator\.\w+\(")
MISSING = re.compile(r"no attribute '(\w+)'|name '(\w+)' is not defined|variable '(\w+)'")
ASKS = re.compile(r"\b(cuda|accelerator)\b.*\bis_available\b|\bis_available\b.*\b(cuda|accelerator)\b")
SPEAKS_OF_ONE = re.compile(r"gpu|cuda|torch\.accelerator", re.IGNORECASE)
LINES_BEFORE = 3


def instead(error: str, line: str) -> str:
    """The fix for the script's `line` that raised `error`; empty if the error has another cause."""
    if RAISED.search(error):
        if "nccl" in error.lower():
            return BACKEND
        called = CALLED.search(_source(line)) and ".to(" not in _source(line)
        return CALL if called else DEVICE
    return _set_with_gpu_alone(error, line)


def why_ended(line: str) -> str:
    """The fix for a script that ended by itself because it found no GPU; empty for other reasons."""
    return GO_ON if SPEAKS_OF_ONE.search(_source(line, LINES_BEFORE)) else ""


def _set_with_gpu_alone(error: str, line: str) -> str:
    """The fix for a missing name that the script sets only after it has found a GPU."""
    match = MISSING.search(error)
    file = _file(line)
    if match is None or not file.is_file():
        return ""
    name = next(filter(None, match.groups()))
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ASKS.search(ast.unparse(node.test)) and name in _set_in(node):
            return f"set {name} without a GPU too: line {node.lineno} sets it if {ast.unparse(node.test)}, false here"
    return ""


def _set_in(branch: ast.If) -> Iterator[str]:
    for node in (inner for statement in branch.body for inner in ast.walk(statement)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _source(line: str, before: int = 0) -> str:
    """The text of a file:line, and of `before` lines above it."""
    file = _file(line)
    if not file.is_file():
        return ""
    number = int(line.rpartition(":")[2])
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[max(0, number - 1 - before) : number])


def _file(line: str) -> Path:
    return Path(line.rpartition(":")[0])
