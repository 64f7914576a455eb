"""Rules about arguments, model, machine, versions and checkpoints: facts that trigger each and facts that don't."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checking import DDP, LLAMA, MESH, TOP, V1, V2, codes_of, script, subject
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp.checkpoints import CheckpointFacts
from accel_fsdp.hardware import HereFacts
from accel_fsdp.linter import Sources, read_subject
from accel_fsdp.linter.rules import RULES, Subject, run
from accel_fsdp.models import state_bytes
from accel_fsdp.units import GIB

BF16 = V2.replace("'no'", "bf16")
BF16_1 = V1.replace("'no'", "bf16")
FULL = "  fsdp_state_dict_type: FULL_STATE_DICT\n"
SHARDED = "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
OFFLOAD = "  fsdp_offload_params: true\n"
UNNAMED = TOP + "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
SAGEMAKER = (
    "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nec2_instance_type: p\niam_role_name: r\n"
)
TP = "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2}\n"
FP8 = V2.replace("'no'", "fp8") + "fp8_config: {fp8_backend: AO}\n"
DS_FILE = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
TWO = "num_machines: 2\nmain_process_ip: a\n"
BILLION = 10**9
BIG = replace(LLAMA, parameters=70 * BILLION, dtype="bfloat16")
LOW = replace(LLAMA, dtype="bfloat16")
TIED = replace(LLAMA, tied=True)
READ_BY_ALL = V2 + "  fsdp_cpu_ram_efficient_loading: false\n"
EIGHT = HereFacts(gpus=8, memory=64 * GIB, free_disk=100 * GIB)
SHARDED_CHECKPOINT = CheckpointFacts(
    "run/checkpoint-3", sharded=True, optimizer=True, scheduler=True, trainer_state=True, rng_states=2
)
FULL_CHECKPOINT = replace(SHARDED_CHECKPOINT, sharded=False, full=True)
EXPORT = CheckpointFacts("run/final", hub=True, has_config=True)


def here(text: str, args: str = "", **facts: Any) -> Subject:
    return subject(text, args, here=replace(EIGHT, **facts))


def on(text: str, model: Any, args: str = "", **more: Any) -> Subject:
    return subject(text, args, model=model, **more)


def folder(text: str, base: CheckpointFacts, **facts: Any) -> Subject:
    return subject(text, checkpoint=replace(base, **facts))


def versions(text: str, args: str = "", model: Any = None, script: Any = None, **installed: str) -> Subject:
    return subject(text, args, model=model, script=script, versions=installed)


EXPERTS = "train/sft.py --expert_parallel_size"
SHARDED_LOAD = script("m = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=2))")
ON_EIGHT = (V2 + TP).replace("num_processes: 2", "num_processes: 8")
QK_NORMS = replace(LLAMA, replicated_norms=True)
CP = "parallelism_config: {parallelism_config_cp_size: 2}\n"
HEADS = replace(LLAMA, heads=8, kv_heads=2, experts=8, tensor_plan=True, expert_plan=True)


def ours(text: str, args: str = "", model: Any = None, **more: Any) -> Subject:
    return subject(text, args or "train/sft.py --bf16", model=model, uses_sft=True, **more)


NO_SYNC = "--gradient_accumulation_steps 4 --accelerator_config sync_each_batch"
FACTS: dict[str, tuple[Subject, Subject]] = {
    "AF319": (
        subject(V2.replace("Layer\n", "Layer,Embedding\n"), model=TIED),
        subject(V2.replace("Layer\n", "Layer,Embedding\n"), model=LLAMA),
    ),
    "AF217": (
        subject(DS_FILE, absent={"deepspeed_config_file": ""}),
        subject(DS_FILE),
    ),
    "AF320": (subject(V2.replace("FSDP", "XLA")), subject(V2)),
    "AF321": (subject(FP8), subject(FP8.replace("AO", "TE"))),
    "AF322": (subject(BF16.replace("es: 2", "es: 64")), subject(BF16)),
    "AF408": (subject(V2, "--bf16", starter="torchrun"), subject(V2, "--bf16", starter="accelerate")),
    "AF409": (subject(V2, "--multi_gpu", starter="accelerate"), subject(V2, "--multi_gpu")),
    "AF414": (
        subject(V2, launcher={"mixed_precision": "fp16"}),
        subject(V2, launcher={"mixed_precision": "no", "machine_rank": "1"}),
    ),
    "AF420": (here(V2, gpus=0), here(V2, gpus=None)),
    "AF421": (here(V1, visible=""), here(V2, gpus=0)),
    "AF422": (here(V2, visible="3"), here(V2, visible="3,5")),
    "AF423": (
        here(V1 + "  fsdp_sharding_strategy: HYBRID_SHARD\n"),
        here(V1 + "  fsdp_sharding_strategy: HYBRID_SHARD\n", visible="0,1"),
    ),
    "AF424": (here(V2 + "gpu_ids: '0,1'\n", visible="2,3"), here(V2 + "gpu_ids: '0,1'\n")),
    "AF425": (here(V2, default_config="/c/default_config.yaml"), here(V2)),
    "AF426": (on(BF16, BIG, "--lr 1", here=EIGHT), on(BF16, BIG, "--use_peft", here=EIGHT)),
    "AF427": (on(V2 + OFFLOAD, BIG, "--lr 1", here=EIGHT), on(V2 + OFFLOAD, LLAMA, "--lr 1", here=EIGHT)),
    "AF428": (on(V2 + FULL, BIG, "--lr 1", here=EIGHT), on(V2 + SHARDED, BIG, "--lr 1", here=EIGHT)),
    "AF429": (
        on(V2, replace(LLAMA, parameters=5 * BILLION), "--save_total_limit 1", here=EIGHT),
        on(V2, replace(LLAMA, parameters=4 * BILLION), "--save_total_limit 1", here=EIGHT),
    ),
    "AF430": (here(V2, torch_xla=True), here(V2, torch_xla=True, gpus=0)),
    "AF431": (here(V2, port_in_use=True), here(V2)),
    "AF433": (here(V2 + TWO, filesystem="ext4"), here(V2 + TWO, filesystem="nfs4")),
    "AF503": (
        on(UNNAMED, replace(LLAMA, declared_classes=("LlamaDecoderLayer", "VisionBlock"))),
        on(UNNAMED, replace(LLAMA, declared_classes=("LlamaDecoderLayer",))),
    ),
    "AF505": (on(BF16_1, replace(LOW, kept_bf16="a.gate")), on(BF16, replace(LOW, kept_bf16="a.gate"))),
    "AF506": (
        on(V2, replace(TIED, tied_apart=True)),
        on(V2 + "  fsdp_cpu_ram_efficient_loading: false\n", replace(TIED, tied_apart=True)),
    ),
    "AF507": (
        on(V2, replace(LLAMA, expert_classes=frozenset({"LlamaDecoderLayer"}))),
        on(V2, replace(LLAMA, expert_classes=frozenset({"Expert"}))),
    ),
    "AF508": (on(BF16, LOW, "--lr 1"), on(BF16, LOW, "--use_peft")),
    "AF509": (
        on(BF16, replace(LOW, quantized=4, quant_storage="uint8")),
        on(BF16, replace(LOW, quantized=4, quant_storage="bfloat16")),
    ),
    "AF512": (
        on(V2, replace(LOW, quant_method="gptq"), "--lr 1"),
        on(V2, replace(LOW, quant_method="gptq"), "--use_peft"),
    ),
    "AF616": (
        subject(V1 + SHARDED, "--resume_from_checkpoint true"),
        subject(V2 + SHARDED, "--resume_from_checkpoint true"),
    ),
    "AF513": (on(V2, replace(LLAMA, embeddings="shared")), on(V1, replace(LLAMA, embeddings="shared"))),
    "AF514": (on(V2, replace(LLAMA, embedding_parents=frozenset({"LlamaDecoderLayer"}))), on(V2, LLAMA)),
    "AF515": (on(V1, replace(LLAMA, scalars=True)), on(V2, replace(LLAMA, scalars=True))),
    "AF617": (subject(V2, "--gradient_checkpointing"), subject(V2, "--gradient_checkpointing --use_peft")),
    "AF618": (
        subject(V2, '--fsdp_config={"cpu_offload":true}'),
        subject(V2 + OFFLOAD, '--fsdp_config={"cpu_offload":true}'),
    ),
    "AF619": (
        subject(V2, '--fsdp_config={"offload_params":true}'),
        subject(V2, '--fsdp_config={"fsdp_version":2} --fsdp true'),
    ),
    "AF622": (on(V2, TIED, "--modules_to_save lm_head"), on(V2, TIED, "--modules_to_save embed_tokens")),
    "AF624": (on(V2 + FULL, BIG, "--lr 1"), on(V2 + FULL, BIG, "--ddp_timeout 7200")),
    "AF625": (on(V2, LLAMA, "--gradient_accumulation_steps 4"), on(V2, LLAMA, NO_SYNC)),
    "AF626": (on(BF16, LOW, "--dtype float32"), on(BF16, LOW, "--dtype bfloat16")),
    "AF628": (subject(V2, "--device_map auto"), subject(V2, "--device_map cpu")),
    "AF629": (subject(V2, "--target_parameters mlp.experts.down_proj"), subject(V2, "--target_modules q_proj")),
    "AF636": (
        versions(BF16, "--max_steps 3", transformers="5.23.0"),
        versions(BF16, "--max_steps 3", transformers="5.22.2"),
    ),
    "AF702": (versions(SAGEMAKER, accelerate="1.15.0"), versions(SAGEMAKER, accelerate="1.9.0")),
    "AF329": (ours(DDP + TP), ours(V2 + TP)),
    "AF333": (
        ours(V2 + "  fsdp_reshard_after_forward: false\n" + TP),
        ours(V2 + "  fsdp_reshard_after_forward: true\n" + TP),
    ),
    "AF330": (ours(V2, f"{EXPERTS} 3"), ours(V2, f"{EXPERTS} 2")),
    "AF331": (ours(ON_EIGHT.replace("tp_size: 2", "tp_size: 8") + TWO), ours(ON_EIGHT + TWO)),
    "AF332": (
        subject(ON_EIGHT.replace("tp_size: 2", "dp_replicate_size: 4")),
        subject(ON_EIGHT.replace("tp_size: 2", "dp_replicate_size: 2") + TWO),
    ),
    "AF516": (ours(V2 + TP, model=replace(HEADS, kv_heads=3)), ours(V2 + TP, model=HEADS)),
    "AF517": (ours(V2 + TP, model=replace(HEADS, tensor_plan=False)), ours(V2 + TP, model=LLAMA)),
    "AF518": (
        ours(ON_EIGHT, model=replace(HEADS, tied_rows=50257)),
        ours(ON_EIGHT, model=replace(HEADS, tied_rows=50256)),
    ),
    "AF519": (ours(V2 + TP, "train/sft.py --load_in_4bit"), ours(V2, "train/sft.py --load_in_4bit")),
    "AF520": (
        on(V2, replace(LLAMA, fused_experts=10**9), "--load_in_4bit"),
        on(V2, replace(LLAMA, fused_experts=10**9), "--use_peft"),
    ),
    "AF637": (subject(V2 + CP, "--packing"), subject(V2 + CP, "--max_length 4096")),
    "AF703": (versions(V2 + TP, transformers="5.17.0"), versions(V2 + TP, transformers="5.16.0")),
    "AF704": (
        versions(DDP, "--use_peft", transformers="5.18.0", script=SHARDED_LOAD),
        versions(DDP, "--use_peft", transformers="5.19.0", script=SHARDED_LOAD),
    ),
    "AF916": (subject(V2, script=SHARDED_LOAD), subject(DDP, script=SHARDED_LOAD)),
    "AF917": (
        subject(DDP, "--gradient_accumulation_steps 3", model=QK_NORMS, script=SHARDED_LOAD),
        subject(DDP, "--gradient_accumulation_steps 1", model=QK_NORMS, script=SHARDED_LOAD),
    ),
    "AF701": (versions(V2, accelerate="1.14.1"), versions(V1, accelerate="1.14.1")),
    "AF801": (folder(V2 + FULL, SHARDED_CHECKPOINT), folder(V2, SHARDED_CHECKPOINT)),
    "AF802": (folder(V2, SHARDED_CHECKPOINT, scheduler=False), folder(V2, SHARDED_CHECKPOINT)),
    "AF803": (folder(V2, SHARDED_CHECKPOINT, without_metadata=("optimizer_0",)), folder(V2, SHARDED_CHECKPOINT)),
    "AF804": (folder(V2, SHARDED_CHECKPOINT, rng_states=4), folder(V2, SHARDED_CHECKPOINT)),
    "AF805": (folder(V2, EXPORT, adapter_tensors=0), folder(V2, EXPORT, adapter_tensors=2)),
    "AF806": (folder(V2, EXPORT, empty_tensor="lm_head.weight"), folder(V2, EXPORT)),
    "AF807": (folder(V2, EXPORT, trainer_state=True), folder(V2, EXPORT)),
    "AF808": (folder(V2, EXPORT, cache_off=True), folder(V2, FULL_CHECKPOINT, cache_off=True)),
    "AF809": (folder(V2, EXPORT, tied_twice=True), folder(V2, EXPORT)),
    "AF810": (
        folder(V2, EXPORT, architecture="FSDPLlamaForCausalLM"),
        folder(V2, EXPORT, architecture="LlamaForCausalLM"),
    ),
    "AF812": (folder(V2, EXPORT, hub=False), folder(V2, EXPORT)),
    "AF813": (folder(V2, EXPORT, private="model.safetensors"), folder(V2, EXPORT)),
}


@pytest.mark.parametrize("code", sorted(FACTS))
def test_rule_on_facts(code: str) -> None:
    bad, good = FACTS[code]
    assert code in codes_of(bad)
    assert code not in codes_of(good)


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("AF409", subject(V2 + MESH, "--use_fsdp", starter="accelerate")),
        ("AF411", subject(V2 + "machine_rank: 1\n")),
        ("AF503", on(UNNAMED, replace(LLAMA, declared_classes=()))),
        ("AF608", subject(V2 + FULL, "--save_only_model --load_best_model_at_end")),
        ("AF611", on(V1, replace(LOW, quantized=8))),
        ("AF613", on(V2, LOW, "--lr 1")),
        ("AF616", folder(V1 + SHARDED, SHARDED_CHECKPOINT)),
        ("AF329", ours(V2 + TP.replace("dp_shard_size: 4", "cp_size: 2"))),
        ("AF329", ours(V2 + TP + "mixed_precision: fp16\n", "train/sft.py --lr 1")),
        ("AF329", ours(V2 + TP, "train/sft.py --use_liger_kernel")),
        ("AF333", ours(V2 + "  fsdp_ignored_modules: .*norm\n", f"{EXPERTS} 2")),
        ("AF610", ours(V2, f"{EXPERTS} 2 --use_peft --use_dora")),
        ("AF316", ours(V2 + TP.replace("4", "'4'").replace("tp_size: 2", "tp_size: '3'"))),
        ("AF516", ours(V2, f"{EXPERTS} 2", model=replace(HEADS, experts=5))),
        ("AF516", subject(V2 + TP, model=replace(HEADS, heads=9))),
        ("AF517", ours(V2, f"{EXPERTS} 2", model=replace(HEADS, expert_plan=False))),
        ("AF519", ours(V2, f"{EXPERTS} 2 --load_in_4bit")),
        ("AF519", ours(V2 + TP, "train/sft.py --use_peft")),
        ("AF637", subject(V2 + CP, "--attn_implementation flash_attention_2")),
        ("AF637", subject(V2 + CP, "--max_length 1022")),
        ("AF619", subject(V2, "--fsdp_config f.json")),
        ("AF619", subject(V2, '--fsdp_config={"auto_wrap_policy":"SIZE_BASED_WRAP"}')),
        ("AF622", on(V2, TIED, "--trainable_token_indices 1,2")),
        ("AF812", subject(V2, checkpoint=CheckpointFacts("run/empty"))),
        ("AF813", subject(V2, here=EIGHT, versions={"safetensors": "0.8.0"})),
    ],
)
def test_what_else_a_rule_sees(code: str, bad: Subject) -> None:
    assert code in codes_of(bad)


OUR_LINE = "# Launch:\n#   accelerate launch --config_file THIS_FILE train/sft.py --expert_parallel_size 3"


def read(path: Path, text: str, args: str = "") -> Subject:
    """The rules' input of a file, with the command line of an `--args` file."""
    path.write_text(text)
    (line := path.with_suffix(".line")).write_text(args)
    return read_subject(path, Sources(args=line if args else None))[0]


