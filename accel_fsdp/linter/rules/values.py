"""Rules about values that stop the launcher or its plugins, or that mean something else than they seem to."""

import re
from typing import Any

from accel_fsdp.config import (
    DEFAULT_PORT,
    FALSE_WORDS,
    MULTI_CPU,
    NULL_IS_ABSENT,
    STRATEGIES,
    TRUE_WORDS,
    Edit,
    Engine,
    Field,
    Kind,
    size_key,
)
from accel_fsdp.errors import did_you_mean
from accel_fsdp.job import ROW_AXES, from_arguments
from accel_fsdp.linter.rules.engine import Cases, Each, Row
from accel_fsdp.linter.rules.keys import written
from accel_fsdp.linter.rules.subject import Subject

LARGEST_PORT = 65535
ALL_OF_A_MACHINE = ("gpu", "auto", "cpu", "xpu")
"""Words for `num_processes` that the launcher hands on to torchrun."""
QUOTED = ("mixed_precision", "distributed_type", "dynamo_backend")
"""Keys whose false, which is a bare no, is AF201's or AF208's."""
DEEPSPEED_FILE_KEYS = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
"""The keys of `deepspeed_config` that DeepSpeedPlugin refuses beside a `deepspeed_config_file`."""
PATTERN = "fsdp_config.fsdp_ignored_modules"


def _bare_no(subject: Subject) -> Each:
    for section, key, method in (("", "mixed_precision", "lower"), ("dynamo_config", "dynamo_backend", "upper")):
        if subject.section(section).get(key) is False:
            word = subject.spelt(key, "no", section)
            words = {"path": f"{section}.{key}".lstrip("."), "key": key, "word": word, "method": method}
            yield words | {"edits": (Edit(section, key, "no"),)}


def _bare_no_engine(subject: Subject) -> Cases:
    """With `num_processes` Accelerate runs one process, as for 'NO'; it has no default of it for false."""
    if subject.values.get("distributed_type") is not False:
        return None
    why = "it counts as 'NO' because num_processes is given"
    why = "Accelerate stops: it asks for --num_processes" if subject.lacks_processes else why
    severity = None if subject.lacks_processes else "note"
    return {"word": subject.spelt("distributed_type", "NO"), "why": why, "severity": severity}


def _null(subject: Subject) -> Each:
    """In the keys of a mesh that the launcher hands on, and in sections where null isn't an absent key."""
    for path, field, value in written(subject):
        if value is not None or field.key == "dynamo_backend" or field.key in NULL_IS_ABSENT:
            continue
        in_mesh = field.section == "parallelism_config" and _is_read_from_mesh(subject, field)
        if in_mesh or field.section in ("fsdp_config", "dynamo_config"):
            yield {"path": path, "key": field.key, "edits": (Edit(field.section, field.key),)}


def _is_read_from_mesh(subject: Subject, field: Field) -> bool:
    """Whether the launcher passes a key of the mesh on to the ranks, so that null differs from a missing key.

    It passes on sizes and backends under any engine for several GPUs, and other keys for an axis of more than one rank.
    """
    engines = (Engine.FSDP1, Engine.FSDP2, Engine.DDP, Engine.DEEPSPEED)
    axis = field.key.removeprefix("parallelism_config_").partition("_")[0]
    is_detail = not field.key.endswith(("_size", "_backend"))
    is_unread = field.default is None or (is_detail and subject.mesh.get(axis) == 1)
    return subject.engine in engines and subject.values.get("distributed_type") != MULTI_CPU and not is_unread


def _not_a_choice(subject: Subject) -> Each:
    for path, field, value in written(subject):
        if field.kind is not Kind.CHOICE or value is None or (field.key in QUOTED and value is False):
            continue
        if field.takes(str(value)):
            continue
        suggestion = subject.fsdp_version if field.key == "fsdp_version" else ""
        spelled = [choice for choice in field.choices if choice.lower() == str(value).lower()]
        edits = tuple(Edit(field.section, field.key, kind) for kind in spelled if field.key == "distributed_type")
        edits = (Edit(field.section, field.key, int(suggestion)),) if suggestion in field.choices else edits
        words = {"path": path, "key": field.key, "value": value, "choices": ", ".join(field.choices), "edits": edits}
        yield words | {"hint": did_you_mean(str(value), field.choices)}


