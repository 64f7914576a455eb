"""The parts of a built model: the layers that FSDP wraps, experts, the part that text goes through."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Set
from typing import TYPE_CHECKING, Any

from accel_fsdp.config import Embeddings
from accel_fsdp.models import counting
from accel_fsdp.models.facts import LayerClass

if TYPE_CHECKING:
    from torch import nn


def class_names(model: "nn.Module") -> frozenset[str]:
    return frozenset(type(module).__name__ for module in model.modules())


def persistent_buffers(model: "nn.Module") -> int:
    """Counts the buffers that are part of the state dict."""
    return len(model.state_dict().keys() & {name for name, _ in model.named_buffers()})


def kept_in_float32(model: "nn.Module", dtype: str, buffers: bool = False) -> list[str]:
    """The parameters that transformers keeps in float32 when a model is loaded in `dtype`, a 16-bit one."""
    kinds = ("_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == "float16" else []))
    patterns = [pattern for kind in kinds for pattern in getattr(model, kind, None) or ()]
    globs = (re.escape(pattern).replace(r"\*", ".*") for pattern in patterns)
    globbed = [re.compile(rf"(^|\.){glob}(\.|$)") for glob in globs]
    names = model.state_dict() if buffers else dict(model.named_parameters())
    return [name for name in names if any(pattern.search(name) for pattern in globbed)]


def expert_classes(model: "nn.Module") -> frozenset[str]:
    """The classes of single experts: the members of lists named `experts`."""
    from torch import nn

    lists = (m for name, m in model.named_modules() if name.endswith("experts") and isinstance(m, nn.ModuleList))
    return frozenset(type(expert).__name__ for experts in lists for expert in experts)


def is_fused_experts(path: str, module: "nn.Module", parameter: "nn.Parameter") -> bool:
    """Whether a direct parameter of the module at this path holds the weights of several experts.

    Convolutions and tables of positions have three dimensions too.
    """
    return parameter.dim() == 3 and "experts" in f"{path} {type(module).__name__}".lower()


def fused_experts(model: "nn.Module") -> int:
    """Counts the parameters in tensors of several experts."""
    modules = model.named_modules()
    owned = ((path, module, p) for path, module in modules for p in module.parameters(recurse=False))
    return sum(p.numel() for path, module, p in owned if is_fused_experts(path, module, p))


def wrap_classes(model: "nn.Module") -> tuple[LayerClass, ...]:
    """Finds the layer classes that FSDP should make units of.

    First choice: the names in `_no_split_modules` that exist in the built model (missing ones would stop Accelerate),
    without classes that hold the input embedding; of nested classes only the layers. Otherwise the classes of the
    longest `ModuleList` of equal layers.
    """
    present = Counter(type(module).__name__ for module in model.modules())
    names = [name for name in (getattr(model, "_no_split_modules", None) or ()) if present[name]]
    around_embedding = _classes_around({input_embedding(model)}, model)
    names = [name for name in names if name not in around_embedding]
    names = _outermost(model, names) or _repeated_layer(model)
    return tuple(LayerClass(name, present[name], _parameters_of_one(model, name)) for name in sorted(names))


def _outermost(model: "nn.Module", names: list[str]) -> list[str]:
    """The classes of whole layers among nested classes, without stacks of layers and parts of a layer."""
    from torch import nn

    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    parents = {path: set(_parents(path)) for path, name in classes.items() if name in names}
    stacks = {
        classes[outer]
        for path, outer_paths in parents.items()
        if path.rpartition(".")[0] in lists
        for outer in outer_paths & parents.keys()
    }
    layer_paths = {path for path in parents if classes[path] not in stacks}
    outermost = {classes[path] for path in layer_paths if not parents[path] & layer_paths}
    return [name for name in names if name in outermost]


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def input_embedding(model: "nn.Module") -> "nn.Module | None":
    """The module that `get_input_embeddings` names; None where the model names none."""
    try:
        table: nn.Module | None = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return None
    return table


def _classes_around(parts: "Set[nn.Module | None]", model: "nn.Module") -> frozenset[str]:
    """The classes of the modules that contain these parts of the model, without the model's own class."""
    modules = dict(model.named_modules(remove_duplicate=False))
    places = (path for path, module in modules.items() if module in parts)
    return frozenset(type(modules[outer]).__name__ for path in places for outer in _parents(path) if outer)


def embedding_parents(model: "nn.Module", layers: Collection[str]) -> frozenset[str]:
    """The classes that hold the input embedding and none of these layers.

    As a unit such a class takes the embedding's weight. Under FSDP2, Accelerate makes a unit of the embedding after
    those of the layer classes, and stops; under FSDP1 a head that shares the weight sees a shard.
    """
    of_layers = {module for module in model.modules() if type(module).__name__ in layers}
    return _classes_around({input_embedding(model)}, model) - _classes_around(of_layers, model)


def embeddings(model: "nn.Module") -> Embeddings:
    """Why Accelerate can't make units of input embedding and head under FSDP2 (1.14 and later, `fsdp2_prepare_model`).

    They are one unit if they share their weight, which then must not be in a third module; otherwise they are two.
    """
    table = input_embedding(model)
    if table is None and hasattr(model, "get_input_embeddings"):
        return "none"
    head = getattr(model, "get_output_embeddings", lambda: None)()
    parts = [part for part in (table, head) if part is not None]
    weights = {id(getattr(part, "weight", part)) for part in parts}
    units = [parts] if len(weights) == 1 else [[part] for part in parts]
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    for unit in units:
        members = {id(module) for part in unit for module in part.modules()}
        if any(owners[id(parameter)] - members for part in unit for parameter in part.parameters()):
            return "shared"
    return ""


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


def language_parameters(model: Any) -> int:
    """The number of parameters that text goes through, if a model also has parts for images or sound; else 0.

    Encoder and decoder of a text model are not separated either.
    """
    skipped = beside_text(model)
    counts = (counting.numel(parameter) for name, parameter in model.named_parameters() if name not in skipped)
    return sum(counts) if skipped else 0


def beside_text(model: Any) -> frozenset[str]:
    """The names of the parameters that text doesn't go through, such as those of an image encoder."""
    if model.config.is_encoder_decoder or model.config.get_text_config() is model.config:
        return frozenset()
    try:
        parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    except (AttributeError, NotImplementedError):
        return frozenset()
    read = {parameter for part in parts if part is not None for parameter in part.parameters()}
    unread = (name for name, parameter in model.named_parameters() if parameter not in read)
    return frozenset(unread) if read else frozenset()
