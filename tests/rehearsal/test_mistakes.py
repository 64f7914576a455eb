"""Mistakes of a YAML and of a script, as they are judged from the events of ranks."""

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT
from rehearsals import FSDP1, FSDP2, rehearsed, yaml_file

from accel_fsdp.config import JobConfig, read_config
from accel_fsdp.hardware import host
from accel_fsdp.ranks import HeldUnit, Holding, RankEvent, hang, observing, read, script
from accel_fsdp.ranks.steps import ObservedSteps
from accel_fsdp.rehearsal import blame, job, mistakes, own_script, verdict
from accel_fsdp.rehearsal.job import Outcome

RIGHT = ROOT / "tests/rehearsal/right.py"


def test_a_wrong_layer_class_names_its_key(tiny_model: Path, tmp_path: Path) -> None:
    fsdp = FSDP1 | {"fsdp_transformer_layer_cls_to_wrap": "LlamaLayer"}
    failed = rehearsed(yaml_file(tmp_path, fsdp), RIGHT, "plain", tiny_model)
    assert not failed["passed"]
    assert "Could not find" in failed["said"]
    assert failed["key"] == "fsdp_transformer_layer_cls_to_wrap"


def told(rank: int, kind: str, **content: Any) -> RankEvent:
    return RankEvent(rank, 0.0, kind, content)


def step(rank: int = 0, **values: Any) -> RankEvent:
    """The record of a step."""
    content = {"optimizer": 0, "is_common": True, "is_copy": False, "line": "", "made_at": "mine.py:1", "moved_at": ""}
    content |= {"backwards": 0, "oldest": 0, "groups": [], "evaluating": False, "loaded_at": ""}
    return told(rank, "step", **content | {"strange": 0, "missing": 0} | values)


def trained(rank: int = 0, **values: Any) -> RankEvent:
    """The record of a rank's end."""
    content = {"optimizers": 1, "backwards": 2, "steps": 2, "common_steps": 2, "kept": False}
    content |= {"models": [], "schedules": [], "batches": [0, 0]}
    lines = dict.fromkeys(("nan_to_num", ".eval()", "requires_grad", "add_param_group"), "")
    return told(rank, "trained", **content | {"backward_line": "", "lines": lines} | values)


def model(**values: Any) -> dict[str, Any]:
    sums = {"head": [0.1, 1.0], "body": [0.1, 1.0], "norm": [0.1, 1.0]}
    content = {"number": 0, "is_copy": True, "last": sums, "end": sums, "unfrozen": [], "left": [], "changed": []}
    return content | values


def mistakes_of(*events: RankEvent) -> list[str]:
    """The mistakes of a script of two ranks; of which both ended if the events don't say otherwise."""
    ended = [trained(rank) for rank in (0, 1) if not any(event.kind == "trained" for event in events)]
    began = [told(rank, "began") for rank in (0, 1)]
    return [failure.what for failure in mistakes.find([*began, *events, *ended])]


def test_the_last_lines_of_a_script_are_few_and_short() -> None:
    printed = "\n".join(f"line {number}" for number in range(9)) + "\n\n 1%\r100%\n" + "a" * 500
    assert own_script.last_lines(printed).split("\n") == ["line 6", "line 7", "line 8", "100%", "a" * 160]
    assert own_script.last_lines("") == ""


def test_what_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the project, in packages too, without what is installed in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["scripts/train.py"])
    monkeypatch.setattr(script, "_started", None)
    script.begin()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    own = [str(tmp_path / name) for name in ("scripts/train.py", "pkg/checkpoint.py")]
    others = [str(tmp_path / ".venv/lib/site-packages/x.py"), str(tmp_path / "src/transformers/trainer.py"), "/x.py"]
    assert [*map(script.is_own, own), *map(script.is_own, others)] == [True, True, False, False, False]
    assert script.line_of([(own[0], 1), (own[1], 7), (others[0], 3)]) == "pkg/checkpoint.py:7"


def test_lines_of_no_file_are_not_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RIGHT.parent)
    monkeypatch.setattr("sys.argv", [RIGHT.name])
    scope: dict[str, Any] = {"line_of_stack": script.line_of_stack, "_getframe": sys._getframe}
    exec(compile("line = line_of_stack(_getframe())", "<frozen runpy>", "exec"), scope)
    assert "<frozen" not in scope["line"]


