"""Rules about values that stop the launcher or its plugins, and about keys with two values."""

import re
from collections.abc import Iterator
from typing import Any

from accel_fsdp.config import DEFAULT_PORT, FALSE_WORDS, ROW_AXES, TRUE_WORDS, Edit, Engine, full_name, size_key
from accel_fsdp.job import from_arguments
from accel_fsdp.linter.rules.engine import Finding, Subject, rule
from accel_fsdp.linter.rules.keys import SECTIONS

LARGEST_PORT = 65535
READ_BY_TRUTH = ("debug", "tpu_use_cluster", "tpu_use_sudo")
"""Keys of the top level of which Accelerate's launcher asks whether there is a value, and not which one."""
DEEPSPEED_FILE_KEYS = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
"""The keys of `deepspeed_config` that DeepSpeedPlugin refuses beside a `deepspeed_config_file`."""


@rule("AF108")
def two_spellings(subject: Subject) -> Iterator[Finding]:
    """One key in two spellings, with the prefix and without: `offload_params` beside `fsdp_offload_params`.

    Accelerate adds the prefix, and the last one in the file wins.
    """
    for section in SECTIONS:
        content = subject.values.get(section)
        if not isinstance(content, dict):
            continue
        spellings: dict[str, tuple[str, Any]] = {}
        for key, value in content.items():
            name = full_name(section, str(key))
            if name in spellings:
                first, previous = spellings[name]
                equal = previous == value and type(previous) is type(value)
                yield Finding(
                    f"{section}.{key}",
                    f"{first} and {key} are one key, {'given twice' if equal else f'once {previous} and once {value}'}",
                    f"the last one wins: {value}",
                    f"remove {first}" if equal else "keep one of them",
                    (Edit(section, first),) if equal else (),
                    milder="warning" if equal else None,
                )
            spellings[name] = str(key), value


@rule("AF209", "warning")
def what_counts_as_true(subject: Subject) -> Iterator[Finding]:
    """`debug: "false"` in quotes, or `debug: 1000`: every value other than empty or 0 counts as true.

    Accelerate only checks whether the value is empty. Debugging slows down each collective.
    """
    names = READ_BY_TRUTH if subject.engine is Engine.TPU else READ_BY_TRUTH[:1]
    if subject.engine is not Engine.NONE:
        names = (*names, "use_cpu")
    for name in names:
        value = subject.values.get(name)
        quoted = name != "use_cpu" and isinstance(value, str) and value.lower() in FALSE_WORDS
        if quoted:
            yield Finding(
                name,
                f"{name}: '{value}' in quotes is text",
                "Accelerate reads any text as true",
                f"{name}: false",
                (Edit("", name, False),),
            )
        elif value is not None and str(value).lower() not in TRUE_WORDS + FALSE_WORDS:
            yield Finding(
                name,
                f"{name}: {value} is neither true nor false",
                f"Accelerate reads it as {'true' if value else 'false'}",
                f"{name}: true or false",
            )


@rule("AF210")
def ignored_modules_are_no_pattern(subject: Subject) -> Iterator[Finding]:
    """`fsdp_ignored_modules` as a list, or as a pattern that isn't a regular expression.

    A list becomes the text of a Python list, which as a pattern means "one of these letters" and matches no module;
    with an invalid pattern Accelerate stops when it prepares the model.
    """
    value = subject.fsdp("fsdp_ignored_modules") if subject.is_fsdp else None
    if isinstance(value, list):
        names = "|".join(re.escape(str(item)) for item in value)
        yield Finding(
            "fsdp_config.fsdp_ignored_modules",
            "fsdp_ignored_modules is a list",
            "it is read as a pattern that fits no module, and nothing is ignored",
            f"fsdp_ignored_modules: '{names}', a pattern for whole names",
        )
    elif isinstance(value, str) and (problem := _problem_of(value)):
        yield Finding(
            "fsdp_config.fsdp_ignored_modules",
            f"fsdp_ignored_modules: {value} is not a regular expression: {problem}",
            "Accelerate stops when it prepares the model",
            "a pattern for whole names of modules, such as '.*mlp'",
        )


def _problem_of(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error) or "it is too long"
    return ""


