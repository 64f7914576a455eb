"""Reads the model (on the meta device, without weights) and the machine. The only module that probes."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import file_names, safetensors_header, summary
from accel_fsdp.errors import LIBRARIES, NotInstalled, UserError, did_you_mean, is_installed, require
from accel_fsdp.hardware import MachineFacts, gpus, host
from accel_fsdp.models import catalogue, config_json, counting, remote_code
from accel_fsdp.models.config_json import first_line as first_line
from accel_fsdp.models.facts import LayerClass, ModelFacts
from accel_fsdp.units import GIB

if TYPE_CHECKING:
    from torch import nn


CAUSAL, SEQ2SEQ, MASKED = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"
CLASSIFIER, IMAGE_TEXT = "AutoModelForSequenceClassification", "AutoModelForImageTextToText"
AUTO_CLASSES = (CAUSAL, IMAGE_TEXT, SEQ2SEQ, MASKED, CLASSIFIER)
"""The classes to build, in this order if `architectures` is missing."""
BARE = "AutoModel"
"""Builds the layers of any model, without a head: those for images and sound too."""
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def read_machine() -> MachineFacts:
    """Counts the accelerators that torch sees on this machine; without torch, the GPUs that NVIDIA's driver lists."""
    if not is_installed("torch"):
        return host.listed_gpus()
    import torch

    if not torch.accelerator.is_available():
        return MachineFacts(accelerator=None, count=0)
    if torch.cuda.is_available():
        name, total_bytes = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
        return MachineFacts(name, torch.cuda.device_count(), gpus.sold_gib(name, total_bytes / GIB))
    return MachineFacts(str(torch.accelerator.current_accelerator()), torch.accelerator.device_count())


def read_model(name: str) -> ModelFacts:
    """The facts about a model: from the bundled catalogue, else built on the meta device from its config.

    `name` is a hub id or a local folder; a folder wins over a catalogue entry of the same name.

    Raises:
        UserError: there is no such folder or repository, or `build` refuses its config.
    """
    known = None if os.path.exists(name) else catalogue.find(name)
    return known or model_facts(name, read_config(name))


def model_facts(name: str, config: Any) -> ModelFacts:
    """Builds the model of a Transformers config on the meta device and looks at it."""
    model = build(name, config)
    with config_json.believed(name):
        return _facts(name, config, model)


def _facts(name: str, config: Any, model: "nn.Module") -> ModelFacts:
    classes = wrap_classes(model)
    reason = "found in the built model"
    if not classes:
        reason = "no repeated layer found: name the class"
    return ModelFacts(
        name=name,
        model_type=str(config.model_type),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        wrap_classes=classes,
        wrap_reason=reason,
        classes=class_names(model),
        largest_layer_parameters=max((layer.parameters for layer in classes), default=0),
        persistent_buffers=persistent_buffers(model),
        auto_class=auto_class(config),
        language_parameters=language_parameters(model),
        **_formats(name, config, model),
    )


def _formats(name: str, config: Any, model: "nn.Module") -> dict[str, Any]:
    """What the config and the weights' headers say about dtypes, ties, experts and quantisation."""
    stored = summary.weights_in(_local_folder(name))
    pair = summary.tied_pair(stored)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    declared = getattr(model, "_no_split_modules", None) or ()
    quantization = getattr(config, "quantization_config", None)
    bits, storage = _quantization(quantization)
    return {
        "dtype": _dtype(config, stored),
        "tied": tied,
        "tied_apart": tied and pair is not None and not summary.equal(*pair),
        "kept_bf16": next(iter(kept_in_float32(model, "bfloat16")), ""),
        "kept_fp16": next(iter(kept_in_float32(model, "float16")), ""),
        "expert_classes": expert_classes(model),
        "declared_classes": tuple(sorted(declared)),
        "quantized": bits,
        "quant_storage": storage,
        "quant_method": config_json.quant_method(quantization),
    }


