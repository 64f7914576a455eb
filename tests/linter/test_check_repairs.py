"""What `check --fix` makes of a file, and how severe a finding is."""

from pathlib import Path

import pytest
import yaml
from checking import DDP, DS, MESH, TOP, V1, V2, WRAP, codes_of, finding, findings, repaired, subject
from hypothesis import given, settings
from test_check import BAD
from test_config import answers

from accel_fsdp import linter
from accel_fsdp.config import size_key, yaml_file
from accel_fsdp.wizard import Answers, to_yaml

RESHARD = "  fsdp_reshard_after_forward: {}\n"
STRATEGY = "  fsdp_sharding_strategy: {}\n"
POLICY = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
IGNORED_SECTIONS = "num_processes: 1\ndistributed_type: 'NO'\nfsdp_config: {fsdp_sync_module_states: false}\n"
IGNORED_SECTIONS += "deepspeed_config: {deepspeed_config_file: path/to/be/ignored}\n"
NVME = DS + "  zero_stage: 2\n  offload_param_device: {}\n"
BARE, QUOTED = (f"distributed_type: {{}}\nnum_processes: 1\nmixed_precision: {no}\n" for no in ("{}", "'no'"))
LAYER = V2.replace("LlamaDecoderLayer", "{}")
VERSION = V2.replace("version: 2", "version: {}") + RESHARD.format("false")
SAME = ""
ONE_UNIT = "fsdp_version: 2, fsdp_auto_wrap_policy: NO_WRAP, fsdp_ofload_params: true"
FLOWS = (
    f"{{distributed_type: FSDP, num_processes: 2, fsdp_config: {{{ONE_UNIT}}}}}\n",
    f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{{ONE_UNIT}}}\n",
    f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{\n  # why\n  {ONE_UNIT}\n}}\n",
    f"{{\n  distributed_type: FSDP,\n  num_processes: 2,\n  fsdp_config: {{\n    {ONE_UNIT},\n  }},\n}}\n",
)
REPAIRS: list[tuple[str, str, str]] = [
    ("AF101", V2.partition("\n")[2], V2),
    ("AF101", DS.partition("\n")[2] + "  zero_stage: 2\n", DS + "  zero_stage: 2\n"),
    ("AF101", V2.partition("\n")[2] + "deepspeed_config: {zero_stage: 2}\n", SAME),
    *(("AF102", V2.replace("fsdp_config:", section), V2) for section in ("fsdp_confg:", "fsdp-config:")),
    ("AF102", V2.replace("distributed_type:", "distributed_typ:"), V2),
    ("AF102", V2.replace("fsdp_config:", "fsdp_confg:").replace("fsdp_version", "fsdp_verion"), V2),
    ("AF102", V2 + "fsdp_confg: {fsdp_version: 1}\n", SAME),  # which of the two is meant is not the linter's to say
    *(("AF102", f"{V2}{key}: {{a: 1}}\n", SAME) for key in ("dp_config", "deepsped_config")),
    *(("AF102", f"{DDP}{key}: {{a: 1}}\n", SAME) for key in ("ddp_config", "fdsp_config")),
    *(("AF103", V2.replace("fsdp_version", word), V2) for word in ("fsdp_verison", "fsdp_verion")),
    ("AF103", V2.replace("wrap_policy", "wrap_polcy"), V2),
    ("AF103", V1 + "  use_orig_param: true\n", V1 + "  fsdp_use_orig_params: true\n"),
    *(("AF103", text, text.replace("ofload", "offload")) for text in FLOWS),
    ("AF107", NVME.format("cpu") + "  offload_param_nvme_path: /local\n", NVME.format("cpu")),
    *(("AF201", BARE.format(word, word.lower()), QUOTED.format("'NO'")) for word in ("NO", "off", "false")),
    *(("AF203", VERSION.format(word), VERSION.format(2)) for word in ("2.0", "v2", "'2.0'", "fsdp2")),
    ("AF203", V2.replace("version: 2", "version: 1.0"), V1),
    *(("AF203", VERSION.format(word), SAME) for word in ("3", "-1")),
    ("AF206", LAYER.format("DownBlock, a.b.UpBlock"), LAYER.format("DownBlock,UpBlock")),
    ("AF206", LAYER.format("models.llama.modeling_llama.LlamaDecoderLayer"), V2),
    ("AF206", LAYER.format("DownBlock, CrossDownBlock. UpBlock, CrossUpBlock"), SAME),
    ("AF206", LAYER.format("DownBlock CrossDownBlock"), SAME),
    ("AF206", LAYER.format("[DownBlock, 'Cross UpBlock']"), SAME),
    *(("AF208", BARE.format(word, "'no'"), QUOTED.format("'NO'")) for word in ("NO", "off", "false")),
    ("AF216", NVME.format("nvme") + "  offload_param_nvme_path: /local\n", SAME),
    ("AF302", V1 + RESHARD.format("true"), V1 + STRATEGY.format("FULL_SHARD")),
    ("AF302", V1 + RESHARD.format("false"), SAME),
    ("AF302", V1 + RESHARD.format("HYBRID_SHARD"), V1 + STRATEGY.format("HYBRID_SHARD")),
    ("AF302", V1 + RESHARD.format("false") + STRATEGY.format(2), V1 + STRATEGY.format(2)),
    *(("AF306", V2.replace("TRANSFORMER_BASED_WRAP", policy), SAME) for policy in ("NO_WRAP", "no_wrap")),
    *(("AF306", V1.replace("TRANSFORMER_BASED_WRAP", policy), SAME) for policy in ("NO_WRAP", "no_wrap")),
    *(("AF306", text.replace("TRANSFORMER_BASED_WRAP", "null"), text) for text in (V1, V2)),
    *(("AF306", text.replace(POLICY, ""), text) for text in (V1, V2)),
    *(("AF314", text, SAME) for text in (IGNORED_SECTIONS, DDP + "fsdp_config: {fsdp_version: 2}\n")),
]


