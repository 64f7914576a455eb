"""What a user asks of `check`: folders, rules to leave out, a command line; and what is right is clean."""

import shlex
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from checking import DDP, V1, V2
from conftest import ROOT

from accel_fsdp import cli, linter
from accel_fsdp.config import yaml_file
from accel_fsdp.errors import UsageError

RETIRED = "  fsdp_backward_prefetch_policy: BACKWARD_PRE"
BF16 = V2.replace("'no'", "bf16")
TRAINER = "--bf16 --learning_rate 1e-5 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --output_dir out"
TRAINER += " --eval_strategy steps --save_strategy steps --logging_steps 10 --num_train_epochs 3 --max_length 4096"


def checked(path: Path, args: str = "", **options: object) -> dict[str, str]:
    """The severity of each rule that finds something."""
    if args:
        options["args"] = path.with_suffix(".args")
        path.with_suffix(".args").write_text(args)
    findings = linter.lint(path, linter.LintOptions(**options))  # type: ignore[arg-type]
    return {finding.code: finding.severity for finding in findings}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"{V1}{RETIRED}\n")
    return path


def test_a_rule_is_left_out_by_its_code(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(file) == {"AF104": "error"}
    assert checked(file, ignore="af104") == {}
    assert cli.call(["check", str(file), "--ignore", "AF104,AF301", "--strict"]) == 0
    assert cli.call(["check", str(file), "--ignore", "AF999"]) == 2
    assert "there is no rule AF999" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        f"{RETIRED}  # accel-fsdp: ignore AF104",
        f"  # accel-fsdp: ignore AF103, AF104 (the cluster's own)\n{RETIRED}",
        f"{RETIRED}  #accel-fsdp:  ignore af104",
    ],
)
def test_a_rule_is_left_out_at_a_line(line: str, file: Path) -> None:
    file.write_text(f"{V1}{line}\n")
    assert checked(file) == {}
    assert checked(file, fix=True) == {}
    assert file.read_text() == f"{V1}{line}\n"
    file.write_text(f"{V1}{line.replace('AF104', 'AF105').replace('af104', 'af105')}\n")
    assert checked(file) == {"AF104": "error"}


def test_a_folder_stands_for_its_accelerate_yamls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "configs"
    (folder / "deep").mkdir(parents=True)
    (folder / "good.yaml").write_text(V2)
    (folder / "deep" / "bad.yml").write_text(f"{V1}{RETIRED}\n")
    (folder / "compose.yaml").write_text("services: {web: {image: nginx}}\n")
    assert cli.call(["check", str(folder)]) == 1
    output = capsys.readouterr()
    assert "bad.yml:8: error AF104" in output.out
    assert "compose.yaml" not in output.out + output.err
    (folder / "deep" / "bad.yml").unlink()
    assert cli.call(["check", str(folder), "--strict"]) == 0
    (folder / "good.yaml").unlink()
    with pytest.raises(UsageError, match="no Accelerate YAML in"):
        cli.call(["check", str(folder)])


@pytest.mark.parametrize("flag", ["--multi_gpu", "--use_deepspeed", "--tpu"])
def test_a_flag_without_a_value_does_not_take_the_script(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(V2)
    line = f"accelerate launch --config_file {path} {flag} my_train.py --bf16"
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(shlex.split(line)[2:]))
    assert (args.training_script, args.use_fsdp) == ("my_train.py", False)
    assert checked(path, line)["AF409"] == "error"
    assert "AF409" not in checked(path, line.replace(f" {flag}", ""))
    assert "AF409" not in checked(path, f"accelerate launch --config_file {path} my_train.py {flag}")


def test_torchrun_with_our_script_that_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(V2)
    line = f"torchrun --nproc_per_node 2 train/sft.py --accelerate_config {path} --max_steps 3"
    assert checked(path, line) == {}
    assert checked(path, line.replace("--accelerate_config", "--config")) == {"AF408": "warning"}
    assert checked(path, line.replace("train/sft.py", "mine.py")) == {"AF408": "warning"}


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ("DownBlock, CrossDownBlock. UpBlock, CrossUpBlock", "DownBlock, CrossDownBlock. UpBlock, CrossUpBlock"),
        ("DownBlock CrossDownBlock", "DownBlock CrossDownBlock"),
        ("[DownBlock, 'Cross UpBlock']", ["DownBlock", "Cross UpBlock"]),
        ("DownBlock, a.b.UpBlock", "DownBlock,UpBlock"),
        ("models.llama.modeling_llama.LlamaDecoderLayer", "LlamaDecoderLayer"),
    ],
)
def test_no_repair_loses_a_layer_class(names: str, left: object, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(V2.replace("LlamaDecoderLayer", names))
    assert checked(path)["AF206"] == "error"
    checked(path, fix=True)
    assert yaml_file.load(path)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == left


@pytest.mark.parametrize(("precision", "dtype"), [("fp8", "bfloat16"), ("bf16", "bfloat16"), ("'no'", "float32")])
def test_four_bits_are_stored_in_the_dtype_of_the_shards(precision: str, dtype: str, tmp_path: Path) -> None:
    """As Accelerate's plugin chooses it: `set_mixed_precision` has bfloat16 for fp8."""
    path = tmp_path / "fsdp.yaml"
    path.write_text(V2.replace("'no'", precision))
    assert "AF612" in checked(path, "train.py --load_in_4bit")
    fixes = [f.fix for f in linter.lint(path, linter.LintOptions(args=path.with_suffix(".args"))) if f.code == "AF612"]
    assert fixes == [f"--bnb_4bit_quant_storage {dtype}"]
    assert "AF612" not in checked(path, f"train.py --load_in_4bit {fixes[0]}")


@pytest.mark.parametrize(
    ("keys", "severity"),
    [
        ("fsdp_sharding_strategy: FULL_SHARD", "note"),
        ("fsdp_sharding_strategy: 2\n  fsdp_reshard_after_forward: false", "note"),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", "error"),
        ("fsdp_sharding_strategy: HYBRID_SHARD", "error"),
    ],
)
def test_a_strategy_under_fsdp2_is_as_bad_as_what_it_changes(keys: str, severity: str, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"{V2}  {keys}\n")
    assert checked(path)["AF303"] == severity


USUAL = "rdzv_backend: static\nsame_network: true\nenable_cpu_affinity: false\ndowncast_bf16: 'no'\nuse_cpu: false\n"


@pytest.mark.parametrize("args", ["", f"accelerate launch --config_file f.yaml train.py {TRAINER}", TRAINER])
@pytest.mark.parametrize("text", [BF16, BF16 + USUAL, DDP + USUAL])
def test_what_is_right_is_clean(text: str, args: str, tmp_path: Path) -> None:
    """A faultless bf16 file, also as `accelerate config` writes it, with ordinary arguments of Trainer."""
    path = tmp_path / "fsdp.yaml"
    path.write_text(text)
    assert checked(path, args) == {}


SHIPPED = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_our_own_files_pass_strictly(path: Path) -> None:
    """With the arguments of their headers."""
    assert cli.call(["check", "--strict", str(path)]) == 0


def test_a_file_in_float32_passes_strictly_with_our_script(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    words = ["--model", "meta-llama/Llama-3.1-8B", "--gpus", "8xH100-80GB", "--mixed-precision", "no", "-o", str(path)]
    assert cli.call(["config", "--yes", *words]) == 0
    assert "train/sft.py" in path.read_text()
    assert cli.call(["check", "--strict", str(path), "--model", "meta-llama/Llama-3.1-8B"]) == 0
