"""Rules about names: keys that Accelerate drops or refuses, and sections that nothing reads."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from accel_fsdp.config import (
    BY_NAME,
    DISTRIBUTED_TYPES,
    EXPERT_FIELD,
    EXPERT_FLAG,
    MISNAMED,
    RETIRED,
    Edit,
    Engine,
    Field,
    Kind,
    full_name,
    known_fields,
)
from accel_fsdp.errors import nearest
from accel_fsdp.linter.rules.engine import Cases, Each, Row
from accel_fsdp.linter.rules.subject import Subject

SECTIONS = ("fsdp_config", "parallelism_config", "deepspeed_config", "dynamo_config", "fp8_config")
LIKELY, ALMOST_EQUAL = 0.75, 0.905
"""How alike a key is to a known one that is suggested, and to one that --fix takes it for, as `difflib` measures.

fdsp_config is fsdp_config (0.909), and dp_config may be another thing (0.9).
"""
OLD_TOP_KEYS = ("fp16", "dynamo_backend")
"""Top-level keys of old releases that Accelerate still understands."""
USUAL = {"rdzv_backend": ("static",), "same_network": ("true", "false"), "enable_cpu_affinity": ("false",)}
"""Values that don't change the launcher's defaults: the network only chooses `rdzv_backend`."""
READERS = (("deepspeed_config", "distributed_type", "DEEPSPEED"), ("fp8_config", "mixed_precision", "fp8"))
"""Sections, each with the key and value that makes something read it."""


def written(subject: Subject) -> Iterator[tuple[str, Field, Any]]:
    """Every known key of the file that Accelerate may read, as (dotted path, field, value)."""
    fp8 = str(subject.top("mixed_precision")).lower() == "fp8"
    for section in ("", *(SECTIONS if fp8 else SECTIONS[:-1])):
        for key, value in subject.section(section).items():
            if (field := BY_NAME.get((section, key))) and subject.reads(key):
                yield f"{section}.{key}".lstrip("."), field, value


def _no_distributed_type(subject: Subject) -> Cases:
    if subject.values.get("distributed_type") is not None:
        return None
    by_section = {"fsdp_config": Engine.FSDP1, "deepspeed_config": Engine.DEEPSPEED}
    kinds = [DISTRIBUTED_TYPES[engine] for name, engine in by_section.items() if subject.section(name)]
    edits = (Edit("", "distributed_type", kinds[0]),) if len(kinds) == 1 else ()
    return {"kinds": " or ".join(kinds or ["FSDP", "MULTI_GPU", "DEEPSPEED"]), "edits": edits}


def _typo_of(key: str, known: Iterable[str]) -> str:
    """The only known key that is almost equal, with the same digits; else empty."""
    near = difflib.get_close_matches(key.lower(), list(known), n=2, cutoff=ALMOST_EQUAL)
    return near[0] if len(near) == 1 and re.findall(r"\d", near[0]) == re.findall(r"\d", key) else ""


def _unknown_at_the_top(subject: Subject) -> Each:
    """FSDP's keys belong into `fsdp_config`; a typo of a section stays where the file's engine would ignore that."""
    fields = known_fields("")
    for key in subject.section(""):
        if key in fields or key in OLD_TOP_KEYS:
            continue
        home = next((section for section in SECTIONS if full_name(section, key) in known_fields(section)), "")
        match = "" if home else _typo_of(key, fields)
        near = match or nearest(key, fields, LIKELY)
        hint = f" Did you mean {near}?" if near else ""
        if home:
            is_read = subject.engine in known_fields(home)[full_name(home, key)].engines
            hint = f" It belongs into {home}{'' if is_read else ', for another engine'}."
        ignored = bool(match) and fields[match].kind is Kind.SECTION and subject.engine not in fields[match].engines
        fits = bool(match) and match not in subject.values and not (ignored and subject.has_engine)
        edits = (Edit("", key, new_key=match),) if fits else ()
        fix = f"rename it to {match}" if fits else f"correct or remove {key}"
        yield {"key": key, "hint": hint, "fix": fix, "edits": edits}


def _unknown_in_a_section(subject: Subject) -> Each:
    """Not the keys of AF104 and AF105."""
    for section in SECTIONS:
        fields, content = known_fields(section), subject.section(section)
        for key in content:
            if key in fields or key in RETIRED or f"parallelism_config_{key}" in fields:
                continue
            match = MISNAMED.get(key) or _typo_of(key, fields)
            near, name = match or nearest(key, fields, LIKELY), subject.written_name(section, key)
            fix = f"rename it to {match}" if match else f"{near}, or remove {name}" if near else f"remove {name}"
            if key.removeprefix("parallelism_config_") in ("ep_size", EXPERT_FIELD):
                fix = f"{EXPERT_FLAG} {content[key]} of train/sft.py, and remove {name}"
            edits = (Edit(section, key, new_key=match),) if match and match not in content else ()
            hint = f" Did you mean {near}?" if near else ""
            yield {"path": f"{section}.{key}", "name": name, "hint": hint, "fix": fix, "edits": edits}


def _retired(subject: Subject) -> Each:
    section = subject.section("fsdp_config")
    for old, new in RETIRED.items():
        if old in section:
            edit = Edit("fsdp_config", old) if new in section else Edit("fsdp_config", old, new_key=new)
            yield {"old": old, "new": new, "edits": (edit,)}


def _without_prefix(subject: Subject) -> Each:
    fields = known_fields("parallelism_config")
    for key in subject.section("parallelism_config"):
        if (full := f"parallelism_config_{key}") in fields:
            yield {"key": key, "edits": (Edit("parallelism_config", key, new_key=full),)}


def _not_a_mapping(subject: Subject) -> Each:
    for section in SECTIONS:
        content = subject.values.get(section)
        if content is not None and not isinstance(content, Mapping):
            yield {"section": section, "content": repr(content)}


def _without_effect(subject: Subject) -> Each:
    """Unless they have the launcher's defaults, as in every file of `accelerate config`."""
    for path, field, value in written(subject):
        if field.engines or field.kind is Kind.SECTION or field.key in subject.launcher:  # where it has one
            continue
        text = str(value).lower() if isinstance(value, bool) else value
        if field.section or (value is not None and str(value).lower() not in USUAL.get(field.key, ())):
            place = f"--{field.key} on the command line of accelerate launch"
            place = "a deepspeed_config_file with it" if field.section else place
            device = str(subject.section(field.section).get(field.key.replace("nvme_path", "device"))).lower()
            useless = field.key.endswith("nvme_path") and device != "nvme"
            words = {"path": path, "key": field.key, "value": text, "help": field.help, "place": place}
            yield words | {"edits": (Edit(field.section, field.key),) if useless else ()}