@pytest.mark.parametrize(("code", "text", "after"), REPAIRS)
def test_a_repair_has_one_right_answer(code: str, text: str, after: str, tmp_path: Path) -> None:
    """It keeps flow style. A file without one stays as it is, unwritten."""
    (path := tmp_path / "fsdp.yaml").write_text(text)
    before = path.stat().st_mtime_ns
    assert code in {finding.code for finding in linter.lint(path, linter.LintOptions())}
    linter.lint(path, linter.LintOptions(fix=True))
    assert yaml.safe_load(path.read_text()) == yaml.safe_load(after or text)
    assert path.read_text().count("{") == (after or text).count("{")
    if not after:
        assert (path.stat().st_mtime_ns, path.read_text()) == (before, text)


UNREAD = "nothing reads {}."
MEANT = UNREAD + " Did you mean {}?"
BOOLEAN = "{}: {} without quotes is the boolean false"
WHAT: list[tuple[str, str, str]] = [
    ("AF103", V2 + "  fsdp_device_mesh: 2\n", UNREAD.format("fsdp_device_mesh")),
    ("AF103", V2 + "  fsdp_offload_optimizer: 2\n", UNREAD.format("fsdp_offload_optimizer")),
    ("AF103", V2 + "  fsdp_mixed_precision: 2\n", UNREAD.format("fsdp_mixed_precision")),
    ("AF103", V2 + "  fsdp_cpu_ram: 2\n", MEANT.format("fsdp_cpu_ram", "fsdp_cpu_ram_efficient_loading")),
    ("AF103", V2 + MESH + "  parallelism_config_pp_size: 2\n", MEANT.format(size_key("pp"), size_key("tp"))),
    ("AF103", DS + "  zero2_init_flag: 2\n", MEANT.format("zero2_init_flag", "zero3_init_flag")),
    ("AF201", BARE.format("NO", "off"), BOOLEAN.format("mixed_precision", "off")),
    *(("AF208", BARE.format(word, "no"), BOOLEAN.format("distributed_type", word)) for word in ("NO", "off", "false")),
]


@pytest.mark.parametrize(("code", "text", "what"), WHAT)
def test_a_finding_names_what_the_file_says(code: str, text: str, what: str, tmp_path: Path) -> None:
    """What is no sure typo is suggested at most, and not renamed."""
    assert finding(code, text, tmp_path).what == what
    if code == "AF103":
        assert repaired(text, tmp_path) == text


@pytest.mark.parametrize("code", sorted(BAD))
def test_a_repair_leaves_no_fixable_finding_and_keeps_comments(code: str, tmp_path: Path) -> None:
    text = "# first\n" + BAD[code].replace("distributed_type", "# mine\ndistributed_type")
    before = {finding.code for finding in findings(text, tmp_path) if finding.edits}
    left = findings(text, tmp_path, fix=True)
    after = (tmp_path / "checked.yaml").read_text()
    assert [finding.code for finding in left if finding.edits] == []
    assert after.startswith("# first\n")
    assert before or after == text
    assert not before & {finding.code for finding in left}


