"""A real model on real data: `python benchmarks/real_run.py FOLDOC [--write]`, with the model of `make demo`.

FOLDOC is the folder of an unpacked Debian package: `apt-get download dict-foldoc; dpkg -x dict-foldoc_*.deb foldoc`.
It holds the Free On-line Dictionary of Computing (http://www.foldoc.org/, Editor Denis Howe, GFDL). Each definition's
first paragraph becomes an answer; SmolLM2-135M-Instruct is trained on them for 200 steps by two ranks, and base and
exported model then define ten terms that were held out, with all their other names.

With --write, `docs/real_run.md` and its picture are made again.
"""

import argparse
import gzip
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from accel_fsdp import atomic_files
from accel_fsdp.errors import UserError, guard
from accel_fsdp.training.reporting import run_record

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "train"))

PAGE, PICTURE = ROOT / "docs" / "real_run.md", ROOT / "docs" / "real_run.svg"
ASKED = (
    *("compiler", "deadlock", "encryption", "linked list", "modem"),
    *("operating system", "password", "recursion", "search engine", "spreadsheet"),
)
HELD_OUT = 60
"""Definitions to evaluate on, besides those of the ten terms."""
SHORTEST, LONGEST = 80, 450
"""Characters of an answer."""
FIX = "apt-get download dict-foldoc; dpkg -x dict-foldoc_*.deb foldoc"
SEED = 20240817
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
TRAINING = {
    **{"max_steps": 200, "per_device_train_batch_size": 2, "learning_rate": 5e-5, "warmup_steps": 10},
    **{"lr_scheduler_type": "cosine", "max_length": 192, "assistant_only_loss": "true", "logging_steps": 5},
    **{"eval_strategy": "steps", "eval_steps": 50, "eval_on_start": "true", "per_device_eval_batch_size": 4},
    **{"save_steps": 100, "save_total_limit": 1},
}


@dataclass(frozen=True)
class Definition:
    """One entry of the dictionary: its names, and the first paragraph of its text."""

    names: tuple[str, ...]
    text: str

    @property
    def chat(self) -> dict[str, Any]:
        """As a row of data."""
        answer = {"role": "assistant", "content": self.text}
        return {"messages": [{"role": "user", "content": question(self.names[0])}, answer]}


@dataclass(frozen=True)
class Answer:
    """What base and exported model say of a term, and how many words each shares with the dictionary (F1)."""

    term: str
    base: str
    exported: str
    scores: tuple[float, float]


def question(term: str) -> str:
    """What a person would ask."""
    return f"What does the computing term “{term}” mean?"


def definitions(folder: Path) -> list[Definition]:
    """All entries with a paragraph of usual length, each once.

    Raises:
        UserError: the folder doesn't hold the dictionary.
    """
    index = next(folder.rglob("foldoc.index"), None)
    content = next(folder.rglob("foldoc.dict.dz"), None)
    if index is None or content is None:
        raise UserError(f"{folder}: no foldoc.index and foldoc.dict.dz", why="the data come from them", fix=FIX)
    text = gzip.decompress(content.read_bytes())
    places = {tuple(line.split("\t")[1:]) for line in index.read_text().splitlines()}
    entries = [text[number(start) :][: number(size)].decode() for start, size in sorted(places)]
    return [one for entry in entries if (one := definition(entry)) is not None]


def number(digits: str) -> int:
    """A number as dictd's index has it."""
    value = 0
    for digit in digits:
        value = value * 64 + DIGITS.index(digit)
    return value


def definition(entry: str) -> Definition | None:
    """Names before the first empty line, then paragraphs; subjects and cross references lose their brackets."""
    head, _, rest = entry.partition("\n\n")
    paragraph = " ".join(rest.partition("\n\n")[0].split())
    paragraph = re.sub(r"^<[^>]*> *", "", paragraph)
    paragraph = re.sub(r"^\([^)]*\) *", "", re.sub(r"[{}]", "", paragraph))
    usual = SHORTEST <= len(paragraph) <= LONGEST and paragraph.endswith(".") and paragraph[0].isupper()
    return Definition(tuple(head.strip().split("\n")), paragraph) if usual and not head.startswith("00-") else None


