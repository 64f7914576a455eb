"""From an existing YAML back to the answers that would make it, and new answers into the same file. Pure."""

from collections.abc import Mapping
from typing import Any

from accel_fsdp.config import BY_NAME, ENGINE_NAMES, Edit, Engine, JobConfig, apply, dump, made_with, with_header
from accel_fsdp.errors import UsageError
from accel_fsdp.wizard.answers import Answers
from accel_fsdp.wizard.questions import QUESTIONS
from accel_fsdp.wizard.to_yaml import header, to_mapping


def to_flags(job: JobConfig, text: str) -> dict[str, str]:
    """The flags that would make this YAML: the inverse of `to_yaml.to_mapping`, as far as the wizard has questions.

    What the file leaves out means what Accelerate makes of that, not what the wizard would propose. Model, method and
    machine don't stand in a YAML; they are read from the command in our own header, if there is one.

    Raises:
        UsageError: the wizard has no such engine.
    """
    engine = job.engine
    if engine is Engine.NONE:
        kind = job.values.get("distributed_type")
        raise UsageError(
            f"distributed_type {kind} can't be re-edited",
            why="the wizard knows FSDP, DDP, DeepSpeed and TPU",
            fix="make a new file: accel-fsdp config -o FILE",
        )
    name = ENGINE_NAMES[engine]
    flags = {**_header_flags(text, name), "engine": name}
    for question in QUESTIONS:
        if question.key and engine in BY_NAME[question.key].engines:
            value = _meant(job, *question.key)
            if value not in (None, -1):  # -1 processes: as many as there are GPUs
                flags[question.field] = str(value)
    if engine is Engine.FSDP2:
        number = 1 if job.on("fsdp_reshard_after_forward") else 2
        flags["strategy"] = str(number + 3 if job.section("parallelism_config") else number)
    if engine is Engine.DEEPSPEED:
        flags["cpu_offload"] = str(job.section("deepspeed_config").get("offload_optimizer_device") == "cpu")
    if engine is Engine.TPU:
        flags["activation_checkpointing"] = str(job.on("fsdp_xla_fsdp_grad_ckpt"))
    return flags


def _meant(job: JobConfig, section: str, key: str) -> Any:
    """The value of a key, or what Accelerate takes without it."""
    if key == "fsdp_state_dict_type" and not job.has(key):
        return "FULL_STATE_DICT" if job.full_state_dict else "SHARDED_STATE_DICT"
    if key == "fsdp_auto_wrap_policy" and not job.has(key):
        return "NO_WRAP"
    return job.section(section).get(key, BY_NAME[section, key].default)


def _header_flags(text: str, engine: str) -> dict[str, str]:
    """Model, method and machine; of a file that has changed its engine since, not the method, which may not fit."""
    words = made_with(text)
    wanted = {question.flag: question.field for question in QUESTIONS if question.key is None}
    if words.get("--engine") != engine and engine != "ddp":  # plain DDP takes every method, and is FSDP2's NO_SHARD
        wanted.pop("--method")
    return {field: words[flag] for flag, field in wanted.items() if flag in words}


def update(document: Any, old: Answers, new: Answers) -> str:
    """The text of `document` with the differences between two sets of answers; everything else stays as it is.

    `document` is what `yaml_file.load` returned, `old` the answers it stands for. Our own header is renewed. With
    another engine the old one's sections go, and what was in them.
    """
    before, after = _flat(to_mapping(old)), _flat(to_mapping(new))
    changed = {(place, key): value for (place, key), value in after.items() if before.get((place, key)) != value}
    gone = {place for place, _ in before} - {place for place, _ in after}
    unreadable = {place for place, _ in changed if place and not isinstance(document.get(place) or {}, Mapping)}
    for section in (gone | unreadable) - {""}:  # text or a list, which Accelerate can't read either
        apply(document, [Edit("", section)])
    dropped = [Edit(place, key) for place, key in before if (place, key) not in after and place not in gone]
    apply(document, [*dropped, *(Edit(place, key, value) for (place, key), value in changed.items())])
    return with_header(dump(document), header(new))


def _flat(mapping: dict[str, Any]) -> dict[tuple[str, str], Any]:
    flat: dict[tuple[str, str], Any] = {}
    for key, value in mapping.items():
        flat |= {(key, inner): v for inner, v in value.items()} if isinstance(value, dict) else {("", key): value}
    return flat
