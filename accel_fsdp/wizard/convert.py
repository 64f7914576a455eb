"""Converts a YAML: the answers in it, changed answers, the same file with their keys, and what is lost on the way.

Pure. The meanings are those of Accelerate 1.15, and the tests compare them with its parser and plugins. A key without
effect in the old file gets none in the new one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accel_fsdp.command_line import parse_command_line
from accel_fsdp.config import (
    BY_NAME,
    DATA_AXES,
    DEFAULT_ZERO_STAGE,
    ENGINE_NAMES,
    EXPERT_FIELD,
    EXPERT_FLAG,
    FALSE_WORDS,
    HYBRID,
    MULTI_CPU,
    NULL_IS_ABSENT,
    OTHER_AXES,
    RETIRED,
    STRATEGIES,
    TARGETS,
    TRUE_WORDS,
    ZERO_STAGES,
    Edit,
    Engine,
    Field,
    JobConfig,
    Kind,
    MigrationTarget,
    apply,
    deepspeed_name,
    full_name,
    header,
    made_with,
    script_arguments,
    yaml_file,
)  # fmt: skip
from accel_fsdp.errors import UsageError
from accel_fsdp.units import counted
from accel_fsdp.wizard.answers import Answers, engine_of
from accel_fsdp.wizard.questions import QUESTIONS
from accel_fsdp.wizard.to_yaml import SECTIONS, Place, flat_mapping

MESH = "parallelism_config"
UNKNOWN = (None, -1)
"""Values that leave a key to the model, to the machine or to the command line; -1 processes are one for each GPU."""
KEYS = {question.key: question.field for question in QUESTIONS if question.key}


def to_flags(job: JobConfig) -> dict[str, str]:
    """The flags that would produce this YAML: the inverse of `to_yaml.to_mapping`, as far as the wizard has questions.

    A missing key means Accelerate's default, not the wizard's. Model, method, machine and length are not in a YAML but
    read from the command in our own header, if there is one.
    """
    engine = job.engine
    if job.other_tool or engine is Engine.NONE:
        kind = f"distributed_type {job.values.get('distributed_type')} can't be re-edited"
        raise UsageError(
            f"this is a configuration of {job.other_tool}, not of Accelerate" if job.other_tool else kind,
            why="the wizard knows FSDP, DDP, DeepSpeed and TPU",
            fix="make a new file: accel-fsdp config -o FILE",
        )
    flags = {**_header_flags(job.source, ENGINE_NAMES[engine]), "engine": ENGINE_NAMES[engine]}
    for (section, key), field in KEYS.items():
        if engine in BY_NAME[section, key].engines:
            value = effective(job, section, key)
            if value not in UNKNOWN:
                flags[field] = class_names(value) if BY_NAME[section, key].kind is Kind.NAMES else str(value)
    if engine is Engine.FSDP1:
        flags["fsdp_version"] = "1"
    if engine is Engine.FSDP2:
        flags |= {"fsdp_version": "2"} | _mesh(job)
    if engine is Engine.DDP:  # as DDP saves and loads
        flags |= {"state_dict_type": "FULL_STATE_DICT", "ram_efficient_loading": "False"}
    if engine is Engine.DEEPSPEED:
        flags |= _deepspeed(job)
    if engine is Engine.TPU:
        flags["activation_checkpointing"] = str(job.on("fsdp_xla_fsdp_grad_ckpt"))
    return flags


def _deepspeed(job: JobConfig) -> dict[str, str]:
    """Offload and loading; a stage in DeepSpeed's own file counts as 3, as Accelerate takes it."""
    section = job.section("deepspeed_config")
    stage = str(effective(job, "deepspeed_config", "zero_stage"))
    stage = stage if stage in ("0", "1", "2") else "3"
    devices = [("offload_optimizer_device", stage != "0"), ("offload_param_device", stage == "3")]
    used = {str(section.get(key, "none")).lower() for key, is_read in devices if is_read}
    builds = stage == "3" and str(section.get("zero3_init_flag", True)).lower() in TRUE_WORDS
    return {"cpu_offload": str(bool({"cpu", "nvme"} & used)), "ram_efficient_loading": str(builds)}


