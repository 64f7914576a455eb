"""The tables of `proofs.py` in RESULTS.md, with the cause of what is trained wrong."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

SCRIPTS = ("Trainer", "TRL", "train/sft.py")
CAUSES = (
    (
        r"^(Trainer|TRL)/.*/GPT-2/.* wrong",
        "Trainer counts one token too many in each row of a model whose class isn't called ForCausalLM: all gradients "
        "are too small by rows / tokens (transformers#46204 mended the others)",
    ),
    (
        r"^Trainer/(FSDP2|HSDP)/.*/label smoothing wrong",
        "Trainer doesn't shift the labels of a model whose class FSDP2 has renamed: it learns to repeat its input. The "
        "same fault with PEFT's class was transformers#27161",
    ),
    (
        r"/bf16 wrong .*(times those of one process|plain loop)",
        "Trainer gives the model the number of tokens as a float, and FSDP rounds it to bfloat16, which has no odd "
        "number over 256",
    ),
    (
        r"^TRL/.*/modules_to_save wrong",
        "TRL multiplies by the head's whole weight outside of its unit (trl#6077): each rank then trains its part of "
        "the head on its own rows alone",
    ),
)
"""Patterns of a result, cell and outcome and what was said, and what causes it."""
PATHS = re.compile(r"/\S*/(?=\S)")


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section: what each script trains right and wrong, and the causes."""
    versions = ", ".join(f"{name} {number}" for name, number in rows[-1]["versions"].items())
    lines = [*HEAD.splitlines(), "", f"{versions}.", "", "| script | cells | right | wrong | refused | not repeated |"]
    lines.append("|---" * 6 + "|")
    for script in SCRIPTS:
        mine = [row for row in rows if row["cell"].startswith(f"{script}/")]
        counts = [
            sum(row["outcome"] == outcome for row in mine) for outcome in ("right", "wrong", "refused", "not repeated")
        ]
        lines.append("| " + " | ".join([script, str(len(mine)), *map(str, counts)]) + " |")
    cells_by_cause: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] == "wrong":
            cells_by_cause.setdefault(cause(row), []).append(row["cell"])
    causes = [f"| {', '.join(cells)} | {text} |" for text, cells in cells_by_cause.items()]
    return [*lines, "", "| wrong | cause |", "|---|---|", *causes]


HEAD = """## What libraries train

`python benchmarks/proofs.py --write`: two steps of two micro-batches of uneven length, of tiny random models on two
ranks of gloo, four for hybrids. Right: each weight's gradient and the optimizer's step are those of one plain process
that repeats the step, and of a plain loop over the same rows whose loss is the mean over the step's tokens."""


def cause(row: Mapping[str, Any]) -> str:
    text = f"{row['cell']} {row['outcome']} {row['said']}"
    return next((why for pattern, why in CAUSES if re.search(pattern, text)), first_sentence(row["said"]))


def first_sentence(text: str) -> str:
    return PATHS.sub("", text.splitlines()[0]).partition(". ")[0].replace("|", "\\|")[:300]
