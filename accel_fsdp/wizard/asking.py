"""Asks in a terminal the questions that flags, presets and files leave open, and those that the user changes.

Enter answers, Escape goes back, Ctrl-C stops. The only import of questionary.
"""

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import questionary
from prompt_toolkit.application import get_app_session
from prompt_toolkit.filters import Always
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings

from accel_fsdp import console
from accel_fsdp.errors import UserError
from accel_fsdp.wizard.answers import Context
from accel_fsdp.wizard.interview import Interview, introduce
from accel_fsdp.wizard.questions import QUESTIONS, Question, settle
from accel_fsdp.wizard.to_yaml import flag_text

BACK = object()
"""The answer after Escape."""
FIELDS = [question.field for question in QUESTIONS]
GREETING = (
    "Arrow keys choose, Enter answers, Escape goes back one question, Ctrl-C stops and writes nothing. "
    "Grey text is the proposal: Enter takes it."
)


def interview(flags: Mapping[str, str], given: Mapping[str, Any]) -> Interview:
    """Settles every question: by a flag, a preset or a file, else by asking; Ctrl-C raises KeyboardInterrupt."""
    session = Interview(flags, {**given, **flags}, fixed=frozenset({**given, **flags}))
    console.say(GREETING, style="dim", wrap=True)
    with suppress(UserError):  # which the question of the model reports
        if session.given.get("model"):
            introduce(session.given["model"])
    _ask_from(session, 0)
    return session


def change(session: Interview, field: str) -> None:
    """Asks one question again; answers that no longer fit fall back to their defaults, with a message."""
    question = QUESTIONS[FIELDS.index(field)]
    answer = _ask(question, session.settled(until=field), session.settled()[field])
    if answer is not BACK:
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
        position += 1
        if question.field not in session.fixed and question.is_open(context):
            answer = _ask(question, context, session.given.get(question.field))
            if answer is BACK:
                position = FIELDS.index(session.asked.pop()) if session.asked else position - 1
            else:
                session.given[question.field] = answer
                session.asked.append(question.field)


def _ask(question: Question, context: Context, before: Any) -> Any:
    """Asks until the answer passes the question's own check, and the model can be read; returns it, or BACK.

    The default is grey and disappears on typing; an earlier answer `before` can be edited.
    """
    while True:
        answer = (_ask_choice if question.meanings else _ask_text)(question, context, before)
        if answer is BACK:
            return answer
        console.answered(question.title, flag_text(answer))
        try:
            settle(question, context, answer)
            if question.field == "model":
                introduce(answer)
            return answer
        except UserError as error:
            console.say(str(error), style="red", wrap=True, lines=True)


def _ask_text(question: Question, context: Context, before: Any) -> Any:
    value, reason = question.default(context)
    default, typed = flag_text(value), "" if before is None else flag_text(before)
    grey = [("class:instruction", default)]
    hint = _in_parentheses(reason) + " "
    text = questionary.text(_fill(question.prompt), default=typed, instruction=hint, placeholder=grey)
    return _run(text) or default


def _ask_choice(question: Question, context: Context, before: Any) -> Any:
    value, reason = question.default(context)
    proposed = value if before is None else before
    choices = [
        _choice(question.label(option, context), option, f"proposed: {reason}" if option == value else None)
        for option in question.meanings
        if str(option) == str(proposed) or option in question.options(context)
    ]
    default = next((choice for choice in choices if str(choice.value) == str(proposed)), choices[0])
    prompt = _fill(question.prompt)
    return _run(questionary.select(prompt, choices, default=default, instruction=" ", use_jk_keys=False))


def pick(text: str, rows: Sequence[tuple[str, str]], instruction: str) -> Any:
    """Lets the user pick one of several rows (value, label); Escape returns BACK. Leaves nothing on the screen."""
    choices = [_choice(label, value) for value, label in rows]
    hint = _in_parentheses(instruction)
    return _run(questionary.select(_fill(text), choices, instruction=hint, use_jk_keys=False))


def confirm(text: str, default: bool) -> bool:
    """Asks a yes-or-no question; Escape means no, Ctrl-C raises KeyboardInterrupt."""
    answer = _run(questionary.confirm(text, default=default)) is True
    console.answered(text, "yes" if answer else "no")
    return answer


def _in_parentheses(text: str) -> str:
    """A line of its own below the prompt."""
    return f"\n  {_fill(f'({text})', indent=3)}"


def _choice(label: str, value: Any, hint: str | None = None) -> questionary.Choice:
    """An option, whose hint shows while it is highlighted."""
    return questionary.Choice(_fill(label, indent=5), value=value, description=hint)


def _fill(text: str, indent: int = 2) -> str:
    """`text` broken between words, for the width that prompt_toolkit draws in, regardless of the variable COLUMNS."""
    width = get_app_session().output.get_size().columns - indent - 1
    return ("\n" + " " * indent).join(textwrap.wrap(text, width, break_on_hyphens=False))


def _run(question: questionary.Question) -> Any:
    """Runs a question: wraps long lines, returns BACK on Escape, and clears the prompt after an answer."""
    application = question.application
    application.erase_when_done = True
    bindings = KeyBindings()

    @bindings.add("escape", eager=True)
    def back(event: KeyPressEvent) -> None:
        event.app.exit(result=BACK)

    for window in application.layout.find_all_windows():
        window.wrap_lines = Always()
    application.key_bindings = merge_key_bindings([application.key_bindings or KeyBindings(), bindings])
    application.ttimeoutlen = 0.1  # seconds to wait after Escape for the rest of an arrow key's sequence
    return question.unsafe_ask()
