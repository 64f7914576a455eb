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
from accel_fsdp.wizard.to_yaml import KEYS, MESH, READ_IN

UNKNOWN = (None, -1)
"""Values that leave a key to the model, to the machine or to the command line; -1 processes are one for each GPU."""


def answers_in(job: JobConfig) -> dict[str, Any]:
    """The answers that would produce this YAML, as far as the wizard has questions; unreadable ones are text.

    A missing key means Accelerate's default, not the wizard's. Model, method, machine and length are not in a YAML but
    read from the command in our own header, if there is one.
    """
    engine = job.engine
    if job.other_tool or engine is Engine.NONE:
        kind = job.other_tool or f"distributed_type {job.values.get('distributed_type')}"
        why, fix = "the wizard knows FSDP, DDP, DeepSpeed and TPU", "make a new file: accel-fsdp config -o FILE"
        raise UsageError(f"a configuration of {kind} can't be re-edited", why=why, fix=fix)
    words, name = made_with(job.source), ENGINE_NAMES[engine]
    answers: dict[str, Any] = {q.field: words[q.flag] for q in QUESTIONS if q.key is None and q.flag in words}
    if words.get("--engine") != name and engine is not Engine.DDP:  # the engine was changed since; DDP takes any method
        answers.pop("method", None)
    answers["engine"] = name
    for place, field in KEYS.items():
        value = effective(job, *place) if engine in BY_NAME[place].engines else None
        if value not in UNKNOWN:
            value = class_names(value) if BY_NAME[place].kind is Kind.NAMES else value
            answers[field] = value if is_readable(BY_NAME[place], value) else str(value)
    if job.is_fsdp:
        answers["fsdp_version"] = 1 if engine is Engine.FSDP1 else 2
    if engine is Engine.FSDP2:  # hybrid sharding and tensor parallelism are in the mesh, experts in the launch line
        copies, shards = (job.mesh[axis] for axis in DATA_AXES)
        hybrid = job.section(MESH) and (copies != 1 or shards == job.number("num_processes"))
        answers["strategy"] = (1 if job.on("fsdp_reshard_after_forward") else 2) + (3 if hybrid else 0)
        answers["tp"] = job.mesh["tp"] if job.section(MESH) else 1
        answers["ep"] = parse_command_line(script_arguments(job.source)).get(EXPERT_FIELD, 1)
        answers |= {"dp_replicate": copies} if hybrid else {}
    if engine is Engine.DDP:  # as DDP saves and loads
        answers |= {"state_dict_type": "FULL_STATE_DICT", "ram_efficient_loading": False}
    if engine is Engine.DEEPSPEED:  # a stage in DeepSpeed's own file counts as 3, as Accelerate takes it
        section, text = job.section("deepspeed_config"), str(effective(job, "deepspeed_config", "zero_stage"))
        stage = int(text) if text in ("0", "1", "2") else 3
        read = {key: str(section.get(key, True)).lower() for key, stages in READ_IN.items() if stage in stages}
        answers["cpu_offload"] = not {"cpu", "nvme"}.isdisjoint(read.values())
        answers["ram_efficient_loading"] = read.get("zero3_init_flag") in TRUE_WORDS
    if engine is Engine.TPU:
        answers["activation_checkpointing"] = job.on("fsdp_xla_fsdp_grad_ckpt")
    return answers


def effective(job: JobConfig, section: str, key: str) -> Any:
    """The value that Accelerate uses for a key, or for its absence; an unreadable value is returned as written."""
    content, field = job.section(section), BY_NAME[section, key]
    value = content.get(key)
    if value is None and key in content and section == "fsdp_config" and key not in NULL_IS_ABSENT:
        return str(None)  # the text to which the launcher converts it
    if key == "fsdp_auto_wrap_policy":
        return job.wrap_policy
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


def unchecked_answers(given: Mapping[str, Any]) -> Answers:
    """Answers that no question has checked, with the defaults of `Answers` for open and unreadable ones."""
    defaults = vars(Answers())
    return Answers(**{name: _as_type_of(defaults[name], value) for name, value in given.items()})


def _as_type_of(default: Any, value: Any) -> Any:
    if isinstance(default, bool):
        return str(value).lower() == "true"
    if isinstance(default, int):
        return int(value) if str(value).isdecimal() else default
    return tuple(filter(None, value.split(","))) if isinstance(default, tuple) else str(value)
