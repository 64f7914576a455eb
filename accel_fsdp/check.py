"""The linter's engine: what a rule sees, what it finds, and how findings are repaired. The rules are in `rules_*.py`.

Pure: no torch, no files, no printing. Values are those that Accelerate sees, which reads YAML 1.1 with PyYAML (there a
bare `no` is false and `1e8` is text); lines and edits go through ruamel.yaml, which keeps comments.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from accel_fsdp import editing
from accel_fsdp.combinations import Setup, clashes
from accel_fsdp.fields import BY_NAME, Engine, Field
from accel_fsdp.types import STATE_DICT_TYPES, STRATEGIES, CheckpointFacts, HereFacts, ModelFacts, ScriptFacts

TRUE_WORDS = ("true", "yes", "on", "y", "t", "1")
"""What Accelerate's `str_to_bool` takes for true."""
FALSE_WORDS = ("false", "no", "off", "n", "f", "0")

NULL_IS_ABSENT = frozenset({
    "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch", "fsdp_state_dict_type",
    "fsdp_ignored_modules",
})  # fmt: skip
"""FSDP keys that the launcher hands on only if they are not null."""
SWITCHES = ("use_dora", "load_in_8bit", "predict_with_generate")
"""The script's arguments that the table of combinations knows as flags."""

Severity = Literal["error", "warning", "note"]
DDP_TYPES = {f"MULTI_{device}" for device in ("CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")}