def _not_a_boolean(subject: Subject) -> Each:
    for path, field, value in written(subject):
        if field.kind is Kind.BOOL and value is not None and str(value).lower() not in TRUE_WORDS + FALSE_WORDS:
            is_strategy = subject.engine is Engine.FSDP2 and str(value).upper() in STRATEGIES.values()
            if not field.section and (field.key != "use_cpu" or subject.engine is not Engine.NONE):
                continue  # AF209, AF107
            if field.key == "fsdp_reshard_after_forward" and (subject.engine is Engine.FSDP1 or is_strategy):
                continue  # AF302, AF304
            yield {"path": path, "key": field.key, "value": value}


def _not_a_whole_number(subject: Subject) -> Each:
    """YAML 1.1 reads `1e8` as text and `1.0e+8` as a float. On one machine torchrun counts the GPUs itself."""
    for path, field, value in written(subject):
        if field.kind is not Kind.INT or value is None or (isinstance(value, int) and not isinstance(value, bool)):
            continue
        if isinstance(value, str) and value.isdecimal():
            continue
        if field.key == "num_processes" and value in ALL_OF_A_MACHINE and subject.top("num_machines") == 1:
            continue
        number = from_arguments.number(subject.spelt(field.key, value, field.section), None)
        integer = int(number) if number is not None and number.is_integer() else None
        edits = () if integer is None else (Edit(field.section, field.key, integer),)
        words = {"path": path, "key": field.key, "value": repr(value), "edits": edits}
        yield words | {"number": "N" if integer is None else integer}


def _names(subject: Subject, empty: bool) -> Each:
    """A list is passed on as its Python text; spaces and a module become part of a name, and so do odd letters.

    Only whole names are repaired: a dot in place of a comma would lose one.
    """
    for path, field, value in written(subject):
        if field.kind is not Kind.NAMES or value is None:
            continue
        parts = [str(part).strip() for part in value] if isinstance(value, list) else str(value).split(",")
        parts = [part.strip() for part in parts if part.strip()]
        joined = ",".join(part.rpartition(".")[2] for part in parts)
        is_whole = all(re.fullmatch(r"(\w+\.)*\w+", part, re.ASCII) for part in parts)
        if empty != (not joined) or (joined == value and is_whole):
            continue
        edits = (Edit(field.section, field.key, joined),) if joined and is_whole else ()
        yield {"path": path, "key": field.key, "names": joined if is_whole else "NAME,NAME", "edits": edits}


def _gpu_ids(subject: Subject) -> Cases:
    value = subject.values.get("gpu_ids")
    if value is None or isinstance(value, str):
        return None
    text, typed = (joined(numbers) for numbers in (value, subject.spelt("gpu_ids", value)))
    is_plain = text == typed and re.fullmatch(r"\d+(,\d+)*", text)
    edits = (Edit("", "gpu_ids", text),) if is_plain else ()
    return {"typed": typed, "text": text if is_plain else "0,1", "edits": edits}


def joined(value: Any) -> str:
    """The numbers of `gpu_ids` as one text."""
    return ",".join(map(str, value if isinstance(value, list) else [value]))


def _by_truth(subject: Subject, quoted: bool) -> Each:
    """`quoted`: the text "false"; else neither true nor false. Debugging slows down each collective."""
    for name in ("debug", *(("use_cpu",) if subject.engine is not Engine.NONE else ())):
        value = subject.values.get(name)
        is_text = name != "use_cpu" and isinstance(value, str) and value.lower() in FALSE_WORDS
        is_odd = value is not None and str(value).lower() not in TRUE_WORDS + FALSE_WORDS
        if is_text if quoted else is_odd:
            edits = (Edit("", name, False),) if quoted else ()
            yield {"key": name, "value": value, "read": "true" if value else "false", "edits": edits}