def stored_dtype(name: str, revision: str = "main", run_code: bool = False) -> str:
    """The dtype of a model's files, such as bfloat16; empty if unknown."""
    return _dtype(read_config(name, revision, run_code), summary.weights_in(_local_folder(name)))


def _dtype(config: Any, stored: Mapping[str, safetensors_header.Tensor]) -> str:
    dtype = config.dtype or next((DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in DTYPES), "")
    return str(dtype).removeprefix("torch.")


def _local_folder(name: str) -> Path:
    """The folder of a model: as given, or the hub cache's. Looks at no network."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file_names.CONFIG)
    return Path(cached).parent if isinstance(cached, str) else Path(os.devnull)


def kept_in_float32(model: "nn.Module", dtype: str) -> list[str]:
    """The parameters that transformers keeps in float32 when a model is loaded in `dtype`, a 16-bit one."""
    kinds = ("_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == "float16" else []))
    patterns = [pattern for kind in kinds for pattern in getattr(model, kind, None) or ()]
    globs = (re.escape(pattern).replace(r"\*", ".*") for pattern in patterns)
    whole = [re.compile(rf"(^|\.){glob}(\.|$)") for glob in globs]
    return [name for name, _ in model.named_parameters() if any(pattern.search(name) for pattern in whole)]


def expert_classes(model: "nn.Module") -> frozenset[str]:
    """The classes of single experts: what lists named `experts` hold."""
    from torch import nn

    lists = (m for name, m in model.named_modules() if name.endswith("experts") and isinstance(m, nn.ModuleList))
    return frozenset(type(expert).__name__ for experts in lists for expert in experts)


def _quantization(settings: Any) -> tuple[int, str]:
    """Bits and storage dtype of a bitsandbytes checkpoint; 0 for other methods."""
    if settings is None:
        return 0, ""
    config = settings if isinstance(settings, dict) else settings.to_dict()
    bits = 4 if config.get("load_in_4bit") else 8 if config.get("load_in_8bit") else 0
    return bits, str(config.get("bnb_4bit_quant_storage") or "uint8") if bits == 4 else ""


def check_local_path(name: str, what: str, example: str = "HuggingFaceTB/SmolLM2-135M-Instruct") -> None:
    """Refuses a name that can only be a folder and isn't there; hub ids pass, and `example` is one."""
    path = Path(name)
    if os.path.exists(name) or _looks_like_hub_id(name):  # of any length, which Path.exists refuses
        return
    try:
        siblings = os.listdir(path.parent)
    except OSError:
        siblings = []
    raise UserError(
        f"{what} {name} does not exist.{did_you_mean(path.name, siblings)}",
        why="nothing can be read from it",
        fix=f"give an existing path, or a hub id such as {example}",
    )


def class_names(model: "nn.Module") -> frozenset[str]:
    return frozenset(type(module).__name__ for module in model.modules())


def persistent_buffers(model: "nn.Module") -> int:
    """Counts the buffers that are part of the state dict."""
    return len(model.state_dict().keys() & {name for name, _ in model.named_buffers()})


def wrap_classes(model: "nn.Module") -> tuple[LayerClass, ...]:
    """Finds the layer classes that FSDP should make units of.

    First choice: the names in `_no_split_modules` that exist in the built model (those that don't would stop
    Accelerate), but for those that hold the embedding alone that the head shares, and of nested ones the layers alone.
    Otherwise the classes of the longest `ModuleList` of equal layers.
    """
    present = Counter(type(module).__name__ for module in model.modules())
    names = [name for name in (getattr(model, "_no_split_modules", None) or ()) if present[name]]
    names = _outermost(model, [name for name in names if not _parts_tied_embedding(model, name)])
    if not names:
        names = _repeated_layer(model)
    return tuple(LayerClass(name, present[name], _parameters_of_one(model, name)) for name in sorted(names))


