"""Where the ranks of this machine were when the job failed, from the stacks that they wrote."""

import re
import sysconfig
from pathlib import Path

FIRST, LAST = "(most recent call first)", "(most recent call last)"
"""The heads of stacks by C code, where the main thread's comes last, and of an error's."""
FRAME = {
    head: re.compile(rf'^  File "(.+)", line (\d+){comma} in (\S+)', re.MULTILINE)
    for head, comma in ((FIRST, ""), (LAST, ","))
}
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
LIBRARIES = tuple(f"{sysconfig.get_path('purelib')}/{name}/" for name in ("torch", "accelerate"))
RECORDED = {
    **dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The variables of torch's flight recorder, by new names and old: how many collectives it keeps, and where they go."""


def recorder(folder: Path) -> dict[str, str]:
    """The variables for torch's record of collectives, which NCCL's timeout writes; torchfrtrace reads it."""
    return {**RECORDED, **dict.fromkeys(RECORDS, str(folder / "collectives_of_rank_"))}


def lines(folder: Path) -> list[str]:
    """A line for each rank of this machine, which has opened its file at its start; empty if none wrote a stack."""
    texts = {int(path.name[5:]): path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("rank_*")}
    if not any(texts.values()):
        return []
    shown = [f"  rank {rank}: {_place(text) if text else 'wrote none'}" for rank, text in sorted(texts.items())]
    return [f"where the ranks of this machine were; their stacks are in {folder}:", *shown]


def _place(text: str) -> str:
    """The innermost code that isn't torch's, Accelerate's or Python's own, and the collective that it waited in."""
    head = LAST if LAST in text else FIRST
    frames = FRAME[head].findall(text.rpartition(head)[2])  # a rank may write its stacks also after its error
    frames = frames[::-1] if head == LAST else frames
    collective = ""
    for file, line, function in frames:
        if file.endswith(COLLECTIVES):
            collective = collective if function in ("wrapper", "wait") else f"{function}, "
        elif not file.startswith("<") and not file.startswith(LIBRARIES) and not _is_pythons(file):
            return f"{collective}{file}:{line} in {function}"
    return "in code without a line of Python"


def _is_pythons(file: str) -> bool:
    return file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file