def _listed_modules(subject: Subject) -> Cases:
    value = subject.fsdp("fsdp_ignored_modules") if subject.is_fsdp else None
    return {"names": "|".join(re.escape(str(item)) for item in value)} if isinstance(value, list) else None


def _bad_pattern(subject: Subject) -> Cases:
    value = subject.fsdp("fsdp_ignored_modules")
    if not isinstance(value, str) or not subject.is_fsdp:
        return None
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        return {"value": value, "problem": str(error) or "it is too long"}
    return None


def _number_in_quotes(subject: Subject) -> Each:
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
            number = int(value)
            words = {"path": f"{section}.{key}".lstrip("."), "key": key, "value": value, "number": number}
            yield words | {"edits": (Edit(section, key, number),)}


def _no_such_port(subject: Subject) -> Cases:
    port = subject.values.get("main_process_port")
    if not isinstance(port, int) or isinstance(port, bool) or subject.engine is Engine.NONE:
        return None
    return None if 0 <= port <= LARGEST_PORT else {"port": port}


def _no_number(subject: Subject, key: str, whole: bool) -> Cases:
    value = _deepspeed(subject, key)
    number = from_arguments.positive_int(value) if whole else from_arguments.number(value, None) is not None
    is_auto = str(value) == "auto" or (str(value).lower() == "auto" and not whole)
    return None if value is None or is_auto or number else {"value": value}


def _deepspeed(subject: Subject, key: str) -> Any:
    return subject.section("deepspeed_config").get(key) if subject.engine is Engine.DEEPSPEED else None


def _nvme(subject: Subject) -> Each:
    section = subject.section("deepspeed_config") if subject.engine is Engine.DEEPSPEED else {}
    for what in ("optimizer", "param"):
        device, path = f"offload_{what}_device", f"offload_{what}_nvme_path"
        if str(section.get(device)).lower() == "nvme":
            yield {"device": device, "path": path, "key": path if path in section else device}


def _missing_file(subject: Subject) -> Cases:
    """A warning if it is beside the YAML, or in a folder that this machine doesn't have."""
    path, place = _deepspeed(subject, "deepspeed_config_file"), subject.absent.get("deepspeed_config_file")
    return None if path is None or place is None else {"file": path, "severity": "warning" if place else None}


def _file_and_keys(subject: Subject) -> Cases:
    section = subject.section("deepspeed_config")
    if _deepspeed(subject, "deepspeed_config_file") is None:
        return None
    clashing = [f"deepspeed_config.{key}" for key in DEEPSPEED_FILE_KEYS if key in section]
    clashing += ["mixed_precision"] if subject.values.get("mixed_precision") is not None else []
    return {"key": clashing[0], "names": ", ".join(p.rpartition(".")[2] for p in clashing)} if clashing else None


