"""The wizard's questions as a table: conditions, answers, defaults and reasons.

The first ones decide the memory of a GPU, so that the plan can propose the answers to the rest.

Pure: no terminal, no files, no torch. `asking.py` asks them. Prompts, choices and types of YAML keys come from
`schema.py`; this table has the parts that depend on other answers, the model and the machine.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from accel_fsdp import command_line
from accel_fsdp.config import BY_NAME, HYBRID, STRATEGIES, ZERO_STAGES, Engine, Kind, zero_name
from accel_fsdp.errors import UsageError, did_you_mean
from accel_fsdp.hardware import machines
from accel_fsdp.wizard import defaults, recommended, validation
from accel_fsdp.wizard.answers import Answers, Context


@dataclass(frozen=True)
class Option:
    """One answer to choose from, with its consequence in a few words; `disabled` says why it can't be chosen here.

    An option that isn't `offered` is accepted only from a file or a flag.
    """

    value: Any
    label: Callable[[], str]
    disabled: str = ""
    offered: bool = True


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


METAVARS = {Kind.BOOL: "true|false", Kind.INT: "N", Kind.NAMES: "NAME[,NAME]", Kind.TEXT: "TEXT"}


Condition = Callable[[Context], bool]
IF: Mapping[str, Condition] = {
    "fsdp": lambda context: bool(context["engine"] == "fsdp"),
    "sharded": lambda context: context.is_fsdp,
    "fsdp2": lambda context: context.engine is Engine.FSDP2,
    "hybrid mesh": lambda context: context.engine is Engine.FSDP2 and context["strategy"] in (4, 5),
    "deepspeed": lambda context: bool(context["engine"] == "deepspeed"),
    "offloads": lambda context: context.is_fsdp or (context.engine is Engine.DEEPSPEED and context["zero_stage"] > 0),
    "layers": lambda context: context.engine is Engine.TPU or _wraps(context, "TRANSFORMER_BASED_WRAP"),
    "sizes": lambda context: _wraps(context, "SIZE_BASED_WRAP"),
    "recomputes": lambda context: context.is_fsdp or context.engine is Engine.TPU,
    "checkpoints": lambda context: context.engine is Engine.FSDP2 and context["activation_checkpointing"],
    "planned": lambda context: recommended.problem_of(context) is not None,
    "several machines": lambda context: context["num_machines"] > 1,
    "one machine": lambda context: machines.parse(context["gpus"])[1] == 1,
    "no layer": lambda context: not defaults.layer_class(context)[0],
    "never": lambda context: False,
}
"""The conditions under which questions apply or are asked."""


def _wraps(context: Context, policy: str) -> bool:
    return context.is_fsdp and bool(context["wrap_policy"] == policy)


def _question(
    name: str, prompt: str, meanings: Mapping[Any, str] | None = None, hidden: tuple[str, ...] = (), **more: Any
) -> Question:
    """A question with a prompt, or for a key (`section.key`) with the prompt, choices and type of the field table."""
    place = tuple(prompt.rpartition(".")[::2])
    field = BY_NAME.get(place) if " " not in prompt else None  # type: ignore[arg-type]
    if field and meanings is None:
        choices = {int(value) if value.isdecimal() else value: text for value, text in field.meanings.items()}
        meanings = {False: "", True: ""} if field.kind is Kind.BOOL else choices
    words = "|".join(str(value) for value in meanings or () if value not in hidden)
    shown = ("TYPE" if len(words) > 29 else words) or "N"
    settings = {
        "options": partial(_options, name, meanings, hidden) if meanings else None,
        "metavar": METAVARS.get(field.kind, shown) if field else shown,
        "check": getattr(validation, f"check_{name}", lambda context, value: value),
        "key": place if field else None,
    }
    return Question(name, field.question if field else prompt, getattr(defaults, name), **{**settings, **more})


def _options(name: str, meanings: Mapping[Any, str], hidden: tuple[str, ...], context: Context) -> list[Option]:
    return [
        Option(
            value,
            partial(_label, name, value, meaning, context),
            validation.reason(name, value, context),
            value not in hidden and _is_offered(name, value, context),
        )
        for value, meaning in meanings.items()
    ]


def _label(name: str, value: Any, meaning: str, context: Context) -> str:
    word = ("yes" if value else "no") if isinstance(value, bool) else str(value)
    return (f"{word}: {meaning}" if meaning else word) + (
        recommended.note(value, context) if name == "strategy" else ""
    )


def _is_offered(name: str, value: Any, context: Context) -> bool:
    """Whether the wizard shows an option: hybrid strategies for several machines, and what this machine can use."""
    if name == "strategy":
        return context["num_machines"] > 1 or STRATEGIES[value] not in HYBRID
    return name != "engine" or (value != "single" and (value != "tpu" or context.machine.count == 0))


METHODS = {
    "full": "every weight",
    "lora": "small adapter matrices, the base stays frozen",
    "qlora": "the same on a base quantised to 4 bits",
}
ENGINES = {
    "fsdp": "PyTorch FSDP",
    "ddp": "every GPU holds the whole model",
    "deepspeed": "DeepSpeed ZeRO (pip install accel-fsdp[deepspeed])",
    "tpu": "torch_xla's FSDP on a TPU host",
    "single": "one process, which has nothing to share",
}
_FULL, _GRADS = (zero_name(ZERO_STAGES[STRATEGIES[number]]) for number in (1, 2))
STRATEGY_MEANINGS = {
    1: f"{STRATEGIES[1]}: parameters, gradients, optimizer state ({_FULL})",
    2: f"{STRATEGIES[2]}: parameters kept after forward, less traffic ({_GRADS})",
    3: f"{STRATEGIES[3]}: plain data parallel, each GPU holds everything",
    4: f"{STRATEGIES[4]}: as 1 inside each machine, one replica per machine",
    5: f"{STRATEGIES[5]}: as 2 inside each machine, one replica each",
}
NO_EFFECT = "a setting without effect usually means a mistake elsewhere"
NAMES = {str(number): name for number, name in STRATEGIES.items()}

FSDP = "fsdp_config.fsdp"
QUESTIONS: tuple[Question, ...] = (
    _question("model", "Which model? (hub id or local folder)", metavar="ID_OR_FOLDER"),
    _question("method", "What do you train?", METHODS),
    _question(
        "gpus", "Which machine will train? (such as 8xH100-80GB, 2x8xA100-40GB, cpu)", metavar="NxNAME[-MEMORYGB]"
    ),
    _question("num_machines", "num_machines", asked=IF["one machine"], alias="--nodes"),
    _question(
        "seq_len",
        "How many tokens per sequence?",
        helps=IF["planned"],
        check=recommended.check_length,
        metavar="TOKENS",
    ),
    _question("engine", "Which engine?", ENGINES),
    _question("fsdp_version", f"{FSDP}_version", applies=IF["fsdp"], asked=IF["never"]),
    _question("strategy", f"{FSDP}_sharding_strategy", STRATEGY_MEANINGS, names=NAMES, applies=IF["fsdp"]),
    _question("zero_stage", "deepspeed_config.zero_stage", applies=IF["deepspeed"]),
    _question("mixed_precision", "mixed_precision", hidden=("fp8",)),
    _question("num_processes", "num_processes", asked=IF["never"]),
    _question("dp_replicate", "How many replicas of the model?", applies=IF["hybrid mesh"], helps=IF["never"]),
    _question("tp", "How many ranks divide each layer (tensor parallelism)?", applies=IF["fsdp2"], helps=IF["never"]),
    _question("ep", "How many ranks divide the experts (expert parallelism)?", applies=IF["fsdp2"], helps=IF["never"]),
    _question("wrap_policy", f"{FSDP}_auto_wrap_policy", applies=IF["sharded"], asked=IF["never"]),
    _question("layer_class", f"{FSDP}_transformer_layer_cls_to_wrap", applies=IF["layers"], asked=IF["no layer"]),
    _question("min_num_params", f"{FSDP}_min_num_params", applies=IF["sizes"], asked=IF["never"]),
    _question("cpu_offload", f"{FSDP}_offload_params", applies=IF["offloads"]),
    _question("activation_checkpointing", f"{FSDP}_activation_checkpointing", applies=IF["recomputes"]),
    _question(
        "activation_offload", f"{FSDP}_activation_checkpointing_offload", applies=IF["checkpoints"], helps=IF["never"]
    ),
    _question("batch", "How many sequences does a GPU train on at a time (micro-batch)?", helps=IF["planned"]),
    _question("state_dict_type", f"{FSDP}_state_dict_type", hidden=("LOCAL_STATE_DICT",), applies=IF["sharded"]),
    _question("ram_efficient_loading", f"{FSDP}_cpu_ram_efficient_loading", applies=IF["sharded"], asked=IF["never"]),
    _question("main_process_ip", "main_process_ip", applies=IF["several machines"]),
    _question("main_process_port", "main_process_port", applies=IF["several machines"], asked=IF["never"]),
)
"""The default of a question is the function of its name in `defaults`, its check is that in `validation`, if any."""


def to_answers(context: Context) -> Answers:
    answers = Answers(**context.given, script_checkpoints=recommended.checkpoints_in_script(context))
    auto_class = context.model.auto_class if context.model else "" if context.unread else answers.auto_class
    return replace(answers, auto_class=auto_class)


def useless(question: Question, context: Context) -> UsageError:
    """The error for the flag of a question that doesn't apply; it names an answer before it with which it would."""
    flag, fix = question.flag, f"leave out {question.flag}"
    for earlier in (earlier for earlier in QUESTIONS if earlier.field in context.given):
        for option in earlier.options(context) if earlier.options else ():
            if not option.disabled and question.applies(store(earlier, context, option.value)):
                what = f"{flag} has no effect with {earlier.flag} {context[earlier.field]}"
                return UsageError(what, why=NO_EFFECT, fix=f"{fix}, or {earlier.flag} {option.value}")
    return UsageError(f"{flag} has no effect with the other answers", why=NO_EFFECT, fix=fix)


def applying(answers: Answers) -> list[Question]:
    """The questions whose answers are written, and named in the file's header."""
    context, questions = Context(given=vars(answers)), []
    for question in filter(lambda question: question.applies(context), QUESTIONS):
        if question.helps(context) or getattr(answers, question.field) not in (0, question.default(context)[0]):
            questions.append(question)
    return questions


def is_shown(question: Question, answers: Answers) -> bool:
    """Whether the review shows an answer: of a question that is asked, or other than the default."""
    context = Context(given=vars(answers))
    is_default = getattr(answers, question.field) == question.default(context)[0]
    return question.is_open(context) or (not is_default and question.field != "layer_class")
