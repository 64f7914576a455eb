"""The command `accel-fsdp config`: interview, review, write."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, console
from accel_fsdp.config import JobConfig, header, read_config, yaml_file
from accel_fsdp.errors import UsageError
from accel_fsdp.wizard import asking, interview, to_yaml
from accel_fsdp.wizard.answers import Answers
from accel_fsdp.wizard.flags import WizardOptions
from accel_fsdp.wizard.from_yaml import answers_in, unchecked_answers
from accel_fsdp.wizard.migration import for_engine, show_changes
from accel_fsdp.wizard.presets import PRESETS
from accel_fsdp.wizard.questions import applying, is_shown
from accel_fsdp.wizard.rewriting import Change, refusal, rewrite

WRITE, QUIT = "write", "quit"


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
    is_in_place = options.from_file and not options.output
    if not (interactive or is_in_place or options.force or str(output) == "-"):
        atomic_files.refuse_existing(output)
    job, written = _read(options.from_file, flags) if options.from_file else (None, {})
    answers = {**PRESETS.get(options.preset or "", {}), **written}
    if "model" not in {**answers, **flags} and (options.from_file or "layer_class" in {**answers, **flags}):
        answers["model"] = interview.WITHOUT_MODEL
    if interactive:
        return Review(asking.interview(flags, answers), output, options, job).ask()
    session = interview.interview(flags, answers, defaults=options.yes)
    if (context := session.settled()).model:
        interview.introduce(context["model"])
    interview.warn(*interview.warnings(session))  # the file is written nevertheless, as requested
    review = Review(session, output, options, job)
    return review.write(*review.text())


def _read(path: Path, flags: Mapping[str, str]) -> tuple[JobConfig, Mapping[str, Any]]:
    """The content of the edited file, and its answers for the engine that the flags name."""
    if str(path) == yaml_file.STDIN:
        raise UsageError("--from - can't be re-edited", why="it is read several times", fix="--from FILE")
    job, document = read_config(path)
    return job, for_engine(flags, answers_in(job), job, document)


@dataclass
class Review:
    """The end of an interview: its answers as a YAML for `output`, which is - for stdout. `job` is the edited file."""

    session: interview.Interview
    output: Path
    options: WizardOptions
    job: JobConfig | None

    def text(self) -> tuple[Answers, str, list[Change]]:
        """The answers, the text to write, and what changes in a file that is re-edited."""
        answers, path = interview.answers(self.session), self.options.from_file
        if path is None or self.job is None:
            return answers, to_yaml.to_text(answers), []
        document, written = yaml_file.load(path), answers_in(self.job)
        answered = {*written, *self.session.given, *(["layer_class"] if answers.model else [])}  # by the model
        open_answers = {field: value for field, value in vars(answers).items() if field not in answered}
        old = replace(unchecked_answers(written), **open_answers)
        changes = rewrite(document, self.job, old, answers)
        return answers, header.with_header(yaml_file.dump(document), to_yaml.header(answers)), changes

    def ask(self) -> int:
        """Shows all answers on one screen: Enter on an answer asks it again, the first line writes the file."""
        place = "stdout" if str(self.output) == "-" else str(self.output)
        while True:
            console.clear()
            interview.warn(*interview.warnings(self.session))
            answers, text, changes = self.text()
            asked = [question for question in applying(answers) if is_shown(question, answers)]
            rows = [(q.field, f"{q.title:25} {to_yaml.flag_text(getattr(answers, q.field))}") for q in asked]
            chosen = asking.pick(
                f"Write {place}?",
                [(WRITE, "Write it"), *rows, (QUIT, "Quit, write nothing")],
                "Enter on a line; Escape goes back" if self.session.asked else "Enter on a line",
            )
            if chosen == WRITE and self.may_write(text, changes):
                return self.write(answers, text, [])
            if chosen == QUIT:
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
        if str(self.output) == "-" or self.options.force or not atomic_files.is_taken(self.output):
            return True
        self.show_diff(text)
        return asking.confirm(f"{self.output} exists. Overwrite it?", default=self.job is not None)

    def show_diff(self, text: str) -> None:
        if self.job is not None:
            console.show_diff(self.job.source, text, str(self.options.from_file), str(self.output))

    def write(self, answers: Answers, text: str, changes: list[Change]) -> int:
        """Writes the file and prints the command that uses it; returns 0. A meaning is lost only by force."""
        if self.options.from_file and not self.options.force and any(change.breaks for change in changes):
            raise refusal(self.options.from_file, answers.engine, changes)
        if note := header.missing_here(header.launch_words(text)):
            interview.warn(note)
        if str(self.output) == "-":
            console.put(text.rstrip(), lines=True)
            return 0
        if not sys.stdin.isatty():
            self.show_diff(text)
        atomic_files.write_text(self.output, text)
        is_default = self.output == default_config()
        everywhere = ", which accelerate launch reads where no --config_file is given" if is_default else ""
        console.say(f"written: {self.output}{everywhere}", style="green")
        if answers.own_script:
            can = (
                f"can't build {answers.auto_class}" if answers.auto_class else "may be unable to train an unknown model"
            )
            interview.warn(f"note: train/sft.py {can}; launch a script of your own:")
        else:
            hints = {"rank": ", on each machine with its own --machine_rank", "scheduler": ", in a job of a scheduler"}
            console.say(f"train with{hints.get(answers.place, '')}:")
        console.put(to_yaml.launch_line(answers, str(self.output)), lines=True)
        return 0


def default_config() -> Path:
    """Where `accelerate launch` looks without `--config_file`, as accelerate.commands.config.config_args has it."""
    cache = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    return Path(cache).expanduser() / "accelerate" / "default_config.yaml"
