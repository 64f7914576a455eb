"""The Accelerate YAML: from answers to text, and back from a file with its comments and unknown keys."""

import difflib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp import __version__
from accel_fsdp.asking import is_ddp
from accel_fsdp.check import as_scalar
from accel_fsdp.errors import UsageError
from accel_fsdp.fields import BY_NAME, Engine
from accel_fsdp.questions import applying
from accel_fsdp.types import RESHARDS, STRATEGIES, TORCH_DTYPES, Answers

if TYPE_CHECKING:
    from ruamel.yaml import YAML

HEADER = "# Made by accel-fsdp"
"""How a comment of this tool begins."""


COMMAND = "accel-fsdp config --yes"
STDIN = "-"
"""The name under which a command reads its standard input."""
DEEPEST = 100
LARGEST = 1 << 20
"""Bytes of a YAML; ruamel.yaml needs a minute for ten times as many."""
ENGINES: dict[str, tuple[str, Engine]] = {
    "ddp": ("MULTI_GPU", Engine.DDP),
    "deepspeed": ("DEEPSPEED", Engine.DEEPSPEED),
    "tpu": ("XLA", Engine.TPU),
}
"""The wizard's names of the engines other than FSDP: Accelerate's `distributed_type`, and the field table's engine."""


def engine_of(answers: Answers) -> Engine:
    """What these answers train with."""
    if is_ddp(vars(answers)):
        return Engine.DDP
    if answers.engine != "fsdp":
        return ENGINES[answers.engine][1]
    return Engine.FSDP2 if answers.fsdp_version == 2 else Engine.FSDP1


def to_mapping(answers: Answers) -> dict[str, Any]:
    """The YAML's content: the keys that Accelerate 1.15 reads for this engine and no others, in the table's order."""
    engine = engine_of(answers)
    kinds = {one: name for name, one in ENGINES.values()}
    values: dict[tuple[str, str], Any] = {
        ("", "compute_environment"): "LOCAL_MACHINE",
        ("", "distributed_type"): kinds.get(engine, "FSDP"),
    }
    for question in applying(answers):
        if question.key and engine in BY_NAME[question.key].engines:
            value = getattr(answers, question.field)
            values[question.key] = ",".join(value) if isinstance(value, tuple) else value
    values |= _DERIVED[engine](answers)
    content: dict[str, Any] = {}
    for (section, key), field in BY_NAME.items():
        if (section, key) in values:
            place = content.setdefault(section, {}) if field.section else content
            place[key] = values[section, key]
    return content


def _nothing(answers: Answers) -> dict[tuple[str, str], Any]:
    return {}


def _fsdp1(answers: Answers) -> dict[tuple[str, str], Any]:
    settings = {
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
    }
    return {("fsdp_config", key): value for key, value in settings.items()}


