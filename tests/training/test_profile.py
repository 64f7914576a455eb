"""`--profile_steps` on real ranks: it measures what plain PyTorch and arithmetic say, and trains as without."""

import gzip
import json
import math
import re
from collections.abc import Callable
from functools import wraps
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROBE, SFT, Finished, accelerate_launch
from test_training import PER_RANK, RANKS, STEPS, make_config, sft_args
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer

from accel_fsdp.config import Engine
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import gpus
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction import Traffic, by_unit, trace_store
from accel_fsdp.prediction.memory import variant_of
from accel_fsdp.training import arguments
from accel_fsdp.training.reporting import run_record, step_page, step_report, step_trace
from accel_fsdp.training.reporting.step_trace import Mark, Measured, StepTrace

LAYERS, HIDDEN, VOCAB = 3, 128, 509
FLOAT = 4
CLOSE = 0.03
"""Of the highest point: predicted for CUDA's kernels, measured with those of the CPU."""
STARTED = 16 << 10
"""Bytes of a batch, of random states and of counts, which no formula here has."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A Llama whose sizes are even, as those of models are."""
    folder = tmp_path_factory.mktemp("profiled") / "llama"
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 352, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path, text_data: Path) -> tuple[Path, str]:
    """One launch: FSDP2 twice, with other steps profiled; FSDP1; and that with an adapter and two micro-batches."""
    folder = tmp_path_factory.mktemp("profiles")
    words, configs = {}, {}
    jobs = {
        "fsdp2": ("2", ("--profile_steps", "2:3")),
        "again": ("2", ("--profile_steps", "4")),
        "fsdp1": ("1", ("--profile_steps", "3")),
        "lora": ("1", ("--profile_steps", "3", "--use_peft", "--gradient_accumulation_steps", "2")),
    }
    for name, (version, more) in jobs.items():
        (folder / f"of-{name}").mkdir()
        configs[name] = make_config(folder / f"of-{name}", model, fsdp_version=version)
        words[name] = sft_args(model, text_data, folder / name, "--save_strategy", "no", *more)
    others = {name: ["--config_file", str(configs[name]), *words[name]] for name in list(jobs)[1:]}
    env = {"PROBE_OUT": str(folder), "PROBE_MORE": json.dumps(others)}
    finished = accelerate_launch(configs["fsdp2"], PROBE, *words["fsdp2"], **env)
    assert finished.code == 0, finished.output
    return folder, finished.output


def numbers(run: Path) -> dict[str, Any]:
    return json.loads((run / "profile" / "step.json").read_text())  # type: ignore[no-any-return]


def ranges(file: Path) -> list[dict[str, Any]]:
    """The units' ranges of a trace, in order."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        events = json.load(text)["traceEvents"]
    return sorted((event for event in events if event.get("cat") == "unit"), key=lambda event: event["ts"])


@pytest.mark.slow
def test_a_step_trains_the_same_whether_it_is_profiled(runs: tuple[Path, str]) -> None:
    """The steps 2 and 3 are in one of the runs, and 4 in the other."""
    for rank in range(RANKS):
        first, other = (json.loads((runs[0] / f"{name}-rank{rank}.json").read_text()) for name in ("fsdp2", "again"))
        assert first["losses"] == other["losses"]
        assert first["norms"] == other["norms"]
        assert len(first["losses"]) == STEPS


def test_each_step_and_rank_has_a_trace_with_the_units(runs: tuple[Path, str]) -> None:
    folder, _ = runs
    files = {path.name for path in (folder / "fsdp2" / "profile").iterdir()}
    traces = {f"trace-step{step}-rank{rank}.json.gz" for step in (2, 3) for rank in range(RANKS)}
    assert files == {*traces, "step.html", "step.json"}
    layers = [f"model.layers.{place}" for place in range(LAYERS)]
    forward = ["embedding", *layers, "head and loss"]
    units = [f"forward {event}" for event in forward] + [f"backward {event}" for event in reversed(forward)]
    for name in sorted(traces):
        spans = ranges(folder / "fsdp2" / "profile" / name)
        titles = [finding["name"] for finding in spans]
        assert titles == ["start", *units, "update gradient norm", "update optimizer", "rest clearing gradients"]
        assert all(span["ts"] + span["dur"] == pytest.approx(after["ts"]) for span, after in pairwise(spans))
    lora = [span["name"] for span in ranges(folder / "lora" / "profile" / "trace-step3-rank1.json.gz")]
    assert lora.count("forward embedding") == 2
    assert lora.count("backward base_model.model.model.layers.1") == 2
    assert lora.count("update optimizer") == 1


def held_between_steps(model: Path) -> int:
    """FSDP2's shards on rank 0: weights, both of Adam's moments and its count of steps; buffers are whole."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    shapes = [tuple(parameter.shape) for parameter in loaded.parameters()]
    shards = sum(math.ceil(first / RANKS) * math.prod(rest) for first, *rest in shapes)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in loaded.buffers())
    return (3 * shards + len(shapes)) * FLOAT + buffers


