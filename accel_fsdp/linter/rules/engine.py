"""The linter's engine: the input of rules, their findings, and repairs.

The other modules of this package are the rules.

Pure: no torch, no files, no printing. Lines and edits go through ruamel.yaml, which keeps comments.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from accel_fsdp.config import (
    BY_NAME,
    LONG_DTYPES,
    Edit,
    Engine,
    JobConfig,
    Method,
    apply,
    short_name,
)
from accel_fsdp.job import Job, clashes, from_arguments, from_yaml
from accel_fsdp.models import ModelFacts

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class ScriptFacts:
    """A parsed training script; it is never run."""

    name: str
    tree: ast.Module


@dataclass(frozen=True)
class Finding:
    """One problem.

    `key` is a dotted path, `line` and `column` count from 1; `edits` are the repair, if it is unambiguous. `milder` is
    the severity of a less harmful case.
    """

    key: str
    what: str
    why: str
    fix: str
    edits: tuple[Edit, ...] = ()
    code: str = ""
    severity: Severity = "error"
    line: int | None = None
    column: int | None = None
    milder: Severity | None = None


@dataclass(frozen=True, kw_only=True)
class Subject(JobConfig):
    """A YAML with the other inputs of the rules; missing ones are None, and rules about them report nothing.

    `args` are the training script's arguments, `starter` the word that their command line begins with (accelerate,
    torchrun, python), empty if they came as a mapping, and `launcher` the flags of that line that belong to
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

    def at(self, node: ast.AST, what: str, why: str, fix: str) -> Finding:
        """A finding in a line of the script."""
        name = self.script.name if self.script else ""
        return Finding("", f"{name}:{getattr(node, 'lineno', 0)}: {what}", why, fix)

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
    def for_sagemaker(self) -> bool:
        return self.values.get("compute_environment") == "AMAZON_SAGEMAKER"

    @property
    def uses_adapter(self) -> bool:
        return self.arg_on("use_peft", "load_in_4bit", "load_in_8bit") or self.arg("lora_r") is not None

    @property
    def resumes(self) -> bool:
        return str(self.arg("resume_from_checkpoint") or "false").lower() != "false"

    @property
    def trains_everything(self) -> bool:
        """Whether the arguments are known and ask for no adapter."""
        return self.args is not None and not self.uses_adapter

    @property
    def mixed(self) -> bool:
        """Whether 16-bit compute is used with float32 masters; an argument wins over the file."""
        return self.arg_on("bf16", "fp16") or self.top("mixed_precision") in ("bf16", "fp16")

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


def combined(subject: Subject, key: str, *names: str, edits: tuple[Edit, ...] = ()) -> Iterator[Finding]:
    """The matching rows of the table of combinations with these names, as findings about `key`."""
    for clash in clashes(subject.job):
        if clash.name in names and not (clash.mended and subject.uses_sft):
            yield Finding(key, clash.what, clash.why, clash.fix, edits)


