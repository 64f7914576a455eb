"""Whether libraries train what a plain loop trains: `python benchmarks/proofs.py --write`, per release.

Each cell trains two steps of a tiny model on two or four ranks of gloo, by Trainer, by TRL's sft.py where TRL is
installed, or by train/sft.py. Its gradients and weights are compared twice: with one plain process that repeats what
the ranks did, as in every rehearsal, and with a plain loop over the same rows (`proofs_plain.py`). `--only` takes parts
of cells' names, such as `--only FSDP2/Llama TRL`. Cells that the file of results has for the installed versions are not
run again.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import proofs_case
import proofs_plain
import proofs_tables
import results
from proofs_models import (
    ENGINES,
    FAMILIES,
    FEATURES,
    PLAIN,
    SMOOTHED,
    SMOOTHING,
    job,
    make_model,
    make_rows,
    words,
)

from accel_fsdp.config import JobConfig
from accel_fsdp.ranks import RankEvent
from accel_fsdp.rehearsal import blame, janitor, mistakes, repeated, scaled, warm
from accel_fsdp.rehearsal.job import Outcome, Rehearsed

ROOT = Path(__file__).parent.parent
FILE = Path(tempfile.gettempdir()) / "accel-fsdp-proofs.jsonl"
TRL = importlib.util.find_spec("trl")
SCRIPTS: Mapping[str, Path] = {
    "Trainer": ROOT / "benchmarks/proofs_case.py",
    **({"TRL": Path(str(TRL.origin)).parent / "scripts/sft.py"} if TRL else {}),
    "train/sft.py": ROOT / "train/sft.py",
}
SIDE_BY_SIDE = ("FSDP1 1", "FSDP2")
"""The engines under which every feature runs with every script."""
EXACT, ROUNDED, ROUNDED_RATIO = 1e-3, 0.35, 2e-3
"""The tolerances of a rehearsal: a weight's gradient in float32 and in bfloat16, and there the ratio of all."""
IN_PACKAGE = re.compile(r'File ".*?/site-packages/([a-z0-9_]+)/')
VERSIONS = ("torch", "transformers", "accelerate", "peft", "deepspeed", "trl")


@dataclass(frozen=True)
class Cell:
    script: str
    engine: str
    family: str
    feature: str

    def __str__(self) -> str:
        return "/".join((self.script, self.engine, self.family, self.feature))


@dataclass
class Result:
    """`outcome`: right, wrong, refused or not repeated, by the rehearsal; wrong also if the plain loop alone says so.

    `said` is why, `by` who refused. `ratio` is that of all gradients, `name` the weight that is furthest apart.
    """

    cell: str
    outcome: str
    apart: float | None = None
    ratio: float | None = None
    name: str = ""
    said: str = ""
    by: str = ""
    plain: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)


def cells() -> list[Cell]:
    """Every family with every engine, every engine with every feature, every script with all three."""
    first, *others = SCRIPTS
    llama = next(iter(FAMILIES))
    chosen = [Cell(first, engine, family, PLAIN) for family in FAMILIES for engine in ENGINES]
    chosen += [Cell(first, engine, llama, feature) for feature in FEATURES for engine in ENGINES]
    for script in others:
        chosen += [Cell(script, engine, llama, feature) for feature in FEATURES for engine in SIDE_BY_SIDE]
        chosen += [Cell(script, SIDE_BY_SIDE[-1], family, PLAIN) for family in FAMILIES]
        chosen += [Cell(script, engine, llama, PLAIN) for engine in ENGINES]
    return list(dict.fromkeys(chosen))


