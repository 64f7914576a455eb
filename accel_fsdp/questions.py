"""The wizard's questions as a table: what is asked, when, which answers exist, which one is the default and why.

Pure: no terminal, no files, no torch. `wizard.py` draws the questions; `complete` answers those that nobody was asked.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from accel_fsdp.asking import Context, Option, Question
from accel_fsdp.errors import UsageError, UserError, did_you_mean
from accel_fsdp.types import STRATEGIES, Answers, MachineFacts


def _always(value: Any, reason: str) -> Callable[[Context], tuple[Any, str]]:
    return lambda context: (value, reason)


def _check_model(context: Context, value: Any) -> str:
    if not value:
        raise UsageError("--model is missing", why="the layer class is read from it", fix="--model HUB_ID_OR_FOLDER")
    return str(value)


def _options(*pairs: tuple[Any, str]) -> Callable[[Context], list[Option]]:
    return lambda context: [Option(value, label) for value, label in pairs]


_YES_NO = _options((False, "no"), (True, "yes"))


def _strategy_options(context: Context) -> list[Option]:
    hybrid = " inside each machine, one replica per machine"
    meaning = {
        1: "parameters, gradients and optimizer state sharded: least memory (ZeRO-3)",
        2: "gradients and optimizer state sharded, parameters kept after forward: less traffic (ZeRO-2)",
        3: "nothing sharded: plain data parallel, needs the whole model on each GPU",
        4: "as 1" + hybrid,
        5: "as 2" + hybrid,
    }
    return [Option(number, f"{number} {name}: {meaning[number]}") for number, name in STRATEGIES.items()]


def _default_layer_class(context: Context) -> tuple[tuple[str, ...], str]:
    if context.model is None:
        return (), "no model was read"
    names = tuple(layer.name for layer in context.model.wrap_classes)
    return names, context.model.wrap_reason


def _check_layer_class(context: Context, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    names = tuple(name.strip() for part in parts for name in part.split(",") if name.strip())
    if not names:
        raise UserError(
            "no transformer layer class is known",
            why="without it FSDP makes one unit of the whole model and saves no memory",
            fix="--layer-class NAME, or --wrap-policy SIZE_BASED_WRAP with --fsdp-version 1",
        )
    if context.model is not None:
        check_layer_classes(names, context.model.classes)
    return names


def check_layer_classes(names: tuple[str, ...], classes: frozenset[str]) -> None:
    """Refuses layer class names that the built model doesn't have.

    Raises:
        UserError: naming the first unknown one and the nearest existing class.
    """
    for name in names:
        if name not in classes:
            raise UserError(
                f"layer class {name} is not in the model.{did_you_mean(name, classes)}",
                why="Accelerate would stop at prepare: Could not find the transformer layer class",
                fix="one of: " + ", ".join(sorted(classes)),
            )


def _wrap_policy_options(context: Context) -> list[Option]:
    containers = "Accelerate 1.15 tries to shard ModuleList with it under FSDP2 and stops"
    return [
        Option("TRANSFORMER_BASED_WRAP", "TRANSFORMER_BASED_WRAP: one unit per transformer layer"),
        Option(
            "SIZE_BASED_WRAP",
            "SIZE_BASED_WRAP: a unit per module above a size",
            disabled=containers if context["fsdp_version"] == 2 else "",
        ),
        Option("NO_WRAP", "NO_WRAP: one unit for the whole model; saves little memory"),
    ]


def _checkpointing_options(context: Context) -> list[Option]:
    unwrapped = "Accelerate checkpoints what the wrap policy names, and NO_WRAP names nothing"
    disabled = unwrapped if context["wrap_policy"] == "NO_WRAP" else ""
    return [Option(False, "no"), Option(True, "yes", disabled=disabled)]


def _default_min_num_params(context: Context) -> tuple[int, str]:
    largest = context.model.largest_layer_parameters if context.model else 0
    if not largest:
        return 100_000_000, "Accelerate's default"
    return largest * 9 // 10, "just under the model's largest layer, so that each layer becomes a unit"


def _check_size(context: Context, value: Any) -> int:
    return _check_at_least(1, "--min-num-params", "0 wraps nothing, without a word from Accelerate")(context, value)


def _check_at_least(least: int, flag: str, why: str, most: int | None = None) -> Callable[[Context, Any], int]:
    def check(context: Context, value: Any) -> int:
        text = str(value)
        number = int(text) if text.isascii() and text.isdigit() else -1
        if number < least or (most is not None and number > most):
            limits = f"from {least} up" if most is None else f"from {least} to {most}"
            raise UserError(f"{flag} {value} is not a whole number {limits}", why=why, fix=f"{flag} {least}")
        return number

    return check


def _default_processes(context: Context) -> tuple[int, str]:
    machines = context["num_machines"]
    if context.machine.count:
        found = f"{context.machine.count} x {context.machine.accelerator} on this machine"
        return context.machine.count * machines, found + (f", {machines} machines" if machines > 1 else "")
    return 2 * machines, "no GPU here: two processes per machine, enough to rehearse on CPU"


def _check_processes(context: Context, value: Any) -> int:
    total = _check_at_least(1, "--num-processes", "each process drives one GPU")(context, value)
    machines = context["num_machines"]
    if total % machines:
        raise UserError(
            f"--num-processes {total} is not a multiple of --num-machines {machines}",
            why="it is the total over all machines; Accelerate would start fewer, without a word",
            fix=f"--num-processes {max(total // machines, 1) * machines}",
        )
    if context["strategy"] in (4, 5) and total // machines < 2:
        raise UserError(
            f"hybrid sharding with {total // machines} process per machine",
            why="it shards inside each machine, so nothing would be sharded",
            fix=f"--num-processes {2 * machines} or more, or --strategy 1",
        )
    return total


def _check_ip(context: Context, value: Any) -> str:
    text = str(value).strip()
    if context["num_machines"] > 1 and not text:
        raise UserError(
            "--main-process-ip is missing",
            why=f"{context['num_machines']} machines have to meet at one address; Accelerate would wait at None:29500",
            fix="--main-process-ip ADDRESS_OF_THE_FIRST_MACHINE",
        )
    return text


def _default_ram_loading(context: Context) -> tuple[bool, str]:
    if context["fsdp_version"] == 2 and context.model is not None and context.model.persistent_buffers:
        return False, f"the model stores {context.model.persistent_buffers} buffers, which FSDP2 can't fill from rank 0"
    return True, "one rank reads the weights, the others receive them"


def _several_machines(context: Context) -> bool:
    return bool(context["num_machines"] > 1)


def _is_fsdp(context: Context) -> bool:
    return not is_ddp(context["fsdp_version"], context["strategy"])


def is_ddp(fsdp_version: int, strategy: int) -> bool:
    """FSDP2 has no NO_SHARD: the same thing is plain DDP there."""
    return fsdp_version == 2 and strategy == 3


QUESTIONS: tuple[Question, ...] = (
    Question(
        "model",
        "Which model? (hub id or local folder)",
        metavar="ID_OR_FOLDER",
        default=_always("", "needed to find the layer class"),
        check=_check_model,
    ),
    Question(
        "method",
        "What do you train?",
        metavar="full|lora",
        default=_always("full", "every weight is trained"),
        options=_options(
            ("full", "full: every weight"), ("lora", "lora: small adapter matrices, the base stays frozen")
        ),
    ),
    Question(
        "fsdp_version",
        "Which FSDP?",
        metavar="1|2",
        default=_always(2, "FSDP2 resumes the optimizer state exactly and is where PyTorch's work goes"),
        options=_options(
            (2, "2: fully_shard, per-parameter sharding (recommended)"), (1, "1: FullyShardedDataParallel")
        ),
    ),
    Question(
        "strategy",
        "Which sharding strategy?",
        metavar="1|2|3|4|5",
        default=_always(1, "FULL_SHARD fits the largest model"),
        options=_strategy_options,
        names={str(number): name for number, name in STRATEGIES.items()},
    ),
    Question(
        "wrap_policy",
        "How are FSDP units made?",
        metavar="POLICY",
        default=_always("TRANSFORMER_BASED_WRAP", "gathers one layer at a time"),
        options=_wrap_policy_options,
        applies=_is_fsdp,
    ),
    Question(
        "layer_class",
        "Which transformer layer class? (several: comma-separated)",
        metavar="NAME[,NAME]",
        default=_default_layer_class,
        applies=lambda context: _is_fsdp(context) and bool(context["wrap_policy"] == "TRANSFORMER_BASED_WRAP"),
        check=_check_layer_class,
    ),
    Question(
        "min_num_params",
        "From how many parameters on does a module become a unit?",
        metavar="N",
        default=_default_min_num_params,
        applies=lambda context: _is_fsdp(context) and bool(context["wrap_policy"] == "SIZE_BASED_WRAP"),
        check=_check_size,
    ),
    Question(
        "cpu_offload",
        "Keep parameters, gradients and optimizer state in host memory (CPU offload)?",
        metavar="true|false",
        default=_always(False, "several times slower; only when nothing else fits"),
        options=_YES_NO,
        applies=_is_fsdp,
    ),
    Question(
        "activation_checkpointing",
        "Recompute activations in backward to save memory (FSDP activation checkpointing)?",
        metavar="true|false",
        default=_always(False, "costs about a third more compute"),
        options=_checkpointing_options,
        applies=_is_fsdp,
    ),
    Question(
        "state_dict_type",
        "How are checkpoints written?",
        metavar="TYPE",
        default=_always("SHARDED_STATE_DICT", "every rank writes its part, resumes on another number of GPUs"),
        options=_options(
            (
                "SHARDED_STATE_DICT",
                "SHARDED_STATE_DICT: in parallel; train/sft.py still exports one full model at the end",
            ),
            ("FULL_STATE_DICT", "FULL_STATE_DICT: gathered on rank 0 at every checkpoint"),
        ),
        applies=_is_fsdp,
    ),
    Question(
        "ram_efficient_loading",
        "Fill the ranks from rank 0's weights (RAM-efficient loading)?",
        metavar="true|false",
        default=_default_ram_loading,
        options=_YES_NO,
        applies=_is_fsdp,
    ),
    Question(
        "mixed_precision",
        "Which precision?",
        metavar="bf16|fp16|no",
        default=_always("bf16", "bf16 compute over fp32 master weights"),
        options=_options(
            ("bf16", "bf16: Ampere and newer"), ("fp16", "fp16: older GPUs"), ("no", "no: fp32 throughout")
        ),
    ),
    Question(
        "num_machines",
        "How many machines?",
        metavar="N",
        default=_always(1, "one machine"),
        check=_check_at_least(1, "--num-machines", "at least this machine takes part"),
    ),
    Question(
        "num_processes",
        "How many processes in total (one per GPU, over all machines)?",
        metavar="N",
        default=_default_processes,
        check=_check_processes,
    ),
    Question(
        "main_process_ip",
        "Address of the first machine?",
        metavar="ADDRESS",
        default=_always("", "not needed on one machine"),
        applies=_several_machines,
        check=_check_ip,
    ),
    Question(
        "main_process_port",
        "Port of the first machine?",
        metavar="PORT",
        default=_always(29500, "Accelerate's default"),
        applies=_several_machines,
        check=_check_at_least(1, "--main-process-port", "it must be a free TCP port", most=65535),
    ),
)


def to_answers(context: Context) -> Answers:
    """Turns a context in which every question is settled into `Answers`."""
    return Answers(**context.given)


def applying(answers: Answers) -> list[Question]:
    """The questions whose answers matter for these answers."""
    context = Context(given=asdict(answers), machine=MachineFacts(accelerator=None, count=0))
    return [question for question in QUESTIONS if question.applies(context)]
