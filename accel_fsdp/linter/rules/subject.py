"""The input of the rules: a YAML with what else is known of the job. Pure."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from accel_fsdp.config import BY_NAME, LONG_DTYPES, Engine, JobConfig, Method
from accel_fsdp.job import Job, from_arguments, from_yaml
from accel_fsdp.models import ModelFacts


@dataclass(frozen=True)
class ScriptFacts:
    """A parsed training script; it is never run."""

    name: str
    tree: ast.Module


@dataclass(frozen=True, kw_only=True)
class Subject(JobConfig):
    """A YAML with the other inputs of the rules; missing ones are None, and rules about them report nothing.

    `args` are the training script's arguments, `starter` the word that their command line begins with (accelerate,
    accel-fsdp, torchrun, python), empty if they came as a mapping, and `launcher` the flags of that line that belong to
    `accelerate launch`. `uses_sft` means that the script is train/sft.py, which works around bugs;
    `names_script`: the arguments are a command line with its script.
    """

    args: Mapping[str, Any] | None = None
    model: ModelFacts | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    starter: str = ""
    script: ScriptFacts | None = None
    launcher: Mapping[str, Any] = field(default_factory=dict)
    uses_sft: bool = False
    names_script: bool = False

    def older(self, package: str, version: str) -> bool:
        """Whether the installed version of a package is older."""
        from packaging.version import Version

        installed = self.versions.get(package)
        return installed is not None and Version(installed) < Version(version)

    def arg(self, name: str) -> Any:
        """An argument of the training script; None if it or all arguments are missing."""
        return (self.args or {}).get(name)

    def arg_on(self, *names: str) -> bool:
        return any(from_arguments.is_on(self.arg(name)) for name in names)

    def started_with(self, flag: str) -> bool:
        """Whether `accelerate launch` starts the job, with this flag on."""
        return self.starter == "accelerate" and from_arguments.is_on(self.launcher.get(flag))

    @property
    def experts(self) -> int:
        """The expert-parallel size of train/sft.py; 1 by default."""
        return from_arguments.expert_parallel_size(self.args or {}) if self.uses_sft else 1

    @property
    def axes(self) -> Mapping[str, int]:
        """The sizes of the mesh, with expert parallelism as "ep"; 1 for a value that is not a positive number."""
        return {**from_yaml.mesh_of(self), "ep": self.experts}

    @property
    def by_transformers(self) -> bool:
        """Whether train/sft.py has transformers shard the model: Accelerate has no tensor or expert parallelism."""
        return self.uses_sft and self.job.layout.is_by_transformers

    @property
    def lacks_processes(self) -> bool:
        """Whether `accelerate launch` stops because neither file nor command line gives the number of processes.

        Accelerate fills it in for 'NO' in quotes, and one process needs no number where the key is null.
        """
        number = self.values.get("num_processes", 1 if self.values.get("distributed_type") == "NO" else -1)
        stops = number == -1 or (number is None and self.engine is not Engine.NONE)
        return stops and "num_processes" not in self.launcher

    @property
    def has_engine(self) -> bool:
        """Whether `distributed_type` is one that Accelerate knows; a bare NO, which YAML reads as false, counts."""
        kind = self.values.get("distributed_type")
        return kind is False or (kind is not None and BY_NAME["", "distributed_type"].takes(str(kind)))

    @property
    def uses_adapter(self) -> bool:
        by_rank = any(name.startswith("lora_") and value is not None for name, value in (self.args or {}).items())
        return by_rank or self.arg_on("use_peft", "load_in_4bit", "load_in_8bit")

    @property
    def trains_everything(self) -> bool:
        """Whether the arguments are known and ask for no adapter."""
        return self.args is not None and not self.uses_adapter

    @property
    def asked_precision(self) -> str:
        """The mixed precision that the arguments ask for, which wins over the file; empty if they ask for none."""
        return next((name for name in ("bf16", "fp16") if self.arg_on(name)), "")

    @property
    def precision(self) -> str:
        return self.asked_precision or str(self.top("mixed_precision") or "no")

    @property
    def asked_dtype(self) -> str:
        """The dtype that the arguments load the weights in; auto by default."""
        dtype = str(self.arg("dtype") or self.arg("torch_dtype") or "auto").removeprefix("torch.")
        return LONG_DTYPES.get(dtype, dtype)

    @property
    def load_dtype(self) -> str:
        """The dtype of the loaded weights: that of the arguments, or the checkpoint's own; empty if unknown."""
        dtype = self.asked_dtype
        return dtype if dtype != "auto" else self.model.dtype if self.model else ""

    @cached_property
    def job(self) -> Job:
        """The job that the file and the arguments describe."""
        method: Method = "qlora" if self.arg_on("load_in_4bit") else "lora" if self.uses_adapter else "full"
        job = from_yaml.job_of(self, self.args)
        base = self.model.quant_method if self.model else ""
        flags = job.flags | ({"load_in_8bit"} if self.model and self.model.quantized == 8 else set())
        layout = replace(job.layout, experts=self.experts)
        job = replace(job, layout=layout, recipe=replace(job.recipe, method=method), base=base, flags=flags)
        return replace(job, embeddings=self.model.embeddings, scalars=self.model.scalars) if self.model else job
