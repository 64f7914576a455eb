"""What Accelerate's launcher makes of a YAML today: the reasons for rules. Red means: fixed upstream.

`test_fields.py` shows the same for the table of keys; `pain` marks the rows of the list of known pains.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import prepare_multi_gpu_env
from test_fields import MINIMAL, environment


def parse(folder: Path, *words: str, **content: Any) -> Any:
    """The launcher's arguments for a YAML, with all that it raises."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **content}))
    command = ["--main_process_port", "0", *words, "--config_file", str(path), __file__]
    return _validate_launch_command(launch_command_parser().parse_args(command))[0]


@pytest.mark.pain("P08")
@pytest.mark.parametrize(
    ("words", "kind"), [(["--multi_gpu"], "FSDP"), ([], "MULTI_GPU"), ([], "NO")], ids=["flag", "MULTI_GPU", "NO"]
)
def test_fsdp_is_off_under_another_type(words: list[str], kind: str, tmp_path: Path) -> None:
    """AF314: the settings are read, the ranks are not told to use FSDP. The flag has the same effect."""
    args = parse(tmp_path, *words, distributed_type=kind, fsdp_config={"fsdp_version": 2})
    assert args.fsdp_version == 2
    assert "ACCELERATE_USE_FSDP" not in prepare_multi_gpu_env(args)


@pytest.mark.pain("P44")
@pytest.mark.parametrize(("processes", "each"), [(9, "4"), (1, "0"), (0, "0")])
def test_processes_that_do_not_divide_are_dropped(processes: int, each: str, tmp_path: Path) -> None:
    """AF402, AF407: 9 over 2 machines start 4 on each, 1 and 0 start none."""
    args = parse(tmp_path, fsdp_config={}, num_processes=processes, num_machines=2, machine_rank=1)
    prepare_multi_gpu_env(args)
    assert args.nproc_per_node == each


@pytest.mark.pain("P46")
def test_two_machines_without_an_address_meet_nowhere(tmp_path: Path) -> None:
    """AF403: the address is the text None."""
    args = parse(tmp_path, "--main_process_port", "29500", fsdp_config={}, num_machines=2, machine_rank=1)
    prepare_multi_gpu_env(args)
    assert args.rdzv_endpoint == "None:29500"


@pytest.mark.pain("P83")
@pytest.mark.parametrize("kind", ["FSDP", "MULTI_GPU", "DEEPSPEED", "XLA"])
def test_use_cpu_is_not_handed_on(kind: str, tmp_path: Path) -> None:
    """AF405: no variable for the ranks comes of it."""
    with_it = environment(tmp_path, distributed_type=kind, fsdp_config={}, use_cpu=True)
    assert with_it == environment(tmp_path, distributed_type=kind, fsdp_config={})
