"""Asks the questions of `questions.py` in a terminal. The only import of questionary."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import questionary

from accel_fsdp import facts, render
from accel_fsdp.asking import Context, Question, settle, skip
from accel_fsdp.errors import UserError
from accel_fsdp.questions import QUESTIONS, to_answers
from accel_fsdp.types import Answers

Mode = Literal["ask", "defaults", "flags"]


def interview(flags: Mapping[str, str], mode: Mode) -> Answers:
    """Settles every question by its flag; those without one by asking, or by their default.

    In mode "flags" nothing is left to defaults.

    Raises:
        UserError: a flag's value is refused, or a default can't be found. KeyboardInterrupt: Ctrl-C.
    """
    with render.waiting("Looking at this machine"):
        context = Context(given={}, machine=facts.read_machine())
    unanswered: list[str] = []
    for question in QUESTIONS:
        if not question.applies(context):
            context = skip(question, context, flags)
        elif question.field in flags:
            context = settle(question, context, flags[question.field])
        elif mode == "ask":
            context = ask(question, context)
        else:
            unanswered.append(question.flag)
            context = settle(question, context, question.default(context)[0])
        if question.field == "model":
            context = _with_model(question, context, "layer_class" in flags, mode == "ask")
    if mode == "flags" and unanswered:
        raise UserError(
            "this is not a terminal, so nothing can be asked",
            why="unanswered: " + " ".join(unanswered),
            fix="add --yes to take the defaults, or give these flags",
        )
    return to_answers(context)


def _with_model(question: Question, context: Context, class_given: bool, interactive: bool) -> Context:
    """Reads the model; asks again for one that can't be read, or goes on without facts when the class was given."""
    while True:
        try:
            with render.waiting(f"Building {context['model']} on the meta device"):
                model = facts.read_model(context["model"])
        except UserError as error:
            if class_given:
                render.say(f"note: {error.what}; going on with the given layer class, unchecked", style="yellow")
                return context
            if not interactive:
                raise
            render.say(str(error), style="red")
            context = ask(question, context)
            continue
        layers = ", ".join(f"{layer.count} x {layer.name}" for layer in model.wrap_classes) or "no repeated layer"
        render.say(
            f"{model.name}: {model.model_type}, {model.parameters / 1e6:,.1f} M parameters, {layers}", style="cyan"
        )
        return replace(context, model=model)


def ask(question: Question, context: Context) -> Context:
    """Asks until the answer passes the question's own check; Ctrl-C raises KeyboardInterrupt."""
    while True:
        try:
            return settle(question, context, _answer(question, context))
        except UserError as error:
            render.say(str(error), style="red")


def confirm(text: str, default: bool) -> bool:
    """A yes-or-no question; Ctrl-C raises KeyboardInterrupt."""
    return bool(questionary.confirm(text, default=default).unsafe_ask())


def _answer(question: Question, context: Context) -> Any:
    value, reason = question.default(context)
    if question.options is None:
        shown = ",".join(value) if isinstance(value, tuple) else str(value)
        return questionary.text(question.prompt, default=shown, instruction=f"({reason}) ").unsafe_ask()
    choices = [
        questionary.Choice(option.label, value=option.value, disabled=option.disabled or None)
        for option in question.options(context)
    ]
    default = next(choice for choice in choices if choice.value == value)
    return questionary.select(question.prompt, choices, default=default, instruction=f"({reason})").unsafe_ask()