def test_what_lives_between_steps_is_the_shards(runs: tuple[Path, str], model: Path) -> None:
    between = numbers(runs[0] / "fsdp2")["between"]
    assert 0 <= between["measured"] - held_between_steps(model) <= STARTED
    assert between["predicted"] == pytest.approx(between["measured"], abs=STARTED)


def kept_by_a_layer(model: Path, rows: int, length: int) -> int:
    """What the second layer leaves in plain PyTorch: its output, and what autograd saves that isn't there before."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, -1] = 0
    kept: dict[int, torch.Tensor] = {}
    before = {parameter.untyped_storage().data_ptr() for parameter in loaded.parameters()}

    def tensors(given: Any) -> list[torch.Tensor]:
        if isinstance(given, torch.Tensor):
            return [given]
        parts = given.values() if isinstance(given, dict) else given if isinstance(given, (tuple, list)) else ()
        return [tensor for part in parts for tensor in tensors(part)]

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved)
    layer = loaded.model.layers[1]

    def begin(module: Any, args: Any, kwargs: Any) -> None:
        before.update(tensor.untyped_storage().data_ptr() for tensor in tensors([args, kwargs]))
        hooks.__enter__()

    def end(module: Any, args: Any, output: Any) -> None:
        hooks.__exit__(None, None, None)
        keep(tensors(output)[0])

    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.register_forward_hook(end)
    loaded(input_ids=torch.ones(rows, length, dtype=torch.long), attention_mask=mask, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in before)


def test_a_layer_leaves_what_autograd_saves(runs: tuple[Path, str], model: Path) -> None:
    """Under FSDP1, where its weights are gathered and freed within the same stretch."""
    report = numbers(runs[0] / "fsdp1")
    ((rows, length),) = report["batches"]
    forward = next(
        stretch
        for stretch in report["stretches"]
        if (stretch["phase"], stretch["name"]) == ("forward", "model.layers.1")
    )
    left = forward["after_bytes"]["measured"] - forward["before_bytes"]["measured"]
    assert left == kept_by_a_layer(model, rows, length)


def layer_numel() -> int:
    narrow = HIDDEN // 2
    return 2 * HIDDEN * HIDDEN + 2 * HIDDEN * narrow + 3 * HIDDEN * 352 + 2 * HIDDEN


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1"])
def test_each_unit_sends_its_shard_as_often_as_the_engine_gathers_it(name: str, runs: tuple[Path, str]) -> None:
    """A ring of two sends half of what it gathers or reduces; blocks are gathered twice, the head once."""
    sent = {row["unit"]: row for row in numbers(runs[0] / name)["sent"]}
    block = LAYERS * layer_numel() * FLOAT * (RANKS - 1) / RANKS
    assert sent["LlamaDecoderLayer"]["gathers"] == {"measured": 2 * block, "predicted": 2 * block}
    assert sent["LlamaDecoderLayer"]["reduces"] == {"measured": block, "predicted": block}
    table = math.ceil(VOCAB / RANKS) * HIDDEN * FLOAT
    if name == "fsdp2":
        assert sent["embedding"]["gathers"]["measured"] == 2 * table
        assert sent["head and loss"]["gathers"]["measured"] == table + HIDDEN // RANKS * FLOAT
    else:
        ends = (2 * VOCAB * HIDDEN + HIDDEN) * FLOAT / RANKS
        assert sent["embedding and head"]["gathers"]["measured"] == pytest.approx(ends, abs=64)
    assert sent["others"]["gathers"]["measured"] + sent["others"]["reduces"]["measured"] < 1024


def test_memory_is_as_predicted_unit_by_unit(runs: tuple[Path, str]) -> None:
    """Above what lives between steps; several jobs in one process leave something of each other."""
    report = numbers(runs[0] / "fsdp1")
    extra = report["between"]["measured"] - report["between"]["predicted"]
    highest = report["highest"]
    assert highest["measured"] - extra == pytest.approx(highest["predicted"], rel=CLOSE)
    compared = [stretch for stretch in report["stretches"] if stretch["peak_bytes"]["predicted"] is not None]
    assert len(compared) == 2 * LAYERS + 5
    for row in compared:
        for size in (row["peak_bytes"], row["after_bytes"]):
            assert size["measured"] - extra == pytest.approx(size["predicted"], abs=CLOSE * highest["predicted"]), row
    whole = numbers(runs[0] / "fsdp2")["highest"]
    late = layer_numel() * FLOAT  # gloo may hold on to a gathered unit for a moment
    assert -CLOSE * whole["predicted"] <= whole["measured"] - whole["predicted"] <= CLOSE * whole["predicted"] + late


class Page(HTMLParser):
    """Fails where a tag closes another; collects what would be loaded, and the numbers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.values: list[float] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [str(given[name]) for name in ("src", "href", "xlink:href", "action") if name in given]
        self.values += [float(given["value"] or 0)] if tag == "data" else []
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...


