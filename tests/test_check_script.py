"""Rules about the training script: a script that triggers each and one that doesn't, and our own, which is clean."""

from pathlib import Path

import pytest
from checking import V1, V2, codes_of, script, subject
from conftest import SFT, accel_fsdp

AC2 = V2 + "  fsdp_activation_checkpointing: true\n"
SHARDED1 = V1 + "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
SWITCH = "plugin.set_state_dict_type('FULL_STATE_DICT')\n"
PREPARE = "model, optimizer = accelerator.prepare(model, optimizer)\n"

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
    "AF904": (SHARDED1, SWITCH + "trainer.train()\n", "trainer.train()\n" + SWITCH + "trainer.save_model(out)\n"),
    "AF905": (
        V2,
        "def main():\n    trainer.evaluate()\n    trainer.train()\n",
        "def main():\n    trainer.train()\n    trainer.evaluate()\n",
    ),
    "AF906": (
        V2,
        "state = PartialState()\nargs = TrainingArguments(out)\n",
        "args = TrainingArguments(out)\nstate = PartialState()\n",
    ),
    "AF907": (V1, PREPARE + "model.generate(ids)\n", "other = load()\nother.generate(ids)\n"),
    "AF908": (
        V2,
        "SFTTrainer(model, optimizers=(optimizer, None))\n",
        "SFTTrainer(model, optimizers=(None, None))\n",
    ),
    "AF909": (V2, "M.from_pretrained(a, device_map='auto')\n", "M.from_pretrained(a, device_map=None)\n"),
    "AF910": (V2, "accelerator.clip_grad_value_(p, 1)\n", "accelerator.clip_grad_norm_(p, 1)\n"),
    "AF911": (V2, "merged = trainer.model.merge_and_unload()\n", "merged = PeftModel.load(a).merge_and_unload()\n"),
    "AF912": (AC2, "SFTConfig(output_dir=out)\n", "SFTConfig(output_dir=out, gradient_checkpointing=False)\n"),
    "AF913": (V2, "SFTConfig(output_dir=out)\n", "SFTConfig(**settings)\n"),
    "AF914": (
        V2,
        "merge_fsdp_weights('run/checkpoint-10/', 'out')\n",
        "merge_fsdp_weights('run/checkpoint-10/pytorch_model_fsdp_0', 'out')\n",
    ),
    "AF915": (V2, "TrainingArguments(out, fsdp='full_shard')\n", "TrainingArguments(out, fsdp=False)\n"),
}


@pytest.mark.parametrize("code", sorted(SCRIPTS))
def test_rule_on_a_script(code: str) -> None:
    text, bad, good = SCRIPTS[code]
    assert code in codes_of(subject(text, script=script(bad)))
    assert code not in codes_of(subject(text, script=script(good)))
    assert code not in codes_of(subject(text))
    assert code not in codes_of(subject("distributed_type: MULTI_GPU\n", script=script(bad)))


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
