"""Writes changed answers into a YAML, for its engine or another one, and lists what changes and what is lost. Pure.

The meanings are those of Accelerate 1.15, and the tests compare them with its parser and plugins. A key without effect
in the old file gets none in the new one.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accel_fsdp.config import (
    BY_NAME,
    EXPERT_FLAG,
    FALSE_WORDS,
    HYBRID,
    NULL_IS_ABSENT,
    OTHER_AXES,
    RETIRED,
    STRATEGIES,
    TRUE_WORDS,
    Edit,
    Engine,
    JobConfig,
    Kind,
    apply,
    full_name,
)
from accel_fsdp.errors import UserError
from accel_fsdp.units import counted
from accel_fsdp.wizard.answers import Answers, engine_of
from accel_fsdp.wizard.from_yaml import UNKNOWN, class_names, effective, is_readable
from accel_fsdp.wizard.to_yaml import MESH, SECTIONS, SETTINGS, Place, flag_text, flat_mapping


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


STRATEGY, OWN_FILE, LAUNCHER = "fsdp_sharding_strategy", "deepspeed_config_file", "deepspeed_multinode_launcher"
HOSTS = tuple(f"deepspeed_{name}" for name in ("hostfile", "exclusion_filter", "inclusion_filter"))
"""The keys by which DeepSpeed reaches other machines, unless its launcher is the standard one."""
STARTED = "accelerate launch starts the processes on each machine"
NO_EFFECT = "had no effect"
ALL, OFF, DEVICES = None, FALSE_WORDS, ("none", "cpu")
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


def rewrite(document: Any, job: JobConfig, old: Answers, new: Answers) -> list[Change]:
    """Changes `document` from its answers to new ones, and returns what changed or was lost.

    `document` and `job` come from `read_config`. Keys without a question stay, unless another engine doesn't read them.
    """
    rewriting = Rewriting(job, old, new)
    apply(document, [*rewriting.removals, *rewriting.edits])
    return rewriting.changes


class Rewriting:
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
            self._remove_unread()
        else:
            self._name_losses()
            self._change_engine()
        self._set_answers()

    def _lose(self, path: str, value: Any, why: str, breaks: bool = True, fix: str = "") -> None:
        fix = fix.format(value) if breaks else ""
        self.changes.append(Change(path, "lost", show(value), why=why, breaks=breaks, fix=fix))

    def _remove_unread(self) -> None:
        """Removes the keys that the same engine doesn't read any more."""
        for section, key in self.before:
            if (section, key) not in self.after and key in self.job.section(section):
                self.removals.append(Edit(section, self.job.written_name(section, key)))
                self._lose(_path(section, key), self.job.section(section)[key], "has no effect now", breaks=False)
        if self.old.zero_stage != self.new.zero_stage and OWN_FILE in self.job.section(self.section):
            self.removals.append(Edit(self.section, OWN_FILE))
            self._lose(OWN_FILE, None, "the stage is in that file, which is not read")

    def _name_losses(self) -> None:
        """What another engine loses though its key has an equivalent."""
        job, old, new = self.job, self.old, self.new
        ranks, machines = job.number("num_processes"), job.number("num_machines") or 1
        problem = mesh_problem(job, "fsdp" if self.other is Engine.FSDP1 else "zero")
        if MESH in job.values and not any(section == MESH for section, _ in self.after):
            self.removals.append(Edit("", MESH))
            self._lose(MESH, job.values[MESH], problem or f"{self.other.label} reads none", bool(problem))
        if self.engine is Engine.FSDP1 and (not ranks or ranks % machines or ranks == machines):
            self.after = {place: value for place, value in self.after.items() if place[0] != MESH}
            if self.other is Engine.FSDP2 and STRATEGIES[new.strategy] in HYBRID:
                self._lose(MESH, None, "hybrid needs num_processes: 2 or more on each machine")
        copies = old.dp_replicate if self.engine is Engine.FSDP2 else machines
        is_hybrid = copies > 1 and (self.engine is Engine.FSDP2 or STRATEGIES.get(old.strategy) in HYBRID)
        if is_hybrid and self.other is Engine.DEEPSPEED and not problem:
            self._lose("hybrid sharding", None, "hybrid is ZeRO++ or MiCS, in DeepSpeed's own JSON")
        if self.engine is Engine.DEEPSPEED and old.zero_stage == 1:
            self._lose("ZeRO-1", None, "ZeRO-1 has no FSDP twin: SHARD_GRAD_OP is nearest")
        if job.is_fsdp and self.place == self.section and old.wrap_policy == "NO_WRAP" != new.wrap_policy:
            self._lose("fsdp_auto_wrap_policy", "NO_WRAP", "activation checkpointing needs a wrap policy")
        if old.ep > new.ep == 1:
            self._lose(EXPERT_FLAG, old.ep, "FSDP2 alone has expert parallelism")

    def _change_engine(self) -> None:
        """Renames the section and its keys, and removes what the other engine doesn't read."""
        if ("fsdp_config", STRATEGY) in self.after:
            self.after["fsdp_config", STRATEGY] = STRATEGIES[self.new.strategy]
        values = {key: value for key, value in self.job.values.items() if key != self.section}
        if self.place != self.section and self.place in values:  # it must not become active
            self.removals.append(Edit("", self.place))
            self._lose(self.place, values[self.place], NO_EFFECT, breaks=False)
        if self.place != self.section and self.section in self.job.values:
            self.removals.append(Edit("", self.section, new_key=self.place))
        kept, renamed = dict[str, Any](), dict[Place, Any]()
        content: Mapping[str, Any] = (self.job.values.get(self.section) if self.section else None) or {}
        for raw, value in content.items():
            key = full_name(self.section, raw)
            path, new_key = _path(self.section, key), self._named(key)
            if lost := self._why_lost(raw, key, value):
                self.removals += [Edit(self.place, raw)] if self.place else []
                is_known = (self.section, key) in BY_NAME or key in RETIRED
                self._lose(path if is_known else _path(self.section, raw), value, *lost)
            elif new_key != key:
                renamed[self.place, new_key] = new = self.after[self.place, new_key]
                self.edits.append(Edit(self.place, raw, new, new_key))
                breaks = key == "offload_optimizer_device" and _breaks(key, value, self.job)
                why = NO_EQUIVALENT[key][0] if breaks else ""
                self.changes.append(Change(path, "renamed", show(value), show(new), new_key, why, breaks))
            else:
                kept[raw] = value
        self.job = replace(self.job, values={**values, self.place: kept} if self.place else values)
        for section, key in (place for place in self.after if place[0] and place not in renamed):
            default = None if section == MESH else BY_NAME[section, key].default  # a mesh is always written out
            is_kept = key in self.job.section(section)
            self.before[section, key] = effective(self.job, section, key) if is_kept else default
        self.before |= renamed

    def _why_lost(self, raw: str, key: str, value: Any) -> tuple[str, bool, str] | None:
        """Why a key goes, whether its meaning is lost, and what replaces it; None if it stays."""
        field = BY_NAME.get((self.section, key))
        is_offload = key == "fsdp_activation_checkpointing_offload" and str(value).lower() in TRUE_WORDS
        if is_offload and self.engine is Engine.FSDP1:
            return "FSDP1 stops at it", True, ""
        same = [name for name in self.job.values[self.section] if full_name(self.section, name) == key]
        if raw != same[-1] or field is None or self.engine not in field.engines:
            return NO_EFFECT, False, ""
        if value is None:
            return "had no value", self.section == "fsdp_config" and field.default is not None, ""
        if field.kind in (Kind.BOOL, Kind.CHOICE) and not field.accepts(value):
            return f"Accelerate does not take {value}", True, ""
        if field.kind is Kind.NAMES and not class_names(value):
            return NO_EFFECT, False, ""
        is_asked = self.place != self.section or (self.section, key) in self.before
        if (self.place, self._named(key)) in self.after or (not is_asked and self.other in field.engines):
            return None
        why, _, fix = NO_EQUIVALENT.get(key, (f"{self.other.label} does not read it", ALL, ""))
        return why, _breaks(key, value, self.job), fix

    def _named(self, key: str) -> str:
        """The name of a key in the new engine."""
        names = [name for section, name in self.after if section == self.place]
        same = (name for name in names if name in SETTINGS and SETTINGS[name] == SETTINGS.get(key))
        return key if key in names else next(same, key)

    def _set_answers(self) -> None:
        """Sets the keys whose answers have changed, and those that can't be read."""
        for (section, key), value in self.after.items():
            field, content = BY_NAME[section, key], self.job.section(section)
            is_usable = key not in content or is_readable(field, content[key])
            if key in content and content[key] in UNKNOWN:
                is_usable = key in NULL_IS_ABSENT or field.default in UNKNOWN
            if show(self.before.get((section, key))).lower() == show(value).lower() and is_usable:
                continue
            self.edits.append(Edit(section, self.job.written_name(section, key), value))
            self.changes.append(Change(_path(section, key), "changed", show(content.get(key)), show(value)))


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


