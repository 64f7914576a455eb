"""The wizard's questions as a table: conditions, answers, defaults and reasons.

The first ones decide the memory of a GPU, so that the plan can propose the answers to the rest.

Pure: no terminal, no files, no torch. `asking.py` asks them. Prompts, choices and types of YAML keys come from
`schema.py`; this table has the parts that depend on other answers, the model and the machine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from accel_fsdp.config import (
    BY_NAME,
    DEFAULT_PORT,
    HYBRID,
    PLACING,
    STRATEGIES,
    ZERO_STAGES,
    Engine,
    Kind,
    WrapPolicy,
    zero_name,
)
from accel_fsdp.hardware import machines
from accel_fsdp.units import listed
from accel_fsdp.wizard import defaults, notes, recommended, validation
from accel_fsdp.wizard.answers import Answers
from accel_fsdp.wizard.question import Context, Option, Question

METAVARS = {Kind.BOOL: "true|false", Kind.INT: "N", Kind.NAMES: "NAME[,NAME]", Kind.TEXT: "TEXT"}
Default = Callable[[Context], tuple[Any, str]]
IS_FSDP = attrgetter("is_fsdp")


def never(context: Context) -> bool:
    return False


def _wraps(policy: WrapPolicy) -> Callable[[Context], bool]:
    return lambda context: context.is_fsdp and bool(context["wrap_policy"] == policy)


def _several_machines(context: Context) -> bool:
    return bool(context["num_machines"] > 1)


def _engine_is(name: str) -> Callable[[Context], bool]:
    return lambda context: bool(context["engine"] == name)


def _unkeyed(name: str, prompt: str, default: Default, meanings: dict[Any, str], **options: Any) -> Question:
    """A question that no single key of the YAML answers."""
    return Question(name, prompt, default, _options(name, meanings), metavar="|".join(meanings), **options)


def _keyed(name: str, key: str, default: Default, *, section: str = "fsdp_config", **options: Any) -> Question:
    """The question for one key of the YAML, with the prompt, the choices and the type that the field table gives it."""
    field = BY_NAME[section, key]
    meanings: dict[Any, str] = {
        int(choice) if choice.isdecimal() else choice: m for choice, m in field.meanings.items()
    }
    if field.kind is Kind.BOOL:
        meanings = {False: "", True: ""}
    hidden = options.pop("hidden", ())
    meanings = options.pop("meanings", meanings)
    choices = "|".join(str(value) for value in meanings if value not in hidden)
    return Question(
        name,
        field.question,
        default,
        _options(name, meanings, hidden) if meanings else None,
        metavar=METAVARS.get(field.kind, choices if len(choices) < 30 else "TYPE"),
        key=(section, key),
        **options,
    )


def _options(name: str, meanings: dict[Any, str], hidden: tuple[str, ...] = ()) -> Callable[[Context], list[Option]]:
    def text(value: Any, context: Context) -> str:
        word = {False: "no", True: "yes"}[value] if isinstance(value, bool) else str(value)
        label = f"{word}: {meanings[value]}" if meanings[value] else word
        return label + (notes.note(value, context) if name == "strategy" else "")

    def offered(value: Any, context: Context) -> bool:
        """Whether the wizard shows it: hybrid strategies for several machines, and what this machine can use."""
        if name == "strategy":
            return context["num_machines"] > 1 or STRATEGIES[value] not in HYBRID
        if (name, value) == ("engine", "tpu"):
            return context.machine.count == 0
        return value not in hidden and (name, value) != ("engine", "single")

    def options(context: Context) -> list[Option]:
        return [
            Option(
                value,
                partial(text, value, context),
                validation.reason(name, value, context),
                offered(value, context),
                validation.caution(name, value, context),
            )
            for value in meanings
        ]

    return options


def _as_zero(number: int) -> str:
    return zero_name(ZERO_STAGES[STRATEGIES[number]])


STRATEGY_MEANINGS = {
    1: f"{STRATEGIES[1]}: parameters, gradients, optimizer state ({_as_zero(1)})",
    2: f"{STRATEGIES[2]}: parameters kept after forward, less traffic ({_as_zero(2)})",
    3: f"{STRATEGIES[3]}: plain data parallel, each GPU holds everything",
    4: f"{STRATEGIES[4]}: as 1 inside each machine, one replica per machine",
    5: f"{STRATEGIES[5]}: as 2 inside each machine, one replica each",
}

QUESTIONS: tuple[Question, ...] = (
    Question(
        "model",
        "Which model? (hub id or local folder)",
        defaults.always("", "its layers become the FSDP units"),
        check=validation.check_model,
        metavar="ID_OR_FOLDER",
    ),
    _unkeyed(
        "method",
        "What do you train?",
        defaults.always("full", "every weight is trained"),
        {
            "full": "every weight",
            "lora": "small adapter matrices, the base stays frozen",
            "qlora": "the same on a base quantised to 4 bits",
        },
    ),
    Question(
        "gpus",
        "Which machine will train? (such as 8xH100-80GB, 2x8xA100-40GB, cpu)",
        defaults.gpus,
        check=validation.check_gpus,
        metavar="NxNAME[-MEMORYGB]",
    ),
    _keyed(
        "num_machines",
        "num_machines",
        defaults.num_machines,
        section="",
        check=validation.check_machines,
        asked=lambda context: machines.parse(context["gpus"])[1] == 1,
        alias="--nodes",
    ),
    Question(
        "seq_len",
        "How many tokens per sequence?",
        defaults.seq_len,
        helps=lambda context: recommended.problem_of(context) is not None,
        check=notes.check_length,
        metavar="TOKENS",
    ),
    _unkeyed(
        "engine",
        "Which engine?",
        defaults.engine,
        {
            "fsdp": "PyTorch FSDP",
            "ddp": "every GPU holds the whole model",
            "deepspeed": "DeepSpeed ZeRO (pip install accel-fsdp[deepspeed])",
            "tpu": "torch_xla's FSDP on a TPU host",
            "single": "one process, which has nothing to share",
        },
    ),
    _keyed(
        "fsdp_version",
        "fsdp_version",
        defaults.fsdp_version,
        applies=_engine_is("fsdp"),
        asked=never,
    ),
    _keyed(
        "strategy",
        "fsdp_sharding_strategy",
        defaults.strategy,
        meanings=STRATEGY_MEANINGS,
        names={str(number): name for number, name in STRATEGIES.items()},
        applies=_engine_is("fsdp"),
    ),
    _keyed(
        "zero_stage",
        "zero_stage",
        defaults.zero_stage,
        section="deepspeed_config",
        applies=_engine_is("deepspeed"),
    ),
    _keyed("mixed_precision", "mixed_precision", defaults.mixed_precision, section="", hidden=("fp8",)),
    _keyed(
        "num_processes",
        "num_processes",
        defaults.processes,
        section="",
        check=validation.check_processes,
        asked=never,
    ),
    Question(
        "dp_replicate",
        "How many replicas of the model?",
        defaults.replicas,
        applies=lambda context: context.engine is Engine.FSDP2 and context["strategy"] in (4, 5),
        helps=never,
        check=validation.check_replicas,
        metavar="N",
    ),
    Question(
        "tp",
        "How many ranks divide each layer (tensor parallelism)?",
        defaults.always(1, "whole layers; more sum activations over the ranks several times in each layer"),
        applies=lambda context: context.engine is Engine.FSDP2,
        helps=never,
        check=validation.check_axis("tp"),
        metavar="N",
    ),
    Question(
        "ep",
        "How many ranks divide the experts (expert parallelism)?",
        defaults.always(1, "each rank gathers all experts of a layer; more send tokens to the experts' ranks"),
        applies=lambda context: context.engine is Engine.FSDP2,
        helps=never,
        check=validation.check_axis("ep"),
        metavar="N",
    ),
    _keyed(
        "wrap_policy",
        "fsdp_auto_wrap_policy",
        defaults.always("TRANSFORMER_BASED_WRAP", "gathers one layer at a time"),
        applies=IS_FSDP,
        asked=never,
    ),
    _keyed(
        "layer_class",
        "fsdp_transformer_layer_cls_to_wrap",
        defaults.layer_class,
        applies=lambda context: context.engine is Engine.TPU or _wraps("TRANSFORMER_BASED_WRAP")(context),
        check=validation.check_layer_class,
        asked=lambda context: not defaults.layer_class(context)[0],
    ),
    _keyed(
        "min_num_params",
        "fsdp_min_num_params",
        defaults.min_num_params,
        applies=_wraps("SIZE_BASED_WRAP"),
        check=validation.check_size,
        asked=never,
    ),
    _keyed(
        "cpu_offload",
        "fsdp_offload_params",
        defaults.cpu_offload,
        applies=lambda context: context.is_fsdp or (context.engine is Engine.DEEPSPEED and context["zero_stage"] > 0),
    ),
    _keyed(
        "activation_checkpointing",
        "fsdp_activation_checkpointing",
        defaults.activation_checkpointing,
        applies=lambda context: context.is_fsdp or context.engine is Engine.TPU,
    ),
    _keyed(
        "activation_offload",
        "fsdp_activation_checkpointing_offload",
        defaults.always(False, "the inputs of layers stay on the GPU; in host memory they cost copies over PCIe"),
        applies=lambda context: context.engine is Engine.FSDP2 and context["activation_checkpointing"],
        helps=never,
    ),
    Question(
        "batch",
        "How many sequences does a GPU train on at a time (micro-batch)?",
        defaults.batch,
        helps=lambda context: recommended.problem_of(context) is not None,
        check=validation.check_batch,
        metavar="N",
    ),
    _keyed(
        "state_dict_type",
        "fsdp_state_dict_type",
        defaults.always("SHARDED_STATE_DICT", "each rank writes its part; resumes on another number of GPUs"),
        hidden=("LOCAL_STATE_DICT",),
        applies=IS_FSDP,
    ),
    _keyed(
        "ram_efficient_loading",
        "fsdp_cpu_ram_efficient_loading",
        defaults.ram_efficient_loading,
        applies=IS_FSDP,
        asked=never,
    ),
    _keyed(
        "main_process_ip",
        "main_process_ip",
        defaults.always("", f"empty: {listed(PLACING, 'or')} give the address of the first machine"),
        section="",
        applies=_several_machines,
        check=validation.check_ip,
    ),
    _keyed(
        "main_process_port",
        "main_process_port",
        defaults.always(DEFAULT_PORT, "Accelerate's default"),
        section="",
        applies=_several_machines,
        check=validation.check_port,
        asked=never,
    ),
)


def to_answers(context: Context) -> Answers:
    answers = Answers(**context.given, script_checkpoints=recommended.checkpoints_in_script(context))
    auto_class = context.model.auto_class if context.model else "" if context.unread else answers.auto_class
    return replace(answers, auto_class=auto_class)


def disabled_by(question: Question, context: Context) -> tuple[str, str]:
    """The flag of the one answer so far without which a question would apply, and its first value with which it does.

    Empty if no single answer decides that.
    """
    for earlier in QUESTIONS:
        options = earlier.options(context) if earlier.options and earlier.field in context.given else []
        for value in (option.value for option in options if not option.disabled):
            if question.applies(replace(context, given={**context.given, earlier.field: value})):
                return f"{earlier.flag} {context[earlier.field]}", f"{earlier.flag} {value}"
    return "", ""


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
