"""The Accelerate YAML: from answers to text, and back from a file with its comments and unknown keys."""

import io
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp import __version__
from accel_fsdp.check import as_scalar
from accel_fsdp.errors import UsageError
from accel_fsdp.questions import applying, is_ddp
from accel_fsdp.types import STRATEGIES, Answers

if TYPE_CHECKING:
    from ruamel.yaml import YAML

HEADER = "# Made by accel-fsdp"
"""How a comment of this tool begins."""


def to_mapping(answers: Answers) -> dict[str, Any]:
    """The YAML's content: the keys that Accelerate 1.15 reads for this engine and no others."""
    ddp = is_ddp(answers.fsdp_version, answers.strategy)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if ddp else "FSDP",
        "mixed_precision": answers.mixed_precision,
        "num_machines": answers.num_machines,
        "num_processes": answers.num_processes,
        **_rendezvous(answers),
        **({} if ddp else {"fsdp_config": _fsdp_config(answers), **_mesh(answers)}),
    }


def _fsdp_config(answers: Answers) -> dict[str, Any]:
    return {
        "fsdp_version": answers.fsdp_version,
        **(_fsdp1_only(answers) if answers.fsdp_version == 1 else _fsdp2_only(answers)),
        **_wrapping(answers),
        "fsdp_offload_params": answers.cpu_offload,
        "fsdp_activation_checkpointing": answers.activation_checkpointing,
        "fsdp_state_dict_type": answers.state_dict_type,
        "fsdp_cpu_ram_efficient_loading": answers.ram_efficient_loading,
    }


def _fsdp1_only(answers: Answers) -> dict[str, Any]:
    return {
        "fsdp_sharding_strategy": answers.strategy,
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
    }


def _fsdp2_only(answers: Answers) -> dict[str, Any]:
    return {"fsdp_reshard_after_forward": STRATEGIES[answers.strategy] in ("FULL_SHARD", "HYBRID_SHARD")}


def _wrapping(answers: Answers) -> dict[str, Any]:
    policy: dict[str, Any] = {"fsdp_auto_wrap_policy": answers.wrap_policy}
    if answers.wrap_policy == "TRANSFORMER_BASED_WRAP":
        policy["fsdp_transformer_layer_cls_to_wrap"] = ",".join(answers.layer_class)
    if answers.wrap_policy == "SIZE_BASED_WRAP":
        policy["fsdp_min_num_params"] = answers.min_num_params
    return policy


def _mesh(answers: Answers) -> dict[str, Any]:
    """FSDP2 spells hybrid sharding as a device mesh: one replica per machine, shards inside each."""
    if answers.fsdp_version == 1 or not STRATEGIES[answers.strategy].startswith("HYBRID"):
        return {}
    shard = answers.num_processes // answers.num_machines
    return {
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": answers.num_machines,
            "parallelism_config_dp_shard_size": shard,
        }
    }


def _rendezvous(answers: Answers) -> dict[str, Any]:
    if answers.num_machines == 1:
        return {}
    return {"main_process_ip": answers.main_process_ip, "main_process_port": answers.main_process_port}


def to_text(answers: Answers) -> str:
    """The whole file: a header that says how it was made and how to launch it, then the YAML. Deterministic."""
    return "\n".join([*_header(answers), dump({key: as_scalar(value) for key, value in to_mapping(answers).items()})])


def _header(answers: Answers) -> list[str]:
    strategy = f"{answers.strategy} ({STRATEGIES[answers.strategy]})"
    engine = "plain DDP" if is_ddp(answers.fsdp_version, answers.strategy) else f"FSDP{answers.fsdp_version}"
    return [
        f"# {answers.model}, {answers.method} training, {engine}, strategy {strategy}.",
        f"{HEADER} {__version__}:",
        f"#   {command_line(answers)}",
    ]


def command_line(answers: Answers) -> str:
    """The non-interactive command that writes the same YAML."""
    words = ["accel-fsdp", "config", "--yes"]
    for question in applying(answers):
        words += [question.flag, _flag_text(getattr(answers, question.field))]
    return shlex.join(words)


def _flag_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def launch_line(answers: Answers, path: str) -> str:
    """The command that trains with the YAML at `path`."""
    words = ["accelerate", "launch", "--config_file", path]
    if answers.num_machines > 1:
        words += ["--machine_rank", "0"]
    words += ["train/sft.py", "--model_name_or_path", answers.model]
    words += ["--dataset_name", "train/data/fsdp_chat", "--output_dir", "runs/first"]
    return shlex.join(words + (["--use_peft"] if answers.method == "lora" else []))


def dump(document: Any, indent: int = 2) -> str:
    """The YAML text of a mapping, or of what `load` returned with its comments, order and quotes."""
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


def load(path: Path) -> dict[str, Any]:
    """Reads an Accelerate YAML with ruamel.yaml, so that comments, order and unknown keys survive a later dump.

    Raises:
        UsageError: no such file, not YAML (with the line), or not a mapping.
    """
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        content = _round_trip().load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot read {path}: {reason}",
            why="it decides how the job runs",
            fix="make one: accel-fsdp config -o FILE",
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
    return content