def measured(cell: Cell, launcher: Rehearsed, number: int) -> Result:
    """Trains a cell and compares it."""
    family, feature = FAMILIES[cell.family], FEATURES[cell.feature]
    if cell.feature == "tied head" and family.config.get("tie_word_embeddings"):
        raise ValueError(f"{cell.family} has a tied head already")
    model = launcher.folder / f"{cell.family}-{feature.config.get('tie_word_embeddings', '')}".replace(" ", "")
    rows = launcher.folder / "rows"
    if not rows.exists():
        make_rows(rows)
    if not model.exists():
        make_model(model, family, feature)
    small, _ = scaled.scale(JobConfig(job(cell.engine, family, feature)))
    name = f"cell{number}"
    given = words(cell.engine, family, feature, model, rows, launcher.folder / f"{name}.out")
    if cell.script == "TRL":  # which else adds a mixture's router loss, as no other does
        given += ["--router_aux_loss_coef", "0"]
    records = launcher.folder / f"{name}.records"
    outcome = launcher.launch(name, small, given)
    result = judged(cell, outcome)
    if result.outcome != "refused" and records.is_dir() and any(records.iterdir()):
        adapter = proofs_case.Adapter("--use_peft" in given, "--use_dora" in given)
        if adapter.use_peft:
            adapter.lora_target_modules = list(family.projections)
            adapter.lora_modules_to_save = ["lm_head"] if cell.feature == "modules_to_save" else None
        smoothing = SMOOTHED if cell.feature == SMOOTHING else 0.0
        compared_with_plain(result, lambda: proofs_plain.compare(records, model, adapter, smoothing), cell.feature)
    for path in launcher.folder.glob(f"{name}.*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return result


def judged(cell: Cell, outcome: Outcome) -> Result:
    """What the rehearsal itself says of it."""
    if outcome.code or outcome.hang:
        failure = blame.of_outcome(outcome)
        return Result(str(cell), "refused", said=failure.what, by=refuser(cell, outcome))
    if wrong := next(mistakes.find(outcome.events), None):
        content = otherwise(outcome.events)
        return Result(
            str(cell),
            "wrong",
            content.get("apart"),
            content.get("all", content.get("ratio")),
            content.get("name", ""),
            wrong.what,
        )
    updates = [event.content for event in outcome.events if event.kind == "repeated"]
    if not updates:
        why = repeated.summary(outcome.events).rpartition("one process: ")[2]
        return Result(str(cell), "not repeated", said=why)
    return Result(str(cell), "right", max(update["apart"] for update in updates))


def otherwise(events: Sequence[RankEvent]) -> Mapping[str, Any]:
    return next((event.content for event in events if event.kind == "otherwise"), {})


def refuser(cell: Cell, outcome: Outcome) -> str:
    """The package in whose code the first error was raised."""
    if blame.OWN_ERROR.search(outcome.output):
        return "accel-fsdp"
    packages = IN_PACKAGE.findall(outcome.output.partition("Error: ")[0])
    return packages[-1] if packages else cell.script


def compared_with_plain(result: Result, compare: Callable[[], list[proofs_plain.Compared]], feature: str) -> None:
    """Adds to a result what the plain loop says."""
    try:
        compared = compare()
    except Exception:
        result.plain = traceback.format_exc(limit=-1).strip().splitlines()[-1]
        return
    rounds = feature == "bf16"
    worst = max(compared, key=lambda update: update.apart)
    all_apart = max(compared, key=lambda update: abs(update.of_all - 1))
    if rounds and worst.apart <= ROUNDED and abs(all_apart.of_all - 1) > ROUNDED_RATIO:
        result.plain = f"gradients are {all_apart.of_all:.4f} times those of the plain loop"
        worst = all_apart
    elif not worst.apart <= (ROUNDED if rounds else EXACT):
        result.plain = (
            f"gradients are {worst.of_all:.4g} times those of the plain loop; that of {worst.name} is apart by "
            f"{worst.apart:.2g} of its norm"
        )
    else:
        result.plain = "right"
        result.apart = max(worst.apart, result.apart or 0.0) if result.outcome != "wrong" else result.apart
        return
    if result.outcome != "wrong":
        result.outcome, result.said = "wrong", result.plain
        result.apart, result.ratio, result.name = worst.apart, worst.of_all, worst.name


def versions() -> dict[str, str]:
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return versions


def run(chosen: Sequence[Cell], file: Path) -> Iterator[Result]:
    """Trains the cells that the file lacks, and adds each to it."""
    known = {row["cell"] for row in map(json.loads, lines(file)) if row["versions"] == versions()}
    with janitor.folder() as folder:
        os.environ |= janitor.mark(folder) | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "HF_DATASETS_CACHE": str(folder / "datasets"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        warm.start_server(folder)
        for number, cell in enumerate(chosen):
            if str(cell) in known:
                continue
            began = time.monotonic()
            result = measured(cell, Rehearsed(folder, SCRIPTS[cell.script], seconds=120), number)
            result.seconds, result.versions = round(time.monotonic() - began, 1), versions()
            with open(file, "a") as out:
                out.write(json.dumps(asdict(result)) + "\n")
            yield result


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def main() -> None:
    """Measures and prints, or writes into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    parser.add_argument("--only", nargs="*", default=[], help="parts that the names of cells have to contain")
    parser.add_argument("--file", type=Path, default=FILE, help="the results, one cell a line")
    parser.add_argument("--list", action="store_true", help="print the names of cells, and run nothing")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if all(part in str(cell) for part in options.only)]
    if options.list:
        print("\n".join(map(str, chosen)), f"\n{len(chosen)} cells")
        return
    for result in run(chosen, options.file):
        apart = "" if result.apart is None else f" {result.apart:.0e}"
        print(f"{result.seconds:5.1f} s  {result.cell}: {result.outcome}{apart} {result.by} {result.said}", flush=True)
    if options.write:
        results.keep("proofs", proofs_tables.tables([json.loads(line) for line in lines(options.file)]))


if __name__ == "__main__":
    sys.exit(main())
