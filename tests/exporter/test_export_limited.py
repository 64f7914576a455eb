"""An export in half of the memory that the model takes, which the kernel enforces by a control group."""

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

LIMIT_BYTES = 660_000_000
GROUPS = {  # by the version of control groups, the folder in which one is made, and the file that limits its memory
    1: (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    2: (Path("/sys/fs/cgroup"), "memory.max"),
}


@contextlib.contextmanager
def limited(name: str) -> Iterator[Path]:
    """Yields the folder of a control group; skips the test where none can be made."""
    for parent, limit in GROUPS.values():
        group = parent / name
        try:
            group.mkdir()
            (group / limit).write_text(str(LIMIT_BYTES))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("no control group can be made here")


@pytest.mark.slow
def test_half_of_the_models_size_is_enough(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "final"
    sizes = {"hidden_size": 1024, "intermediate_size": 2731, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=2048, num_hidden_layers=26, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(run / "model")
    weights = LlamaForCausalLM(config).state_dict()
    assert sum(tensor.nbytes for tensor in weights.values()) > 2 * LIMIT_BYTES
    with warnings.catch_warnings(action="ignore"):  # that this is a single process
        dcp.save({"model": weights}, checkpoint_id=run / "checkpoint-4" / "pytorch_model_fsdp_0", no_dist=True)  # type: ignore[attr-defined]
    (run / "checkpoint-4" / "trainer_state.json").write_text('{"global_step": 4}')

    with limited(f"accel-fsdp-{tmp_path.name}") as group:
        script = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
        words = [sys.executable, "-m", "accel_fsdp", "export", str(run), str(out), "--dtype", "float32"]
        command = ["bash", "-c", script, str(group), *words]
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert "from_pretrained loads all of it" in finished.stderr
    with safe_open(out / "model.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), weights[name]) for name in file.keys())  # noqa: SIM118
