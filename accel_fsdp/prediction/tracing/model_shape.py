"""Reads a `ModelShape` from a Transformers config: the model is built on the meta device, without weights."""

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_fsdp.errors import UserError
from accel_fsdp.models import is_fused_experts, language_parameters, parallel_plans, persistent_buffers, wrap_classes
from accel_fsdp.prediction.memory import Block, ModelShape, Parameter, ParameterKind

if TYPE_CHECKING:
    from torch import nn

SLIDING = ("sliding_attention", "chunked_attention")


def shape_of(name: str, config: Any, model: "nn.Module") -> ModelShape:
    text = config.get_text_config()
    layers = dict(blocks_of(model))
    traced = set(text_layers(model))
    groups: dict[Any, list[int]] = {}
    for index, (path, layer) in enumerate(layers.items()):
        groups.setdefault((*_signature(layer), path.rsplit(".", 1)[0]), []).append(index)
    modules = list(layers.values())
    heads = int(_first_setting(text, "num_attention_heads", "n_head"))
    names, division = list(layers), parallel_plans.divisible_by_config(config)
    divided = Divided(parallel_plans.cuts(model), parallel_plans.dispatched(model), division.expert_targets)
    return ModelShape(
        name=name,
        model_type=str(config.model_type),
        hidden=int(_first_setting(text, "hidden_size", "n_embd")),
        vocab=int(text.vocab_size),
        heads=heads,
        head_dim=int(_first_setting(text, "head_dim") or _first_setting(text, "hidden_size", "n_embd") // heads),
        blocks=tuple(
            Block(type(modules[first]).__name__, (first, *others), _parameters(modules[first], names[first], divided))
            for first, *others in groups.values()
        ),
        outer=_outer(model, layers, divided),
        tied=_tied(model),
        stored_buffers=persistent_buffers(model),
        buffers_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        experts=division.experts,
        experts_used=int(_first_setting(text, "num_experts_per_tok", "num_experts_per_token", "top_k_experts")),
        window=_window(text, modules),
        positions=int(_first_setting(text, "max_position_embeddings", "n_positions")),
        untraced=tuple(index for index, group in enumerate(groups.values()) if not traced.intersection(group)),
        eager_only=not getattr(model, "_supports_sdpa", True),
        language=language_parameters(model),
        division=division,
    )


def blocks_of(model: "nn.Module") -> list[tuple[str, "nn.Module"]]:
    """The layers that become FSDP units, by path, in the order of declaration."""
    names = {layer.name for layer in wrap_classes(model)}
    inner = [(path, module) for path, module in model.named_modules() if type(module).__name__ in names]
    outer = tuple(f"{path}." for path, _ in inner)
    # a class such as an embedding table, which some models name too, is in no list of layers
    layers = [(path, m) for path, m in inner if path.rsplit(".", 1)[-1].isdecimal() and not path.startswith(outer)]
    if not layers:
        raise UserError(
            f"no repeated layer found in {type(model).__name__}",
            why="memory is counted per layer",
            fix="choose a model made of transformer layers",
        )
    return layers


def text_layers(model: Any) -> list[int]:
    """The indices, among all blocks, of those that process text: a model for images also has layers for images."""
    paths = [path for path, _ in blocks_of(model)]
    if len({path.rsplit(".", 1)[0] for path in paths}) == 1:
        return list(range(len(paths)))
    decoder = model.get_decoder()
    start = next(f"{path}." for path, module in model.named_modules() if module is decoder)
    return [index for index, path in enumerate(paths) if path.startswith(start)]


def _signature(layer: "nn.Module") -> tuple[Any, ...]:
    """The properties that two layers with one tape share: class, parameters, kind of attention."""
    attention = tuple(
        str(value)
        for module in layer.modules()
        for key in ("attention_type", "is_sliding", "sliding_window", "layer_type", "use_rope", "no_rope_layer")
        if (value := vars(module).get(key)) is not None
    )
    return (
        *(type(module).__name__ for module in layer.modules()),
        tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
        attention,
    )


class Divided(NamedTuple):
    """The cuts of tensor parallelism, by dimension, and the parameters that expert parallelism divides; full names.

    `expert_targets` are the names of layers that PEFT takes for experts.
    """

    cuts: Mapping[str, int]
    dispatched: Collection[str]
    expert_targets: Collection[str]

    def parameter(self, full: str, name: str, p: "nn.Parameter", kind: ParameterKind) -> Parameter:
        adaptable = full.rpartition(".")[0].rpartition(".")[2] not in self.expert_targets
        return Parameter(name, tuple(p.shape), kind, self.cuts.get(full), full in self.dispatched, adaptable)


def _parameters(layer: "nn.Module", place: str, divided: Divided) -> tuple[Parameter, ...]:
    """The parameters of a layer by their names in it; `place` is its path in the model."""
    return tuple(
        divided.parameter(f"{place}.{full}", full, p, _kind(f".{path}.", module, name, p))
        for path, module in layer.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if (full := f"{path}.{name}".lstrip("."))
    )


def _kind(path: str, module: "nn.Module", name: str, parameter: "nn.Parameter") -> ParameterKind:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    is_of_one = ".experts." in path and parameter.dim() == 2 and "bias" not in name
    if is_of_one or is_fused_experts(path, module, parameter):
        return "experts"
    if isinstance(module, nn.Linear | Conv1D) and name == "weight":
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "norm" if "norm" in type(module).__name__.lower() else "other"


def _outer(model: "nn.Module", layers: Iterable[str], divided: Divided) -> tuple[Parameter, ...]:
    """The parameters outside the blocks; tied ones count once, under their first name."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    parameters, counted_ids = [], set()
    prefixes = tuple(f"{path}." for path in layers)
    for path, module in model.named_modules():
        if f"{path}.".startswith(prefixes):
            continue
        for name, p in module.named_parameters(recurse=False):
            if id(p) in counted_ids:
                continue
            counted_ids.add(id(p))
            kind = "head" if module is output and name == "weight" else _kind(f".{path}.", module, name, p)
            full = f"{path}.{name}"
            parameters.append(divided.parameter(full.lstrip("."), full, p, kind))
    return tuple(parameters)


def _tied(model: Any) -> bool:
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return output is not None and embedding is not None and output.weight is embedding.weight


def _window(text: Any, layers: list["nn.Module"]) -> int:
    """The sliding window if any layer has one; some configs name a window that no layer uses."""
    window = _first_setting(text, "sliding_window", "attention_chunk_size")
    types = getattr(text, "layer_types", None)
    if types is not None:
        return int(window) if any(kind in SLIDING for kind in types) else 0
    used = any(vars(module).get("sliding_window") for layer in layers for module in layer.modules())
    return int(window) if used or text.model_type in ("mistral", "mixtral", "phi3") else 0


def _first_setting(config: Any, *names: str) -> Any:
    """The first of these settings that the config has, 0 if none."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)