def test_train_sft_takes_the_road_that_splits_layers(tmp_path: Path) -> None:
    """AF703 and Accelerate's conditions in AF316 are about other scripts; a launch line in the file counts as well."""
    alone = "parallelism_config: {parallelism_config_tp_size: 2}\n"
    of_accelerate, installed = {"AF316", "AF703"}, {"transformers": "5.23.0"}
    assert of_accelerate <= codes_of(subject(V2 + alone, versions=installed))
    assert not of_accelerate & codes_of(ours(V2 + alone, versions=installed))
    file, text = tmp_path / "a.yaml", f"{OUR_LINE}\n{V2}{alone}"
    launched = replace(read(file, text), versions=installed)
    assert not of_accelerate & codes_of(launched)
    assert "AF330" in codes_of(launched)
    assert of_accelerate <= codes_of(replace(read(file, text, "other.py --lr 1"), versions=installed))
    assert "AF316" in codes_of(ours(V2 + alone.replace("2", "3")))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--model_name_or_path openai/gpt-oss-20b", "AF517"),
        ("--model_name_or_path Qwen/Qwen3-30B-A3B --use_peft --lora_target_modules q_proj down_proj", "AF519"),
        ("--load_in_4bit", "AF519"),
        ("--eval_strategy steps --load_best_model_at_end --eval_steps 3 --save_steps 5", ""),
    ],
)
def test_the_launch_line_of_a_file_is_read_as_arguments(words: str, code: str, tmp_path: Path) -> None:
    """Those that are given, or a script, replace it."""
    line, file = OUR_LINE.replace("3", f"2 {words}"), tmp_path / "a.yaml"
    text = V2 + TP if code == "AF517" else V2
    written, given = read(file, f"{line}\n{text}"), read(file, text, line.partition("#   ")[2])
    assert replace(written, source="") == replace(given, source="")
    assert not code or code in codes_of(written)
    assert code not in codes_of(read(file, f"{line}\n{text}", "other.py --lr 1"))
    script_file = tmp_path / "own.py"
    script_file.write_text("import torch\n")
    assert read_subject(file, Sources(script=script_file))[0].args is None
    assert read(file, f"# Launch:\n# it's train/sft.py\n{text}").args is None


