"""`accel-fsdp config --from FILE`: what nobody changed means the same afterwards."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from checking import DDP, V1, V2
from conftest import ROOT, here
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp import linter, wizard
from accel_fsdp.errors import UsageError

SHIPPED = ROOT / "tests/linter/shipped"
SHORT_V1 = V1.replace("mixed_precision: 'no'\n", "")
DS_FILE = (
    "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
    "  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n"
)


def re_edited(path: Path, *flags: str) -> str:
    finished = here("config", "--yes", "--from", path, "--model", "meta-llama/Llama-3.1-8B", *flags)
    assert finished.code == 0, finished.output
    return path.read_text()


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_that_others_ship_loses_nothing(path: Path, tmp_path: Path) -> None:
    """Unchanged it comes back byte for byte; with one answer changed, the other keys, values and comments stay."""
    text, copy = path.read_text(), tmp_path / path.name
    content, flags = yaml.safe_load(text), {"model": "meta-llama/Llama-3.1-8B"}
    copy.write_text(text)
    options = wizard.WizardOptions(from_file=copy, yes=True)
    if content["distributed_type"] == "NO":
        with pytest.raises(UsageError, match="can't be re-edited"):
            wizard.configure(options, flags)
        return
    if content.get("main_process_ip") == "1234":  # a placeholder
        content["main_process_ip"] = flags["main_process_ip"] = "10.0.0.1"
    else:
        wizard.configure(options, {})
        assert copy.read_text() == text
    section = content.get("fsdp_config", {})
    if "TRANSFORMER_BASED_WRAP" in section.values():
        section.setdefault("fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer")  # the model's, once it is known
    content["mixed_precision"] = flags["mixed_precision"] = "no" if content.get("mixed_precision") == "bf16" else "bf16"
    wizard.configure(options, flags)
    after = copy.read_text()
    assert yaml.safe_load(after) == content
    assert re.findall(r"#.*", after) == re.findall(r"#.*", text)


def test_what_is_left_out_counts_as_accelerate_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(SHORT_V1)
    changed = yaml.safe_load(re_edited(path, "--mixed-precision", "bf16", "--state-dict-type", "SHARDED_STATE_DICT"))
    assert changed["mixed_precision"] == "bf16"
    assert changed["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert "fsdp_backward_prefetch" not in changed["fsdp_config"]


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_another_engine_leaves_nothing_of_the_old_one(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("# mine\n" + V2 + "  fsdp_ignored_modules: model.head\n")
    refused = here("config", "--yes", "--from", path, "--model", "meta-llama/Llama-3.1-8B", "--engine", engine)
    assert refused.code == 1
    assert "can't keep the meaning of fsdp_ignored_modules" in refused.output
    text = re_edited(path, "--engine", engine, "--force")
    assert "fsdp_config" not in yaml.safe_load(text)
    assert text.startswith("# mine\n")
    assert [finding for finding in linter.lint(path, linter.LintOptions()) if finding.severity != "note"] == []


def test_a_migrated_file_stays_what_it_is(tmp_path: Path) -> None:
    """Its header still names the method of before, QLoRA, which ZeRO-3 can't do."""
    path = tmp_path / "zero3.yaml"
    words = ["migrate", ROOT / "accelerate_configs/fsdp2_qlora.yaml", "--to", "zero3", "-o", path]
    assert here(*words).code == 0
    before = yaml.safe_load(path.read_text())
    assert yaml.safe_load(re_edited(path)) == before


