"""The planner's functions for the page in a browser: they take and return text, which JavaScript and Python share.

The page's inputs, and the parameters of a link, are the flags of `accel-fsdp plan` without leading dashes.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from accel_fsdp import flag_words
from accel_fsdp.errors import NotInstalled, UsageError, UserError
from accel_fsdp.flag_words import Flag
from accel_fsdp.hardware import gpus
from accel_fsdp.models import catalogue, first_line
from accel_fsdp.planner import html_report
from accel_fsdp.planner.command import make_plan
from accel_fsdp.planner.flags import PlanCommand
from accel_fsdp.planner.text_report import PlanReport
from accel_fsdp.prediction import trace_store

COMMAND = "accel-fsdp plan"
FIRST_SECTIONS = 3
"""The answer, the table and a figure come before the numbers as a file, which take longer where nothing fits."""
EXAMPLE = {"model": "meta-llama/Llama-3.1-8B", "gpus": "8xH100-80GB"}
"""The initial inputs of the page."""
LABELS = {
    "model": "Model",
    "gpus": "GPUs of one machine",
    "nodes": "Machines",
    "seq_len": "Tokens per sequence",
    "method": "Training",
    "global_batch": "Sequences per step",
    "batch": "Sequences per GPU",
    "accumulation": "Micro-batches",
    "checkpointing": "Checkpointing",
    "precision": "Mixed precision",
    "dtype": "Weights loaded as",
    "optimizer": "Optimizer",
    "attention": "Attention",
    "lora_rank": "LoRA rank",
    "host_memory": "Host memory, GiB",
    "tokens": "Tokens to train on",
    "price": "Price of a GPU-hour",
    "chunked_loss": "Loss in chunks",
}
"""The fields of `PlanCommand` on the page, in order, with their labels."""
RECORDED_LATER = {"attention": ("eager",)}
"""Choices for which the catalogue has no records; a link to the page that contains such a choice gets an error."""


Kind = Literal["choice", "number", "amount", "switch", "text"]


@dataclass(frozen=True)
class Input:
    """One field of the form. `choices` are empty for a number or a text, `default` if there is none.

    A `number` is a whole number; an `amount` may have a fraction, or be 0.
    """

    name: str
    label: str
    help: str
    kind: Kind
    choices: tuple[str, ...] = ()
    default: str = ""


def form() -> list[Input]:
    """The fields of the page's form, in their order."""
    hints = get_type_hints(PlanCommand, include_extras=True)
    defaults = {option.name: option.default for option in fields(PlanCommand)}
    return [_input(name, get_args(hints[name])[1], defaults[name]) for name in LABELS]


def _input(name: str, note: Any, default: Any) -> Input:
    flag = _flags()[_word(name)]
    choices = tuple(choice for choice in flag.choices if choice not in RECORDED_LATER.get(name, ()))
    initial = "" if default in (None, MISSING, False) else str(default)
    hint = " ".join(text for text in (note.help, note.help_behavior_hint) if text)
    return Input(_word(name), LABELS[name], hint, _kind(flag, choices), choices, initial)


def _kind(flag: Flag, choices: tuple[str, ...]) -> Kind:
    if flag.is_switch:
        return "switch"
    if choices:
        return "choice"
    return "number" if int in flag.types else "amount" if float in flag.types else "text"


def _word(field: str) -> str:
    return flag_words.flag_of(field).lstrip("-")


def _flags() -> dict[str, Flag]:
    """The flags of the page by their names in a link."""
    flags = flag_words.flags_of(PlanCommand)
    return {_word(field): flags[flag_words.flag_of(field)] for field in LABELS}


def models() -> dict[str, list[str]]:
    """The models of the catalogue by publisher; others need torch, which browsers don't have."""
    by_publisher: dict[str, list[str]] = {}
    for name in filter(trace_store.shipped, catalogue.entries()):
        by_publisher.setdefault(name.partition("/")[0], []).append(name)
    return by_publisher


