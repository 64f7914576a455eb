"""The planner's functions for the page in a browser: they take and return text, which JavaScript and Python share.

The page's inputs, and the parameters of a link, are the flags of `accel-fsdp plan` without leading dashes.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from html import escape

from accel_fsdp import command_line
from accel_fsdp.command_line import Flag
from accel_fsdp.errors import NotInstalled, UsageError, UserError, first_line
from accel_fsdp.hardware import gpus
from accel_fsdp.models import catalogue
from accel_fsdp.planner import html_report
from accel_fsdp.planner.command import make_plan
from accel_fsdp.planner.flags import PlanCommand
from accel_fsdp.prediction import trace_store

COMMAND = "accel-fsdp plan"
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
}
"""The fields of `PlanCommand` on the page, in order, with their labels."""
RECORDED_LATER = ("eager",)
"""Choices for which the catalogue has no records; a link to the page that contains such a choice gets an error."""


@dataclass(frozen=True)
class Input:
    """One field of the form. `choices` are empty for a switch, a number or a text, `default` if there is none."""

    name: str
    label: str
    help: str
    flag: Flag
    choices: tuple[str, ...]
    default: str

    @property
    def keys(self) -> str:
        """The keys that a phone shows, as `inputmode` names them."""
        return "numeric" if int in self.flag.types else "decimal" if float in self.flag.types else "text"


def form() -> list[Input]:
    """The fields of the page's form, in their order."""
    return [_input(flag, LABELS[field]) for field, flag in zip(LABELS, _flags().values(), strict=True)]


def _input(flag: Flag, label: str) -> Input:
    choices = tuple(choice for choice in flag.choices if choice not in RECORDED_LATER)
    initial = "" if flag.default in (None, MISSING, False) else str(flag.default)
    hint = f"{flag.argument.help} {flag.argument.ending}".strip()
    return Input(flag.name.lstrip("-"), label, hint, flag, choices, initial)


def _flags() -> dict[str, Flag]:
    """The flags of the page by their names in a link."""
    flags = command_line.flags_of(PlanCommand)
    words = map(command_line.flag_of, LABELS)
    return {word.lstrip("-"): flags[word] for word in words}


def models() -> dict[str, list[str]]:
    """The models of the catalogue by publisher; others need torch, which browsers don't have."""
    by_publisher: dict[str, list[str]] = {}
    for name in filter(trace_store.shipped, catalogue.entries()):
        by_publisher.setdefault(name.partition("/")[0], []).append(name)
    return by_publisher


def cards() -> list[str]:
    return [f"{gpu.name}-{gpu.memory_gib:g}GB" for gpu in gpus.GPUS]


def answer(text: str) -> str:
    """The answer to a JSON object of inputs, as JSON: the title and HTML of the page, and the texts to take away.

    `yaml` is empty if nothing fits. An error has a title and HTML alone.
    """
    inputs, words = json.loads(text), list[str]()
    try:
        words = _words(inputs)
        return json.dumps(_plan(_command(inputs, words), words))
    except NotInstalled:
        return _error(_takes_torch("This choice", words))
    except UserError as error:
        return _error(error)
    except Exception as error:  # a traceback is hard to read in a browser
        return _error(
            UserError(
                f"The planner stopped: {type(error).__name__}: {first_line(error)}",
                why="no input should stop it: this is a bug of the planner",
                fix="change what you entered last; and please report it, with this page's link",
            )
        )


def _plan(flags: PlanCommand, words: list[str]) -> dict[str, str]:
    report = make_plan(flags)
    command = f"{COMMAND} {shlex.join(words)}"
    head, *sections = html_report.sections(report)
    yaml = report.yaml()
    folded = {**({"fsdp.yaml": yaml} if yaml else {}), "The command that prints this plan": command}
    texts = (
        f"<details><summary>{name}</summary><pre>{escape(content)}</pre></details>" for name, content in folded.items()
    )
    return {
        "title": html_report.title_of(report.problem),
        "html": "".join((head, *sections[:-1], *texts, sections[-1])),
        "yaml": yaml,
        "json": json.dumps(report.as_json(), indent=2),
        "command": command,
    }


def _error(error: UserError) -> str:
    what, why, fix = map(escape, (error.what, error.why, error.fix))
    reasons = f"<dl><dt>Why</dt><dd>{why}</dd><dt>What to do</dt><dd>{fix}</dd></dl>"
    html = f'<section class="error" role="alert"><h1>{what}</h1>{reasons}</section>'
    return json.dumps({"title": error.what, "html": html})


def _takes_torch(what: str, words: list[str], question: str = "") -> UserError:
    return UserError(
        f"{what} isn't on this page.{question}",
        why="the model has to be recorded with torch first, which a browser doesn't have",
        fix=f"pip install 'accel-fsdp[train]', then {COMMAND} {shlex.join(words)}",
    )


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
    command: PlanCommand = command_line.parse(COMMAND, PlanCommand, words)
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
    return command