LLAMA = {"model": "meta-llama/Llama-3.1-8B", "gpus": "8xH100", "method": "full"}
SECTIONS = {"fsdp1": "fsdp_config", "fsdp2": "fsdp_config", "deepspeed": "deepspeed_config", "ddp": "", "tpu": ""}
SOUND: dict[str, dict[str, Any]] = {
    "": {"mixed_precision": "bf16", "num_processes": 8, "num_machines": 1},
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    },
    "fsdp1": {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    "fsdp2": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
    "deepspeed": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
}
KINDS = {"fsdp1": "FSDP", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED", "ddp": "MULTI_GPU", "tpu": "XLA"}
UNUSABLE = ("maybe", "cpu", -3, 2.5, "1e8", None, ["x"], False, "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD", "bfloat16", "no")
"""Each is refused by most keys, and means something to others."""


def sound(engine: str) -> dict[str, Any]:
    """A config in which every key of the wizard's questions is written."""
    section = SECTIONS[engine]
    inside = {section: {**SOUND.get(section, {}), **SOUND.get(engine, {})}} if section else {}
    return {"distributed_type": KINDS[engine], **SOUND[""], **inside}


def with_value(engine: str, value: Any, *keys: str) -> dict[str, Any]:
    """The same with this value behind these keys, or behind all but the engine's own."""
    content = sound(engine)
    chosen = keys or tuple({**SOUND[""], **content.get(SECTIONS[engine], {})})
    for place in (content, content.get(SECTIONS[engine], {})):
        place.update({key: value for key in chosen if key in place and (keys or key != "fsdp_version")})
    return content


@settings(max_examples=30)
@given(engine=st.sampled_from(["fsdp1", "fsdp2", "deepspeed", "ddp"]), value=st.sampled_from(UNUSABLE), data=st.data())
def test_what_is_written_is_what_was_settled(engine: str, value: Any, data: st.DataObject, tmp_path: Path) -> None:
    """The linter finds no bad value in it, and editing it once more changes nothing."""
    keys = [*SOUND[""], *sound(engine).get(SECTIONS[engine], {})]
    key = data.draw(st.sampled_from(keys))
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(with_value(engine, value, key)))
    wizard.configure(wizard.WizardOptions(from_file=path, yes=True), LLAMA)
    text = path.read_text()
    wrong = [finding for finding in linter.lint(path, linter.LintOptions()) if finding.code.startswith("AF2")]
    assert wrong == [], (engine, key, value)
    wizard.configure(wizard.WizardOptions(from_file=path, yes=True), LLAMA)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("flags", "length", "message"),
    [
        ({}, "8192", ""),
        ({"seq_len": "4096"}, "4096", ""),
        ({"model": "gpt2"}, "1024", "--seq-len 8192 is longer than the 1024 positions of openai-community/gpt2"),
    ],
)
def test_the_length_that_memory_was_judged_with_is_kept(
    flags: dict[str, str], length: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.yaml"
    wizard.configure(wizard.WizardOptions(path, yes=True), {**LLAMA, "seq_len": "8192"})
    assert "--max_length 8192" in path.read_text()
    capsys.readouterr()
    changed = {"strategy": "2", "layer_class": "GPT2Block" if "model" in flags else "LlamaDecoderLayer"}
    wizard.configure(wizard.WizardOptions(from_file=path, yes=True), {**changed, **flags})
    assert message in " ".join(capsys.readouterr().err.split())
    header = path.read_text().splitlines()[:5]
    assert f" --seq-len {length}" in header[2]
    assert f" --max_length {length}" in header[4]


@pytest.mark.parametrize(
    ("text", "value", "message"),
    [
        (V2.replace("'no'", "bf17"), "bf17", "--mixed-precision bf17 can't be used. Did you mean bf16?"),
        (V2 + "num_machines: 2\nmain_process_ip: '1234'\n", "1234", "--main-process-ip 1234 is not an address"),
    ],
)
def test_an_answer_that_cannot_be_used_is_said_and_goes(
    text: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(text)
    assert wizard.configure(wizard.WizardOptions(from_file=path, yes=True), LLAMA) == 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert value not in yaml.safe_load(path.read_text()).values()


def test_a_comment_in_the_place_of_our_title_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.yaml"
    wizard.configure(wizard.WizardOptions(path, yes=True), LLAMA)
    _, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join(["# my job\n", *rest]))
    wizard.configure(wizard.WizardOptions(from_file=path, yes=True), {"strategy": "2"})
    assert path.read_text().startswith("# my job\n# meta-llama/Llama-3.1-8B, full training")
    assert " --strategy 2 " in path.read_text()
    assert "+  fsdp_reshard_after_forward: false" in capsys.readouterr().err


NOT_OFFERED = {"fsdp_state_dict_type": "LOCAL_STATE_DICT", "fsdp_sharding_strategy": "_HYBRID_SHARD_ZERO2"}
RARE = sound("fsdp1") | {"mixed_precision": "fp8", "fsdp_config": {**sound("fsdp1")["fsdp_config"], **NOT_OFFERED}}
QUOTED = V2.replace("num_processes: 2", 'num_processes: "2"')
WITH_MODULE = V2.replace("LlamaDecoderLayer", "transformers.models.llama.modeling_llama.LlamaDecoderLayer")


@pytest.mark.parametrize(
    ("text", "flags", "after"),
    [
        *((text, {"model": LLAMA["model"]}, text) for text in (SHORT_V1, V1, V2, DS_FILE, DDP)),
        (yaml.safe_dump(RARE), {**LLAMA, "seq_len": "2048"}, yaml.safe_dump(RARE)),  # which Accelerate takes
        (QUOTED, {}, QUOTED),
        (WITH_MODULE, {}, V2),
    ],
)
def test_a_value_as_accelerate_takes_it_stays(text: str, flags: dict[str, str], after: str, tmp_path: Path) -> None:
    """Also what the file leaves to Accelerate: it isn't filled in with the wizard's own defaults."""
    path = tmp_path / "old.yaml"
    path.write_text(text)
    assert wizard.configure(wizard.WizardOptions(from_file=path, yes=True), flags) == 0
    assert path.read_text() == after
