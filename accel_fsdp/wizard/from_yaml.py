"""Reads the wizard's answers from an Accelerate YAML: the inverse of `to_yaml.to_mapping`. Pure."""

from collections.abc import Mapping
from typing import Any

from accel_fsdp.command_line import parse_command_line
from accel_fsdp.config import (
    BY_NAME,
    DATA_AXES,
    DEFAULT_ZERO_STAGE,
    ENGINE_NAMES,
    EXPERT_FIELD,
    NULL_IS_ABSENT,
    STRATEGIES,
    TRUE_WORDS,
    Engine,
    Field,
    JobConfig,
    Kind,
    made_with,
    script_arguments,
)
from accel_fsdp.errors import UsageError
from accel_fsdp.wizard.answers import Answers
from accel_fsdp.wizard.questions import QUESTIONS
from accel_fsdp.wizard.to_yaml import KEYS, MESH

UNKNOWN = (None, -1)
"""Values that leave a key to the model, to the machine or to the command line; -1 processes are one for each GPU."""


def to_flags(job: JobConfig) -> dict[str, str]:
    """The flags that would produce this YAML, as far as the wizard has questions.

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
    flags = {**_header_flags(job.source, ENGINE_NAMES[engine]), "engine": ENGINE_NAMES[engine]}
    for place, name in KEYS.items():
        value = effective(job, *place) if engine in BY_NAME[place].engines else None
        if value not in UNKNOWN:
            flags[name] = class_names(value) if BY_NAME[place].kind is Kind.NAMES else str(value)
    if job.is_fsdp:
        flags["fsdp_version"] = "1" if engine is Engine.FSDP1 else "2"
    if engine is Engine.FSDP2:
        flags |= _mesh(job)
    if engine is Engine.DDP:  # as DDP saves and loads
        flags |= {"state_dict_type": "FULL_STATE_DICT", "ram_efficient_loading": "False"}
    if engine is Engine.DEEPSPEED:
        flags |= _deepspeed(job)
    if engine is Engine.TPU:
        flags["activation_checkpointing"] = str(job.on("fsdp_xla_fsdp_grad_ckpt"))
    return flags


def _deepspeed(job: JobConfig) -> dict[str, str]:
    """Offload and loading; a stage in DeepSpeed's own file counts as 3, as Accelerate takes it."""
    section, stage = job.section("deepspeed_config"), str(effective(job, "deepspeed_config", "zero_stage"))
    is_stage_3 = stage not in ("0", "1", "2")
    devices = [("offload_optimizer_device", stage != "0"), ("offload_param_device", is_stage_3)]
    offloads = any(str(section.get(key)).lower() in ("cpu", "nvme") for key, is_read in devices if is_read)
    builds = is_stage_3 and str(section.get("zero3_init_flag", True)).lower() in TRUE_WORDS
    return {"cpu_offload": str(offloads), "ram_efficient_loading": str(builds)}


def _mesh(job: JobConfig) -> dict[str, str]:
    """The strategy of FSDP2, and the sizes of its mesh beside the shards; experts are in the launch line."""
    copies, shards = (job.mesh[axis] for axis in DATA_AXES)
    hybrid = job.section(MESH) and (copies != 1 or shards == job.number("num_processes"))
    strategy = (1 if job.on("fsdp_reshard_after_forward") else 2) + (3 if hybrid else 0)
    experts = parse_command_line(script_arguments(job.source)).get(EXPERT_FIELD, 1)
    sizes = {"tp": job.mesh["tp"] if job.section(MESH) else 1, "ep": experts}
    flags = {name: str(size) for name, size in sizes.items() if str(size) != "1"}
    return flags | {"strategy": str(strategy)} | ({"dp_replicate": str(copies)} if hybrid else {})


def effective(job: JobConfig, section: str, key: str) -> Any:
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
    if key == "fsdp_auto_wrap_policy":
        return str(value).upper()
    return str(value).lower() in TRUE_WORDS if field.kind is Kind.BOOL and is_readable(field, value) else value


def is_readable(field: Field, value: Any) -> bool:
    """Whether Accelerate can read a value; a bare no is false, and no choice."""
    if field.kind is Kind.NAMES:
        return bool(value == class_names(value))
    if field.kind is Kind.INT:  # the launcher converts text
        return str(value).isdecimal()
    return field.accepts(value) and not (field.kind is Kind.CHOICE and value is False)


def class_names(value: Any) -> str:
    """Layer classes as Accelerate reads them: without the module of each, and without spaces."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return ",".join(str(part).strip().rpartition(".")[2] for part in parts if str(part).strip())


def _header_flags(text: str, engine: str) -> dict[str, str]:
    """Model, method, machine and length from the header; no method if the engine was changed since."""
    words = made_with(text)
    fields = {question.flag: question.field for question in QUESTIONS if question.key is None}
    if words.get("--engine") != engine and engine != "ddp":  # plain DDP takes every method, and is FSDP2's NO_SHARD
        fields.pop("--method")
    return {field: words[flag] for flag, field in fields.items() if flag in words}


def to_answers(flags: Mapping[str, str]) -> Answers:
    """The answers of flags that no question has checked, with the defaults of `Answers` for the open ones."""
    values: dict[str, Any] = {**vars(Answers())}
    for name, text in flags.items():
        kind = type(values[name])
        if kind is bool:
            values[name] = text.lower() == "true"
        elif kind is tuple:
            values[name] = tuple(filter(None, text.split(",")))
        elif kind is not int:
            values[name] = text
        elif text.isdecimal():
            values[name] = int(text)
    return Answers(**values)
