"""The rules of `accel-fsdp check`: for each a case that it finds and one that it doesn't, by file, arguments and facts.

What Accelerate stops at stands in `test_check_values.py`, where Accelerate itself confirms both.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from checking import DDP, DS, LLAMA, MESH, SIZE, TOP, V1, V2, codes_of, script, subject
from conftest import SFT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from known_issues import PAINS, UNSEEN
from reference_docs import covered
from test_check_values import REFUSED, UNREAD

from accel_fsdp import linter
from accel_fsdp.checkpoints import store
from accel_fsdp.config import BY_NAME
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.linter.rules import RULES, Subject, run

ZERO3 = DS + "  zero_stage: 3\n  zero3_save_16bit_model: true\n"
HYBRID = V1 + "  fsdp_sharding_strategy: HYBRID_SHARD\n"
ADDRESS = "num_machines: 2\nmain_process_ip: "
RECOMPUTE = "  fsdp_activation_checkpointing: true\n"
FP8 = V2.replace("'no'", "fp8") + "fp8_config: {{fp8_backend: {}}}\n"
GOLDEN: dict[str, tuple[str, str]] = {
    "AF103": (V2 + "  fsdp_ofload_params: true\n", V2 + "  offload_params: true\n"),
    "AF104": (V1 + "  fsdp_backward_prefetch_policy: BACKWARD_PRE\n", V1 + "  fsdp_backward_prefetch: BACKWARD_PRE\n"),
    "AF107": (V2 + "rdzv_backend: c10d\n", V2 + "main_process_port: 29501\n"),
    "AF108": (V2 + "  offload_params: true\n  fsdp_offload_params: true\n", V2 + "  offload_params: true\n"),
    "AF206": (V2.replace("LlamaDecoderLayer", "[LlamaDecoderLayer]"), V2.replace("Layer\n", "Layer,Linear\n")),
    "AF209": (V2 + "debug: 'false'\n", V2 + "debug: false\n"),
    "AF210": (V2 + "  fsdp_ignored_modules: [a, b]\n", V2 + "  fsdp_ignored_modules: '.*mlp'\n"),
    "AF216": (ZERO3 + "  offload_param_device: nvme\n", ZERO3 + "  offload_param_device: cpu\n"),
    "AF302": (V1 + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n", V1 + "  fsdp_sharding_strategy: 2\n"),
    "AF303": (V2 + "  fsdp_sharding_strategy: 2\n", V2 + "  fsdp_reshard_after_forward: false\n"),
    "AF305": (V2 + "  fsdp_use_orig_params: true\n", V1 + "  fsdp_use_orig_params: true\n"),
    "AF306": (TOP + "fsdp_config: {fsdp_version: 2}\n", V2),
    "AF307": (SIZE.replace("version: 1", "version: 2"), SIZE),
    "AF308": (SIZE + "  fsdp_min_num_params: 0\n", SIZE + "  fsdp_min_num_params: 100\n"),
    "AF310": (V1 + "  fsdp_state_dict_type: LOCAL_STATE_DICT\n", V1 + "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"),
    "AF311": (V1 + "  fsdp_sync_module_states: false\n", V1 + "  fsdp_sync_module_states: true\n"),
    "AF312": (V2.replace("TRANSFORMER_BASED_WRAP", "NO_WRAP") + RECOMPUTE, V2 + RECOMPUTE),
    "AF317": (V1 + "  fsdp_use_orig_params: false\n", V1 + "  fsdp_use_orig_params: true\n"),
    "AF318": (V1.replace("'no'", "bf16"), V2.replace("'no'", "bf16")),
    "AF320": (V2.replace("FSDP", "XLA"), V2),
    "AF321": (FP8.format("AO"), FP8.format("TE")),
    "AF327": (DS + "  offload_param_device: cpu\n", ZERO3 + "  offload_param_device: cpu\n"),
    "AF328": (HYBRID + f"{ADDRESS}a\n", HYBRID.replace("es: 2", "es: 4") + f"{ADDRESS}a\n"),
    "AF402": (V2 + "num_machines: 3\nmain_process_ip: a\n", V2 + f"{ADDRESS}a\n"),
    "AF403": (V2 + "num_machines: 2\n", V2 + f"{ADDRESS}a\n"),
    "AF406": (DS + "  zero_stage: 3\n", ZERO3),
    "AF407": (V2.replace("num_processes: 2", "num_processes: 0"), V2),
    "AF411": (V2 + f"{ADDRESS}a\nmachine_rank: 2\n", V2 + f"{ADDRESS}a\nmachine_rank: 1\n"),
    "AF415": (V2 + f"{ADDRESS}http://10.0.0.1\n", V2 + f"{ADDRESS}10.0.0.1\n"),
    "AF416": (V2 + "gpu_ids: '0,0'\n", V2 + "gpu_ids: '0,1'\n"),
}

BF16, BF16_1 = V2.replace("'no'", "bf16"), V1.replace("'no'", "bf16")
LAYER = "LlamaDecoderLayer"
AC1, AC2 = V1 + RECOMPUTE, V2 + RECOMPUTE
RESUMED, FOUR_STEPS = "--resume_from_checkpoint true", "--gradient_accumulation_steps 4"
FULL = V2 + "  fsdp_state_dict_type: FULL_STATE_DICT\n"
OFFLOAD1 = V1 + "  fsdp_offload_params: true\n"
SHARDED1, SHARDED2 = (version + "  fsdp_state_dict_type: SHARDED_STATE_DICT\n" for version in (V1, V2))
UNNAMED = TOP + "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
EMBEDDING = V2.replace("Layer\n", "Layer,Embedding\n")
READ_BY_ALL = V2 + "  fsdp_cpu_ram_efficient_loading: false\n"
DS_FILE = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
TP = "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2}\n"
ALONE_TP = "parallelism_config: {parallelism_config_tp_size: 2}\n"
CP = V2 + "parallelism_config: {parallelism_config_cp_size: 2}\n"
EXPERTS = "train/sft.py --expert_parallel_size"
ON_EIGHT = (V2 + TP).replace("num_processes: 2", "num_processes: 8")
RESHARD = "  fsdp_reshard_after_forward: {}\n"
GATE = {"dtype": "bfloat16", "kept_bf16": "a.gate"}
APART = {"tied": True, "tied_apart": True}
HEADS = replace(LLAMA, heads=8, kv_heads=2, experts=8, tensor_plan=True, expert_plan=True)


def on(text: str, args: str = "", **facts: Any) -> Subject:
    """A file with a Llama of which these facts are others."""
    return subject(text, args, model=replace(LLAMA, **facts))


def ours(text: str, args: str = "", torch: str = "", **facts: Any) -> Subject:
    """A job of train/sft.py, with a model that can be divided if a fact of it is given."""
    model = replace(HEADS, **facts) if facts else None
    versions = {"torch": torch} if torch else {}
    return subject(text, args or "train/sft.py --bf16", model=model, versions=versions, uses_sft=True)


def of(lines: str) -> Subject:
    return subject(V2, script=script(lines))


FACTS: dict[str, tuple[Subject, Subject]] = {
    "AF217": (subject(DS_FILE, absent={"deepspeed_config_file": ""}), subject(DS_FILE)),
    "AF319": (on(EMBEDDING, tied=True), on(EMBEDDING)),
    "AF329": (ours(DDP + TP), ours(V2 + TP)),
    "AF330": (ours(V2, f"{EXPERTS} 3"), ours(V2, f"{EXPERTS} 2")),
    "AF333": (ours(V2 + RESHARD.format("false") + TP), ours(V2 + RESHARD.format("true") + TP)),
    "AF408": (subject(V2, "--bf16", starter="torchrun"), subject(V2, "--bf16", starter="accelerate")),
    "AF409": (subject(V2, starter="accelerate", launcher={"multi_gpu": True}), subject(V2, starter="accelerate")),
    "AF501": (on(V2.replace("LlamaDecoderLayer", "LlamaDecoderLyer")), on(V2)),
    "AF503": (on(UNNAMED, declared_classes=(LAYER, "VisionBlock")), on(UNNAMED, declared_classes=(LAYER,))),
    "AF505": (on(BF16_1, **GATE), on(BF16, **GATE)),
    "AF506": (on(V2, **APART), on(READ_BY_ALL, **APART)),
    "AF507": (on(V2, expert_classes=LLAMA.classes), on(V2, expert_classes=frozenset({"Expert"}))),
    "AF509": (on(BF16, quantized=4, quant_storage="uint8"), on(BF16, quantized=4, quant_storage="bfloat16")),
    "AF512": (on(V2, "--lr 1", quant_method="gptq"), on(V2, "--use_peft", quant_method="gptq")),
    "AF513": (on(V2, embeddings="shared"), on(V1, embeddings="shared")),
    "AF514": (on(V2, embedding_parents=LLAMA.classes), on(V2)),
    "AF515": (on(V1, scalars=True), on(V2, scalars=True)),
    "AF516": (ours(V2 + TP, kv_heads=3), ours(V2 + TP, kv_heads=2)),
    "AF517": (ours(V2 + TP, tensor_plan=False), ours(V2 + TP, heads=8)),
    "AF518": (ours(ON_EIGHT, tied_rows=50257), ours(ON_EIGHT, tied_rows=50256)),
    "AF519": (ours(V2 + TP, "train/sft.py --load_in_4bit"), ours(V2, "train/sft.py --load_in_4bit")),
    "AF601": (subject(AC2, "--use_peft"), subject(V2, "--use_peft")),
    "AF602": (subject(V1, "--use_peft"), subject(V2, "--use_peft")),
    "AF603": (subject(AC1, "--gradient_checkpointing"), subject(AC1, "--gradient_checkpointing false")),
    "AF604": (subject(V2, "--optim adafactor"), subject(V2, "--optim adamw_torch_8bit")),
    "AF605": (subject(V1, "--optim adamw_torch_8bit"), subject(V2, "--optim adamw_torch_8bit")),
    "AF606": (subject(V2, "--bf16"), subject(BF16, "--bf16 true")),
    "AF607": (subject(V2, "--fsdp full_shard"), subject(V2, "--max_steps 3")),
    "AF608": (subject(V2, "--save_only_model"), subject(FULL, "--save_only_model")),
    "AF609": (subject(V1, "--predict_with_generate"), subject(V2, "--predict_with_generate")),
    "AF610": (subject(V1, "--use_peft --use_dora"), subject(V2, "--use_peft --use_dora")),
    "AF611": (subject(V1, "--load_in_8bit"), subject(V1, "--load_in_8bit no")),
    "AF612": (subject(V2, "--load_in_4bit"), subject(V2, "--load_in_4bit --bnb_4bit_quant_storage float32")),
    "AF613": (subject(V2, "--dtype bfloat16"), subject(BF16, "--dtype bfloat16")),
    "AF614": (subject(OFFLOAD1, f"{FOUR_STEPS} --accelerator_config sync_each_batch"), subject(OFFLOAD1, FOUR_STEPS)),
    "AF616": (subject(SHARDED1, RESUMED), subject(SHARDED2, RESUMED)),
    "AF619": (
        subject(V2, '--fsdp_config={"offload_params":true}'),
        subject(V2, '--fsdp_config={"fsdp_version":2} --fsdp true'),
    ),
    "AF622": (on(V2, "--modules_to_save lm_head", tied=True), on(V2, "--modules_to_save embed_tokens", tied=True)),
    "AF628": (subject(V2, "--device_map auto"), subject(V2, "--device_map cpu")),
    "AF630": (subject(V2, "--label_smoothing_factor 0.1"), subject(V2, "--label_smoothing_factor 0.1 --use_peft")),
    "AF637": (subject(CP, "--packing"), subject(CP, "--max_length 4096")),
    "AF638": (subject(V2, "--checkpoint_uri s3://id:key@bucket/run"), subject(V2, "--checkpoint_uri s3://bucket/run")),
    "AF640": (ours(V2, "--max_lenght 9000"), ours(V2, "--max_length 9000")),
    "AF701": (subject(V2, versions={"accelerate": "1.14.1"}), subject(V1, versions={"accelerate": "1.14.1"})),
    "AF901": (
        of("trainer.train()\ntrainer.save_model(out)\n"),
        of("plugin.set_state_dict_type('FULL_STATE_DICT')\ntrainer.save_model(out)\n"),
    ),
    "AF902": (
        of("accelerator.unwrap_model(model).save_pretrained(out)\n"),
        of("accelerator.unwrap_model(model).save_pretrained(out, state_dict=state)\ntokenizer.save_pretrained(out)\n"),
    ),
    "AF903": (
        of("if accelerator.is_main_process:\n    state = accelerator.get_state_dict(model)\n"),
        of("state = accelerator.get_state_dict(model)\nif accelerator.is_main_process:\n    trainer.save_state()\n"),
    ),
}
PAIRS = {**{code: (subject(bad), subject(good)) for code, (bad, good) in GOLDEN.items()}, **FACTS}
BAD = {code: text for code, text in REFUSED.values() if "FILE" not in text}
BAD |= {code: text for code, text, _ in UNREAD if code != "AF111"}  # a key that stands twice is not repaired
BAD |= {code: bad for code, (bad, _) in GOLDEN.items()}
"""A faulty file for each rule about the file alone."""


@pytest.mark.parametrize("code", sorted(PAIRS))
def test_rule(code: str) -> None:
    """It finds the one and not the other, nor the file without the facts, nor a script under another engine."""
    bad, good = PAIRS[code]
    assert code in codes_of(bad)
    assert code not in codes_of(good)
    if code in FACTS:
        assert code not in codes_of(Subject(bad.values, versions={"accelerate": "1.15.0"}))
    if bad.script:
        assert code not in codes_of(replace(bad, values={"distributed_type": "MULTI_GPU"}))


def test_every_rule_has_a_pair_and_a_case_that_was_seen() -> None:
    assert {*PAIRS, *(row[0] for row in (*UNREAD, *REFUSED.values()))} == set(RULES)
    ids = {f"P{number:02}" for number in range(1, 108)}
    assert [code for code, rule in RULES.items() if not set(rule.seen) - ids] == []
    of_rules = ids.intersection(word for rule in RULES.values() for word in rule.seen)
    assert set(PAINS) == covered().keys() == of_rules | set(UNSEEN) == ids
    assert len(of_rules) >= 60


SAVE = "    trainer.save_model()\n"
TWO_IDS = V2 + "gpu_ids: '3'\nuse_cpu: true\n"
ALSO: list[tuple[str, Subject]] = [
    ("AF314", subject(DS + "  zero_stage: 2\nfsdp_config: {fsdp_version: 2}\n")),
    ("AF316", ours(V2 + TP.replace("4", "'4'").replace("tp_size: 2", "tp_size: '3'"))),
    ("AF316", subject(V2 + ALONE_TP)),  # Accelerate's conditions, which train/sft.py does not have
    ("AF316", ours(V2 + ALONE_TP.replace("2", "3"))),
    ("AF329", ours(V2 + TP.replace("dp_shard_size: 4", "cp_size: 2"))),
    ("AF329", ours(V2 + TP + "mixed_precision: fp16\n", "train/sft.py --lr 1")),
    ("AF329", ours(V2 + TP, "train/sft.py --use_liger_kernel")),
    ("AF333", ours(V2 + "  fsdp_ignored_modules: .*norm\n", f"{EXPERTS} 2")),
    ("AF403", subject("num_machines: 2\n" + DS + "  zero_stage: 2\n  deepspeed_multinode_launcher: standard\n")),
    ("AF405", subject(TWO_IDS)),  # use_cpu does not reach the ranks, so they meet on one GPU all the same
    ("AF413", subject(TWO_IDS)),
    ("AF405", subject(TWO_IDS.replace("FSDP", "MULTI_GPU"))),
    ("AF413", subject(TWO_IDS.replace("FSDP", "MULTI_GPU"))),
    ("AF409", subject(V2 + MESH, starter="accelerate", launcher={"use_fsdp": True})),
    ("AF411", subject(V2 + "machine_rank: 1\n")),
    ("AF503", on(UNNAMED, declared_classes=())),
    ("AF516", ours(V2, f"{EXPERTS} 2", experts=5)),
    ("AF516", subject(V2 + TP, model=replace(HEADS, heads=9))),
    ("AF517", ours(V2, f"{EXPERTS} 2", expert_plan=False)),
    ("AF519", ours(V2, f"{EXPERTS} 2 --load_in_4bit")),
    ("AF519", ours(V2 + TP, "train/sft.py --use_peft")),
    ("AF608", subject(FULL, "--save_only_model --load_best_model_at_end")),
    ("AF610", ours(V2, f"{EXPERTS} 2 --use_peft --use_dora")),
    ("AF611", on(V1, quantized=8)),
    ("AF613", on(V2, "--lr 1", dtype="bfloat16")),
    *(("AF613", on(V2, f"--{flag} bf16", dtype="bfloat16")) for flag in ("dtype", "torch_dtype")),
    *(("AF613", on(V2, f"--{flag} torch.bfloat16", dtype="bfloat16")) for flag in ("dtype", "torch_dtype")),
    ("AF619", subject(V2, "--fsdp_config f.json")),
    ("AF619", subject(V2, '--fsdp_config={"auto_wrap_policy":"SIZE_BASED_WRAP"}')),
    # AF622: as `test_adapters_on_tied_embeddings_fail_under_fsdp2` sees them end.
    ("AF622", on(V2, "--modules_to_save lm_head,embed_tokens", tied=True)),
    ("AF622", on(V2, "--target_modules q_proj,lm_head", tied=True)),
    ("AF622", on(V2, "--trainable_token_indices 1,2", tied=True)),
    *(("AF622", on(READ_BY_ALL, f"--modules_to_save {name}", tied=True)) for name in ("embed_tokens", "lm_head")),
    ("AF637", subject(CP, "--attn_implementation flash_attention_2")),
    ("AF637", subject(CP, "--max_length 1022")),
    ("AF901", of("t = Trainer(m)\nt.train()\nt.save_model('x')\n")),
    ("AF901", of("self.t: T = SFTTrainer(m)\nself.t.save_model('x')\n")),
    ("AF901", of("Trainer(m).save_model('x')\n")),
    ("AF902", of("t = Trainer(m)\nt.model.save_pretrained('x')\n")),
    ("AF902", of("t = Trainer(m)\nmodel = t.model\nmodel.save_pretrained('x')\n")),
    ("AF903", of("if int(os.environ['RANK']) == 0:\n" + SAVE)),
    ("AF903", of("if os.environ.get('LOCAL_RANK', '0') == '0':\n" + SAVE)),
    ("AF903", of("if torch.distributed.get_rank() == 0:\n" + SAVE)),
    ("AF903", of("if rank == 0 and wanted:\n" + SAVE)),
    ("AF903", of("if accelerator.process_index == 0:\n" + SAVE)),
    ("AF903", of("if trainer.is_world_process_zero():\n" + SAVE)),
    ("AF903", of("if not accelerator.is_main_process:\n    pass\nelse:\n" + SAVE)),
    ("AF903", of("if rank != 0:\n    pass\nelse:\n" + SAVE)),
    ("AF903", of("if wanted:\n    pass\nelif rank == 0:\n" + SAVE)),
]
NOT: list[tuple[str, Subject]] = [
    ("AF314", subject(DS + "  zero_stage: 2\nfsdp_config: {}\n")),
    *(("AF314", subject(f"{DDP}{key}: {{a: 1}}\n")) for key in ("ddp_config", "fdsp_config")),
    ("AF316", ours(V2 + ALONE_TP)),
    ("AF318", subject(BF16_1.replace("version: 1", "version: 3"))),
    ("AF318", subject(BF16_1.replace("LlamaDecoderLayer", "FluxTransformerBlock"))),
    ("AF318", subject(BF16_1.replace("LlamaDecoderLayer", "BasicTransformerBlock,ResnetBlock2D"))),
    *(("AF613", on(V2, f"--{flag} fp32", dtype="bfloat16")) for flag in ("dtype", "torch_dtype")),
    *(("AF613", on(V2, f"--{flag} torch.float32", dtype="bfloat16")) for flag in ("dtype", "torch_dtype")),
    ("AF616", replace(FACTS["AF616"][0], uses_sft=True)),
    ("AF622", on(V2, "--target_modules q_proj,embed_tokens", tied=True)),
    ("AF622", on(READ_BY_ALL, "--target_modules q_proj,lm_head", tied=True)),
    ("AF622", on(V1, "--modules_to_save lm_head,embed_tokens", tied=True)),
    *(("AF622", on(V2, f"--{flag} lm_head")) for flag in ("modules_to_save", "target_modules")),
    ("AF901", of("t = Thing(m)\nt.train()\nt.save_model('x')\n")),
    ("AF901", of("Thing(m).save_model('x')\n")),
    ("AF902", of("t = Thing(m)\nt.model.save_pretrained('x')\n")),
    ("AF903", of("if not accelerator.is_main_process:\n" + SAVE)),
    ("AF903", of("if accelerator.is_main_process or True:\n" + SAVE)),
    ("AF903", of("if lora_rank == 0:\n" + SAVE)),
    ("AF903", of("if rank == 1:\n    pass\nelse:\n" + SAVE)),
    ("AF903", of("if rank == 0:\n    pass\nelse:\n    pass\ntrainer.save_model()\n")),
    ("AF903", of("if rank == 0:\n    save_model(state)\n    trainer.save_state()\n")),
    ("AF903", of("if step == 0:\n" + SAVE)),
]


@pytest.mark.parametrize(("code", "job"), ALSO)
def test_what_else_a_rule_sees(code: str, job: Subject) -> None:
    assert code in codes_of(job)


@pytest.mark.parametrize(("code", "job"), NOT)
def test_what_a_rule_leaves_alone(code: str, job: Subject) -> None:
    assert code not in codes_of(job)


@pytest.mark.parametrize("text", [V1, V2, AC2, SHARDED1])
def test_our_own_script_is_clean(text: str) -> None:
    assert not {code for code in codes_of(subject(text, script=script(SFT.read_text()))) if code.startswith("AF9")}


FOUR = V2.replace("num_processes: 2", "num_processes: 4")
ON_FOUR = FOUR + TP.replace("dp_shard_size: 4", "dp_shard_size: 2")
WHOLE = "parallelism_config_tp_size: 1 and parallelism_config_dp_shard_size: 4"
TWO_TWO = "parallelism_config_tp_size: 2 and parallelism_config_dp_shard_size: 2"
FOUR_TP = ON_FOUR.replace("shard_size: 2", "shard_size: 1").replace("tp_size: 2", "tp_size: 4")
PACKED = ours(ON_FOUR, packed=True, torch="2.11.0")


@pytest.mark.parametrize(
    ("bad", "code", "fix"),
    [
        (ours(ON_FOUR, "train/sft.py --use_peft"), "AF519", f"{WHOLE}; or full training"),
        (ours(ON_FOUR, "train/sft.py --load_in_4bit"), "AF519", "full training, without --load_in_4bit"),
        (ours(FOUR, f"{EXPERTS} 2 --load_in_4bit"), "AF519", "LoRA, without --load_in_4bit"),
        (PACKED, "AF519", "pip install 'torch>=2.13'"),
        (ours(ON_FOUR, tensor_plan=False), "AF517", WHOLE),
        (ours(ON_FOUR, heads=3), "AF516", WHOLE),
        (ours(FOUR_TP, heads=8), "AF516", TWO_TWO),
        (ours(FOUR, f"{EXPERTS} 3"), "AF330", f"{EXPERTS[13:]} 2 or 4"),
        (ours(FOUR, f"{EXPERTS} 3", experts=6), "AF330", f"{EXPERTS[13:]} 2"),
        (ours(FOUR, f"{EXPERTS} 3", experts=5), "AF330", f"leave out {EXPERTS[13:]}"),
        (ours(FOUR, f"{EXPERTS} 4", experts=6), "AF516", f"{EXPERTS[13:]} 2"),
        (ours(DDP + TP), "AF329", "distributed_type: FSDP with fsdp_version: 2"),
    ],
)
def test_the_fix_of_an_axis_leads_to_a_mesh_that_works(bad: Subject, code: str, fix: str) -> None:
    fixes = [finding.fix for finding in run(bad) if finding.code == code]
    assert [text for text in fixes if text.startswith(fix)], fixes


def test_a_store_refuses_a_password() -> None:
    """AF638: when train/sft.py opens it."""
    with pytest.raises(UserError, match="holds a password or a signature"):
        store.Store("s3://id:key@bucket/run")


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["no", "1e8", "FULL_SHARD", "FSDP", "2", "TRANSFORMER_BASED_WRAP", "²", "DEEPSPEED", "XLA"]),
    st.sampled_from(["{", '{"a": 1}', "[1]"]),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from([field.key for field in BY_NAME.values()]), st.text(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
NAMES = st.sampled_from([
    "fsdp", "fsdp_config", "dtype", "optim", "output_dir", "save_total_limit", "ddp_timeout", "modules_to_save",
    "gradient_accumulation_steps", "resume_from_checkpoint", "device_map", "bf16", "target_parameters",
])  # fmt: skip


@settings(max_examples=300)
@given(args=st.dictionaries(NAMES, VALUES))
def test_odd_arguments_break_no_rule(args: dict[str, Any]) -> None:
    """Whatever stands in the arguments, on whatever engine, rules answer and don't raise."""
    for text in (V1, V2 + "gpu_ids: [a]\nmain_process_port: x\n", "distributed_type: XLA\nfp8_config: 3\n"):
        codes = codes_of(
            replace(subject(text, model=replace(LLAMA, parameters=70 * 10**9, dtype="bfloat16")), args=args)
        )
        assert codes <= set(RULES)


DOCUMENTS = st.one_of(st.dictionaries(KEYS, VALUES, max_size=8).map(yaml.safe_dump), st.text(max_size=60))


@pytest.mark.slow
@settings(max_examples=200)
@given(text=DOCUMENTS)
@example(text='deepspeed_config:\n  deepspeed_moe_layer_cls_names:\n  - "\\e"\n')
@example(text="deepspeed_config:\n  deepspeed_moe_layer_cls_names:\n  - '{'\n")
def test_odd_documents_are_found_fault_with_and_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text, encoding="utf-8", errors="ignore", newline="")
    before = path.read_bytes()
    with contextlib.suppress(UsageError):  # exit code 2; anything else would be a traceback
        linter.lint(path, linter.LintOptions())
    assert path.read_bytes() == before
    with contextlib.suppress(UsageError):
        assert not any(
            finding.edits for finding in linter.lint(path, linter.LintOptions(fix=True)) if finding.code != "AF301"
        )
