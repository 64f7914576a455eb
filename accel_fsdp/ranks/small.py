"""Makes a script small in a rehearsal: random models with few narrow layers, the first rows, short texts, few steps.

The script isn't edited: transformers and datasets give it less than it asks for, and each change is reported with the
script's line. Models of up to `PARAMETERS` weights stay as they are, and so do batches of a script's own loop, which
ends with its rows.
"""

import copy
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

from accel_fsdp import library_internals, models
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal
from accel_fsdp.models.shrink import small_version
from accel_fsdp.ranks import events, imports, observing, script
from accel_fsdp.units import counted

if TYPE_CHECKING:
    from torch import nn

SMALL = "ACCEL_FSDP_SMALL"
"""The variable that names the folder for small models; if it isn't set, everything keeps its size."""
PARAMETERS = 20_000_000
ROWS, TOKENS, STEPS, BATCH = 64, 256, 4, 2
"""Rows of a split, tokens of a text, steps of Trainer, rows of its batches and micro-batches of its steps, at most."""
LENGTHS = ("max_length", "max_seq_length", "model_max_length")
BATCHES = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
INTERVALS = ("save_steps", "eval_steps", "logging_steps")
BUILT = Internal("transformers.modeling_utils:PreTrainedModel._from_config")
PADDED = Internal("transformers.tokenization_utils_base:PreTrainedTokenizerBase._get_padding_truncation_strategies")
RELIES_ON = (BUILT, PADDED)
OF_THE_HUB = ("cache_dir", "force_download", "revision", "subfolder", "token", "variant")
"""Arguments that say where a model's files are."""
AT_WORK = functools.partial(mock.patch.object, observing, "is_paused", True)
"""Models that are made in it are parts of a small one, which may have more than `PARAMETERS` weights."""


def install() -> None:
    """Call it before the script imports anything."""
    if folder := os.environ.get(SMALL):
        small = _SmallModels(Path(folder) / str(LaunchEnvironment.now().rank))
        imports.change("transformers.modeling_utils", small.install)
        imports.change("transformers.tokenization_utils_base", _shorten_texts)
        imports.change("transformers.training_args", _cut_arguments)
        imports.change("transformers.trainer", _cut_training)
        imports.change("datasets.load", _cut_data)
        imports.change("datasets.arrow_dataset", _cut_parts)


class _SmallModels:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, module: ModuleType) -> None:
        library_internals.check(BUILT, why="models keep their size without it")
        _replace_class_method(module.PreTrainedModel, "from_pretrained", self.load)
        _replace_class_method(module.PreTrainedModel, "_from_config", self.build)

    def load(
        self, original: Callable[..., Any], kind: Any, name: Any, *args: Any, config: Any = None, **options: Any
    ) -> Any:
        """Loads a small model from a folder, as whole ones are loaded: into the same dtype, device and quantisation."""
        if observing.is_paused or name is None:
            return original(name, *args, config=config, **options)
        whole, unused = config, options
        if not hasattr(config, "to_dict"):
            dtypes = {key: value for key, value in options.items() if key in ("dtype", "torch_dtype")}
            others = {key: value for key, value in options.items() if key not in dtypes}
            whole, unused = kind.config_class.from_pretrained(
                config or name,
                return_unused_kwargs=True,
                trust_remote_code=others.pop("trust_remote_code", False),
                **others,
            )
            unused |= dtypes
        small = self._small(kind, whole, str(name))
        if small is None:
            return original(name, *args, config=config, **options)
        folder = self.folder / str(len(os.listdir(self.folder)) if self.folder.exists() else 0)
        with mock.patch("torch.distributed.is_initialized", return_value=False):  # transformers saves on rank 0 alone
            inspect.unwrap(type(small).save_pretrained)(small, folder)  # without the watch on a script's saves
        unused = {key: value for key, value in unused.items() if key not in OF_THE_HUB}
        if getattr(unused.get("quantization_config"), "dequantize", False):
            del unused["quantization_config"]  # the small model's weights are whole, and transformers would refuse them
        with AT_WORK():
            loaded = original(str(folder), *args, config=small.config, **unused)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config._name_or_path = str(name)
        return loaded

    def build(self, original: Callable[..., Any], kind: Any, config: Any, **options: Any) -> Any:
        small = None if observing.is_paused else self._small(kind, config, config._name_or_path or config.model_type)
        if small is None:
            return original(config, **options)
        with AT_WORK():
            return original(small.config, **options)

    def _small(self, kind: Any, config: Any, name: str) -> Any:
        """The small model; None if the real one is small enough, or has no small version."""
        try:
            with AT_WORK():
                whole: nn.Module = models.on_meta(name, kind, copy.deepcopy(config))
                count = sum(weight.numel() for weight in whole.parameters())
                small = small_version(name, whole, config) if count > PARAMETERS else None
        except UserError as error:
            _report(f"{name} keeps its size: {error.what}")
            return None
        if small is not None:
            fewer = sum(weight.numel() for weight in small.parameters())
            _report(f"{name} {count:,} -> {fewer:,} weights, random ones")
        return small


