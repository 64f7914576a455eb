"""Converts answers to the text of an Accelerate YAML."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from accel_fsdp.config import (
    BY_NAME,
    COMMAND,
    DISTRIBUTED_TYPES,
    RESHARDS,
    STRATEGIES,
    THIS_FILE,
    TORCH_DTYPES,
    Engine,
    deepspeed_name,
    yaml_file,
)
from accel_fsdp.config import header as config_header
from accel_fsdp.hardware import machines
from accel_fsdp.job import FSDP_KINDS, Checkpointing, Job, Layout, from_arguments
from accel_fsdp.wizard.answers import Answers, engine_of
from accel_fsdp.wizard.questions import QUESTIONS, applying

Place: TypeAlias = tuple[str, str]
"""A section and a key."""
SECTIONS = {
    **dict.fromkeys((Engine.FSDP1, Engine.FSDP2, Engine.TPU), "fsdp_config"),
    Engine.DEEPSPEED: "deepspeed_config",
}
MESH = "parallelism_config"
KEYS = {question.key: question.field for question in QUESTIONS if question.key}
"""The keys that hold one answer each."""


CONSTANT: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "main_training_function": "main",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False,
    **dict.fromkeys(("fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_xla", "fsdp_xla_fsdp_v2"), True),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"),  # Trainer fills in its arguments
    "zero3_save_16bit_model": True,  # without it no model would be saved
}
READ_IN = dict.fromkeys(("offload_param_device", "zero3_init_flag", "zero3_save_16bit_model"), range(3, 4))
READ_IN["offload_optimizer_device"] = range(1, 10)
"""The stages in which DeepSpeed reads a key that not all of them read; a stage in DeepSpeed's own file is 9."""
DERIVED: Mapping[str, tuple[str, Callable[[Answers], Any]]] = {
    "distributed_type": ("engine", lambda answers: DISTRIBUTED_TYPES[engine_of(vars(answers))]),
    "fsdp_reshard_after_forward": ("strategy", lambda answers: RESHARDS[STRATEGIES[answers.strategy]]),
    "fsdp_xla_fsdp_grad_ckpt": ("activation_checkpointing", lambda answers: answers.activation_checkpointing),
    "zero_stage": ("strategy", lambda answers: answers.zero_stage),
    "offload_optimizer_device": ("cpu_offload", lambda answers: "cpu" if answers.cpu_offload else "none"),
    "offload_param_device": ("", lambda answers: "cpu" if answers.cpu_offload else "none"),
    "zero3_init_flag": ("ram_efficient_loading", lambda answers: answers.ram_efficient_loading),
    "deepspeed_multinode_launcher": ("", lambda answers: "standard" if answers.num_machines > 1 else ""),
}
"""The keys that follow from several answers: the setting that a key is of, if of one, and its value."""
SETTINGS: Mapping[str, str] = {key: field for (_, key), field in KEYS.items()} | {
    key: setting for key, (setting, _) in DERIVED.items() if setting
}
"""The setting that a key is of; other engines may have it under another key."""


def to_mapping(answers: Answers) -> dict[str, Any]:
    """The YAML's content: the keys that Accelerate 1.15 reads for this engine and no others, in the table's order."""
    content: dict[str, Any] = {}
    for (section, key), value in flat_mapping(answers).items():
        mapping = content.setdefault(section, {}) if section else content
        mapping[key] = value
    return content


def flat_mapping(answers: Answers) -> dict[Place, Any]:
    """The values of the YAML by section and key."""
    engine, written = engine_of(vars(answers)), {question.field for question in applying(answers)}
    values: dict[Place, Any] = {}
    for section, key in (place for place, field in BY_NAME.items() if engine in field.engines):
        value = CONSTANT.get(key, "")
        if KEYS.get((section, key)) in written:
            value = getattr(answers, KEYS[section, key])
        elif key in DERIVED:
            value = DERIVED[key][1](answers)
        elif section == MESH and engine is Engine.FSDP2:  # hybrid sharding and tensor parallelism
            value = answers.mesh.get(key, "")
        if value not in ("", ()) and answers.zero_stage in READ_IN.get(key, range(10)):
            values[section, key] = ",".join(value) if isinstance(value, tuple) else value
    return values


def to_text(answers: Answers, arguments: list[str] | None = None) -> str:
    """The whole file: header and YAML. `arguments` are the script's, if a caller knows more of them."""
    return "\n".join([*header(answers, arguments), yaml_file.dump(to_mapping(answers))])


def header(answers: Answers, arguments: list[str] | None = None) -> list[str]:
    """Comment lines: the title of the file, the command that writes the same YAML, and the one that uses it."""
    engine, words = engine_of(vars(answers)), COMMAND.split()
    named = deepspeed_name(answers.zero_stage) if engine is Engine.DEEPSPEED else engine.label
    if engine in FSDP_KINDS:
        named += f", strategy {answers.strategy} ({STRATEGIES[answers.strategy]})"
    for question in applying(answers):
        value = getattr(answers, question.field)
        words += [question.flag, flag_text(value)] if value not in ("", (), None) else []
    title = f"{answers.model or 'A model of your own'}, {answers.method} training, {named}."
    return config_header.comment(title, shlex.join(words), launch_line(answers, THIS_FILE, arguments))


def flag_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def launch_line(answers: Answers, path: str, arguments: list[str] | None = None) -> str:
    """The command that trains with the YAML at `path`; the script is left open for a model of another kind."""
    words = arguments or from_arguments.argument_words(job_of(answers), sized=answers.seq_len is not None)
    words += ["--accelerate_config", path] if answers.engine == "tpu" else []
    script = config_header.example_run(answers.model, words)
    if answers.own_script:
        script = ["YOUR_SCRIPT.py", *(arguments or ())]
    expandable = machines.parse(answers.gpus)[0].has_expandable_segments
    return config_header.launch_line(path, script, place=answers.place, expandable=expandable)


def job_of(answers: Answers) -> Job:
    """The parts of the job that the script's arguments decide."""
    kind: Checkpointing = "full" if answers.script_checkpoints else "none"
    precision = answers.mixed_precision if answers.mixed_precision in TORCH_DTYPES else "bf16"  # fp8 computes in it
    recipe = from_arguments.planned_recipe(answers.method, precision)
    recipe = replace(recipe, rows=answers.batch or 1, length=answers.seq_len or recipe.length, checkpointing=kind)
    return Job(Layout(engine_of(vars(answers)), experts=answers.ep), recipe, recompute="script")
