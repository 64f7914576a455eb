"""The wizard's questions as a table: conditions, answers, defaults and reasons.

The first ones decide the memory of a GPU, so that the plan can propose the answers to the rest.

Pure: no terminal, no files, no torch. `asking.py` asks them. Prompts, choices and types of YAML keys come from
`schema.py`; this table has the parts that depend on other answers, the model and the machine.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accel_fsdp import command_line
from accel_fsdp.config import BY_NAME, HYBRID, STRATEGIES, Engine, Kind
from accel_fsdp.errors import UsageError, did_you_mean
from accel_fsdp.hardware import machines
from accel_fsdp.models import catalogue
from accel_fsdp.wizard import defaults, recommended, validation
from accel_fsdp.wizard.answers import Answers, Context

Condition = Callable[[Context], bool]


@dataclass(frozen=True)
class Question:
    """One question. `field` is its name in `Answers`, with dashes the flag of `accel-fsdp config`.

    `meanings` are the values to choose from, if it has such, with the consequence of each; those that are `hidden` have
    flags alone. `metavar` is shown in `--help`, `alias` is a second flag. `needs` is the condition without which the
    default is used. `helps` says whether it is written even with its default, and `asked` whether the wizard asks it:
    the others have flags alone. `key` is the section and key of the YAML for the answer, if a single key takes it.

    The default is the value or function of that name in `defaults`, the check the function in `validation`, if any.
    """

    field: str
    prompt: str
    meanings: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    metavar: str = "N"
    alias: str = ""
    key: tuple[str, str] | None = None
    needs: str = ""
    helps: Condition = lambda context: True
    asked: Condition = lambda context: True

    @property
    def flag(self) -> str:
        return command_line.flag_of(self.field)

    @property
    def title(self) -> str:
        return self.field.replace("_", " ")

    def default(self, context: Context) -> tuple[Any, str]:
        """The proposed value, and the reason in one line."""
        proposed = getattr(defaults, self.field)
        answer: tuple[Any, str] = proposed(context) if callable(proposed) else proposed
        return answer

    def applies(self, context: Context) -> bool:
        return not self.needs or IF[self.needs](context)

    def is_open(self, context: Context) -> bool:
        """Whether the wizard asks it after these answers."""
        return self.applies(context) and self.helps(context) and self.asked(context)

    def options(self, context: Context) -> list[Any]:
        """The usable values to choose from: hybrid strategies for several machines, engines for this machine.

        The others are accepted only from a file or a flag.
        """

        def is_offered(value: Any) -> bool:
            if self.field == "strategy":
                return context["num_machines"] > 1 or STRATEGIES[value] not in HYBRID
            is_idle = value == "single" or (value == "tpu" and context.machine.count > 0)
            return value not in self.hidden and not (self.field == "engine" and is_idle)

        return [v for v in self.meanings if is_offered(v) and not validation.reason(self.field, v, context)]

    def label(self, value: Any, context: Context) -> str:
        """An option with its consequence; a strategy also with its memory and speed."""
        word, meaning = ("yes" if value else "no") if isinstance(value, bool) else str(value), self.meanings[value]
        note = recommended.note(value, context) if self.field == "strategy" else ""
        return (f"{word}: {meaning}" if meaning else word) + note


def settle(question: Question, context: Context, value: Any) -> Context:
    """Returns the context with `value` checked and stored as the answer to `question`.

    Raises:
        UserError: the value can't be used.
    """
    if question.meanings:
        value = _one_of(question, context, value)
    if check := getattr(validation, f"check_{question.field}", None):
        return store(question, context, check(context, value))
    is_number = question.field in validation.NUMBERS
    return store(question, context, validation.whole_number(question.field, value) if is_number else value)


def store(question: Question, context: Context, value: Any) -> Context:
    return replace(context, given={**context.given, question.field: value})


def _one_of(question: Question, context: Context, value: Any) -> Any:
    """The option that reads like `value`: flags arrive as text, in any case."""
    text = str(value).lower()
    names = recommended.NAMES if question.field == "strategy" else {}
    text = names.get(text.upper(), text)
    chosen = next((option for option in question.meanings if str(option).lower() == text), None)
    why = "it is not one of the listed values" if chosen is None else validation.reason(question.field, chosen, context)
    if not why:
        return chosen
    known = [str(option).lower() if isinstance(option, bool) else str(option) for option in question.options(context)]
    others = "--engine ddp, or another model" if question.field == "fsdp_version" else "another model"
    raise UsageError(
        f"{question.flag} {value} can't be used." + (did_you_mean(text, [*known, *names]) if chosen is None else ""),
        why=why,
        fix=f"{question.flag} with one of: " + ", ".join(known) if known else others,
    )


IF: Mapping[str, Condition] = {
    "--engine fsdp": lambda context: bool(context["engine"] == "fsdp"),
    "FSDP": lambda context: context.is_fsdp,
    "FSDP2": lambda context: context.engine is Engine.FSDP2,
    "FSDP2 with --strategy 4": lambda context: context.engine is Engine.FSDP2 and context["strategy"] in (4, 5),
    "--engine deepspeed": lambda context: bool(context["engine"] == "deepspeed"),
    "sharding": lambda context: context.is_fsdp or (context.engine is Engine.DEEPSPEED and context["zero_stage"] > 0),
    "layers to wrap": lambda context: context.engine is Engine.TPU or IF["units"](context),
    "units": lambda context: context.is_fsdp and bool(context["wrap_policy"] == "TRANSFORMER_BASED_WRAP"),
    "SIZE_BASED_WRAP": lambda context: context.is_fsdp and bool(context["wrap_policy"] == "SIZE_BASED_WRAP"),
    "FSDP or a TPU": lambda context: context.is_fsdp or context.engine is Engine.TPU,
    "FSDP2 checkpointing": lambda context: context.engine is Engine.FSDP2 and context["activation_checkpointing"],
    "planned": lambda context: recommended.problem_of(context) is not None,
    "several machines": lambda context: context["num_machines"] > 1,
    "one machine": lambda context: machines.parse(context["gpus"])[1] == 1,
    "no layer": lambda context: not defaults.layer_class(context)[0],
    "never": lambda context: False,
}
"""The conditions under which questions apply or are asked."""
METAVARS = {Kind.NAMES: "NAME[,NAME]", Kind.TEXT: "TEXT"}


def _of_key(name: str, key: str, meanings: Mapping[Any, str] | None = None, **more: Any) -> Question:
    """The question for a key of the YAML (`section.key`), with the prompt, choices and type of the field table."""
    place: Any = key.rpartition(".")[::2]
    field = BY_NAME[place]
    choices = {int(value) if value.isdecimal() else value: text for value, text in field.meanings.items()}
    meanings = meanings or ({False: "", True: ""} if field.kind is Kind.BOOL else choices)
    return Question(name, field.question, meanings, metavar=METAVARS.get(field.kind, "N"), key=place, **more)


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
STRATEGY_MEANINGS = {
    1: f"{STRATEGIES[1]}: parameters, gradients, optimizer state (ZeRO-3)",
    2: f"{STRATEGIES[2]}: parameters kept after forward, less traffic (ZeRO-2)",
    3: f"{STRATEGIES[3]}: plain data parallel, each GPU holds everything",
    4: f"{STRATEGIES[4]}: as 1 inside each machine, one replica per machine",
    5: f"{STRATEGIES[5]}: as 2 inside each machine, one replica each",
}
FSDP = "fsdp_config.fsdp"
QUESTIONS: tuple[Question, ...] = (
    Question("model", "Which model? (hub id or local folder)", metavar="ID_OR_FOLDER"),
    Question("method", "What do you train?", METHODS),
    Question("gpus", "Which machine will train? (8xH100-80GB, 2x8xA100-40GB, cpu, ...)", metavar="NxNAME[-MEMORYGB]"),
    _of_key("num_machines", "num_machines", asked=IF["one machine"], alias="--nodes"),
    Question("seq_len", "How many tokens per sequence?", helps=IF["planned"], metavar="TOKENS"),
    Question("engine", "Which engine?", ENGINES),
    _of_key("fsdp_version", f"{FSDP}_version", needs="--engine fsdp", asked=IF["never"]),
    _of_key("strategy", f"{FSDP}_sharding_strategy", STRATEGY_MEANINGS, needs="--engine fsdp"),
    _of_key("zero_stage", "deepspeed_config.zero_stage", needs="--engine deepspeed"),
    _of_key("mixed_precision", "mixed_precision", hidden=("fp8",)),
    _of_key("num_processes", "num_processes", asked=IF["never"]),
    Question("dp_replicate", "How many replicas of the model?", needs="FSDP2 with --strategy 4", helps=IF["never"]),
    Question("tp", "How many ranks divide each layer (tensor parallelism)?", needs="FSDP2", helps=IF["never"]),
    Question("ep", "How many ranks divide the experts (expert parallelism)?", needs="FSDP2", helps=IF["never"]),
    _of_key("wrap_policy", f"{FSDP}_auto_wrap_policy", needs="FSDP", asked=IF["never"]),
    _of_key("layer_class", f"{FSDP}_transformer_layer_cls_to_wrap", needs="layers to wrap", asked=IF["no layer"]),
    _of_key("min_num_params", f"{FSDP}_min_num_params", needs="SIZE_BASED_WRAP", asked=IF["never"]),
    _of_key("cpu_offload", f"{FSDP}_offload_params", needs="sharding"),
    _of_key("activation_checkpointing", f"{FSDP}_activation_checkpointing", needs="FSDP or a TPU"),
    _of_key(
        "activation_offload", f"{FSDP}_activation_checkpointing_offload", needs="FSDP2 checkpointing", helps=IF["never"]
    ),
    Question("batch", "How many sequences does a GPU train on at a time (micro-batch)?", helps=IF["planned"]),
    _of_key("state_dict_type", f"{FSDP}_state_dict_type", hidden=("LOCAL_STATE_DICT",), needs="FSDP"),
    _of_key("ram_efficient_loading", f"{FSDP}_cpu_ram_efficient_loading", needs="FSDP", asked=IF["never"]),
    _of_key("main_process_ip", "main_process_ip", needs="several machines"),
    _of_key("main_process_port", "main_process_port", needs="several machines", asked=IF["never"]),
)


def to_answers(context: Context) -> Answers:
    """The answers of a finished interview; a model that wasn't read is known by its layers."""
    answers = Answers(**context.given, script_checkpoints=recommended.checkpoints_in_script(context))
    if context.model:
        return replace(answers, auto_class=context.model.auto_class)
    is_known = answers.model and catalogue.language_layers().issuperset(answers.layer_class)
    return answers if is_known else replace(answers, auto_class="")


def applying(answers: Answers) -> list[Question]:
    """The questions whose answers are written, and named in the file's header."""
    context = Context(given=vars(answers))
    questions = (question for question in QUESTIONS if question.applies(context))
    return [q for q in questions if q.helps(context) or getattr(answers, q.field) not in (0, q.default(context)[0])]


def is_shown(question: Question, answers: Answers) -> bool:
    """Whether the review shows an answer: of a question that is asked, or other than the default."""
    context = Context(given=vars(answers))
    is_default = getattr(answers, question.field) == question.default(context)[0]
    return question.is_open(context) or (not is_default and question.field != "layer_class")
