"""Converts an existing YAML to the answers that would produce it, and writes new answers into the same file. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from accel_fsdp.command_line import parse_command_line
from accel_fsdp.config import (
    BY_NAME,
    DATA_AXES,
    DEFAULT_ZERO_STAGE,
    ENGINE_NAMES,
    EXPERT_FIELD,
    FALSE_WORDS,
    FSDP_VERSIONS,
    NULL_IS_ABSENT,
    STRATEGIES,
    TRUE_WORDS,
    Edit,
    Engine,
    Field,
    JobConfig,
    Kind,
    apply,
    dump,
    made_with,
    script_arguments,
    with_header,
)
from accel_fsdp.errors import UsageError
from accel_fsdp.wizard.answers import Answers
from accel_fsdp.wizard.questions import QUESTIONS, applying
from accel_fsdp.wizard.to_yaml import header, to_mapping


def to_flags(job: JobConfig) -> dict[str, str]:
    """The flags that would produce this YAML: the inverse of `to_yaml.to_mapping`, as far as the wizard has questions.

    A missing key means Accelerate's default, not the wizard's. Model, method, machine and length are not in a YAML but
    read from the command in our own header, if there is one.
    """
    engine = job.engine
    if job.other_tool or engine is Engine.NONE:
        kind = f"distributed_type {job.values.get('distributed_type')} can't be re-edited"
        raise UsageError(
            f"this is a configuration of {job.other_tool}, not of Accelerate" if job.other_tool else kind,
            why="the wizard knows FSDP, DDP, DeepSpeed and TPU",
            fix="make a new file: accel-fsdp config -o FILE",
        )
    name = ENGINE_NAMES[engine]
    flags = {**_header_flags(job.source, name), "engine": name}
    for question in QUESTIONS:
        if question.key and engine in BY_NAME[question.key].engines:
            value = _effective_value(job, *question.key)
            if value not in UNKNOWN:
                is_names = BY_NAME[question.key].kind is Kind.NAMES
                flags[question.field] = _class_names(value) if is_names else str(value)
    if engine in FSDP_ENGINES:
        flags["fsdp_version"] = str(FSDP_ENGINES[engine])
    if engine is Engine.FSDP2:
        flags["strategy"] = _strategy_of_fsdp2(job)
        flags |= _axes_of(job, flags["strategy"])
    if engine is Engine.DEEPSPEED:
        flags["cpu_offload"] = str(job.section("deepspeed_config").get("offload_optimizer_device") == "cpu")
    if engine is Engine.TPU:
        flags["activation_checkpointing"] = str(job.on("fsdp_xla_fsdp_grad_ckpt"))
    return flags


def _axes_of(job: JobConfig, strategy: str) -> dict[str, str]:
    """The sizes of a mesh beside its shards, from the mesh and the script's launch line."""
    sizes = {"tp": job.mesh["tp"], "dp_replicate": job.mesh["dp_replicate"]} if job.section(MESH) else {}
    if strategy not in ("4", "5"):
        sizes.pop("dp_replicate", None)
    sizes["ep"] = parse_command_line(script_arguments(job.source)).get(EXPERT_FIELD, 1)
    return {name: str(size) for name, size in sizes.items() if str(size) != "1" or name == "dp_replicate"}


MESH = "parallelism_config"
FSDP_ENGINES = {engine: version for version, engine in FSDP_VERSIONS.items()}
UNKNOWN = (None, -1)
"""Values that leave a key to the model, to the machine or to the command line; -1 processes are one for each GPU."""


def _strategy_of_fsdp2(job: JobConfig) -> str:
    """The strategy in FSDP2's keys; FSDP1's name of a strategy counts as the user's intention."""
    if strategy := _strategy_of_fsdp1_key(job):
        return strategy
    value = job.fsdp("fsdp_reshard_after_forward")
    if str(value).lower() not in TRUE_WORDS + FALSE_WORDS:
        return str(value)
    copies, shards = (job.mesh[axis] for axis in DATA_AXES)
    hybrid = job.section("parallelism_config") and (copies != 1 or shards == job.number("num_processes"))
    return str((1 if job.on("fsdp_reshard_after_forward") else 2) + (3 if hybrid else 0))


