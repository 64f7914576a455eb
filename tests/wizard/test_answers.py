"""Answers that can't be used are refused with words that fit; names that people use are understood. In-process."""

import dataclasses
import itertools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SFT, here
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CLIPConfig

from accel_fsdp import linter, planner, wizard
from accel_fsdp.config import Engine, Method
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import MachineFacts, find, machines
from accel_fsdp.job import Job, Layout, Recipe, combinations
from accel_fsdp.models import catalogue, config_json
from accel_fsdp.wizard import Answers, interview, to_yaml

TWO_MACHINES = {"model": "gpt2", "gpus": "2x8xA100-80GB", "main_process_ip": "10.0.0.1"}


def settled(**flags: str) -> Answers:
    return interview.answers(interview.interview(flags, {}, defaults=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small model of a kind, with a config alone."""
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs: dict[str, dict[str, Any]] = {
        "t5": {"model_type": "t5", "is_encoder_decoder": True, **sizes},
        "roberta": {"model_type": "roberta", **text},
        "classifier": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **text},
        "llava": {
            "model_type": "llava",
            "text_config": {"model_type": "llama", "num_key_value_heads": 4, **text},
            "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **text},
        },
        "llama": {"model_type": "llama", "num_key_value_heads": 4, **text},
    }

    def written_folder(kind: str) -> Path:
        path = tmp_path_factory.mktemp(kind)
        (path / "config.json").write_text(json.dumps(configs[kind]))
        return path

    return written_folder


def refusal(**flags: str) -> UserError:
    with pytest.raises(UserError) as caught:
        settled(**{**TWO_MACHINES, **flags})
    return caught.value


UNREACHABLE = ("a b c", "http://node1", "node1:29500", "127.0.0.1", "localhost", "10.0.0", "10.0.0.300", "::1", "-")


@pytest.mark.parametrize("address", [*UNREACHABLE, "a\x1b[2J", "node-1", "node_1.cluster.local", "fe80::1", "gpu01"])
def test_an_address_where_machines_cannot_meet_is_refused(address: str) -> None:
    if address in (*UNREACHABLE, "a\x1b[2J"):
        assert "--main-process-ip" in refusal(main_process_ip=address).what
    else:
        assert settled(**{**TWO_MACHINES, "main_process_ip": address}).main_process_ip == address


@pytest.mark.parametrize("flags", [["--gpus", "8xH100-80GB", "--nodes", "2"], ["--gpus", "2x8xH100-80GB"]])
def test_machines_that_an_engine_starts_need_no_address(flags: list[str], tmp_path: Path) -> None:
    """Its job file is made of the YAML alone, with the GPUs that its first lines name."""
    path, job = tmp_path / "made.yaml", tmp_path / "job.sh"
    finished = here("config", "--yes", "--model", "llama-3.1-8b", *flags, "-o", path)
    assert finished.code == 0, finished.output
    assert "the job file of accel-fsdp script asks the cluster for it" in " ".join(finished.output.split())
    assert "main_process_ip" not in yaml.safe_load(path.read_text())
    assert f"accel-fsdp launch {path} train/sft.py" in finished.output
    checked = here("check", "--strict", path)
    assert checked.code == 0, checked.output
    words = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "/shared/run"]
    for engine in ("slurm", "kubernetes", "skypilot", "torchrun"):
        written = here("script", engine, "--force", "-o", job, path, SFT, *words)
        assert written.code == 0, written.output


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        ({"gpus": "8xH1000"}, "Did you mean H100?", "--gpus 8xH1000-<N>GB, with N the GiB of memory"),
        ({"gpus": "8xAscend-910B"}, "is an NPU", "--gpus 8xAscend-910B-64GB"),
        ({"gpus": "8xA100-80GB1"}, "Did you mean A100-80GB?", ""),
        ({"gpus": "8xH100-80"}, "Did you mean H100-80GB?", ""),
        ({"gpus": "2x1xA100-40GB", "strategy": "4"}, "hybrid sharding with 1 process", ""),
        ({"main_process_port": "99999"}, "", "--main-process-port 29500"),
        ({"num_processes": "0"}, "", "--num-processes 16"),
        ({"num_machines": "-1"}, "", "--num-machines 2"),
        ({"batch": "0", "model": "Qwen/Qwen3-30B-A3B"}, "--batch 0 is not a whole number", "--batch 1"),
    ],
)
def test_an_answer_is_refused_and_the_fix_works(flags: dict[str, str], what: str, fix: str) -> None:
    error = refusal(**flags)
    assert what in error.what
    assert fix in error.fix
    if error.fix == fix:
        flag, value = fix.removeprefix("--").split()
        settled(**{**({"model": "gpt2"} if "gpus" in flags else TWO_MACHINES), flag.replace("-", "_"): value})


def test_strategy_gpu_and_model_are_known_by_other_names() -> None:
    assert settled(model="llama-3.1-8b", gpus="8xH100").model == "meta-llama/Llama-3.1-8B"  # what train/sft.py can load
    assert settled(**TWO_MACHINES, strategy="hybrid_shard").strategy == 4
    assert "<N>GB" not in refusal(gpus="1xA100-800GB").fix  # it has a size
    assert settled(model="gpt2", gpus="8 x H100").engine == settled(model="gpt2", gpus="8xH100").engine
    assert settled(model="gpt2", gpus="8xB300-288GB").gpus == "8xB300-288GB"  # newer than the table, with its memory


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"fsdp_version": "1"}, "PEFT loses the adapter under FSDP1"),
        ({"activation_checkpointing": "true"}, "PEFT loses the adapter under FSDP's activation checkpointing"),
    ],
)
def test_what_our_script_mends_is_taken_with_a_warning(flags: dict[str, str], what: str) -> None:
    """As the linter has it, which says nothing of a job with train/sft.py."""
    session = interview.interview(
        {"model": "llama-3.1-8b", "gpus": "8xH100", "method": "lora", **flags}, {}, defaults=True
    )
    answers = interview.answers(session)
    assert all(str(getattr(answers, name)).lower() == value for name, value in flags.items())
    (line,) = (line for line in interview.warnings(session) if what in line)
    assert line == f"warning: {what}: the exported adapter has no tensors, unless the script is train/sft.py"
    plain = interview.interview({"model": "llama-3.1-8b", "gpus": "8xH100", "method": "lora"}, {}, defaults=True)
    assert not interview.answers(plain).activation_checkpointing
    assert not any("PEFT" in line for line in interview.warnings(plain))


@pytest.mark.parametrize(
    ("kind", "auto_class", "layer"),
    [
        ("t5", "AutoModelForSeq2SeqLM", "T5Block"),
        ("roberta", "AutoModelForMaskedLM", "RobertaLayer"),
        ("classifier", "AutoModelForSequenceClassification", "BertLayer"),
        ("llava", "AutoModelForImageTextToText", "LlamaDecoderLayer"),
        ("llama", "", "LlamaDecoderLayer"),
    ],
)
def test_what_our_script_cannot_train_gets_a_launch_line_of_its_own(
    kind: str,
    auto_class: str,
    layer: str,
    folder: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """T5 too, which `check` then reads with the model."""
    path = tmp_path / "made.yaml"
    flags = {"model": str(folder(kind)), "gpus": "2xA100"}
    assert wizard.configure(wizard.WizardOptions(path, yes=True), flags) == 0
    assert layer in path.read_text()
    assert [
        finding for finding in linter.lint(path, linter.LintOptions(model=flags["model"])) if finding.severity != "note"
    ] == []
    shown = "".join(capfd.readouterr())
    text = " ".join(shown.split())
    launch = "YOUR_SCRIPT.py" if auto_class else "train/sft.py --model_name_or_path"
    assert f"accelerate launch --config_file {path} {launch}" in shown
    assert launch in path.read_text().splitlines()[4]
    assert ("a script of your own" in text) == bool(auto_class)
    assert auto_class in text


@pytest.mark.parametrize(
    ("flags", "script"),
    [
        (["--layer-class", "MyBlock"], "YOUR_SCRIPT.py"),
        (["--layer-class", "FluxTransformerBlock", "--model", "./flux"], "YOUR_SCRIPT.py"),
        (["--layer-class", "LlamaDecoderLayer", "--model", "my/gated-llama"], "train/sft.py"),
    ],
)
def test_a_layer_class_that_is_named_needs_no_model(flags: list[str], script: str, tmp_path: Path) -> None:
    """One of diffusers, or a module of the user's own."""
    (tmp_path / "flux").mkdir()
    path = tmp_path / "made.yaml"
    words = [str(tmp_path / word) if word == "./flux" else word for word in flags]
    finished = here("config", "--yes", *words, "--gpus", "8xH100", "-o", path)
    assert finished.code == 0, finished.output
    assert f"accelerate launch --config_file {path} {script}" in finished.output
    assert yaml.safe_load(path.read_text())["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == flags[1]
    again = shlex.split(path.read_text().splitlines()[2].removeprefix("#"))
    assert here(*again[1:], "-o", tmp_path / "again.yaml").code == 0
    assert (tmp_path / "again.yaml").read_bytes() == path.read_bytes()


def test_a_model_that_fsdp2_cannot_shard_gets_fsdp1(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """T5 shares its embedding; CLIP names none and has a scalar, so that neither version can."""
    answers = settled(model=str(folder("t5")), gpus="8xH100")
    assert (answers.fsdp_version, answers.layer_class) == (1, ("T5Block",))
    CLIPConfig().save_pretrained(tmp_path)
    error = refusal(model=str(tmp_path), gpus="8xH100")
    assert (error.what, error.fix) == ("--fsdp-version 2 can't be used.", "--engine ddp, or another model")
    assert settled(model=str(tmp_path), gpus="8xH100", engine="ddp").engine == "ddp"


ENGINES = {"fsdp2": {"engine": "fsdp"}, "fsdp1": {"engine": "fsdp", "fsdp_version": "1"}} | {
    name: {"engine": name} for name in ("deepspeed", "ddp")
}
MACHINES = ("8xH100", "2x8xA100-40GB", "2xRTX4090", "8xT4", "1xH100", "cpu")
LARGE, SMALL = ("Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B"), ("openai-community/gpt2", "openai/gpt-oss-20b")


def test_what_the_defaults_write_is_clean_and_fits_or_is_warned_about(tmp_path: Path) -> None:
    """The judges are `check --model` and `plan --config`, which read the file and know nothing of the answers."""
    path, fitting = tmp_path / "made.yaml", set()
    ways = itertools.product((*LARGE, *SMALL), MACHINES, ("full", "lora", "qlora"), ENGINES)
    for number, (model, gpus, method, engine) in enumerate(ways):
        if number % 7 or (engine, gpus) == ("ddp", "1xH100") or (method, gpus) == ("qlora", "cpu"):
            continue  # a seventh of them, of each kind some
        if (method, engine) in {("lora", "fsdp1"), ("qlora", "fsdp1"), ("qlora", "deepspeed")}:
            continue
        flags = {"model": model, "gpus": gpus, "method": method, **ENGINES[engine], "main_process_ip": "10.0.0.1"}
        if not gpus.startswith("2x8"):
            del flags["main_process_ip"]
        session = interview.interview(flags, {}, defaults=True)
        answers = interview.answers(session)
        path.write_text(to_yaml.to_text(answers))
        assert [
            finding for finding in linter.lint(path, linter.LintOptions(model=model)) if finding.severity != "note"
        ] == [], flags
        warned = any(line.startswith("warning: this ") for line in interview.warnings(session))
        if gpus != "cpu":
            assert warned != judged_to_fit(path, answers), flags
        fitting.add(warned)
    assert fitting == {True, False}


def judged_to_fit(path: Path, answers: Answers) -> bool:
    """`accel-fsdp plan --config`, which reads the arguments in the header."""
    return planner.make_plan(planner.PlanCommand(config=path)).plan.choice is not None


@pytest.mark.parametrize(
    ("flags", "on"),
    [
        (("Qwen/Qwen3-32B", "4x8xA100-40GB", "full"), {"activation_checkpointing"}),
        (("meta-llama/Llama-3.1-70B", "2xRTX4090", "qlora"), {"cpu_offload", "script_checkpoints"}),
        (("llama-3.1-8b", "8xH100", "full"), set()),
    ],
)
def test_defaults_come_from_the_plan(flags: tuple[str, str, str], on: set[str]) -> None:
    model, gpus, method = flags
    several = {"main_process_ip": "10.0.0.1"} if gpus.count("x") == 2 else {}
    answers = settled(model=model, gpus=gpus, method=method, **several)
    switches = ("activation_checkpointing", "cpu_offload", "script_checkpoints")
    assert {name for name in switches if getattr(answers, name)} == on
    assert ("--gradient_checkpointing true" in to_yaml.to_text(answers)) == ("script_checkpoints" in on)


@pytest.mark.slow
def test_a_folder_gets_the_same_answers_as_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, gpus = "Qwen/Qwen2.5-7B", "4xA100-40GB"
    (tmp_path / "config.json").write_text(json.dumps(catalogue.entries()[name]["config"]))
    known, traced = settled(model=name, gpus=gpus), settled(model=str(tmp_path), gpus=gpus)
    assert known.activation_checkpointing
    assert dataclasses.replace(traced, model=name) == known


@pytest.mark.parametrize(
    ("model", "gpus", "engine", "reason"),
    [
        ("llama-3.1-8b", "2x4090", "ddp", r"it needs 15\d\.\d of 23\.6 GiB"),
        ("llama-3.1-405b", "8xH100", "fsdp", r"CPU offload takes 6,\d+ GiB of memory on each machine, which usually"),
        ("gpt2", "2xA100", "fsdp", ""),
    ],
)
def test_what_does_not_fit_is_said(model: str, gpus: str, engine: str, reason: str) -> None:
    flags = {"model": model, "gpus": gpus, "engine": engine}
    warnings = " ".join(interview.warnings(interview.interview(flags, {}, defaults=True)))
    assert bool(warnings) == bool(reason)
    assert re.match(rf"(warning: this doesn't fit: {reason}.*; accel-fsdp plan --config says what fits)?$", warnings)


@pytest.mark.parametrize(
    ("driver", "memory", "message"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "8xH100-79GB"),
        ("NVIDIA H100 PCIe", 79.1, "8xH100-PCIe-79GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "8xA100-PCIE-39GB"),
        ("NVIDIA GeForce RTX 4090", 23.6, "8xRTX 4090-24GB"),
    ],
)
def test_a_gpu_stays_the_same_in_the_words_for_it(driver: str, memory: float, message: str) -> None:
    words = machines.describe(MachineFacts(driver, 8, memory))
    assert words == message
    name = machines.parse(words)[0].accelerator
    assert name is not None
    assert find(name, memory) == find(driver, memory)


NONSENSE = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="8xH10-GB. :/#'\"\\$;`\n\x1b\x00é\u202e\ud800", max_size=20),
    st.sampled_from(["", " ", "-1", "1e9", "9" * 5000, "x" * 5000, "--help", "NO", "null", "2xcpu", "8xH100-99999GB"]),
)
TEXTS: dict[str, dict[str, str]] = {
    "model": {"layer_class": "Layer", "gpus": "8xH100"},
    "layer_class": {"model": "/no/such/folder", "gpus": "8xH100"},
    "gpus": {"model": "gpt2"},
    "seq_len": {"model": "gpt2", "gpus": "8xH100"},
    "min_num_params": {"model": "gpt2", "gpus": "8xH100", "fsdp_version": "1", "wrap_policy": "SIZE_BASED_WRAP"},
    "num_processes": {"model": "gpt2", "gpus": "8xH100"},
    **dict.fromkeys(("num_machines", "main_process_ip", "main_process_port"), TWO_MACHINES),
}


@settings(max_examples=150)
@given(field=st.sampled_from(sorted(TEXTS)), text=NONSENSE)
def test_any_text_is_refused_in_words_or_written_as_it_is(field: str, text: str) -> None:
    """The judges are PyYAML, and the shell that would read the command in the header."""
    refused = ""
    try:
        answers = settled(**{**TEXTS[field], field: text})
    except UserError as error:
        refused = str(error)
    if refused:
        assert field in ("model", "layer_class") or f"--{field.replace('_', '-')}" in refused
        assert len(refused) < 1500
        assert "\x1b" not in refused
        return
    written = to_yaml.to_text(answers)
    assert yaml.safe_load(written) == to_yaml.to_mapping(answers)
    lines = written.splitlines()
    assert [line[:1] for line in lines[:5]] == ["#"] * 5
    assert not lines[5].startswith("#")
    words = shlex.split(lines[2].removeprefix("#"))[3:]
    names = [flag.removeprefix("--").replace("-", "_") for flag in words[::2]]
    assert settled(**dict(zip(names, words[1::2], strict=True))) == answers


@pytest.mark.parametrize(
    ("quantization", "refused"),
    [
        ({"quant_method": "gptq", "bits": 4}, {"full", "qlora"}),
        ({"quant_method": "awq", "bits": 4}, {"full", "qlora"}),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, {"full"}),
        ({"quant_method": "spqr"}, {"full", "lora", "qlora"}),
        ({"quant_method": "no-such"}, {"full", "lora", "qlora"}),
        ({}, {"full", "lora", "qlora"}),
        ({"quant_method": "mxfp4"}, set()),
        ({"quant_method": "fp8", "dequantize": True}, set()),
        (None, set()),
    ],
)
def test_quantised_weights_clash_with_what_trainer_refuses(quantization: Any, refused: set[Method]) -> None:
    base = config_json.quant_method(quantization)
    methods: tuple[Method, ...] = ("full", "lora", "qlora")
    assert {
        method for method in methods if combinations.clashes(Job(Layout(Engine.FSDP2), Recipe(method), base=base))
    } == refused


def test_full_training_of_a_quantised_model_is_warned_of(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """By the wizard, the linter and the plan alike."""
    model_folder = folder("llama")
    content = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": "gptq"}}))
    flags = {"model": str(model_folder), "gpus": "8xH100"}
    with pytest.raises(UserError, match="quantised weights can't be trained"):
        settled(**flags)
    path = tmp_path / "made.yaml"
    made = to_yaml.to_text(settled(**flags, method="lora"))
    severities = []
    for text in (made, made.replace(" --use_peft", ""), made.replace("# Launch:", "#")):
        path.write_text(text)
        findings = linter.lint(path, linter.LintOptions(model=str(model_folder)))
        severities.append([finding.severity for finding in findings if finding.code == "AF512"])
    assert severities == [[], ["error"], ["warning"]]
    problem = planner.make_problem(planner.PlanCommand(str(model_folder), "8xH100"))
    assert any("refuses full training" in note for note in problem.notes)


EXPANDABLE = ["PYTORCH_ALLOC_CONF=expandable_segments:True"]


@pytest.mark.parametrize(
    ("gpus", "flags", "variables"),
    [
        ("8xH100-80GB", {"seq_len": "4096"}, EXPANDABLE),
        ("8xGH999-96GB", {"seq_len": "4096"}, EXPANDABLE),  # not in the table, so memory isn't judged
        ("2x8xA100-40GB", {"method": "lora"}, EXPANDABLE),
        ("8xMI300X", {}, []),  # expandable segments may hang under ROCm
        ("cpu", {"num_processes": "8"}, []),
    ],
)
def test_the_launch_line_has_what_memory_was_judged_with(
    gpus: str, flags: dict[str, str], variables: list[str]
) -> None:
    """Trainer's default is 8 rows, which nobody judged."""
    answers = settled(model="llama-3.1-8b", gpus=gpus, **flags)
    words = shlex.split(to_yaml.launch_line(answers, "made.yaml"))
    assert [word for word in words if "=" in word] == variables
    if gpus == "cpu":
        return
    assert words[words.index("--per_device_train_batch_size") + 1] == str(answers.batch or 1)
    assert words[words.index("--max_length") + 1] == flags.get("seq_len", "2048")