@dataclass(frozen=True)
class Edit:
    """One repair: `key` of `section` is renamed to `new_key` and gets `value`; dropped when neither is given.

    The section is empty for the top level, and made if it is missing.
    """

    section: str
    key: str
    value: Any = None
    new_key: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `key` is a dotted path, `line` counts from 1; `edits` the repair, if one is right.

    `milder` is the severity of a case that does less harm than its rule's others.
    """

    key: str
    what: str
    why: str
    fix: str
    edits: tuple[Edit, ...] = ()
    code: str = ""
    severity: Severity = "error"
    line: int | None = None
    milder: Severity | None = None


@dataclass(frozen=True)
class Subject:
    """What there is to look at; what wasn't given is None, and the rules about it stay silent.

    `values` as PyYAML reads them, `source` the text they were read from, `args` the training script's arguments,
    `starter` the word that their command line begins with (accelerate, torchrun, python), empty if they came as a
    mapping, and `launcher` the flags of that line that belong to `accelerate launch`. `absent` are keys of
    `deepspeed_config` whose file isn't there: "beside" if it is beside the YAML, "elsewhere" if not even its folder is.
    `ours` says that the script is train/sft.py, which mends what others suffer from.
    """

    values: Mapping[str, Any]
    args: Mapping[str, Any] | None = None
    model: ModelFacts | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    starter: str = ""
    checkpoint: CheckpointFacts | None = None
    script: ScriptFacts | None = None
    here: HereFacts | None = None
    launcher: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False

    @cached_property
    def engine(self) -> Engine:
        """The engine that Accelerate will choose."""
        kind = str(self.values.get("distributed_type"))
        if kind == "FSDP":
            first = self.fsdp_version == "1" or self.fsdp("fsdp_version") is None
            return Engine.FSDP1 if first else Engine.FSDP2
        if kind in DDP_TYPES:
            return Engine.DDP
        return {"DEEPSPEED": Engine.DEEPSPEED, "XLA": Engine.TPU}.get(kind, Engine.NONE)

    def section(self, name: str) -> Mapping[str, Any]:
        """A section with its keys under the names Accelerate uses; empty when it is absent or not a mapping."""
        content = self.values if not name else self.values.get(name)
        named = content if isinstance(content, Mapping) else {}
        return {full_name(name, str(key)): value for key, value in named.items()}

    def has(self, key: str) -> bool:
        """Whether an FSDP key is written in the file; null counts where it doesn't mean the same as no key."""
        section = self.section("fsdp_config")
        return key in section and (section[key] is not None or key not in NULL_IS_ABSENT)

    def fsdp(self, key: str) -> Any:
        """The value of an FSDP key, or what Accelerate takes when it is absent."""
        return self.section("fsdp_config")[key] if self.has(key) else BY_NAME["fsdp_config", key].default

    def on(self, key: str) -> bool:
        """A boolean FSDP key as Accelerate's environment variables carry it."""
        return str(self.fsdp(key)).lower() in TRUE_WORDS

    def spelt(self, key: str, otherwise: str) -> str:
        """The word that stands behind a top-level key in the file, where it has a line of its own."""
        found = re.search(rf"^{re.escape(key)}\s*:[ \t]*([^\s#'\"]+)", self.source, flags=re.MULTILINE)
        return found[1] if found else otherwise

    @property
    def fsdp_version(self) -> str:
        """The version that is meant, also where Accelerate can't read it, as 2.0 or v2; empty if not known."""
        found = re.fullmatch(r"(?:v|fsdp)?(\d+)(?:\.0*)?", str(self.fsdp("fsdp_version")).lower())
        return found[1] if found else ""

    def top(self, key: str) -> Any:
        """The value of a top-level key, or its default; a precision in small letters, as the launcher reads it."""
        value = self.values.get(key, BY_NAME["", key].default)
        return value.lower() if key == "mixed_precision" and isinstance(value, str) else value

    def arg(self, name: str) -> Any:
        """An argument of the training script; None when it is not given or no arguments are known."""
        return (self.args or {}).get(name)

    def arg_on(self, *names: str) -> bool:
        """Whether one of these boolean arguments is on."""
        return any(str(self.arg(name)).lower() in ("true", "1", "yes") for name in names)

    @property
    def strategy(self) -> str:
        """The name of FSDP1's strategy, in capitals, as given or by number."""
        text = str(self.fsdp("fsdp_sharding_strategy")).upper()
        return STRATEGIES.get(int(text), text) if text.isdecimal() else text

    @property
    def is_fsdp(self) -> bool:
        """Whether Accelerate will use FSDP."""
        return self.engine in (Engine.FSDP1, Engine.FSDP2)

    @property
    def uses_adapter(self) -> bool:
        """Whether the arguments ask for LoRA."""
        return self.arg_on("use_peft", "load_in_4bit", "load_in_8bit") or self.arg("lora_r") is not None

    @property
    def resumes(self) -> bool:
        """Whether the arguments resume a run."""
        return str(self.arg("resume_from_checkpoint") or "false").lower() != "false"

    @property
    def trains_everything(self) -> bool:
        """Whether the arguments are known and ask for no adapter."""
        return self.args is not None and not self.uses_adapter

    @property
    def state_dict_type(self) -> str:
        """The name of the state dict type, in capitals, as given or by number; empty where there is none."""
        text = str(self.fsdp("fsdp_state_dict_type") or "").upper()
        return STATE_DICT_TYPES.get(text, text)

    @property
    def full_state_dict(self) -> bool:
        """Whether checkpoints are gathered on rank 0: FSDP1's default, while FSDP2's is SHARDED."""
        kind = self.state_dict_type
        return kind == "FULL_STATE_DICT" or (not kind and self.engine is Engine.FSDP1)

    @property
    def sharded_state_dict(self) -> bool:
        """Whether every rank writes its part of a checkpoint."""
        kind = self.state_dict_type
        return kind == "SHARDED_STATE_DICT" or (not kind and self.engine is Engine.FSDP2)

    @property
    def mixed(self) -> bool:
        """Whether 16-bit compute stands over float32 masters; an argument wins over the file."""
        return self.arg_on("bf16", "fp16") or self.top("mixed_precision") in ("bf16", "fp16")

    @property
    def load_dtype(self) -> str:
        """The dtype of the loaded weights: that of the arguments, or the checkpoint's own; empty if unknown."""
        asked = str(self.arg("dtype") or self.arg("torch_dtype") or "auto").removeprefix("torch.")
        short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        return short.get(asked, asked) if asked != "auto" else self.model.dtype if self.model else ""

    @cached_property
    def setup(self) -> Setup:
        """The job as the table of what can't be combined knows it."""
        asked = self.arg_on("gradient_checkpointing", "activation_checkpointing")
        smooths = str(self.arg("label_smoothing_factor") or 0) not in ("0", "0.0")
        stage = str(self.section("deepspeed_config").get("zero_stage", 2))
        return Setup(
            self.engine,
            "qlora" if self.arg_on("load_in_4bit") else "lora" if self.uses_adapter else "full",
            str(self.arg("optim") or ""),
            "engine" if self.on("fsdp_activation_checkpointing") else "script" if asked else "none",
            stage=int(stage) if stage.isdecimal() else None,
            strategy=self.strategy,
            wrap_policy=str(self.fsdp("fsdp_auto_wrap_policy")).upper(),
            state_dict=self.state_dict_type,
            flags=frozenset(name for name in SWITCHES if self.arg_on(name))
            | ({"label_smoothing_factor"} if smooths else set()),
            base=self.model.quant_method if self.model else "",
        )

    def number(self, key: str) -> int:
        """A whole number from the top level; 0 where it is none."""
        value = self.top(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    @property
    def ranks_here(self) -> int:
        """Processes on each machine; 0 if the file doesn't say."""
        return self.number("num_processes") // (self.number("num_machines") or 1)


def combined(subject: Subject, key: str, *names: str, edits: tuple[Edit, ...] = ()) -> Iterator[Finding]:
    """What the table of combinations says of these rows, as findings about `key`."""
    for one in clashes(subject.setup):
        if one.name in names and not (one.mended and subject.ours):
            yield Finding(key, one.what, one.why, one.fix, edits)


Check = Callable[[Subject], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A check with its stable code; `fixed_in` names the release of a library that made it moot.

    `pains` are the rows of `pains.PAINS` that it sees.
    """

    code: str
    severity: Severity
    check: Check
    fixed_in: str = ""
    pains: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The first line of the docstring."""
        return (self.check.__doc__ or "").strip().splitlines()[0]

    @property
    def explanation(self) -> str:
        """The whole docstring."""
        lines = (self.check.__doc__ or "").strip().splitlines()
        return "\n".join(line.strip() for line in lines)


RULES: dict[str, Rule] = {}


def rule(
    code: str, severity: Severity = "error", fixed_in: str = "", pains: tuple[str, ...] = ()
) -> Callable[[Check], Check]:
    """Registers a check under `code`; its docstring is its documentation, `pains` the rows it covers."""

    def register(check: Check) -> Check:
        assert code not in RULES, code
        RULES[code] = Rule(code, severity, check, fixed_in, pains)
        return check

    return register


PREFIXES = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo_"}
"""What Accelerate's launcher looks for at the start of a section's keys before it adds the prefix by itself."""


def full_name(section: str, key: str) -> str:
    """The name under which Accelerate looks for a key: inside three sections the prefix may be left out."""
    start = PREFIXES.get(section, "")
    return key if key.startswith(start) else f"{start.removesuffix('_')}_{key}"


def short_name(section: str, key: str) -> str:
    """A key without the prefix that may be left out."""
    start = PREFIXES.get(section)
    return key.removeprefix(f"{start.removesuffix('_')}_") if start else key


def known_fields(section: str) -> dict[str, Field]:
    """The fields of one section by key."""
    return {key: field for (place, key), field in BY_NAME.items() if place == section}


MISSPELT = ("AF102", "AF103", "AF104", "AF105")
"""The rules about names that nothing reads: those of the top level first, as they say what the sections are."""


def run(subject: Subject, rules: Mapping[str, Rule] = RULES) -> list[Finding]:
    """All findings of all rules, in the order of their codes.

    What is surely a misspelling is one finding: the rules that follow see the file as it was meant.
    """
    seen = dict.fromkeys(rules, subject)
    for code in MISSPELT:
        renamed = _as_meant(subject, [one for found in RULES[code].check(subject) for one in found.edits])
        seen |= {other: renamed for other in rules if other not in MISSPELT[: MISSPELT.index(code) + 1]}
        subject = renamed
    return [
        replace(
            found,
            edits=found.edits if all(_fits(seen[code], edit) for edit in found.edits) else (),
            code=code,
            severity=found.milder or one.severity,
        )
        for code, one in sorted(rules.items())
        for found in one.check(seen[code])
    ]


def _as_meant(subject: Subject, edits: Iterable[Edit]) -> Subject:
    """The subject with new names for misspelt ones, each in its place."""
    values = dict(subject.values)
    for edit in (edit for edit in edits if edit.new_key):
        place = values.get(edit.section) if edit.section else values
        if isinstance(place, Mapping):
            names = (edit.key, short_name(edit.section, edit.key))
            renamed = {edit.new_key if key in names else key: value for key, value in place.items()}
            values = {**values, edit.section: renamed} if edit.section else renamed
    return replace(subject, values=values) if values != subject.values else subject


def _fits(subject: Subject, edit: Edit) -> bool:
    """Whether there is a mapping to edit, or room for one (AF106 tells of the other case)."""
    if not edit.section and edit.new_key:
        return edit.new_key not in subject.values
    return not edit.section or isinstance(subject.values.get(edit.section) or {}, Mapping)


def locate(findings: list[Finding], document: Any) -> list[Finding]:
    """Adds line numbers from a ruamel.yaml document, which may spell a name otherwise than the findings do."""
    misspelt = [edit for found in findings if found.code in MISSPELT for edit in found.edits]
    spelt = {(edit.section, edit.new_key): edit.key for edit in misspelt}
    return [replace(found, line=_line(document, found.key, spelt)) for found in findings]


def _line(document: Any, dotted: str, spelt: Mapping[tuple[str, str], str]) -> int | None:
    section, _, key = dotted.rpartition(".")
    place = section if section in document else spelt.get(("", section), section)
    inside = document.get(place) if section else document
    for candidate in (key, short_name(section, key), spelt.get((section, key))):
        if hasattr(inside, "lc") and candidate in inside:
            return int(inside.lc.key(candidate)[0]) + 1
    if section and place in document:
        return int(document.lc.key(place)[0]) + 1
    return None


def repair(document: Any, findings: list[Finding]) -> int:
    """Applies all edits to a ruamel.yaml document in place, keeping order and comments; returns how many."""
    edits = tuple(dict.fromkeys(edit for found in findings for edit in found.edits))
    apply(document, edits)
    return len(edits)


def apply(document: Any, edits: Iterable[Edit]) -> None:
    """Applies edits to a ruamel.yaml document in place and in order; comments stay (see `editing`)."""
    for edit in edits:
        _apply(document, edit)


def as_scalar(value: Any) -> Any:
    """Text in quotes where PyYAML would read it as something else, such as no, on or 1e8; other values as they are."""
    import yaml
    from ruamel.yaml.scalarstring import SingleQuotedScalarString

    try:
        same = not isinstance(value, str) or yaml.safe_load(value) == value
    except yaml.YAMLError:  # an unfinished quote, or a control character, which the emitter escapes by itself
        same = not value.isprintable()
    return value if same else SingleQuotedScalarString(value)


def _apply(document: Any, edit: Edit) -> None:
    place = (document.get(edit.section) or {}) if edit.section else document
    key = edit.key if edit.key in place else short_name(edit.section, edit.key)
    if edit.new_key and key in place:
        editing.rename(place, key, edit.new_key)
        key = edit.new_key
    if edit.value is not None:
        editing.put(document, edit.section, key if key in place else edit.new_key or edit.key, as_scalar(edit.value))
    elif not edit.new_key and key in place:
        editing.drop(document, edit.section, key)
