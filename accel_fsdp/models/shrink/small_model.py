"""A small model of the same architecture as a real one, with random weights, in a folder that `from_pretrained` loads.

The real one is built on the meta device from its config. Everything that FSDP sees stays: the classes of the model
and its layers, each kind of layer, tied weights, dtypes, parameter names.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_fsdp import atomic_files, models
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError, first_line
from accel_fsdp.models import config_json, remote_code
from accel_fsdp.models.shrink import fewer_layers, small_config
from accel_fsdp.models.shrink.config_parts import TOKENS, parts_of
from accel_fsdp.models.shrink.small_config import ATTEMPTS, Change, Words

if TYPE_CHECKING:
    from torch import nn


MOST_PARAMETERS = 200_000_000
"""A model of more takes minutes for a step on a CPU."""
FEWEST_TOKENS = 200
"""Without tokenizer files transformers makes a tokenizer with only the special tokens: T5's has 104."""
TOKENIZER_FILES = (file_names.TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
MADE_UP_VOCABULARY = 512
BYTES = 256
ALWAYS = ("pad", "eos", "mask", "im_start", "im_end")
"""Tokens that there are in any case; the last two mark turns."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIED_TOKENS = 16
SEED = 0


@dataclass(frozen=True)
class SmallModel:
    """The folder of a small model, and how it differs from the real one.

    `layer_classes` are what FSDP wraps, the same as in the real model. `layer_parameters`: weights of the largest
    layer, real and small. `not_shown` are sentences about what a rehearsal with this model can't prove for the real
    one.
    """

    folder: Path
    parameters: int
    layer_classes: tuple[str, ...]
    layer_parameters: tuple[int, int]
    changed: tuple[Change, ...]
    tokenizer: str
    not_shown: tuple[str, ...]


@dataclass(frozen=True)
class _BuiltModel:
    """A small model of one attempt; `tried` is empty if a forward pass ran, else the reason why it didn't."""

    model: Any
    attempt: str
    lacks_kinds: bool
    tried: str


def shrink(model: str, target: Path, divisors: Mapping[str, int] = MappingProxyType({})) -> SmallModel:
    """Writes a small model of the architecture of `model`, a hub id or a folder, to the folder `target`.

    A mesh with these `divisors` (of `parallel_plans`) divides it.

    It has two layers in each stack, and as many more as show each kind of layer. An existing `target` is replaced. The
    weights are the same each time.
    """
    config = models.read_config(model)
    real = _on_meta(model, config)
    tokenizer = _tokenizer(model)
    token_ids = small_config.token_ids(config)
    new_ids = {number: BYTES + index for index, number in enumerate(token_ids)}  # behind those of the bytes
    words = Words(_rows(tokenizer, token_ids)) if tokenizer else Words(MADE_UP_VOCABULARY, new_ids)
    small = _first_that_works(model, config, real, words, divisors)
    _cast(small.model, models.stored_dtype(model))
    with atomic_files.replaced_folder(target) as folder:
        _write(model, small.model, folder, words)
        (tokenizer or made_up_tokenizer(token_ids)).save_pretrained(folder)
    return SmallModel(
        folder=target,
        parameters=sum(parameter.numel() for parameter in small.model.parameters()),
        layer_classes=_classes(small.model),
        layer_parameters=(_largest_layer(real), _largest_layer(small.model)),
        changed=small_config.changes(config.to_dict(), small.model.config.to_dict()),
        tokenizer="real" if tokenizer else "made up",
        not_shown=tuple(_not_shown(config, small, bool(tokenizer))),
    )


def small_version(name: str, real: "nn.Module", config: Any) -> Any:
    """A small random model of the class of `real`, which is on the meta device and has this config; on the CPU.

    All of the vocabulary stays, for scripts that read the real tokenizer.

    Raises:
        UserError: no small version runs, or it is still too large.
    """
    model = _first_that_works(name, config, real, Words(sys.maxsize), {}).model
    _cast(model, str(config.dtype or "").removeprefix("torch."))
    return model


def _on_meta(name: str, config: Any) -> Any:
    """The model without weights, of the class that its config names, else of the class that trains it."""
    kind = models.model_class(config)
    return models.build(name, config) if kind.__name__ == models.CAUSAL else models.on_meta(name, kind, config)


def _tokenizer(name: str) -> Any:
    """The model's tokenizer; None if it has none."""
    try:
        tokenizer = models.read_tokenizer(name)
    except remote_code.NeedsCode:
        raise
    except UserError:
        return None
    has_files = any((Path(name) / file).is_file() for file in TOKENIZER_FILES)
    return tokenizer if has_files or len(tokenizer.get_vocab()) >= FEWEST_TOKENS else None


def _rows(tokenizer: Any, token_ids: dict[int, str]) -> int:
    """Rows of an embedding that has all tokens of a tokenizer and of the config."""
    rows: int = max([*tokenizer.get_vocab().values(), *token_ids]) + 1
    return -(-rows // small_config.VOCABULARY_ROUNDED_TO) * small_config.VOCABULARY_ROUNDED_TO


def _first_that_works(
    name: str, config: Any, real: "nn.Module", words: Words, divisors: Mapping[str, int]
) -> _BuiltModel:
    """The small model of the first attempt that runs; if none can be tried, of the first that can be built."""
    built: list[_BuiltModel] = []
    failed: list[str] = []
    for attempt in ATTEMPTS:
        try:
            attempted = _make(name, config, real, words, divisors, attempt)
        except Exception as error:  # any error of a config of unknown kind: the next attempt changes less of it
            failed.append(f"{attempt}: {first_line(error)}")
            continue
        if not attempted.tried:
            return attempted
        built.append(attempted)
    if built:
        return built[0]
    raise UserError(
        f"{name} has no small version: " + failed[0],
        why=f"a rehearsal on a CPU needs a model of at most {MOST_PARAMETERS // 10**6} million parameters",
        fix="give the folder of a small model of the same kind, or one of its smaller sizes",
    )


def _make(
    name: str, config: Any, real: "nn.Module", words: Words, divisors: Mapping[str, int], attempt: str
) -> _BuiltModel:
    real_kinds = fewer_layers.all_kinds(real)
    with config_json.explained_errors(name):
        small = small_config.smaller(config, real, attempt, words, divisors)
    shape = models.on_meta(name, type(real), small)
    if _classes(shape) != _classes(real):
        raise ValueError(f"its layers are {', '.join(_classes(shape))}, not {', '.join(_classes(real))}")
    count = sum(parameter.numel() for parameter in shape.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"it still has {count // 10**6:,} million parameters")
    model = _random(type(shape), shape.config)
    return _BuiltModel(model, attempt, not real_kinds <= fewer_layers.all_kinds(shape), _trial(model))


def _classes(model: "nn.Module") -> tuple[str, ...]:
    return tuple(layer.name for layer in models.wrap_classes(model))


def _largest_layer(model: "nn.Module") -> int:
    return max((layer.parameters for layer in models.wrap_classes(model)), default=0)


def _random(kind: Any, config: Any) -> Any:
    """A model with its class's initial weights, the same each time."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(SEED)
        return kind._from_config(config, dtype=torch.float32)


def _trial(model: Any) -> str:
    import torch

    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            tokens = torch.randint(0, model.config.get_text_config().vocab_size, (2, TRIED_TOKENS))
            extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
            model(input_ids=tokens, **extra)
    except Exception as error:  # it may need other inputs than text
        return first_line(error)
    finally:
        model.train()
    return ""


def _cast(model: "nn.Module", dtype: str) -> None:
    """Casts the parameters to the dtype of the real checkpoint, except for those that transformers keeps in float32."""
    import torch

    if not dtype:
        return
    float32_names = set(models.kept_in_float32(model, dtype)) if dtype != "float32" else set()
    for name, parameter in model.named_parameters():
        if name not in float32_names and parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, dtype))


def _write(name: str, model: Any, folder: Path, words: Words) -> None:
    from transformers import GenerationConfig

    if model.can_generate():
        with suppress(OSError, ValueError):  # otherwise the model's own defaults stay
            model.generation_config = GenerationConfig.from_pretrained(name)
        generation = model.generation_config
        generation.update(**small_config.renumbered(generation.to_dict(), words.ids))
    model.save_pretrained(folder)


def _not_shown(config: Any, small: _BuiltModel, has_tokenizer: bool) -> Iterator[str]:
    yield "how the loss falls: the weights are random"
    yield "long sequences"
    if not has_tokenizer:
        yield "the tokenizer and its chat template: the model has none here, and one of bytes takes its place"
    if getattr(config, "quantization_config", None):
        yield "quantised weights: the small model's are not quantised"
    if any(part.experts > 1 for part in parts_of(config)):
        yield "how tokens spread over the real number of experts"
    if len(parts_of(config)) > 1:
        yield "images and sounds, unless the rows have some"
    if small.attempt is not ATTEMPTS[0]:
        yield f"nothing more of its sizes: made smaller were its {small.attempt} alone, as more didn't run"
    if small.lacks_kinds:
        yield "some kinds of its layers, which need more layers than the small model has"
    if small.tried:
        yield f"that it runs on text alone: {small.tried}"


def made_up_tokenizer(token_ids: Mapping[int, str]) -> Any:
    """Makes the tokenizer from each token id of a config and the key that names it, such as eos_token_id."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    stems = _stems(token_ids)
    tokenizer = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    extra = [name for name in ALWAYS if name not in stems]
    tokenizer.add_special_tokens([f"<|{name}|>" for name in (*stems, *extra)])
    special = {f"{name}_token": f"<|{name}|>" for name in ("bos", "eos", "pad", "mask") if name in (*stems, *ALWAYS)}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _stems(token_ids: Mapping[int, str]) -> list[str]:
    """A name for each token, all different, in their order."""
    stems: list[str] = []
    for key in token_ids.values():
        stem = TOKENS.sub("", key).strip("_") or "token"
        stems.append(stem if stem not in stems else f"{stem}_{len(stems)}")
    return stems