@rule("AF211")
def number_in_quotes(subject: Subject) -> Iterator[Finding]:
    """A number in quotes where Accelerate counts with it, such as `main_process_port: "29501"`: TypeError.

    `num_machines` and `main_process_port` always, `num_processes` on several machines or without an engine, and the
    sizes of context and sequence parallelism.
    """
    counted = [("", "num_machines")]
    if subject.engine is not Engine.NONE:
        counted.append(("", "main_process_port"))
    if subject.engine is Engine.NONE or subject.values.get("num_machines") not in (None, 1, "1"):
        counted.append(("", "num_processes"))
    if subject.engine in (Engine.FSDP2, Engine.DDP, Engine.DEEPSPEED):
        counted += [("parallelism_config", size_key(axis)) for axis in ROW_AXES]
    for section, key in counted:
        value = subject.section(section).get(key)
        if isinstance(value, str) and value.isdecimal():
            yield Finding(
                f"{section}.{key}".lstrip("."),
                f"{key}: '{value}' in quotes is text",
                "the launcher counts with it and stops: TypeError",
                f"{key}: {int(value)}",
                (Edit(section, key, int(value)),),
            )
    if "num_machines" in subject.values and subject.values["num_machines"] is None:
        yield Finding(
            "num_machines",
            "num_machines has no value",
            "the launcher compares it with 1 and stops: TypeError",
            "num_machines: 1, or remove it",
            (Edit("", "num_machines"),),
        )


@rule("AF212")
def no_such_port(subject: Subject) -> Iterator[Finding]:
    """`main_process_port` outside 0 to 65535: the launcher stops with OverflowError."""
    port = subject.values.get("main_process_port")
    text = port if isinstance(port, int) and not isinstance(port, bool) else None
    if text is not None and subject.engine is not Engine.NONE and not 0 <= text <= LARGEST_PORT:
        yield Finding(
            "main_process_port",
            f"there is no port {text}",
            "the launcher stops: port must be 0-65535",
            f"main_process_port: {DEFAULT_PORT}, or 0 for a free one",
        )


@rule("AF213")
def deepspeed_number(subject: Subject) -> Iterator[Finding]:
    """`gradient_clipping` or `gradient_accumulation_steps` that is neither a number nor `auto`.

    Accelerate stops at a clipping such as none ("could not convert string to float"), and passes invalid steps to
    DeepSpeed as text.
    """
    if subject.engine is not Engine.DEEPSPEED:
        return
    section = subject.section("deepspeed_config")
    clipping, steps = section.get("gradient_clipping"), section.get("gradient_accumulation_steps")
    if clipping is not None and str(clipping).lower() != "auto" and from_arguments.number(clipping, None) is None:
        yield Finding(
            "deepspeed_config.gradient_clipping",
            f"gradient_clipping: {clipping} is neither a number nor auto",
            "Accelerate stops: could not convert string to float",
            "gradient_clipping: 1.0, or auto; without clipping leave it out",
        )
    if steps is not None and str(steps) != "auto" and not from_arguments.positive_int(steps):
        yield Finding(
            "deepspeed_config.gradient_accumulation_steps",
            f"gradient_accumulation_steps: {steps} is neither a whole number above 0 nor auto",
            "DeepSpeed gets it as text, or stops at 0",
            "gradient_accumulation_steps: 1, or auto",
        )


@rule("AF214")
def precision_of_linear_layers(subject: Subject) -> Iterator[Finding]:
    """`fp8_override_linear_precision` that isn't three booleans: the launcher takes the first three of its items.

    For the text "true,false,false" those are three letters. Read with `mixed_precision: fp8` only.
    """
    value = subject.section("fp8_config").get("fp8_override_linear_precision")
    if value is None or str(subject.top("mixed_precision")).lower() != "fp8":
        return
    if not isinstance(value, list) or len(value) != 3:
        yield Finding(
            "fp8_config.fp8_override_linear_precision",
            f"fp8_override_linear_precision: {value} is not a list of three",
            "the launcher reads its first three letters as booleans and stops",
            "fp8_override_linear_precision: [false, false, false], for fprop, dgrad and wgrad",
        )


@rule("AF324")
def deepspeed_file_and_keys(subject: Subject) -> Iterator[Finding]:
    """`deepspeed_config_file` beside keys that belong into it, `mixed_precision` among them.

    Accelerate stops: "the following accelerate config variables will be ignored".
    """
    section = subject.section("deepspeed_config")
    if subject.engine is not Engine.DEEPSPEED or section.get("deepspeed_config_file") is None:
        return
    clashing = [f"deepspeed_config.{key}" for key in DEEPSPEED_FILE_KEYS if key in section]
    clashing += ["mixed_precision"] if subject.values.get("mixed_precision") is not None else []
    if clashing:
        names = ", ".join(path.rpartition(".")[2] for path in clashing)
        yield Finding(
            clashing[0],
            f"{names} beside deepspeed_config_file",
            "Accelerate stops: the following accelerate config variables will be ignored",
            f"move {names} into the DeepSpeed file",
        )
