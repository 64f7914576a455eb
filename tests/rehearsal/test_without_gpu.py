"""What a script does that only a GPU can do is named with what to write instead."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accel_fsdp.training.rehearsal import without_gpu

CALLS = {
    'dist.init_process_group("nccl")': without_gpu.BACKEND,
    "torch.cuda.set_device(0)": without_gpu.CALL,
    "torch.cuda.synchronize()": without_gpu.CALL,
    "torch.cuda.reset_peak_memory_stats()": without_gpu.CALL,
    "torch.cuda.Event(enable_timing=True)": without_gpu.CALL,
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
    with pytest.raises((AssertionError, AttributeError, RuntimeError)) as raised:
        exec(call, {"torch": torch, "dist": dist})
    error = f"{type(raised.value).__name__}: {raised.value}"
    assert without_gpu.instead(error, f"{script}:2") == CALLS[call]


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
