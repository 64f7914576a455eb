"""What a script asks of GPUs is taken for the CPU in a rehearsal, and named; what can't be is named with a fix."""

import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run
from rehearsals import FSDP2, rehearsed, yaml_file

from accel_fsdp import ranks
from accel_fsdp.rehearsal import blame, own_script

pytestmark = pytest.mark.oldest  # PyPI's torch for Linux is built with CUDA
SCRIPT = ROOT / "tests/rehearsal/for_gpus.py"
FIRST_USES = ('init_process_group(backend="cpu:gloo,cuda:nccl")', 'DeviceMesh(device_type="cuda")', 'autocast("cuda")')


def test_a_script_for_gpus_trains_as_one_for_cpus(tmp_path: Path) -> None:
    """To the last bit, sharded; the report names each thing that it asks of GPUs with its line."""
    file = yaml_file(tmp_path, FSDP2 | {"fsdp_auto_wrap_policy": "NO_WRAP"}, num_processes=2)
    for_gpus, for_cpus = (rehearsed(file, SCRIPT, words) for words in ("gpus", "cpu"))
    assert for_gpus["passed"], for_gpus
    assert for_cpus["passed"], for_cpus
    assert for_gpus["output"] == for_cpus["output"]
    assert for_gpus["output"].count("0x") == 3
    assert "a rank holds at most" in for_gpus["said"]
    assert "are those of one process" in for_gpus["said"]
    assert "taken for the CPU" not in for_cpus["said"]
    lines = SCRIPT.read_text().splitlines()
    asked = [
        match["name"] for line in lines if (match := re.match(r"""    ["'](?P<name>.+)["']: (lambda|torch)""", line))
    ]
    assert len(asked) > 25
    for name in (*FIRST_USES, *asked):
        assert f"{name} (for_gpus.py:" in for_gpus["said"], name
    set_device = next(number for number, line in enumerate(lines, 1) if "set_device(rank)" in line)
    assert f"torch.cuda.set_device (for_gpus.py:{set_device})" in for_gpus["said"]


LIBRARY = """
import torch

def sees():
    return torch.cuda.is_available(), torch.cuda.device_count()
"""
ASKING = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, asking
print(torch.cuda.is_available(), *asking.sees())
"""


def printed(folder: Path, files: dict[str, str], *words: Path, **variables: str) -> str:
    """What train.py, which is among these files, prints as a rank without a GPU."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "accel_fsdp.ranks", folder / "train.py", *words]
    return run(command, CUDA_VISIBLE_DEVICES="", **variables).output.strip()


@pytest.mark.parametrize(("folder", "sees"), [("site-packages", "True False 0"), ("modules", "True True 1")])
def test_libraries_see_no_gpu(folder: str, sees: str, tmp_path: Path) -> None:
    """They would use its kernels. A module of the user's own, wherever it is, sees what the script sees."""
    files = {"train.py": ASKING, f"{folder}/asking.py": LIBRARY}
    assert printed(tmp_path, files, tmp_path / folder, LOCAL_WORLD_SIZE="1") == sees


IN_A_CONTEXT = """
import torch
with torch.device("meta"):
    torch.cuda.synchronize()
torch.cuda.synchronize()
places = torch.ones(1).device, torch.ones(1, device="cuda").device
"""


def test_a_gpu_that_is_asked_for_within_a_device_context(tmp_path: Path) -> None:
    """The context ends with its block, and devices are translated after it."""
    files = {"train.py": "from deep import asking\nprint(*asking.places)\n", "deep/asking.py": IN_A_CONTEXT}
    assert printed(tmp_path, files) == "cpu cpu"


ATTENDING = """
import sys
from deep import kernels
from transformers import AutoModelForCausalLM
for kernel in kernels.NAMES:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation=kernel, device_map="cuda")
    print(model.config._attn_implementation, model.device)
"""
KERNELS = "NAMES = ['flash_attention_2', 'kernels-community/vllm-flash-attn3']\n"


def test_flash_attention_becomes_what_transformers_chooses(tiny_model: Path, tmp_path: Path) -> None:
    files = {"train.py": ATTENDING, "deep/kernels.py": KERNELS}
    output = printed(tmp_path, files, tiny_model, ACCEL_FSDP_EVENTS=str(tmp_path))
    assert output.splitlines().count("sdpa cpu") == 2
    taken = own_script.with_lines(ranks.read(tmp_path), "taken-for-cpu")
    for argument in ('device_map="cuda"', 'attn_implementation="flash_attention_2"'):
        assert f"from_pretrained({argument}) (train.py:6)" in taken


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_what_is_not_taken_for_the_cpu_is_named() -> None:
    for call in (torch.cuda.CUDAGraph, torch.cuda.synchronize, lambda: torch.ones(1, device="cuda")):
        with pytest.raises((AssertionError, RuntimeError)) as raised:
            call()
        assert blame.WITHOUT_GPU.search(f"{type(raised.value).__name__}: {raised.value}")
    assert not blame.WITHOUT_GPU.search("ValueError: 3")