ROWS = (
    Row(
        "AF201", "error", "{path}", "{key}: {word} without quotes is the boolean false",
        "Accelerate stops: 'bool' object has no attribute '{method}'", "{key}: 'no'", _bare_no, seen="P63 launcher",
    ),
    Row(
        "AF202", "error", "{path}", "{key} has no value", "Accelerate reads the text None",
        "give it a value, or remove {key}", _null, seen="P66 plugin",
    ),
    Row(
        "AF203", "error", "{path}", "{key}: {value} is unknown.{hint}", "Accelerate stops, or uses another value",
        "one of {choices}", _not_a_choice, seen="P67 plugin",
    ),
    Row(
        "AF204", "error", "{path}", "{key}: {value} is neither true nor false", "Accelerate stops: invalid truth value",
        "{key}: true or false", _not_a_boolean, seen="plugin",
    ),
    Row(
        "AF205", "error", "{path}", "{key}: {value} is not a whole number",
        "Accelerate stops: invalid literal for int()", "{key}: {number}", _not_a_whole_number, seen="P64 plugin",
    ),
    Row(
        "AF206", "error", "{path}", "{key} names no class", "Accelerate looks for a class without a name and stops",
        "{key}: NAME, or remove it, and the model decides", lambda s: _names(s, empty=True), seen="plugin",
    ),
    Row(
        "AF206", "error", "{path}", "{key} is not a comma-separated list of class names",
        "Accelerate would look for a class with brackets, spaces, dots or odd letters in its name", "{key}: {names}",
        lambda s: _names(s, empty=False), seen="P65 accelerate#3748",
    ),
    Row(
        "AF207", "error", "gpu_ids", "gpu_ids: {typed} is not text", "Accelerate stops: no attribute 'split'",
        "gpu_ids: '{text}'", _gpu_ids, seen="P48 launcher",
    ),
    Row(
        "AF208", "error", "distributed_type", "distributed_type: {word} without quotes is the boolean false", "{why}",
        "distributed_type: 'NO', in quotes", _bare_no_engine, (Edit("", "distributed_type", "NO"),), seen="launcher",
    ),
    Row(
        "AF209", "warning", "{key}", "{key}: '{value}' in quotes is text", "Accelerate reads any text as true",
        "{key}: false", lambda s: _by_truth(s, quoted=True), seen="launcher",
    ),
    Row(
        "AF209", "warning", "{key}", "{key}: {value} is neither true nor false", "Accelerate reads it as {read}",
        "{key}: true or false", lambda s: _by_truth(s, quoted=False),
    ),
    Row(
        "AF210", "error", PATTERN, "fsdp_ignored_modules is a list",
        "it is read as a pattern that fits no module, and nothing is ignored",
        "fsdp_ignored_modules: '{names}', a pattern for whole names", _listed_modules, seen="plugin",
    ),
    Row(
        "AF210", "error", PATTERN, "fsdp_ignored_modules: {value} is not a regular expression: {problem}",
        "Accelerate stops when it prepares the model", "a pattern for whole names of modules, such as '.*mlp'",
        _bad_pattern,
    ),
    Row(
        "AF211", "error", "{path}", "{key}: '{value}' in quotes is text",
        "the launcher counts with it and stops: TypeError", "{key}: {number}", _number_in_quotes, seen="launcher",
    ),
    Row(
        "AF211", "error", "num_machines", "num_machines has no value",
        "the launcher compares it with 1 and stops: TypeError", "num_machines: 1, or remove it",
        lambda s: "num_machines" in s.values and s.values["num_machines"] is None, (Edit("", "num_machines"),),
    ),
    Row(
        "AF212", "error", "main_process_port", "there is no port {port}", "the launcher stops: port must be 0-65535",
        f"main_process_port: {DEFAULT_PORT}, or 0 for a free one", _no_such_port, seen="launcher",
    ),
    Row(
        "AF213", "error", "deepspeed_config.gradient_clipping",
        "gradient_clipping: {value} is neither a number nor auto",
        "Accelerate stops: could not convert string to float",
        "gradient_clipping: 1.0, or auto; without clipping leave it out",
        lambda s: _no_number(s, "gradient_clipping", whole=False), seen="plugin",
    ),
    Row(
        "AF213", "error", "deepspeed_config.gradient_accumulation_steps",
        "gradient_accumulation_steps: {value} is neither a whole number above 0 nor auto",
        "DeepSpeed gets it as text, or stops at 0", "gradient_accumulation_steps: 1, or auto",
        lambda s: _no_number(s, "gradient_accumulation_steps", whole=True),
    ),
    Row(
        "AF216", "error", "deepspeed_config.{key}", "{device}: nvme",
        "the launcher drops {path}, and the ranks swap to a folder named none in the folder they run in",
        "a deepspeed_config_file for {device} and its path", _nvme, seen="launcher",
    ),
    Row(
        "AF217", "error", "deepspeed_config.deepspeed_config_file",
        "deepspeed_config_file: {file} is not in the folder you launch from",
        "each rank stops: Expected a string path to an existing deepspeed config",
        "deepspeed_config_file with a path that holds from where you launch", _missing_file, seen="plugin",
    ),
    Row(
        "AF324", "error", "{key}", "{names} beside deepspeed_config_file",
        "Accelerate stops: the following accelerate config variables will be ignored",
        "move {names} into the DeepSpeed file", _file_and_keys, seen="plugin",
    ),
)  # fmt: skip
