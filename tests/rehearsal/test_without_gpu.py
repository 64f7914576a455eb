"""What a script does that only a GPU can do is named with what to write instead."""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, run

from accel_fsdp.rehearsal import without_gpu

pytestmark = pytest.mark.oldest  # PyPI's torch for Linux is built with CUDA
CALLS = {
    'dist.init_process_group("nccl")': without_gpu.BACKEND,
    "torch.cuda.set_device(0)": without_gpu.CALL,
    "torch.cuda.synchronize()": without_gpu.CALL,
    "torch.cuda.reset_peak_memory_stats()": without_gpu.CALL,
    "torch.cuda.Event(enable_timing=True).record()": without_gpu.CALL,
    "torch.cuda.Stream()": without_gpu.CALL,
    "torch.cuda.device(0).__enter__()": without_gpu.CALL,
    "torch.accelerator.set_device_index(0)": without_gpu.CALL,
    'torch.ones(1).to("cuda")': without_gpu.DEVICE,
    "torch.ones(1).to(torch.cuda.current_device())": without_gpu.DEVICE,
    "torch.ones(1).cuda()": without_gpu.DEVICE,
    "torch.ones(1).to(0)": without_gpu.DEVICE,
    'torch.Generator("cuda")': without_gpu.DEVICE,
}


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("call", CALLS)
def test_calls_of_cuda(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{call}\n")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((AssertionError, AttributeError, RuntimeError, ValueError)) as raised:
        exec(call, {"torch": torch, "dist": dist})
    error = f"{type(raised.value).__name__}: {raised.value}"
    assert without_gpu.instead(error, f"{script}:2") == CALLS[call]


FORKING = """
import os
import sys
from pathlib import Path
from accel_fsdp.rehearsal import warm

folder = Path(sys.argv[1])
os.environ["CUDA_VISIBLE_DEVICES"] = ""
warm.start_server(folder)
log = folder / "log"
process = warm.start("script", [], os.environ, log)
process.join()
print(log.read_text())
sys.exit(process.exitcode)
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_a_forked_rank_is_refused_a_gpu_as_a_process_of_its_own_is() -> None:
    with pytest.raises((AttributeError, RuntimeError)) as raised:
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:  # the name of a socket has at most 107 letters
        script = "import torch\nprint(torch.cuda.is_available())\ntorch.cuda.set_device(0)\n"
        Path(folder, "script.py").write_text(script)
        done = run([sys.executable, "-c", FORKING, folder], PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")
    assert done.code == 1
    assert done.output.startswith("False\n")
    assert str(raised.value) in done.output
    assert without_gpu.instead(str(raised.value), "") == without_gpu.DEVICE


NO_GPU = SimpleNamespace(is_available=lambda: False)
MEASURING = """
class Meter:
    def stop(self):
        if torch.cuda.is_available():
            self.end = torch.cuda.memory_allocated()
        elif torch.xpu.is_available():
            self.end = 0
        return self.end - 1
"""


def test_a_name_that_is_set_with_a_gpu_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MEASURING)
    line = MEASURING.splitlines().index("        return self.end - 1") + 1
    scope: dict[str, object] = {"torch": SimpleNamespace(cuda=NO_GPU, xpu=NO_GPU)}
    exec(MEASURING, scope)
    with pytest.raises(AttributeError) as raised:
        scope["Meter"]().stop()  # type: ignore[operator]
    fix = without_gpu.instead(f"AttributeError: {raised.value}", f"{script}:{line}")
    assert fix == "set end without a GPU too: line 4 sets it if torch.cuda.is_available(), false here"
    assert without_gpu.instead("AttributeError: 'Meter' object has no attribute 'other'", f"{script}:{line}") == ""
    assert without_gpu.instead("NameError: name 'end' is not defined", "") == ""


def test_an_end_for_want_of_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nif torch.accelerator.device_count() < 2:\n    print('no')\n    sys.exit()\n")
    assert without_gpu.why_ended(f"{script}:4") == without_gpu.GO_ON
    script.write_text("import sys\naccelerator.end_training()\nsys.exit()\n")
    assert without_gpu.why_ended(f"{script}:3") == ""
    assert without_gpu.why_ended("") == ""