def ends(**values: Any) -> list[RankEvent]:
    return [trained(rank, **values) for rank in (0, 1)]


def leaves_out(end: int = 3, **of_other: Any) -> list[RankEvent]:
    """A head in no optimizer, of as many weights; `of_other` is what rank 1 says of it."""
    sums = {name: [0.1, 1.0] for name in ("head", "body", "norm")[:end]}
    models = [model(left=["head"], end=sums, last=sums), model(**{"end": sums, "last": sums, **of_other})]
    return [step(0), step(1), *(trained(rank, models=[models[rank]]) for rank in (0, 1))]


def norms(*gradients: float) -> list[RankEvent]:
    return [step(rank, gradients=norm) for norm in gradients for rank in (0, 1)]


def copies(last: float, end: float) -> list[RankEvent]:
    """The head of rank 1 after the last step and at the end; that of rank 0 has 0.1."""
    models = [model(), model(last={"head": [last, 1.0]}, end={"head": [end, 1.0]})]
    return [trained(rank, models=[models[rank]]) for rank in (0, 1)]


UNSTEPPED = {"steps": 0, "common_steps": 0}
JUDGED: dict[str, tuple[list[RankEvent], bool]] = {
    "gradients are kept, and no optimizer steps": (ends(**UNSTEPPED, kept=True), True),
    "gradients alone, as for maps of what a model looks at": (ends(**UNSTEPPED, kept=True, optimizers=0), False),
    "weights updated by hand, or loaded": (ends(**UNSTEPPED), False),
    "steps": (ends(), False),
    "weights in no optimizer": (leaves_out(), True),
    "a head alone is trained": (leaves_out(2), False),
    "a head that is unfrozen later": (leaves_out(2, unfrozen=["head"]), True),
    "a head that another rank changes": (leaves_out(changed=["head"]), False),
    "no gradients in the last steps": (norms(*[1.0] * 17, *[0.0] * 3), True),
    "no gradients in half of the steps": (norms(0.0, 1.0, 0.0, 1.0), True),
    "a last batch without labels": (norms(1.0, 0.0), False),
    "some batches without labels": (norms(*[1.0, 0.0, 1.0] * 6), False),
    "no gradients in one process either": (norms(*[0.0] * 6), False),
    "no gradients on one rank": ([step(rank, gradients=float(rank)) for _ in range(4) for rank in (0, 1)], False),
    "copies part": (copies(0.2, 0.2), True),
    "a rank loads its best weights, to evaluate them": (copies(0.1, 0.2), False),
    "DDP's join sends the weights to one with fewer batches": (copies(0.2, 0.1), False),
    "copies part, and the script combines them": ([told(0, "combines"), *copies(0.2, 0.2)], False),
    "a rank steps less often": ([trained(), trained(1, common_steps=1)], True),
    "a rank has a model of its own": ([trained(steps=5, backwards=5), trained(1)], False),
}


@pytest.mark.parametrize("name", JUDGED)
def test_what_is_a_mistake(name: str) -> None:
    events, is_mistake = JUDGED[name]
    assert bool(mistakes_of(*events)) is is_mistake


def test_evaluation_mode_may_be_meant_where_all_ranks_have_it() -> None:
    assert mistakes_of(step(0, evaluating=True), step(1)) == [
        "rank 0 trains in evaluation mode, without dropout, and rank 1 in training mode"
    ]
    assert not mistakes_of(*(step(rank, evaluating=mode) for mode in (False, True, True) for rank in (0, 1)))


