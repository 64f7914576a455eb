"""The command `accel-fsdp migrate`: read, plan, report, write."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, console
from accel_fsdp.command_line import parse_command_line
from accel_fsdp.config import (
    EXPERT_FIELD,
    EXPERT_FLAG,
    SCRIPT,
    THIS_FILE,
    Engine,
    JobConfig,
    MigrationTarget,
    header,
    is_native,
    read_config,
    unreadable,
    yaml_edit,
    yaml_file,
)
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.migration import native
from accel_fsdp.migration.changes import Change, Migration, as_int
from accel_fsdp.migration.flags import MigrateCommand
from accel_fsdp.migration.translate import SECTIONS, new_draft, plan

STYLES = {"kept": "dim", "renamed": "cyan", "lost": "yellow", "changed": "yellow"}


def migrate(options: MigrateCommand) -> int:
    """Rewrites a file for another engine and reports the change of each key; returns 0.

    Raises:
        UserError: a meaning can't be kept, and `options.force` is not given, or the output exists, without
            `options.overwrite`; nothing is written.
        UsageError: the file can't be read, or its engine can't be migrated.
    """
    path, target = options.file, options.to
    if str(path) == yaml_file.STDIN and not (options.output or options.dry_run):
        raise UsageError("migrate -", why="stdin can't be rewritten", fix="accel-fsdp migrate - -o OUT, or --dry-run")
    migration, before, after = drawn_up(path, target, options.layer_class, options.expert_parallel_size)
    if before != after and not migration.edits and not (options.output or options.dry_run):
        kind = "JSON" if target == "native" else "a YAML"
        raise UsageError(f"{path} would become {kind}", why="both are needed", fix="-o OUT, or --dry-run")
    _report(path, migration, after, options)
    if migration.broken and not options.force:
        raise _broken(path, migration)
    if options.dry_run:
        if not options.json:
            console.put(after.removesuffix("\n"), lines=True)
    else:
        _write(path, migration, before, after, options)
    return 0


def drawn_up(
    path: Path, target: MigrationTarget, layer_class: str = "", experts: int | None = None
) -> tuple[Migration, str, str]:
    """The migration of a file, its text, and the new file's text. Nothing is written."""
    job, document = read_config(path)
    before = document.source
    if target == "native" or is_native(job.values):
        migration, after = (
            _to_native(job, experts) if target == "native" else _from_native(path, job, target, layer_class)
        )
        return migration, before, after
    migration = plan(job, target, layer_class)
    launched = _experts_in_launch_line(job)
    if launched > 1 and target != "fsdp2":
        why = "FSDP2 alone has expert parallelism"
        change = Change(EXPERT_FLAG, "lost", str(launched), why=why, breaks=True)
        migration = replace(migration, changes=(*migration.changes, change))
    _refuse_merge_keys(path, document)
    yaml_edit.apply(document, migration.edits)
    if not migration.edits:
        return migration, before, before
    title = f"Migrated from {migration.source} to {migration.target}. The command below made the original file."
    after = header.retitle(yaml_file.dump(document), title)
    return migration, before, after if target == "fsdp2" else after.replace(f" {EXPERT_FLAG} {launched}", "")


def _experts_in_launch_line(job: JobConfig) -> int:
    """The expert-parallel size in the launch line of a file's comment; 1 without one."""
    return as_int(parse_command_line(header.script_arguments(job.source)).get(EXPERT_FIELD)) or 1


def _to_native(job: JobConfig, experts: int | None) -> tuple[Migration, str]:
    """The JSON of transformers' `DistributedConfig`; the expert-parallel size is that of the launch line by default."""
    if is_native(job.values):
        return Migration(native.NATIVE, native.NATIVE, note=f"is {native.NATIVE} already"), job.source
    if job.engine is not Engine.FSDP2:
        what, why = f"{job.engine.label} has no native form", "transformers shards with FSDP2 only"
        raise UsageError(what, why=why, fix="accel-fsdp migrate FILE --to fsdp2 first")
    experts = experts or _experts_in_launch_line(job)
    migration, content = native.to_native(new_draft(job, "fsdp_config"), experts)
    return migration, json.dumps(content, indent=2) + "\n"


def _from_native(path: Path, job: JobConfig, target: MigrationTarget, layer_class: str) -> tuple[Migration, str]:
    if target != "fsdp2":
        raise UsageError(f"--to {target}", why="the JSON is about FSDP2", fix="--to fsdp2, and from there to others")
    migration, content, experts = native.from_native(job.values, layer_class)
    script = [SCRIPT, *((EXPERT_FLAG, str(experts)) if experts > 1 else ())]
    title = f"Migrated from {migration.source} to {migration.target}."
    lines = header.comment(title, f"migrated from {path.name}", header.launch_line(THIS_FILE, script))
    return migration, "\n".join([*lines, yaml_file.dump(content)])


def _refuse_merge_keys(path: Path, document: Any) -> None:
    for place in (document, *(document.get(section) for section in SECTIONS.values())):
        if getattr(place, "merge", None):
            raise unreadable(path, "it merges keys from another mapping (<<)")


def _report(path: Path, migration: Migration, after: str, options: MigrateCommand) -> None:
    console.say(f"{path}: {migration.note or f'{migration.source} -> {migration.target}'}")
    if options.json:
        content = {"source": migration.source, "target": migration.target, "note": migration.note}
        changes = [asdict(change) for change in migration.changes]
        text = {"native" if options.to == "native" else "yaml": after}
        console.put(json.dumps({"file": str(path), **content, "changes": changes, **text}, indent=2), lines=True)
        return
    rows = [
        (
            change.kind + ("!" if change.breaks else ""),
            _before_and_after(change),
            f"{change.why}: {change.fix}" if change.fix else change.why,
        )
        for change in migration.changes
    ]
    if rows:
        styles = ["red" if change.breaks else STYLES[change.kind] for change in migration.changes]
        console.show_table(("", "key", "why"), rows, styles, to_stderr=options.dry_run)


def _before_and_after(change: Change) -> str:
    """A key before and after, with an arrow if it changes."""
    key = change.key.rpartition(".")[2]
    before = f"{key}: {change.old}" if change.old else key
    after = f"{change.new_key}: {change.new}" if change.new_key else change.new
    return f"{before} → {after}" if after and after != change.old else before


def _broken(path: Path, migration: Migration) -> UserError:
    keys = ", ".join(change.key.rpartition(".")[2] for change in migration.broken)
    flags = " ".join(change.fix for change in migration.broken if change.fix)
    alternative = f"give the script {flags}, and write the file" if flags else "accept the loss and write the file"
    return UserError(
        f"{path}: {migration.target} can't keep the meaning of {keys}",
        why="; ".join(change.why for change in migration.broken),
        fix=f"change those keys first, or {alternative}: --force. Nothing was written",
    )


def _write(path: Path, migration: Migration, before: str, after: str, options: MigrateCommand) -> None:
    output = options.output or path
    if options.output and not options.overwrite:
        atomic_files.refuse_existing(output, allow="--overwrite")
    if output != path or after != before:
        atomic_files.write_text(output, after)
        if migration.edits:
            console.show_diff(before, after, str(path), str(output))
        console.say(f"written: {output}", style="green")
