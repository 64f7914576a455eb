"""Converts a YAML: the answers in it, changed answers, the same file with their keys, and what is lost on the way.

Pure. The meanings are those of Accelerate 1.15, and the tests compare them with its parser and plugins. A key without
effect in the old file gets none in the new one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accel_fsdp.config import (
    BY_NAME,
    EXPERT_FLAG,
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
    JobConfig,
    Kind,
    MigrationTarget,
    apply,
    deepspeed_name,
    full_name,
)
from accel_fsdp.errors import UsageError
from accel_fsdp.units import counted
from accel_fsdp.wizard.answers import Answers
from accel_fsdp.wizard.question import engine_of
from accel_fsdp.wizard.reading import KEYS, MESH, UNKNOWN, class_names, effective, is_readable
from accel_fsdp.wizard.to_yaml import to_mapping

Place = tuple[str, str]
"""A section and a key."""
SECTIONS = {
    **dict.fromkeys((Engine.FSDP1, Engine.FSDP2, Engine.TPU), "fsdp_config"),
    Engine.DEEPSPEED: "deepspeed_config",
}
STRATEGY = "fsdp_sharding_strategy"
SAME_SETTING = (
    (STRATEGY, "fsdp_reshard_after_forward", "zero_stage"),
    ("fsdp_offload_params", "offload_optimizer_device"),
    ("fsdp_cpu_ram_efficient_loading", "zero3_init_flag"),
    ("fsdp_activation_checkpointing", "fsdp_xla_fsdp_grad_ckpt"),
)
"""The names of one setting in different engines: a key takes its comments along."""
CHECKPOINTING = "--gradient_checkpointing true"


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


def _is_on(value: Any, job: JobConfig) -> bool:
    return str(value).lower() in TRUE_WORDS


def _is_other_than(*harmless: str) -> Callable[[Any, JobConfig], bool]:
    return lambda value, job: str(value).lower() not in harmless


def _several(launchers: Collection[str]) -> Callable[[Any, JobConfig], bool]:
    """Whether several machines are started by another launcher than these."""

    def differs(value: Any, job: JobConfig) -> bool:
        launcher = str(job.section("deepspeed_config").get("deepspeed_multinode_launcher")).lower()
        return job.number("num_machines") > 1 and launcher not in launchers

    return differs


@dataclass(frozen=True)
class Loss:
    """Why a key has no equivalent in another engine, the values whose meaning is lost, and the script's argument."""

    why: str
    breaks: Callable[[Any, JobConfig], bool] = lambda value, job: False
    fix: str = ""


_HOSTS = Loss("accelerate launch starts the processes on each machine", _several(("standard",)))
NO_EQUIVALENT: Mapping[str, Loss] = {
    "fsdp_activation_checkpointing": Loss("an argument of the script turns it on", _is_on, CHECKPOINTING),
    "fsdp_activation_checkpointing_offload": Loss("FSDP2 alone can offload checkpointed inputs", _is_on),
    "fsdp_offload_params": Loss("DDP has none", _is_on),
    "fsdp_ignored_modules": Loss("all modules are treated alike", lambda value, job: True),
    "fsdp_use_orig_params": Loss("only FSDP1 has the choice"),
    "fsdp_sync_module_states": Loss("only FSDP1 needs it"),
    "fsdp_backward_prefetch": Loss("only FSDP1 needs it"),
    "fsdp_forward_prefetch": Loss("only FSDP1 has it; for speed alone"),
    "fsdp_state_dict_type": Loss("the engine has its own checkpoints"),
    "fsdp_cpu_ram_efficient_loading": Loss("every rank loads the model: more host memory"),
    "gradient_accumulation_steps": Loss(
        "an argument of the script", _is_other_than("auto", "1"), "--gradient_accumulation_steps {}"
    ),
    "gradient_clipping": Loss("an argument of the script", _is_other_than("auto", "1", "1.0"), "--max_grad_norm {}"),
    "offload_optimizer_device": Loss("FSDP has no NVMe offload", _is_other_than("none", "cpu")),
    "offload_param_device": Loss("covered by fsdp_offload_params", _is_other_than("none", "cpu")),
    "deepspeed_config_file": Loss("DeepSpeed's own file is not read", lambda value, job: True),
    "deepspeed_multinode_launcher": Loss(_HOSTS.why, _several(("none", "pdsh", "standard"))),
    **dict.fromkeys(("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"), _HOSTS),
}
"""The one table of what has no equivalent; keys without a row mean nothing to the other engine."""
ADDED = {
    "fsdp_state_dict_type": "as the old engine saves",
    "fsdp_backward_prefetch": "FSDP2 prefetches by itself, FSDP1 when this is set",
    "zero3_save_16bit_model": "without it save_model writes no model",
    "gradient_accumulation_steps": "from the training arguments",
    "gradient_clipping": "from the training arguments",
    "deepspeed_multinode_launcher": "started on each machine, as before",
}
"""Why a key is added."""


