"""A model's config and its nested configs as mappings, with the sizes that the rules need under common names."""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
HEAD_COUNTS = re.compile(r"^((en|de)coder_)?((num_)?attention_heads|num_heads|n_heads?)$")
GROUP_COUNTS = re.compile(
    r"^((en|de)coder_)?(num_key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads|multi_query_group_num)$"
)
EXPERT_COUNTS = re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$")
DEPTHS = re.compile(
    r"^((en|de)coder_)?(num_hidden_layers|num_layers|n_layers?|layers|depth)$|^num_(en|de)coder_layers$"
)
TOKENS = re.compile(r"token_(id|index)s?$|token_indexes$")
LEFT_OUT = ("quantization_config", "auto_map")
"""Keys that are left out: random weights aren't quantised, and transformers builds the model without its own code."""


@dataclass
class Part:
    """A config, or a nested one, as a mapping that is changed in place."""

    values: dict[str, Any]
    names: dict[str, str]
    """Its own names of the usual keys, from transformers' `attribute_map`."""
    main: bool = False
    real: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.real = copy.deepcopy(self.values)

    def keys(self, pattern: re.Pattern[str]) -> list[str]:
        """The keys that match `pattern`, by their own or their usual name, and hold a whole number."""
        names = {own_name for usual_name, own_name in self.names.items() if pattern.search(usual_name)}
        return [key for key, value in self.real.items() if type(value) is int and (key in names or pattern.search(key))]

    @property
    def hidden(self) -> int:
        keys = (self.names.get("hidden_size", "hidden_size"), *HIDDEN)
        values = (self.real.get(key) for key in keys)
        return next((value for value in values if type(value) is int and value > 0), 0)

    @property
    def heads(self) -> int:
        return next((self.real[key] for key in self.keys(HEAD_COUNTS) if self.real[key] > 0), 0)

    @property
    def groups(self) -> int:
        if self.real.get("multi_query") is True and not self.real.get("new_decoder_architecture"):
            return 1
        counts = (self.real[key] for key in self.keys(GROUP_COUNTS) if self.real[key] > 0)
        return next((number for number in counts if self.heads % number == 0), self.heads)

    @property
    def head_width(self) -> int:
        """The width of a head: as configured, else its share of the layers' width."""
        widths = [self.real.get(key) or 0 for key in ("head_dim", "v_head_dim", "d_kv", "kv_channels", "d_head")]
        return max(widths) or (self.hidden // self.heads if self.heads else 0)

    @property
    def fills_width(self) -> bool:
        """Whether all heads together are as wide as its layers."""
        return self.heads * self.head_width == self.hidden

    @property
    def experts(self) -> int:
        """Experts of a layer, the most if layers differ; 0 without any."""
        counts = [count for key, value in self.real.items() if EXPERT_COUNTS.search(key) for count in as_list(value)]
        return max((count for count in counts if type(count) is int), default=0)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def parts_of(config: Any) -> list[Part]:
    """The config and all nested configs, as parts of one mapping, the outermost first."""
    values = {key: value for key, value in config.to_dict().items() if key not in LEFT_OUT}
    return list(_parts(config, values, config.get_text_config()))


def _parts(config: Any, values: dict[str, Any], main: Any) -> Iterator[Part]:
    yield Part(values, dict(getattr(config, "attribute_map", None) or {}), main=config is main)
    for key, value in values.items():
        if isinstance(value, dict) and hasattr(inner := getattr(config, key, None), "to_dict"):
            yield from _parts(inner, value, main)