def _fsdp2(answers: Answers) -> dict[tuple[str, str], Any]:
    """FSDP2 spells hybrid sharding as a device mesh: one replica per machine, shards inside each."""
    strategy = STRATEGIES[answers.strategy]
    values: dict[tuple[str, str], Any] = {("fsdp_config", "fsdp_reshard_after_forward"): RESHARDS[strategy]}
    if strategy.startswith("HYBRID"):
        sizes = {"replicate": answers.num_machines, "shard": answers.num_processes // answers.num_machines}
        values |= {("parallelism_config", f"parallelism_config_dp_{name}_size"): n for name, n in sizes.items()}
    return values


def _deepspeed(answers: Answers) -> dict[tuple[str, str], Any]:
    """`auto` lets Trainer fill in its own arguments; without the stage-3 flags no model would be saved."""
    device = "cpu" if answers.cpu_offload else "none"
    settings: dict[str, Any] = {"offload_optimizer_device": device} if answers.zero_stage else {}
    if answers.zero_stage == 3:
        settings |= {"offload_param_device": device, "zero3_init_flag": True, "zero3_save_16bit_model": True}
    settings |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    if answers.num_machines > 1:
        settings["deepspeed_multinode_launcher"] = "standard"
    return {("deepspeed_config", key): value for key, value in settings.items()}


def _tpu(answers: Answers) -> dict[tuple[str, str], Any]:
    xla = {"fsdp_xla": True, "fsdp_xla_fsdp_v2": True, "fsdp_xla_fsdp_grad_ckpt": answers.activation_checkpointing}
    return {("", "main_training_function"): "main"} | {("fsdp_config", key): value for key, value in xla.items()}


_DERIVED: dict[Engine, Callable[[Answers], dict[tuple[str, str], Any]]] = {
    Engine.DDP: _nothing,
    Engine.FSDP1: _fsdp1,
    Engine.FSDP2: _fsdp2,
    Engine.DEEPSPEED: _deepspeed,
    Engine.TPU: _tpu,
}


def to_text(answers: Answers) -> str:
    """The whole file: a header that says how it was made and how to launch it, then the YAML. Deterministic."""
    return "\n".join([*header(answers), dump(_quoted(to_mapping(answers)))])


def _quoted(value: Any) -> Any:
    """Text in quotes where it needs them, at every level: a layer class may be called NO."""
    return {key: _quoted(inner) for key, inner in value.items()} if isinstance(value, dict) else as_scalar(value)


def header(answers: Answers) -> list[str]:
    """Comment lines: what the file is, the command that made it, and the one that uses it."""
    return [
        f"# {answers.model}, {answers.method} training, {_engine_in_words(answers)}.",
        f"{HEADER} {__version__}:",
        f"#   {command_line(answers)}",
        "# Launch:",
        f"#   {launch_line(answers, 'THIS_FILE')}",
    ]


def _engine_in_words(answers: Answers) -> str:
    engine = engine_of(answers)
    if engine in (Engine.FSDP1, Engine.FSDP2):
        return f"{engine.value}, strategy {answers.strategy} ({STRATEGIES[answers.strategy]})"
    if engine is Engine.DEEPSPEED:
        return f"DeepSpeed ZeRO-{answers.zero_stage}"
    return {Engine.DDP: "plain DDP", Engine.TPU: "TPU (XLA FSDP)"}[engine]


def command_line(answers: Answers) -> str:
    """The non-interactive command that writes the same YAML."""
    words = COMMAND.split()
    for question in applying(answers):
        words += [question.flag, flag_text(getattr(answers, question.field))]
    return shlex.join(words)


def flag_text(value: Any) -> str:
    """An answer as its flag takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def launch_line(answers: Answers, path: str) -> str:
    """The command that trains with the YAML at `path`."""
    words = ["accelerate", "launch", "--config_file", path]
    if answers.num_machines > 1:
        words += ["--machine_rank", "0"]
    if answers.own_script:
        return shlex.join([*words, "YOUR_SCRIPT.py"])
    words += ["train/sft.py", "--model_name_or_path", answers.model]
    words += ["--dataset_name", "train/data/fsdp_chat", "--output_dir", "runs/first"]
    if answers.method != "full":
        words.append("--use_peft")
    if answers.method == "qlora":
        words += ["--load_in_4bit", "--bnb_4bit_quant_storage", TORCH_DTYPES[answers.mixed_precision]]
    if answers.script_checkpoints:
        words += ["--gradient_checkpointing", "true"]
    if answers.engine == "tpu":
        words += ["--accelerate_config", path]
    return shlex.join(words)


def dump(document: Any) -> str:
    """The YAML text of a mapping, or of what `load` returned: lines that were not edited come back byte for byte."""
    source: str | None = getattr(document, "source", None)
    if source is None:
        return _ruamel_text(document, indent=2)
    if document.is_json:
        return json.dumps(document, indent=_json_indent(source)) + "\n" * source.endswith("\n")
    indent = _indent(source)
    pristine, edited = (_ruamel_text(one, indent) for one in (_round_trip().load(source), document))
    if pristine == edited:
        return source
    merged = _merge(source, pristine, edited)
    return merged if _reads_as(merged, edited) else edited


def _json_indent(text: str) -> int | None:
    """The indentation of the first key; None for a text of one line."""
    lines = text.strip().splitlines()
    return len(lines[1]) - len(lines[1].lstrip(" ")) if len(lines) > 1 else None


def _reads_as(text: str, wanted: str) -> bool:
    """Whether two texts hold the same; odd layouts, such as one-line mappings over several lines, don't merge."""
    from ruamel.yaml.error import YAMLError

    try:
        return bool(_round_trip().load(text) == _round_trip().load(wanted))
    except (YAMLError, ValueError):
        return False


def _merge(source: str, pristine: str, edited: str) -> str:
    """ruamel.yaml normalises spacing; where it keeps the number of lines, only the lines that were edited change."""
    theirs, before, after = (text.splitlines(keepends=True) for text in (source, pristine, edited))
    if len(theirs) != len(before):
        return edited
    lines: list[str] = []
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        lines += theirs[start:end] if kind == "equal" else after[new_start:new_end]
    return "".join(lines)


def _indent(text: str) -> int:
    """The indentation of the first nested key."""
    nested = [len(line) - len(line.lstrip(" ")) for line in text.splitlines() if line.startswith(" ") and ":" in line]
    return nested[0] if nested else 2


def _ruamel_text(document: Any, indent: int) -> str:
    stream = io.StringIO()
    round_trip = _round_trip()
    round_trip.indent(mapping=indent)
    round_trip.dump(document, stream)
    return stream.getvalue()


def _round_trip() -> "YAML":
    from ruamel.yaml import YAML

    round_trip = YAML()
    round_trip.preserve_quotes = True
    round_trip.width = 4096
    return round_trip


def _text(path: Path) -> str:
    """A file's text with Unix line ends, or that of stdin for `-`; a pipe that nobody writes to counts as empty.

    Raises:
        UsageError: it can't be read, is too large, or no text.
    """
    try:
        if str(path) == STDIN:
            data = sys.stdin.buffer.read(LARGEST + 1)
        else:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                os.set_blocking(descriptor, True)
                data = file.read(LARGEST + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot read {path}: {reason}",
            why="the command works on an Accelerate YAML that exists",
            fix="make one: accel-fsdp config -o FILE",
        ) from error
    if len(data) > LARGEST:
        raise UsageError(
            f"{path} is larger than {LARGEST >> 20} MiB",
            why="an Accelerate YAML has a few dozen lines",
            fix="give the YAML that accelerate launch --config_file takes",
        )
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if _depth(text) > DEEPEST:
        raise UsageError(
            f"{path} is nested more than {DEEPEST} levels deep",
            why="an Accelerate YAML has two levels, and a parser takes minutes for thousands",
            fix="give the YAML that accelerate launch --config_file takes",
        )
    return text


def _depth(text: str) -> int:
    """How deep a text may nest, at most: by brackets, by indentation, and by dashes on one line."""
    deepest = open_brackets = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        open_brackets = open_brackets + 1 if bracket in "[{" else max(open_brackets - 1, 0)
        deepest = max(deepest, open_brackets)
    starts: list[str] = re.findall(r"^(?: |[-?] )+", text, flags=re.MULTILINE)
    return max([deepest, *(start.count(" ") // 2 for start in starts)])


def load(path: Path) -> Any:
    """Reads an Accelerate YAML with ruamel.yaml: a mapping whose comments, order and spelling survive a later dump.

    Raises:
        UsageError: no such file, not YAML (with the line), or not a mapping.
    """
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    text = _text(path)
    try:
        content = _round_trip().load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise UsageError(
            f"{path}:{line}: {str(error.problem).partition(' with value')[0]}",
            why="Accelerate takes the last one without a word, and other readers refuse the file",
            fix="remove all but one",
        ) from error
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or getattr(error, "reason", "not YAML")
        raise UsageError(
            f"{where}: {problem}",
            why="the file is not valid YAML",
            fix="correct that line, or make a new file: accel-fsdp config",
        ) from error
    if not isinstance(content, dict):
        raise UsageError(
            f"{path} holds no keys",
            why="an Accelerate YAML is a mapping such as distributed_type: FSDP",
            fix="make one: accel-fsdp config -o FILE",
        )
    content.source = text  # type: ignore[attr-defined]  # dump gives untouched lines back as they were
    content.is_json = path.suffix == ".json"  # type: ignore[attr-defined]  # how Accelerate chooses its parser
    return content