FOUR = V2.replace("num_processes: 2", "num_processes: 4")
ON_FOUR = FOUR + TP.replace("dp_shard_size: 4", "dp_shard_size: 2")
WHOLE = "parallelism_config_tp_size: 1 and parallelism_config_dp_shard_size: 4"


@pytest.mark.parametrize(
    ("bad", "code", "fix"),
    [
        (ours(ON_FOUR, "train/sft.py --use_peft"), "AF519", f"{WHOLE}; or full training"),
        (ours(ON_FOUR, "train/sft.py --load_in_4bit"), "AF519", "full training, without --load_in_4bit"),
        (ours(FOUR, f"{EXPERTS} 2 --load_in_4bit"), "AF519", "LoRA, without --load_in_4bit"),
        (
            ours(ON_FOUR, model=replace(HEADS, packed=True), versions={"torch": "2.11.0"}),
            *("AF519", "pip install 'torch>=2.13'"),
        ),
        (ours(ON_FOUR, model=replace(HEADS, tensor_plan=False)), "AF517", WHOLE),
        (ours(ON_FOUR, model=replace(HEADS, heads=3)), "AF516", WHOLE),
        (
            ours(ON_FOUR.replace("shard_size: 2", "shard_size: 1").replace("tp_size: 2", "tp_size: 4"), model=HEADS),
            "AF516",
            "parallelism_config_tp_size: 2 and parallelism_config_dp_shard_size: 2",
        ),
        (ours(FOUR, f"{EXPERTS} 3"), "AF330", f"{EXPERTS[13:]} 2 or 4"),
        (ours(FOUR, f"{EXPERTS} 3", model=replace(HEADS, experts=6)), "AF330", f"{EXPERTS[13:]} 2"),
        (ours(FOUR, f"{EXPERTS} 3", model=replace(HEADS, experts=5)), "AF330", f"leave out {EXPERTS[13:]}"),
        (ours(FOUR, f"{EXPERTS} 4", model=replace(HEADS, experts=6)), "AF516", f"{EXPERTS[13:]} 2"),
        (ours(DDP + TP), "AF329", "distributed_type: FSDP with fsdp_version: 2"),
    ],
)
def test_the_fix_of_an_axis_leads_to_a_mesh_that_works(bad: Subject, code: str, fix: str) -> None:
    fixes = [finding.fix for finding in run(bad) if finding.code == code]
    assert [text for text in fixes if text.startswith(fix)], fixes


