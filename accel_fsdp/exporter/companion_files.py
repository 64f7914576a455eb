"""The files of a model besides its weights: config, generation config, tokenizer, chat template, card."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, models, untrusted_files
from accel_fsdp.checkpoints import CheckpointLocation, file_names
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import hub

COPIED = (
    *("generation_config.json", "*processor_config.json", "audio_tokenizer_config.json"),
    file_names.CARD,
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "normalizer.json", "tekken.json"),
    *("vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "bpe.codes", "dict.txt", "emoji.json", "byte_maps.json"),
    *("*_vocab.json", "word_*.json", "tokenizer.model", "tiktoken.model", "spiece.model", "spm*.model", "*.spm"),
    *("sentencepiece*.model", "*.tokenizer"),
    *("chat_template.json", "*.jinja", f"{file_names.MORE_TEMPLATES}/*.jinja"),
)
"""Files that `save_pretrained` of tokenizers and processors writes. None of them is code."""
IN_RUN = (*(name for name in COPIED if not name.startswith("*") and name != file_names.CARD), file_names.CHAT_TEMPLATE)
"""Such files in a run's folder, which may be the user's project: no card, no patterns that match all of a type."""
CODE_KEYS = frozenset({"auto_map", "custom_pipelines"})
"""Keys of configs that name Python files beside them."""
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class CompanionFiles:
    """`folder` holds config.json; `others` are searched for missing files. `adapter` holds adapter_config.json.

    `trained`: a training run wrote the config, and turned `use_cache` off. `run`: the folder that the checkpoint is in;
    only the files that training writes are copied from it.
    """

    folder: Path
    others: tuple[Path, ...] = ()
    adapter: Path | None = None
    trained: bool = False
    run: Path | None = None

    @property
    def config(self) -> dict[str, Any]:
        return untrusted_files.read_json(self.folder / file_names.CONFIG)

    @property
    def dtype(self) -> str | None:
        """The name of the dtype in the config."""
        config = self.config
        inner = config.get("text_config")
        name = config.get("dtype") or config.get("torch_dtype") or (isinstance(inner, dict) and inner.get("dtype"))
        short = str(name).removeprefix("torch.")
        return short if short in DTYPES else None

    @property
    def settings(self) -> dict[str, Any]:
        return untrusted_files.read_json(self.adapter / file_names.ADAPTER_CONFIG) if self.adapter else {}

    def copy(self, target: Path, dtype: str | None, is_adapter: bool = False) -> list[str]:
        """Puts everything but the weights into `target`; links and code are left behind.

        Returns what came from the run's folder.
        """
        if not is_adapter:
            _write(target / file_names.CONFIG, self._exported_config(dtype))
        elif self.adapter is not None:
            settings = self.settings
            mapping = settings.get("auto_mapping")
            library = mapping.get("parent_library") if isinstance(mapping, dict) else None
            if not str(library).startswith("transformers."):
                settings["auto_mapping"] = None  # PEFT would import that module
            _write(target / file_names.ADAPTER_CONFIG, _without_code(settings))
        from_run = []
        for folder in dict.fromkeys((self.folder, *self.others)):
            patterns = COPIED if folder != self.run else IN_RUN if _is_of_model(folder) else ()
            for path in (path for pattern in patterns for path in folder.glob(pattern)):
                copy = target / path.relative_to(folder)
                if path.exists() and not path.is_dir() and not copy.exists():
                    copy.parent.mkdir(exist_ok=True)
                    _copy(path, copy, folder)
                    from_run += [copy.relative_to(target).as_posix()] if folder == self.run else []
        return sorted(from_run)

    def _exported_config(self, dtype: str | None) -> dict[str, Any]:
        config = self.config
        if self.trained and config.get("use_cache") is False:
            config.pop("use_cache")  # Trainer turned it off; the model's own default comes back
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            if dtype and (part is config or "dtype" in part):
                part["dtype"] = dtype
        for key in ("torch_dtype", "transformers_weights"):  # they describe the original files
            config.pop(key, None)
        exported: dict[str, Any] = _without_code(config)
        return exported


def _is_of_model(folder: Path) -> bool:
    """Whether a run's folder, which may be the user's project, is also that of a model."""
    keys = {file_names.CONFIG: "model_type", file_names.ADAPTER_CONFIG: "peft_type"}
    return any(untrusted_files.read_json(folder / name).get(key) for name, key in keys.items())


def _copy(path: Path, copy: Path, folder: Path) -> None:
    content = untrusted_files.read_json(path, folder) if path.name.endswith(file_names.CONFIG) else {}
    if (without_code := _without_code(content)) != content:
        _write(copy, without_code)
    else:
        untrusted_files.copy(path, copy, within=folder)


def _without_code(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_code(value) for key, value in content.items() if key not in CODE_KEYS}
    return [_without_code(item) for item in content] if isinstance(content, list) else content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def describe(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the files that an export needs besides a run's checkpoints.

    Call on one rank, before Trainer edits the model's config.

    The dtype is that of the model's files, although the model may have been loaded in another one.

    Raises:
        OSError: the folder can't be written.
    """
    adapters = getattr(model, "peft_config", {})
    inner = model.get_base_model() if adapters else model
    for part in (inner.config, getattr(inner, "generation_config", None), tokenizer):
        if part is not None:
            part.save_pretrained(folder)
    for name, settings in adapters.items():  # as PEFT divides them into folders
        settings.save_pretrained(folder if name == "default" or len(adapters) == 1 else folder / name)
    with contextlib.suppress(UserError):  # then it is the dtype that was loaded
        name, code_runs = str(inner.config._name_or_path), inner.config.is_remote_code()
        config = untrusted_files.read_json(folder / file_names.CONFIG)
        stored_config = models.read_config(name, run_code=code_runs)
        if stored_config.dtype is not None:
            config["dtype"] = str(stored_config.dtype).removeprefix("torch.")
            atomic_files.write_text(folder / file_names.CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def find(checkpoint: CheckpointLocation, model: str | None, with_weights: bool = False) -> CompanionFiles:
    """The companion files of a checkpoint: `model`'s if given, else those beside the weights or in the run's folder."""
    near = tuple(dict.fromkeys(_folders_nearby(checkpoint)))
    run = near[-1] if near[-1] == checkpoint.folder.parent else None
    adapter = next((folder for folder in near if (folder / file_names.ADAPTER_CONFIG).is_file()), None)
    described = [folder for folder in near if (folder / file_names.CONFIG).is_file()]
    base, revision = _base(near, adapter) or (None, None)
    name = model or base
    if name is not None and (model or with_weights or not described or Path(name).is_dir()):
        asked_revision = revision if name == base else None
        folder = Path(name) if Path(name).is_dir() else hub.fetch(name, with_weights, asked_revision)
        if not (folder / file_names.CONFIG).is_file():
            raise _no_config(folder)
        return CompanionFiles(folder, near, adapter, run=None if folder == run else run)
    if not described:
        raise _no_config(checkpoint.folder)
    is_trained = described[0].name != file_names.DESCRIBED and checkpoint.kind != "adapter"
    return CompanionFiles(described[0], near, adapter, is_trained, run)


def _folders_nearby(checkpoint: CheckpointLocation) -> Iterator[Path]:
    """Folders that may hold companion files. A link to a folder outside of the run is refused."""
    run = checkpoint.folder.parent
    for folder in (run / file_names.DESCRIBED, run / file_names.FINAL):
        untrusted_files.check_folder(folder, run)
    for name in (file_names.DESCRIBED, file_names.RANKS_CONFIG):
        untrusted_files.check_folder(checkpoint.folder / name, checkpoint.folder)
    yield checkpoint.folder
    if (checkpoint.folder / file_names.TRAINER_STATE).is_file() or checkpoint.folder.name.startswith(
        ("checkpoint", "step", "epoch")
    ):
        yield from (run / file_names.DESCRIBED, run / file_names.FINAL, run)
    else:
        yield from (checkpoint.folder / file_names.DESCRIBED, checkpoint.folder / file_names.RANKS_CONFIG)


def _base(near: tuple[Path, ...], adapter: Path | None) -> tuple[str, str | None] | None:
    """The model that an adapter was trained on, and its revision; of a model that of run.json if no config is near."""
    trained = _trained_models(near)
    if adapter is not None:
        settings = untrusted_files.read_json(adapter / file_names.ADAPTER_CONFIG)
        name, revision = (settings.get(key) for key in ("base_model_name_or_path", "revision"))
        if name and not revision:  # PEFT omits the revision if the model was loaded before
            revision = next((base_revision for trained_name, base_revision in trained if trained_name == name), None)
        return (str(name), str(revision) if revision else None) if name else None
    if any((folder / file_names.CONFIG).is_file() for folder in near):
        return None
    return next(trained, None)


def _trained_models(near: tuple[Path, ...]) -> Iterator[tuple[str, str | None]]:
    """The models in the `run.json` of these folders, and their revisions."""
    for folder in near:
        groups = untrusted_files.read_json(folder / file_names.RUN).get("arguments")
        model = groups.get("model") if isinstance(groups, dict) else None
        if isinstance(model, dict) and (name := model.get("model_name_or_path")):
            yield str(name), str(model["model_revision"]) if model.get("model_revision") else None


def _no_config(folder: Path) -> UserError:
    return UserError(
        f"no {file_names.CONFIG} in {folder} or beside it",
        why="the weights don't show which model they belong to, and from_pretrained needs it",
        fix="give the trained model: --model ID_OR_FOLDER",
    )
