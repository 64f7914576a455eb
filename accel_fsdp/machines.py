"""Machines in words: `8xH100-80GB`, `2x8xA100-40GB`, `cpu`. Pure."""

import re

from accel_fsdp.errors import UsageError
from accel_fsdp.types import MachineFacts

CPU = MachineFacts(accelerator=None, count=0)
WITHOUT_BF16 = ("V100", "P100", "P40", "P4", "T4", "K80", "M60", "TITAN", "GTX", "QUADRO", "RTX 20", "RTX20")
"""GPUs older than Ampere, whose tensor cores know fp16 only (CUDA compute capability below 8.0)."""

_SHAPE = re.compile(
    r"(?:(?P<machines>\d+)x)?(?P<count>\d+)x\s*(?P<name>[A-Za-z][\w .-]*?)(?:-(?P<memory>\d+)Gi?B)?", re.I
)


def parse(text: str) -> tuple[MachineFacts, int]:
    """Returns one machine and how many of them: `8xH100-80GB` is (8 H100 of 80 GiB, 1), `cpu` a machine without GPU.

    Raises:
        UsageError: the text has another shape.
    """
    if text.strip().lower() == "cpu":
        return CPU, 1
    found = _SHAPE.fullmatch(text.strip())
    numbers = [] if found is None else [found["count"], found["machines"] or "1", found["memory"] or "1"]
    if found is None or any(int(number) < 1 for number in numbers):
        raise UsageError(
            f"--gpus {text} can't be read",
            why="the number of processes, their memory and the precision follow from it",
            fix="--gpus 8xH100-80GB, --gpus 2x8xA100-40GB for two machines, or --gpus cpu",
        )
    memory = float(found["memory"]) if found["memory"] else None
    return MachineFacts(found["name"].strip(), int(found["count"]), memory), int(found["machines"] or 1)


def describe(machine: MachineFacts) -> str:
    """The text that `parse` reads back."""
    if machine.accelerator is None:
        return "cpu"
    memory = f"-{machine.memory_gib:.0f}GB" if machine.memory_gib else ""
    return f"{machine.count}x{_plain_name(machine.accelerator)}{memory}"


def _plain_name(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` is `H100`: what people call it, without maker and memory."""
    words = [
        word
        for word in re.split(r"[\s-]+", name)
        if not re.fullmatch(r"NVIDIA|GeForce|\d+GB|HBM\w*|SXM\d*|PCIE", word, re.I)
    ]
    return re.sub(r"[^\w. ]", "", " ".join(words)) or "GPU"


def has_bf16(machine: MachineFacts) -> bool:
    """Whether the accelerator computes in bf16 at full speed; a CPU does compute in it."""
    name = (machine.accelerator or "").upper()
    return not any(re.search(rf"\b{re.escape(old)}", name) for old in WITHOUT_BF16)