@pytest.mark.parametrize(
    ("bad", "code", "key", "fix"),
    [
        (subject(V2 + "machine_rank: 1\n"), "AF411", "machine_rank", "or machine_rank: 0"),
        (
            subject(V2 + FULL, "--save_only_model --load_best_model_at_end"),
            *("AF608", "distributed_type", "drop --save_only_model"),
        ),
        (on(V1, replace(LOW, quantized=8)), "AF611", "distributed_type", "the model's 16-bit original"),
    ],
)
def test_the_fix_of_another_case_of_a_rule(bad: Subject, code: str, key: str, fix: str) -> None:
    """A machine may be the only one, a state dict type isn't at fault, and 8-bit weights can't be loaded in 4 bits."""
    (finding,) = (finding for finding in run(bad) if finding.code == code)
    assert finding.key == key
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("text", "args", "fires"),
    [
        (V2, "--modules_to_save lm_head,embed_tokens", True),
        (V2, "--target_modules q_proj,lm_head", True),
        (V2, "--target_modules q_proj,embed_tokens", False),
        (READ_BY_ALL, "--modules_to_save embed_tokens", True),
        (READ_BY_ALL, "--modules_to_save lm_head", True),
        (READ_BY_ALL, "--target_modules q_proj,lm_head", False),
        (V1, "--modules_to_save lm_head,embed_tokens", False),
    ],
)
def test_which_adapters_on_a_tied_weight_stop(text: str, args: str, fires: bool) -> None:
    """As `test_adapters_on_tied_embeddings_fail_under_fsdp2` sees them end."""
    assert ("AF622" in codes_of(on(text, TIED, args))) == fires
    assert "AF622" not in codes_of(on(text, LLAMA, args))