@pytest.mark.parametrize("name", ["fsdp2", "lora"])
def test_the_page_stands_alone_and_has_the_numbers(name: str, runs: tuple[Path, str]) -> None:
    text = (runs[0] / name / "profile" / "step.html").read_text(encoding="utf-8")
    page, report = Page(text), numbers(runs[0] / name)
    assert page.loads == ["data:,"]
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"\bnan\b|\binf\b", text.partition("</style>")[2])
    for number in (report["highest"]["measured"], report["highest"]["predicted"], report["seconds"]["measured"]):
        assert any(value == pytest.approx(number, rel=1e-8) for value in page.values)
    for note in report["notes"]:
        assert note.replace("'", "&#x27;") in text


def test_the_run_says_what_differs(runs: tuple[Path, str]) -> None:
    output = runs[1].partition("\njob ")[0]
    report = numbers(runs[0] / "fsdp2")
    assert f"profile of step 3: {PER_RANK} x {report['batches'][0][1]} tokens on each of 2 ranks" in output
    assert re.search(r"backward of 3 x LlamaDecoderLayer +[\d.]+ MiB +[\d.]+ MiB +[\d.,]+ ms\n", output)
    assert "No time is predicted: there is no GPU." in report["notes"]
    assert report["seconds"]["predicted"] is None
    shares = [difference["share"] for difference in report["differences"]]
    assert shares == sorted(shares, reverse=True)
    for difference in report["differences"][:6]:
        assert f"{difference['what']}: {difference['text']}" in output
    assert "step.html; the traces are beside it" in output


def test_ddp_counts_its_buckets(model: Path, text_data: Path, tmp_path: Path) -> None:
    """Its gradients are sent in buckets that C++ holds: they are part of what lives between steps."""
    config = make_config(tmp_path, model, strategy="3")
    out = tmp_path / "run"
    words = sft_args(model, text_data, out, "--save_strategy", "no", "--profile_steps", "3")
    finished = accelerate_launch(config, SFT, *words)
    assert finished.code == 0, finished.output
    report = numbers(out)
    assert report["highest"]["measured"] == pytest.approx(report["highest"]["predicted"], rel=CLOSE)
    assert report["between"]["measured"] == pytest.approx(report["between"]["predicted"], abs=STARTED)
    weights = LAYERS * layer_numel() + 2 * VOCAB * HIDDEN + HIDDEN
    (gradients,) = [row for row in report["sent"] if row["unit"] == "all gradients"]
    assert gradients["reduces"]["measured"] == 2 * weights * FLOAT * (RANKS - 1) / RANKS


