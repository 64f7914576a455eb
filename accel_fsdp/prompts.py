"""Draws questions in a terminal: Enter answers, Escape goes back, Ctrl-C stops. The only import of questionary."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

import questionary
from prompt_toolkit.filters import Always
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings

from accel_fsdp.asking import Context, Option, Question

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
        prompt, instruction = _fitted(question.prompt, reason, room=len(shown) + 2)
        return _run(questionary.text(prompt, default=shown, instruction=instruction + " "))
    choices = [_choice(option) for option in question.options(context)]
    free = [choice for choice in choices if not choice.disabled]
    default = next((choice for choice in free if str(choice.value) == str(value)), free[0])
    prompt, instruction = _fitted(question.prompt, reason)
    return _run(questionary.select(prompt, choices, default=default, instruction=instruction))


def _fitted(prompt: str, reason: str, room: int = 0) -> tuple[str, str]:
    """Prompt and reason, broken between words; the reason gets lines of its own where it doesn't fit with `room`."""
    first, instruction = _fill(prompt, start=2, indent=2), f"({reason})"
    end = len(first.splitlines()[-1]) + 3
    if end + len(instruction) + room < shutil.get_terminal_size().columns:
        return first, instruction
    return first, "\n  " + _fill(instruction, start=2, indent=3)


def _choice(option: Option) -> questionary.Choice:
    """An option broken between words; questionary draws a disabled one as `- label (why)`."""
    label = _fill(option.label, start=5, indent=5)
    why = _fill(option.disabled, start=len(label.splitlines()[-1]) + 7, indent=5)
    return questionary.Choice(label, value=option.value, disabled=why or None)


def _fill(text: str, start: int, indent: int) -> str:
    """`text` in lines of the terminal's width; the first begins in column `start`, the others in column `indent`."""
    columns = shutil.get_terminal_size().columns - 1
    lines = textwrap.wrap(
        text, columns, initial_indent=" " * start, subsequent_indent=" " * indent, break_on_hyphens=False
    )
    return "\n".join(lines).lstrip(" ")


def pick(text: str, rows: Sequence[tuple[str, str]]) -> Any:
    """One of several rows, given as (value, label); Escape returns BACK."""
    choices = [_choice(Option(value, label)) for value, label in rows]
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
