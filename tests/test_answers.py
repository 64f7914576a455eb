"""Answers that can't be used are refused with words that fit; names that people use are understood. In-process."""

import pytest

from accel_fsdp import facts, wizard
from accel_fsdp.errors import UserError
from accel_fsdp.types import Answers

TWO_MACHINES = {"model": "gpt2", "gpus": "2x8xA100-80GB", "main_process_ip": "10.0.0.1"}


def settled(**flags: str) -> Answers:
    return wizard.answers(wizard.interview(flags, {}, "defaults"))


def refusal(**flags: str) -> UserError:
    with pytest.raises(UserError) as caught:
        settled(**{**TWO_MACHINES, **flags})
    return caught.value


@pytest.mark.parametrize(
    "address",
    ["a b c", "http://node1", "node1:29500", "127.0.0.1", "localhost", "10.0.0", "10.0.0.300", "::1", "-", "a\x1b[2J"],
)
def test_an_address_where_machines_cannot_meet_is_refused(address: str) -> None:
    assert "--main-process-ip" in refusal(main_process_ip=address).what


@pytest.mark.parametrize("address", ["node-1", "node_1.cluster.local", "10.0.0.1", "fe80::1", "gpu01"])
def test_an_address_is_taken(address: str) -> None:
    assert settled(**{**TWO_MACHINES, "main_process_ip": address}).main_process_ip == address


def test_a_mistyped_gpu_is_refused_and_the_fix_works() -> None:
    error = refusal(gpus="8xH1OO")
    assert "Did you mean H100?" in error.what
    assert settled(model="gpt2", gpus=error.fix.removeprefix("--gpus ")).gpus == "8xH100"
    assert "no GPU that this tool knows" in refusal(gpus="8xFoo").what
    assert settled(model="gpt2", gpus="8xB300-288GB").gpus == "8xB300-288GB"  # newer than the table, with its memory


def test_a_short_name_is_the_catalogues_model() -> None:
    made = settled(model="llama-3.1-8b", gpus="8xH100")
    assert made.model == "meta-llama/Llama-3.1-8B"  # what `train/sft.py` can load
    assert facts.read_model("llama-3.1-8b").parameters == 8_030_261_248  # `check --model`


def test_a_number_out_of_range_gets_a_fix_that_works() -> None:
    for field, wrong in {"main_process_port": "99999", "num_processes": "0", "num_machines": "-1"}.items():
        flag, value = refusal(**{field: wrong}).fix.split()
        assert flag == "--" + field.replace("_", "-")
        settled(**{**TWO_MACHINES, field: value})
    assert refusal(main_process_port="99999").fix == "--main-process-port 29500"
