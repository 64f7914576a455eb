"""How long a rehearsal takes: `python benchmarks/rehearsals.py --write`, each ready-made YAML once, on two idle cores.

The peer is the launch in it that trains and saves: the same small job under `accelerate launch`. With
`--architectures`, which models can be rehearsed: of each a small one, under the YAML that `accel-fsdp config` writes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results
import yaml

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
PUBLISHED = ROOT / "tests/rehearsal/architectures.json"
ARCHITECTURES = {
    "llama-3.2-1b": "Llama 3.2 1B",
    "qwen3-8b": "Qwen3 8B",
    "gemma-3-1b": "Gemma 3 1B, text",
    "gemma-3-4b": "Gemma 3 4B, images too",
    "phi-3-mini-128k": "Phi-3 mini 128k",
    "gpt2": "GPT-2",
    "qwen3-30b-a3b": "Qwen3-MoE 30B-A3B",
    "gpt-oss-20b": "gpt-oss 20B",
    "llava-1.5-7b": "LLaVA 1.5 7B, images too",
    "qwen2.5-vl-7b": "Qwen2.5-VL 7B, images too",
    "bert-decoder": "BERT as a decoder",
    "bert-masked": "BERT, masked words",
}
VERSIONS = (1, 2)
ENGINE = re.compile("ddp|fsdp[12]|zero|tpu")
FOLDERS = re.compile(rf"{re.escape(tempfile.gettempdir())}/[^/ ]+/")
"""What changes from run to run."""


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command of accel-fsdp."""
    return subprocess.run(
        [sys.executable, "-m", "accel_fsdp", *words], capture_output=True, text=True, cwd=ROOT, check=False
    )


def rehearsed(*words: str) -> dict[str, Any]:
    """The report of one, with its seconds."""
    began = time.monotonic()
    done = command("rehearse", *words, "--json")
    seconds = time.monotonic() - began
    if "{" not in done.stdout:
        return {"seconds": seconds, "refused": done.stderr.strip().splitlines()[0]}
    return {**json.loads(done.stdout), "seconds": seconds}


def row(name: str, report: dict[str, Any]) -> str:
    """A line of the table."""
    if "refused" in report:
        return f"| {name} | | | refused: {report['refused']} |"
    steps = report["steps"]
    sentence = "all pass" if report["passed"] else f"**{steps[-1]['name']} failed: {steps[-1]['said']}**"
    launch = next((step["seconds"] for step in steps if step["name"] == "train and save"), 0.0)
    ratio = f"{report['seconds'] / launch:.1f}" if launch else ""
    return f"| {name} | {report['seconds']:.0f} | {ratio} | {len(steps)} steps, {sentence} |"


def summary(engine: str, reports: list[dict[str, Any]]) -> str:
    """A line of RESULTS.md: all YAMLs of an engine."""
    seconds = [report["seconds"] for report in reports]
    passed = sum(report.get("passed", False) for report in reports)
    return f"| {engine} | {len(reports)} | {min(seconds):.0f} to {max(seconds):.0f} | {passed} |"


def architecture(name: str, folder: Path) -> str:
    """A line of the other table: what becomes of one architecture under each version of FSDP."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(json.loads(PUBLISHED.read_text())[name]))
    classes, sentences, seconds = "", [], []
    for version in VERSIONS:
        file = folder / f"{name}-{version}.yaml"
        wizard = ["config", "--yes", "--model", str(model), "--gpus", "8xH100-80GB", "--engine", "fsdp"]
        written = command(*wizard, "--fsdp-version", str(version), "--strategy", "1", "-o", str(file))
        if written.returncode:
            sentences.append(f"**not written**: {written.stderr.strip().splitlines()[0]}")
            continue
        classes = yaml.safe_load(file.read_text())["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"]
        report = rehearsed(str(file), "--model", str(model))
        result = outcome(report)
        sentences.append(result if "**" not in result or result not in sentences else "as under FSDP1")
        seconds.append(f"{report['seconds']:.0f}")
    cells = [ARCHITECTURES[name], classes.replace(",", ", "), *sentences, ", ".join(seconds)]
    return " | ".join(["", *cells, ""]).strip()


def outcome(report: dict[str, Any]) -> str:
    """What a rehearsal came to: its steps, or the first line of what failed, and what to do about it."""
    if "refused" in report:
        return f"**refused**: {report['refused']}"
    last = report["steps"][-1]
    if report["passed"]:
        return f"{len(report['steps'])} steps pass"
    fix = f" ({last['fix'].splitlines()[0]})" if last["fix"] else ""
    return FOLDERS.sub("", f"**{last['name']} fails**: {last['said'].splitlines()[0]}{fix}")


def ready_made(names: list[str], write: bool) -> None:
    """The ready-made YAMLs."""
    reports: dict[str, list[dict[str, Any]]] = {}
    for name in names or NAMES:
        report = rehearsed(f"accelerate_configs/{name}.yaml")
        reports.setdefault(ENGINE.match(name)[0], []).append(report)  # type: ignore[index]
        print(row(name, report), flush=True)
    if write:
        head = [
            "## Rehearsals",
            "",
            "`python benchmarks/rehearsals.py --write`: `accel-fsdp rehearse` of each ready-made",
        ]
        head += ["YAML, once, on two idle cores.", "", "| YAMLs | n | seconds | passed |", "|---|---|---|---|"]
        results.keep("rehearsals", [*head, *(summary(engine, mine) for engine, mine in reports.items())])


def architectures(names: list[str], write: bool) -> None:
    """The architectures; rows of others that were written before stay."""
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in results.kept("architectures")}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ARCHITECTURES:
            rows[ARCHITECTURES[name]] = architecture(name, Path(folder))
            print(rows[ARCHITECTURES[name]], flush=True)
    if write:
        head = """## Rehearsals of architectures

`python benchmarks/rehearsals.py --architectures --write`: a small model of each published config is rehearsed with
`train/sft.py` and exported, under the YAML that `accel-fsdp config` writes for the config: FULL_SHARD, two ranks on
a CPU, rows of text alone. Seconds under FSDP1 and FSDP2, on two cores that other work shares.

Of Gemma 3 with images transformers lists two layer classes that it lacks: a YAML that names none stops in Accelerate,
as does its rehearsal, whose first step says which to name.

| architecture | layer classes | FSDP1 | FSDP2 | seconds |
|---|---|---|---|---|"""
        kept = [rows[title] for title in ARCHITECTURES.values() if title in rows]
        results.keep("architectures", [*head.splitlines(), *kept])


def main() -> None:
    """Measures and prints, or writes into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    parser.add_argument("--architectures", action="store_true", help="rehearse architectures instead of YAMLs")
    parser.add_argument("names", nargs="*", help="which of accelerate_configs/, or which architectures; default: all")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    (architectures if options.architectures else ready_made)(options.names, options.write)


if __name__ == "__main__":
    main()
