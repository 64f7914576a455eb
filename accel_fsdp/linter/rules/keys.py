"""Rules about the file itself: unused keys, and values with another meaning than they seem to have."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from accel_fsdp.config import (
    BY_NAME,
    DISTRIBUTED_TYPES,
    EXPERT_FIELD,
    EXPERT_FLAG,
    FALSE_WORDS,
    MISNAMED,
    MULTI_CPU,
    NULL_IS_ABSENT,
    RETIRED,
    STRATEGIES,
    TRUE_WORDS,
    Edit,
    Engine,
    Field,
    Kind,
    full_name,
    known_fields,
)
from accel_fsdp.errors import did_you_mean, near_key, typo_of
from accel_fsdp.job import from_arguments
from accel_fsdp.linter.rules.engine import Finding, Subject, rule

SECTIONS = ("fsdp_config", "parallelism_config", "deepspeed_config", "dynamo_config", "fp8_config")
OLD_TOP_KEYS = ("fp16", "dynamo_backend")
"""Top-level keys of old releases that Accelerate still understands."""
USUAL = {"rdzv_backend": ("static",), "same_network": ("true", "false"), "enable_cpu_affinity": ("false",)}
"""Values that don't change the launcher's defaults: the network only chooses `rdzv_backend`."""


def written(subject: Subject) -> Iterator[tuple[str, Field, Any]]:
    """Every known key of the file that Accelerate may read, as (dotted path, field, value)."""
    fp8 = str(subject.top("mixed_precision")).lower() == "fp8"
    sections = SECTIONS if fp8 else SECTIONS[:-1]
    for section in ("", *sections):
        for key, value in subject.section(section).items():
            if (field := BY_NAME.get((section, key))) and subject.reads(key):
                yield f"{section}.{key}".lstrip("."), field, value


@rule("AF101")
def no_distributed_type(subject: Subject) -> Iterator[Finding]:
    """`distributed_type` is missing.

    Accelerate stops with "A `distributed_type` must be specified in the config file".
    """
    if subject.values.get("distributed_type") is None:
        by_section = {"fsdp_config": Engine.FSDP1, "deepspeed_config": Engine.DEEPSPEED}
        kinds = [DISTRIBUTED_TYPES[engine] for name, engine in by_section.items() if subject.section(name)]
        yield Finding(
            "distributed_type",
            "distributed_type is missing",
            "Accelerate refuses the file",
            f"distributed_type: {' or '.join(kinds or ['FSDP', 'MULTI_GPU', 'DEEPSPEED'])}",
            (Edit("", "distributed_type", kinds[0]),) if len(kinds) == 1 else (),
        )


@rule("AF111")
def key_stands_twice(subject: Subject) -> Iterator[Finding]:
    """One key twice in one mapping. Accelerate silently uses the last one. `--fix` leaves such a file unchanged."""
    for key, places in subject.doubled.items():
        line, column = places[-1]
        yield Finding(
            key,
            f"found duplicate key {key.rpartition('.')[2]}, in lines {', '.join(str(line) for line, _ in places)}",
            "Accelerate takes the last one silently, and other readers refuse the file",
            "remove all but one; before that --fix repairs nothing",
            line=line,
            column=column,
        )


@rule("AF112")
def file_of_another_tool(subject: Subject) -> Iterator[Finding]:
    """A configuration of another tool, such as Axolotl or SageMaker, or the arguments of a training script.

    `accelerate launch` refuses it. This is the only finding for such a file, and `--fix` leaves it unchanged.
    """
    if tool := "SageMaker" if subject.for_sagemaker else subject.other_tool:
        yield Finding(
            next(iter(subject.section("")), ""),
            f"this is a configuration of {tool}, not of a job that accelerate launch starts",
            "accelerate launch refuses it",
            "accel-fsdp config -o OTHER_FILE, for an Accelerate YAML",
        )


@rule("AF102")
def unknown_top_level_key(subject: Subject) -> Iterator[Finding]:
    """A top-level key that Accelerate does not know.

    It refuses the whole file. An FSDP key at the top level belongs into `fsdp_config`. `--fix` renames obvious
    typos, such as `fsdp_confg`, unless the engine of the file would ignore that section.
    """
    fields = known_fields("")
    for key in subject.section(""):
        if key in fields or key in OLD_TOP_KEYS:
            continue
        home = next((section for section in SECTIONS if full_name(section, key) in known_fields(section)), "")
        match = "" if home else typo_of(key, fields)
        near = match or near_key(key, fields)
        hint = f" Did you mean {near}?" if near else ""
        if home:
            is_read = subject.engine in known_fields(home)[full_name(home, key)].engines
            hint = f" It belongs into {home}{'' if is_read else ', for another engine'}."
        ignored = bool(match) and fields[match].kind is Kind.SECTION and subject.engine not in fields[match].engines
        fits = bool(match) and match not in subject.values and not (ignored and subject.has_engine)
        yield Finding(
            key,
            f"unknown key {key}.{hint}",
            "Accelerate refuses the file",
            f"rename it to {match}" if fits else f"correct or remove {key}",
            (Edit("", key, new_key=match),) if fits else (),
        )


@rule("AF103", pains=("P05", "P84"))
def unknown_section_key(subject: Subject) -> Iterator[Finding]:
    """A key inside a section, such as `fsdp_config` or `deepspeed_config`, that nothing reads.

    Accelerate accepts any key there and silently drops it, so a typo means the default. `--fix` renames what is
    surely a typo. Three keys that `accelerate config` itself writes into `fp8_config` are among them. The rules for
    retired keys (AF104) and for missing prefixes (AF105) say more where they apply.
    """
    for section in SECTIONS:
        fields = known_fields(section)
        for key in subject.section(section):
            prefixed = f"parallelism_config_{key}" in fields
            if key not in fields and key not in RETIRED and not prefixed:
                match = MISNAMED.get(key) or typo_of(key, fields)
                suggestion = match or near_key(key, fields)
                fits = bool(match) and match not in subject.section(section)
                name = subject.written_name(section, key)
                yield Finding(
                    f"{section}.{key}",
                    f"nothing reads {name}.{f' Did you mean {suggestion}?' if suggestion else ''}",
                    "Accelerate silently drops it",
                    f"{EXPERT_FLAG} {subject.section(section)[key]} of train/sft.py, and remove {name}"
                    if key.removeprefix("parallelism_config_") in ("ep_size", EXPERT_FIELD)
                    else f"rename it to {suggestion}"
                    if match
                    else f"{suggestion}, or remove {name}"
                    if suggestion
                    else f"remove {name}",
                    (Edit(section, key, new_key=match),) if fits else (),
                )


@rule("AF104", pains=("P05",))
def retired_key(subject: Subject) -> Iterator[Finding]:
    """A key of an older release, such as `fsdp_backward_prefetch_policy`.

    Accelerate's own documentation still shows some of them. They are accepted and dropped; the setting keeps its
    default.
    """
    section = subject.section("fsdp_config")
    for old, new in RETIRED.items():
        if old in section:
            has_new = new in section
            edits = (Edit("fsdp_config", old),) if has_new else (Edit("fsdp_config", old, new_key=new),)
            yield Finding(
                f"fsdp_config.{old}",
                f"{old} is no longer read; its new name is {new}",
                "Accelerate silently drops it",
                f"rename it to {new}",
                edits,
            )


@rule("AF105", pains=("P41",))
def mesh_key_without_prefix(subject: Subject) -> Iterator[Finding]:
    """A key in `parallelism_config` without the prefix `parallelism_config_`.

    Accelerate adds the prefix for `fsdp_config` only; here the key is dropped and the size stays 1.
    """
    fields = known_fields("parallelism_config")
    for key in subject.section("parallelism_config"):
        if f"parallelism_config_{key}" in fields:
            edit = Edit("parallelism_config", key, new_key=f"parallelism_config_{key}")
            yield Finding(
                f"parallelism_config.{key}",
                f"{key} lacks its prefix",
                "it is dropped and the size stays 1",
                f"rename it to parallelism_config_{key}",
                (edit,),
            )


@rule("AF106")
def section_is_no_mapping(subject: Subject) -> Iterator[Finding]:
    """A section such as `fsdp_config` that is a single value instead of a mapping."""
    for section in SECTIONS:
        content = subject.values.get(section)
        if content is not None and not isinstance(content, Mapping):
            yield Finding(
                section,
                f"{section} is {content!r}, not a mapping of keys",
                "its settings are not read",
                f"indent its keys below {section}:",
            )


@rule("AF107", "note")
def key_without_effect(subject: Subject) -> Iterator[Finding]:
    """Keys that Accelerate takes only from the command line, or that its launcher doesn't pass on.

    `rdzv_backend`, `same_network` and `enable_cpu_affinity` have defaults on the command line, and those win over the
    file. `accelerate config` writes them into every file; at their defaults they are one note. A key of DeepSpeed's
    own file is accepted in `deepspeed_config` and dropped. AF216 is about NVMe paths.
    """
    defaults: list[str] = []
    for path, field, value in written(subject):
        if field.engines or field.kind is Kind.SECTION or field.key.endswith("_nvme_path"):
            continue
        if not field.section and (value is None or str(value).lower() in USUAL.get(field.key, ())):
            defaults.append(path)
            continue
        on_line = f"--{field.key} on the command line of accelerate launch"
        yield Finding(
            path,
            f"{field.key}: {str(value).lower() if isinstance(value, bool) else value} has no effect in the file",
            field.help,
            f"{'a deepspeed_config_file with it' if field.section else on_line}, or remove it",
        )
    if defaults:
        plural = len(defaults) > 1
        yield Finding(
            defaults[0],
            f"{', '.join(defaults)} {'have' if plural else 'has'} no effect in the file",
            f"the launcher takes {'them' if plural else 'it'} from its command line only; these are the usual values",
            "nothing to do",
        )


@rule("AF201", pains=("P63",))
def mixed_precision_is_a_boolean(subject: Subject) -> Iterator[Finding]:
    """`mixed_precision: no` without quotes, or `dynamo_backend: no`.

    YAML 1.1 reads a bare `no`, `off` or `false` as a boolean, and Accelerate stops with "'bool' object has no attribute
    'lower'".
    """
    for section, key, method in (("", "mixed_precision", "lower"), ("dynamo_config", "dynamo_backend", "upper")):
        if subject.section(section).get(key) is False:
            yield Finding(
                f"{section}.{key}".lstrip("."),
                f"{key}: {subject.spelt(key, 'no', section)} without quotes is the boolean false",
                f"Accelerate stops: 'bool' object has no attribute '{method}'",
                f"{key}: 'no'",
                (Edit(section, key, "no"),),
            )


@rule("AF208")
def distributed_type_is_a_boolean(subject: Subject) -> Iterator[Finding]:
    """`distributed_type: NO` without quotes: YAML 1.1 reads it as false.

    With `num_processes` Accelerate runs one process, as for 'NO', and this is a warning. Without it Accelerate stops:
    it has a default for 'NO' but not for false.
    """
    if subject.values.get("distributed_type") is False:
        word, lacks = subject.spelt("distributed_type", "NO"), subject.lacks_processes
        yield Finding(
            "distributed_type",
            f"distributed_type: {word} without quotes is the boolean false",
            "Accelerate stops: it asks for --num_processes"
            if lacks
            else "it counts as 'NO' because num_processes is given",
            "distributed_type: 'NO', in quotes",
            (Edit("", "distributed_type", "NO"),),
            milder=None if lacks else "warning",
        )


@rule("AF202", pains=("P66",))
def null_value(subject: Subject) -> Iterator[Finding]:
    """A key with nothing behind it in `fsdp_config`, `dynamo_config` or `parallelism_config`.

    Accelerate turns the null into the text "None" and stops, with "invalid truth value none" or "invalid literal for
    int()". Wrap policy, layer class, prefetch, state dict type and ignored modules may be null, as `accelerate config`
    writes them, which equals a missing key. So may keys of a mesh that are unused at its sizes.
    """
    for path, field, value in written(subject):
        if field.key == "dynamo_backend" or field.key in NULL_IS_ABSENT:
            continue  # null counts as no, or as no key
        in_mesh = field.section == "parallelism_config" and _is_read_from_mesh(subject, field)
        if value is None and (in_mesh or field.section in ("fsdp_config", "dynamo_config")):
            yield Finding(
                path,
                f"{field.key} has no value",
                "Accelerate reads the text None",
                f"give it a value, or remove {field.key}",
                (Edit(field.section, field.key),),
            )


def _is_read_from_mesh(subject: Subject, field: Field) -> bool:
    """Whether the launcher passes a key of the mesh on to the ranks, so that null differs from a missing key.

    It passes on sizes and backends under any engine for several GPUs, and other keys for an axis of more than one rank.
    """
    engines = (Engine.FSDP1, Engine.FSDP2, Engine.DDP, Engine.DEEPSPEED)
    axis = field.key.removeprefix("parallelism_config_").partition("_")[0]
    is_detail = not field.key.endswith(("_size", "_backend"))
    is_unread = field.default is None or (is_detail and subject.mesh.get(axis) == 1)
    return subject.engine in engines and subject.values.get("distributed_type") != MULTI_CPU and not is_unread


@rule("AF203", pains=("P67",))
def not_a_choice(subject: Subject) -> Iterator[Finding]:
    """A value that is not among those Accelerate knows for this key."""
    quoted = ("mixed_precision", "distributed_type", "dynamo_backend")  # false there is AF201 or AF208
    for path, field, value in written(subject):
        if field.kind is not Kind.CHOICE or value is None or (field.key in quoted and value is False):
            continue
        if field.takes(str(value)):
            continue
        hint = did_you_mean(str(value), field.choices)
        suggestion = subject.fsdp_version if field.key == "fsdp_version" else ""
        spelled = [choice for choice in field.choices if choice.lower() == str(value).lower()]
        edits = tuple(Edit(field.section, field.key, kind) for kind in spelled if field.key == "distributed_type")
        yield Finding(
            path,
            f"{field.key}: {value} is unknown.{hint}",
            "Accelerate stops, or uses another value",
            "one of " + ", ".join(field.choices),
            (Edit(field.section, field.key, int(suggestion)),) if suggestion in field.choices else edits,
        )


@rule("AF204")
def not_a_boolean(subject: Subject) -> Iterator[Finding]:
    """A value that is neither true nor false where one is needed."""
    for path, field, value in written(subject):
        if field.kind is Kind.BOOL and value is not None and str(value).lower() not in TRUE_WORDS + FALSE_WORDS:
            is_strategy = subject.engine is Engine.FSDP2 and str(value).upper() in STRATEGIES.values()
            if not field.section and (field.key != "use_cpu" or subject.engine is not Engine.NONE):
                continue  # AF209, AF107
            if field.key == "fsdp_reshard_after_forward" and (subject.engine is Engine.FSDP1 or is_strategy):
                continue  # AF302, AF304
            yield Finding(
                path,
                f"{field.key}: {value} is neither true nor false",
                "Accelerate stops: invalid truth value",
                f"{field.key}: true or false",
            )


@rule("AF205", pains=("P64",))
def not_a_whole_number(subject: Subject) -> Iterator[Finding]:
    """A number that Accelerate can't read as one, such as `1e8`.

    YAML 1.1 reads `1e8` as text and `1.0e+8` as a float; the value is passed on as text, and `int("1e8")` fails.
    """
    for path, field, value in written(subject):
        if field.kind is not Kind.INT or value is None or (isinstance(value, int) and not isinstance(value, bool)):
            continue
        if isinstance(value, str) and value.isdecimal():
            continue
        number = from_arguments.number(subject.spelt(field.key, value, field.section), None)
        integer = int(number) if number is not None and number.is_integer() else None
        yield Finding(
            path,
            f"{field.key}: {value!r} is not a whole number",
            "Accelerate stops: invalid literal for int()",
            f"{field.key}: {'N' if integer is None else integer}",
            () if integer is None else (Edit(field.section, field.key, integer),),
        )


@rule("AF206", pains=("P65",))
def names_in_a_list(subject: Subject) -> Iterator[Finding]:
    """Layer classes as a YAML list, with spaces or invalid letters, with their module, or empty.

    The list is passed on as its Python text, so Accelerate looks for a class named `['LlamaDecoderLayer']`; a space
    becomes part of the name. Accelerate compares only the name of a class, without its module.
    """
    for path, field, value in written(subject):
        if field.kind is not Kind.NAMES or value is None:
            continue
        parts = [str(part) for part in value] if isinstance(value, list) else str(value).split(",")
        joined = ",".join(part.strip().rpartition(".")[2] for part in parts if part.strip())
        if not joined:
            yield Finding(
                path,
                f"{field.key} names no class",
                "Accelerate looks for a class without a name and stops",
                f"{field.key}: NAME, or remove it, and the model decides",
            )
        elif not joined.isascii():
            yield Finding(
                path,
                f"{field.key} has characters that only look like letters, or can't be seen: {ascii(joined)[1:-1]}",
                "Accelerate would look for a class of that name",
                f"{field.key}: NAME, typed anew",
            )
        elif value != joined:
            yield Finding(
                path,
                f"{field.key} is not one text of names joined by commas",
                "Accelerate would look for a class with brackets, spaces or dots in its name",
                f"{field.key}: {joined}",
                (Edit(field.section, field.key, joined),),
            )


@rule("AF207", pains=("P48",))
def gpu_ids_is_a_number(subject: Subject) -> Iterator[Finding]:
    """`gpu_ids: 0` without quotes: Accelerate stops with "'int' object has no attribute 'split'"."""
    value = subject.values.get("gpu_ids")
    if value is None or isinstance(value, str):
        return
    text, typed = (_joined(numbers) for numbers in (value, subject.spelt("gpu_ids", value)))
    is_plain = text == typed and re.fullmatch(r"\d+(,\d+)*", text)
    yield Finding(
        "gpu_ids",
        f"gpu_ids: {typed} is not text",
        "Accelerate stops: no attribute 'split'",
        f"gpu_ids: '{text if is_plain else '0,1'}'",
        (Edit("", "gpu_ids", text),) if is_plain else (),
    )


def _joined(value: Any) -> str:
    return ",".join(map(str, value if isinstance(value, list) else [value]))