def _replace_class_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = vars(owner)[name].__func__

    @functools.wraps(original)
    def call(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, kind), kind, *args, **kwargs)

    setattr(owner, name, classmethod(call))


def _shorten_texts(module: ModuleType) -> None:
    """Caps a tokenizer's own length and that of each call which truncates or pads."""

    def strategies(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        padding, truncation, length, more = original(*args, **kwargs)
        return padding, truncation, length and min(length, TOKENS), more

    def load(original: Callable[..., Any], kind: Any, *args: Any, **kwargs: Any) -> Any:
        tokenizer = original(*args, **kwargs)
        if tokenizer.model_max_length > TOKENS:
            tokenizer.model_max_length = TOKENS
            _report(f"texts of at most {TOKENS} tokens")
        return tokenizer

    library_internals.check(PADDED, why="texts keep their length without it")
    observing.replace(module.PreTrainedTokenizerBase, "_get_padding_truncation_strategies", strategies)
    _replace_class_method(module.PreTrainedTokenizerBase, "from_pretrained", load)


def _cut_arguments(module: ModuleType) -> None:
    def cut(arguments: Any) -> None:
        if arguments.output_dir:  # which may hold a real run
            _report(f"output_dir {arguments.output_dir} -> a folder that is removed")
        arguments.output_dir = f"{os.environ[SMALL]}.output"
        _limit(arguments, BATCHES, BATCH)
        _limit(arguments, LENGTHS, TOKENS)

    observing.before(module.TrainingArguments, "__post_init__", cut)


def _limit(arguments: Any, names: Sequence[str], most: int) -> None:
    for name in names:
        value = getattr(arguments, name, None)
        if isinstance(value, int | float) and value > most:
            setattr(arguments, name, most)
            _report(f"{name} {value:g} -> {most}")


def _cut_training(module: ModuleType) -> None:
    """Ends training after a few steps, without a warm-up, and saves and evaluates in them."""

    def cut(trainer: Any, *_: Any, **__: Any) -> None:
        arguments, rows = trainer.args, trainer.train_dataset
        of_step = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        steps = arguments.max_steps
        if steps <= 0 and hasattr(rows, "__len__"):
            steps = math.ceil(len(rows) / of_step * arguments.num_train_epochs)
        if steps > STEPS:
            _report(f"{counted(steps, 'step')} -> {STEPS}, without warm-up")
            arguments.max_steps, arguments.warmup_steps = STEPS, 0
            _limit(arguments, INTERVALS, STEPS)

    observing.before(module.Trainer, "train", cut)


def _cut_data(module: ModuleType) -> None:
    def load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        whole = original(*args, **kwargs)
        name = str(args[0]) if args else str(kwargs.get("path") or kwargs.get("dataset_path"))
        if isinstance(whole, dict):
            return type(whole)({split: _first(rows, f"{name}, {split}") for split, rows in whole.items()})
        return _first(whole, name)

    for name in ("load_dataset", "load_from_disk"):
        observing.replace(module, name, load)


def _cut_parts(module: ModuleType) -> None:
    """Takes what there is where a script asks a cut data set for more rows than are left."""

    def select(original: Callable[..., Any], rows: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        few = [index for index in indices if index < len(rows)] if len(rows) <= ROWS else indices
        return original(rows, few, *args, **kwargs)

    def divide(original: Callable[..., Any], rows: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("test_size", "train_size"):
            if len(rows) <= ROWS and isinstance(kwargs.get(name), int) and kwargs[name] >= len(rows):
                kwargs[name] = 0.25 if name == "test_size" else None
        return original(rows, *args, **kwargs)

    observing.replace(module.Dataset, "select", select)
    observing.replace(module.Dataset, "train_test_split", divide)


def _first(rows: Any, name: str) -> Any:
    """The first rows of a data set, or of a stream."""
    if not hasattr(rows, "__len__"):
        _report(f"{name}: its first {ROWS} rows")
        return rows.take(ROWS)
    if len(rows) <= ROWS:
        return rows
    _report(f"{name} {len(rows):,} -> {ROWS} rows")
    return rows.select(range(ROWS))


def _report(what: str) -> None:
    events.report("made-small", what=what, line=script.line_of_stack(sys._getframe(1)))
