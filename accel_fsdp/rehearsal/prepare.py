"""Prepares a rehearsal with `train/sft.py`: the small model, a few rows, the arguments."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp import command_line
from accel_fsdp.checkpoints import file_names
from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.job import Layout, from_arguments
from accel_fsdp.models import catalogue, parallel_plans, read_config, read_tokenizer
from accel_fsdp.models.shrink import SmallModel, shrink
from accel_fsdp.rehearsal import rows
from accel_fsdp.rehearsal.job import Rehearsed
from accel_fsdp.rehearsal.scaled import by_size, with_smaller_units
from accel_fsdp.rehearsal.small_run import SmallRun, small_run
from accel_fsdp.training.data import load


@dataclass(frozen=True)
class Prepared:
    """The parts of a rehearsal, in its folder.

    `job` has units for this model, `sentence` is for the user. `not_read`: why the rows aren't from the named data set;
    empty if they are, or without a name. `layout`: the mesh of the rehearsal's ranks.
    """

    model: SmallModel
    job: JobConfig
    changes: list[str]
    rows: Path
    run: SmallRun
    sentence: str
    not_read: str
    layout: Layout


def model_of(flag: str | None, words: tuple[str, ...]) -> str | None:
    """The model of the flag, else that of the arguments."""
    return flag or _text(command_line.parse_command_line(words), "model_name_or_path")


def prepare(
    job: JobConfig, model: str | None, words: tuple[str, ...], launcher: Rehearsed, real: Layout, layout: Layout
) -> Prepared:
    """Makes the small model and the few rows of data, in the launcher's folder. `real` is the mesh of the real job.

    Raises:
        UserError: the model can't be read or isn't named, the mesh doesn't divide it, or the data doesn't fit the
            arguments.
    """
    rows_read, why = _rows_of_hub(command_line.parse_command_line(words), launcher)
    return launcher.call("small", _prepare, job, model, words, launcher.folder, real, layout, rows_read, why)


def _prepare(
    job: JobConfig,
    model: str | None,
    words: tuple[str, ...],
    folder: Path,
    real: Layout,
    layout: Layout,
    rows_read: rows.Rows | None,
    why: str,
) -> Prepared:
    """Runs in a process that has the libraries."""
    source, origin = _source(job, model, folder)
    _check_mesh(real, source, words)
    divisors = parallel_plans.divisors(layout.sizes) if layout.is_by_transformers else {}
    small = shrink(source, folder / "model", divisors)
    _check_mesh(layout, str(small.folder), words)
    small_rows = rows_read or _rows(command_line.parse_command_line(words), folder, why, small.folder)
    _turn_off_dropout(small.folder)
    job, changes = with_smaller_units(job, *small.layer_parameters)
    units = "by size" if by_size(job) else f"of {', '.join(small.layer_classes)}"
    data = f"rows {small_rows.origin}{why and ', as ' + why}"
    summary = f"{origin}{small.parameters:,} weights, units {units}; tokenizer {small.tokenizer}, {data}"
    return Prepared(small, job, changes, small_rows.folder, small_run(words, small_rows), summary, why, layout)


def _check_mesh(layout: Layout, model: str, words: tuple[str, ...]) -> None:
    """Refuses a mesh that doesn't divide a model's heads, experts or vocabulary, with their numbers."""
    if layout.is_by_transformers:
        from accel_fsdp.training import mesh  # imports torch and transformers: seconds

        arguments = command_line.parse_command_line(words)
        targets = from_arguments.names_in(arguments.get("lora_target_modules"))
        mesh.check_on(layout, read_config(model), from_arguments.recipe_of(arguments).method, targets)


def _rows(arguments: Mapping[str, Any], folder: Path, why: str, model: Path) -> rows.Rows:
    """The first rows of the file or folder that the arguments name, else made-up ones."""
    dataset = None if why else _text(arguments, "dataset_name")
    chats = bool(read_tokenizer(str(model)).chat_template)
    return rows.cut(dataset, folder / "rows", *_part_of(arguments), chats=chats)


def _part_of(arguments: Mapping[str, Any]) -> tuple[str, str | None]:
    """The split and the configuration of the data set."""
    return _text(arguments, "dataset_train_split") or "train", _text(arguments, "dataset_config")


def _rows_of_hub(arguments: Mapping[str, Any], launcher: Rehearsed) -> tuple[rows.Rows | None, str]:
    """Rows from the hub or a cache, and why they have to be made up: both empty if no data set of the hub is named."""
    dataset, folder = _text(arguments, "dataset_name"), launcher.folder / "rows"
    if dataset is None or Path(dataset).exists():
        return None, ""
    try:
        load.check_name(dataset)
    except UserError:
        return None, f"{dataset} isn't here: {Path(dataset).absolute()}"
    why = rows.of_hub(launcher, dataset, *_part_of(arguments), folder)
    return (None, f"{dataset} can't be read: {why}") if why else (rows.Rows(folder, "cut"), "")


def _text(arguments: Mapping[str, Any], name: str) -> str | None:
    value = arguments.get(name)
    return value if isinstance(value, str) else None


def _source(job: JobConfig, model: str | None, folder: Path) -> tuple[str, str]:
    """A readable model: the named one, a bundled config, or any architecture with the YAML's layer class."""
    if model is not None and Path(model).exists():
        return model, ""
    catalogue_name = catalogue.canonical(model) if model else None
    if catalogue_name:
        return _config_folder(catalogue.entries()[catalogue_name]["config"], folder / "bundled"), ""
    if model is not None:
        return model, ""
    layer_class = str(job.fsdp("fsdp_transformer_layer_cls_to_wrap") or "").split(",")[0] if job.is_fsdp else ""
    config = of_layer_class(layer_class) if layer_class else {}
    if not config:
        raise UsageError(
            "the model to rehearse is unknown",
            why="its architecture determines the sharding",
            fix="accel-fsdp rehearse FILE --model ID_OR_FOLDER",
        )
    return _config_folder(config, folder / "by-class"), f"a {config['model_type']}, as the YAML names {layer_class}; "


def of_layer_class(name: str) -> Mapping[str, Any]:
    """The default config of an architecture with this layer class; empty if transformers has none."""
    import transformers

    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if f"class {name}(" in path.read_text(encoding="utf-8"):
            try:
                config = transformers.AutoConfig.for_model(path.parent.name)
            except ValueError:
                continue
            return dict(config.to_dict())
    return {}


def _config_folder(config: Mapping[str, Any], place: Path) -> str:
    place.mkdir()
    (place / file_names.CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return str(place)


def _turn_off_dropout(folder: Path) -> None:
    """Turns off random layers, which differ from rank to rank, so that losses can be compared."""
    path = folder / file_names.CONFIG
    config = _without_random_layers(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _without_random_layers(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    random = re.compile(r"dropout|pdrop|drop_path|layerdrop|router_jitter")
    zero = {key: 0.0 for key, value in config.items() if isinstance(value, float) and random.search(key)}
    return {key: _without_random_layers(value) for key, value in config.items()} | zero