def _mesh(job: JobConfig) -> dict[str, str]:
    """The strategy of FSDP2, and the sizes of its mesh beside the shards; experts are in the launch line."""
    copies, shards = (job.mesh[axis] for axis in DATA_AXES)
    hybrid = job.section(MESH) and (copies != 1 or shards == job.number("num_processes"))
    strategy = (1 if job.on("fsdp_reshard_after_forward") else 2) + (3 if hybrid else 0)
    experts = parse_command_line(script_arguments(job.source)).get(EXPERT_FIELD, 1)
    sizes = {"tp": job.mesh["tp"] if job.section(MESH) else 1, "ep": experts}
    flags = {name: str(size) for name, size in sizes.items() if str(size) != "1"}
    return flags | {"strategy": str(strategy)} | ({"dp_replicate": str(copies)} if hybrid else {})


def effective(job: JobConfig, section: str, key: str) -> Any:
    """The value that Accelerate uses for a key, or for its absence; an unreadable value is returned as written."""
    content, field = job.section(section), BY_NAME[section, key]
    value = content.get(key)
    if value is None and key in content and section == "fsdp_config" and key not in NULL_IS_ABSENT:
        return str(None)  # the text to which the launcher converts it
    if key == "fsdp_state_dict_type":
        return job.state_dict_type or ("FULL_STATE_DICT" if job.full_state_dict else "SHARDED_STATE_DICT")
    if key == "fsdp_sharding_strategy":
        return next((number for number, name in STRATEGIES.items() if name == job.strategy), value)
    if key == "zero_stage" and value is None and "deepspeed_config_file" not in content:
        return DEFAULT_ZERO_STAGE
    if key == "mixed_precision" and value is False:  # a bare no
        return "no"
    if value is None:
        return field.default
    if field.kind is Kind.CHOICE and field.key == "fsdp_auto_wrap_policy":
        return str(value).upper()
    return str(value).lower() in TRUE_WORDS if field.kind is Kind.BOOL and is_readable(field, value) else value


def is_readable(field: Field, value: Any) -> bool:
    """Whether Accelerate can read a value; a bare no is false, and no choice."""
    if field.kind is Kind.NAMES:
        return bool(value == class_names(value))
    if field.kind is Kind.INT:  # the launcher converts text
        return str(value).isdecimal()
    return field.accepts(value) and not (field.kind is Kind.CHOICE and value is False)


def class_names(value: Any) -> str:
    """Layer classes as Accelerate reads them: without the module of each, and without spaces."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return ",".join(str(part).strip().rpartition(".")[2] for part in parts if str(part).strip())


def _header_flags(text: str, engine: str) -> dict[str, str]:
    """Model, method, machine and length from the header; no method if the engine was changed since."""
    words = made_with(text)
    fields = {question.flag: question.field for question in QUESTIONS if question.key is None}
    if words.get("--engine") != engine and engine != "ddp":  # plain DDP takes every method, and is FSDP2's NO_SHARD
        fields.pop("--method")
    return {field: words[flag] for flag, field in fields.items() if flag in words}


def to_answers(flags: Mapping[str, str]) -> Answers:
    """The answers of flags that no question has checked, with the defaults of `Answers` for the open ones."""
    values: dict[str, Any] = {**vars(Answers())}
    for name, text in flags.items():
        kind = type(values[name])
        if kind is bool:
            values[name] = text.lower() == "true"
        elif kind is tuple:
            values[name] = tuple(filter(None, text.split(",")))
        elif kind is not int:
            values[name] = text
        elif text.isdecimal():
            values[name] = int(text)
    return Answers(**values)


STRATEGY, OWN_FILE = "fsdp_sharding_strategy", "deepspeed_config_file"
UNKNOWN_STAGE = "9"
"""Stands for the stage in DeepSpeed's own file."""
SAME_SETTING = (
    (STRATEGY, "fsdp_reshard_after_forward", "zero_stage"),
    ("fsdp_offload_params", "offload_optimizer_device"),
    ("fsdp_cpu_ram_efficient_loading", "zero3_init_flag"),
    ("fsdp_activation_checkpointing", "fsdp_xla_fsdp_grad_ckpt"),
)
"""The names of one setting in different engines: a key takes its comments along."""


