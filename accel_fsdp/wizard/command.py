"""The commands `accel-fsdp config`: interview, review, write; and `migrate`, the same conversion to another engine."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accel_fsdp import atomic_files, console
from accel_fsdp.config import JobConfig, header, read_config, yaml_file
from accel_fsdp.errors import UsageError, UserError, did_you_mean
from accel_fsdp.wizard import asking, convert, interview, to_yaml
from accel_fsdp.wizard.answers import Answers
from accel_fsdp.wizard.convert import Change, migrated
from accel_fsdp.wizard.flags import MigrateCommand, WizardOptions
from accel_fsdp.wizard.presets import PRESETS
from accel_fsdp.wizard.questions import applying, is_shown

WRITE, SHOW, QUIT = "write", "show", "quit"
STYLES = {"renamed": "cyan", "lost": "yellow", "changed": "yellow"}


@dataclass(frozen=True)
class Original:
    """The edited file: its content, the answers that it contains, and the open questions."""

    path: Path
    job: JobConfig
    written: Mapping[str, str]


def configure(options: WizardOptions, flags: Mapping[str, str]) -> int:
    """Runs the interview and writes the YAML; returns the exit code.

    Raises:
        UserError: an answer is refused, a file exists or can't be read. KeyboardInterrupt: Ctrl-C, nothing is written.
    """
    output = options.output or options.from_file or default_config()
    if output.suffix == ".json" and not options.from_file:
        fix = f"-o {output.with_suffix('.yaml')}"
        raise UsageError(f"{output} would hold YAML", why="Accelerate reads it as JSON", fix=fix)
    interactive = not options.yes and sys.stdin.isatty()
    is_guarded = str(output) != "-" and not options.force and (options.output or not options.from_file)
    if is_guarded and not interactive:
        atomic_files.refuse_existing(output)
    if is_guarded and not options.from_file and atomic_files.is_taken(output):
        console.say(f"{output} exists; before it is overwritten you will be asked.", style="yellow", wrap=True)
    original, written = _read(options.from_file, flags) if options.from_file else (None, {})
    answers = {**_preset(options.preset), **written}
    if "model" not in {**answers, **flags} and (options.from_file or "layer_class" in {**answers, **flags}):
        answers["model"] = interview.WITHOUT_MODEL
    if interactive:
        return Review(asking.interview(flags, answers), output, original, options.force).ask()
    session = interview.interview(flags, answers, defaults=options.yes)
    if (context := session.settled()).model:
        interview.introduce(context["model"])
    _warn(interview.warnings(session))  # the file is written nevertheless, as requested
    review = Review(session, output, original, options.force)
    return review.write(*review.text())


def _warn(lines: tuple[str, ...]) -> None:
    for line in lines:
        console.say(line, style="yellow", wrap=True)


def _preset(name: str | None) -> Mapping[str, str]:
    if name is not None and name not in PRESETS:
        what, why = f"there is no preset {name}.{did_you_mean(name, PRESETS)}", "its answers are not known"
        raise UsageError(what, why=why, fix="one of: " + ", ".join(PRESETS))
    return PRESETS[name] if name else {}


def _read(path: Path, flags: Mapping[str, str]) -> tuple[Original, Mapping[str, str]]:
    """The file with its answers, and those for the engine that the flags name."""
    if str(path) == yaml_file.STDIN:
        raise UsageError("--from - can't be re-edited", why="it is read several times", fix="--from FILE")
    job, document = read_config(path)
    original = Original(path, job, convert.to_flags(job))
    target = convert.target_of(flags, original.written)
    if original.written["engine"] != flags.get("engine", original.written["engine"]).lower() or target:
        convert.check_sections(job, document)
    if target is None:
        return original, original.written
    return original, convert.retarget(original.written, job, target)


@dataclass
class Review:
    """The end of an interview: its answers as a YAML for `output`, which is - for stdout."""

    session: interview.Interview
    output: Path
    original: Original | None
    force: bool

    def text(self) -> tuple[Answers, str, list[Change]]:
        """The answers, the text to write, and what changes in a file that is re-edited."""
        answers, original = interview.answers(self.session), self.original
        if original is None:
            return answers, to_yaml.to_text(answers), []
        answered = set(self.session.given.keys() - original.written.keys())
        if answers.model and "layer_class" not in original.written:
            answered.add("layer_class")  # the model has answered it
        open_fields = vars(answers).keys() - original.written.keys() - answered
        old = replace(convert.to_answers(original.written), **{field: getattr(answers, field) for field in open_fields})
        document = yaml_file.load(original.path)
        changes = convert.rewrite(document, original.job, old, answers)
        return answers, header.with_header(yaml_file.dump(document), to_yaml.header(answers)), changes

    def ask(self) -> int:
        """Shows all answers on one screen: Enter on an answer asks it again, the first line writes the file."""
        place = "stdout" if str(self.output) == "-" else str(self.output)
        while True:
            console.clear()
            _warn(interview.warnings(self.session))
            answers, text, changes = self.text()
            chosen = asking.pick(
                f"Write {place}?",
                [(WRITE, "Write it"), *_rows(answers), (SHOW, "Show the YAML"), (QUIT, "Quit, write nothing")],
                "Enter on a line; Escape goes back" if self.session.asked else "Enter on a line",
            )
            if chosen == WRITE and self.may_write(text, changes):
                return self.write(answers, text, [])
            if chosen == SHOW:
                console.show_yaml(text, place)
                self.show_diff(text)
                asking.pause()
            elif chosen == QUIT:
                console.say("nothing written")
                return 1
            elif chosen is asking.BACK:
                asking.go_back(self.session)
            elif chosen != WRITE:
                asking.change(self.session, chosen)

    def may_write(self, text: str, changes: list[Change]) -> bool:
        """Asks before a file is overwritten, or a meaning is lost; shows the diff first if the file is re-edited."""
        if broken := [change for change in changes if change.breaks]:
            show_changes(broken)
            if not asking.confirm("Write it without them?", default=False):
                return False
        if str(self.output) == "-" or self.force or not atomic_files.is_taken(self.output):
            return True
        self.show_diff(text)
        return asking.confirm(f"{self.output} exists. Overwrite it?", default=self.original is not None)

    def show_diff(self, text: str) -> None:
        if self.original is not None:
            console.show_diff(self.original.job.source, text, str(self.original.path), str(self.output))

    def write(self, answers: Answers, text: str, changes: list[Change]) -> int:
        """Writes the file and prints the command that uses it; returns 0. A meaning is lost only by force."""
        if self.original and not self.force and any(change.breaks for change in changes):
            raise _refusal(self.original.path, answers.engine, changes)
        if note := header.missing_here(header.launch_words(text)):
            _warn((note,))
        if str(self.output) == "-":
            console.put(text.rstrip(), lines=True)
            return 0
        if not sys.stdin.isatty():
            self.show_diff(text)
        atomic_files.write_text(self.output, text)
        is_default = self.output == default_config()
        everywhere = ", which accelerate launch reads where no --config_file is given" if is_default else ""
        console.say(f"written: {self.output}{everywhere}", style="green")
        _say_how_to_train(answers)
        console.put(to_yaml.launch_line(answers, str(self.output)), lines=True)
        return 0


def _say_how_to_train(answers: Answers) -> None:
    if answers.own_script:
        what = f"{answers.model} is built by {answers.auto_class}, and train/sft.py trains AutoModelForCausalLM"
        unread = f"{answers.model or 'the model'} is unknown, and train/sft.py may not be able to train it"
        _warn((f"note: {what if answers.auto_class else unread}; launch a script of your own:",))
        return
    hint = ", on each machine with its own --machine_rank" if answers.num_machines > 1 else ""
    engine = ", in a job of SLURM, Kubernetes or another engine"
    console.say(f"train with{engine if answers.place == 'engine' else hint}:")


def _rows(answers: Answers) -> list[tuple[str, str]]:
    """The questions that the wizard asks, and the other answers that differ from its defaults."""
    fields = [question.field for question in applying(answers) if is_shown(question, answers)]
    return [(field, f"{field.replace('_', ' '):25} {to_yaml.flag_text(getattr(answers, field))}") for field in fields]


def default_config() -> Path:
    """Where `accelerate launch` looks without `--config_file`, as accelerate.commands.config.config_args has it."""
    cache = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    return Path(cache).expanduser() / "accelerate" / "default_config.yaml"


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
        raise _refusal(path, migration.target, migration.changes)
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
        key = change.key.rpartition(".")[2]
        before = f"{key}: {change.old}" if change.old else key
        after = f"{change.new_key}: {change.new}" if change.new_key else change.new
        arrow = f"{before} → {after}" if after and after != change.old else before
        why = f"{change.why}: {change.fix}" if change.fix else change.why
        rows.append((change.kind + "!" * change.breaks, arrow, why))
        styles.append("red" if change.breaks else STYLES[change.kind])
    if rows:
        console.show_table(("", "key", "why"), rows, styles, to_stderr=to_stderr)


def _refusal(path: Path, target: str, changes: Iterable[Change]) -> UserError:
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