def _strategy_of_fsdp1_key(job: JobConfig) -> str:
    """The strategy of an FSDP2 file that has FSDP1's key and lacks FSDP2's; `check --fix` reads it alike.

    Hybrid strategies and NO_SHARD have no value in FSDP2's key, and are ignored.
    """
    is_fsdp1_spelling = job.engine is Engine.FSDP2 and job.has(STRATEGY) and not job.has(RESHARD)
    return job.strategy if is_fsdp1_spelling and job.strategy in ("FULL_SHARD", "SHARD_GRAD_OP") else ""


STRATEGY, RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"


def _effective_value(job: JobConfig, section: str, key: str) -> Any:
    """The value that Accelerate uses for a key, or for its absence; an unreadable value is returned as written."""
    content, field = job.section(section), BY_NAME[section, key]
    value = content.get(key)
    if value is None and key in content and section == "fsdp_config" and key not in NULL_IS_ABSENT:
        return str(None)  # the text to which the launcher converts it
    if key == "fsdp_state_dict_type":
        return job.state_dict_type or ("FULL_STATE_DICT" if job.full_state_dict else "SHARDED_STATE_DICT")
    if key == "fsdp_sharding_strategy":
        return next((number for number, name in STRATEGIES.items() if name == job.strategy), value)
    if key == "zero_stage" and value is None and "deepspeed_config_file" not in content:
        return DEFAULT_ZERO_STAGE
    if key == "mixed_precision" and value is False:  # a bare no
        return "no"
    if value is None:
        return field.default
    return str(value).lower() in TRUE_WORDS if field.kind is Kind.BOOL and _is_readable(field, value) else value


def _is_readable(field: Field, value: Any) -> bool:
    """Whether Accelerate can read a value; a bare no is false, and no choice."""
    if field.kind is Kind.NAMES:
        return bool(value == _class_names(value))
    return field.accepts(value) and not (field.kind is Kind.CHOICE and value is False)


