"""What is right is clean, also with --strict: files of libraries, ours, of public recipes, and as people write them."""

from pathlib import Path

import pytest
from accelerate.commands.config.default import write_basic_config
from conftest import ROOT

from accel_fsdp import cli, linter

LLAMA, GPT2, MIXTRAL = "meta-llama/Llama-3.1-8B", "openai-community/gpt2", "mistralai/Mixtral-8x7B-v0.1"
TOP = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 1\n"
BF16 = TOP + "mixed_precision: bf16\nnum_processes: 8\n"
POLICY = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
WRAP = POLICY + "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
V1, V2 = BF16 + "fsdp_config:\n  fsdp_version: 1\n" + WRAP, BF16 + "fsdp_config:\n  fsdp_version: 2\n" + WRAP
MESH = "parallelism_config:\n  parallelism_config_dp_replicate_size: {}\n  parallelism_config_dp_shard_size: {}\n"
DEEPSPEED = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: "

VARIANTS: dict[str, tuple[str, str]] = {
    "comments and empty lines": (LLAMA, "# ours\n\n" + V2.replace("num_m", "\n# one box\nnum_m") + "# end\n"),
    "keys without the prefix": (LLAMA, V2.replace("  fsdp_", "  ")),
    "GPT-2": (GPT2, V2.replace("LlamaDecoderLayer", "GPT2Block")),
    "experts": (MIXTRAL, V2.replace("Llama", "Mixtral")),
    "two classes": (LLAMA, V2.replace("LlamaDecoderLayer", "LlamaDecoderLayer,Embedding")),
    "DDP on CPU": (GPT2, "distributed_type: MULTI_CPU\nmixed_precision: 'no'\nnum_processes: 2\nuse_cpu: true\n"
                   "mpirun_config: {mpirun_hostfile: hosts}\n"),
    "mpirun without an engine": (GPT2, "distributed_type: 'NO'\nmixed_precision: 'no'\nnum_processes: 2\n"
                                 "use_cpu: true\nmpirun_config: {mpirun_hostfile: hosts}\n"),
    "ZeRO by pdsh": (LLAMA, "num_machines: 2\n" + DEEPSPEED + "2\n  deepspeed_multinode_launcher: pdsh\n"
                     "  deepspeed_hostfile: hosts\n"),
    "a machine's own file": (LLAMA, V2.replace("num_machines: 1", "num_machines: 1\nmachine_rank: 0\n"
                             "main_process_port: 29501")),
    "ignored modules": (LLAMA, V2 + "  fsdp_ignored_modules: 'model\\.(embed_tokens|norm)'\n"),
    "sections that stay empty": (LLAMA, V2 + "deepspeed_config: {}\nparallelism_config: {}\ndynamo_config: {}\n"),
    "compiled by layers": (LLAMA, V2 + "dynamo_config: {backend: inductor, use_regional_compilation: true}\n"),
    "FP8": (LLAMA, V2.replace("bf16", "fp8") + "fp8_config: {backend: TE, fp8_format: HYBRID, amax_history_len: 16,"
            " override_linear_precision: [false, false, false]}\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_a_well_formed_file_is_left_alone(name: str, tmp_path: Path) -> None:
    model, text = VARIANTS[name]
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    findings = linter.lint(path, linter.LintOptions(model=model, fix=True))
    assert [finding for finding in findings if finding.severity != "note"] == []
    assert path.read_text() == text


ADAPTER = "--use_peft --lora_r 8 --lora_target_modules all-linear"
FLAT = V1 + "  fsdp_use_orig_params: false\n"
RECIPES: dict[str, tuple[str, str, set[str]]] = {
    "NVIDIA/Model-Optimizer: every GPU of the machine": (V2.replace("es: 8", "es: gpu"), "train.py --bf16", set()),
    "huggingface/diffusers: NO as YAML 1.1 reads it": ("distributed_type: NO\nnum_processes: 1\n", "train.py", set()),
    "huggingface/trl: other machines than the template's": (
        TOP + "num_processes: 8\nfsdp_config:\n  fsdp_version: 2\n" + WRAP + MESH.format(2, 16),
        "accelerate launch --num_processes 32 --num_machines 4 --main_process_ip 10.0.0.1 train.py", set(),
    ),
    "huggingface/accelerate: no number of processes": (
        V2.replace("num_processes: 8\n", ""), "accelerate launch --num_processes $GPUS train.py", set(),
    ),
    "huggingface/peft: the script decides the precision": (FLAT.replace("bf16", "'no'"), "train.py --bf16", set()),
    "huggingface/peft: LoRA in flat units": (FLAT, f"train.py --weight_decay 1e-4 {ADAPTER}", {"AF602"}),
    "huggingface/peft: QLoRA": (
        FLAT.replace("bf16", "'no'"),
        f"train.py --bf16 {ADAPTER} --load_in_4bit --dtype bfloat16 --bnb_4bit_quant_storage bfloat16", {"AF602"},
    ),
    "modelscope/ms-swift: flags of its own": (
        FLAT.replace("bf16", "'no'"), "sft.py --tuner_type lora --torch_dtype bfloat16 --lora_rank 8", {"AF602"},
    ),
    "NJUDeepEngine/meteora: flags of its own": (V2, "train.py --use_gradient_checkpointing", set()),
    "nngabe/qlora_graphrag: keys that say what FSDP2 does anyway": (
        V2 + "  fsdp_use_orig_params: true\n  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_sync_module_states: true\n",
        "train.py", set(),
    ),
    "flat units and a decay that is to spare norms": (FLAT, "train.py --weight_decay 0.1", {"AF317"}),
    "nngabe/qlora_graphrag: a key that FSDP2 drops": (V2 + "  fsdp_forward_prefetch: true\n", "train.py", {"AF305"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_public_recipe_has_true_findings_only(name: str, tmp_path: Path) -> None:
    """Files and command lines of public repositories, cut to what once raised a false alarm."""
    text, command, codes = RECIPES[name]
    path, args = tmp_path / "accelerate.yaml", tmp_path / "args.sh"
    path.write_text(text)
    args.write_text(command)
    findings = linter.lint(path, linter.LintOptions(args=args, strict=True))
    assert {finding.code for finding in findings if finding.severity != "note"} == codes


SHIPPED = sorted((Path(__file__).parent / "shipped").glob("*/*.yaml"))
ON_THE_COMMAND_LINE = {"slurm_fsdp": "accelerate launch --num_processes 8 --num_machines 2 --main_process_ip $IP x.py"}
"""What the example's own job script gives the launcher."""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_of_a_library_passes(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder as the examples want it: DeepSpeed's files are where they say."""
    for name in ("deepspeed_config_templates/zero_stage1_config.json", "work/sp-alst.ds-config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path / "work")
    args = None
    if path.stem in ON_THE_COMMAND_LINE:
        (args := tmp_path / "args.sh").write_text(ON_THE_COMMAND_LINE[path.stem])
    options = linter.CheckCommand(files=(path,), args=args, strict=True)
    assert [(f.code, f.what) for f in linter.lint(path, options) if f.severity != "note"] == []
    assert linter.lint_all(options) == 0


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_basic_config_passes(precision: str, tmp_path: Path) -> None:
    """It is JSON, and what `accelerate config default` writes."""
    path = tmp_path / "default_config.json"
    assert write_basic_config(precision, str(path)) == path
    assert linter.lint_all(linter.CheckCommand(files=(path,), strict=True)) == 0


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_our_own_files_pass(path: Path) -> None:
    """With the arguments of their headers."""
    assert cli.call(["check", "--strict", str(path)]) == 0


def test_a_file_in_float32_passes_with_our_script(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    words = ["--model", LLAMA, "--gpus", "8xH100-80GB", "--mixed-precision", "no", "-o", str(path)]
    assert cli.call(["config", "--yes", *words]) == 0
    assert "train/sft.py" in path.read_text()
    assert cli.call(["check", "--strict", str(path), "--model", LLAMA]) == 0


USUAL = "rdzv_backend: static\nsame_network: true\nenable_cpu_affinity: false\ndowncast_bf16: 'no'\nuse_cpu: false\n"
DDP = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n"
TRAINER = "--bf16 --learning_rate 1e-5 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --output_dir out"
TRAINER += " --eval_strategy steps --save_strategy steps --logging_steps 10 --num_train_epochs 3 --max_length 4096"


@pytest.mark.parametrize("words", ["", f"accelerate launch --config_file f.yaml train.py {TRAINER}", TRAINER])
@pytest.mark.parametrize("text", [V2, V2 + USUAL, DDP + USUAL])
def test_ordinary_arguments_of_trainer_pass(text: str, words: str, tmp_path: Path) -> None:
    """Beside a faultless bf16 file, also as `accelerate config` writes it: not even a note."""
    (path := tmp_path / "fsdp.yaml").write_text(text)
    (args := tmp_path / "args").write_text(words)
    assert linter.lint(path, linter.LintOptions(args=args if words else None)) == []
