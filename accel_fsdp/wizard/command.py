"""The command `accel-fsdp config`: interview, review, write."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from accel_fsdp import atomic_files, console
from accel_fsdp.config import JobConfig, header, yaml_file
from accel_fsdp.errors import UsageError, did_you_mean
from accel_fsdp.wizard import asking, convert, interview, migration, prompts, reading, to_yaml
from accel_fsdp.wizard.answers import Answers
from accel_fsdp.wizard.convert import Change
from accel_fsdp.wizard.flags import WizardOptions
from accel_fsdp.wizard.presets import PRESETS
from accel_fsdp.wizard.questions import applying, is_shown

WRITE, SHOW, QUIT = "write", "show", "quit"


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
    output = _output(options)
    if output and output.suffix == ".json" and not options.from_file:
        raise UsageError(
            f"{output} would hold YAML", why="Accelerate reads it as JSON", fix=f"-o {output.with_suffix('.yaml')}"
        )
    interactive = not options.yes and sys.stdin.isatty()
    if not interactive:
        _refuse_existing(options)
    if interactive and output and atomic_files.is_taken(output) and not options.from_file and not options.force:
        console.say(f"{output} exists; before it is overwritten you will be asked.", style="yellow", wrap=True)
    original = _read(options.from_file) if options.from_file else None
    answers = {**_preset(options.preset), **(_converted(original, flags) if original else {})}
    if "model" not in {**answers, **flags} and (options.from_file or "layer_class" in {**answers, **flags}):
        answers["model"] = interview.WITHOUT_MODEL
    if interactive:
        session = asking.interview(flags, answers)
    else:
        session = interview.interview(flags, answers, defaults=options.yes)
    if interactive:
        return _review(session, options, original)
    _warn(interview.warnings(session))  # the file is written nevertheless, as requested
    return _write(session, options, original)


def _warn(lines: tuple[str, ...]) -> None:
    for line in lines:
        console.say(line, style="yellow", wrap=True)


def _preset(name: str | None) -> Mapping[str, str]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise UsageError(
            f"there is no preset {name}.{did_you_mean(name, PRESETS)}",
            why="its answers are not known",
            fix="one of: " + ", ".join(PRESETS),
        )
    return PRESETS[name]


def _read(path: Path) -> Original:
    """The file, and the flags that would produce it."""
    from accel_fsdp.config import read_config

    if str(path) == yaml_file.STDIN:
        raise UsageError("--from - can't be re-edited", why="it is read several times", fix="--from FILE")
    job, _ = read_config(path)
    return Original(path, job, reading.to_flags(job))


def _converted(original: Original, flags: Mapping[str, str]) -> Mapping[str, str]:
    """The answers of the file, for the engine that the flags name."""
    written = original.written
    engine = flags.get("engine", written["engine"]).lower()
    target = convert.target_of(engine, {**written, **flags}, written.get("strategy", "1"))
    is_same = engine == written["engine"] and flags.get("fsdp_version") in (None, written.get("fsdp_version"))
    return written if is_same or target is None else convert.retarget(written, original.job, target)


def _text(session: interview.Interview, original: Original | None) -> tuple[str, list[Change]]:
    """The text to write, and what changes in a file that is re-edited."""
    answers = interview.answers(session)
    if original is None:
        return to_yaml.to_text(answers), []
    answered = set(session.given.keys() - original.written.keys())
    if answers.model and "layer_class" not in original.written:
        answered.add("layer_class")  # the model has answered it
    open_fields = vars(answers).keys() - original.written.keys() - answered
    old = replace(reading.to_answers(original.written), **{field: getattr(answers, field) for field in open_fields})
    document = yaml_file.load(original.path)
    changes = convert.rewrite(document, original.job, old, answers, answered)
    return header.with_header(yaml_file.dump(document), to_yaml.header(answers)), changes


def _review(session: interview.Interview, options: WizardOptions, original: Original | None) -> int:
    """Shows all answers on one screen: Enter on an answer asks it again, the first line writes the file."""
    output = _output(options)
    place = "stdout" if output is None else str(output)
    while True:
        answers = interview.answers(session)
        console.clear()
        _warn(interview.warnings(session))
        text, changes = _text(session, original)
        chosen = prompts.pick(
            f"Write {place}?",
            [(WRITE, "Write it"), *_rows(answers), (SHOW, "Show the YAML"), (QUIT, "Quit, write nothing")],
            "Enter on a line; Escape goes back" if session.asked else "Enter on a line",
        )
        if chosen == WRITE and _may_write(output, options, original, text, changes):
            return _write(session, options, original)
        if chosen == SHOW:
            console.show_yaml(text, place)
            if original is not None:
                _show_diff(original, text, place)
            prompts.pause()
        elif chosen == QUIT:
            console.say("nothing written")
            return 1
        elif chosen is prompts.BACK:
            asking.go_back(session)
        elif chosen != WRITE:
            asking.change(session, chosen)


def _rows(answers: Answers) -> list[tuple[str, str]]:
    """The questions that the wizard asks, and the other answers that differ from its defaults."""
    fields = [question.field for question in applying(answers) if is_shown(question, answers)]
    return [(field, f"{field.replace('_', ' '):25} {to_yaml.flag_text(getattr(answers, field))}") for field in fields]


def _show_diff(original: Original, text: str, place: str) -> None:
    console.show_diff(original.job.source, text, str(original.path), place)


def _may_write(
    output: Path | None, options: WizardOptions, original: Original | None, text: str, changes: list[Change]
) -> bool:
    """Asks before a file is overwritten, or a meaning is lost; shows the diff first if the file is re-edited."""
    if broken := [change for change in changes if change.breaks]:
        migration.show(broken)
        if not prompts.confirm("Write it without them?", default=False):
            return False
    if output is None or options.force or not atomic_files.is_taken(output):
        return True
    if original is not None:
        _show_diff(original, text, str(output))
    return prompts.confirm(f"{output} exists. Overwrite it?", default=original is not None)


def _write(session: interview.Interview, options: WizardOptions, original: Original | None) -> int:
    output, answers = _output(options), interview.answers(session)
    text, changes = _text(session, original)
    if original and any(change.breaks for change in changes) and not (options.force or sys.stdin.isatty()):
        raise migration.refusal(original.path, answers.engine, changes)
    if note := header.missing_here(text):
        _warn((note,))
    if output is None:
        console.put(text.rstrip(), lines=True)
        return 0
    if original is not None and not sys.stdin.isatty():
        _show_diff(original, text, str(output))
    atomic_files.write_text(output, text)
    everywhere = ", which accelerate launch reads where no --config_file is given"
    console.say(f"written: {output}{everywhere if output == atomic_files.default_config() else ''}", style="green")
    if answers.own_script:
        what = f"{answers.model} is built by {answers.auto_class}, and train/sft.py trains AutoModelForCausalLM"
        unread = f"{answers.model or 'the model'} is unknown, and train/sft.py may not be able to train it"
        console.say(
            f"note: {what if answers.auto_class else unread}; launch a script of your own:", style="yellow", wrap=True
        )
    else:
        hint = ", on each machine with its own --machine_rank" if answers.num_machines > 1 else ""
        hint = ", in a job of SLURM, Kubernetes or another engine" if answers.needs_engine else hint
        console.say(f"train with{hint}:")
    console.put(to_yaml.launch_line(answers, str(output)), lines=True)
    return 0


def _output(options: WizardOptions) -> Path | None:
    if str(options.output) == "-":
        return None
    return options.output or options.from_file or atomic_files.default_config()


def _refuse_existing(options: WizardOptions) -> None:
    output = _output(options)
    in_place = options.output is None and options.from_file is not None
    if output and not options.force and not in_place:
        atomic_files.refuse_existing(output)
