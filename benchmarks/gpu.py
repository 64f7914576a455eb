"""Predicted against measured peak memory on one NVIDIA GPU: `python benchmarks/gpu.py [--out FILE]`.

Each case trains three steps in a process of its own (`gpu_case.py`), so that one that fails ends no other. Nothing is
downloaded: models have random weights, ranks besides the first don't exist. Needs torch, transformers and accelerate,
for LoRA peft as well. Results go to `data/gpu_cases.json`, in place of older ones of the same case and libraries.

With `--training` the training step of `train/sft.py` is timed instead (`gpu_training.py`): tokens/s, MFU and memory
for shapes of 1 and 8 billion parameters, kept in RESULTS.md. That needs all of this project's libraries.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import results
from children import measured

from accel_fsdp.atomic_files import write_text
from accel_fsdp.config import Engine
from accel_fsdp.errors import UserError
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import catalogue
from accel_fsdp.prediction import capacity, trace_store
from accel_fsdp.prediction.memory import ModelShape, Tapes, predict, variant_of
from accel_fsdp.units import MIB

HERE = Path(__file__).parent
DATA = HERE / "data" / "gpu_cases.json"
CASE_SECONDS = 150
LIBRARIES = ("torch", "transformers", "accelerate")


@dataclass(frozen=True)
class Case:
    """A model of the catalogue, cut to some layers, and how it is trained."""

    model: str
    layers: int
    recipe: Recipe
    layout: Layout

    @property
    def name(self) -> str:
        """Such as "Llama-3.2-1B/16 fsdp2-1x8 1x2048 full bf16/float32"."""
        r, where = self.recipe, self.layout
        engine = where.engine if where.engine == "single" else f"{where.engine}-{where.strategy}x{where.ranks}"
        words = [f"{self.model.rpartition('/')[2]}/{self.layers}", engine, f"{r.rows}x{r.length}", r.checkpointing]
        words += [f"{r.precision}/{r.dtype}"]
        words += [r.method] if r.method != "full" else []
        words += ["foreach"] if r.optimizer == "adamw_torch" else []
        return " ".join(words)


SMOL, SMALL, TINY_QWEN = "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M", "Qwen/Qwen3-0.6B"
LLAMA, LLAMA8, LLAMA2 = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-7b-hf"
QWEN8, MOE, PHI = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "microsoft/Phi-3-mini-4k-instruct"
GEMMA2, GEMMA3, GPT2 = "google/gemma-2-2b", "google/gemma-3-1b-pt", "openai-community/gpt2"
PURE: dict[str, Any] = {"precision": "no", "dtype": "bfloat16"}
LORA: dict[str, Any] = {"method": "lora", "dtype": "bfloat16", "checkpointing": "full"}
FULL: dict[str, Any] = {"checkpointing": "full"}
REENTRANT: dict[str, Any] = {"checkpointing": "reentrant"}
FOREACH: dict[str, Any] = {"optimizer": "adamw_torch"}


def case(model: str, layers: int, engine: str, rows: int, length: int, **options: Any) -> Case:
    """`engine` is such as "fsdp2-1x8": engine, strategy, ranks."""
    kind, _, rest = engine.partition("-")
    strategy, ranks = (int(number) for number in (rest or "1x1").split("x"))
    layout = Layout(kind, strategy, ranks, ranks)  # type: ignore[arg-type]
    return Case(model, layers, Recipe(rows=rows, length=length, **options), layout)


GPU = [
    case(SMOL, 30, "single", 8, 1024),
    case(LLAMA, 16, "single", 2, 2048, **FULL, **FOREACH),
    case(LLAMA, 16, "ddp-1x8", 2, 1024, **FULL),
    case(LLAMA, 16, "fsdp2-1x2", 2, 2048),
    case(LLAMA8, 16, "fsdp2-1x64", 2, 2048),
    case(LLAMA, 16, "fsdp1-1x2", 2, 2048),
    case(MOE, 2, "single", 1, 2048, **FULL),
    case(TINY_QWEN, 28, "fsdp1-1x8", 8, 512),
    case(SMOL, 30, "single", 1, 8192, **FULL),
    case(TINY_QWEN, 28, "single", 4, 1024, **PURE),
    case(TINY_QWEN, 28, "single", 2, 4096, **REENTRANT),
    case(LLAMA, 16, "single", 1, 2048),
    case(GEMMA3, 26, "single", 1, 2048, **FULL),
    case(GEMMA2, 8, "single", 1, 2048),
    case(GPT2, 12, "single", 8, 1024),
    case(LLAMA2, 4, "single", 1, 4096),
    case(SMALL, 32, "ddp-1x8", 4, 1024),
    case(TINY_QWEN, 28, "ddp-1x2", 2, 1024, **PURE),
    case(LLAMA, 16, "fsdp2-1x1", 2, 1024),
    case(LLAMA, 16, "fsdp2-1x8", 2, 2048, **PURE),
    case(LLAMA8, 32, "fsdp2-1x8", 1, 4096, **FULL),
    case(LLAMA8, 32, "fsdp2-1x64", 1, 8192, **FULL),
    case(LLAMA8, 16, "fsdp2-2x8", 1, 2048, **REENTRANT),
    case(QWEN8, 36, "fsdp2-1x64", 1, 4096, **FULL, **FOREACH),
    case(TINY_QWEN, 28, "fsdp2-2x8", 4, 2048),
    case(GEMMA2, 26, "fsdp2-1x8", 1, 2048, **FULL),
    case(MOE, 4, "fsdp2-1x8", 1, 2048, **FULL),
    case(PHI, 32, "fsdp2-1x8", 2, 2048, **FULL),
    case(LLAMA, 16, "fsdp1-1x1", 2, 1024),
    case(LLAMA8, 32, "fsdp1-1x8", 1, 4096, **FULL),
    case(LLAMA8, 16, "fsdp1-2x8", 1, 2048, **FULL),
    case(QWEN8, 36, "fsdp1-1x64", 1, 2048, **REENTRANT),
    case(LLAMA, 16, "fsdp1-3x2", 2, 1024, **FULL),
    case(PHI, 16, "fsdp1-1x8", 1, 4096),
    case(LLAMA8, 32, "single", 2, 2048, **LORA),
    case(LLAMA8, 32, "fsdp2-1x8", 2, 2048, **LORA),
    case(LLAMA8, 32, "fsdp1-1x8", 2, 2048, **LORA),
]
CPU = [
    case(SMOL, 2, "single", 1, 64, precision="no"),
    case(SMOL, 2, "fsdp2-1x8", 2, 64, precision="no"),
    case(SMOL, 2, "fsdp1-1x8", 2, 64, precision="no", **FULL),
]
"""For a machine without a GPU: they show that the program works, no more."""


def config_of(case: Case) -> dict[str, Any]:
    """The model's configuration, cut."""
    config = dict(catalogue.entries()[case.model]["config"])
    config["n_layer" if "n_layer" in config or config["model_type"] == "gpt2" else "num_hidden_layers"] = case.layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: case.layers]
    return config