@dataclass(frozen=True)
class Change:
    """The change of one key. `old` and `new` are values as text, empty without one.

    `breaks` marks a meaning that the new file can't carry, and `fix` is the replacement, if there is one.
    """

    key: str
    kind: Literal["renamed", "lost", "changed"]
    old: str = ""
    new: str = ""
    new_key: str = ""
    why: str = ""
    breaks: bool = False
    fix: str = ""


ALL, OFF, DEVICES = None, FALSE_WORDS, ("none", "cpu")
STARTED = "accelerate launch starts the processes on each machine"
HOSTS = tuple(f"deepspeed_{name}" for name in ("hostfile", "exclusion_filter", "inclusion_filter"))
"""The keys by which DeepSpeed reaches other machines, unless its launcher is the standard one."""
LAUNCHER = "deepspeed_multinode_launcher"
NO_EQUIVALENT: Mapping[str, tuple[str, Collection[str] | None, str]] = {
    "fsdp_activation_checkpointing": ("an argument of the script turns it on", OFF, "--gradient_checkpointing true"),
    "fsdp_activation_checkpointing_offload": ("FSDP2 alone can offload checkpointed inputs", OFF, ""),
    "fsdp_offload_params": ("DDP has none", OFF, ""),
    "fsdp_ignored_modules": ("all modules are treated alike", (), ""),
    "fsdp_state_dict_type": ("the engine has its own checkpoints", ALL, ""),
    "fsdp_cpu_ram_efficient_loading": ("every rank loads the model: more host memory", ALL, ""),
    "gradient_accumulation_steps": ("an argument of the script", ("auto", "1"), "--gradient_accumulation_steps {}"),
    "gradient_clipping": ("an argument of the script", ("auto", "1", "1.0"), "--max_grad_norm {}"),
    "offload_optimizer_device": ("FSDP has no NVMe offload", DEVICES, ""),
    "offload_param_device": ("covered by fsdp_offload_params", DEVICES, ""),
    OWN_FILE: ("DeepSpeed's own file is not read", (), ""),
    LAUNCHER: (STARTED, ("none", "pdsh", "standard"), ""),
    **dict.fromkeys(HOSTS, (STARTED, (), "")),
}
"""The one table of what has no equivalent: why, the values without a meaning to keep (`ALL`: each), and the argument of
the script that replaces others. Keys without a row mean nothing to the other engine."""
ADDED = {
    "fsdp_state_dict_type": "as the old engine saves",
    "fsdp_backward_prefetch": "FSDP2 prefetches by itself, FSDP1 when this is set",
    "zero3_save_16bit_model": "without it save_model writes no model",
    "gradient_accumulation_steps": "from the training arguments",
    "gradient_clipping": "from the training arguments",
    "deepspeed_multinode_launcher": "started on each machine, as before",
}
"""Why a key is added or changed."""


def _breaks(key: str, value: Any, job: JobConfig) -> bool:
    """Whether a value without an equivalent has a meaning to keep."""
    harmless = NO_EQUIVALENT[key][1] if key in NO_EQUIVALENT else ALL
    if key in (*HOSTS, LAUNCHER) and job.number("num_machines") <= 1:
        return False
    if key in HOSTS and str(job.section("deepspeed_config").get(LAUNCHER)).lower() == "standard":
        return False
    return harmless is not ALL and str(value).lower() not in harmless