MENDED = {"AF421", "AF616", "AF801"}


@pytest.mark.parametrize("code", sorted(MENDED))
def test_rule_is_silent_where_the_script_is_ours(code: str) -> None:
    assert code not in codes_of(replace(FACTS[code][0], uses_sft=True))


BY_FILE_ALONE = {"AF331", "AF332", "AF320", "AF321", "AF322", "AF702"}


@pytest.mark.parametrize("code", sorted(set(FACTS) - BY_FILE_ALONE))
def test_rule_is_silent_without_the_facts(code: str) -> None:
    bad = FACTS[code][0]
    assert code not in codes_of(Subject(bad.values, versions={"accelerate": "1.15.0"}))


@pytest.mark.parametrize(
    ("gpus", "visible", "usable"),
    [
        (8, None, 8),
        (8, "", 0),
        (8, "0,1", 2),
        (8, "-1", 0),
        (8, "1,1", 0),
        (2, "0,7,1", 1),
        (8, "GPU-a,GPU-b", 2),
        (None, "0", None),
    ],
)
def test_gpus_that_a_process_sees(gpus: int | None, visible: str | None, usable: int | None) -> None:
    """As CUDA reads the variable: the first bad entry ends the list."""
    assert HereFacts(gpus=gpus, visible=visible).usable_gpus == usable


