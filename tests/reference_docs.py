"""Schema, YAMLs and a figure made from the tables, which `make docs` writes, and pages that the site makes."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from known_issues import PAINS, UNSEEN

from accel_fsdp import api, atomic_files
from accel_fsdp.config import BY_NAME, EXACT, FIELDS, NUMBERED, Engine, Field, Kind, full_name, short_name
from accel_fsdp.linter.rules import RULES, SECTIONS
from accel_fsdp.linter.rules.values import ALL_OF_A_MACHINE
from accel_fsdp.models import CAUSAL, catalogue, model_facts
from accel_fsdp.planner import html_report, svg
from accel_fsdp.prediction import trace_store
from accel_fsdp.wizard import MODEL, PRESETS, interview, to_yaml

ROOT = Path(__file__).parent.parent
SCHEMA_DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest that SchemaStore advises, and all language servers of YAML read."""
SCHEMA_ID = "https://www.schemastore.org/accelerate-config.json"
"""Where SchemaStore would serve it."""

NO_DEFAULTS = (None, {}, -1)
"""What an editor needn't offer: -1 stands for the number of GPUs."""


def schema() -> dict[str, Any]:
    """A JSON schema of an Accelerate YAML for editors: keys, choices and help of the field table.

    Stricter than Accelerate, which accepts any key inside a section and drops it.
    """
    sections = {
        name: {"type": "object", "properties": _properties(name), "additionalProperties": False} for name in SECTIONS
    }
    top = {key: {**value, **sections.get(key, {})} for key, value in _properties("").items()}
    return {
        "$schema": SCHEMA_DIALECT,
        "$id": SCHEMA_ID,
        "title": "Accelerate config (DDP, FSDP1, FSDP2, DeepSpeed, TPU)",
        "description": "The YAML of `accelerate launch --config_file`, as Accelerate 1.15 reads it.",
        "type": "object",
        "properties": top,
        "required": ["distributed_type"],
        "additionalProperties": False,
    }


def _properties(section: str) -> dict[str, Any]:
    fields = [field for field in FIELDS if field.section == section]
    named = {field.key: _property(field) for field in fields}
    short = {short_name(section, key) for key in named}  # Accelerate adds the prefix where it is missing
    return named | {key: named[full_name(section, key)] for key in sorted(short)}


def _property(field: Field) -> dict[str, Any]:
    types: dict[Kind, dict[str, Any]] = {
        Kind.BOOL: {"anyOf": [{"type": ["boolean", "string"]}, {"enum": [0, 1]}]},
        Kind.INT: {"type": "integer"},
        Kind.SECTION: {"type": "object"},
        Kind.NAMES: {"type": "string", "pattern": r"^\S+$"},
    }
    shape = types.get(field.kind, {})
    if field.key == "num_processes":
        shape = {"anyOf": [shape, {"enum": list(ALL_OF_A_MACHINE)}]}
    if field.choices:
        choices: list[str | int] = [*field.choices, *NUMBERED.get(field.key, ())]
        choices += [int(choice) for choice in choices if choice.isdecimal()]
        shape = {"enum": choices}
        if any(field.meanings.values()):
            shape["enumDescriptions"] = [field.meanings.get(str(choice), "") for choice in choices]
        if field.key not in EXACT:
            words = "|".join(_any_case(choice) for choice in choices if isinstance(choice, str))
            shape = {"anyOf": [shape, {"type": "string", "pattern": f"^({words})$"}]}
    default = {} if field.default in NO_DEFAULTS else {"default": field.default}
    return {"description": f"{field.help} Read by {readers(field)}.", **default, **shape}


def _any_case(word: str) -> str:
    """A pattern for a word in whatever case; JSON schemas know no flag for that."""
    return "".join(f"[{letter.upper()}{letter.lower()}]" if letter.isalpha() else letter for letter in word)


def readers(field: Field) -> str:
    if field.engines == frozenset(Engine):
        return "every engine"
    return ", ".join(engine.label for engine in Engine if engine in field.engines) or "nothing"


def rules_page() -> str:
    lines = [
        "# Rules of `accel-fsdp check`",
        "",
        "Words in capitals are those of a file. A rule names what shows its fault: a public issue, or the library that",
        "a test runs (launcher, plugin: Accelerate's; ranks: real).",
        "",
    ]
    for rule in RULES.values():
        seen = ", ".join(map(_linked, (word for word in rule.seen if word not in PAINS)))
        lines += [f"## {rule.code}", "", f"*{rule.severity}*, seen: {seen}", ""]
        for what, why, fix in rule.texts:
            lines.append("- " + "; ".join(filter(None, [what, why and f"why: {why}", fix and f"fix: {fix}"])))
        lines += ["", *(line for note in rule.notes for line in (note, ""))]
    return "\n".join(lines)


OWNERS = {"accelerate": "huggingface", "transformers": "huggingface", "pytorch": "pytorch", "ms-swift": "modelscope"}
OWNERS |= {"bitsandbytes": "bitsandbytes-foundation", "ViewDiff": "facebookresearch", "trl": "huggingface"}
OWNERS |= {"DeepSpeed": "deepspeedai", "LlamaFactory": "hiyouga"}


def _linked(seen: str) -> str:
    """The name of an issue as a link; another word as it is."""
    library, _, number = seen.partition("#")
    owner = OWNERS.get(library)
    return f"[{seen}](https://github.com/{owner}/{library}/issues/{number})" if number and owner else seen