def check(job: JobConfig, document: Any) -> None:
    """Refuses a file without a counterpart."""
    kind, version = job.values.get("distributed_type"), job.fsdp("fsdp_version")
    if job.engine in (Engine.NONE, Engine.TPU) or kind == MULTI_CPU:
        raise _refusal(f"distributed_type: {kind} can't be migrated", "only FSDP, DeepSpeed and DDP on GPUs can")
    if job.values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise _refusal("this is not the config of a local machine", "SageMaker has other keys")
    check_sections(job, document)
    if job.is_fsdp and str(version) not in ("1", "2"):
        raise _refusal(f"fsdp_version: {version} is neither 1 nor 2", "Accelerate stops at it")


def check_sections(job: JobConfig, document: Any) -> None:
    """Refuses sections whose keys can't be renamed."""
    for section in ("fsdp_config", "deepspeed_config"):
        content = job.values.get(section)
        if content is not None and not isinstance(content, Mapping):
            raise _refusal(f"{section} is {content!r}, not a mapping of keys", "its settings are not read")
        if odd := [key for key in content or () if not isinstance(key, str)]:
            raise _refusal(f"{section} has the key {odd[0]!r}, which is not text", "Accelerate stops at it")
        if getattr(document.get(section), "merge", None) or getattr(document, "merge", None):
            raise _refusal("the file merges keys from another mapping (<<)", "they have no place of their own")


def _refusal(what: str, why: str) -> UsageError:
    fix = "accel-fsdp check FILE says what else is wrong; or make one: accel-fsdp config"
    return UsageError(what, why=why, fix=fix)


def target_of(flags: Mapping[str, str], written: Mapping[str, str]) -> MigrationTarget | None:
    """The target of a migration that flags of `accel-fsdp config` name; None for the file's own engine, or another."""
    answers = {**written, **flags}
    engine, numbers = answers["engine"].lower(), {str(number): name for number, name in STRATEGIES.items()}
    if engine == written["engine"] and answers.get("fsdp_version") == written.get("fsdp_version"):
        return None
    stage = answers.get("zero_stage") or ZERO_STAGES.get(numbers.get(written.get("strategy", "1"), "")) or 3
    name = {"deepspeed": f"zero{stage}", "fsdp": f"fsdp{answers.get('fsdp_version', '2')}"}.get(engine)
    return next((target for target in TARGETS if target == name), None)


