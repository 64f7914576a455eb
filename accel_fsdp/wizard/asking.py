"""Asks in a terminal the questions that flags, presets and files leave open, and those that the user changes."""

from collections.abc import Mapping
from typing import Any

from accel_fsdp import console
from accel_fsdp.errors import UserError
from accel_fsdp.wizard import prompts
from accel_fsdp.wizard.interview import Interview, in_words, read_model
from accel_fsdp.wizard.question import Context, Question, settle
from accel_fsdp.wizard.questions import QUESTIONS

FIELDS = [question.field for question in QUESTIONS]
GREETING = (
    "Arrow keys choose, Enter answers, Escape goes back one question, Ctrl-C stops and writes nothing. "
    "Grey text is the proposal: Enter takes it."
)


def interview(flags: Mapping[str, str], given: Mapping[str, str]) -> Interview:
    """Settles every question: by a flag, a preset or a file, else by asking; Ctrl-C raises KeyboardInterrupt."""
    session = Interview(flags, {**given, **flags})
    session.fixed = frozenset(session.given)
    console.say(GREETING, style="dim", wrap=True)
    _ask_from(session, 0)
    return session


def change(session: Interview, field: str) -> None:
    """Asks one question again; answers that no longer fit fall back to their defaults, with a message."""
    question = next(question for question in QUESTIONS if question.field == field)
    answer = _ask(question, session.settled(until=field), session.settled()[field])
    if answer is not prompts.BACK:
        session.flags, session.given[field] = {}, answer  # what was typed as a flag is now an answer like the others


def go_back(session: Interview) -> None:
    """Asks the latest question again, and those that depend on it; does nothing if none was asked."""
    if session.asked:
        _ask_from(session, FIELDS.index(session.asked.pop()))


def _ask_from(session: Interview, position: int) -> None:
    """Asks the open questions in order; Escape goes back to the previous one."""
    while position < len(QUESTIONS):
        question = QUESTIONS[position]
        context = session.settled(until=question.field)
        if question.field in session.fixed or not question.is_open(context):
            position += 1
            continue
        answer = _ask(question, context, session.given.get(question.field))
        if answer is prompts.BACK:
            position = FIELDS.index(session.asked.pop()) if session.asked else position
            continue
        session.given[question.field] = answer
        session.asked.append(question.field)
        position += 1


def _ask(question: Question, context: Context, before: Any) -> Any:
    """Asks until the answer passes the question's own check, and the model can be read; returns it, or BACK."""
    while True:
        answer = prompts.ask(question, context, before)
        if answer is prompts.BACK:
            return answer
        try:
            settle(question, context, answer)
            if question.field == "model":
                read_model(answer)
            return answer
        except UserError as error:
            console.say(_at_prompt(error, question), style="red", wrap=True, lines=True)


def _at_prompt(error: UserError, question: Question) -> str:
    """The error for a prompt: `--num-machines 2` becomes `num machines 2`, and the question's own flag is removed."""
    fix = error.fix
    if fix.startswith(f"{question.flag} "):
        fix = f"type {fix.replace(f'{question.flag} ', '').replace('ID_OR_FOLDER', 'a hub id or a folder')}"
    return str(UserError(in_words(error.what), why=in_words(error.why), fix=in_words(fix)))
