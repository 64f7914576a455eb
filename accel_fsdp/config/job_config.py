"""Typed access to an Accelerate YAML: engine, sharding, precision, processes.

Pure. Values are those that Accelerate gets, which reads YAML 1.1 with PyYAML (there a bare `no` is false and `1e8` is
text).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import yaml

from accel_fsdp.config.schema import AXES, BY_NAME, TRUE_WORDS, full_name, size_key
from accel_fsdp.config.vocabulary import (
    DDP_TYPES,
    DISTRIBUTED_TYPES,
    MULTI_CPU,
    STATE_DICT_TYPES,
    STRATEGIES,
    TORCH_STRATEGIES,
    Engine,
)

OTHER_TOOLS = {
    "Axolotl": {"base_model", "datasets", "sequence_len", "micro_batch_size", "num_epochs", "adapter", "val_set_size"},
    "LLaMA-Factory": {"finetuning_type", "stage", "template", "cutoff_len", "dataset", "dataset_dir", "do_train"},
    "a training script": {
        "model_name_or_path", "dataset_name", "output_dir", "learning_rate", "num_train_epochs", "max_steps",
        "per_device_train_batch_size", "gradient_accumulation_steps",
    },
    "transformers' DistributedConfig": {"fsdp_size", "tp_size", "ep_size", "fsdp_mixed_precision", "fsdp_cpu_offload"},
}  # fmt: skip
"""Other tools with YAML settings, often with an `fsdp_config`, and the top-level keys that identify each."""

NULL_IS_ABSENT = frozenset({
    "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch", "fsdp_state_dict_type",
    "fsdp_ignored_modules",
})  # fmt: skip
"""FSDP keys that the launcher hands on only if they are not null."""

LAYER_CLASSES = "fsdp_transformer_layer_cls_to_wrap"
READ_UNDER = {LAYER_CLASSES: "TRANSFORMER_BASED_WRAP", "fsdp_min_num_params": "SIZE_BASED_WRAP"}
"""FSDP keys that Accelerate reads under only one wrap policy."""

Place: TypeAlias = tuple[int, int]
"""A line and a column of a file, counted from 1."""


@dataclass(frozen=True)
class JobConfig:
    """One YAML. `values` as PyYAML reads them, `source` the text they were read from.

    `absent` are keys of `deepspeed_config` whose file isn't there: "beside" if it is beside the YAML, "elsewhere" if
    not even its folder is. `doubled` are the keys that occur more than once, each with its places.
    """

    values: Mapping[str, Any]
    source: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    doubled: Mapping[str, list[Place]] = field(default_factory=dict)

    @cached_property
    def engine(self) -> Engine:
        kind = str(self.values.get("distributed_type"))
        if kind == DISTRIBUTED_TYPES[Engine.FSDP1]:
            is_fsdp1 = self.fsdp_version == "1" or self.fsdp("fsdp_version") is None
            return Engine.FSDP1 if is_fsdp1 else Engine.FSDP2
        if kind in DDP_TYPES:
            return Engine.DDP
        return {DISTRIBUTED_TYPES[engine]: engine for engine in (Engine.DEEPSPEED, Engine.TPU)}.get(kind, Engine.NONE)

    @cached_property
    def other_tool(self) -> str:
        """The tool that the configuration belongs to, if it isn't `accelerate launch`; else empty."""
        if self.values.get("compute_environment") == "AMAZON_SAGEMAKER":
            return "SageMaker"
        marks = {tool: len(keys & self.values.keys()) for tool, keys in OTHER_TOOLS.items()}
        if isinstance(self.values.get("fsdp"), str):  # the form that TrainingArguments use
            marks["a training script"] += 2
        likely = max(marks, key=lambda tool: marks[tool])
        is_accelerate = "distributed_type" in self.values or "compute_environment" in self.values
        return "" if is_accelerate or marks[likely] < 2 else likely

    def section(self, name: str) -> Mapping[str, Any]:
        """A section with its keys under the names Accelerate uses; empty when it is absent or not a mapping."""
        if name not in self._sections:
            content = self.values if not name else self.values.get(name)
            mapping = content if isinstance(content, Mapping) else {}
            self._sections[name] = {full_name(name, str(key)): value for key, value in mapping.items()}
        return self._sections[name]

    @cached_property
    def _sections(self) -> dict[str, Mapping[str, Any]]:
        """Caches sections, because rules ask for the same ones repeatedly."""
        return {}

    def written_name(self, section: str, key: str) -> str:
        """A key of a section as the file writes it, with its prefix or without."""
        content = self.values.get(section)
        names = map(str, content) if isinstance(content, Mapping) else ()
        return next((name for name in names if full_name(section, name) == key), key)

    def has(self, key: str) -> bool:
        """Whether an FSDP key is in the file; null counts if it differs from a missing key."""
        section = self.section("fsdp_config")
        return key in section and (section[key] is not None or key not in NULL_IS_ABSENT)

    def fsdp(self, key: str) -> Any:
        return self.section("fsdp_config")[key] if self.has(key) else BY_NAME["fsdp_config", key].default

    @property
    def wrap_policy(self) -> str:
        """The wrap policy in capitals, NO_WRAP without one."""
        return str(self.fsdp("fsdp_auto_wrap_policy")).upper()

    def reads(self, key: str) -> bool:
        """Whether Accelerate reads an FSDP key under the wrap policy of the file."""
        return not self.is_fsdp or READ_UNDER.get(key, self.wrap_policy) == self.wrap_policy

    @property
    def mesh(self) -> dict[str, Any]:
        """The sizes of the device mesh by axis as they are written, 1 for missing ones; quoted ones count too."""
        section = self.section("parallelism_config")
        written = {axis: section.get(size_key(axis), 1) for axis in AXES}
        return {axis: int(s) if isinstance(s, str) and s.isdecimal() else s for axis, s in written.items()}

    @property
    def layer_classes(self) -> tuple[str, ...]:
        """The layer classes that the file names for Accelerate to wrap; none under another wrap policy."""
        names = self.fsdp(LAYER_CLASSES) if self.reads(LAYER_CLASSES) else None
        return tuple(filter(None, map(str.strip, names.split(",")))) if isinstance(names, str) else ()

    def on(self, key: str) -> bool:
        return str(self.fsdp(key)).lower() in TRUE_WORDS

    def spelt(self, key: str, otherwise: Any, section: str = "") -> Any:
        """A value as spelled in the file, before YAML makes it a number or a boolean: text, or a list of texts."""
        return self._as_text.section(section).get(key, otherwise)

    @cached_property
    def _as_text(self) -> "JobConfig":
        content = yaml.load(self.source, yaml.BaseLoader)
        return JobConfig(content if isinstance(content, dict) else {})

    @property
    def fsdp_version(self) -> str:
        """The intended version, also in a form that Accelerate can't read, such as 2.0 or v2; empty if unknown."""
        match = re.fullmatch(r"(?:v|fsdp)?(\d+)(?:\.0*)?", str(self.fsdp("fsdp_version")).lower())
        return match[1] if match else ""

    def top(self, key: str) -> Any:
        """The value of a top-level key, or its default; a precision in small letters, as the launcher reads it."""
        value = self.values.get(key, BY_NAME["", key].default)
        return value.lower() if key == "mixed_precision" and isinstance(value, str) else value

    @property
    def strategy(self) -> str:
        text = str(self.fsdp("fsdp_sharding_strategy")).upper()
        return STRATEGIES.get(int(text), text) if text.isdecimal() else TORCH_STRATEGIES.get(text, text)

    @property
    def is_fsdp(self) -> bool:
        return self.engine in (Engine.FSDP1, Engine.FSDP2)

    @property
    def state_dict_type(self) -> str:
        """The name of the state dict type in capitals, from its name or number; empty without one."""
        text = str(self.fsdp("fsdp_state_dict_type") or "").upper()
        return STATE_DICT_TYPES.get(text, text)

    @property
    def full_state_dict(self) -> bool:
        """Whether checkpoints are gathered on rank 0: FSDP1's default, while FSDP2's is SHARDED."""
        kind = self.state_dict_type
        return kind == "FULL_STATE_DICT" or (not kind and self.engine is Engine.FSDP1)

    @property
    def sharded_state_dict(self) -> bool:
        kind = self.state_dict_type
        return kind == "SHARDED_STATE_DICT" or (not kind and self.engine is Engine.FSDP2)

    def number(self, key: str) -> int:
        """A top-level integer; 0 if it isn't one."""
        value = self.top(key)
        value = int(value) if isinstance(value, str) and value.isdecimal() else value
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    @property
    def is_alone(self) -> bool:
        """Whether the launcher starts one process, regardless of `num_processes`."""
        return str(self.values.get("distributed_type")) in ("NO", "False") and not self.by_mpirun

    @property
    def by_mpirun(self) -> bool:
        """Whether the launcher starts the processes with mpirun, which it does only for NO and MULTI_CPU."""
        return self.section("mpirun_config").get("mpirun_hostfile") is not None

    @property
    def processes(self) -> int:
        """The processes that the launcher starts in all; 0 if the file doesn't say."""
        return 1 if self.is_alone else self.number("num_processes")

    @property
    def ranks_here(self) -> int:
        """Processes on each machine; 0 if the file doesn't say."""
        return 1 if self.is_alone else self.processes // (self.number("num_machines") or 1)

    @property
    def off_gpus(self) -> str:
        """The purpose of the file, if it isn't for GPUs with an engine that this package covers; else empty.

        Accelerate's launcher reads `use_cpu` only where it starts the script directly.
        """
        kind = str(self.values.get("distributed_type"))
        if self.values.get("compute_environment") == "AMAZON_SAGEMAKER":
            return "SageMaker"
        if kind == MULTI_CPU or (self.is_alone and str(self.values.get("use_cpu")).lower() in TRUE_WORDS):
            return "CPUs"
        return {DISTRIBUTED_TYPES[Engine.TPU]: "TPUs", "MEGATRON_LM": "Megatron-LM"}.get(kind, "")