def retarget(flags: Mapping[str, str], job: JobConfig, target: MigrationTarget) -> dict[str, str]:
    """The answers of a file with another engine that shards the same, as far as it can."""
    strategy = flags.get("strategy", "1")
    if job.engine is Engine.DEEPSPEED:
        strategy = {"0": "3", "1": "2", "2": "2"}.get(flags.get("zero_stage", "3"), "1")
    elif job.engine is Engine.DDP:
        strategy = "3" if target == "fsdp1" else "1"
    if strategy in ("4", "5") and (_is_alone(job) or mesh_problem(job, target)) and target != "fsdp2":
        strategy = str(int(strategy) - 3)
    changed = {name: flag for name, flag in flags.items() if name not in ("tp", "ep", "dp_replicate")}
    changed["strategy"] = strategy
    if target.startswith("zero"):
        ram = flags.get("ram_efficient_loading", "True") if job.engine is not Engine.DEEPSPEED else "True"
        return changed | {"engine": "deepspeed", "zero_stage": target[-1], "ram_efficient_loading": ram}
    if strategy == "3" and target == "fsdp2":
        return changed | {"engine": "ddp"}
    changed |= {"engine": "fsdp", "fsdp_version": target[-1]}
    if job.engine is Engine.DEEPSPEED or (flags.get("state_dict_type") == "LOCAL_STATE_DICT" and target == "fsdp2"):
        changed["state_dict_type"] = "SHARDED_STATE_DICT"
    policy, checkpoints = flags.get("wrap_policy", ""), flags.get("activation_checkpointing") == "True"
    if (policy == "SIZE_BASED_WRAP" and target == "fsdp2") or (policy == "NO_WRAP" and checkpoints):
        changed["wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    return changed


def _is_alone(job: JobConfig) -> bool:
    """Whether the group of hybrid sharding is the only machine."""
    return job.engine is Engine.FSDP1 and (job.number("num_machines") or 1) == 1


def mesh_problem(job: JobConfig, target: str) -> str:
    """Why another engine than FSDP2 can't have the file's mesh; empty if it can."""
    sizes, processes = job.mesh, job.number("num_processes")
    machines, replicas = job.number("num_machines") or 1, sizes["dp_replicate"]
    if others := [f"{axis}_size" for axis in OTHER_AXES if sizes[axis] != 1]:
        return f"no {', '.join(others)} there"
    if job.engine is not Engine.FSDP2 or not job.section(MESH):
        return ""
    if not processes:
        return "num_processes is not known"
    if replicas * sizes["dp_shard"] != processes or sizes["dp_shard"] == 1:
        return "Accelerate refuses this mesh"
    if target.startswith("fsdp") and replicas not in (1, machines):
        return f"{replicas} replicas on {counted(machines, 'machine')}"
    return ""


def rewrite(document: Any, job: JobConfig, old: Answers, new: Answers) -> list[Change]:
    """Changes `document` from its answers to new ones, and returns what changed or was lost.

    `document` and `job` come from `read_config`. Keys without a question stay, unless another engine doesn't read them.
    """
    conversion = Conversion(job, old, new)
    apply(document, [*conversion.removals, *conversion.edits])
    return conversion.changes


class Conversion:
    """The changes of one file. Removals come before edits, one of which may give its key a removed name.

    `job` is first the file as it was, then the one with the keys that the new engine reads, under its names for them.
    """

    def __init__(self, job: JobConfig, old: Answers, new: Answers) -> None:
        self.job, self.old, self.new = job, old, new
        self.engine, self.other = job.engine, engine_of(vars(new))
        self.section, self.place = SECTIONS.get(self.engine, ""), SECTIONS.get(self.other, "")
        self.before, self.after = flat_mapping(old), flat_mapping(new)
        self.removals, self.edits, self.changes = list[Edit](), list[Edit](), list[Change]()
        if self.engine is self.other:
            self._drop_unread()
        else:
            self._change_engine()
        self._set_answers()

    def _lose(self, section: str, key: str, value: Any, why: str, breaks: bool = False, fix: str = "") -> None:
        fix = fix.format(value) if breaks else ""
        self.changes.append(Change(_path(section, key), "lost", show(value), why=why, breaks=breaks, fix=fix))

    def _drop_unread(self) -> None:
        """Removes the keys that the same engine doesn't read any more."""
        for section, key in self.before:
            if (section, key) not in self.after and key in self.job.section(section):
                self.removals.append(Edit(section, self.job.written_name(section, key)))
                self._lose(section, key, self.job.section(section)[key], "has no effect now")
        is_restaged = self.old.zero_stage != self.new.zero_stage
        if is_restaged and OWN_FILE in self.job.section(self.section):
            self.removals.append(Edit(self.section, OWN_FILE))
            self._lose("", OWN_FILE, None, "the stage is in that file, which is not read", breaks=True)

    def _change_engine(self) -> None:
        """Renames the section and its keys, and removes what the other engine doesn't read."""
        if ("fsdp_config", STRATEGY) in self.after:
            self.after["fsdp_config", STRATEGY] = STRATEGIES[self.new.strategy]
        self._name_losses()
        values = {key: value for key, value in self.job.values.items() if key != self.section}
        content: Mapping[str, Any] = (self.job.values.get(self.section) if self.section else None) or {}
        if self.place != self.section:
            if self.place in values:  # it must not become active
                self.removals.append(Edit("", self.place))
                self._lose("", self.place, values[self.place], f"had no effect: {self.engine.label} does not read it")
            if self.section in self.job.values:
                self.removals.append(Edit("", self.section, new_key=self.place))
        kept, renamed = dict[str, Any](), dict[Place, Any]()
        for raw, value in content.items():
            key = full_name(self.section, raw)
            if lost := self._why_lost(raw, key, value):
                self.removals += [Edit(self.place, raw)] if self.place else []
                known = key if (self.section, key) in BY_NAME or key in RETIRED else raw
                self._lose(self.section, known, value, *lost)
            elif (new_key := self._named(key)) != key:
                renamed[self.place, new_key] = new = self.after[self.place, new_key]
                self.edits.append(Edit(self.place, raw, new, new_key))
                is_lost = key == "offload_optimizer_device" and _breaks(key, value, self.job)
                why, path = NO_EQUIVALENT[key][0] if is_lost else "", _path(self.section, key)
                self.changes.append(Change(path, "renamed", show(value), show(new), new_key, why, breaks=is_lost))
            else:
                kept[raw] = value
        self.job = replace(self.job, values={**values, self.place: kept} if self.place else values)
        self.before |= {place: self._read(*place) for place in self.after if place[0]} | renamed

    def _why_lost(self, raw: str, key: str, value: Any) -> tuple[str, bool, str] | None:
        """Why a key goes, whether its meaning is lost, and what replaces it; None if it stays."""
        is_last = raw == [name for name in self.job.values[self.section] if full_name(self.section, name) == key][-1]
        idle = _without_effect(self.engine, self.section, key, value)
        if not is_last or idle:
            return (*(idle or ("", False)), "") if is_last else ("written twice, the later one is used", False, "")
        is_still_read = self.place == self.section and (self.section, key) not in self.before
        is_still_read = is_still_read and self.other in BY_NAME[self.section, key].engines
        if is_still_read or (self.place, self._named(key)) in self.after:
            return None
        why, _, fix = NO_EQUIVALENT.get(key, (f"{self.other.label} does not read it", ALL, ""))
        return why, _breaks(key, value, self.job), fix

    def _named(self, key: str) -> str:
        """The name of a key in the new engine."""
        names = next((names for names in SAME_SETTING if key in names), ())
        return next((name for name in (key, *names) if (self.place, name) in self.after), key)

    def _read(self, section: str, key: str) -> Any:
        """What the new engine reads from the file so far; a mesh is always written out."""
        if key in self.job.section(section):
            return effective(self.job, section, key)
        return None if section == MESH else BY_NAME[section, key].default

    def _set_answers(self) -> None:
        """Sets the keys whose answers have changed, and those that can't be read."""
        for place, value in self.after.items():
            is_kept = show(self.before.get(place)).lower() == show(value).lower() and self._is_usable(place)
            if not is_kept:
                section, key = place
                self.edits.append(Edit(section, self.job.written_name(section, key), value))
                why = "" if self.engine is self.other else ADDED.get(key, "the new engine")
                old = show(self.job.section(section).get(key))
                self.changes.append(Change(_path(section, key), "changed", old, show(value), why=why))

    def _is_usable(self, place: Place) -> bool:
        content, field = self.job.section(place[0]), BY_NAME[place]
        if field.key in content and content[field.key] in UNKNOWN:
            return field.key in NULL_IS_ABSENT or field.default in UNKNOWN
        return field.key not in content or is_readable(field, content[field.key])

    def _name_losses(self) -> None:
        """What is lost though its key has an equivalent."""
        ranks, machines = self.job.number("num_processes"), self.job.number("num_machines") or 1
        problem = mesh_problem(self.job, "fsdp" if self.other is Engine.FSDP1 else "zero")
        if MESH in self.job.values and not any(section == MESH for section, _ in self.after):
            self.removals.append(Edit("", MESH))
            self._lose("", MESH, self.job.values[MESH], problem or f"{self.other.label} reads none", bool(problem))
        if self.engine is Engine.FSDP1 and (not ranks or ranks % machines or ranks == machines):
            for place in [place for place in self.after if place[0] == MESH]:
                del self.after[place]
            if self.other is Engine.FSDP2 and STRATEGIES[self.new.strategy] in HYBRID:
                self._lose("", MESH, None, "hybrid needs num_processes: 2 or more on each machine", True)
        is_hybrid = self.engine is Engine.FSDP2 and self.old.dp_replicate > 1
        if self.engine is Engine.FSDP1:
            is_hybrid = STRATEGIES.get(self.old.strategy) in HYBRID and not _is_alone(self.job)
        if is_hybrid and self.other is Engine.DEEPSPEED and not problem:
            self._lose("", "hybrid sharding", None, "hybrid is ZeRO++ or MiCS, in DeepSpeed's own JSON", True)
        if self.engine is Engine.DEEPSPEED and self.old.zero_stage == 1:
            self._lose("", "ZeRO-1", None, "ZeRO-1 has no FSDP twin: SHARD_GRAD_OP is nearest", True)
        if (
            self.job.is_fsdp
            and self.place == self.section
            and self.old.wrap_policy == "NO_WRAP" != self.new.wrap_policy
        ):
            why = "activation checkpointing needs a wrap policy"
            self._lose("", "fsdp_auto_wrap_policy", "NO_WRAP", why, True)
        if self.old.ep > self.new.ep == 1:
            self._lose("", EXPERT_FLAG, self.old.ep, "FSDP2 alone has expert parallelism", True)


def _without_effect(engine: Engine, section: str, key: str, value: Any) -> tuple[str, bool] | None:
    """Why a key has no effect on the old engine, or stops it, in which case its meaning is unknown."""
    field = BY_NAME.get((section, key))
    if field is None or not field.engines:
        reader = f"Accelerate reads {RETIRED[key]}" if key in RETIRED else "nothing reads it"
        return f"had no effect: {reader}", False
    if key == "fsdp_activation_checkpointing_offload" and str(value).lower() in TRUE_WORDS and engine is Engine.FSDP1:
        return "FSDP1 stops at it", True
    if engine not in field.engines:
        return f"had no effect: {engine.label} ignores it", False
    if value is None:
        return "had no value", section == "fsdp_config" and field.default is not None
    if field.kind in (Kind.BOOL, Kind.CHOICE) and not field.accepts(value):
        return f"Accelerate does not take {value}", True
    return ("names no class", False) if field.kind is Kind.NAMES and not class_names(value) else None


def _path(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return counted(len(value), "key")
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Migration:
    """A file for another engine: both texts, and what changed or was lost; both texts are equal if nothing did."""

    source: str
    target: str
    before: str
    text: str
    changes: tuple[Change, ...] = ()

    @property
    def lost(self) -> tuple[Change, ...]:
        """The changes whose meaning can't be kept."""
        return tuple(change for change in self.changes if change.breaks)


def migrated(path: Path, target: MigrationTarget, layer_class: str = "") -> Migration:
    """The migration of a file. Nothing is written."""
    job, document = yaml_file.read_config(path)
    check(job, document)
    before, flags = document.source, to_flags(job)
    has_own_file = OWN_FILE in job.section("deepspeed_config")
    old = to_answers(flags | ({"zero_stage": UNKNOWN_STAGE} if has_own_file else {}))
    is_zero = job.engine is Engine.DEEPSPEED and not has_own_file
    source = deepspeed_name(old.zero_stage) if is_zero else job.engine.label
    if source == TARGETS[target]:
        return Migration(source, source, before, before)
    named = {"layer_class": layer_class} if layer_class else {}
    new = to_answers(retarget(flags, job, target) | named)
    changes = rewrite(document, job, old, new)
    title = f"Migrated from {source} to {TARGETS[target]}. The command below made the original file."
    text = header.retitle(yaml_file.dump(document), title)
    return Migration(source, TARGETS[target], before, text.replace(f" {EXPERT_FLAG} {old.ep}", ""), tuple(changes))