def shape_and_tapes(case: Case) -> tuple[ModelShape, Tapes]:
    """From the bundle."""
    stored = trace_store.find(case.model)
    assert stored is not None
    shape, tapes = stored
    return cut(shape, case.layers), tapes[variant_of(case.recipe, case.layout.engine)]


def cut(shape: ModelShape, layers: int) -> ModelShape:
    """The shape with its first layers only; a kind of block without any left stays, empty, for its tape's place."""
    blocks = tuple(replace(b, layers=tuple(layer for layer in b.layers if layer < layers)) for b in shape.blocks)
    return replace(shape, blocks=blocks)


def predicted(case: Case, workspace: int) -> dict[str, int]:
    """Bytes in the highest moment of forward and backward, of the optimizer step, and between steps."""
    shape, tapes = shape_and_tapes(case)
    prediction = predict(shape, tapes, case.recipe, case.layout, workspace)
    step = max(moment.total for moment in prediction.moments if moment.phase == "optimizer step")
    run = max(moment.total for moment in prediction.moments if moment.phase != "optimizer step")
    peak = prediction.peak.total
    return {"run": run, "step": step, "steady": prediction.steady, "peak": peak}


def attention_of(case: Case) -> str:
    """The attention that the plan is for, whatever the libraries here have."""
    return "eager" if shape_and_tapes(case)[0].eager_only else case.recipe.attention


def measure(case: Case, device: str) -> dict[str, Any]:
    """Runs a case; an error in its last lines if it fails."""
    shape, _ = shape_and_tapes(case)
    settings = asdict(case.recipe) | {"engine": case.layout.engine, "strategy": case.layout.strategy}
    settings["ranks"] = 0 if case.layout.engine is Engine.NONE else case.layout.ranks
    settings |= {"config": config_of(case), "blocks": [block.name for block in shape.blocks], "vocab": shape.vocab}
    settings["attention"] = attention_of(case)
    return measured("gpu_case.py", settings, device, CASE_SECONDS)


