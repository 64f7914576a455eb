"""How a rank ends whose script closes its process group itself, as PyTorch's tutorials do."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT, run

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
SCRIPT = """
import atexit, os, sys, threading, time
import torch.distributed as dist
from accel_fsdp.hardware import host

class Torn:
    def __del__(self):
        os.abort()  # as torch may, in the interpreter's teardown

os.environ["MASTER_PORT"] = str(host.free_port())
dist.init_process_group("gloo")
torn = Torn()
atexit.register(print, "after exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread done"))).start()
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_code_is_the_scripts_whatever_the_teardown_does(code: int, tmp_path: Path) -> None:
    script = tmp_path / "closes.py"
    script.write_text(SCRIPT)
    done = run([sys.executable, str(ROOT / "accel_fsdp/launch/ranks/__main__.py"), str(script), str(code)], **RANK)
    assert done.code == code, done.output
    assert done.output.endswith("thread done\nafter exit\n")
