"""Reads the linter's inputs: YAML, arguments, versions; on request the model and the script."""

import ast
import contextlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from accel_fsdp import command_line, console
from accel_fsdp.config import BY_NAME, Kind, ReadConfig, full_name, header, read_config, yaml_checks, yaml_file
from accel_fsdp.errors import UsageError, UserError, versions_of
from accel_fsdp.linter.flags import Sources
from accel_fsdp.linter.rules import ScriptFacts, Subject
from accel_fsdp.models import ModelFacts

LIBRARIES = ("torch", "accelerate", "transformers", "peft", "trl", "safetensors", "deepspeed")
NO_ARGUMENTS = "there are no arguments to compare the YAML with"
GIVE_ARGUMENTS = (
    "--args FILE, which holds a YAML or JSON mapping, or a command line; "
    "in bash also --args <(echo train/sft.py --bf16)"
)
USES_TRAINING = re.compile(
    r"^(?:from|import) accel_fsdp\.training\b|^from accel_fsdp import .*\btraining\b", re.MULTILINE
)
"""How train/sft.py, and scripts like it, import the parts that fix bugs of Trainer and PEFT."""
OF_TRL = {"gradient_checkpointing": True, "dtype": "float32"}
"""What `trl sft` takes for arguments that it isn't given, other than train/sft.py (TRL 1.16)."""


def read_launch(script: Path, words: tuple[str, ...], values: Mapping[str, Any] = MappingProxyType({})) -> Subject:
    """The arguments of a job that is about to be launched, and its script unless that is train/sft.py.

    A script that isn't valid Python is left out, because the launcher reports it. The model is read only if
    transformers divides it under the YAML's `values`, because that takes seconds.
    """
    args = command_line.parse_command_line(words)
    subject = Subject(values, args=args, starter="accelerate", uses_sft=_uses_sft(script))
    if subject.uses_sft:
        return replace(subject, model=_model_here(args)) if subject.by_transformers else subject
    with contextlib.suppress(UsageError):
        subject = replace(subject, script=_parse_script(script, _script_text(script)))
    return subject


