"""The transformers class for a config, and a model of it on the meta device."""

from typing import TYPE_CHECKING, Any

from accel_fsdp.errors import UserError
from accel_fsdp.models import config_json

if TYPE_CHECKING:
    from torch import nn

CAUSAL, SEQ2SEQ, MASKED = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"
CLASSIFIER, IMAGE_TEXT = "AutoModelForSequenceClassification", "AutoModelForImageTextToText"
AUTO_CLASSES = (CAUSAL, IMAGE_TEXT, SEQ2SEQ, MASKED, CLASSIFIER)
"""The classes to build, in this order if `architectures` is missing."""
BARE = "AutoModel"
"""Builds the layers of any model, without a head: those for images and sound too."""


def model_class(config: Any) -> Any:
    """The class of transformers that a config's `architectures` names, else the class that is trained.

    AutoModelForCausalLM if neither is known: it loads models with their own code.
    """
    import transformers

    return _named_class(config) or trained_class(config) or transformers.AutoModelForCausalLM


def _named_class(config: Any) -> Any:
    """The class that `architectures` names, if transformers has it and builds it from such a config; else None."""
    import transformers

    listed = getattr(config, "architectures", None)
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, (list, tuple)) else []
    cls = getattr(transformers, names[0], None) if names else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        return None
    kind: Any = cls
    fits = kind.config_class and (isinstance(config, kind.config_class) or _reads_text_part(kind, config))
    return kind if fits else None


def _reads_text_part(kind: Any, config: Any) -> bool:
    """Whether a class is built from the text part of a config, by the rule of the Auto classes."""
    config_class = getattr(kind, "config_class", None)  # Auto classes have none
    return config_class is not None and config_class == config.sub_configs.get("text_config")


def trained_class(config: Any) -> Any:
    """The class that is trained: named by `architectures`, else by `auto_class`; None if both are missing.

    A class without a head is not trained itself. Without `architectures`, a config with several parts gets the class
    for all of them, not the text class that AutoModelForCausalLM builds from one part.
    """
    named_class, kinds = _named_class(config), _auto_classes(config)
    headless = bool(kinds) and named_class is _bare_class(config)
    if named_class is not None and not headless and not (named_class is kinds.get(MASKED) and _is_decoder(config)):
        return named_class
    kind = auto_class(config)
    if kind == MASKED and CAUSAL in kinds:
        return kinds[CAUSAL]  # the same layers
    if kind == CAUSAL and _reads_text_part(kinds[CAUSAL], config):
        return kinds.get(IMAGE_TEXT, kinds[CAUSAL])
    return kinds.get(kind)


def auto_class(config: Any) -> str:
    """The Auto class for the class in a config's `architectures`, else the first Auto class that knows the config.

    Returns the name of the class itself if no Auto class of `AUTO_CLASSES` builds it, and "" for an unknown config.
    Models of AutoModelForCausalLM are trained on text, even if they have parts for images. An encoder that could also
    be a decoder, such as BERT, reads in both directions and is trained to fill in masked words.
    """
    kinds, named_class = _auto_classes(config), _named_class(config)
    fits = [kind for kind, built in kinds.items() if built is named_class]
    if named_class is not None and not fits and not (kinds and named_class is _bare_class(config)):
        return str(named_class.__name__)
    if CLASSIFIER in fits:
        return CLASSIFIER
    bare = BARE if _bare_class(config) else ""
    if config.is_encoder_decoder:
        return SEQ2SEQ if SEQ2SEQ in kinds else bare
    if MASKED in kinds and not _is_decoder(config):
        return MASKED
    return next(iter(kinds), bare)


def text_class(config: Any) -> Any:
    """The Auto class by which a script that trains on text, such as train/sft.py, loads the model."""
    import transformers

    kinds = _auto_classes(config)
    reads_images = IMAGE_TEXT in kinds and trained_class(config) is kinds[IMAGE_TEXT]
    return transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM


def _auto_classes(config: Any) -> dict[str, Any]:
    """The class that each of `AUTO_CLASSES` builds from this config, if it knows the config."""
    import transformers

    mappings = {kind: getattr(transformers, kind)._model_mapping for kind in AUTO_CLASSES}
    return {kind: mapping[type(config)] for kind, mapping in mappings.items() if type(config) in mapping}


def _bare_class(config: Any) -> Any:
    """The class that AutoModel builds: the layers of any model, without a head; None if it doesn't know the config."""
    import transformers

    return transformers.AutoModel._model_mapping.get(type(config), None)


def _is_decoder(config: Any) -> bool:
    """Whether the config of a masked language model makes it a decoder."""
    return bool(getattr(config, "is_decoder", False))


def build(name: str, config: Any, **options: Any) -> "nn.Module":
    """Builds the model on the meta device, without weights, as the class that is trained.

    Models for images and sound whose `architectures` are missing are built without a head, as AutoModel does.

    Raises:
        UserError: transformers has no class for the config, or the config is invalid. ValueError, ImportError: the
        model may lack the attention that `attn_implementation` asks for.
    """
    kind = trained_class(config) or _bare_class(config)
    if kind is None:
        raise UserError(
            f"the config of {name} ({config.model_type}) names no class in architectures",
            why="none of " + ", ".join((*AUTO_CLASSES, BARE)) + " builds one from it",
            fix="name the model's class in its config.json: architectures",
        )
    passing = (ValueError, ImportError) if "attn_implementation" in options else ()
    return on_meta(name, kind, config, passing, **options)


def on_meta(
    name: str, kind: Any, config: Any, passing: tuple[type[Exception], ...] = (), **options: Any
) -> "nn.Module":
    """Builds a transformers class on the meta device, without weights.

    Raises:
        UserError: the config is invalid for that class. Errors in `passing` are raised unchanged.
    """
    import torch

    with config_json.explained_errors(name, passing), torch.device("meta"):
        model: nn.Module = kind._from_config(part_for(kind, config), **options)
    return model


def part_for(kind: Any, config: Any) -> Any:
    """The part of a config that a class is built from: the text part for a text class."""
    return config.get_text_config() if _reads_text_part(kind, config) else config