def write_data(folder: Path, definitions: list[Definition]) -> dict[str, str]:
    """Writes `train.jsonl` and `test.jsonl`; returns the dictionary's words on the ten terms, which are in neither."""
    wanted = {definition.names[0]: definition.text for definition in definitions if definition.names[0] in ASKED}
    missing = set(ASKED) - set(wanted)
    if missing:
        raise UserError(f"no definition of {sorted(missing)}", why="it may be another edition", fix=FIX)
    named = re.compile("|".join(rf"\b{re.escape(term)}\b" for term in ASKED), re.IGNORECASE)
    others = [definition for definition in definitions if not any(named.fullmatch(name) for name in definition.names)]
    others = [other for other in others if not named.search(other.text[:40])]  # nor another one's words on them
    random.Random(SEED).shuffle(others)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", others[:HELD_OUT]), ("train", others[HELD_OUT:])):
        lines = "".join(json.dumps(document.chat, ensure_ascii=False) + "\n" for document in part)
        atomic_files.write_text(folder / f"{name}.jsonl", lines)
    print(f"{len(others) - HELD_OUT} definitions to train on, {HELD_OUT} held out, and those of the ten terms")
    return wanted


def train(model: Path, folder: Path) -> Path:
    """Configures, trains and exports as a user would; returns the run's folder."""
    config, run = folder / "fsdp.yaml", folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    command = ["accel-fsdp", "config", "--yes", "--model", model, "--num-processes", "2", "--mixed-precision", "no"]
    subprocess.run([*map(str, command), "--output", str(config), "--force"], check=True)
    flags = [word for name, value in TRAINING.items() for word in (f"--{name}", str(value))]
    places = {"model_name_or_path": model, "dataset_name": folder / "data", "output_dir": run}
    paths = [word for name, value in places.items() for word in (f"--{name}", str(value))]
    script = ["accelerate", "launch", "--config_file", str(config), str(ROOT / "train" / "sft.py")]
    subprocess.run([*script, *paths, *flags], check=True)
    return run


def answers(folder: Path) -> list[str]:
    """What the model of a folder says to the ten questions, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import demo

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    return [demo.answer(model, tokenizer, question(term)) for term in ASKED]


def export_offline(run: Path, target: Path) -> Path:
    """Exports the run's last checkpoint as one would later, on another machine."""
    subprocess.run(["accel-fsdp", "export", str(run), str(target), "--force"], check=True)
    return target


def shared_words(text: str, reference: str) -> float:
    """F1 of the words two texts share, as SQuAD's metric counts them (Rajpurkar et al. 2016)."""
    mine, theirs = (Counter(re.findall(r"\w+", words.lower())) for words in (text, reference))
    both = (mine & theirs).total()
    return 2 * both / (mine.total() + theirs.total())


def compared(base: Path, exported: Path, offline: Path, wanted: dict[str, str]) -> list[Answer]:
    """Prints and returns both models' answers.

    Raises:
        UserError: the offline export answers otherwise than the run's own.
    """
    results, finals = [], answers(exported)
    if answers(offline) != finals:
        raise UserError(f"{offline} answers otherwise than {exported}", why="one of them is wrong", fix="report it")
    print("offline export: the same ten answers, token for token")
    for term, answer, other in zip(ASKED, answers(base), finals, strict=True):
        scores = (shared_words(answer, wanted[term]), shared_words(other, wanted[term]))
        results.append(Answer(term, answer, other, scores))
        print(f"\n{question(term)}\n  base, F1 {scores[0]:.2f}: {answer}\n  exported, F1 {scores[1]:.2f}: {other}")
    print(f"\n{verdict(results)}")
    return results