def cards() -> list[str]:
    return [f"{gpu.name}-{gpu.memory_gib:g}GB" for gpu in gpus.GPUS]


def answer(text: str) -> Iterator[str]:
    """Yields JSON for a JSON object of inputs: a `section` of the page at a time, `plan` after the first figure.

    In place of all that, or of what remains, an `error`.
    """
    inputs, words = json.loads(text), list[str]()
    try:
        words = _words(inputs)
        report = make_plan(_command(inputs, words))
        for number, section in enumerate(html_report.sections(report)):
            if number == FIRST_SECTIONS:
                yield json.dumps({"plan": _plan(report, words)})
            yield json.dumps({"section": section})
    except NotInstalled:
        yield _refusal(_takes_torch("This choice", words))
    except UserError as error:
        yield _refusal(error)
    except Exception as error:  # a traceback is hard to read in a browser
        yield _refusal(_bug(error))


def summary(model: str, gpus: str) -> list[str]:
    """The first sections of the answer for a model on a machine, with all else as in the empty form."""
    return list(html_report.summary(make_plan(PlanCommand(model, gpus))))


def _bug(error: Exception) -> UserError:
    return UserError(
        f"The planner stopped: {type(error).__name__}: {first_line(error)}",
        why="no input should stop it: this is a bug of the planner",
        fix="change what you entered last; and please report it, with this page's link",
    )


def _refusal(error: UserError) -> str:
    return json.dumps({"error": {"what": error.what, "why": error.why, "fix": error.fix}})


def _takes_torch(what: str, words: list[str], question: str = "") -> UserError:
    return UserError(
        f"{what} isn't on this page.{question}",
        why="the model has to be recorded with torch first, which a browser doesn't have",
        fix=f"pip install 'accel-fsdp[train]', then {COMMAND} {shlex.join(words)}",
    )


def _plan(report: PlanReport, words: list[str]) -> dict[str, Any]:
    """The results to copy: the YAML, empty if nothing fits, the numbers, and the command that prints them."""
    return {
        "title": html_report.title_of(report.problem),
        "command": f"{COMMAND} {shlex.join(words)}{' --search plain' if report.plan.untried else ''}",
        "yaml": report.yaml(),
        "json": json.dumps(report.as_json(), indent=2),
    }


def _words(inputs: Mapping[str, str]) -> list[str]:
    """The inputs as command-line arguments."""
    flags, words = _flags(), []
    for name, value in inputs.items():
        switch = name in flags and flags[name].is_switch
        if switch and value == "true":
            words.append(f"--{name}")
        else:
            words += [f"--{name}={value}"] if switch or value.startswith("-") else [f"--{name}", value]
    return words


def _command(inputs: Mapping[str, str], words: list[str]) -> PlanCommand:
    """The parsed command, as `accel-fsdp plan` would parse it."""
    flag_words.refuse_wrong(COMMAND, PlanCommand, words)
    flags = _flags()
    if others := [name for name in inputs if name not in flags]:
        raise UsageError(
            f"--{others[0]} isn't on this page",
            why="it writes or reads files, or needs torch, which a browser doesn't have",
            fix=f"{COMMAND} {shlex.join(words)}",
        )
    if empty := [name for name in ("model", "gpus") if not inputs.get(name)]:
        raise UsageError(f"--{empty[0]} is missing", why="there is nothing to plan", fix="choose one")
    if catalogue.canonical(inputs["model"]) is None:
        raise _takes_torch(inputs["model"], words, catalogue.did_you_mean(inputs["model"]))
    return PlanCommand(**{flag_words.field_name(name): _value(flags[name], value) for name, value in inputs.items()})


def _value(flag: Flag, text: str) -> Any:
    if flag.is_switch:
        return True
    return int(text) if int in flag.types else float(text) if float in flag.types else text