@pytest.mark.parametrize("reentrant", ["true", "false"])
def test_one_process_with_checkpointing(
    reentrant: str, sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """What is computed again in backward is backward's; the losses are those of a run that isn't profiled."""
    words = sft_args(tiny_model, text_data, tmp_path / "run", "--save_strategy", "no", "--profile_steps", "2")
    kind = ("--activation_checkpointing_kwargs", json.dumps({"use_reentrant": reentrant == "true"}))
    recomputes = ("--activation_checkpointing", "true", *kind)
    finished = sft(*words, *recomputes)
    assert finished.code == 0, finished.output
    assert sft(*words[:-2], *recomputes, "--output_dir", tmp_path / "plain").code == 0
    assert not (tmp_path / "plain" / "profile").exists()
    logs = [run_record.read(tmp_path / name)["log"] for name in ("run", "plain")]
    losses = [[(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry] for log in logs]
    assert losses[0] == losses[1]
    report = numbers(tmp_path / "run")
    names = [f"{stretch['phase']} {stretch['name'] or stretch['unit']}" for stretch in report["stretches"]]
    forward = ["embedding", "model.layers.0", "model.layers.1", "head and loss"]
    units = [f"forward {event}" for event in forward] + [f"backward {event}" for event in reversed(forward)]
    assert names[1:-3] == units
    layer = next(
        stretch
        for stretch in report["stretches"]
        if stretch["name"] == "model.layers.1" and stretch["phase"] == "forward"
    )
    ((rows, length),) = report["batches"]
    assert layer["after_bytes"]["measured"] - layer["before_bytes"]["measured"] < 3 * rows * length * 36 * FLOAT
    assert report["sent"] == []


def test_a_resumed_run_profiles_steps_to_come(
    sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    words = sft_args(tiny_model, text_data, tmp_path / "run", "--save_steps", "2")
    assert sft(*words, "--max_steps", "2").code == 0
    finished = sft(*words, "--resume_from_checkpoint", "true", "--profile_steps", "2:3")
    assert finished.code == 0, finished.output
    assert "--profile_steps begins at 2, and 2 steps are done: step 3 is the first profiled one" in finished.output
    assert {path.name for path in (tmp_path / "run" / "profile").glob("trace*")} == {"trace-step3-rank0.json.gz"}
    assert numbers(tmp_path / "run")["step"] == 3


EARLY = ("--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1", "--dataset_test_split", "train")
STOPS = (*EARLY, "--early_stopping_patience", "1", "--metric_for_best_model", "loss", "--greater_is_better", "true")
"""Stops after step 2: the highest loss is taken for the best, and that is the first one."""


def test_a_run_that_stops_early_shows_the_last_step_that_was_profiled(
    sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    words = sft_args(tiny_model, text_data, tmp_path / "run", *STOPS, "--profile_steps", "2:4")
    finished = sft(*words)
    assert finished.code == 0, finished.output
    assert "--profile_steps 2:4, and training ended after step 2" in finished.output
    assert "profile of step 2: " in finished.output
    assert numbers(tmp_path / "run")["step"] == 2
    assert (tmp_path / "run" / "profile" / "step.html").exists()


def test_a_run_that_stops_before_the_steps_says_so(
    sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiler, which warms up in step 2, isn't on in the evaluation after it: it would fill memory."""
    evaluate, on = Trainer.evaluate, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        on.append(torch.autograd.profiler._is_profiler_enabled)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(Trainer, "evaluate", noted)
    finished = sft(*sft_args(tiny_model, text_data, tmp_path / "run", *STOPS, "--profile_steps", "3"))
    assert finished.code == 0, finished.output
    assert "--profile_steps 3, and training ended after step 2: none is profiled" in finished.output
    assert not (tmp_path / "run" / "profile").exists()
    assert on == [False, False]


@pytest.mark.slow
def test_smaller_batches_are_tried_where_no_step_is_left_to_profile(
    sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer begins again after a lack of memory."""
    words = sft_args(tiny_model, text_data, tmp_path / "run", "--save_steps", "2")
    assert sft(*words, "--max_steps", "2").code == 0
    forward, failed = Trainer.training_step, []

    @wraps(forward)
    def fails_once(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", fails_once)
    again = ("--resume_from_checkpoint", "true", "--profile_steps", "2", "--auto_find_batch_size", "true")
    finished = sft(*words, *again)
    assert failed, finished.output
    assert finished.code == 0, finished.output
    assert finished.output.count("none is profiled") == 1


def test_a_step_beyond_the_epochs_is_refused_before_training(
    sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    words = sft_args(tiny_model, text_data, tmp_path / "run", "--save_strategy", "no")
    at = words.index("--max_steps")
    del words[at : at + 2]
    refused = sft(*words, "--num_train_epochs", "1", "--profile_steps", "30")
    assert refused.code == 2
    assert "the run has 24 steps" in refused.output
    assert "step 1/24" not in refused.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["5:3"], "its last step comes before the first"),
        (["0:3"], "it has to be FIRST:LAST, from 1 on"),
        (["3-5"], "--profile_steps 3:5 profiles the steps 3, 4 and 5"),
        (["1:11"], "10 steps are the most"),
        (["9:12", "--max_steps", "10"], "a last step up to 10"),
        (["3", "--torch_compile", "true"], "--profile_steps with --torch_compile"),
    ],
)
def test_other_steps_are_refused_before_anything_is_loaded(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    given = [
        "--model_name_or_path",
        "m",
        "--dataset_name",
        "d",
        "--output_dir",
        str(tmp_path),
        "--profile_steps",
        *flags,
    ]
    monkeypatch.setattr("sys.argv", ["sft.py", *given])
    with pytest.raises(UserError) as refused:
        arguments.parse()
    assert message in str(refused.value)


def test_with_a_known_gpu_the_slowest_unit_is_named() -> None:
    """A step as predicted for eight H100, but for the blocks' backward, which takes half as long again."""
    stored = trace_store.find("meta-llama/Llama-3.1-8B")
    assert stored
    recipe, layout, gpu = Recipe(rows=1, length=2048), Layout(Engine.FSDP2, 1, 8, 8), gpus.find("H100")
    plan = by_unit.unit_steps(stored[0], stored[1][variant_of(recipe, "fsdp2")], recipe, layout, gpu, 0)
    before, stretches = plan.between_bytes, []
    for number, stretch in enumerate(plan.stretches):
        place = Mark(number, stretch.micro_batch, stretch.phase, stretch.unit, "", stretch.layer)
        slower = 1.5 if stretch.phase == "backward" and stretch.layer is not None else 1.0
        seconds = (stretch.seconds or 0) * slower
        stretches.append(Measured(place, 0.0, seconds, before, stretch.peak_bytes, stretch.after_bytes))
        before = stretch.after_bytes
    known = step_report.Known(plan, "", gpu, on_gpu=True, ranks=8, units=[], buckets=[], own_engine=False)
    trace = StepTrace(tuple(stretches), (), ())
    compared = step_report.compare(7, [(1, 2048)], trace, known)
    first, *others = [difference for difference in compared.differences if difference.what == "time"]
    assert (first.unit, others) == ("LlamaDecoderLayer", [])
    assert first.measured == pytest.approx(1.5 * first.predicted)
    assert first.text.startswith("backward of 32 x LlamaDecoderLayer takes ")
    assert not [difference for difference in compared.differences if difference.what == "memory"]
    assert compared.highest.measured == compared.highest.predicted
    text = step_page.page(compared)
    assert any(value == pytest.approx(first.measured) for value in Page(text).values)
    assert f"Time is predicted for {gpu.name}" in text


def test_what_layers_leave_is_said_of_one_micro_batch() -> None:
    """Two layers in each of three micro-batches, which leave more than predicted; their time is that of all."""
    plan, stretches, marks = [], [], 0
    for number in (1, 2, 3):
        for layer in (0, 1):
            place = Mark(marks, number, "forward", "Layer", f"layers.{layer}", layer)
            stretches.append(Measured(place, 0.0, 1.0, marks * 2000, (marks + 1) * 2000, (marks + 1) * 2000))
            plan.append(by_unit.Stretch(number, "forward", "Layer", layer, marks * 1000 + 1000, marks * 1000 + 1000, 1))
            marks += 1
    sent = (by_unit.UnitTraffic("Layer", 2, Traffic(), Traffic()),)
    known = step_report.Known(by_unit.UnitSteps(0, tuple(plan), sent), "", None, True, 1, [], [], own_engine=False)
    comparison = step_report.compare(1, [(1, 8)] * 3, StepTrace(tuple(stretches), (), ()), known)
    (left,) = [difference for difference in comparison.differences if "leaves" in difference.text]
    assert left.text.startswith("forward of 2 x Layer leaves 3.91 KiB")
    assert [row.name for row in comparison.rows] == ["forward of 6 x Layer"]


def memory(when: float, size: int, place: int, tid: int = 1, total: int = 0, device: tuple[int, int] = (0, -1)) -> Any:
    args = {"Bytes": size, "Addr": place, "Total Allocated": total, "Device Type": device[0], "Device Id": device[1]}
    return {"name": "[memory]", "ts": when, "tid": tid, "args": args}


def mark(number: int, when: float) -> Any:
    return {"name": f"{step_trace.MARK}{number}", "cat": "user_annotation", "ts": when, "dur": 0.1, "tid": 1, "pid": 7}


MARKS = [Mark(0, 0, "start", ""), Mark(1, 1, "forward", by_unit.EMBEDDING), Mark(2, 1, "end", "")]


def test_a_gpu_is_measured_by_its_allocator_and_its_clock() -> None:
    """As Kineto writes it; another GPU's and the host's allocations are no part of it."""
    own, other = (1, 0), (1, 1)
    events = [mark(0, 0), memory(1, 512, 9, total=1536, device=own), mark(1, 2), memory(3, 64, 5)]
    events += [memory(4, 4096, 8, total=5632, device=own), memory(5, -4096, 8, total=1536, device=own)]
    events += [memory(5, 4096, 8, total=999999, device=other), mark(2, 6)]
    trace = {"traceEvents": [*events, {"ph": "M", "name": "thread_name"}]}
    step = step_trace.read(trace, MARKS, before_bytes=1024, seconds=[0.5, 2.0], device=0)
    sizes = [(stretch.before_bytes, stretch.peak_bytes, stretch.after_bytes) for stretch in step.stretches]
    assert sizes == [(1024, 1536, 1536), (1536, 5632, 1536)]
    assert [stretch.seconds for stretch in step.stretches] == [0.5, 2.0]
    drawn = step_trace.annotated(trace, step)["traceEvents"]
    assert [value["args"]["bytes"] for value in drawn if value.get("ph") == "C"] == [1536, 5632, 1536]
    assert not [value for value in drawn if str(value["name"]).startswith(step_trace.MARK)]


def test_what_gloo_allocates_is_told_apart() -> None:
    """On its thread, and inside of its calls; what was there before the trace can be released in it."""
    call = {"name": "c10d::allreduce_", "cat": "cpu_op", "ts": 3, "dur": 2, "tid": 1, "args": {}}
    gloo = {"name": "gloo:all_reduce", "cat": "user_annotation", "ts": 3, "dur": 2, "tid": 2, "args": {}}
    events = [mark(0, 0), mark(1, 1), memory(2, 100, 1), gloo, call, memory(3.5, 40, 2), memory(3.6, 30, 3, tid=2)]
    events += [memory(3.7, -30, 3, tid=2), memory(4, -40, 2, tid=2), memory(5.5, -100, 1), memory(5.6, -10, 99)]
    events += [mark(2, 6)]
    step = step_trace.read({"traceEvents": events}, MARKS, before_bytes=1000, seconds=None, device=-1)
    assert (step.stretches[1].peak_bytes, step.stretches[1].after_bytes) == (1100, 990)
    assert step.backend_bytes == 70
    assert step.stretches[1].seconds == pytest.approx(5e-6)