def row_of(case: Case, outcome: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a case."""
    hopper = capacity.HOPPER_WORKSPACE_BYTES if outcome.get("hopper") else capacity.WORKSPACE_BYTES
    guess = predicted(case, hopper if outcome["device"] != "CPU" else 0)
    seen = {name: value for name, value in outcome.items() if name not in ("versions", "device", "hopper")}
    seen["run"] = max(seen["forward"], seen["backward"])
    return {
        "case": case.name,
        "model": case.model,
        "layers": case.layers,
        "recipe": asdict(case.recipe),
        "layout": asdict(case.layout),
        "attention": attention_of(case),
        "device": outcome["device"],
        "versions": {name: version(name) for name in LIBRARIES},
        "measured": seen,
        "predicted": guess,
        "error": {name: guess[name] / seen[name] - 1 for name in guess if seen.get(name)},
    }


def run_all(cases: list[Case], device: str, out: Path | None) -> list[dict[str, Any]]:
    """All cases; prints and keeps each as it comes, as a lent GPU may end before the last one."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        outcome = measure(case, device)
        if "error" in outcome:
            print(f"{case.name}: FAILED: {outcome['error']}", flush=True)
            continue
        rows.append(row_of(case, outcome))
        print(line(rows[-1]), flush=True)
        if out:
            keep(out, rows)
    return rows


def line(row: dict[str, Any]) -> str:
    """One result: measured and predicted peak, and the errors of all phases."""
    sizes = [row[side]["peak"] / MIB for side in ("measured", "predicted")]
    errors = [f"{name} {row['error'][name]:+.2%}" for name in ("peak", "steady", "run", "step")]
    return f"{row['case']:<72} {sizes[0]:>9.0f} {sizes[1]:>9.0f} MiB  " + "  ".join(errors)


def by_engine(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each engine, and of all."""
    engines = dict.fromkeys(row["layout"]["engine"] for row in rows)
    return {engine: [row for row in rows if row["layout"]["engine"] == engine] for engine in engines} | {"all": rows}


def errors_of(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The sizes of their errors in one number."""
    return [abs(row["error"][name]) for row in rows]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The section of RESULTS.md, by engine; each case is in `data/gpu_cases.json`."""
    lines = [
        "## Peak memory on a GPU, predicted against measured",
        "",
        "`python benchmarks/gpu.py`: the second step of rank 0, with random weights and tokens. The other ranks are",
        "made up, so that NCCL sends nothing.",
        "",
        "| engine | cases | peak: median | worst | between steps: worst |",
        "|---|---|---|---|---|",
    ]
    for engine, mine in by_engine(rows).items():
        peaks, steady = (errors_of(mine, name) for name in ("peak", "steady"))
        numbers = (median(peaks), max(peaks), max(steady))
        lines.append(f"| {engine} | {len(mine)} | " + " | ".join(f"{number:.2%}" for number in numbers) + " |")
    libraries = sorted({", ".join(f"{name} {number}" for name, number in row["versions"].items()) for row in rows})
    others = sorted({row["model"] for row in rows if has_other_attention(row)})
    lines += ["", f"With {'; '.join(libraries)}."]
    if others:
        lines.append(f"Planned for eager attention, and measured with sdpa, which those have: {', '.join(others)}.")
    return lines


def has_other_attention(row: dict[str, Any]) -> bool:
    """Whether a case ran with another attention than the plan's: libraries disagree about what a model has."""
    stored = trace_store.find(row["model"])
    return stored is not None and stored[0].eager_only and row["attention"] != "eager"


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds results to a file, in place of those of the same cases, libraries and device."""
    old = json.loads(path.read_text())["cases"] if path.exists() else []

    def key(row: dict[str, Any]) -> str:
        return json.dumps([row["case"], row["device"], row["versions"]])

    new = {key(row) for row in rows}
    kept = sorted([row for row in old if key(row) not in new] + rows, key=key)
    lines = ",\n".join(map(json.dumps, kept))
    write_text(path, f'{{"cases": [\n{lines}\n]}}\n')
    if path == DATA:
        results.keep("gpu-memory", table(kept))


def time_training(device: str, only: str) -> None:
    """Times the script's training step; a GPU's results are kept."""
    import gpu_training

    cases = gpu_training.CPU if device == "cpu" else gpu_training.GPU
    if not gpu_training.run_all([case for case in cases if only in case.name], device):
        raise SystemExit("no case could be measured")


def main() -> None:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="the results' file; without it, those of a GPU go to data/")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--training", action="store_true", help="tokens/s of train/sft.py instead")
    options = parser.parse_args()
    if options.training:
        return time_training(options.device, options.only)
    cases = [case for case in (CPU if options.device == "cpu" else GPU) if options.only in case.name]
    try:
        version("peft")
    except PackageNotFoundError:
        print(f"peft is not installed: {sum(case.recipe.method != 'full' for case in cases)} cases with LoRA left out")
        cases = [case for case in cases if case.recipe.method == "full"]
    out = options.out or (DATA if options.device == "cuda" else None)
    try:
        rows = run_all(cases, options.device, out)
    except UserError as error:
        raise SystemExit(str(error)) from error
    if not rows:
        raise SystemExit("no case could be measured")
    print(*table(rows), f"{len(rows)} of {len(cases)} cases", sep="\n")


if __name__ == "__main__":
    main()
