"""`accel_fsdp.Checkpoints` in users' own scripts: killed, stopped and resumed, they train as without any of it."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from conftest import ROOT, Finished, accelerate_launch, run
from conftest import accel_fsdp as command
from stores import S3, s3  # noqa: F401  # a fixture
from test_training import make_config
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import accel_fsdp
from accel_fsdp.checkpoints import completeness, file_names
from accel_fsdp.errors import UserError

KINDS = {"trainer": "own_trainer.py", "loop": "own_loop.py"}


def launched(kind: str, config: Path, ranks: int, *args: str | Path, **environment: str) -> Finished:
    words = [sys.executable, "-m", "accel_fsdp", "launch", "--cpu", "--num-processes", str(ranks)]
    return run([*words, config, ROOT / "tests" / KINDS[kind], *args], **environment)


def losses(kind: str, folder: Path) -> list[float]:
    if kind == "loop":
        logged: list[float] = json.loads((folder / "losses.json").read_text())
        return logged
    log = json.loads((folder / "checkpoint-10" / file_names.TRAINER_STATE).read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_stopped_and_resumed_elsewhere(
    kind: str,
    version: str,
    s3: S3,  # noqa: F811
    tiny_model: Path,
    text_data: Path,
    tmp_path: Path,
) -> None:
    """Killed after step 5 on two ranks, resumed and stopped after step 6 on three, resumed from the store on two."""
    config, uri = make_config(tmp_path, tiny_model, fsdp_version=version), s3.make("bucket")
    straight, killed, elsewhere = (tmp_path / name for name in ("straight", "killed", "elsewhere"))
    whole = launched(kind, config, 2, tiny_model, text_data, straight)
    assert whole.code == 0, whole.output

    args = (tiny_model, text_data, killed, uri)
    first = launched(kind, config, 2, *args, KILL_STEP="5 9")
    assert first.code != 0
    left = completeness.choose(killed).newest  # the fourth step's may have been in the background
    assert left in (killed / "checkpoint-2", killed / "checkpoint-4"), first.output
    second = launched(kind, config, 3, *args, KILL_STEP="6 15")
    assert second.code == 75, second.output
    newest = completeness.choose(killed).newest
    assert newest is not None
    assert file_names.step(newest.name) in (6, 7, 8)
    assert f"stopped: SIGTERM after step {file_names.step(newest.name)}" in second.output
    assert len(file_names.checkpoints(killed)) == 2
    log = (killed / "losses.json").read_text() if kind == "loop" else ""
    shutil.rmtree(killed)
    elsewhere.mkdir()
    if log:
        (elsewhere / "losses.json").write_text(log)
    last = launched(kind, config, 2, tiny_model, text_data, elsewhere, uri)
    assert last.code == 0, last.output
    assert losses(kind, elsewhere) == pytest.approx(losses(kind, straight), abs=2e-4)
    assert losses(kind, straight)[-1] != pytest.approx(losses(kind, straight)[0], abs=1e-2)
    shown = json.loads(command("checkpoints", elsewhere, "--json").output)
    assert [(row["step"], row["complete"]) for row in shown] == [(file_names.step(newest.name), True), (10, True)]
    exported = command("export", uri, tmp_path / "out", "--verify", "bytes", "--model", tiny_model)
    assert exported.code == 0, exported.output


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("engine", "target"), [("zero3", "fsdp2"), ("fsdp1", "zero2"), ("zero2", "zero3")])
def test_a_loop_goes_on_under_another_engine(
    engine: str, target: str, tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """Stopped on two ranks, converted, and resumed on three: with Adam, and with the schedule that it registered."""
    runs = {name: tmp_path / name for name in ("straight", "first", "second")}
    configs = {}
    for name in {engine, target}:
        shipped = ROOT / "accelerate_configs" / f"{name}.yaml"
        (tmp_path / name).mkdir()
        made = shipped if "zero" in name else make_config(tmp_path / name, tiny_model, fsdp_version=name[-1])
        configs[name] = tmp_path / name / "own.yaml"
        text = re.sub("mixed_precision: .*", "mixed_precision: 'no'", made.read_text())
        configs[name].write_text(re.sub("(gradient_.*): auto", r"\1: 1", text))  # Trainer alone knows what auto is
    for name, more in {"straight": {}, "first": {"KILL_STEP": "6 15"}}.items():
        finished = launched("loop", configs[engine], 2, tiny_model, text_data, runs[name], **more)
        assert finished.code == (75 if more else 0), finished.output
    checkpoint = completeness.choose(runs["first"]).newest
    assert checkpoint is not None
    refused = launched("loop", configs[target], 3, tiny_model, text_data, runs["first"])
    assert refused.code == 1
    words = re.search(r"accel-fsdp (convert \S+ NEW_RUN/.*), then Checkpoints", refused.output)
    assert words, refused.output
    flags = ["--model", str(tiny_model)] if "zero" in target else []
    converted = command(*words[1].replace("NEW_RUN", str(runs["second"])).split(), *flags)
    assert converted.code == 0, converted.output
    assert "accelerator.load_state" in converted.output
    shutil.copy(runs["first"] / "losses.json", runs["second"])
    resumed = launched("loop", configs[target], 3, tiny_model, text_data, runs["second"])
    assert resumed.code == 0, resumed.output
    assert f"resumed: {runs['second'] / checkpoint.name}" in resumed.output
    assert losses("loop", runs["second"]) == pytest.approx(losses("loop", runs["straight"]), abs=1e-5)


def test_accelerates_own_launcher_shards_nothing_here(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    config, script = make_config(tmp_path, tiny_model), ROOT / "tests" / KINDS["trainer"]
    finished = accelerate_launch(config, script, tiny_model, text_data, tmp_path / "run", CUDA_VISIBLE_DEVICES="")
    assert finished.code != 0
    assert "error: --async_checkpoints without shards" in finished.output
    assert "fix: accel-fsdp launch --cpu, then the YAML and the script" in finished.output


class Own:
    """A type of the user's script, in a checkpoint of its own."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_script_reads_its_own_files_as_before(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    dcp.save({"state": Own()}, checkpoint_id=tmp_path / "own", no_dist=True)  # type: ignore[attr-defined]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = [
        tokenizer(text["text"], max_length=16, truncation=True)
        for text in map(json.loads, text_data.read_text().splitlines())
    ]
    for steps, resumes in ((1, None), (2, "auto")):
        training = TrainingArguments(
            str(tmp_path / "run"), max_steps=steps, save_steps=1, report_to="none", disable_tqdm=True, use_cpu=True
        )
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        trainer = Trainer(model, training, train_dataset=rows, data_collator=collate)
        accel_fsdp.Checkpoints(trainer)
        trainer.train(resume_from_checkpoint=resumes)
    loaded = {"state": None}
    dcp.load(loaded, checkpoint_id=tmp_path / "own", no_dist=True)  # type: ignore[attr-defined]
    assert isinstance(loaded["state"], Own)


def test_what_can_not_be_meant(tiny_model: Path, tmp_path: Path) -> None:
    training = TrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True)
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(tiny_model), training)
    for options, what in (
        ({"output_dir": tmp_path}, "output_dir or keep for a Trainer"),
        ({"keep": 2}, "output_dir or keep for a Trainer"),
        ({"async_checkpoints": True}, "--async_checkpoints without shards"),
        ({"checkpoint_uri": "s33://bucket/run"}, "s33://bucket/run is not in a store that fsspec knows"),
    ):
        with pytest.raises(UserError, match=re.escape(what)):
            accel_fsdp.Checkpoints(trainer, **options)
    checkpoints = accel_fsdp.Checkpoints(trainer)
    (tmp_path / "run" / "checkpoint-4").mkdir()
    with pytest.raises(UserError, match="already holds a run"):
        trainer.train()
    with pytest.raises(UserError, match="a method of Checkpoints for a Trainer"):
        checkpoints.resume()
    with pytest.raises(UserError, match="no output_dir"):
        accel_fsdp.Checkpoints(trainer.accelerator)
    with pytest.raises(UserError, match="save before resume"):
        accel_fsdp.Checkpoints(trainer.accelerator, tmp_path / "loop").save(1)
