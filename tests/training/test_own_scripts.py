"""`accel_fsdp.Checkpoints` in users' own scripts: killed, stopped and resumed, they train as without any of it."""

import json
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from conftest import ROOT, Finished, here, run
from jobs import make_config
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

SCRIPT = ROOT / "tests" / "own_trainer.py"


def launched(config: Path, ranks: int, *args: str | Path, **environment: str) -> Finished:
    words = [sys.executable, "-m", "accel_fsdp", "launch", "--cpu", "--num-processes", str(ranks)]
    return run([*words, config, SCRIPT, *args], **environment)


def losses(checkpoint: Path) -> list[float]:
    log = json.loads((checkpoint / file_names.TRAINER_STATE).read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def test_killed_resumed_elsewhere_and_stopped(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """Killed after step 5 on two ranks; on an empty disk it goes on from the store on three, until SIGTERM."""
    config, uri = make_config(tmp_path, tiny_model), (tmp_path / "store").as_uri()
    straight, killed, elsewhere = (tmp_path / name for name in ("straight", "killed", "elsewhere"))
    whole = launched(config, 2, tiny_model, text_data, straight)
    assert whole.code == 0, whole.output
    first = launched(config, 2, tiny_model, text_data, killed, uri, KILL_STEP="5 9")
    assert first.code != 0
    left = completeness.choose(killed).newest  # the fourth step's may have been in the background
    assert left in (killed / "checkpoint-2", killed / "checkpoint-4"), first.output
    last = launched(config, 3, tiny_model, text_data, elsewhere, uri, KILL_STEP="6 15")
    assert last.code == 75, last.output
    newest = completeness.choose(elsewhere).newest
    assert newest is not None
    step = file_names.step(newest.name)
    assert step in (6, 7, 8)
    assert f"stopped: SIGTERM after step {step}" in last.output
    whole_losses = losses(straight / "checkpoint-10")
    assert losses(newest) == pytest.approx(whole_losses[:step], abs=2e-4)
    assert whole_losses[-1] != pytest.approx(whole_losses[0], abs=1e-2)
    shown = json.loads(here("checkpoints", elsewhere, "--json").printed)
    assert (shown[-1]["step"], shown[-1]["complete"]) == (step, True)


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
    with pytest.raises(UserError, match="s33://bucket/run is not in a store that fsspec knows"):
        accel_fsdp.Checkpoints(trainer, checkpoint_uri="s33://bucket/run")
    accel_fsdp.Checkpoints(trainer)
    (tmp_path / "run" / "checkpoint-4").mkdir()
    with pytest.raises(UserError, match="already holds a run"):
        trainer.train()
