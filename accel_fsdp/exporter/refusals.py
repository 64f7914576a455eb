"""The exports that are refused before anything is written, each with its reason."""

from collections.abc import Mapping
from pathlib import Path

from accel_fsdp import disks
from accel_fsdp.checkpoints import CheckpointLocation, Weights, file_names, store
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.exporter import companion_files
from accel_fsdp.exporter.companion_files import CompanionFiles
from accel_fsdp.exporter.flags import ExportCommand
from accel_fsdp.units import MIB, gib_or_mib

SPARE_BYTES = 64 * MIB
WRITTEN = (
    *companion_files.COPIED,
    *(file_names.CONFIG, file_names.ADAPTER_CONFIG, file_names.REPORT, file_names.TRAINING_ARGS, file_names.RUN),
    *(f"*{file_names.INDEX_END}", file_names.TORCH_INDEX, file_names.TORCH_MODELS, file_names.TORCH_MODEL),
    *(file_names.MODELS, f"{file_names.ADAPTER_STEM}.*", f"{file_names.OPTIMIZER}{file_names.ALL_SAFETENSORS}"),
    ".gitattributes",
)
"""Files of a model: those of exports and of `save_pretrained`."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "lm_head.weight", "embed_in.weight", "embed_out.weight")


def check_local(places: Mapping[str, Path | str | None]) -> None:
    """Refuses addresses, which would be read as folders such as `s3:` on this machine."""
    for flag, place in places.items():
        if (uri := store.uri_of(str(place))) and not Path(str(place)).exists():
            raise UsageError(
                f"{flag} is {uri}, which is not a folder of this machine",
                why="only `export` reads a run elsewhere, and writes are to local disks",
                fix="give a folder of this machine; an export to the Hub: --push-to-hub NAME/MODEL",
            )


def check_place(out: Path, checkpoint: CheckpointLocation, force: bool) -> None:
    """Refuses an OUT that holds the checkpoint, or that exists and isn't a model that may be replaced."""
    if checkpoint.weights.resolve().is_relative_to(out.resolve()):
        raise _not_there(f"{out} holds the checkpoint that is to be exported", "the export replaces the content of OUT")
    if not out.exists():
        return
    if not force:
        raise _not_there(f"{out} exists", "it may be another model; --force replaces it")
    entries = sorted(out.iterdir()) if out.is_dir() else [out]
    descriptions = (file_names.CONFIG, file_names.ADAPTER_CONFIG, file_names.REPORT)
    has_model = not entries or any((out / name).is_file() for name in descriptions)
    foreign = next((path.name for path in entries if not _is_of_model(path)), "" if has_model else "no config")
    if foreign:
        what = f"{out} holds {foreign}, and is not a folder of a model alone"
        raise _not_there(what, "--force replaces the whole folder, and its content would be lost")


def _not_there(what: str, why: str) -> UserError:
    return UserError(what, why=why, fix="choose another OUT")


def _is_of_model(path: Path) -> bool:
    """Whether an export or `save_pretrained` writes files or folders of this name."""
    if path.is_dir():
        return path.name == file_names.MORE_TEMPLATES and all(file.suffix == ".jinja" for file in path.iterdir())
    return any(path.match(pattern) for pattern in WRITTEN)


def check_model(out: Path, companions: CompanionFiles, checkpoint: CheckpointLocation) -> None:
    """Refuses an OUT that would replace the model that the export reads; exports may be inside a run's folder."""
    place, source = out.resolve(), checkpoint.folder.resolve()
    described = [folder for folder in companions.others if folder.name == file_names.DESCRIBED]
    for model in (companions.folder, *described):
        used = model.resolve()
        if used.is_relative_to(place) or (place.is_relative_to(used) and used not in (source.parent, source)):
            what = f"{out} is, contains or is inside {model}, the model that the export uses"
            raise _not_there(what, "the export would replace its own source")


def check_weights(options: ExportCommand, weights: Weights, companions: CompanionFiles) -> None:
    if options.merge_adapter and not weights.adapter:
        raise UserError(
            "--merge-adapter, and the checkpoint has no adapter",
            why="there is nothing to merge",
            fix="leave it out",
        )
    if weights.adapter and companions.adapter is None:
        raise UserError(
            f"no {file_names.ADAPTER_CONFIG} beside the checkpoint or in its run's folder",
            why="rank, scaling and kind of the adapter are in no other file",
            fix=f"put the {file_names.ADAPTER_CONFIG} of the run into the checkpoint's folder",
        )
    if weights.adapter and weights.tensors and not options.merge_adapter:
        _check_vocabulary(weights, companions)


def _check_vocabulary(weights: Weights, companions: CompanionFiles) -> None:
    """Refuses an adapter whose embedding has more rows than its base: the base lacks the added rows."""
    inner = companions.config.get("text_config")
    rows = companions.config.get("vocab_size") or (isinstance(inner, dict) and inner.get("vocab_size"))
    embeddings = {name: tensor for name, tensor in weights.tensors.items() if name.endswith(EMBEDDINGS)}
    resized = (name for name, tensor in embeddings.items() if tensor.shape[0] != rows)
    if isinstance(rows, int) and (name := next(resized, None)) is not None:
        raise UserError(
            f"{name} has {weights.tensors[name].shape[0]} rows, the vocabulary of {companions.folder} {rows}",
            why="it was resized, and an adapter alone lacks the rows that the base doesn't have",
            fix="--merge-adapter, with the model as it was trained: --model RUN/model",
        )


def check_space(out: Path, needed: int, wide: bool = False, what: str = "the export") -> None:
    disks.check_room(
        out.parent,
        needed + SPARE_BYTES,
        f"{what} needs",
        why=f"it would end half-way; {gib_or_mib(SPARE_BYTES)} of it are for config, tokenizer and the file system",
        fix="choose an OUT on another disk" + (", or --dtype bfloat16" if wide else ""),
    )