def _class_names(value: Any) -> str:
    """Layer classes as Accelerate reads them: without the module of each, and without spaces."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return ",".join(str(part).strip().rpartition(".")[2] for part in parts)


def _header_flags(text: str, engine: str) -> dict[str, str]:
    """Model, method, machine and length from the header; no method if the engine was changed since."""
    words = made_with(text)
    fields = {question.flag: question.field for question in QUESTIONS if question.key is None}
    if words.get("--engine") != engine and engine != "ddp":  # plain DDP takes every method, and is FSDP2's NO_SHARD
        fields.pop("--method")
    return {field: words[flag] for flag, field in fields.items() if flag in words}


def update(document: Any, job: JobConfig, old: Answers, new: Answers, answered: Collection[str]) -> str:
    """Returns the text of `document` with the changed answers of `new`; everything else stays.

    `document` and `job` come from `read_config`. `old` are the file's answers, with defaults for open questions;
    `answered` are the open questions that the user answered. Our own header is updated. If the engine changes, the
    sections of the old one are removed.
    """
    before, after = _flat(to_mapping(old)), _flat(to_mapping(new))
    stated = {place for place, value in before.items() if _has_value(job, *place, value, answered)}
    changed = {place: value for place, value in after.items() if place not in stated or before[place] != value}
    removed_sections = {section for section, _ in before} - {section for section, _ in after}
    unreadable = {place for place, _ in after if place and not isinstance(document.get(place) or {}, Mapping)}
    for section in (removed_sections | unreadable) - {""}:  # text or a list, which Accelerate can't read either
        apply(document, [Edit("", section)])
    dropped = [Edit(place, key) for place, key in before if (place, key) not in after and place not in removed_sections]
    dropped += [Edit(place, key) for place, key in _unusable_keys(job, new) if place not in removed_sections]
    dropped += [
        Edit(*question.key) for question in applying(new) if question.key and getattr(new, question.field) == ""
    ]
    if _strategy_of_fsdp1_key(job):
        dropped.append(Edit("fsdp_config", STRATEGY))
    apply(document, [*dropped, *(Edit(place, key, value) for (place, key), value in changed.items())])
    return with_header(dump(document), header(new))


def corrections(job: JobConfig, old: Answers, new: Answers, read: Collection[str]) -> list[str]:
    """Sentences about values that are not kept: those that Accelerate can't read, and sections that are not a mapping.

    `read` are the questions that the file answers; for the others the interview has reported bad values.
    """
    mapping = to_mapping(old)
    sentences = [
        f"Accelerate can't read {section}: {job.values[section]}, so the section is rewritten"
        for section, content in mapping.items()
        if isinstance(content, dict) and not isinstance(job.values.get(section) or {}, Mapping)
    ]
    for section, key in _flat(mapping):
        raw, field = job.section(section).get(key), BY_NAME[section, key]
        question = "strategy" if key == RESHARD else KEYS.get((section, key))
        if raw is not None and not _is_readable(field, raw) and (question is None or question in read):
            sentences.append(f"Accelerate can't read {key}: {raw}, so the key is rewritten")
    for section, key in _unusable_keys(job, new):
        sentences.append(f"{key}: {job.section(section)[key]} can't be used, so the key is removed")
    unread = {Engine.FSDP1: RESHARD, Engine.FSDP2: STRATEGY}.get(job.engine, "")
    if unread and job.has(unread):
        what = f"{job.engine.label} ignores {unread}: {job.fsdp(unread)}"
        strategy = STRATEGIES.get(old.strategy, "")
        meaning = f", which is written as {RESHARD}" if _strategy_of_fsdp1_key(job) else f"; the file means {strategy}"
        sentences.append(f"{what}{meaning}")
    return sentences


KEYS = {question.key: question.field for question in QUESTIONS if question.key}


def _unusable_keys(job: JobConfig, new: Answers) -> list[tuple[str, str]]:
    """The keys without a question whose values Accelerate can't use."""
    decided, unusable = _flat(to_mapping(new)), []
    for (section, key), field in BY_NAME.items():
        value = job.section(section).get(key)
        if value is not None and job.engine in field.engines and job.reads(key) and (section, key) not in decided:
            is_rank = key == "machine_rank" and isinstance(value, int)
            if not _is_readable(field, value) or (is_rank and not 0 <= value < new.num_machines):
                unusable.append((section, key))
    return unusable


def _has_value(job: JobConfig, section: str, key: str, value: Any, answered: Collection[str]) -> bool:
    """Whether a key of the file, or its absence, has this value; without a question, whether the key is readable."""
    raw, field = job.section(section).get(key), BY_NAME[section, key]
    if KEYS.get((section, key)) in answered or (section and not isinstance(job.values.get(section) or {}, Mapping)):
        return False
    if key == RESHARD and _strategy_of_fsdp1_key(job):
        return False
    if raw is None and key in job.section(section) and key not in NULL_IS_ABSENT and field.default not in UNKNOWN:
        return False
    if (section, key) not in KEYS:
        is_open = raw is None and (section in job.values or section != "parallelism_config")
        return is_open or (raw is not None and _is_readable(field, raw))
    meaning = _effective_value(job, section, key)
    if meaning in UNKNOWN or (raw is None and meaning == value):
        return True
    is_equal = str(meaning).lower() == str(value).lower()
    return is_equal and (_is_readable(field, raw) or raw is None)


def _flat(mapping: dict[str, Any]) -> dict[tuple[str, str], Any]:
    flat: dict[tuple[str, str], Any] = {}
    for key, value in mapping.items():
        flat |= {(key, inner): v for inner, v in value.items()} if isinstance(value, dict) else {("", key): value}
    return flat
