"""Draws questions in a terminal: Enter answers, Escape goes back, Ctrl-C stops. The only import of questionary."""

from collections.abc import Sequence
from typing import Any

import questionary
from prompt_toolkit.filters import Always
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings

from accel_fsdp.asking import Context, Question

BACK = object()
"""The answer of someone who pressed Escape."""
ESCAPE_SECONDS = 0.1
"""How long a lone Escape waits to see whether it begins an arrow key's sequence."""


def ask(question: Question, context: Context, before: Any) -> Any:
    """Asks once, with the answer `before` or the default proposed; Ctrl-C raises KeyboardInterrupt."""
    value, reason = question.default(context)
    value = value if before is None else before
    if question.options is None:
        shown = ",".join(value) if isinstance(value, tuple) else str(value)
        return _run(questionary.text(question.prompt, default=shown, instruction=f"({reason}) "))
    choices = [
        questionary.Choice(option.label, value=option.value, disabled=option.disabled or None)
        for option in question.options(context)
    ]
    free = [choice for choice in choices if not choice.disabled]
    default = next((choice for choice in free if str(choice.value) == str(value)), free[0])
    return _run(questionary.select(question.prompt, choices, default=default, instruction=f"({reason})"))


def pick(text: str, rows: Sequence[tuple[str, str]]) -> Any:
    """One of several rows, given as (value, label); Escape returns BACK."""
    choices = [questionary.Choice(label, value=value) for value, label in rows]
    return _run(questionary.select(text, choices, instruction="(Enter on a line)"))


def confirm(text: str, default: bool) -> bool:
    """A yes-or-no question; Escape is a no, Ctrl-C raises KeyboardInterrupt."""
    return _run(questionary.confirm(text, default=default)) is True


def _run(question: questionary.Question) -> Any:
    """Long lines wrap instead of being cut off, and Escape ends the question without an answer."""
    application = question.application
    bindings = KeyBindings()

    @bindings.add("escape", eager=True)
    def back(event: KeyPressEvent) -> None:
        event.app.erase_when_done = True
        event.app.exit(result=BACK)

    application.key_bindings = merge_key_bindings([application.key_bindings or KeyBindings(), bindings])
    application.ttimeoutlen = ESCAPE_SECONDS
    for window in application.layout.find_all_windows():
        window.wrap_lines = Always()
    return question.unsafe_ask()
