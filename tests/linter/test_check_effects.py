"""Rules hold an effect against a file, however it is spelt; one finding hides no other; two answers are not decided."""

import json
from pathlib import Path

import pytest
import yaml
from checking import DDP, DS, LLAMA, V1, V2, codes_of, findings, subject
from conftest import accel_fsdp

from accel_fsdp.config import yaml_file

TWO = V2.replace("num_processes: 2", "num_processes: 4") + "num_machines: 2\nmain_process_ip: {}\n"
POLICY = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B
datasets: [{path: mine, type: alpaca}]
sequence_len: 8192
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: false
"""
LLAMA_FACTORY = "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ntemplate: llama3\noutput_dir: out\n"
SAGEMAKER = "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\nmy_key: 1\nec2_instance_type: p\n"
TRL = "model_name_or_path: m\ndataset_name: d\nlearning_rate: 1.0e-5\noutput_dir: out\n"
IGNORED_SECTIONS = """\
compute_environment: LOCAL_MACHINE
num_processes: 1
distributed_type: 'NO'
fsdp_config:
  fsdp_sync_module_states: false
deepspeed_config:
  deepspeed_config_file: path/to/be/ignored
"""


@pytest.mark.parametrize("spelt", ["NO_WRAP", "no_wrap", "null", ""])
@pytest.mark.parametrize("text", [V1, V2])
def test_one_unit_of_the_whole_model_is_warned_of(text: str, spelt: str, tmp_path: Path) -> None:
    line = f"fsdp_auto_wrap_policy: {spelt}" if spelt else "fsdp_state_dict_type: SHARDED_STATE_DICT"
    assert "AF306" in codes_of(subject(text.replace(POLICY, line)))
    findings(text.replace(POLICY, line), tmp_path, fix=True)
    after = yaml_file.load(tmp_path / "checked.yaml")["fsdp_config"].get("fsdp_auto_wrap_policy")
    assert after == (spelt if spelt.lower() == "no_wrap" else "TRANSFORMER_BASED_WRAP")


@pytest.mark.parametrize(
    ("address", "severity"),
    [
        *((word, "warning") for word in ("HOST", "192.168.x.x", "your-master-1", "ip", "NODE0_IP", "hostname")),
        *((word, "warning") for word in ("master_addr", "main-process-address", "node1.example.com")),
        *((word, "error") for word in ("$MASTER_ADDR", "<ip>", "'{{ head }}'", "10.0.0.300", "a,b")),
        ("1234", "note"),
        *((word, "") for word in ("host", "node-1", "GPU01", "HEAD.local", "ip-1-2-3-4.ec2.internal", "voip.local")),
        *((word, "") for word in ("10.0.0.1", "fe80::1%eth0", "'[fd00::1]'")),
    ],
)
def test_an_address_that_nobody_filled_in(address: str, severity: str, tmp_path: Path) -> None:
    severities = [finding.severity for finding in findings(TWO.format(address), tmp_path) if finding.code == "AF415"]
    assert severities == ([severity] if severity else [])
    strict = accel_fsdp("check", "--strict", tmp_path / "checked.yaml")
    assert strict.code == (severity in ("error", "warning"))


@pytest.mark.parametrize("layers", ["FluxTransformerBlock", "BasicTransformerBlock,ResnetBlock2D"])
def test_a_diffusion_model_has_no_positions_to_lose(layers: str) -> None:
    text = V1.replace("'no'", "bf16")
    assert "AF318" in codes_of(subject(text))
    assert "AF318" not in codes_of(subject(text.replace("LlamaDecoderLayer", layers)))


INSIDE = "  fsdp_offload_params: maybe\n  fsdp_state_dict_type: LOCAL_STATE_DICT\n"


@pytest.mark.parametrize("kind", ["", "distributed_type: fsdp\n", "distributed_tpye: FSDP\n"])
def test_without_an_engine_the_rest_is_checked_all_the_same(kind: str) -> None:
    text = V2.replace("distributed_type: FSDP\n", kind) + INSIDE
    assert codes_of(subject(V2 + INSIDE)) | {"AF501"} <= codes_of(subject(text, model=LLAMA)) | {"AF501"}
    assert codes_of(subject(text)) - codes_of(subject(V2 + INSIDE)) <= {"AF101", "AF102", "AF203"}


def test_an_engine_is_added_where_one_section_says_which(tmp_path: Path) -> None:
    for text, kind in ((V2, "FSDP"), (DS + "  zero_stage: 2\n", "DEEPSPEED")):
        without = text.partition("\n")[2]
        findings(without, tmp_path, fix=True)
        assert yaml_file.load(tmp_path / "checked.yaml")["distributed_type"] == kind
    both = V2.partition("\n")[2] + "deepspeed_config: {zero_stage: 2}\n"
    findings(both, tmp_path, fix=True)
    assert "distributed_type" not in yaml_file.load(tmp_path / "checked.yaml")


def test_a_key_that_stands_twice_hides_nothing(tmp_path: Path) -> None:
    text = V2 + INSIDE + "debug: false\n  # why\ndebug: true\nfsdp_ofload: 1\n"
    all_findings = findings(text, tmp_path)
    twice = next(finding for finding in all_findings if finding.code == "AF111")
    assert (twice.key, twice.line) == ("debug", text.splitlines().index("debug: true") + 1)
    assert {finding.code for finding in all_findings} >= codes_of(subject(V2 + INSIDE)) | {"AF102", "AF111"}
    refused = accel_fsdp("check", "--json", tmp_path / "checked.yaml")
    assert refused.code == 1
    listed = json.loads(refused.output[refused.output.index("[") :])
    assert not any(finding["fixable"] for finding in listed)
    assert accel_fsdp("check", "--fix", tmp_path / "checked.yaml").code == 1
    assert (tmp_path / "checked.yaml").read_text() == text
    inside = findings(V2 + "  fsdp_version: 1\n", tmp_path)
    assert [finding.key for finding in inside if finding.code == "AF111"] == ["fsdp_config.fsdp_version"]


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        (AXOLOTL, "Axolotl"),
        (LLAMA_FACTORY, "LLaMA-Factory"),
        (TRL, "a training script"),
        (SAGEMAKER, "SageMaker"),
        ('{"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 2000}}', "a training script"),
    ],
)
def test_a_file_of_another_tool_is_named_and_left_alone(text: str, tool: str, tmp_path: Path) -> None:
    (finding,) = findings(text, tmp_path, fix=True)
    assert (finding.code, finding.severity) == ("AF112", "error")
    assert f"a configuration of {tool}," in finding.what
    assert (tmp_path / "checked.yaml").read_text() == text
    edited = accel_fsdp("config", "--yes", "--from", tmp_path / "checked.yaml", "--model", "gpt2")
    assert edited.code == 2
    assert f"a configuration of {tool}" in edited.output


@pytest.mark.parametrize("text", [IGNORED_SECTIONS, DDP + "fsdp_config: {fsdp_version: 2}\n"])
def test_a_repair_does_not_choose_the_engine(text: str, tmp_path: Path) -> None:
    """One section or the other is wrong; which one, nobody has said."""
    before = yaml.safe_load(text)["distributed_type"]
    all_findings = findings(text, tmp_path, fix=True)
    assert "AF314" in {finding.code for finding in all_findings}
    assert yaml_file.load(tmp_path / "checked.yaml")["distributed_type"] == before


FLOWS = {
    "all": "{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_version: 2, fsdp_ofload_params: true}}\n",
    "a section": "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2, fsdp_ofload_params: true}\n",
    "over lines": "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {\n  fsdp_version: 2,  # why\n"
    "  fsdp_ofload_params: true\n}\n",
    "indented": "{\n  distributed_type: FSDP,\n  num_processes: 2,\n  fsdp_config: {\n    fsdp_version: 2,\n"
    "    fsdp_ofload_params: true,\n  },\n}\n",
}


@pytest.mark.parametrize("style", FLOWS)
def test_flow_style_stays(style: str, tmp_path: Path) -> None:
    text = FLOWS[style]
    findings(text, tmp_path, fix=True)
    after = (tmp_path / "checked.yaml").read_text()
    content = yaml.safe_load(after)
    assert content["fsdp_config"]["fsdp_offload_params"] is True
    assert content["fsdp_config"]["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert after.count("{") == text.count("{")