Clears = Callable[[list[torch.optim.Optimizer], list[torch.nn.Module]], object]
CLEARED: dict[str, tuple[Clears, bool]] = {
    "never": (lambda optimizers, models: None, True),
    "by the other optimizer": (lambda optimizers, models: optimizers[1].zero_grad(), True),
    "to None": (lambda optimizers, models: optimizers[0].zero_grad(), False),
    "to zeros": (lambda optimizers, models: optimizers[0].zero_grad(set_to_none=False), False),
    "by the model": (lambda optimizers, models: models[0].zero_grad(), False),
    "faded": (lambda optimizers, models: [p.grad.mul_(0.9) for p in models[0].parameters() if p.grad is not None],
              False),
}  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["after the step", "before backward"])
@pytest.mark.parametrize("how", CLEARED)
def test_gradients_may_be_cleared_in_many_ways(
    how: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches make a step, and another optimizer steps with the same models in turn."""
    monkeypatch.setenv("ACCEL_FSDP_EVENTS", str(tmp_path))
    observed = ObservedSteps()
    clears, is_kept = CLEARED[how]
    models: list[torch.nn.Module] = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for optimizer in optimizers:
        observed._on_optimizer(optimizer)
    for number in range(3):
        if late and number:
            clears(optimizers, models)
        for _ in range(2):
            loss = models[1](models[0](torch.ones(2))).square().sum()
            observed.before_backward()
            loss.backward()
            observed.ran_backward(models)
        for optimizer in optimizers[: 2 - number % 2]:
            observed.before_step(optimizer)
            optimizer.step()
        if not late:
            clears(optimizers, models)
    first = [event for event in read(tmp_path) if event.content["optimizer"] == 0]
    assert bool(mistakes_of(*first)) == is_kept


def test_rates_that_part_later_are_the_schedules() -> None:
    def steps(rank: int, *rates: float) -> list[RankEvent]:
        return [step(rank, groups=[{"lr": [rate]}], moved_at="mine.py:2") for rate in rates]

    apart, later = [*steps(0, 0.1), *steps(1, 0.2)], [*steps(0, 0.1, 0.1), *steps(1, 0.1, 0.2)]
    (made,), (moved,) = ([mistake.line for mistake in mistakes.find(events)] for events in (apart, later))
    assert (made, moved) == ("mine.py:1", "mine.py:2")


def test_how_copies_part() -> None:
    def parting(first: dict[str, Any], other: dict[str, Any], **values: Any) -> Any:
        models = [model(**values), model(last={"head": [0.2, 1.0]}, end={"head": [0.2, 1.0]})]
        steps = [step(rank, is_copy=True, **how) for rank, how in enumerate((first, other))]
        ends = [trained(rank, models=[models[rank]]) for rank in (0, 1)]
        return next(mistakes.find([told(0, "began"), told(1, "began"), *steps, *ends]))

    assert parting({"backwards": 1}, {"backwards": 2}).what.startswith("the ranks step at different batches: step 1")
    loaded = parting({}, {"loaded_at": "mine.py:3"})
    assert loaded.what == "the ranks' copies of the model part: ranks 0 and 1 end with different values of head"
    assert loaded.line == "mine.py:3"
    assert parting({}, {}, unfrozen=["head"]).what.startswith("head was frozen when DistributedDataParallel wrapped")


def test_a_taken_port_is_not_the_scripts_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import torch\ntorch.distributed.init_process_group('gloo')\n")
    values = yaml.safe_load(yaml_file(tmp_path, {}).read_text()) | {"num_processes": 2}
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        ports = iter([other.getsockname()[1], host.free_port()])
        monkeypatch.setattr(host, "free_port", lambda: next(ports))
        outcome = job.Rehearsed(tmp_path, script, cold=True).launch("script", JobConfig(values), ())
    assert outcome.code == 0, outcome.output


def still(rank: int, collective: str, line: str = "mine.py:7", long: bool = False) -> RankEvent:
    return RankEvent(rank, 1.0, "still", {"collective": collective, "line": line, "stack": "", "long": long})


ENDED = RankEvent(1, 0.5, "ended", {"code": 0, "error": "", "line": ""})
STANDS: dict[str, tuple[list[RankEvent], bool]] = {
    "one has ended": ([still(0, "barrier"), ENDED, RankEvent(1, 2.0, "moved", {"moved": True})], True),
    "at different lines": ([still(0, "barrier"), still(1, "barrier", "mine.py:9")], True),
    "in different collectives": ([still(0, "barrier"), still(1, "all_gather")], True),
    "in one, on a slow machine": ([still(0, "all_gather"), still(1, "all_gather")], False),
    "in one, for long": ([still(0, "all_gather", long=True), still(1, "all_gather", long=True)], True),
    "one goes on": ([still(0, "barrier"), still(1, "all_gather"), RankEvent(1, 2.0, "went-on", {})], False),
    "one is slow outside": ([still(0, "barrier", long=True), RankEvent(1, 0.0, "loss", {})], False),
    "one downloads": ([still(0, "barrier", long=True), still(1, "", long=True)], True),
    "both download": ([still(0, "", long=True), still(1, "", long=True)], False),
}


@pytest.mark.parametrize("name", STANDS)
def test_a_hang_is_sure_early_where_nothing_can_move(name: str) -> None:
    events, is_hang = STANDS[name]
    assert (job.hang_in(events, 2) is not None) == is_hang


def test_ddp_waits_in_c() -> None:
    assert hasattr(torch.nn.parallel.DistributedDataParallel, next(iter(hang.IN_C)))
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: gradient + "which fails")
    with pytest.raises(TypeError) as raised:
        weight.sum().backward()
    assert hang.collective_of_error(raised.value) == "backward"


def test_a_loop_without_an_end_is_named_where_time_is_over() -> None:
    events = [ENDED, RankEvent(0, 9.0, "at", {"collective": "", "line": "mine.py:4", "stack": ""})]
    failure = blame.of_hang(replace(job.hang_of(events), in_time=False), events)
    assert failure.what == "the launch took too long and was ended: rank 0 is at mine.py:4; rank 1 has ended"
    assert (failure.key, failure.line) == ("the script", "mine.py:4")
    slow = [RankEvent(rank, 9.0, "at", {"collective": "", "line": "mine.py:4", "stack": ""}) for rank in (0, 1)]
    assert blame.of_hang(replace(job.hang_of(slow), in_time=False), slow).key == "--timeout"


def test_a_rank_that_gloo_aborts_is_named_also_where_the_other_one_ended_well() -> None:
    call = {"group": "", "number": 0, "name": "", "call": "gather", "lines": ["mine.py:11"], "sizes": []}
    outcome = Outcome(134, [ENDED, told(0, "aborted", calls=[call])], f"terminate called\n{blame.OTHER_SIZE}")
    failure = blame.of_outcome(outcome)
    assert failure.what == "gather gets tensors of different sizes: rank 0 is sent more than it waits for"
    assert failure.line == "mine.py:11"
    assert blame.of_outcome(replace(outcome, output="Segmentation fault")).what == "a rank ended with exit code 134"


def test_the_end_of_a_long_output_begins_at_a_line() -> None:
    lines = [f"line {number}" for number in range(1000)]
    tail = Outcome(1, [], "\n".join(lines)).tail
    assert tail.splitlines() == lines[-len(tail.splitlines()) :]
    assert Outcome(1, [], "short\nlog").tail == "short\nlog"


def test_an_observers_error_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_FSDP_EVENTS", str(tmp_path))

    class Owner:
        def act(self) -> int:
            return 3

    def fails(_: Owner) -> None:
        raise TypeError("odd value")

    observing.before(Owner, "act", fails)
    observing.after(Owner, "act", fails)
    assert Owner().act() == 3
    observing.events.report("settings", rate=torch.tensor(0.5))
    *errors, settings = [event.content for event in read(tmp_path)]
    assert [error["why"] for error in errors] == ["TypeError: odd value"]
    assert settings == {"rate": 0.5}


def test_each_model_is_judged_by_the_classes_that_it_was_prepared_with(tmp_path: Path) -> None:
    """As where the classes are set before each of two calls of prepare."""
    unit = HeldUnit("layer", "BertLayer", 8, 4, 4, 2)
    bert = Holding("Bert", "FSDP2", (unit, replace(unit, name="", kind="Bert")), 0, {"BertLayer": 1})
    expected = verdict.of_job(read_config(yaml_file(tmp_path, FSDP2))[0], 2, 1, ())
    assert [found.key for found in verdict.differences(expected, {0: bert})] == ["fsdp_transformer_layer_cls_to_wrap"]
    assert not list(verdict.differences(expected, {0: replace(bert, classes=("BertLayer",))}))