def keys_page() -> str:
    lines = ["# Keys of an Accelerate YAML", ""]
    for section in dict.fromkeys(section for section, _ in BY_NAME):
        lines += [f"## {section or 'Top level'}", "", "| key | takes | if absent | read by | what it does |"]
        lines += ["|---|---|---|---|---|"]
        for field in (field for field in FIELDS if field.section == section):
            takes = ", ".join(field.choices) or field.kind.value
            default = "-" if field.default is None else str(field.default)
            lines.append(f"| `{field.key}` | {takes} | {default} | {readers(field)} | {field.help} |")
        lines.append("")
    return "\n".join(lines)


WHERE_KNOWN = (
    *("language_parameters", "heads", "kv_heads", "experts", "fused_experts", "tensor_plan", "expert_plan"),
    *("replicated_norms", "tied_rows", "expert_targets"),
)
"""Facts that most models lack, and the catalogue leaves out for them."""


def catalogue_facts(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    facts = model_facts(name, AutoConfig.for_model(**settings))
    return {
        "model_type": facts.model_type,
        "parameters": facts.parameters,
        "wrap_classes": [asdict(layer) for layer in facts.wrap_classes],
        "classes": sorted(facts.classes),
        "largest_layer_parameters": facts.largest_layer_parameters,
        "persistent_buffers": facts.persistent_buffers,
        **({"auto_class": facts.auto_class} if facts.auto_class != CAUSAL else {}),
        **{name: listed(getattr(facts, name)) for name in WHERE_KNOWN if getattr(facts, name)},
    }


def listed(fact: Any) -> Any:
    """A fact as JSON has it."""
    return list(fact) if isinstance(fact, tuple) else fact


def catalogue_text() -> str:
    models = {
        name: entry | {"facts": catalogue_facts(name, entry["config"])} for name, entry in catalogue.entries().items()
    }
    return json.dumps(models, indent=1) + "\n"


def recorded_texts() -> Iterator[tuple[str, str]]:
    """The bundled tapes by path, one file for all models of one configuration; recorded only where that has changed."""
    from transformers import AutoConfig

    from accel_fsdp.prediction.tracing import fit

    for name, entry in catalogue.entries().items():
        variants = trace_store.shipped(name)
        if trace_store.first_alike(name) != name or not variants:
            continue
        path = f"accel_fsdp/prediction/{trace_store.FOLDER}/{trace_store.file_name(name)}"
        key = trace_store.key_of(entry["config"], variants)
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not text or json.loads(text)["key"] != key:
            recorded = fit.record_model(name, AutoConfig.for_model(**entry["config"]), variants)
            text = trace_store.to_text(key, *recorded)
        yield path, text


def shipped() -> dict[str, str]:
    sessions = {name: interview.Interview({}, {"model": MODEL, **given}) for name, given in PRESETS.items()}
    return {f"{name}.yaml": to_yaml.to_text(interview.answers(session)) for name, session in sessions.items()}


def covered() -> dict[str, list[str]]:
    return {pain: [rule.code for rule in RULES.values() if pain in rule.seen] for pain in PAINS}


def coverage_page() -> str:
    seen = covered()
    lines = [
        "# What goes wrong, and which rule sees it",
        "",
        f"{sum(map(bool, seen.values()))} of {len(PAINS)} are seen, some only with `--model`, `--args` or `--script`; "
        "[rules.md](rules.md) says which.",
        "",
        "| id | what goes wrong | rules | what no rule sees |",
        "|---|---|---|---|",
    ]
    for pain, what in PAINS.items():
        links = ", ".join(f"[{code}](rules.md#{code.lower()})" for code in seen[pain])
        lines.append(f"| {pain} | {what} | {links or '-'} | {UNSEEN.get(pain, '')} |")
    return "\n".join([*lines, ""])


DRAWN = {
    "docs/plan_step.svg": "Memory over one step",
}
"""Figures of the page that `accel-fsdp plan --html` writes, by the beginning of their titles."""


@cache
def plan_figures() -> dict[str, str]:
    """The figures of `docs/plan.md`, as the page of its example draws them."""
    report = api.plan("llama-3.1-8b", "8xH100-80GB", seq_len=4096)
    page = html_report.make_page(report)
    drawn = re.findall(r'<svg role="img" class="w720".*?</svg>', page, flags=re.DOTALL)
    return {
        path: svg.standalone(next(figure for figure in drawn if f"<title>{title}" in figure))
        for path, title in DRAWN.items()
    }


def site_pages() -> dict[str, str]:
    """The pages of the site that are made from the tables, which no folder of the repository holds."""
    return {"rules.md": rules_page(), "keys.md": keys_page(), "coverage.md": coverage_page()}


def pages() -> dict[str, str]:
    return {
        "accelerate_configs/schema.json": json.dumps(schema(), indent=2) + "\n",
        **{f"accelerate_configs/{name}": text for name, text in shipped().items()},
        **plan_figures(),
    }


if __name__ == "__main__":
    for name, text in {**pages(), "accel_fsdp/models/catalogue.json": catalogue_text()}.items():
        atomic_files.write_text(ROOT / name, text)
    for name, text in recorded_texts():
        atomic_files.write_text(ROOT / name, text)
