"""Scripts for models of 70 B weights, rehearsed in small: offline, with nothing but a config and a tokenizer."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CHAT_DATA, accel_fsdp, run
from rehearsals import FSDP2, yaml_file

from accel_fsdp import ranks

NAME = "someone/llama-70b"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "dtype": "bfloat16",
}
COMMIT = "1" * 40


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path) -> str:
    """The folder of a cache with the model's config and a tokenizer, as the hub's client writes it."""
    folder = tmp_path / f"hub/hub/models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    shutil.copytree(tiny_model, snapshot, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(tiny_model / "tokenizer_config.json", snapshot)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "hub")


WITH_TRAINER = """
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers import Mxfp4Config, Trainer, TrainingArguments
import sys
name, folder, data = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
assert (str(model.dtype), model.config._name_or_path) == ("torch.bfloat16", name)
model(**tokenizer("a forward pass", return_tensors="pt"))
AutoModelForCausalLM.from_pretrained(name)
whole = AutoModelForCausalLM.from_pretrained(name, quantization_config=Mxfp4Config(dequantize=True))
assert not getattr(whole, "is_quantized", False)
head = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
assert head.config.num_hidden_layers == model.config.num_hidden_layers == 2
model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
rows = load_dataset("json", data_files=data, split="train")
rows = rows.select(range(100)).train_test_split(test_size=2000, seed=0)["train"]
rows = rows.map(lambda row: tokenizer(row["messages"][0]["content"] * 9, truncation=True, max_length=2048))
rows = rows.remove_columns("messages")
arguments = TrainingArguments(
    folder, per_device_train_batch_size=16, num_train_epochs=3, warmup_steps=100, save_steps=500, report_to="none"
)
trainer = Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorForLanguageModeling(tokenizer, False))
trainer.train()
assert (trainer.state.global_step, max(map(len, rows["input_ids"]))) == (4, 256)
"""
LISTED = {
    f"{NAME} 68,460,748,800 -> 1,934,592 weights, random ones": "head = AutoModel",
    "json 162 -> 64 rows": "rows = load_dataset",
    "texts of at most 256 tokens": "tokenizer = ",
    "per_device_train_batch_size 16 -> 2": "arguments = ",
    "72 steps -> 4, without warm-up": "trainer.train()",
    "save_steps 500 -> 4": "trainer.train()",
}


def ran(text: str, hub: str, folder: Path, *words: Path) -> list[ranks.RankEvent]:
    """What a rank of this script reports."""
    (script := folder / "train.py").write_text(text)
    (events := folder / "events").mkdir()
    variables = {"HF_HOME": hub, "ACCEL_FSDP_EVENTS": str(events), "ACCEL_FSDP_SMALL": str(folder / "small")}
    command = [sys.executable, "-m", "accel_fsdp.ranks", script, NAME, *words]
    done = run(command, CUDA_VISIBLE_DEVICES="", **variables)
    assert done.code == 0, done.output
    return ranks.read(events)


def test_a_script_with_trainer_and_peft(hub: str, tmp_path: Path) -> None:
    (earlier := tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
    events = ran(WITH_TRAINER, hub, tmp_path, tmp_path / "out", CHAT_DATA / "train.jsonl")
    assert [*earlier.parent.rglob("*")] == [earlier]  # the real run's
    lines = {e.content["what"]: e.content["line"] for e in events if e.kind == "made-small"}
    assert f"output_dir {tmp_path}/out -> a folder that is removed" in lines
    small = f"{tmp_path}/small/"
    assert not any(e.content["path"].startswith(small) for e in events if e.kind == "saved")
    text = WITH_TRAINER.splitlines()
    assert {what: lines.get(what, "") for what in LISTED if not line_of(text, lines, what)} == {}


def line_of(text: list[str], lines: dict[str, str], what: str) -> bool:
    """Whether a change is reported with the line that asked for it."""
    number = int(lines.get(what, ":0").rpartition(":")[2])
    return LISTED[what] in text[number - 1]


NESTED = """
import sys
from accel_fsdp.ranks import small
small.PARAMETERS = 1
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
assert model.model.config is model.config
"""


def test_the_parts_of_a_small_model_are_left_as_they_are(hub: str, tmp_path: Path) -> None:
    events = ran(NESTED, hub, tmp_path)
    (change,) = [event.content["what"] for event in events if "weights" in event.content.get("what", "")]
    assert change.startswith(NAME)


OWN_LOOP = """
import os, sys
import torch
from accelerate import Accelerator
from parts import model as parts
accelerator = Accelerator()
os.chdir(sys.argv[1])
torch.manual_seed(0)
model = parts.made()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(parts.Stream(), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with torch.autocast("cuda", torch.bfloat16, True):
        loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
PARTS = f"""
import os
import torch
from transformers import LlamaForCausalLM

def made():
    return LlamaForCausalLM.from_pretrained({NAME!r}, dtype=torch.float32)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        if os.environ["RANK"] == "0":
            print("the stream begins")
        yield from torch.randint(0, 500, (16, 12), generator=torch.Generator().manual_seed(0))
"""


def test_an_own_loop_in_a_package(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line is found after a change of folder; its stream is begun once; autocast takes a third argument."""
    monkeypatch.setenv("HF_HOME", hub)
    (script := tmp_path / "train.py").write_text(OWN_LOOP)
    (folder := tmp_path / "parts").mkdir()
    (folder / "model.py").write_text(PARTS)
    finished = accel_fsdp("rehearse", "--json", yaml_file(tmp_path, FSDP2), "--script", script, "--", folder)
    report: dict[str, Any] = json.loads(finished.output[finished.output.index("{\n") :])
    step = report["steps"][-1]
    assert step["passed"], step
    assert "gradients and weights of the first 2 steps are those of one process" in step["said"]
    assert step["output"].count("the stream begins") == 1
    assert [change for change in report["changes"] if change.startswith(NAME)] == [
        f"{NAME} 68,460,748,800 -> 1,934,592 weights, random ones (model.py:7)"
    ]