@settings(max_examples=200)
@given(wanted=answers())
def test_what_the_wizard_writes_is_clean(wanted: Answers, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(to_yaml.to_text(wanted))
    severe = [f.code for f in linter.lint(path, linter.LintOptions()) if f.severity != "note"]
    one_unit = to_yaml.to_mapping(wanted).get("fsdp_config", {}).get("fsdp_auto_wrap_policy") == "NO_WRAP"
    assert severe == (["AF306"] if one_unit and (wanted.fsdp_version == 2 or wanted.strategy != 3) else [])
    assert yaml_file.dump(yaml_file.load(path)) == path.read_text()


@pytest.mark.parametrize("version", ["", "  fsdp_version:\n"])
@pytest.mark.parametrize("value", ["false", "true", "'false'"])
def test_a_choice_between_versions_is_left_to_the_user(value: str, version: str, tmp_path: Path) -> None:
    """No version and FSDP2's boolean: FSDP1 runs, FSDP2 was meant. A version without a value is no version."""
    text = TOP + "fsdp_config:\n" + WRAP + RESHARD.format(value)
    assert ("AF302" in codes_of(subject(text + version))) == (not version)  # Accelerate stops before it trains
    assert yaml.safe_load(repaired(text + version, tmp_path)) == yaml.safe_load(text)
    for code in ("AF301", "AF302"):
        choice = finding(code, text, tmp_path)
        assert choice.edits == ()
        assert "fsdp_version: 2" in choice.fix
        assert "fsdp_version: 1" in choice.fix


SHIPPED = Path(__file__).parent / "shipped/trl"
FSDP1 = (SHIPPED / "fsdp1.yaml").read_text().replace("  fsdp_reshard_after_forward: FULL_SHARD\n", "{}")
ULYSSES = (SHIPPED / "alst_ulysses_4gpu.yaml").read_text()
NO_SEQUENCES = ULYSSES.replace("sp_size: 2 ", "sp_size: 1 ").replace("dp_shard_size: 2 ", "dp_shard_size: 4 ")
TWO = V2.replace("num_processes: 2", "num_processes: 4") + "num_machines: 2\nmain_process_ip: {}\n"
SEVERITIES: list[tuple[str, str, str]] = [
    # As bad as what then runs: FSDP2 shards fully unless the file has a resharding of its own.
    ("AF303", "note", V2 + STRATEGY.format("FULL_SHARD")),
    ("AF303", "note", V2 + STRATEGY.format(2) + RESHARD.format("false")),
    *(("AF303", "error", V2 + STRATEGY.format(name)) for name in ("SHARD_GRAD_OP", "HYBRID_SHARD")),
    # Accelerate exports FULL_SHARD to FSDP1 unless `fsdp_sharding_strategy` says something else.
    ("AF302", "note", FSDP1.format(RESHARD.format("FULL_SHARD"))),
    ("AF302", "note", FSDP1.format(RESHARD.format("true"))),
    ("AF302", "error", FSDP1.format(RESHARD.format("SHARD_GRAD_OP"))),
    ("AF302", "error", FSDP1.format(RESHARD.format("false"))),
    ("AF302", "note", FSDP1.format(STRATEGY.format(2) + RESHARD.format("false"))),
    ("AF302", "warning", FSDP1.format(STRATEGY.format("SHARD_GRAD_OP") + RESHARD.format("true"))),
    ("AF302", "note", FSDP1.format(STRATEGY.format(1) + RESHARD.format("FULL_SHARD"))),
    ("AF315", "warning", NO_SEQUENCES),
    *(("AF415", "warning", TWO.format(word)) for word in ("HOST", "192.168.x.x", "your-master-1", "ip", "NODE0_IP")),
    *(("AF415", "warning", TWO.format(word)) for word in ("hostname", "main-process-address", "node1.example.com")),
    *(("AF415", "error", TWO.format(word)) for word in ("$MASTER_ADDR", "<ip>", "'{{ head }}'", "10.0.0.300", "a,b")),
    ("AF415", "warning", TWO.format("master_addr")),
    ("AF415", "note", TWO.format("1234")),
    *(("AF415", "", TWO.format(word)) for word in ("host", "node-1", "GPU01", "HEAD.local", "ip-1-2-3-4.ec2.internal")),
    *(("AF415", "", TWO.format(word)) for word in ("voip.local", "10.0.0.1", "fe80::1%eth0", "'[fd00::1]'")),
]


@pytest.mark.parametrize(("code", "severity", "text"), SEVERITIES)
def test_a_finding_is_as_severe_as_its_effect(code: str, severity: str, text: str, tmp_path: Path) -> None:
    severities = [finding.severity for finding in findings(text, tmp_path) if finding.code == code]
    assert severities == ([severity] if severity else [])


@pytest.mark.parametrize("size", [1, 4])
def test_a_wrong_number_of_batches_beside_sequences(size: int, tmp_path: Path) -> None:
    """Accelerate tells DeepSpeed a batch of as many rows as `dp_shard_size` says (accelerator.py, `pc.sp_size > 1`)."""
    error = finding("AF316", ULYSSES.replace("dp_shard_size: 2 ", f"dp_shard_size: {size} "), tmp_path)
    assert error.key.rpartition("_config_")[2] == ("sp_size" if size == 1 else "dp_shard_size")
    assert "train_batch_size" in error.why