def _two_spellings(subject: Subject) -> Each:
    for section in SECTIONS:
        content = subject.values.get(section)
        spellings: dict[str, tuple[str, Any]] = {}
        for key, value in content.items() if isinstance(content, dict) else ():
            name = full_name(section, str(key))
            if name in spellings:
                first, previous = spellings[name]
                equal = previous == value and type(previous) is type(value)
                values = "given twice" if equal else f"once {previous} and once {value}"
                words = {"path": f"{section}.{key}", "first": first, "key": key, "values": values, "value": value}
                yield words | (
                    {"fix": f"remove {first}", "edits": (Edit(section, first),), "severity": "warning"}
                    if equal
                    else {"fix": "keep one of them"}
                )
            spellings[name] = str(key), value


def _twice(subject: Subject) -> Each:
    for key, places in subject.doubled.items():
        line, column = places[-1]
        lines = ", ".join(str(number) for number, _ in places)
        yield {"path": key, "key": key.rpartition(".")[2], "lines": lines, "line": line, "column": column}


def _another_tool(subject: Subject) -> Cases:
    return {"key": next(iter(subject.section("")), ""), "tool": subject.other_tool} if subject.other_tool else None


def _beside_another_engine(subject: Subject) -> Each:
    kind = subject.values.get("distributed_type")
    for section, key, needed in READERS if kind is not None else ():  # AF101
        value = str(subject.top("mixed_precision")).lower() if key == "mixed_precision" else str(kind)
        if subject.values.get(section) and value != needed:
            yield {"section": section, "key": key, "value": value, "needed": needed}


ROWS = (
    Row(
        "AF101", "error", "distributed_type", "distributed_type is missing", "Accelerate refuses the file",
        "distributed_type: {kinds}", _no_distributed_type, seen="launcher",
    ),
    Row(
        "AF102", "error", "{key}", "unknown key {key}.{hint}", "Accelerate refuses the file", "{fix}",
        _unknown_at_the_top, seen="launcher",
    ),
    Row(
        "AF103", "error", "{path}", "nothing reads {name}.{hint}", "Accelerate silently drops it", "{fix}",
        _unknown_in_a_section, seen="P05 P84 launcher accelerate#3748",
    ),
    Row(
        "AF104", "error", "fsdp_config.{old}", "{old} is no longer read; its new name is {new}",
        "Accelerate silently drops it", "rename it to {new}", _retired, seen="P05 launcher",
    ),
    Row(
        "AF105", "error", "parallelism_config.{key}", "{key} lacks its prefix", "it is dropped and the size stays 1",
        "rename it to parallelism_config_{key}", _without_prefix, seen="P41 launcher",
    ),
    Row(
        "AF106", "error", "{section}", "{section} is {content}, not a mapping of keys", "its settings are not read",
        "indent its keys below {section}:", _not_a_mapping, seen="launcher",
    ),
    Row(
        "AF107", "note", "{path}", "{key}: {value} has no effect in the file", "{help}", "{place}, or remove it",
        _without_effect, seen="launcher",
    ),
    Row(
        "AF108", "error", "{path}", "{first} and {key} are one key, {values}", "the last one wins: {value}", "{fix}",
        _two_spellings, seen="launcher",
    ),
    Row(
        "AF111", "error", "{path}", "found duplicate key {key}, in lines {lines}",
        "Accelerate takes the last one silently, and other readers refuse the file",
        "remove all but one; before that --fix repairs nothing", _twice, seen="launcher",
    ),
    Row(
        "AF112", "error", "{key}", "this is a configuration of {tool}, not of a job that accelerate launch starts",
        "accelerate launch refuses it", "accel-fsdp config -o OTHER_FILE, for an Accelerate YAML", _another_tool,
        seen="launcher",
    ),
    Row(
        "AF326", "warning", "{section}", "{section} beside {key}: {value}", "nothing reads {section}",
        "{key}: {needed}, or remove {section}", _beside_another_engine, seen="launcher",
    ),
)  # fmt: skip
