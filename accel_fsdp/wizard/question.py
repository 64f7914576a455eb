"""How a question works: its options, its default, its check, and the answers so far. Pure, like `questions.py`."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accel_fsdp import command_line
from accel_fsdp.config import FSDP_VERSIONS, OTHER_ENGINES, Engine
from accel_fsdp.errors import UsageError, did_you_mean
from accel_fsdp.hardware import MachineFacts, machines
from accel_fsdp.job import FSDP_KINDS
from accel_fsdp.models import ModelFacts

GivenAnswers = Mapping[str, Any]


def engine_of(answers: GivenAnswers) -> Engine:
    """The engine of answers that may be incomplete; NONE while the version of FSDP is open."""
    if answers.get("engine") != "fsdp":
        return OTHER_ENGINES.get(answers.get("engine", "ddp"), Engine.DDP)
    if answers.get("fsdp_version") == 2 and answers.get("strategy") == 3:
        return Engine.DDP  # FSDP2 has no NO_SHARD: it would shard
    return FSDP_VERSIONS.get(answers.get("fsdp_version", 0), Engine.NONE)


@dataclass(frozen=True)
class Context:
    """The context of a question: the answers so far, the model, and the machine that was found.

    `unread`: the model's facts are unknown, and the catalogue has no model of its kind. `wished` are flags and other
    given answers, of later questions too.
    """

    given: GivenAnswers
    detected: MachineFacts = machines.CPU
    model: ModelFacts | None = None
    unread: bool = False
    wished: GivenAnswers = dataclasses.field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        return engine_of(self.given)

    @property
    def is_fsdp(self) -> bool:
        return self.engine in FSDP_KINDS

    @property
    def machine(self) -> MachineFacts:
        """One of the machines that will train, as answered; before that, the one that was found."""
        return machines.parse(self.given["gpus"])[0] if "gpus" in self.given else self.detected

    def __getitem__(self, name: str) -> Any:
        return self.given[name]


@dataclass(frozen=True)
class Option:
    """One answer to choose from, with its consequence in a few words; `disabled` says why it can't be chosen here.

    An option that isn't `offered` is accepted only from a file or a flag; `caution` is its condition.
    """

    value: Any
    text: str | Callable[[], str]
    disabled: str = ""
    offered: bool = True
    caution: str = ""

    @property
    def label(self) -> str:
        return self.text if isinstance(self.text, str) else self.text()


@dataclass(frozen=True)
class Question:
    """One question. `field` is its name in `Answers`, with dashes the flag of `accel-fsdp config`.

    `default` returns the proposed value and the reason in one line. `metavar` is shown in `--help`; `names` are second
    spellings of its values, `alias` a second flag. `applies` says whether to ask at all: if it is false the default is
    used. `helps` says whether it is written even with its default, and `asked` whether the wizard asks it: the others
    have flags alone. `check` returns the value as stored, or raises `UserError`. `key` is the section and key of the
    YAML for the answer, if a single key takes it.
    """

    field: str
    prompt: str
    default: Callable[[Context], tuple[Any, str]]
    options: Callable[[Context], list[Option]] | None = None
    applies: Callable[[Context], bool] = lambda context: True
    helps: Callable[[Context], bool] = lambda context: True
    check: Callable[[Context, Any], Any] = lambda context, value: value
    metavar: str = "TEXT"
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    alias: str = ""
    key: tuple[str, str] | None = None
    asked: Callable[[Context], bool] = lambda context: True

    def is_open(self, context: Context) -> bool:
        """Whether the wizard asks it after these answers."""
        return self.applies(context) and self.helps(context) and self.asked(context)

    @property
    def flag(self) -> str:
        return command_line.flag_of(self.field)

    @property
    def title(self) -> str:
        return self.field.replace("_", " ")


def settle(question: Question, context: Context, value: Any) -> Context:
    """Returns the context with `value` checked and stored as the answer to `question`."""
    if question.options is not None:
        value = _one_of(question, question.options(context), value)
    return store(question, context, question.check(context, value))


def store(question: Question, context: Context, value: Any) -> Context:
    return replace(context, given={**context.given, question.field: value})


def _one_of(question: Question, options: list[Option], value: Any) -> Any:
    """The option whose value reads like `value`: flags arrive as text, in any case."""
    by_text = {str(option.value).lower(): option for option in options}
    by_text |= {name.lower(): by_text[text] for text, name in question.names.items()}
    text = str(value).lower()
    chosen = by_text.get(text)
    if chosen is not None and not chosen.disabled:
        return chosen.value
    known = [
        str(option.value).lower() if isinstance(option.value, bool) else str(option.value)
        for option in options
        if option.offered and not option.disabled
    ]
    others = "--engine ddp, or another model" if question.field == "fsdp_version" else "another model"
    raise UsageError(
        f"{question.flag} {value} can't be used."
        + ("" if chosen else did_you_mean(text, [*known, *question.names.values()])),
        why=chosen.disabled if chosen else "it is not one of the listed values",
        fix=f"{question.flag} with one of: " + ", ".join(known) if known else others,
    )