def name_of(job: JobConfig, answers: Answers) -> str:
    if job.engine is Engine.DEEPSPEED and "deepspeed_config_file" not in job.section("deepspeed_config"):
        return deepspeed_name(answers.zero_stage)
    return job.engine.label


def check(job: JobConfig) -> None:
    """Refuses a file without a counterpart, or without a meaning to keep."""
    kind = job.values.get("distributed_type")
    if job.engine in (Engine.NONE, Engine.TPU) or kind == MULTI_CPU:
        raise _refusal(f"distributed_type: {kind} can't be migrated", "only FSDP, DeepSpeed and DDP on GPUs can")
    if job.values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise _refusal("this is not the config of a local machine", "SageMaker has other keys")
    for section in set(SECTIONS.values()):
        content = job.values.get(section)
        if content is not None and not isinstance(content, Mapping):
            raise _refusal(f"{section} is {content!r}, not a mapping of keys", "its settings are not read")
        if odd := [key for key in content or () if not isinstance(key, str)]:
            raise _refusal(f"{section} has the key {odd[0]!r}, which is not text", "Accelerate stops at it")
    if job.is_fsdp and str(job.fsdp("fsdp_version")) not in ("1", "2"):
        raise _refusal(f"fsdp_version: {job.fsdp('fsdp_version')} is neither 1 nor 2", "Accelerate stops at it")


def _refusal(what: str, why: str) -> UsageError:
    return UsageError(
        what, why=why, fix="accel-fsdp check FILE says what else is wrong; or make one: accel-fsdp config"
    )


