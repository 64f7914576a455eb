"""The command `accel-fsdp migrate`: the wizard's converter with another engine, and a report of what changes."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from accel_fsdp import atomic_files, console
from accel_fsdp.command_line import arg, positional
from accel_fsdp.config import EXPERT_FLAG, TARGETS, Engine, MigrationTarget, deepspeed_name, header, yaml_file
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.wizard import convert, reading
from accel_fsdp.wizard.convert import Change

UNKNOWN_STAGE = "9"
"""Stands for the stage in DeepSpeed's own file."""
STYLES = {"renamed": "cyan", "lost": "yellow", "changed": "yellow"}


@dataclass(frozen=True)
class MigrateCommand:
    """The whole command.

    `force` accepts a lost meaning, and `overwrite` replaces an existing OUT. They are separate, because the report asks
    for the first, and users may not expect the second.
    """

    file: Annotated[Path, positional("An Accelerate YAML.", "FILE")]
    to: Annotated[MigrationTarget, arg("The engine to rewrite it for.")]
    output: Annotated[Path | None, arg("Write there and leave FILE as it is.", "OUT", alias="-o")] = None
    force: Annotated[bool, arg("Write although a meaning is lost.")] = False
    overwrite: Annotated[bool, arg("Replace an existing OUT.")] = False
    json: Annotated[bool, arg("The changes and the new file as JSON.")] = False
    dry_run: Annotated[bool, arg("Write nothing; print the new file.")] = False
    layer_class: Annotated[str, arg("The layer class to wrap, where FILE names none.", "NAME")] = ""


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
        show(migration.changes, to_stderr=options.dry_run)
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


def migrated(path: Path, target: MigrationTarget, layer_class: str = "") -> Migration:
    """The migration of a file. Nothing is written."""
    job, document = yaml_file.read_config(path)
    convert.check(job, document)
    before, flags = document.source, reading.to_flags(job)
    has_own_file = convert.OWN_FILE in job.section("deepspeed_config")
    old = reading.to_answers(flags | ({"zero_stage": UNKNOWN_STAGE} if has_own_file else {}))
    is_zero = job.engine is Engine.DEEPSPEED and not has_own_file
    source = deepspeed_name(old.zero_stage) if is_zero else job.engine.label
    if source == TARGETS[target]:
        return Migration(source, source, before, before)
    named = {"layer_class": layer_class} if layer_class else {}
    new = reading.to_answers(convert.retarget(flags, job, target) | named)
    changes = convert.rewrite(document, job, old, new, {"zero_stage", *named})
    title = f"Migrated from {source} to {TARGETS[target]}. The command below made the original file."
    text = header.retitle(yaml_file.dump(document), title)
    return Migration(source, TARGETS[target], before, text.replace(f" {EXPERT_FLAG} {old.ep}", ""), tuple(changes))


def show(changes: Iterable[Change], to_stderr: bool = True) -> None:
    """Prints a row for each change: a key before and after, with an arrow if it changes."""
    rows, styles = [], []
    for change in changes:
        key = change.key.rpartition(".")[2]
        before = f"{key}: {change.old}" if change.old else key
        after = f"{change.new_key}: {change.new}" if change.new_key else change.new
        arrow = f"{before} → {after}" if after and after != change.old else before
        why = f"{change.why}: {change.fix}" if change.fix else change.why
        rows.append((change.kind + "!" * change.breaks, arrow, why))
        styles.append("red" if change.breaks else STYLES[change.kind])
    if rows:
        console.show_table(("", "key", "why"), rows, styles, to_stderr=to_stderr)


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
