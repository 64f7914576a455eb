"""YAML texts and facts that the linter's tests share."""

import ast
from pathlib import Path
from typing import Any

import yaml

from accel_fsdp import command_line, linter
from accel_fsdp.linter.rules import Finding, ScriptFacts, Subject
from accel_fsdp.linter.rules import run as run_rules
from accel_fsdp.models import LayerClass, ModelFacts

LLAMA = ModelFacts(
    name="llama",
    model_type="llama",
    parameters=1000,
    wrap_classes=(LayerClass("LlamaDecoderLayer", 4, 200),),
    wrap_reason="",
    classes=frozenset({"LlamaDecoderLayer", "Linear", "Embedding"}),
    largest_layer_parameters=200,
)
TOP = "distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 2\n"
WRAP = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
V1 = TOP + "fsdp_config:\n  fsdp_version: 1\n" + WRAP
V2 = TOP + "fsdp_config:\n  fsdp_version: 2\n" + WRAP
DDP = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n"
DS = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 2\ndeepspeed_config:\n"
SIZE = TOP + "fsdp_config:\n  fsdp_version: 1\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
MESH = "parallelism_config:\n  parallelism_config_dp_replicate_size: 1\n"
SHARD = "  parallelism_config_dp_shard_size: {}\n"


def subject(text: str, args: str = "", **more: Any) -> Subject:
    """What the rules see of a YAML text and a command line; no libraries' versions unless they are given."""
    given = command_line.parse_command_line(args.split()) if args else None
    return Subject(yaml.safe_load(text), source=text, args=given, **more)


def script(text: str) -> ScriptFacts:
    return ScriptFacts("train.py", ast.parse(text))


def findings(text: str, folder: Path, **options: Any) -> list[Finding]:
    """The findings of a file with this text."""
    (path := folder / "checked.yaml").write_text(text)
    return linter.lint(path, linter.LintOptions(**options))


def repaired(text: str, folder: Path) -> str:
    """What `--fix` makes of a file with this text."""
    findings(text, folder, fix=True)
    return (folder / "checked.yaml").read_text()


def finding(code: str, text: str, folder: Path) -> Finding:
    """The only finding of a rule."""
    (only,) = (finding for finding in findings(text, folder) if finding.code == code)
    return only


def codes_of(subject: Subject) -> set[str]:
    return {finding.code for finding in run_rules(subject)}