def completed(file: Path, source: str, script: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of train/sft.py, after the arguments in the header of `file` that they lack; says so.

    The words of another script stay as they are.
    """
    arguments = header.script_arguments(source)
    if not arguments or not _uses_sft(script):
        return words
    console.say(from_header(file, bool(words)))
    own = tuple(str(file) if word == header.THIS_FILE else word for word in arguments)
    return command_line.with_defaults(words, own)


def from_header(file: Path, changed: bool) -> str:
    """The sentence that says where arguments come from."""
    return f"arguments: {'those given, and the others ' if changed else ''}from the header of {file}"


def _uses_sft(script: Path) -> bool:
    """Whether a script is train/sft.py: by its imports, or by its name if it can't be read."""
    try:
        return USES_TRAINING.search(_script_text(script)) is not None
    except UserError:
        return script.parts[-2:] == ("train", "sft.py")


def read_given(sources: Sources) -> Subject:
    """Reads model, arguments and script once for all YAMLs of a command, because each may be a pipe."""
    given = Subject({}, model=None if sources.model is None else _read_model(sources.model))
    if sources.args is not None:
        text = yaml_file.read_text(sources.args, NO_ARGUMENTS, GIVE_ARGUMENTS)
        given = _with_command(given, command_words(text), _arguments(sources.args, text))
    if sources.script is not None:
        text = _script_text(sources.script)
        given = replace(given, script=_parse_script(sources.script, text), uses_sft=bool(USES_TRAINING.search(text)))
    return given


def _with_command(given: Subject, words: list[str], args: dict[str, Any]) -> Subject:
    """The inputs with a command line and its arguments, which may name the model."""
    before, script, _ = _around_script(words)
    return replace(
        given,
        model=given.model or _model_here(args),
        args=args,
        starter=launcher_of(words),
        launcher=command_line.parse_command_line(before) if launcher_of(words) == "accelerate" else {},
        uses_sft=_uses_sft(Path(script)),
        names_script=bool(script),
    )


def _model_here(args: Mapping[str, Any]) -> ModelFacts | None:
    """The facts about the model that the arguments name; None unless it is in a folder here, or bundled."""
    from accel_fsdp.models import catalogue, read_model

    name = str(args.get("model_name_or_path") or "")
    if name and (Path(name).is_dir() or catalogue.find(name)):
        with contextlib.suppress(UserError):
            return read_model(name)
    return None


def _read_model(name: str) -> ModelFacts:
    from accel_fsdp.models import read_model

    try:
        return read_model(name)
    except UserError as error:
        error.exit_code = UsageError.exit_code  # 1 would mean that the files were read and have errors
        raise


def read_subject(
    path: Path,
    sources: Sources | None = None,
    given: Subject | None = None,
    read: ReadConfig | None = None,
    completes: bool = True,
) -> tuple[Subject, Any]:
    """Returns the input of the rules, and the ruamel.yaml document for lines and repairs.

    If it `completes` the arguments, the launch command in the file's header gives those that are missing, unless they
    are of a script of one's own.

    `given` (the inputs that `sources` name) and `read` (the file) are passed if they have been read already.
    """
    sources = sources or Sources()
    given = given or read_given(sources)
    job, document = read or read_config(path, doubled=True)
    is_own = (given.script or given.names_script) and not given.uses_sft
    if completes and not is_own and (line := header.sft_line(job.source)):
        words = command_words(line)
        in_header = command_line.parse_command_line(_around_script(words)[2])
        given = _with_command(given, words, {**in_header, **(given.args or {})})
    subject = replace(
        given,
        values=_with_flags(job.values, given.launcher),
        source=job.source,
        absent=job.absent,
        doubled=job.doubled,
        versions=versions_of(LIBRARIES),
    )
    return subject, document


def _with_flags(values: Mapping[str, Any], flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values that the launcher takes: its flags win over the file, unless they are a shell's variables."""
    for (section, key), field in BY_NAME.items():
        flag, is_number = flags.get(key), field.kind is Kind.INT
        if flag is None or "$" in str(flag) or (is_number and not str(flag).isdecimal()):
            continue
        content = values.get(section) if section else values
        others = content.items() if isinstance(content, Mapping) else ()
        replaced = {name: value for name, value in others if full_name(section, str(name)) != key}
        replaced[key] = int(flag) if is_number else flag
        values = {**values, section: replaced} if section else replaced
    return values


def _script_text(path: Path) -> str:
    return yaml_file.read_text(path, why="the script can't be checked", fix="give a Python file")


def _parse_script(path: Path, text: str) -> ScriptFacts:
    """Parses a training script without running it."""
    try:
        return ScriptFacts(path.name, ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last one for deep nesting as well
        reason = getattr(error, "msg", None) or str(error) or "its code is nested too deep"
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(
            f"cannot read {path}{line}: {reason}", why="the script can't be checked", fix="give a Python file"
        ) from error


def command_words(text: str) -> list[str]:
    """The words of a command line in a file of arguments, without leading `VARIABLE=value`; empty if there is none."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return []
    start = next((index for index, word in enumerate(words) if "=" not in word or word.startswith("-")), len(words))
    return words[start:]


def launcher_of(words: list[str]) -> str:
    """The launcher of a command line: accelerate, accel-fsdp, torchrun or python; else empty.

    `python -m accelerate...` counts as accelerate and `python -m torch...` as torchrun.
    """
    first = words[0].rpartition("/")[2] if words else ""
    module = words[2] if len(words) > 2 and words[1] == "-m" else ""
    if first.startswith("python") and module.startswith(("accelerate", "torch.distributed")):
        return "accelerate" if module.startswith("accelerate") else "torchrun"
    return first if first in ("accelerate", "accel-fsdp", "torchrun", "python", "python3") else ""


def _around_script(words: list[str]) -> tuple[list[str], str, list[str]]:
    """The launcher's words of a command line, its script, and the script's words; all are the script's without one."""
    place = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    return ([], "", words) if place is None else (words[:place], words[place], words[place + 1 :])


def _arguments(path: Path, text: str) -> dict[str, Any]:
    yaml_checks.check_text(text, path)
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml_checks.plain_values(text, path)
    except (yaml.YAMLError, ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        return {str(key): value for key, value in content.items()}
    words = command_words(text)
    if not any(word.startswith("--") or word.endswith((".py", ".sh")) for word in words) and not launcher_of(words):
        yaml_checks.check_printable(text, path)
        raise UsageError(
            f"cannot read {path}: neither a mapping nor a command line", why=NO_ARGUMENTS, fix=GIVE_ARGUMENTS
        )
    defaults = OF_TRL if words[:2] == ["trl", "sft"] else {}
    return {**defaults, **command_line.parse_command_line(_around_script(words)[2])}
