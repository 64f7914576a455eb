"""Rules about arguments, model and versions: facts that trigger each and facts that don't."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checking import DDP, LLAMA, MESH, TOP, V1, V2, codes_of, subject
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp.checkpoints import store
from accel_fsdp.errors import UserError
from accel_fsdp.linter import Sources, read_subject
from accel_fsdp.linter.rules import RULES, Subject, run

BF16 = V2.replace("'no'", "bf16")
BF16_1 = V1.replace("'no'", "bf16")
FULL = "  fsdp_state_dict_type: FULL_STATE_DICT\n"
SHARDED = "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
OFFLOAD = "  fsdp_offload_params: true\n"
UNNAMED = TOP + "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
TP = "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2}\n"
FP8 = V2.replace("'no'", "fp8") + "fp8_config: {fp8_backend: AO}\n"
DS_FILE = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
TWO = "num_machines: 2\nmain_process_ip: a\n"
BILLION = 10**9
BIG = replace(LLAMA, parameters=70 * BILLION, dtype="bfloat16")
LOW = replace(LLAMA, dtype="bfloat16")
TIED = replace(LLAMA, tied=True)
READ_BY_ALL = V2 + "  fsdp_cpu_ram_efficient_loading: false\n"


def on(text: str, model: Any, args: str = "", **more: Any) -> Subject:
    return subject(text, args, model=model, **more)


def versions(text: str, args: str = "", model: Any = None, **installed: str) -> Subject:
    return subject(text, args, model=model, versions=installed)


EXPERTS = "train/sft.py --expert_parallel_size"
ON_EIGHT = (V2 + TP).replace("num_processes: 2", "num_processes: 8")
CP = "parallelism_config: {parallelism_config_cp_size: 2}\n"
HEADS = replace(LLAMA, heads=8, kv_heads=2, experts=8, tensor_plan=True, expert_plan=True)


def ours(text: str, args: str = "", model: Any = None, **more: Any) -> Subject:
    return subject(text, args or "train/sft.py --bf16", model=model, uses_sft=True, **more)


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
    "AF408": (subject(V2, "--bf16", starter="torchrun"), subject(V2, "--bf16", starter="accelerate")),
    "AF409": (subject(V2, starter="accelerate", launcher={"multi_gpu": True}), subject(V2, starter="accelerate")),
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
    "AF619": (
        subject(V2, '--fsdp_config={"offload_params":true}'),
        subject(V2, '--fsdp_config={"fsdp_version":2} --fsdp true'),
    ),
    "AF622": (on(V2, TIED, "--modules_to_save lm_head"), on(V2, TIED, "--modules_to_save embed_tokens")),
    "AF628": (subject(V2, "--device_map auto"), subject(V2, "--device_map cpu")),
    "AF640": (ours(V2, "--max_lenght 9000"), ours(V2, "--max_length 9000")),
    "AF329": (ours(DDP + TP), ours(V2 + TP)),
    "AF333": (
        ours(V2 + "  fsdp_reshard_after_forward: false\n" + TP),
        ours(V2 + "  fsdp_reshard_after_forward: true\n" + TP),
    ),
    "AF330": (ours(V2, f"{EXPERTS} 3"), ours(V2, f"{EXPERTS} 2")),
    "AF516": (ours(V2 + TP, model=replace(HEADS, kv_heads=3)), ours(V2 + TP, model=HEADS)),
    "AF517": (ours(V2 + TP, model=replace(HEADS, tensor_plan=False)), ours(V2 + TP, model=LLAMA)),
    "AF518": (
        ours(ON_EIGHT, model=replace(HEADS, tied_rows=50257)),
        ours(ON_EIGHT, model=replace(HEADS, tied_rows=50256)),
    ),
    "AF519": (ours(V2 + TP, "train/sft.py --load_in_4bit"), ours(V2, "train/sft.py --load_in_4bit")),
    "AF637": (subject(V2 + CP, "--packing"), subject(V2 + CP, "--max_length 4096")),
    "AF701": (versions(V2, accelerate="1.14.1"), versions(V1, accelerate="1.14.1")),
}


@pytest.mark.parametrize("code", sorted(FACTS))
def test_rule_on_facts(code: str) -> None:
    bad, good = FACTS[code]
    assert code in codes_of(bad)
    assert code not in codes_of(good)


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("AF409", subject(V2 + MESH, starter="accelerate", launcher={"use_fsdp": True})),
        ("AF411", subject(V2 + "machine_rank: 1\n")),
        ("AF503", on(UNNAMED, replace(LLAMA, declared_classes=()))),
        ("AF608", subject(V2 + FULL, "--save_only_model --load_best_model_at_end")),
        ("AF611", on(V1, replace(LOW, quantized=8))),
        ("AF613", on(V2, LOW, "--lr 1")),
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
    """Accelerate's conditions in AF316 are about other scripts; a launch line in the file counts as well."""
    alone = "parallelism_config: {parallelism_config_tp_size: 2}\n"
    assert "AF316" in codes_of(subject(V2 + alone))
    assert "AF316" not in codes_of(ours(V2 + alone))
    file, text = tmp_path / "a.yaml", f"{OUR_LINE}\n{V2}{alone}"
    launched = read(file, text)
    assert "AF316" not in codes_of(launched)
    assert "AF330" in codes_of(launched)
    assert "AF316" in codes_of(read(file, text, "other.py --lr 1"))
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


def test_a_store_refuses_a_password() -> None:
    """AF638: when train/sft.py opens it."""
    with pytest.raises(UserError, match="holds a password or a signature"):
        store.Store("s3://id:key@bucket/run")


def test_rule_is_silent_where_the_script_is_ours() -> None:
    assert "AF616" not in codes_of(replace(FACTS["AF616"][0], uses_sft=True))


BY_FILE_ALONE = {"AF320", "AF321"}


@pytest.mark.parametrize("code", sorted(set(FACTS) - BY_FILE_ALONE))
def test_rule_is_silent_without_the_facts(code: str) -> None:
    bad = FACTS[code][0]
    assert code not in codes_of(Subject(bad.values, versions={"accelerate": "1.15.0"}))


@pytest.mark.parametrize("flag", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("name", "low"), [("bf16", True), ("torch.bfloat16", True), ("fp32", False), ("torch.float32", False)]
)
def test_a_dtype_may_be_spelt_in_several_ways(flag: str, name: str, low: bool) -> None:
    assert ("AF613" in codes_of(on(V2, LOW, f"--{flag} {name}"))) == low


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
        codes = codes_of(replace(subject(text, model=BIG), args=args))
        assert codes <= set(RULES)
