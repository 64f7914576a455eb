"""`accel-fsdp export`: the same bits as torch's own gathering, from any engine and any number of ranks."""

import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, accel_fsdp, here, run
from peft import LoraConfig, PeftModel, get_peft_model
from runs import INNER, as_loops_save, export, refused, same, set_in
from safetensors.torch import load_file
from test_export_architectures import WHOLE
from torch.distributed.checkpoint import save as save_dcp
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
)

from accel_fsdp.checkpoints import Origin, completeness, deepspeed, discover
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import companion_files

WRITER = ROOT / "tests" / "sharded_writer.py"
KINDS = ("fsdp1-1", "fsdp1-2", "fsdp1-tied-bf16", "fsdp2", "fsdp2-bf16", "fsdp2-tied")
FULL = [f"{kind}-{ranks}" for kind in KINDS for ranks in (1, 3, 4)] + ["fsdp1-4-4", "fsdp1-5-4", "fsdp2-hybrid-4"]
LORA = [*(f"lora-{ranks}" for ranks in (1, 3, 4)), "lora-patterns-3", "dora-whole-3"]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def without_copies(full: dict[str, torch.Tensor], tied: bool) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in full.items() if not (tied and name == HEAD)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of 1 to 4 ranks, all from one launch; from a second where a thread of gloo crashes (torch 2.13).

    That was seen once in dozens of launches, in processes that run none of the code that is tested here.
    """
    folder = tmp_path_factory.mktemp("written")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    finished = run([*words, WRITER, folder])
    if "(SIGSEGV)" in finished.output:
        shutil.rmtree(folder)
        folder.mkdir()
        finished = run([*words, WRITER, folder])
    assert finished.code == 0, finished.output
    assert sorted(json.loads((folder / "names.json").read_text())) == sorted(FULL + LORA)
    return folder


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("name", FULL)
def test_bits_are_those_of_the_gathered_state(name: str, written: Path, tmp_path: Path) -> None:
    full = torch.load(written / name / "full.pt")
    same(export(written / name, tmp_path / "out"), without_copies(full, "tied" in name))


@pytest.mark.parametrize("name", LORA)
def test_adapters_stay_adapters_or_are_merged(name: str, written: Path, tmp_path: Path) -> None:
    full = torch.load(written / name / "full.pt")
    same(export(written / name, tmp_path / "adapter"), full)
    base = AutoModelForCausalLM.from_pretrained(written / name / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    ours = export(written / name, tmp_path / "merged", merge_adapter=True)
    assert ours.keys() == theirs.keys()
    assert not torch.equal(ours["model.layers.0.self_attn.q_proj.weight"], base_weight(written / name))
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dora", [False, True])
def test_a_merge_is_rounded_once(dora: bool, tiny_model: Path, tmp_path: Path) -> None:
    """Into a bf16 base: float32 as PEFT merges the base loaded in float32, and bf16 is that, rounded."""
    AutoModelForCausalLM.from_pretrained(tiny_model).bfloat16().save_pretrained(tmp_path / "base")
    set_in(tmp_path / "base" / "config.json", dtype="bfloat16")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], use_dora=dora))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    theirs = adapted.merge_and_unload().state_dict()
    wide = export(tmp_path / "adapter", tmp_path / "wide", merge_adapter=True, dtype="float32")
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(wide[name], theirs[name], atol=1e-6, rtol=1e-6)
    assert not torch.equal(wide[name], wide[name].bfloat16().float())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    low = export(tmp_path / "adapter", tmp_path / "low", merge_adapter=True)
    assert torch.equal(low[name], wide[name].bfloat16())


def base_weight(run_folder: Path) -> torch.Tensor:
    return load_file(run_folder / "base" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["fsdp2-3", "lora-3"])
def test_the_command_proves_what_it_wrote(name: str, written: Path, tmp_path: Path) -> None:
    """Through the command line: default checks, and --check afterwards."""
    merge = ["--merge-adapter"] if name.startswith("lora") else []
    out = tmp_path / "out"
    finished = accel_fsdp("export", written / name, out, *merge)
    assert finished.code == 0, finished.output
    assert "from_pretrained loads all of it" in finished.output
    assert here("export", "--check", out).code == 0
    content = bytearray((out / "model.safetensors").read_bytes())
    content[-5] ^= 4
    (out / "model.safetensors").write_bytes(content)
    finished = here("export", "--check", out)
    assert finished.code == 1
    assert "model.safetensors was changed after the export" in finished.text


def test_files_are_divided_and_cast_as_save_pretrained_does(written: Path, tmp_path: Path) -> None:
    full = torch.load(written / "fsdp2-3" / "full.pt")
    ours = export(written / "fsdp2-3", tmp_path / "ours", max_shard_size="100KB", dtype="bfloat16")
    same(ours, {name: tensor.to(torch.bfloat16) for name, tensor in full.items()})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    index = "model.safetensors.index.json"
    ours_index, theirs_index = (json.loads((tmp_path / each / index).read_text()) for each in ("ours", "theirs"))
    assert ours_index["weight_map"].keys() == theirs_index["weight_map"].keys()
    assert ours_index["metadata"]["total_size"] == theirs_index["metadata"]["total_size"]
    sizes = [path.stat().st_size for path in (tmp_path / "ours").glob("*.safetensors")]
    assert len(sizes) == len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1


def test_a_single_file_for_torch_load(written: Path, tmp_path: Path) -> None:
    export(written / "fsdp1-1-3", tmp_path / "out", format="pth")
    path = tmp_path / "out" / "model.pth"
    same(torch.load(path, weights_only=True), torch.load(written / "fsdp1-1-3" / "full.pt"))
    assert {item.name for item in path.parent.iterdir()} == {"config.json", "export.json", "model.pth"}
    assert zipfile.ZipFile(path).testzip() is None


def other_kinds(model: LlamaForCausalLM, run_folder: Path) -> dict[str, Path]:
    """The same model as other loops save it: whole, nested, as DCP under other keys, as safetensors."""
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    adam = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    checkpoints = {name: run_folder / name / "checkpoint-3" for name in ("full", "nested", "job", "plain", "safe")}
    for folder in checkpoints.values():
        folder.mkdir(parents=True)
        model.config.save_pretrained(folder)
    torch.save(state, checkpoints["full"] / "pytorch_model_fsdp.bin")
    torch.save({"model": state, "optimizer": adam, "step": torch.tensor(3)}, checkpoints["nested"] / "state.pth")
    torch.save({"cpu": torch.zeros(3)}, checkpoints["nested"] / "rng_state_0.pth")
    save_dcp({"job": {"model": state, "optimizer": adam, "place": 7}}, checkpoint_id=checkpoints["job"], no_dist=True)
    save_dcp(dict(model.state_dict()), checkpoint_id=checkpoints["plain"], no_dist=True)
    model.save_pretrained(checkpoints["safe"], max_shard_size="100KB")
    return checkpoints


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_loops_checkpoints(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        turned = model.model.layers[0].mlp.up_proj.weight
        turned.set_(turned.t().contiguous().t())  # saved with its strides
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name, folder in other_kinds(model, tmp_path).items():
        same(export(folder.parent, tmp_path / f"{name}-out"), state)
        assert not list((tmp_path / f"{name}-out").glob("optimizer*"))  # which is in the same files of two of them


def test_ties_that_the_config_does_not_mention(tmp_path: Path) -> None:
    """The names are written as the model's code has said which are one."""
    model = WHOLE["gpt2"]()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "tie_word_embeddings"}))
    theirs = load_file(tmp_path / "model" / "model.safetensors")
    same(export(tmp_path, tmp_path / "out"), theirs)