Check = Callable[[Subject], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A check with its stable code; `pains` are the rows of `tests/known_issues.py` that it detects."""

    code: str
    severity: Severity
    check: Check
    pains: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return (self.check.__doc__ or "").strip().splitlines()[0]

    @property
    def explanation(self) -> str:
        lines = (self.check.__doc__ or "").strip().splitlines()
        return "\n".join(line.strip() for line in lines)


RULES: dict[str, Rule] = {}


def rule(code: str, severity: Severity = "error", pains: tuple[str, ...] = ()) -> Callable[[Check], Check]:
    """Registers a check under `code`; its docstring is its documentation."""

    def register(check: Check) -> Check:
        if code in RULES:
            raise ValueError(
                f"{check.__module__}.{check.__name__} takes {code}, which {RULES[code].check.__name__} has"
            )
        RULES[code] = Rule(code, severity, check, pains)
        return check

    return register


MISSPELT = ("AF102", "AF103", "AF104", "AF105")
"""The rules about names that nothing reads: those of the top level first, as they say what the sections are."""
OF_THE_ENGINE = ("AF101", "AF203")
"""The rules about `distributed_type`, which decides what the other keys mean."""
ENGINE_KEY = "distributed_type"
FOREIGN = "AF112"
"""The rule about files of other tools."""


def run(subject: Subject, rules: Mapping[str, Rule] = RULES) -> list[Finding]:
    """All findings of all rules, in the order of their codes.

    An obvious misspelling is one finding: the following rules see the corrected file. For another tool's file that is
    the only finding.
    """
    if (subject.other_tool or subject.for_sagemaker) and FOREIGN in rules:
        rules = {FOREIGN: rules[FOREIGN]}
    subjects = dict.fromkeys(rules, subject)
    corrections, engine_rules = (MISSPELT, OF_THE_ENGINE) if len(rules) > 1 else ((), ())
    for code in corrections:
        renamed = _with_names_corrected(
            subject, [edit for finding in RULES[code].check(subject) for edit in finding.edits]
        )
        if renamed is not subject:
            subjects |= {later: renamed for later in rules if later not in MISSPELT[: MISSPELT.index(code) + 1]}
        subject = renamed
    for code in engine_rules:
        edits = (edit for finding in RULES[code].check(subject) for edit in finding.edits)
        engines = [edit.value for edit in edits if edit.key == ENGINE_KEY]
        if engines:
            subject = replace(subject, values={**subject.values, ENGINE_KEY: engines[0]})
            subjects |= {key: subject for key in rules if key not in (*MISSPELT, *OF_THE_ENGINE)}
    return [
        replace(
            finding,
            edits=finding.edits if all(_fits(subjects[code], edit) for edit in finding.edits) else (),
            code=code,
            severity=finding.milder or rule.severity,
        )
        for code, rule in sorted(rules.items())
        for finding in rule.check(subjects[code])
    ]


def _with_names_corrected(subject: Subject, edits: Iterable[Edit]) -> Subject:
    """The subject with misspelt keys renamed by these edits."""
    values = dict(subject.values)
    for edit in (edit for edit in edits if edit.new_key):
        mapping = values.get(edit.section) if edit.section else values
        if isinstance(mapping, Mapping):
            names = (edit.key, short_name(edit.section, edit.key))
            renamed = {edit.new_key if key in names else key: value for key, value in mapping.items()}
            values = {**values, edit.section: renamed} if edit.section else renamed
    return replace(subject, values=values) if values != subject.values else subject


def _fits(subject: Subject, edit: Edit) -> bool:
    """Whether there is a mapping to edit, or none yet (AF106 reports a value that isn't a mapping)."""
    if not edit.section and edit.new_key:
        return edit.new_key not in subject.values
    return not edit.section or isinstance(subject.values.get(edit.section) or {}, Mapping)


def locate(findings: list[Finding], document: Any) -> list[Finding]:
    """Adds lines and columns from a ruamel.yaml document, which may spell a name differently from the findings."""
    misspelt = [edit for finding in findings if finding.code in MISSPELT for edit in finding.edits]
    spelt = {(edit.section, edit.new_key): edit.key for edit in misspelt}
    return [finding if finding.line else _at_key(finding, document, spelt) for finding in findings]


def _at_key(finding: Finding, document: Any, spelt: Mapping[tuple[str, str], str]) -> Finding:
    section, _, key = finding.key.rpartition(".")
    place = section if section in document else spelt.get(("", section), section)
    mapping = document.get(place) if section else document
    candidates = [(mapping, name) for name in (key, short_name(section, key), spelt.get((section, key)))]
    candidates.append((document, place))
    for parent, name in candidates:
        if name and hasattr(parent, "lc") and name in parent:
            line, column = parent.lc.key(name)
            return replace(finding, line=line + 1, column=column + 1)
    return finding


def repair(document: Any, findings: list[Finding]) -> int:
    """Applies all edits to a ruamel.yaml document in place, keeping order and comments; returns their number."""
    edits = tuple(dict.fromkeys(edit for finding in findings for edit in finding.edits))
    apply(document, edits)
    return len(edits)
