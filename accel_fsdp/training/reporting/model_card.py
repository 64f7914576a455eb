"""The model card of an export: the model, its base, its training and its results."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from accel_fsdp.exporter import exported_folder
from accel_fsdp.training.reporting import lineage
from accel_fsdp.training.reporting.run_record import results

METHODS = {True: "a LoRA adapter", False: "every weight"}
SHOWN = (
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "optim"),
    *(*lineage.SCHEDULE, "seed"),
)
"""Trainer's arguments that decide the result; `run.json` has all of them."""
ROWS = ("max_length", "packing", "assistant_only_loss", "completion_only_loss")
"""Arguments that decide which tokens of the rows are trained."""


def text(
    run: Mapping[str, Any], log_history: list[dict[str, float]], rounding: exported_folder.Rounding | None = None
) -> str:
    """The card as Markdown with the hub's front matter. `run` is the content of `run.json`.

    `rounding` is the export's cast of the weights, None without one. The front matter names a base model or data set
    only by its hub id, because the hub refuses cards with local paths.
    """
    model, data = run["arguments"]["model"], run["arguments"]["data"]
    base, dataset, is_peft = str(model["model_name_or_path"]), str(data["dataset_name"]), bool(model["use_peft"])
    front = ModelCardData(
        library_name="peft" if is_peft else "transformers",
        pipeline_tag="text-generation",
        base_model=base if _on_hub(base) else None,
        datasets=[dataset] if _on_hub(dataset) else None,
        tags=["sft", "fsdp", "accel-fsdp", *(["lora"] if is_peft else [])],
    )
    body = "\n".join(_body(run, results(log_history), rounding))
    return str(ModelCard(f"---\n{front.to_yaml()}\n---\n\n{body}\n"))


def _on_hub(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _name(name: str) -> str:
    """A hub id unchanged, or the last part of a path, because the full path is private."""
    return name if _on_hub(name) else lineage.last_part(name)


def _body(
    run: Mapping[str, Any], losses: Mapping[str, Mapping[str, float]], rounding: exported_folder.Rounding | None
) -> Iterator[str]:
    arguments, training = run["arguments"], run["arguments"]["training"]
    base, dataset = str(arguments["model"]["model_name_or_path"]), str(arguments["data"]["dataset_name"])
    is_peft = bool(arguments["model"]["use_peft"])
    yield f"# {_name(base)}, fine-tuned on {_name(dataset)}\n"
    revision = f", revision {arguments['model']['model_revision']}" if _on_hub(base) else ""  # a folder has none
    yield f"- base model: {_name(base)}{revision}"
    yield f"- data: {_name(dataset)}, split {arguments['data']['dataset_train_split']}"
    yield f"- method: supervised fine-tuning of {METHODS[is_peft]}"
    if run["plan"]:
        yield f"- trained {_strategy_text(run)}, {run['machine']['device']}"
    yield from _segments(run.get("segments", []))
    yield "\n## Results\n"
    yield "| | first | best | last |\n|---|---|---|---|"
    for name, values in losses.items():
        yield f"| {name} | {values['first']:.4f} | {values['best']:.4f} | {values['last']:.4f} |"
    if smoothing := training.get("label_smoothing_factor"):
        yield f"\nThe training loss is smoothed (label_smoothing_factor {smoothing:g}); the held-out loss is not."
    if rounding:
        yield (
            f"\nThe weights were trained in {rounding.trained}; train/sft.py exports them rounded to {rounding.saved}, "
            "so the losses of the export can differ a little."
        )
    yield "\n## Arguments\n"
    yield "| argument | value |\n|---|---|"
    yield from _arguments(arguments, is_peft)
    yield "\n## Versions\n"
    yield "| package | version |\n|---|---|"
    yield from (f"| {name} | {version} |" for name, version in run["versions"].items())


def _strategy_text(run: Mapping[str, Any]) -> str:
    """The strategy of the last session, and the number of ranks of each."""
    ranks = [run["machine"]["ranks"]]
    stretches = [segment["settings"].get("ranks", {}).get("ranks") for segment in run.get("segments", [])]
    ranks = [count for count, _ in itertools.groupby(filter(None, stretches))] or ranks
    if ranks == [1]:
        return "in one process"
    return f"with {run['plan']['strategy']} on {', then '.join(map(str, ranks))} ranks"


def _arguments(arguments: Mapping[str, Mapping[str, Any]], adapter: bool) -> Iterator[str]:
    """Rows of the arguments that affect the result, without disabled ones."""
    training = arguments["training"]
    ends_by = "num_train_epochs" if training["max_steps"] > 0 else "max_steps"  # the other one had no effect
    row_arguments = {name: arguments["data"].get(name) for name in ROWS}
    row_arguments |= {name: value for name, value in arguments["model"].items() if adapter and name.startswith("lora_")}
    row_arguments |= {name: training.get(name) for name in SHOWN if name != ends_by}
    yield from (f"| {name} | {value} |" for name, value in row_arguments.items() if value or name == "seed")


def _segments(segments: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The settings that a resumed run changed, by steps; empty where all steps were trained alike."""
    if len(segments) < 2:
        return
    tables = [
        {f"{group}: {name}": value for group, values in segment["settings"].items() for name, value in values.items()}
        for segment in segments
    ]
    names = {name: None for table in reversed(tables) for name in table}  # in the order of this session's
    differing = [name for name in names if len({str(table.get(name)) for table in tables}) > 1]
    yield "\n## Stretches\n"
    yield "The run was resumed with other settings. Those under Arguments are of its last session.\n"
    yield "| steps | " + " | ".join(differing) + " |\n|---|" + "---|" * len(differing)
    for segment, table in zip(segments, tables, strict=True):
        cells = " | ".join(str(table.get(name, "")).replace("|", "\\|") for name in differing)
        yield f"| {segment['first_step']} to {segment['last_step']} | {cells} |"
