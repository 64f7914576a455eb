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
    done = run([sys.executable, str(ROOT / "accel_fsdp/ranks/__main__.py"), str(script), str(code)], **RANK)
    assert done.code == code, done.output
    assert done.output.endswith("thread done\nafter exit\n")


REOPENS = """
import os, weakref
import torch.distributed as dist
from accel_fsdp.hardware import host

os.environ["MASTER_PORT"] = str(host.free_port())
dist.init_process_group("gloo")
first = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
print("kept", first() is not None)
dist.init_process_group("gloo")
print("deleted", first() is None)
"""


def test_a_closed_process_group_is_kept_until_another_one_is_opened(tmp_path: Path) -> None:
    """A DDP model that deletes it may wait for ever; the next group may need its port."""
    script = tmp_path / "reopens.py"
    script.write_text(REOPENS)
    done = run([sys.executable, str(ROOT / "accel_fsdp/ranks/__main__.py"), str(script)], **RANK)
    assert done.code == 0, done.output
    assert done.output.endswith("kept True\ndeleted True\n")
