"""Rules about the training script (`--script`): patterns in its syntax tree.

The script is never run. Only unambiguous cases are reported, as warnings: a script may never reach the line.
"""

import ast
import re
from collections.abc import Iterator

from accel_fsdp.linter.rules.engine import Cases, Each, Row
from accel_fsdp.linter.rules.subject import Subject

RANK_WORDS = ("is_main_process", "is_local_main_process", "is_world_process_zero", "is_local_process_zero")
RANKS = {"rank", "local_rank", "global_rank", "get_rank", "process_index", "local_process_index", "RANK", "LOCAL_RANK"}
GATHERING = ("get_state_dict", "get_model_state_dict", "save_model", "save_fsdp_model", "save_state")


def _name_of(call: ast.AST) -> str:
    """The last part of a call's name: `save_model` in `trainer.save_model()`; empty for what isn't a call."""
    function = call.func if isinstance(call, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _owner(call: ast.Call) -> ast.expr | None:
    """The object of a method call; None for a function."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _nodes(subject: Subject) -> Iterator[ast.AST]:
    """All nodes of the script's tree; none without a script, or without FSDP."""
    return ast.walk(subject.script.tree) if subject.script and subject.is_fsdp else iter(())


def _calls(subject: Subject, *names: str) -> list[ast.Call]:
    """The script's calls of these names, in the order of lines."""
    matches = [node for node in _nodes(subject) if isinstance(node, ast.Call) and _name_of(node) in names]
    return sorted(matches, key=lambda call: (call.lineno, call.col_offset))


def _assigned(subject: Subject) -> Iterator[tuple[str, ast.expr]]:
    """Every assigned name or attribute with its value; elements of a tuple have the same value."""
    for node in _nodes(subject):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for element in target.elts if isinstance(target, ast.Tuple) else [target]:
                    yield ast.unparse(element), node.value


def _trainers(subject: Subject) -> set[str]:
    """The names that hold a Trainer, as the script's own assignments show."""
    return {"trainer", *(name for name, value in _assigned(subject) if _name_of(value).endswith("Trainer"))}


def _on_trainer(call: ast.Call, trainers: set[str]) -> bool:
    """Whether a method is called on a Trainer: by its assignment, or by its name."""
    owner = _owner(call)
    text = ast.unparse(owner) if owner else ""
    return owner is not None and (_name_of(owner).endswith("Trainer") or "trainer" in text.lower() or text in trainers)


def _wrapped(subject: Subject) -> set[str]:
    """Names and expressions that hold the sharded model: those of `prepare`, `unwrap_model`, and a Trainer."""
    names = {f"{owner}.{name}" for owner in _trainers(subject) for name in ("model", "model_wrapped")}
    for name, value in _assigned(subject):
        is_attribute = isinstance(value, ast.Attribute) and ast.unparse(value) in names
        if _name_of(value) in ("prepare", "unwrap_model") or is_attribute:
            names.add(name)
    return names | {"self.model_wrapped"}


def _at(subject: Subject, call: ast.Call) -> dict[str, str]:
    """The line of the script, and the name of what it calls."""
    return {"line_of_script": f"{subject.script.name if subject.script else ''}:{call.lineno}", "call": _name_of(call)}


def _writes_nothing(subject: Subject) -> Cases:
    """In a script that gathers nowhere."""
    gathers = _calls(subject, "set_state_dict_type", "get_state_dict", "get_model_state_dict", "merge_fsdp_weights")
    if not subject.sharded_state_dict or gathers:
        return []
    names = _trainers(subject)
    return [_at(subject, call) for call in _calls(subject, "save_model") if _on_trainer(call, names)]


def _saves_shards(subject: Subject) -> Each:
    names = _wrapped(subject)
    for call in _calls(subject, "save_pretrained"):
        owner = _owner(call)
        is_wrapped = owner is not None and (_name_of(owner) == "unwrap_model" or ast.unparse(owner) in names)
        if is_wrapped and all(argument.arg not in ("state_dict", None) for argument in call.keywords):
            yield _at(subject, call)


def _on_one_rank(subject: Subject) -> Each:
    """Trainer.save_state writes a small JSON on rank 0; a bare save_model is a function of the script's own."""
    statements = [part for node in _nodes(subject) if isinstance(node, ast.If) for part in _statements_of_rank_0(node)]
    names, gathered = _trainers(subject), set()
    for call in (call for part in statements for call in ast.walk(part)):
        if not isinstance(call, ast.Call) or _name_of(call) not in GATHERING or call in gathered:
            continue
        gathered.add(call)
        is_small = _name_of(call) == "save_state" and _on_trainer(call, names)
        if not is_small and not (_name_of(call) == "save_model" and _owner(call) is None):
            yield _at(subject, call)


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
        is_zero = isinstance(test.ops[0], operator) and ast.unparse(test.comparators[-1]) in ("0", "'0'")
        return is_zero and bool(RANKS & set(re.findall(r"\w+", ast.unparse(test.left))))
    text = ast.unparse(test)
    plain = isinstance(test, ast.Name | ast.Attribute | ast.Call)
    return operator is ast.Eq and plain and any(word in text for word in RANK_WORDS)


ROWS = (
    Row(
        "AF901", "warning", "", "{line_of_script}: save_model writes nothing under SHARDED_STATE_DICT",
        "training ends silently without a model",
        "trainer.accelerator.state.fsdp_plugin.set_state_dict_type('FULL_STATE_DICT') before it", _writes_nothing,
        seen="P03 ranks transformers#30491",
    ),
    Row(
        "AF902", "warning", "", "{line_of_script}: save_pretrained without state_dict",
        "FSDP1 writes one rank's shards as the model, FSDP2 stops",
        "state_dict=accelerator.get_state_dict(model), computed on all ranks", _saves_shards, seen="P18 ranks",
    ),
    Row(
        "AF903", "warning", "", "{line_of_script}: {call} on one rank only", "it gathers from all ranks and hangs",
        "call it on all", _on_one_rank, seen="P19 accelerate#2000",
    ),
)  # fmt: skip
