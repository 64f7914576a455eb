"""The tables of `proofs.py` in RESULTS.md, with a numbered note for each thing that isn't right."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proofs_models import ENGINES, FAMILIES, FEATURES, PLAIN

SCRIPTS = ("Trainer", "TRL", "train/sft.py")
SIDE_BY_SIDE = ("FSDP1 1", "FSDP2")
LLAMA = next(iter(FAMILIES))
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


class Notes:
    """Numbers each text once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section: families by engines, features by engines, scripts side by side, notes."""
    notes, by_cell = Notes(), {row["cell"]: row for row in rows}

    def cell(script: str, engine: str, family: str, feature: str) -> str:
        row = by_cell.get("/".join((script, engine, family, feature)))
        return "" if row is None else shown(row, notes)

    alone = sum(row["outcome"] == "not repeated" and row["plain"] == "right" for row in rows)
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("right", "wrong", "refused")}
    counts |= {"right by the plain loop alone": alone}
    counts |= {"not compared": len(rows) - sum(counts.values())}
    versions = ", ".join(f"{name} {number}" for name, number in rows[-1]["versions"].items())
    minutes = sum(row["seconds"] for row in rows) / 60
    total = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    by_engine = [f"Trainer, {LLAMA}", *ENGINES]
    lines = [
        *HEAD.splitlines(),
        "",
        f"{len(rows)} cells in {minutes:.0f} minutes, on two cores that other work shared:",
        f"{total}.",
        f"{versions}.",
        "",
        *table(["Trainer", *ENGINES], FAMILIES, lambda family, engine: cell("Trainer", engine, family, PLAIN)),
        *table(by_engine, FEATURES, lambda feature, engine: cell("Trainer", engine, LLAMA, feature)),
    ]
    for engine in SIDE_BY_SIDE:
        head = [f"{engine}, {LLAMA}", *SCRIPTS]
        lines += table(head, FEATURES, lambda feature, script, engine=engine: cell(script, engine, LLAMA, feature))
    last = SIDE_BY_SIDE[-1]
    lines += table([last, *SCRIPTS], FAMILIES, lambda family, script: cell(script, last, family, PLAIN))
    lines += table([LLAMA, *SCRIPTS], ENGINES, lambda engine, script: cell(script, engine, LLAMA, PLAIN))
    return [*lines, *(f"{number}. {text}" for number, text in enumerate(notes.texts, 1))]


HEAD = """## What libraries train

`python benchmarks/proofs.py --write`: two steps of two micro-batches of uneven length, of tiny random models on two
ranks of gloo, four for hybrids. A number is the largest distance of a weight's gradient, relative to its norm, from
one plain process that repeats the step, and from a plain loop over the same rows whose loss is the mean over the
step's tokens; the optimizer's step is then the one of plain PyTorch too. In bold what is trained otherwise: the ratio
of all gradients, and the note's number. FSDP1's strategies are numbered as in Accelerate; HSDP is FSDP2 on a mesh of
2 x 2."""


def table(head: Sequence[str], names: Mapping[str, Any], cell: Callable[[str, str], str]) -> list[str]:
    """A table with a row for each name, and a column for each of the head's others; columns without a cell are left."""
    columns = [column for column in head[1:] if any(cell(name, column) for name in names)]
    lines = [f"| {' | '.join([head[0], *columns])} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {' | '.join([name, *(cell(name, column) for column in columns)])} |" for name in names]
    return [*lines, ""]


def shown(row: Mapping[str, Any], notes: Notes) -> str:
    """A cell's text."""
    outcome, apart = row["outcome"], row["apart"]
    if outcome == "right":
        return f"{apart:.0e}"
    sentence = first_sentence(row["said"])
    if outcome == "refused":
        return "refused " + notes.mark(f"{row['by']}: {sentence}")
    if outcome == "not repeated":
        alone = f"{apart:.0e}" if row["plain"] == "right" else ""
        return f"{alone} {notes.mark(f'not repeated: {sentence}')}"
    ratio = "wrong" if row["ratio"] is None else f"{row['ratio']:.4g}"
    return f"**{ratio}** {notes.mark(cause(row))}"


def cause(row: Mapping[str, Any]) -> str:
    text = f"{row['cell']} {row['outcome']} {row['said']}"
    return next((why for pattern, why in CAUSES if re.search(pattern, text)), first_sentence(row["said"]))


def first_sentence(text: str) -> str:
    return PATHS.sub("", text.splitlines()[0]).partition(". ")[0].replace("|", "\\|")[:300]