def _outermost(model: "nn.Module", names: list[str]) -> list[str]:
    """Of nested classes those of the layers: neither a stack of layers nor a part of one."""
    from torch import nn

    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    around = {path: set(_around(path)) for path, name in classes.items() if name in names}
    stacks = {
        classes[outer]
        for path, outside in around.items()
        if path.rpartition(".")[0] in lists
        for outer in outside & around.keys()
    }
    kept = {path for path in around if classes[path] not in stacks}
    free = {classes[path] for path in kept if not around[path] & kept}
    return [name for name in names if name in free]


def _around(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def language_parameters(model: Any) -> int:
    """The parameters of the part that text goes through, of a model with others for images or sound; 0 of one without.

    A language model is that part as a whole, and one with an encoder and a decoder is not told apart.
    """
    beside = beside_text(model)
    read = (counting.numel(parameter) for name, parameter in model.named_parameters() if name not in beside)
    return sum(read) if beside else 0


def beside_text(model: Any) -> frozenset[str]:
    """The names of the parameters that text doesn't reach, as those of an image encoder."""
    if model.config.is_encoder_decoder or model.config.get_text_config() is model.config:
        return frozenset()
    try:
        parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    except (AttributeError, NotImplementedError):
        return frozenset()
    read = {parameter for part in parts if part is not None for parameter in part.parameters()}
    unread = (name for name, parameter in model.named_parameters() if parameter not in read)
    return frozenset(unread) if read else frozenset()


def _parts_tied_embedding(model: "nn.Module", name: str) -> bool:
    """Whether modules of this class hold the embedding and not the head that shares its weight, as BertEmbeddings do.

    A unit of them would gather the weight for itself: the head then sees a shard.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return False
    try:
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # it has no words
        return False
    if head is None or getattr(head, "weight", None) is not getattr(table, "weight", head):
        return False
    inside = [set(module.modules()) for module in model.modules() if type(module).__name__ == name]
    return any(table in inner and head not in inner for inner in inside)


def _repeated_layer(model: "nn.Module") -> list[str]:
    from torch import nn

    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    uniform = [stack for stack in stacks if len({type(layer) for layer in stack}) == 1]
    if not uniform:
        return []
    largest = max(uniform, key=lambda stack: sum(p.numel() for layer in stack for p in layer.parameters()))
    return [type(largest[0]).__name__]


def _parameters_of_one(model: "nn.Module", name: str) -> int:
    instances = (module for module in model.modules() if type(module).__name__ == name)
    return max(sum(parameter.numel() for parameter in module.parameters()) for module in instances)


def read_config(name: str, revision: str = "main", run_code: bool = False) -> Any:
    """Reads a model's config from a hub id or a local folder. Its own Python runs with `run_code` alone.

    Raises:
        UserError: there is none, it can't be read, or not without its own Python.
    """
    settings = read_settings(name, revision)
    _require_reading(name)
    from transformers import AutoConfig

    if not run_code:
        remote_code.check_kernels(name, settings)
    with config_json.believed(name):
        try:
            config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=run_code)
        except ValueError as error:
            if remote_code.is_refusal(error):
                raise remote_code.refusal(name, "its config") from error
            raise _unknown_kind(name, settings) or error from error
        if not run_code:
            remote_code.check_built_kernels(name, config)
        return config


def _unknown_kind(name: str, settings: Mapping[str, Any]) -> UserError | None:
    from transformers import CONFIG_MAPPING, __version__

    kind = str(settings.get("model_type", ""))
    if kind in CONFIG_MAPPING:
        return None
    what = f"is of model_type {kind}" if kind else "has no model_type in its config"
    return UserError(
        f"{name} {what}, which transformers {__version__} doesn't know.{did_you_mean(kind, CONFIG_MAPPING)}",
        why="the layer classes and sizes come from its code for that type",
        fix="correct model_type in config.json; for a newer model: pip install --upgrade transformers",
    )


def read_settings(name: str, revision: str = "main") -> dict[str, Any]:
    """What a model's config.json says, by a hub id or from a local folder; its sizes are those of a model.

    Raises:
        UserError: there is none, it can't be read, or no model can be like that.
    """
    check_local_path(name, "model")
    if Path(name).is_dir():
        return config_json.settings_in(Path(name))
    _require_reading(name)
    from transformers import PreTrainedConfig

    try:
        settings: dict[str, Any] = PreTrainedConfig.get_config_dict(name, revision=revision)[0]
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the config of {name}: {first_line(error)}{catalogue.did_you_mean(name)}",
            why="the layer classes and sizes come from it",
            fix="check the name; for a gated model: hf auth login; offline: give the folder of a downloaded model",
        ) from error
    config_json.check(name, settings)
    return settings


def _require_reading(name: str) -> None:
    """Goes on if there is what reads models that aren't bundled.

    Raises:
        NotInstalled: there isn't. UserError: there isn't either, and a bundled model has nearly that name.
    """
    purpose, libraries = f"reading the model {name}", ("transformers", "torch")
    lacking = next((library for library in libraries if not is_installed(library)), "")
    if lacking and not Path(name).exists() and (near := catalogue.near(name)):
        raise UserError(
            f"{name} is none of the bundled models.{catalogue.did_you_mean(name)}",
            why=NotInstalled.of(lacking, "reading another model").what,
            fix=f"give {near}; or, if {name} is another model: {NotInstalled.of(lacking).fix}",
        )
    require(purpose, *libraries)


def read_tokenizer(name: str, revision: str = "main", run_code: bool = False) -> Any:
    """Reads a model's tokenizer from a hub id or a local folder. Its own Python runs with `run_code` alone.

    Raises:
        UserError: there is none, it can't be read, or not without its own Python.
    """
    from transformers import AutoTokenizer

    if Path(name).is_dir():
        config_json.check_files(Path(name))
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=run_code)
    except BaseException as error:  # the Rust library's panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in LIBRARIES:
            raise
        if remote_code.is_refusal(error):
            raise remote_code.refusal(name, "its tokenizer") from error
        raise UserError(
            f"cannot load a tokenizer from {name}: {first_line(error)}",
            why="the data can't be turned into tokens",
            fix="copy the tokenizer files of the base model into that folder",
        ) from error


def architectures(config: Any) -> list[str]:
    named = getattr(config, "architectures", None)
    return [name for name in named if isinstance(name, str)] if isinstance(named, (list, tuple)) else []


def model_class(config: Any) -> Any:
    """The class of transformers that a config's `architectures` names, else the one that is trained.

    AutoModelForCausalLM where neither is known: it loads what brings its own code.
    """
    import transformers

    return _named_class(config) or trained_class(config) or transformers.AutoModelForCausalLM


def _named_class(config: Any) -> Any:
    """The class that `architectures` names, if transformers has it and builds it from such a config; else None."""
    import transformers

    names = architectures(config)
    named = getattr(transformers, names[0], None) if names else None
    if not (isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)):
        return None
    kind: Any = named
    fits = kind.config_class and (isinstance(config, kind.config_class) or _reads_text_part(kind, config))
    return kind if fits else None


def _reads_text_part(kind: Any, config: Any) -> bool:
    """Whether a class is built from the part of a config that is about text, as the Auto classes decide it."""
    own = getattr(kind, "config_class", None)  # which Auto classes lack
    return own is not None and own == config.sub_configs.get("text_config")


def trained_class(config: Any) -> Any:
    """The class that is trained: the one that `architectures` names, else that of `auto_class`; None for neither.

    A class without a head is not trained itself. Without `architectures` a config with several parts is of the class
    for all of them, not of the one for text that AutoModelForCausalLM builds from a part.
    """
    named, known = _named_class(config), _known(config)
    headless = bool(known) and _has_no_head(named, config)
    if named is not None and not headless and not (named is known.get(MASKED) and _is_decoder(config)):
        return named
    kind = auto_class(config)
    if kind == MASKED and CAUSAL in known:
        return known[CAUSAL]  # the same layers
    if kind == CAUSAL and _reads_text_part(known[CAUSAL], config):
        return known.get(IMAGE_TEXT, known[CAUSAL])
    return known.get(kind)


def _known(config: Any) -> dict[str, Any]:
    """The class that each of `AUTO_CLASSES` builds from this config, of those that know it."""
    import transformers

    mappings = {kind: getattr(transformers, kind)._model_mapping for kind in AUTO_CLASSES}
    return {kind: mapping[type(config)] for kind, mapping in mappings.items() if type(config) in mapping}


def _has_no_head(kind: Any, config: Any) -> bool:
    return kind is not None and kind is _bare_class(config)


def _bare_class(config: Any) -> Any:
    """The class that AutoModel builds: the layers of any model, without a head; None if it doesn't know the config."""
    import transformers

    return transformers.AutoModel._model_mapping.get(type(config), None)


def _is_decoder(config: Any) -> bool:
    """Whether the config of a masked language model makes it a decoder."""
    return bool(getattr(config, "is_decoder", False))


def auto_class(config: Any) -> str:
    """The Auto class that trains the class that a config's `architectures` names, else the first that knows the config.

    The class's own name where no Auto class of `AUTO_CLASSES` builds it; empty if nothing is known of the config. What
    AutoModelForCausalLM knows is trained on text, with its parts for images too. An encoder that could also be a
    decoder, such as BERT, reads both ways and is trained to fill in masked words.
    """
    known, named = _known(config), _named_class(config)
    fits = [kind for kind, built in known.items() if built is named]
    if named is not None and not fits and not (known and _has_no_head(named, config)):
        return str(named.__name__)
    if CLASSIFIER in fits:
        return CLASSIFIER
    bare = BARE if _bare_class(config) else ""
    if config.is_encoder_decoder:
        return SEQ2SEQ if SEQ2SEQ in known else bare
    if MASKED in known and not _is_decoder(config):
        return MASKED
    return next(iter(known), bare)


def text_class(config: Any) -> Any:
    """The Auto class with which a script that trains on text loads the model, such as train/sft.py."""
    import transformers

    known = _known(config)
    whole = IMAGE_TEXT in known and trained_class(config) is known[IMAGE_TEXT]
    return transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM


def build(name: str, config: Any, **options: Any) -> "nn.Module":
    """Builds the model on the meta device, without weights, as the class that is trained.

    Models for images and sound whose `architectures` are missing are built without a head, as AutoModel does.

    Raises:
        UserError: transformers knows no class for it, or no model can have its config.
        ValueError, ImportError: it may have no such attention as `attn_implementation` asks for.
    """
    kind = trained_class(config) or _bare_class(config)
    if kind is None:
        raise UserError(
            f"the config of {name} ({config.model_type}) names no class in architectures",
            why="none of " + ", ".join((*AUTO_CLASSES, BARE)) + " builds one from it",
            fix="name the model's class in its config.json: architectures",
        )
    asked = (ValueError, ImportError) if "attn_implementation" in options else ()
    return on_meta(name, kind, config, asked, **options)


def on_meta(
    name: str, kind: Any, config: Any, passing: tuple[type[Exception], ...] = (), **options: Any
) -> "nn.Module":
    """Builds a transformers class on the meta device, without weights.

    Raises:
        UserError: no model of that class can have the config. What `passing` names is raised as it is.
    """
    import torch

    with config_json.believed(name, passing), torch.device("meta"), config_json.bounded(name):
        model: nn.Module = kind._from_config(part_for(kind, config), **options)
    return model


def part_for(kind: Any, config: Any) -> Any:
    """The part of a config that a class is built from: the text part for a text class."""
    return config.get_text_config() if _reads_text_part(kind, config) else config


def _looks_like_hub_id(name: str) -> bool:
    """`owner/name` or `name`, not a path: no leading dot, slash or tilde and at most one slash."""
    path_like = name.startswith((".", "~", os.sep)) or name.count("/") > 1 or not name
    return not path_like