def test_a_gather_is_judged_as_a_run_judges_it() -> None:
    """The rule asks for the headroom over float32 weights that the run's own check will ask for."""
    weights = BIG.parameters * 4
    for memory, short in ((round(weights * 1.09), True), (round(weights * 1.11), False)):
        host = replace(EIGHT, memory=memory)
        assert ("AF428" in codes_of(on(V2 + FULL, BIG, "--lr 1", here=host))) == short
        assert (state_bytes.gathering_bytes(weights) > memory) == short


@pytest.mark.parametrize("flag", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("name", "code"), [("bf16", "AF613"), ("torch.bfloat16", "AF613"), ("fp32", "AF626"), ("torch.float32", "AF626")]
)
def test_a_dtype_may_be_spelt_in_several_ways(flag: str, name: str, code: str) -> None:
    assert {"AF613", "AF626"} & codes_of(on(V2, LOW, f"--{flag} {name}")) == {code}


@pytest.mark.parametrize(
    ("text", "args", "each"),
    [
        (V2, "--lr 1", 4),
        (V2, "--dtype auto", 4),
        (V2, "--dtype bfloat16", 2),
        (V2, "--torch_dtype torch.float16", 2),
        (V2, "--dtype float32", 4),
        (BF16, "--dtype bfloat16", 4),
        (V2, "--dtype bfloat16 --bf16", 4),
        (V2.replace("'no'", "fp8"), "--dtype bfloat16", 4),
    ],
)
def test_the_dtype_that_is_trained_in_decides_what_there_is_room_for(text: str, args: str, each: int) -> None:
    """A little less than the weights in that dtype take is too little, a little more is enough."""
    weights = BIG.parameters * each
    tight = {
        "AF427": (text + OFFLOAD, {"memory": 4 * weights}),
        "AF428": (text + FULL, {"memory": round(1.1 * weights)}),
        "AF429": (text + SHARDED, {"free_disk": 3 * weights * 2}),
    }
    for code, (yaml, facts) in tight.items():
        for more, short in ((-0.01, True), (0.01, False)):
            host = replace(EIGHT, memory=10**15, free_disk=10**15)
            host = replace(host, **{name: round(size * (1 + more)) for name, size in facts.items()})
            assert (code in codes_of(on(yaml, BIG, args, here=host))) == short, (code, more)
    seconds = 4 * weights // 500_000_000
    for limit, short in ((seconds - 1, True), (seconds + 1, False)):
        assert ("AF624" in codes_of(on(text + FULL, BIG, f"{args} --ddp_timeout {limit}"))) == short


