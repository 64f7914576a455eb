"""`accel-fsdp check`: a file per rule that triggers it and one that doesn't, no false alarms, repairs, odd input."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import yaml
from checking import DDP, DS, LLAMA, MESH, SHARD, SIZE, TOP, V1, V2, WRAP, findings
from conftest import accel_fsdp, run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_config import answers

from accel_fsdp import cli, command_line, linter
from accel_fsdp.config import BY_NAME, yaml_file
from accel_fsdp.errors import UsageError
from accel_fsdp.linter import Sources, read_given
from accel_fsdp.linter.rules import RULES, Subject
from accel_fsdp.linter.rules import run as run_rules
from accel_fsdp.wizard import Answers, to_yaml

ZERO3 = DS + "  zero_stage: 3\n  zero3_save_16bit_model: true\n"
GOLDEN: dict[str, tuple[str, str]] = {
    "AF101": ("num_processes: 2\nfsdp_config: {fsdp_version: 2}\n", V2),
    "AF102": (V2 + "fdsp_config: {}\n", V2),
    "AF103": (V2 + "  fsdp_ofload_params: true\n", V2 + "  offload_params: true\n"),
    "AF104": (V1 + "  fsdp_backward_prefetch_policy: BACKWARD_PRE\n", V1 + "  fsdp_backward_prefetch: BACKWARD_PRE\n"),
    "AF105": (V2 + "parallelism_config: {dp_shard_size: 2}\n", V2 + MESH),
    "AF106": (TOP + "fsdp_config: FULL_SHARD\n", V2),
    "AF107": (V2 + "rdzv_backend: c10d\n", V2 + "main_process_port: 29501\n"),
    "AF108": (V2 + "  offload_params: true\n  fsdp_offload_params: true\n", V2 + "  offload_params: true\n"),
    "AF111": (V2 + "debug: false\ndebug: true\n", V2 + "debug: true\n"),
    "AF112": ("base_model: m\ndatasets: []\nfsdp_config: {fsdp_version: 2}\n", V2),
    "AF216": (ZERO3 + "  offload_param_device: nvme\n", ZERO3 + "  offload_param_device: cpu\n"),
    "AF326": (V2 + "fp8_config: {backend: TE}\n", V2.replace("'no'", "fp8") + "fp8_config: {backend: TE}\n"),
    "AF327": (DS + "  offload_param_device: cpu\n", ZERO3 + "  offload_param_device: cpu\n"),
    "AF328": (
        V1 + "  fsdp_sharding_strategy: HYBRID_SHARD\nnum_machines: 2\nmain_process_ip: a\n",
        V1.replace("es: 2", "es: 4") + "  fsdp_sharding_strategy: HYBRID_SHARD\nnum_machines: 2\nmain_process_ip: a\n",
    ),
    "AF415": (
        V2 + "num_machines: 2\nmain_process_ip: http://10.0.0.1\n", V2 + "num_machines: 2\nmain_process_ip: 10.0.0.1\n"
    ),
    "AF416": (V2 + "gpu_ids: '0,0'\n", V2 + "gpu_ids: '0,1'\n"),
    "AF208": ("distributed_type: NO\nnum_processes: 1\n", "distributed_type: 'NO'\nnum_processes: 1\n"),
    "AF209": (V2 + "debug: 'false'\n", V2 + "debug: false\n"),
    "AF210": (V2 + "  fsdp_ignored_modules: [a, b]\n", V2 + "  fsdp_ignored_modules: '.*mlp'\n"),
    "AF211": (V2 + "main_process_port: '29501'\n", V2 + "main_process_port: 29501\n"),
    "AF212": (V2 + "main_process_port: 99999\n", V2 + "main_process_port: 65535\n"),
    "AF213": (DS + "  gradient_clipping: none\n", DS + "  gradient_clipping: '1.0'\n"),
    "AF324": (
        DS + "  deepspeed_config_file: ds.json\n",
        DS.replace("mixed_precision: bf16\n", "") + "  deepspeed_config_file: ds.json\n",
    ),
    "AF411": (
        V2 + "num_machines: 2\nmain_process_ip: a\nmachine_rank: 2\n",
        V2 + "num_machines: 2\nmain_process_ip: a\nmachine_rank: 1\n",
    ),
    "AF413": (V2 + "gpu_ids: '3'\n", V2 + "gpu_ids: '3,4'\n"),
    "AF201": (V2.replace("'no'", "no"), V2),
    "AF202": (V2 + "  fsdp_offload_params:\n", V2 + "  fsdp_offload_params: false\n"),
    "AF203": (V2 + "  fsdp_state_dict_type: SHARDED\n", V2 + "  fsdp_state_dict_type: sharded_state_dict\n"),
    "AF204": (V2 + "  fsdp_offload_params: maybe\n", V2 + "  fsdp_offload_params: 'true'\n"),
    "AF205": (SIZE + "  fsdp_min_num_params: 1e8\n", SIZE + "  fsdp_min_num_params: 100\n"),
    "AF206": (V2.replace("LlamaDecoderLayer", "[LlamaDecoderLayer]"), V2.replace("Layer\n", "Layer,Linear\n")),
    "AF207": (DDP + "gpu_ids: 0\n", DDP + "gpu_ids: '0,1'\n"),
    "AF301": (TOP + "fsdp_config:\n" + WRAP, V1),
    "AF302": (V1 + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n", V1 + "  fsdp_sharding_strategy: 2\n"),
    "AF303": (V2 + "  fsdp_sharding_strategy: 2\n", V2 + "  fsdp_reshard_after_forward: false\n"),
    "AF304": (V2 + "  fsdp_reshard_after_forward: FULL_SHARD\n", V2 + "  fsdp_reshard_after_forward: true\n"),
    "AF305": (V2 + "  fsdp_use_orig_params: true\n", V1 + "  fsdp_use_orig_params: true\n"),
    "AF306": (TOP + "fsdp_config: {fsdp_version: 2}\n", V2),
    "AF307": (SIZE.replace("version: 1", "version: 2"), SIZE),
    "AF308": (SIZE + "  fsdp_min_num_params: 0\n", SIZE + "  fsdp_min_num_params: 100\n"),
    "AF309": (V2 + "  fsdp_state_dict_type: LOCAL_STATE_DICT\n", V2 + "  fsdp_state_dict_type: FULL_STATE_DICT\n"),
    "AF310": (V1 + "  fsdp_state_dict_type: LOCAL_STATE_DICT\n", V1 + "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"),
    "AF311": (V1 + "  fsdp_sync_module_states: false\n", V1 + "  fsdp_sync_module_states: true\n"),
    "AF312": (
        TOP + "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: NO_WRAP, fsdp_activation_checkpointing: true}\n",
        V2 + "  fsdp_activation_checkpointing: true\n",
    ),
    "AF313": (
        V2 + "  fsdp_activation_checkpointing_offload: true\n",
        V2 + "  fsdp_activation_checkpointing_offload: true\n  fsdp_activation_checkpointing: true\n",
    ),
    "AF314": (V2.replace("FSDP", "MULTI_GPU"), V2),
    "AF315": (V1 + MESH + SHARD.format(2), V2 + MESH + SHARD.format(2)),
    "AF316": (V2 + MESH + SHARD.format(4), V2 + MESH + SHARD.format(2)),
    "AF317": (V1 + "  fsdp_use_orig_params: false\n", V1 + "  fsdp_use_orig_params: true\n"),
    "AF318": (V1.replace("'no'", "bf16"), V2.replace("'no'", "bf16")),
    "AF401": (V2.replace("num_processes: 2\n", ""), V2),
    "AF402": (V2 + "num_machines: 3\nmain_process_ip: a\n", V2 + "num_machines: 2\nmain_process_ip: a\n"),
    "AF403": (V2 + "num_machines: 2\n", V2 + "num_machines: 2\nmain_process_ip: a\n"),
    "AF417": ("distributed_type: 'NO'\nnum_processes: 8\n", "distributed_type: 'NO'\nnum_processes: 1\n"),
    "AF407": (V2.replace("num_processes: 2", "num_processes: 0"), V2),
    "AF405": (DDP + "use_cpu: true\n", DDP.replace("GPU", "CPU") + "use_cpu: true\n"),
    "AF406": (DS + "  zero_stage: 3\n", DS + "  zero_stage: 3\n  zero3_save_16bit_model: true\n"),
    "AF501": (V2.replace("LlamaDecoderLayer", "LlamaDecoderLyer"), V2),
}  # fmt: skip

AC1, AC2 = (version + "  fsdp_activation_checkpointing: true\n" for version in (V1, V2))
GOLDEN_WITH_ARGS: dict[str, tuple[str, str, str, str]] = {
    "AF601": (AC2, "--use_peft", V2, "--use_peft"),
    "AF602": (V1, "--use_peft", V2, "--use_peft"),
    "AF603": (AC1, "--gradient_checkpointing", AC1, "--gradient_checkpointing false"),
    "AF604": (V2, "--optim adafactor", V2, "--optim adamw_torch_8bit"),
    "AF605": (V1, "--optim adamw_torch_8bit", V2, "--optim adamw_torch_8bit"),
    "AF606": (V2, "--bf16", V2.replace("'no'", "bf16"), "--bf16 true"),
    "AF607": (V2, "--fsdp full_shard", V2, "--max_steps 3"),
    "AF608": (V2, "--save_only_model", V2 + "  fsdp_state_dict_type: FULL_STATE_DICT\n", "--save_only_model"),
    "AF609": (V1, "--predict_with_generate", V2, "--predict_with_generate"),
    "AF610": (V1, "--use_peft --use_dora", V2, "--use_peft --use_dora"),
    "AF611": (V1, "--load_in_8bit", V1, "--load_in_8bit no"),
    "AF612": (V2, "--load_in_4bit", V2, "--load_in_4bit --bnb_4bit_quant_storage float32"),
    "AF613": (V2, "--dtype bfloat16", V2.replace("'no'", "bf16"), "--dtype bfloat16"),
    "AF614": (
        V1 + "  fsdp_offload_params: true\n",
        "--gradient_accumulation_steps 4 --accelerator_config sync_each_batch",
        V1 + "  fsdp_offload_params: true\n",
        "--gradient_accumulation_steps 4",
    ),
    "AF638": (V2, "--checkpoint_uri s3://id:key@bucket/run", V2, "--checkpoint_uri s3://bucket/run"),
    "AF630": (V2, "--label_smoothing_factor 0.1", V2, "--label_smoothing_factor 0.1 --use_peft"),
}


def codes(text: str, args: str = "") -> set[str]:
    """The codes found in a document, with a Llama as the model."""
    given = command_line.parse_command_line(args.split()) if args else None
    twice, versions = yaml_file.doubled_keys(text), {"accelerate": "1.15.0"}
    subject = Subject(yaml.safe_load(text), source=text, doubled=twice, args=given, model=LLAMA, versions=versions)
    return {finding.code for finding in run_rules(subject)}


@pytest.mark.parametrize("code", sorted(GOLDEN))
def test_rule_on_the_file_alone(code: str) -> None:
    bad, good = GOLDEN[code]
    assert code in codes(bad)
    assert code not in codes(good)


@pytest.mark.parametrize("code", sorted(GOLDEN_WITH_ARGS))
def test_rule_on_file_and_arguments(code: str) -> None:
    bad, bad_args, good, good_args = GOLDEN_WITH_ARGS[code]
    assert code in codes(bad, bad_args)
    assert code not in codes(good, good_args)
    assert code not in codes(bad)


@settings(max_examples=200)
@given(wanted=answers())
def test_what_the_wizard_writes_is_clean(wanted: Answers, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(to_yaml.to_text(wanted))
    severe = [f.code for f in linter.lint(path, linter.LintOptions()) if f.severity != "note"]
    one_unit = to_yaml.to_mapping(wanted).get("fsdp_config", {}).get("fsdp_auto_wrap_policy") == "NO_WRAP"
    assert severe == (["AF306"] if one_unit and (wanted.fsdp_version == 2 or wanted.strategy != 3) else [])
    assert yaml_file.dump(yaml_file.load(path)) == path.read_text()


@pytest.mark.parametrize("code", sorted(GOLDEN))
def test_a_repair_leaves_no_fixable_finding_and_keeps_comments(code: str, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    text = "# first\n" + GOLDEN[code][0].replace("distributed_type", "# mine\ndistributed_type")
    path.write_text(text)
    before = {finding.code for finding in linter.lint(path, linter.LintOptions()) if finding.edits}
    left = linter.lint(path, linter.LintOptions(fix=True))
    assert [finding.code for finding in left if finding.edits] == []
    assert path.read_text().startswith("# first\n")
    if not before:
        assert path.read_text() == text
    assert not before & {finding.code for finding in left}


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["no", "1e8", "FULL_SHARD", "FSDP", "2", "TRANSFORMER_BASED_WRAP", "²", "DEEPSPEED", "XLA"]),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from([field.key for field in BY_NAME.values()]), st.text(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
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


def test_command(tmp_path: Path) -> None:
    good, bad, args = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "args.sh"
    good.write_text(V2)
    bad.write_text(V2 + "  fsdp_use_orig_params: false\n")
    args.write_text("accelerate launch train.py \\\n  --optim adafactor\n")
    assert accel_fsdp("check", good).code == 0
    assert accel_fsdp("check", good, bad).code == 0
    assert accel_fsdp("check", good, bad, "--strict").code == 1
    with_args = accel_fsdp("check", good, "--args", args)
    assert with_args.code == 1
    assert "AF604" in with_args.output
    assert accel_fsdp("check", tmp_path / "none.yaml").code == 2
    assert accel_fsdp("check").code == 2
    listed = accel_fsdp("check", "--list-rules").output
    assert all(code in listed for code in RULES)
    assert "launcher always exports" in accel_fsdp("check", "--explain", "af302").output


def test_an_unreadable_file_hides_nothing(tmp_path: Path) -> None:
    bad, none = tmp_path / "bad.yaml", tmp_path / "none.yaml"
    bad.write_text(V2 + "  fsdp_ofload_params: true\n")
    finished = accel_fsdp("check", none, bad)
    assert finished.code == 2
    assert "AF103" in finished.output
    assert f"error: cannot read {none}" in finished.output
    listed = accel_fsdp("check", none, bad, "--json")
    assert listed.code == 2
    entries = json.loads(listed.output)
    assert [(entry["file"], entry["code"]) for entry in entries] == [(str(bad), "AF103"), (str(none), "unreadable")]
    assert entries[0].keys() == entries[1].keys()
    finished = accel_fsdp("check", bad, "--args", none, "--json")
    assert finished.code == 2
    assert [entry["code"] for entry in json.loads(finished.output)] == ["unreadable"]


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text(V2)
    finished = accel_fsdp("check", good, "--model", "nope/none")
    assert finished.code == 2
    assert "--layer-class" not in finished.output
    assert "error: cannot read the config of nope/none" in finished.output


@pytest.mark.parametrize("content", [None, b"just prose", b"", b"don't", b"\xff\xfe", b"- a\n- b\n"])
def test_what_holds_no_arguments(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "args"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_given(Sources(args=path))
    assert "Accelerate YAML" not in str(caught.value)
    assert "--args FILE, which holds" in caught.value.fix


def test_checking_imports_no_heavy_library(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(V2)
    code = (
        "import sys; from pathlib import Path; from accel_fsdp import linter\n"
        f"linter.lint_all(linter.CheckCommand(files=(Path({str(path)!r}),)))\n"
        "print([m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])"
    )
    assert run([sys.executable, "-c", code]).output.endswith("[]\n")


def test_arguments_come_in_three_forms(tmp_path: Path) -> None:
    texts = {
        "args.yaml": "optim: adafactor\nbf16: true\n",
        "args.json": '{"optim": "adafactor", "bf16": true}',
        "args.sh": "python train.py --optim=adafactor --bf16\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert read_given(Sources(args=tmp_path / name)).args == {"optim": "adafactor", "bf16": True}


def test_a_key_without_its_prefix_is_named_as_the_file_writes_it(tmp_path: Path) -> None:
    text = V2 + "  zzz: 1\n  ofload_params: true\n  fsdp_yyy: 1\n"
    unread = [finding for finding in findings(text, tmp_path) if finding.code == "AF103"]
    lines = [text.splitlines()[(finding.line or 0) - 1].strip() for finding in unread]
    assert [(line, finding.what, finding.fix) for line, finding in zip(lines, unread, strict=True)] == [
        ("zzz: 1", "nothing reads zzz.", "remove zzz"),
        (
            *("ofload_params: true", "nothing reads ofload_params. Did you mean fsdp_offload_params?"),
            "rename it to fsdp_offload_params",
        ),
        ("fsdp_yyy: 1", "nothing reads fsdp_yyy.", "remove fsdp_yyy"),
    ]


@pytest.mark.parametrize("words", [["check", "--explain", "AF999"], ["check", "--fix", "-"], ["check"]])
def test_a_command_that_is_the_fix_begins_as_one_types_it(words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        cli.call(words)
    assert refused.value.fix.startswith("accel-fsdp check")