def test_what_comes_with_the_weights(written: Path, tiny_model: Path, tmp_path: Path) -> None:
    """A config that Trainer wrote has use_cache off; code and links are left behind."""
    run_folder = tmp_path / "run"
    shutil.copytree(written / "fsdp2-3", run_folder)
    shutil.rmtree(run_folder / "model")
    folder = run_folder / "checkpoint-1"
    shutil.copy(written / "fsdp2-3" / "model" / "config.json", folder)
    set_in(folder / "config.json", use_cache=False, auto_map={"AutoModel": "x.X"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, folder / name)
    (folder / "x.py").write_text("raise SystemExit")
    (folder / "README.md").write_text("# card")
    export(run_folder, tmp_path / "out", verify="load")
    exported_config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "auto_map" not in exported_config
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.use_cache is True
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md", "export.json"} <= names
    assert "x.py" not in names


def test_a_run_notes_what_its_exports_need(tiny_model: Path, tmp_path: Path) -> None:
    """The dtype is the file's, not the one that the weights were loaded in."""
    AutoModelForCausalLM.from_pretrained(tiny_model).bfloat16().save_pretrained(tmp_path / "low")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "low", dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    companion_files.describe(adapted, AutoTokenizer.from_pretrained(tiny_model), tmp_path / "run" / "model")
    checkpoint_folder = tmp_path / "run" / "checkpoint-1"
    checkpoint_folder.mkdir()
    (checkpoint_folder / "trainer_state.json").write_text('{"global_step": 1}')
    adapted.save_pretrained(checkpoint_folder)
    merged = export(tmp_path / "run", tmp_path / "out", merge_adapter=True)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention_bias": True}, r"q_proj\.bias is missing"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ is unexpected"),
        ({"intermediate_size": 8}, r"is \[\d+, 36\], the config says \[8, 36\]"),
        ({"tie_word_embeddings": True}, "model.embed_tokens.weight and lm_head.weight differ, and the config ties"),
        ({"num_attention_heads": 0}, "can't use the config"),
        ({"vocab_size": 1e3}, "can't use the config"),
        ({"pad_token_id": 10**8}, "can't use the config"),
    ],
)
def test_another_model_than_the_config_says(
    config: dict[str, Any], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    """What would load with random or wrong weights is refused."""
    set_in(as_loops_save(tiny_model, tmp_path / "run") / "config.json", **config)
    refused(message, tmp_path / "run")


TWICE = {
    "keys": lambda state, other: {"model": state, "state_dict": other},
    "depths": lambda state, other: {"model": {"module": state}, "state": {"model": other}},
    "prefixes": lambda state, other: {**state, **{f"module.{name}": tensor for name, tensor in other.items()}},
}


@pytest.mark.parametrize("how", TWICE)
def test_two_models_in_one_checkpoint(how: str, tiny_model: Path, tmp_path: Path) -> None:
    state = load_file(tiny_model / "model.safetensors")
    run_folder, others = tmp_path / "run", {name: tensor + 1 for name, tensor in state.items()}
    refused("holds two tensors named", as_loops_save(tiny_model, run_folder, TWICE[how](state, others)))
    as_loops_save(tiny_model, run_folder, TWICE[how](state, {name: t.clone() for name, t in state.items()}))
    same(export(run_folder, tmp_path / "out"), state)


@pytest.mark.parametrize(
    ("dtype", "number", "message"),
    [
        ("float16", 1e6, "65504, the largest of float16"),
        ("bfloat16", 3.4e38, r"3\.38953e\+38, the largest of bfloat16"),
        ("float32", 1e39, r"3\.40282e\+38, the largest of float32"),
    ],
)
def test_numbers_that_a_dtype_cannot_hold(
    dtype: str, number: float, message: str, tmp_path: Path, tiny_model: Path
) -> None:
    """Infinite ones are as they were; no finite one becomes such, which would look as if training had diverged."""
    state = {name: tensor.double() for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    state = state if dtype == "float32" else {name: tensor.float() for name, tensor in state.items()}
    state["model.norm.weight"][0] = torch.inf
    run_folder = as_loops_save(tiny_model, tmp_path / "run", state)
    tensors = export(run_folder, tmp_path / "out", dtype=dtype, allow_non_finite=True)
    assert tensors["model.norm.weight"][0] == torch.inf
    state["model.norm.weight"][1] = -number
    as_loops_save(tiny_model, run_folder, state)
    for allowed in (False, True):
        beyond, again = rf"model\.norm\.weight holds numbers beyond {message}", tmp_path / "again"
        refused(beyond, tmp_path / "run", again, dtype=dtype, allow_non_finite=allowed)


def test_frozen_parameters_under_zero1(tmp_path: Path) -> None:
    """DeepSpeed lists them from stage 2 on; before they are in the module's state alone."""
    module = {"trained": torch.zeros(4), "frozen": torch.arange(3.0)}
    model = {"module": module, "buffer_names": [], "param_shapes": [{"trained": torch.Size([4])}], "shared_params": {}}
    state = {"zero_stage": 1, "partition_count": 1, "single_partition_of_fp32_groups": [torch.ones(4)]}
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": state}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    tensors = deepspeed.read(tmp_path)
    same({name: value.load() for (name,), value in tensors.items()}, {**module, "trained": torch.ones(4)})


def test_every_level_of_a_run_is_understood(run_folder: Path, tmp_path: Path) -> None:
    folder, inner = run_folder / "checkpoint-1", run_folder / INNER
    (folder / "optimizer_0").mkdir()
    for place in (run_folder, folder, inner, inner / ".metadata", inner / "__0_0.distcp"):
        assert discover.find(place)[0].weights == inner
    for place in (tmp_path, folder / "optimizer_0"):
        with pytest.raises(UserError) as caught:
            discover.find(place)
        assert str(folder) in caught.value.fix
    with pytest.raises(UserError, match="does not exist"):
        discover.find(tmp_path / "nothing")


def test_the_newest_complete_checkpoint_is_taken(run_folder: Path, tmp_path: Path) -> None:
    for number in (2, 10, 12):
        folder = Path(shutil.copytree(run_folder / "checkpoint-1", run_folder / f"checkpoint-{number}"))
        (folder / "pytorch_model_fsdp_0" / ".metadata").rename(tmp_path / "lost") if number == 12 else None
        completeness.seal(folder, Origin("FSDP"))
    shutil.rmtree(run_folder / "checkpoint-1")
    shutil.rmtree(run_folder / "model")
    shutil.copytree(run_folder / "checkpoint-10", run_folder / "checkpoint-11")
    (run_folder / "checkpoint-11" / "complete.json").write_text('{"complete": false}')
    location, newer = discover.find(run_folder)
    assert location.folder.name == "checkpoint-10"
    assert [checkpoint.missing for checkpoint in newer] == [("its end",), ("pytorch_model_fsdp_0/.metadata",)]
    listed = here("export", run_folder, "--list", "--json")
    numbers = [Path(entry["folder"]).name.removeprefix("checkpoint-") for entry in json.loads(listed.output)]
    assert numbers == ["2", "10", "11", "12"]
    with pytest.raises(UserError, match=r"lacks pytorch_model_fsdp_0/\.metadata"):
        discover.find(run_folder / "checkpoint-12")
    refused(r"no config\.json", run_folder)
