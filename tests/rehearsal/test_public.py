"""Scripts as others write them: what they hold and learn, and what they do that a rehearsal must not take amiss."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT, accel_fsdp, run
from rehearsals import FSDP1, FSDP2, rehearsed, yaml_file
from transformers import BertConfig

from accel_fsdp import ranks

HERE = ROOT / "tests/rehearsal"


@pytest.mark.slow
def test_trainer_in_bf16(tiny_model: Path, tmp_path: Path) -> None:
    """It runs where no GPU has bf16; `save_model` writes nothing of shards, which the key decides."""
    script = HERE / "with_trainer.py"
    step = rehearsed(yaml_file(tmp_path, FSDP2), script, tiny_model, tmp_path / "saved")
    assert not step["passed"]
    assert "Trainer.save_model left" in step["said"]
    assert step["key"] == "fsdp_state_dict_type"
    assert step["line"] == f"{script}:{len(script.read_text().splitlines())}"


def test_a_script_that_ends_for_want_of_gpus(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nimport torch\nif torch.cuda.device_count() < 4:\n    sys.exit()\n")
    step = rehearsed(yaml_file(tmp_path, FSDP1), script)
    assert not step["passed"]
    assert step["said"] == "the script ended itself before it trained a model"
    assert step["line"] == f"{script}:4"
    assert "--processes" in step["fix"]


MISTAKEN = """
import sys, torch
from torch import nn
from accelerate import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model, data = nn.Linear(8, 8), torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    if sys.argv[1] == "clips":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with torch.autocast("cpu", torch.float16, sys.argv[1] == "fp16"):
        loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("way", "says"), [("clips", "clipped before the backward"), ("fp16", "nothing scales the loss")]
)
def test_steps_without_an_effect_of_their_own(way: str, says: str, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(MISTAKEN)
    step = rehearsed(yaml_file(tmp_path, {}), script, way)
    assert not step["passed"], step
    assert says in step["said"]


STATES_ALONE = """
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.zero_grad()
get_optimizer_state_dict(model, optimizer)
"""


def test_what_torch_does_to_save_is_no_step(tmp_path: Path) -> None:
    """It steps with gradients of 0, so that an optimizer that never stepped has states."""
    script = tmp_path / "train.py"
    script.write_text(STATES_ALONE)
    done = run([sys.executable, "-m", "accel_fsdp.ranks", script], ACCEL_FSDP_EVENTS=str(tmp_path), RANK="0")
    assert done.code == 0, done.output
    (content,) = [event.content for event in ranks.read(tmp_path) if event.kind == "trained"]
    assert (content["backwards"], content["steps"], content["kept"]) == (1, 0, True)
    assert content["backward_line"] == f"{script}:6"


def test_the_line_and_what_to_write_instead_are_shown(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nbatch = torch.ones(1)\ngraph = torch.cuda.CUDAGraph()\n")
    file = yaml_file(tmp_path, FSDP1, num_processes=2)
    rehearsal = accel_fsdp("rehearse", file, "--script", script)
    assert rehearsal.code == 1
    assert f"line: {script}:3: graph = torch.cuda.CUDAGraph()" in rehearsal.output
    assert "skip it where the weights are on a CPU" in " ".join(rehearsal.output.split())


def test_the_head_of_a_model_is_the_scripts_choice(tmp_path: Path) -> None:
    """As in run_qa.py of transformers: of BERT the config names a head that shares the embeddings."""
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bert")
    script = tmp_path / "train.py"
    script.write_text("")
    file = yaml_file(tmp_path, FSDP2 | {"fsdp_transformer_layer_cls_to_wrap": "BertLayer"})
    step = rehearsed(file, script, "--model_name_or_path", tmp_path / "bert")
    assert step["name"] == "run train.py", step


TASK = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from accel_fsdp.ranks.holding import measure
class Task(torch.nn.Module):
    def __init__(self, **parts):
        super().__init__()
        self.net = DistributedDataParallel(torch.nn.Linear(2, 2))
        self.loss = torch.nn.MSELoss()
        for name, part in parts.items():
            setattr(self, name, part)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
average, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
head(torch.ones(1, 2)).sum().backward()
print(*(measure(task).engine for task in (Task(), Task(average=average), Task(head=head))), flush=True)
"""


def test_a_task_that_holds_the_wrapped_model(tmp_path: Path) -> None:
    """As in timm's train.py; what trains outside of the wrapper trains alone."""
    done = run([sys.executable, "-c", TASK, tmp_path / "store"])
    assert done.output.splitlines()[-1].startswith("DDP DDP "), done.output
    assert done.output.count("DDP") == 2