def _breaks(key: str, value: Any, job: JobConfig) -> bool:
    """Whether a value without an equivalent has a meaning to keep."""
    harmless = NO_EQUIVALENT[key][1] if key in NO_EQUIVALENT else ALL
    is_standard = str(job.section("deepspeed_config").get(LAUNCHER)).lower() == "standard"
    if key in (*HOSTS, LAUNCHER) and (is_standard or job.number("num_machines") <= 1):
        return False
    return harmless is not ALL and str(value).lower() not in harmless


def _path(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def show(value: Any) -> str:
    words = counted(len(value), "key") if isinstance(value, Mapping) else flag_text(value)
    return "" if value is None else words


def refusal(path: Path, target: str, changes: Iterable[Change]) -> UserError:
    """The error of a conversion that loses a meaning."""
    broken = [change for change in changes if change.breaks]
    keys = ", ".join(change.key.rpartition(".")[2] for change in broken)
    flags = " ".join(change.fix for change in broken if change.fix)
    alternative = f"give the script {flags}, and write the file" if flags else "accept the loss and write the file"
    return UserError(
        f"{path}: {target} can't keep the meaning of {keys}",
        why="; ".join(change.why for change in broken),
        fix=f"change those keys first, or {alternative}: --force. Nothing was written",
    )