def retarget(flags: Mapping[str, str], job: JobConfig, target: MigrationTarget) -> dict[str, str]:
    """The answers of a file with another engine that shards the same, as far as it can."""
    number, stage = target[-1], int(flags.get("zero_stage", 3))
    strategy = flags.get("strategy", "1")
    if job.engine is Engine.DEEPSPEED:
        strategy = {3: "1", 2: "2", 1: "2", 0: "3"}[stage]
    elif job.engine is Engine.DDP:
        strategy = "3" if target == "fsdp1" else "1"
    if strategy in ("4", "5") and (_is_alone(job) or mesh_problem(job, target)) and target != "fsdp2":
        strategy = str(int(strategy) - 3)
    changed = {**flags, "strategy": strategy}
    for axis in ("tp", "ep", "dp_replicate"):
        changed.pop(axis, None)
    if target.startswith("zero"):
        ram = flags.get("ram_efficient_loading", "True") if job.engine is not Engine.DEEPSPEED else "True"
        return changed | {"engine": "deepspeed", "zero_stage": number, "ram_efficient_loading": ram}
    if strategy == "3" and target == "fsdp2":
        return changed | {"engine": "ddp"}
    changed |= {"engine": "fsdp", "fsdp_version": number}
    if job.engine is Engine.DEEPSPEED or (flags.get("state_dict_type") == "LOCAL_STATE_DICT" and target == "fsdp2"):
        changed["state_dict_type"] = "SHARDED_STATE_DICT"
    policy, checkpoints = flags.get("wrap_policy", ""), flags.get("activation_checkpointing") == "True"
    if (policy == "SIZE_BASED_WRAP" and target == "fsdp2") or (policy == "NO_WRAP" and checkpoints):
        changed["wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    return changed


def target_of(engine: str, flags: Mapping[str, str], strategy: str) -> MigrationTarget | None:
    """The target that flags of `accel-fsdp config` name; None for another engine."""
    stage = flags.get("zero_stage") or str(
        ZERO_STAGES.get(STRATEGIES.get(int(strategy) if strategy.isdecimal() else 1, ""), 3) or 3
    )
    name = f"zero{stage}" if engine == "deepspeed" else f"fsdp{flags.get('fsdp_version', '2')}"
    return next((target for target in TARGETS if target == name and engine in ("deepspeed", "fsdp")), None)


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


def rewrite(document: Any, job: JobConfig, old: Answers, new: Answers, answered: Collection[str] = ()) -> list[Change]:
    """Changes `document` from its answers to new ones, and returns what changed or was lost.

    `document` and `job` come from `read_config`; `answered` are the questions that the file leaves open and the user
    has answered. Keys without a question stay, unless another engine doesn't read them.
    """
    conversion = Conversion(job, old, new, answered)
    changes = conversion.changes()
    apply(document, conversion.edits)
    return changes


class Conversion:
    """Collects edits and changes of one file."""

    def __init__(self, job: JobConfig, old: Answers, new: Answers, answered: Collection[str]) -> None:
        self.job, self.old, self.new, self.answered = job, old, new, answered
        self.before, self.after = _flat(to_mapping(old)), _flat(to_mapping(new))
        if ("fsdp_config", STRATEGY) in self.after and job.engine is not engine_of(vars(new)):
            self.after["fsdp_config", STRATEGY] = STRATEGIES[new.strategy]
        self.engine, self.other = job.engine, engine_of(vars(new))
        self.section, self.place = SECTIONS.get(self.engine, ""), SECTIONS.get(self.other, "")
        self.edits: list[Edit] = []
        self.first_of_keys = 0

    def changes(self) -> list[Change]:
        if self.engine is self.other:
            return [*self._same_engine(), *self._restaged()]
        return [*self._sections(), *self._keys(), *self._added(), *self._top(), *self._special()]

    # The same engine: only what the answers change

    def _same_engine(self) -> Iterator[Change]:
        for place, value in self.after.items():
            if self._is_open(place) or (self.before.get(place) == value and self._is_usable(place)):
                continue
            yield from self._put(place, value)
        for section, key in self.before:
            if (section, key) not in self.after and key in self.job.section(section):
                self.edits.append(Edit(section, self.job.written_name(section, key)))
                yield Change(_path(section, key), "lost", show(self.job.section(section)[key]), why="has no effect now")

    def _put(self, place: Place, value: Any, why: str = "") -> Iterator[Change]:
        section, key = place
        if section and section in self.job.values and not isinstance(self.job.values[section] or {}, Mapping):
            self.edits.append(Edit("", section))  # text or a list, which Accelerate can't read either
        self.edits.append(Edit(section, self.job.written_name(section, key), value))
        yield Change(_path(section, key), "changed", show(self.job.section(section).get(key)), show(value), why=why)

    def _is_open(self, place: Place) -> bool:
        """Whether the file leaves a key to the model, the machine or the command line, and nobody has answered it."""
        return (
            place in KEYS
            and KEYS[place] not in self.answered
            and effective(self.job, *place) in UNKNOWN
            and (place[0] in self.job.values or not place[0] or self.before.get(place) == self.after[place])
        )

    def _is_usable(self, place: Place) -> bool:
        section, key = place
        content, field = self.job.section(section), BY_NAME[place]
        if key not in content:
            return True
        if content[key] is None:
            return key in NULL_IS_ABSENT or field.default in UNKNOWN
        return is_readable(field, content[key])

    def _restaged(self) -> Iterator[Change]:
        key = "deepspeed_config_file"
        is_restaged = self.engine is Engine.DEEPSPEED and self.old.zero_stage != self.new.zero_stage
        if is_restaged and not self._is_open((self.section, "zero_stage")) and key in self.job.section(self.section):
            self.edits.append(Edit(self.section, key))
            yield Change(key, "lost", why="the stage is in that file, which is not read", breaks=True)

    # Another engine

    def _sections(self) -> Iterator[Change]:
        """Renames the section. An unread section of the new name must not become active."""
        if self.place != self.section and self.place in self.job.values and self.place:
            self.edits.append(Edit("", self.place))
            why = f"had no effect: {self.engine.label} does not read it"
            yield Change(self.place, "lost", show(self.job.values[self.place]), why=why)
        if self.section in self.job.values and self.place != self.section:
            self.edits.append(Edit("", self.section, new_key=self.place))

    def _keys(self) -> Iterator[Change]:
        """Renames, changes or removes the keys of the section."""
        content: Mapping[str, Any] = (self.job.values.get(self.section) if self.section else None) or {}
        raw_names = {full_name(self.section, raw): raw for raw in content}  # written twice: the later one is used
        self.first_of_keys = len(self.edits)
        for raw in content:
            key = full_name(self.section, raw)
            value = content[raw]
            why, breaks = _without_effect(self.engine, self.section, key, value)
            if raw_names[key] != raw:
                why, breaks = "written twice, the later one is used", False
            if why:
                known = key if (self.section, key) in BY_NAME or key in RETIRED else raw
                yield self._lost(raw, Change(_path(self.section, known), "lost", show(value), why=why, breaks=breaks))
            else:
                yield from self._equivalent(raw, key, value)

    def _equivalent(self, raw: str, key: str, value: Any) -> Iterator[Change]:
        new_key, path = self._named(key), _path(self.section, key)
        new = self.after.get((self.place, new_key))
        if new is None:
            is_read = self.other in BY_NAME[self.section, key].engines and (self.section, key) not in self.before
            if not (is_read and self.place == self.section):
                loss = NO_EQUIVALENT.get(key, Loss(f"{self.other.label} does not read it"))
                breaks = loss.breaks(value, self.job)
                fix = loss.fix.format(value) if breaks else ""
                yield self._lost(raw, Change(path, "lost", show(value), why=loss.why, breaks=breaks, fix=fix))
            return
        if new_key != key:
            self.edits.append(Edit(self.place, raw, new, new_key))
            why = NO_EQUIVALENT[key].why if self._breaks(key, value) else ""
            yield Change(path, "renamed", show(value), show(new), new_key, why, breaks=bool(why))
        elif not self._means(key, value, new):
            self.edits.append(Edit(self.place, raw, new))
            yield Change(path, "changed", show(value), show(new))

    def _breaks(self, key: str, value: Any) -> bool:
        return key == "offload_optimizer_device" and NO_EQUIVALENT[key].breaks(value, self.job)

    def _means(self, key: str, value: Any, new: Any) -> bool:
        if key == "fsdp_transformer_layer_cls_to_wrap":
            return bool(value == new)
        return str(effective(self.job, self.section, key)).lower() == str(new).lower()

    def _named(self, key: str) -> str:
        """The name of a key in the new engine."""
        if (self.place, key) in self.after:
            return key
        names = next((names for names in SAME_SETTING if key in names), ())
        return next((name for name in names if (self.place, name) in self.after), key)

    def _lost(self, raw: str, change: Change) -> Change:
        """Removes a key before others are renamed, one of which may take its name."""
        self.edits.insert(self.first_of_keys, Edit(self.place or self.section, raw))
        self.first_of_keys += 1
        return change

    def _added(self) -> Iterator[Change]:
        """Adds the keys that the new engine needs, where its default differs."""
        content = self.job.section(self.section) if self.section else {}
        covered = {
            self._named(key) for key in content if not _without_effect(self.engine, self.section, key, content[key])[0]
        }
        for (section, key), value in self.after.items():
            default = BY_NAME[section, key].default
            is_needed = section == self.place and key not in covered and value != default
            if section and (is_needed or section == MESH):
                self.edits.append(Edit(section, key, value))
                why = "one replica per machine" if section == MESH else ADDED.get(key, "the new engine")
                yield Change(_path(section, key), "changed", "", show(value), why=why)
        if not self.place and self.section in self.job.values:
            self.edits = [edit for edit in self.edits if edit.section != self.section and edit.key != self.section]
            self.edits.append(Edit("", self.section))

    def _top(self) -> Iterator[Change]:
        for (section, key), value in self.after.items():
            place = (section, key)
            if section or self._is_open(place):
                continue
            is_type = key == "distributed_type" and self.job.values.get(key) != value
            if is_type or (
                key != "distributed_type" and (self.before.get(place) != value or not self._is_usable(place))
            ):
                yield from self._put(place, value, "the new engine" if is_type else "")
        if MESH in self.job.values and not any(section == MESH for section, _ in self.after):
            problem = mesh_problem(self.job, "fsdp" if self.other is Engine.FSDP1 else "zero")
            self.edits.insert(0, Edit("", MESH))
            old, why = show(self.job.values[MESH]), problem or f"{self.other.label} reads none"
            yield Change(MESH, "lost", old, why=why, breaks=bool(problem))

    def _special(self) -> Iterator[Change]:
        """What is lost though its key has an equivalent."""
        if self.other is Engine.DEEPSPEED and self._is_hybrid() and not mesh_problem(self.job, "zero"):
            why = "hybrid is ZeRO++ or MiCS, in DeepSpeed's own JSON"
            yield Change("hybrid sharding", "lost", why=why, breaks=True)
        if self.engine is Engine.FSDP1 and self.other is Engine.FSDP2 and STRATEGIES[self.new.strategy] in HYBRID:
            ranks, machines = self.job.number("num_processes"), self.job.number("num_machines") or 1
            if not ranks or ranks % machines or ranks == machines:
                self.edits = [edit for edit in self.edits if edit.section != MESH]
                why = "hybrid needs num_processes: 2 or more on each machine"
                yield Change(MESH, "lost", why=why, breaks=True)
        if self.engine is Engine.DEEPSPEED and self.old.zero_stage == 1 and self.other is not Engine.DEEPSPEED:
            yield Change("ZeRO-1", "lost", why="ZeRO-1 has no FSDP twin: SHARD_GRAD_OP is nearest", breaks=True)
        if (
            self.job.is_fsdp
            and self.old.wrap_policy == "NO_WRAP" != self.new.wrap_policy
            and self.place == self.section
        ):
            why = "activation checkpointing needs a wrap policy"
            yield Change("fsdp_auto_wrap_policy", "lost", "NO_WRAP", why=why, breaks=True)
        if self.old.ep > 1 and self.new.ep == 1:
            why = "FSDP2 alone has expert parallelism"
            yield Change(EXPERT_FLAG, "lost", str(self.old.ep), why=why, breaks=True)

    def _is_hybrid(self) -> bool:
        if self.engine is Engine.FSDP1:
            return STRATEGIES.get(self.old.strategy) in HYBRID and not _is_alone(self.job)
        return self.engine is Engine.FSDP2 and self.old.dp_replicate > 1


def _without_effect(engine: Engine, section: str, key: str, value: Any) -> tuple[str, bool]:
    """Why a key has no effect on the old engine, or stops it, in which case its meaning is unknown."""
    field = BY_NAME.get((section, key))
    if key in RETIRED and section == "fsdp_config":
        return f"had no effect: Accelerate reads {RETIRED[key]}", False
    if field is None or not field.engines:
        return "had no effect: nothing reads it", False
    if key == "fsdp_activation_checkpointing_offload" and str(value).lower() in TRUE_WORDS and engine is Engine.FSDP1:
        return "FSDP1 stops at it", True
    if engine not in field.engines:
        return f"had no effect: {engine.label} ignores it", False
    if value is None:
        return "had no value", section == "fsdp_config" and field.default is not None
    if field.kind in (Kind.BOOL, Kind.CHOICE) and not field.accepts(value):
        return f"Accelerate does not take {value}", True
    if key == "fsdp_transformer_layer_cls_to_wrap" and not class_names(value):
        return "names no class", False
    return "", False


def _flat(mapping: Mapping[str, Any]) -> dict[Place, Any]:
    flat: dict[Place, Any] = {}
    for key, value in mapping.items():
        flat |= {(key, inner): v for inner, v in value.items()} if isinstance(value, dict) else {("", key): value}
    return flat


def _path(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return counted(len(value), "key")
    return "" if value is None else str(value)
