"""Rules about the training script (`--script`): patterns in its syntax tree.

The script is never run. Only unambiguous cases are reported, as warnings: a script may never reach the line.
"""

import ast
import re
from collections.abc import Iterator

from accel_fsdp.checkpoints import file_names
from accel_fsdp.config import Engine
from accel_fsdp.job import from_arguments
from accel_fsdp.linter.rules.engine import Finding, Subject, rule

RANK_WORDS = ("is_main_process", "is_local_main_process", "is_world_process_zero", "is_local_process_zero")
RANKS = {"rank", "local_rank", "global_rank", "get_rank", "process_index", "local_process_index", "RANK", "LOCAL_RANK"}
GATHERING = ("get_state_dict", "get_model_state_dict", "save_model", "save_fsdp_model", "save_state")
TRL = ("SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "KTOConfig", "ORPOConfig", "CPOConfig")
ARGUMENT_CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments", "parse_args_into_dataclasses", *TRL)


def name_of(call: ast.Call) -> str:
    """The last part of a call's name: `save_model` in `trainer.save_model()`."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def receiver(call: ast.Call) -> str:
    """The object of a method call, as source text; empty for a function."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def nodes(subject: Subject) -> Iterator[ast.AST]:
    """All nodes of the script's tree; none without a script, or without FSDP."""
    return ast.walk(subject.script.tree) if subject.script and subject.is_fsdp else iter(())


def calls(subject: Subject, *names: str, of_any_engine: bool = False) -> list[ast.Call]:
    """The script's calls of these names, in the order of lines; none without FSDP, unless those of any engine count."""
    tree = ast.walk(subject.script.tree) if subject.script and of_any_engine else nodes(subject)
    matches = [node for node in tree if isinstance(node, ast.Call) and name_of(node) in names]
    return sorted(matches, key=lambda call: (call.lineno, call.col_offset))


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((argument.value for argument in call.keywords if argument.arg == name), None)


def constant(node: ast.AST | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def calls_by_scope(subject: Subject) -> list[list[ast.Call]]:
    """The calls of the module, and those of each function."""
    return [own_calls(node) for node in nodes(subject) if isinstance(node, ast.Module | ast.FunctionDef)]


def own_calls(scope: ast.Module | ast.FunctionDef) -> list[ast.Call]:
    """The calls in a scope, without those in functions and classes inside it, in the order of lines."""
    waiting, direct = list(ast.iter_child_nodes(scope)), []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call):
            direct.append(node)
        waiting += ast.iter_child_nodes(node)
    return sorted(direct, key=lambda call: (call.lineno, call.col_offset))


def assigned(subject: Subject) -> Iterator[tuple[str, ast.expr]]:
    """Every assigned name or attribute with its value; elements of a tuple have the same value."""
    for node in nodes(subject):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets = [node.target]
        else:
            continue
        for target in targets:
            elements = target.elts if isinstance(target, ast.Tuple) else [target]
            for element in elements:
                if node.value is not None:
                    yield ast.unparse(element), node.value


def trainers(subject: Subject) -> set[str]:
    """The names that hold a Trainer, as the script's own assignments show."""
    return {name for name, value in assigned(subject) if isinstance(value, ast.Call) and _makes_trainer(value)}


def _makes_trainer(call: ast.Call) -> bool:
    return name_of(call).endswith("Trainer")


def trainer_classes(subject: Subject) -> set[str]:
    """The Trainer classes that the script instantiates or derives from."""
    classes = [node for node in nodes(subject) if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    instances = {name_of(node) for node in nodes(subject) if isinstance(node, ast.Call) and _makes_trainer(node)}
    return instances | {name.rpartition(".")[2] for name in bases if name.endswith("Trainer")}


def on_trainer(call: ast.Call, trainer_names: set[str]) -> bool:
    """Whether a method is called on a Trainer: by its assignment, or by its name."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_trainer = isinstance(owner, ast.Call) and _makes_trainer(owner)
    return is_trainer or "trainer" in receiver(call).lower() or receiver(call) in trainer_names


def wrapped_names(subject: Subject) -> set[str]:
    """Names and expressions that hold the sharded model: those of `prepare`, `unwrap_model`, and a Trainer."""
    owners = {"trainer"} | trainers(subject)
    names = {"self.model_wrapped", *(f"{owner}.{name}" for owner in owners for name in ("model", "model_wrapped"))}
    for name, value in assigned(subject):
        is_wrapped_model = isinstance(value, ast.Call) and name_of(value) in ("prepare", "unwrap_model")
        if is_wrapped_model or (isinstance(value, ast.Attribute) and ast.unparse(value) in names):
            names.add(name)
    return names


def is_wrapped(subject: Subject, call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    unwrapped = isinstance(owner, ast.Call) and name_of(owner) == "unwrap_model"
    return unwrapped or receiver(call) in wrapped_names(subject)


@rule("AF901", "warning", pains=("P03",))
def save_model_does_nothing(subject: Subject) -> Iterator[Finding]:
    """`trainer.save_model()` with SHARDED_STATE_DICT in a script that gathers nowhere: it writes no model."""
    gathers = calls(subject, "set_state_dict_type", "get_state_dict", "get_model_state_dict", "merge_fsdp_weights")
    trainer_names = trainers(subject)
    if subject.sharded_state_dict and not gathers:
        for call in (call for call in calls(subject, "save_model") if on_trainer(call, trainer_names)):
            yield subject.at(
                call,
                "save_model writes nothing under SHARDED_STATE_DICT",
                "training ends silently without a model",
                "trainer.accelerator.state.fsdp_plugin.set_state_dict_type('FULL_STATE_DICT') before it",
            )


@rule("AF902", "warning", pains=("P18",))
def shard_saved_as_model(subject: Subject) -> Iterator[Finding]:
    """`save_pretrained` on the unwrapped model without `state_dict`: FSDP1 writes shards as if they were weights.

    FSDP2 stops with "invalid python storage".
    """
    for call in calls(subject, "save_pretrained"):
        if is_wrapped(subject, call) and all(argument.arg not in ("state_dict", None) for argument in call.keywords):
            yield subject.at(
                call,
                "save_pretrained without state_dict",
                "FSDP1 writes one rank's shards as the model, FSDP2 stops",
                "state_dict=accelerator.get_state_dict(model), computed on all ranks",
            )


@rule("AF903", "warning", pains=("P19",))
def gathering_on_one_rank(subject: Subject) -> Iterator[Finding]:
    """A gathering save on one rank: the other ranks never join, and the job hangs.

    Found below conditions such as `if ...is_main_process` and `if rank == 0`, and in the `else` of `if not
    ...is_main_process`.
    """
    statements = [part for node in nodes(subject) if isinstance(node, ast.If) for part in _statements_of_rank_0(node)]
    trainer_names, gathered = trainers(subject), set()
    for call in (call for part in statements for call in ast.walk(part)):
        gathers = isinstance(call, ast.Call) and name_of(call) in GATHERING and call not in gathered
        if not gathers or not isinstance(call, ast.Call):
            continue
        gathered.add(call)
        if name_of(call) == "save_state" and on_trainer(call, trainer_names):
            continue  # Trainer.save_state writes a small JSON on rank 0
        if name_of(call) == "save_model" and not receiver(call):
            continue  # a function of the script's own
        yield subject.at(
            call, f"{name_of(call)} on one rank only", "it gathers from all ranks and hangs", "call it on all"
        )


def _statements_of_rank_0(node: ast.If) -> list[ast.stmt]:
    """The statements that only rank 0 runs below an `if`."""
    if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
        return node.orelse if _is_rank_0(node.test.operand, ast.Eq) else []
    return node.body if _is_rank_0(node.test, ast.Eq) else node.orelse if _is_rank_0(node.test, ast.NotEq) else []


def _is_rank_0(test: ast.expr, operator: type[ast.cmpop]) -> bool:
    """Whether a condition selects rank 0: by a property, or by a comparison with 0."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return operator is ast.Eq and any(_is_rank_0(part, operator) for part in test.values)
    if isinstance(test, ast.Compare):
        is_zero = len(test.ops) == 1 and isinstance(test.ops[0], operator) and constant(test.comparators[0]) in (0, "0")
        return is_zero and bool(RANKS & set(re.findall(r"\w+", ast.unparse(test.left))))
    text = ast.unparse(test)
    plain = isinstance(test, ast.Name | ast.Attribute | ast.Call)
    return operator is ast.Eq and plain and any(word in text for word in RANK_WORDS)


@rule("AF904", "warning", pains=("P20",))
def checkpoint_after_the_switch(subject: Subject) -> Iterator[Finding]:
    """`set_state_dict_type("FULL_STATE_DICT")` under FSDP1 and a checkpoint or training after it.

    The old configuration object stays in place: "Expected state_dict_config of type FullStateDictConfig".
    """
    switches = [call for call in calls(subject, "set_state_dict_type") if call.args and "FULL" in ast.unparse(call)]
    if subject.engine is not Engine.FSDP1 or not subject.sharded_state_dict or not switches:
        return
    values = [ast.unparse(value) for name, value in assigned(subject) if name.endswith("state_dict_config")]
    if "None" in values:
        return
    for call in calls(subject, "train", "save_state", "save_fsdp_model"):
        trains = name_of(call) != "train" or on_trainer(call, trainers(subject))
        if trains and call.lineno > switches[0].lineno:
            yield subject.at(
                call,
                "a checkpoint after the switch to FULL_STATE_DICT",
                "FSDP1 stops: Expected state_dict_config of type FullStateDictConfig",
                "switch just before save_model, after the last checkpoint",
            )


@rule("AF905", "warning", pains=("P24",))
def evaluating_first(subject: Subject) -> Iterator[Finding]:
    """`trainer.evaluate()` before `trainer.train()`: FSDP2 stops there, FSDP1 in `train()`."""
    trainer_names = trainers(subject)
    for scope in calls_by_scope(subject):
        trainer_calls = [call for call in scope if on_trainer(call, trainer_names)]
        trains = {receiver(call): call.lineno for call in reversed(trainer_calls) if name_of(call) == "train"}
        first = [c for c in trainer_calls if name_of(c) == "evaluate" and c.lineno < trains.get(receiver(c), 0)]
        for call in first[:1]:
            yield subject.at(
                call,
                "evaluate before train",
                "FSDP2 stops here, FSDP1 when training starts",
                "eval_on_start=True in the arguments",
            )


@rule("AF906", "warning", pains=("P16",))
def accelerator_before_arguments(subject: Subject) -> Iterator[Finding]:
    """`Accelerator()` or `PartialState()` before `TrainingArguments`: `ddp_timeout` then has no effect.

    The process group exists already, with 10 minutes.
    """
    for calls in calls_by_scope(subject):
        last = max((call.lineno for call in calls if name_of(call) in ARGUMENT_CLASSES), default=0)
        early = [c for c in calls if name_of(c) in ("Accelerator", "PartialState") and c.lineno < last]
        for call in early[:1]:
            yield subject.at(
                call,
                f"{name_of(call)}() before the training arguments",
                "ddp_timeout has no effect, and long saves or tokenizing end in a timeout",
                "make the training arguments first",
            )


def _calls_within(subject: Subject, name: str) -> set[ast.Call]:
    """The calls inside of a `with` statement whose context manager is a call of this name."""
    blocks = (node for node in nodes(subject) if isinstance(node, ast.With | ast.AsyncWith))
    opened = (block for block in blocks if any(name in ast.unparse(item.context_expr) for item in block.items))
    return {node for block in opened for node in ast.walk(block) if isinstance(node, ast.Call)}


@rule("AF907", "warning", pains=("P61",))
def generating_in_the_script(subject: Subject) -> Iterator[Finding]:
    """`generate` on the sharded model under FSDP1, outside of `summon_full_params`: "'weight' must be 2-D"."""
    if subject.engine is Engine.FSDP1:
        gathered = _calls_within(subject, "summon_full_params")
        for call in calls(subject, "generate"):
            if is_wrapped(subject, call) and call not in gathered:
                yield subject.at(
                    call,
                    "generate on an FSDP1 model",
                    "it stops: 'weight' must be 2-D",
                    "FSDP.summon_full_params(model, writeback=False) around it, on all ranks; or fsdp_version: 2",
                )


@rule("AF908", "warning", pains=("P79",))
def optimizers_for_trainer(subject: Subject) -> Iterator[Finding]:
    """`optimizers=` for a Trainer: it refuses them under FSDP."""
    for call in calls(subject, *trainer_classes(subject)):
        optimizers = keyword(call, "optimizers")
        if optimizers is not None and ast.unparse(optimizers) not in ("(None, None)", "None"):
            yield subject.at(
                call,
                "optimizers given to the Trainer",
                "it stops: Passing optimizers is not allowed",
                "optimizer_cls_and_kwargs, or override create_optimizer",
            )


@rule("AF909", "warning", pains=("P87",))
def device_map_in_the_script(subject: Subject) -> Iterator[Finding]:
    """`from_pretrained(..., device_map="auto")`: Accelerate refuses to train such a model in several processes."""
    for call in calls(subject, "from_pretrained"):
        if constant(keyword(call, "device_map")) in ("auto", "balanced", "sequential"):
            yield subject.at(call, "device_map spreads the model", "Accelerate refuses to train it", "drop device_map")


@rule("AF910", "warning", pains=("P89",))
def clipping_by_value(subject: Subject) -> Iterator[Finding]:
    """`accelerator.clip_grad_value_`, which Accelerate refuses under FSDP."""
    for call in calls(subject, "clip_grad_value_"):
        if "accelerator" in receiver(call):
            yield subject.at(
                call, "clip_grad_value_ under FSDP", "Accelerate refuses it", "accelerator.clip_grad_norm_"
            )


@rule("AF911", "warning", pains=("P91",))
def merging_sharded_weights(subject: Subject) -> Iterator[Finding]:
    """`merge_and_unload` or `merge_adapter` on the sharded model."""
    for call in calls(subject, "merge_and_unload", "merge_adapter"):
        if is_wrapped(subject, call):
            yield subject.at(
                call,
                f"{name_of(call)} on the sharded model",
                "PEFT can't merge shards",
                "save the adapter, then merge it into the base in one process",
            )


def _silent_config(subject: Subject, *names: str) -> ast.Call | None:
    """The first TRL config without these arguments, which unpacks nothing, if the command line lacks them too."""
    if any(subject.arg(name) is not None for name in names):
        return None
    silent = (call for call in calls(subject, *TRL) if not {None, *names} & {word.arg for word in call.keywords})
    return next(silent, None)


@rule("AF912", "warning", pains=("P25",))
def trl_checkpoints_by_default(subject: Subject) -> Iterator[Finding]:
    """A TRL config without `gradient_checkpointing`, which TRL then turns on, beside that of FSDP: Trainer stops."""
    config = _silent_config(subject, "gradient_checkpointing", "activation_checkpointing")
    if subject.on("fsdp_activation_checkpointing") and config is not None:
        yield subject.at(
            config,
            f"{name_of(config)} turns gradient_checkpointing on",
            "Trainer stops: can't both be set to True",
            "gradient_checkpointing=False; with LoRA turn FSDP's off instead",
        )


@rule("AF913", "warning", pains=("P81",))
def trl_bf16_by_default(subject: Subject) -> Iterator[Finding]:
    """A TRL config without `bf16`, which TRL then turns on, beside `mixed_precision: 'no'`: the file is overridden."""
    config = _silent_config(subject, "bf16", "fp16")
    if str(subject.values.get("mixed_precision")).lower() == "no" and config is not None:
        yield subject.at(
            config,
            f"{name_of(config)} turns bf16 on",
            "mixed_precision: 'no' is overridden, and GPUs without bf16 stop",
            "bf16=False, or mixed_precision: bf16",
        )


@rule("AF914", "warning", pains=("P76",))
def merging_the_wrong_folder(subject: Subject) -> Iterator[Finding]:
    """`merge_fsdp_weights` with a `checkpoint-N` or `optimizer_0` folder: it wants `pytorch_model_fsdp_0` inside."""
    for call in calls(subject, "merge_fsdp_weights"):
        folder = constant(call.args[0] if call.args else keyword(call, "checkpoint_dir"))
        last = folder.rstrip("/").rpartition("/")[2] if isinstance(folder, str) else ""
        if last.startswith((file_names.CHECKPOINT, file_names.OPTIMIZER)):
            yield subject.at(
                call,
                f"merge_fsdp_weights of {last}",
                "it stops: metadata is None, or Key state is invalid",
                f"its folder {file_names.SHARDED_MODEL}",
            )


@rule("AF915", "warning", pains=("P51",))
def fsdp_in_the_script(subject: Subject) -> Iterator[Finding]:
    """`fsdp=` in the script's training arguments beside an FSDP file: the script wins, with leftovers of the file."""
    for call in calls(subject, *ARGUMENT_CLASSES):
        value = keyword(call, "fsdp")
        if constant(value) not in (None, False, "") or (isinstance(value, ast.List) and value.elts):
            yield subject.at(call, "the script sets FSDP too", "most of this file is ignored", "drop fsdp=")


@rule("AF918", "warning")
def norm_that_deepspeed_ignores(subject: Subject) -> Iterator[Finding]:
    """`accelerator.clip_grad_norm_` under DeepSpeed, with another norm than the one that DeepSpeed clips to.

    Accelerate leaves clipping to DeepSpeed there: to `gradient_clipping`, without one to 1.0, at 0 to none.
    """
    section = subject.section("deepspeed_config")
    limit = from_arguments.number(section.get("gradient_clipping"), None)
    if subject.engine is not Engine.DEEPSPEED or "deepspeed_config_file" in section or limit:
        return
    used_norm, clips = (1.0, "to 1.0") if limit is None else (0, "not at all")
    for call in calls(subject, "clip_grad_norm_", of_any_engine=True):
        norm = constant(call.args[1] if len(call.args) > 1 else keyword(call, "max_norm"))
        if "accelerator" in receiver(call) and isinstance(norm, int | float) and norm not in (0, used_norm):
            yield subject.at(
                call,
                f"clip_grad_norm_ to {norm} changes nothing under DeepSpeed",
                f"DeepSpeed clips by itself, with this file {clips}",
                f"gradient_clipping: {norm} in deepspeed_config",
            )
