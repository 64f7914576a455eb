"""The wizard's axes: `--tp`, `--dp-replicate` and `--ep`, what refuses them, and the way from a file back to them."""

from pathlib import Path

import pytest
import yaml
from conftest import here

LLAMA, MIXTURE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B"
EIGHT = ("--yes", "--gpus", "8xH100-80GB")


def config(folder: Path, *words: str, code: int = 0) -> tuple[dict[str, int], str]:
    """The mesh of the file that such flags make, and the output."""
    finished = here("config", *words, "-o", folder / "a.yaml", "--force")
    assert finished.code == code, finished.output
    content = yaml.safe_load((folder / "a.yaml").read_text()) if code == 0 else {}
    mesh = content.get("parallelism_config", {})
    return {key.removeprefix("parallelism_config_"): size for key, size in mesh.items()}, finished.output


@pytest.mark.parametrize(
    ("words", "mesh"),
    [
        ((), {}),
        (("--tp", "2"), {"dp_replicate_size": 1, "dp_shard_size": 4, "tp_size": 2}),
        (("--tp", "8"), {"dp_replicate_size": 1, "dp_shard_size": 1, "tp_size": 8}),
        (("--strategy", "4", "--dp-replicate", "4"), {"dp_replicate_size": 4, "dp_shard_size": 2}),
        (
            ("--strategy", "4", "--dp-replicate", "2", "--tp", "2"),
            {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2},
        ),
    ],
)
def test_a_mesh_is_written_and_read_again(words: tuple[str, ...], mesh: dict[str, int], tmp_path: Path) -> None:
    assert config(tmp_path, *EIGHT, "--model", LLAMA, *words)[0] == mesh
    assert here("check", "--strict", tmp_path / "a.yaml", "--model", LLAMA).code == 0
    text = (tmp_path / "a.yaml").read_text()
    assert ("--tp" in text) == ("tp_size" in mesh)
    assert here("config", "--yes", "--from", tmp_path / "a.yaml").code == 0
    assert (tmp_path / "a.yaml").read_text() == text


def test_experts_are_in_the_launch_line(tmp_path: Path) -> None:
    mesh, output = config(tmp_path, "--preset", "fsdp2_moe_ep", "--yes")
    assert mesh == {}
    assert "--expert_parallel_size 8" in output
    assert here("check", "--strict", tmp_path / "a.yaml", "--model", MIXTURE).code == 0
    text = (tmp_path / "a.yaml").read_text()
    assert here("config", "--yes", "--from", tmp_path / "a.yaml").code == 0
    assert (tmp_path / "a.yaml").read_text() == text
    assert (
        "--expert_parallel_size"
        not in here("config", "--yes", "--from", tmp_path / "a.yaml", "--ep", "1").output.splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "Qwen/Qwen2.5-0.5B", "--tp", "4"), "14 attention heads"),
        (("--model", LLAMA, "--tp", "3"), "does not divide the 8 processes of a machine"),
        (("--model", MIXTURE, "--ep", "3"), "--ep 2 or 4 or 8"),
        (("--model", LLAMA, "--tp", "2", "--engine", "deepspeed"), "it needs FSDP2"),
        (("--model", LLAMA, "--tp", "2", "--fsdp-version", "1"), "it needs FSDP2"),
        (("--model", LLAMA, "--dp-replicate", "2"), "--strategy 4"),
        (("--model", LLAMA, "--tp", "2", "--method", "lora"), "an adapter with tp 2"),
        (("--model", LLAMA, "--strategy", "4", "--dp-replicate", "8"), "nothing to shard over"),
        (("--model", LLAMA, "--tp", "2", "--strategy", "2"), "fsdp_reshard_after_forward: true"),
        (("--model", MIXTURE, "--ep", "2", "--mixed-precision", "fp16"), "fp16"),
    ],
)
def test_what_can_not_be_divided_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    finished = here("config", *EIGHT, *words, "-o", tmp_path / "a.yaml")
    assert finished.code in (1, 2)
    assert message in finished.output
    assert not (tmp_path / "a.yaml").exists()


def test_a_size_of_a_preset_that_does_not_fit_is_named_with_those_that_do(tmp_path: Path) -> None:
    flags = ("--preset", "fsdp2_moe_ep", "--yes", "--gpus", "2x3xH100-80GB")
    output = " ".join(config(tmp_path, *flags)[1].split())
    assert "ep 8" in output
    assert "going on with the default" in output


def test_experts_that_stay_in_16_bits_are_named() -> None:
    flags = ("--model", "mistralai/Mixtral-8x7B-v0.1", "--gpus", "8xH100-80GB", "--method", "qlora")
    assert "84 GiB" in " ".join(here("plan", *flags, "--details").output.split())