@pytest.mark.parametrize(
    ("optim", "kept"),
    [("adamw_torch", 8), ("adamw_torch_8bit", 2), ("sgd", 0), ("rmsprop", 4), ("ademamix", 12), ("adafactor", 0)],
)
def test_the_optimizer_decides_how_large_a_checkpoint_is(optim: str, kept: int) -> None:
    """Its state beside the weights, of which a gathered checkpoint has two."""
    args = f"--optim {optim} --save_total_limit 1"
    for more, short in ((-1, True), (1, False)):
        host = replace(EIGHT, memory=10**15, free_disk=BIG.parameters * (4 + kept) * 2 + more)
        assert ("AF429" in codes_of(on(V2 + SHARDED, BIG, args, here=host))) == short
        limit = BIG.parameters * (8 + kept) // 500_000_000 + more
        assert ("AF624" in codes_of(on(V2 + FULL, BIG, f"{args} --ddp_timeout {limit}"))) == short


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=6), st.sampled_from(["true", "{", '{"a": 1}', "[1]"])
)
NAMES = st.sampled_from([
    "fsdp", "fsdp_config", "dtype", "optim", "output_dir", "save_total_limit", "ddp_timeout", "modules_to_save",
    "gradient_accumulation_steps", "resume_from_checkpoint", "device_map", "bf16", "target_parameters",
])  # fmt: skip


@settings(max_examples=300)
@given(args=st.dictionaries(NAMES, st.one_of(VALUES, st.dictionaries(st.text(max_size=4), VALUES), st.lists(VALUES))))
def test_odd_arguments_break_no_rule(args: dict[str, Any]) -> None:
    """Whatever stands in the arguments, on whatever engine, rules answer and don't raise."""
    for text in (V1, V2 + "gpu_ids: [a]\nmain_process_port: x\n", "distributed_type: XLA\nfp8_config: 3\n"):
        codes = codes_of(replace(subject(text, model=BIG, here=EIGHT, checkpoint=EXPORT), args=args))
        assert codes <= set(RULES)
