"""Facts of widely used models, bundled: these need no network, no token and no torch.

`catalogue.json` holds, per hub id, the configuration that was used, the positions (the longest sequence that its makers
name) and the facts of the model built from it on the meta device; `make docs` updates the facts, and a test builds the
models again. `methods` are those whose allocations can be recorded, if not all can: PEFT's LoRA and bitsandbytes wrap
Llama 4's router as a plain linear layer, and the linear attention of Qwen3.5 allocates chunk by chunk.
"""

import json
import os
from functools import cache
from importlib.resources import files
from typing import Any

from accel_fsdp.errors import nearest
from accel_fsdp.models.facts import LayerClass, ModelFacts


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The file's content by hub id: `config`, `positions`, `facts` and sometimes `methods`."""
    text = files("accel_fsdp.models").joinpath("catalogue.json").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = json.loads(text)
    return content


def canonical(name: str) -> str | None:
    """The catalogue's spelling of a hub id, or None. Case is ignored, and the last part is enough: `llama-3.1-8b`."""
    lower = name.lower()
    by_name = {known.lower(): known for known in entries()}
    alike = [known for known in entries() if known.rpartition("/")[2].lower() == lower]
    return by_name.get(lower) or (alike[0] if len(alike) == 1 else None)


def near(name: str) -> str:
    """The hub id that `name`, a full id or its last part, probably means; else empty."""
    by_part = {known if "/" in name else known.rpartition("/")[2]: known for known in entries()}
    nearby = by_part.get(nearest(name, by_part), "")
    return "" if nearby == name else nearby


def did_you_mean(name: str) -> str:
    nearby = near(name)
    return f" Did you mean {nearby}?" if nearby else ""


def hub_id(name: str) -> str:
    """The name as programs expect it: folders unchanged, catalogue names as full hub ids."""
    return name if os.path.exists(name) else canonical(name) or name


def find(name: str) -> ModelFacts | None:
    """The facts of a hub id or its last part, in any case, or None."""
    name_here = canonical(name)
    return None if name_here is None else _facts(name_here, entries()[name_here]["facts"])


def _facts(name: str, facts: dict[str, Any]) -> ModelFacts:
    layers = tuple(LayerClass(**layer) for layer in facts["wrap_classes"])
    tuples = ("wrap_classes", "classes", "expert_targets")
    others = {key: value for key, value in facts.items() if key not in tuples}
    return ModelFacts(
        name=name,
        wrap_classes=layers,
        classes=frozenset(facts["classes"]),
        expert_targets=tuple(facts.get("expert_targets", ())),
        wrap_reason="from the bundled catalogue",
        origin="bundled catalogue",
        **{"tensor_plan": False, "expert_plan": False, **others},
    )


@cache
def language_layers() -> frozenset[str]:
    """The layer classes of the catalogue's models that AutoModelForCausalLM builds."""
    known_facts = (entry["facts"] for entry in entries().values() if "auto_class" not in entry["facts"])
    return frozenset(layer["name"] for facts in known_facts for layer in facts["wrap_classes"])
