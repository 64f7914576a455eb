"""Rules about the training script: a script that triggers each and one that doesn't, and our own, which is clean."""

from pathlib import Path

import pytest
from checking import V1, V2, codes_of, script, subject
from conftest import SFT, accel_fsdp

AC2 = V2 + "  fsdp_activation_checkpointing: true\n"
SHARDED1 = V1 + "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
SWITCH = "plugin.set_state_dict_type('FULL_STATE_DICT')\n"
SCRIPTS: dict[str, tuple[str, str, str]] = {
    "AF901": (V2, "trainer.train()\ntrainer.save_model(out)\n", SWITCH + "trainer.save_model(out)\n"),
    "AF902": (
        V2,
        "accelerator.unwrap_model(model).save_pretrained(out)\n",
        "accelerator.unwrap_model(model).save_pretrained(out, state_dict=state)\ntokenizer.save_pretrained(out)\n",
    ),
    "AF903": (
        V2,
        "if accelerator.is_main_process:\n    state = accelerator.get_state_dict(model)\n",
        "state = accelerator.get_state_dict(model)\nif accelerator.is_main_process:\n    trainer.save_state()\n",
    ),
}


@pytest.mark.parametrize("code", sorted(SCRIPTS))
def test_rule_on_a_script(code: str) -> None:
    text, bad, good = SCRIPTS[code]
    assert code in codes_of(subject(text, script=script(bad)))
    assert code not in codes_of(subject(text, script=script(good)))
    assert code not in codes_of(subject(text))
    assert code not in codes_of(subject("distributed_type: MULTI_GPU\n", script=script(bad)))


OTHER_NAMES: list[tuple[str, str, str]] = [
    ("AF901", V2, "t = Trainer(m)\nt.train()\nt.save_model('x')\n"),
    ("AF901", V2, "self.t: T = SFTTrainer(m)\nself.t.save_model('x')\n"),
    ("AF901", V2, "Trainer(m).save_model('x')\n"),
    ("AF902", V2, "t = Trainer(m)\nt.model.save_pretrained('x')\n"),
    ("AF902", V2, "t = Trainer(m)\nmodel = t.model\nmodel.save_pretrained('x')\n"),
]


@pytest.mark.parametrize(("code", "text", "lines"), OTHER_NAMES)
def test_a_trainer_by_another_name(code: str, text: str, lines: str) -> None:
    assert code in codes_of(subject(text, script=script(lines)))
    silent = lines.replace("SFTTrainer(", "Thing(").replace("Trainer(", "Thing(").replace("prepare(", "other(")
    assert code not in codes_of(subject(text, script=script(silent)))


SAVE = "    trainer.save_model()\n"
ALONE = [
    "if int(os.environ['RANK']) == 0:\n" + SAVE,
    "if os.environ.get('LOCAL_RANK', '0') == '0':\n" + SAVE,
    "if torch.distributed.get_rank() == 0:\n" + SAVE,
    "if rank == 0 and wanted:\n" + SAVE,
    "if accelerator.process_index == 0:\n" + SAVE,
    "if trainer.is_world_process_zero():\n" + SAVE,
    "if not accelerator.is_main_process:\n    pass\nelse:\n" + SAVE,
    "if rank != 0:\n    pass\nelse:\n" + SAVE,
    "if wanted:\n    pass\nelif rank == 0:\n" + SAVE,
]
TOGETHER = [
    "if not accelerator.is_main_process:\n" + SAVE,
    "if accelerator.is_main_process or True:\n" + SAVE,
    "if lora_rank == 0:\n" + SAVE,
    "if rank == 1:\n    pass\nelse:\n" + SAVE,
    "if rank == 0:\n    pass\nelse:\n    pass\ntrainer.save_model()\n",
    "if rank == 0:\n    save_model(state)\n    trainer.save_state()\n",
    "if step == 0:\n" + SAVE,
]


@pytest.mark.parametrize("lines", ALONE)
def test_a_save_on_one_rank(lines: str) -> None:
    assert "AF903" in codes_of(subject(V2, script=script(lines)))


@pytest.mark.parametrize("lines", TOGETHER)
def test_a_save_on_all_ranks(lines: str) -> None:
    assert "AF903" not in codes_of(subject(V2, script=script(lines)))


@pytest.mark.parametrize("text", [V1, V2, AC2, SHARDED1])
def test_our_own_script_is_clean(text: str) -> None:
    assert not {code for code in codes_of(subject(text, script=script(SFT.read_text()))) if code.startswith("AF9")}


def test_command(tmp_path: Path) -> None:
    path, train = tmp_path / "fsdp.yaml", tmp_path / "train.py"
    path.write_text(V2)
    train.write_text("import trl\n\ntrainer.train()\ntrainer.save_model()\n")
    finished = accel_fsdp("check", path, "--script", train)
    assert finished.code == 0
    assert "warning AF901: train.py:4: save_model writes nothing" in " ".join(finished.output.split())
    train.write_text("def (")
    assert accel_fsdp("check", path, "--script", train).code == 2
    assert accel_fsdp("check", path, "--script", tmp_path / "none.py").code == 2
