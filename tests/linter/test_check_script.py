"""Rules about the training script: a script that triggers each and one that doesn't, and our own, which is clean."""

from dataclasses import replace
from pathlib import Path

import pytest
from checking import DS, V1, V2, codes_of, script, subject
from conftest import SFT, accel_fsdp

AC2 = V2 + "  fsdp_activation_checkpointing: true\n"
SHARDED1 = V1 + "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
SWITCH = "plugin.set_state_dict_type('FULL_STATE_DICT')\n"
STAGE2 = "  zero_stage: 2\n"
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
    "AF907": (
        V1,
        PREPARE + "model.generate(ids)\n",
        PREPARE + "with FSDP.summon_full_params(model):\n    model.generate(ids)\n",
    ),
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
    "AF918": (DS + STAGE2, "accelerator.clip_grad_norm_(p, 0.1)\n", "accelerator.clip_grad_norm_(p, max_norm=1)\n"),
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
    ("AF904", SHARDED1, "t = Trainer(m)\n" + SWITCH + "t.train()\n"),
    ("AF905", V2, "t = SFTTrainer(m)\nt.evaluate()\nt.train()\n"),
    ("AF905", V2, "if (t := Trainer(m)):\n    t.evaluate()\n    t.train()\n"),
    ("AF907", V1, "t = Trainer(m)\nt.train()\nt.model.generate(x)\n"),
    ("AF911", V2, "t = SFTTrainer(m)\nt.train()\nt.model.merge_and_unload()\n"),
    ("AF911", V2, "net = accelerator.prepare(net)\nnet.merge_and_unload()\n"),
]


@pytest.mark.parametrize(("code", "text", "lines"), OTHER_NAMES)
def test_a_trainer_by_another_name(code: str, text: str, lines: str) -> None:
    assert code in codes_of(subject(text, script=script(lines)))
    silent = lines.replace("SFTTrainer(", "Thing(").replace("Trainer(", "Thing(").replace("prepare(", "other(")
    assert code not in codes_of(subject(text, script=script(silent)))


@pytest.mark.parametrize(
    ("lines", "trl", "fires"),
    [
        ("Trainer(m).train()\n", "1.16.0", True),
        ("class T(transformers.Trainer):\n    pass\nT(m).train()\n", "1.16.0", True),
        ("SFTTrainer(m).train()\n", "1.14.2", True),
        ("SFTTrainer(m).train()\n", "1.16.0", False),
        ("DPOTrainer(m).train()\n", "1.14.2", False),
        ("for batch in loader:\n    model(**batch).loss.backward()\n", "1.14.2", False),
    ],
)
def test_who_gives_the_model_a_count_to_divide_by(lines: str, trl: str, fires: bool) -> None:
    for text in (V1, V2):
        low = text.replace("'no'", "bf16")
        here = subject(low, script=script(lines), versions={"transformers": "5.23.0", "trl": trl})
        assert ("AF636" in codes_of(here)) is fires
        assert "AF636" not in codes_of(replace(here, versions={"transformers": "5.22.2", "trl": trl}))
        assert "AF636" not in codes_of(replace(here, uses_sft=True))
        assert "AF636" not in codes_of(replace(here, args={"label_smoothing_factor": "0.1"}))
        assert "AF636" not in codes_of(subject(text, script=script(lines), versions={"transformers": "5.23.0"}))


@pytest.mark.parametrize(
    ("keys", "norm", "fires"),
    [
        ("  gradient_clipping: auto\n", "0.1", True),
        ("  gradient_clipping: 0\n", "1.0", True),
        ("  gradient_clipping: 0\n", "float('inf')", False),  # which only counts
        ("  gradient_clipping: 0.1\n", "0.1", False),
        ("  gradient_clipping: '0.5'\n", "0.1", False),  # clips, and says so
        ("  deepspeed_config_file: ds.json\n", "0.1", False),
        ("", "args.max_grad_norm", False),
        ("", "max_norm=0.1", True),
    ],
)
def test_a_norm_that_deepspeed_does_not_clip_to(keys: str, norm: str, fires: bool) -> None:
    called = script(f"accelerator.clip_grad_norm_(model.parameters(), {norm})\n")
    assert ("AF918" in codes_of(subject(DS + STAGE2 + keys, script=called))) is fires


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