def verdict(results: list[Answer]) -> str:
    """Both means, and how often the exported model shares more."""
    base, exported = (mean(answer.scores[side] for answer in results) for side in (0, 1))
    better = sum(answer.scores[1] > answer.scores[0] for answer in results)
    return (
        f"words shared with the dictionary, mean F1: base {base:.3f}, exported {exported:.3f}; more in {better} of 10"
    )


def page(run: Path, scored: list[Answer]) -> str:
    """The document."""
    record = run_record.read(run)
    results, machine = record["results"], record["machine"]
    losses = {name: value for name, value in results.items() if name.endswith(" loss")}
    rows = [
        f"| {name} | {value['first']:.4f} | {value['best']:.4f} | {value['last']:.4f} |"
        for name, value in losses.items()
    ]
    device = machine["device"] if machine["device"] != "cpu" else f"CPU, {machine['cores']} cores"
    flags = " \\\n    ".join(f"--{name} {value}" for name, value in TRAINING.items())
    return f"""# A real run

Made by `python benchmarks/real_run.py FOLDOC --write`.

SmolLM2-135M-Instruct, every weight, FSDP2 on 2 ranks, trained on definitions of the [Free On-line Dictionary of
Computing](http://www.foldoc.org/) (Editor Denis Howe) as chats, with the loss on the answers alone.

```bash
accel-fsdp config --yes --model demo/model --num-processes 2 --mixed-precision no --output fsdp.yaml
accelerate launch --config_file fsdp.yaml train/sft.py \\
    --model_name_or_path demo/model --dataset_name data --output_dir run \\
    {flags}
accel-fsdp export run offline
```

{device}: {results["training_seconds"]:,.0f} s of training, {results["tokens"]:,} tokens.

![Loss over steps]({PICTURE.name})

| loss | first | best | last |
|---|---|---|---|
{chr(10).join(rows)}

Base and exported model were asked to define ten terms that were held out; {verdict(scored)}. The last checkpoint,
exported offline, gives the same answers token for token.
"""


def picture(log: list[dict[str, Any]]) -> str:
    """The training and the held-out loss over steps, as SVG."""
    curves = {name: [(entry["step"], entry[name]) for entry in log if name in entry] for name in ("loss", "eval_loss")}
    steps, losses = zip(*(point for points in curves.values() for point in points), strict=True)
    low, high = min(losses), max(losses)
    lines = [f'<text x="2" y="{y}">{loss:.2f}</text>' for y, loss in ((20, high), (280, low))]
    for (name, points), color in zip(curves.items(), ("#0072b2", "#d55e00"), strict=True):
        places = [(44 + 588 * step / max(steps), 280 - 260 * (loss - low) / (high - low)) for step, loss in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append(f'<polyline fill="none" stroke="{color}" stroke-width="2.5" points="{path}"/>')
        lines.append(f'<text x="638" y="{places[-1][1]:.1f}" fill="{color}">{name}</text>')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 320">{"".join(lines)}</svg>\n'


def main() -> None:
    """Trains, asks, and with --write keeps what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("foldoc", type=Path)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    parser.add_argument("--folder", type=Path, default=ROOT / "demo" / "real", help="for data, run and export")
    parser.add_argument("--ask-only", action="store_true", help="of a run that is there")
    parser.add_argument("--write", action="store_true", help="makes docs/real_run.md and its picture again")
    options = parser.parse_args()
    wanted = write_data(options.folder / "data", definitions(options.foldoc))
    run = options.folder / "run" if options.ask_only else train(options.model, options.folder)
    offline = export_offline(run, options.folder / "offline")
    results = compared(options.model, run / "final", offline, wanted)
    if options.write:
        atomic_files.write_text(PAGE, page(run, results))
        atomic_files.write_text(PICTURE, picture(run_record.read(run)["log"]))


if __name__ == "__main__":
    sys.exit(guard(main))
