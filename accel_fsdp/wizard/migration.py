"""The command `accel-fsdp migrate`: the answers of a YAML with another engine, written into it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, console
from accel_fsdp.config import (
    EXPERT_FLAG,
    MULTI_CPU,
    STRATEGIES,
    TARGETS,
    ZERO_STAGES,
    Engine,
    JobConfig,
    MigrationTarget,
    deepspeed_name,
    header,
    yaml_file,
)
from accel_fsdp.errors import UsageError
from accel_fsdp.wizard.answers import MESH as SIZES
from accel_fsdp.wizard.flags import MigrateCommand
from accel_fsdp.wizard.from_yaml import answers_in, unchecked_answers
from accel_fsdp.wizard.rewriting import OWN_FILE, Change, mesh_problem, refusal, rewrite


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


def migrate(options: MigrateCommand) -> int:
    """Rewrites a file for another engine and reports each change; returns 0.

    Raises:
        UserError: a meaning can't be kept, and `options.force` is not given, or the output exists, without
            `options.overwrite`; nothing is written.
        UsageError: the file can't be read, or its engine can't be migrated.
    """
    path, output = options.file, options.output or options.file
    if str(output) == yaml_file.STDIN and not options.dry_run:
        raise UsageError("migrate -", why="stdin can't be rewritten", fix="accel-fsdp migrate - -o OUT, or --dry-run")
    migration = migrated(path, options.to, options.layer_class)
    is_same = migration.source == migration.target
    note = f"is {migration.source} already" if is_same else f"{migration.source} -> {migration.target}"
    console.say(f"{path}: {note}")
    if options.json:
        content = {"file": str(path), "source": migration.source, "target": migration.target}
        changes = [asdict(change) for change in migration.changes]
        console.put(json.dumps({**content, "changes": changes, "yaml": migration.text}, indent=2), lines=True)
    else:
        show_changes(migration.changes, to_stderr=options.dry_run)
    if migration.lost and not options.force:
        raise refusal(path, migration.target, migration.changes)
    if options.dry_run and not options.json:
        console.put(migration.text.removesuffix("\n"), lines=True)
    if options.dry_run:
        return 0
    if options.output and not options.overwrite:
        atomic_files.refuse_existing(output, allow="--overwrite")
    if output != path or migration.text != migration.before:
        atomic_files.write_text(output, migration.text)
        console.show_diff(migration.before, migration.text, str(path), str(output))
        console.say(f"written: {output}", style="green")
    return 0


def show_changes(changes: Iterable[Change], to_stderr: bool = True) -> None:
    """Prints a row for each change: a key before and after, with an arrow if it changes."""
    rows, styles = [], []
    for change in changes:
        before = ": ".join(filter(None, (change.key.rpartition(".")[2], change.old)))
        after = ": ".join(filter(None, (change.new_key, change.new)))
        arrow = f"{before} → {after}" if after and after != change.old else before
        rows.append((change.kind + "!" * change.breaks, arrow, ": ".join(filter(None, (change.why, change.fix)))))
        styles.append("red" if change.breaks else "cyan" if change.kind == "renamed" else "yellow")
    if rows:
        console.show_table(("", "key", "why"), rows, styles, to_stderr=to_stderr)


def migrated(path: Path, target: MigrationTarget, layer_class: str = "") -> Migration:
    """The migration of a file. Nothing is written."""
    job, document = yaml_file.read_config(path)
    _check(job, document)
    before, written = document.source, answers_in(job)
    has_own_file = OWN_FILE in job.section("deepspeed_config")
    old = unchecked_answers(written | ({"zero_stage": 9} if has_own_file else {}))  # 9: any, in that file
    is_zero = job.engine is Engine.DEEPSPEED and not has_own_file
    source = deepspeed_name(old.zero_stage) if is_zero else job.engine.label
    if source == TARGETS[target]:
        return Migration(source, source, before, before)
    named = {"layer_class": layer_class} if layer_class else {}
    changes = rewrite(document, job, old, unchecked_answers(_retargeted(written, job, target) | named))
    title = f"Migrated from {source} to {TARGETS[target]}. The command below made the original file."
    text = header.retitle(yaml_file.dump(document), title)
    return Migration(source, TARGETS[target], before, text.replace(f" {EXPERT_FLAG} {old.ep}", ""), tuple(changes))


def for_engine(
    flags: Mapping[str, str], written: Mapping[str, Any], job: JobConfig, document: Any
) -> Mapping[str, Any]:
    """The answers of a file, for the engine that flags of `accel-fsdp config` name."""
    engine = flags.get("engine", written["engine"]).lower()
    version = flags.get("fsdp_version", written.get("fsdp_version", 2))
    if (engine, str(version)) == (written["engine"], str(written.get("fsdp_version", 2))):
        return written
    _check_sections(job, document)
    twin = ZERO_STAGES.get(STRATEGIES.get(written.get("strategy", 1), ""))
    stage = flags.get("zero_stage") or written.get("zero_stage") or twin or 3
    named = {"deepspeed": f"zero{stage}", "fsdp": f"fsdp{version}"}.get(engine, "")
    return _retargeted(written, job, named) if named in TARGETS else written


def _retargeted(written: Mapping[str, Any], job: JobConfig, target: str) -> dict[str, Any]:
    """The answers of a file with another engine that shards the same, as far as it can."""
    strategy = written.get("strategy", 1)
    if job.engine is Engine.DEEPSPEED:
        strategy = {"0": 3, "1": 2, "2": 2}.get(str(written.get("zero_stage")), 1)
    elif job.engine is Engine.DDP:
        strategy = 3 if target == "fsdp1" else 1
    has_one_copy = job.engine is Engine.FSDP1 and job.number("num_machines") <= 1
    if strategy in (4, 5) and (has_one_copy or mesh_problem(job, target)) and target != "fsdp2":
        strategy -= 3
    changed = {name: answer for name, answer in written.items() if name not in SIZES} | {"strategy": strategy}
    if target.startswith("zero"):
        ram = written.get("ram_efficient_loading", True) or job.engine is Engine.DEEPSPEED
        return changed | {"engine": "deepspeed", "zero_stage": int(target[-1]), "ram_efficient_loading": ram}
    if strategy == 3 and target == "fsdp2":
        return changed | {"engine": "ddp"}
    changed |= {"engine": "fsdp", "fsdp_version": int(target[-1])}
    if job.engine is Engine.DEEPSPEED or (written.get("state_dict_type") == "LOCAL_STATE_DICT" and target == "fsdp2"):
        changed["state_dict_type"] = "SHARDED_STATE_DICT"
    policy, checkpoints = written.get("wrap_policy"), written.get("activation_checkpointing") is True
    if (policy == "SIZE_BASED_WRAP" and target == "fsdp2") or (policy == "NO_WRAP" and checkpoints):
        changed["wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    return changed


def _check(job: JobConfig, document: Any) -> None:
    """Refuses a file without a counterpart."""
    kind, version = job.values.get("distributed_type"), job.fsdp("fsdp_version")
    if job.engine in (Engine.NONE, Engine.TPU) or kind == MULTI_CPU:
        raise _unsuitable(f"distributed_type: {kind} can't be migrated", "only FSDP, DeepSpeed and DDP on GPUs can")
    if job.values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise _unsuitable("this is not the config of a local machine", "SageMaker has other keys")
    _check_sections(job, document)
    if job.is_fsdp and str(version) not in ("1", "2"):
        raise _unsuitable(f"fsdp_version: {version} is neither 1 nor 2", "Accelerate stops at it")


def _check_sections(job: JobConfig, document: Any) -> None:
    """Refuses sections whose keys can't be renamed."""
    for section in ("fsdp_config", "deepspeed_config"):
        content = job.values.get(section)
        if content is not None and not isinstance(content, Mapping):
            raise _unsuitable(f"{section} is {content!r}, not a mapping of keys", "its settings are not read")
        if odd := [key for key in content or () if not isinstance(key, str)]:
            raise _unsuitable(f"{section} has the key {odd[0]!r}, which is not text", "Accelerate stops at it")
        if getattr(document.get(section), "merge", None) or getattr(document, "merge", None):
            raise _unsuitable("the file merges keys from another mapping (<<)", "they have no place of their own")


def _unsuitable(what: str, why: str) -> UsageError:
    fix = "accel-fsdp check FILE says what else is wrong; or make one: accel-fsdp config"
    return UsageError(what, why=why, fix=fix)
