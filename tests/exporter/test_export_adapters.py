"""Adapters as PEFT saves and merges them: every kind is exported as PEFT would have it, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from runs import export, refused, set_in
from safetensors.torch import load_file, save_file
from test_export_architectures import WHOLE, transposed_files
from torch.distributed.checkpoint import save as save_dcp
from transformers import AutoModelForCausalLM

from accel_fsdp.exporter import companion_files

pytestmark = pytest.mark.filterwarnings("ignore")
MODULES = ["q_proj", "up_proj"]


def trained(base: Path, name: str = "default", **settings: Any) -> PeftModel:
    """An adapter that has moved from where it began."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": MODULES, "task_type": "CAUSAL_LM", **settings}
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings), adapter_name=name)
    moved(adapted)
    return adapted


def moved(adapted: PeftModel) -> None:
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
                parameter.add_(torch.randn_like(parameter) * 0.02)


def checkpoint_of(adapted: PeftModel, run_folder: Path, whole: bool = True) -> Path:
    """A sharded checkpoint of base and adapters, or of what PEFT would save, and what a run notes about both."""
    inner = run_folder / "checkpoint-1" / "pytorch_model_fsdp_0"
    inner.mkdir(parents=True)
    (inner.parent / "trainer_state.json").write_text('{"global_step": 1}')
    state = dict(adapted.state_dict())
    if not whole:
        adapted.save_pretrained(run_folder / "saved")
        state = load_file(run_folder / "saved" / "adapter_model.safetensors")
    save_dcp({"model": state}, checkpoint_id=inner, no_dist=True)
    companion_files.describe(adapted, None, run_folder / "model")
    return run_folder


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=1e-6)


STARTS = ("pissa", "pissa_niter_4", "olora", "lora_ga")
FITS = r"the adapter's file (holds LoRA matrices of|lacks) .*, (and|which) |doesn't fit its base|PEFT can't build"
HEAD = {"modules_to_save": ["lm_head"]}
Changed = tuple[dict[str, Any], dict[str, Any], str]
UNMERGED: dict[str, Changed] = {
    **{start: ({"init_lora_weights": start}, {}, start) for start in STARTS},
    "tokens that call": ({"alora_invocation_tokens": [1, 2]}, {}, "alora_invocation_tokens"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 2]]}, {}, "layer_replication"),
    "bias": ({"bias": "lora_only"}, {}, "bias"),
    "of a later PEFT": ({}, {"some_later_variant": {"on": 1}}, "some_later_variant"),
    "another rank": (HEAD, {"r": 3}, FITS),
    "magnitudes": (HEAD, {"use_dora": True}, FITS),
    "no number": (HEAD, {"lora_alpha": "x"}, FITS),
    "fewer modules": (HEAD, {"target_modules": ["q_proj"]}, FITS),
    "a module left out": (HEAD, {"exclude_modules": ["up_proj"]}, FITS),
    "saved instead": (HEAD, {"modules_to_save": ["mlp"]}, FITS),
    "one more saved": (HEAD, {"modules_to_save": ["lm_head", "norm"]}, FITS),
    "a wider pattern": (HEAD, {"target_modules": r".*\.(q|k|up)_proj"}, FITS),
}
"""What an adapter is trained with, what its settings say afterwards, and why it is not merged."""


@pytest.mark.parametrize("what", UNMERGED)
def test_merges_that_need_more_than_two_matrices_and_what_the_file_contradicts(
    what: str, tiny_model: Path, tmp_path: Path
) -> None:
    """PEFT would pass over the matrices, or leave the module that is missing as the base has it."""
    settings, changed, message = UNMERGED[what]
    trained(tiny_model, **settings).save_pretrained(tmp_path / "adapter")
    set_in(tmp_path / "adapter" / "adapter_config.json", **changed)
    refused(message, tmp_path / "adapter", merge_adapter=True)
    if message != FITS:
        assert export(tmp_path / "adapter", tmp_path / "alone").keys()


@pytest.mark.parametrize(
    ("settings", "gone", "message"),
    [
        ({}, "up_proj.lora_", r"lacks LoRA tensors of 1 of 4 modules \(model.layers.1.mlp.up_proj\), which"),
        ({}, "up_proj.lora_A", r"lacks LoRA tensors of 1 of 4 modules \(model.layers.1.mlp.up_proj\), which"),
        ({"target_modules": "all-linear"}, "up_proj.lora_", "lacks LoRA tensors of 1 of 14 modules"),
        (HEAD, "lm_head", r"the adapter's file lacks lm_head\.weight, which adapter_config"),
    ],
)
def test_tensors_that_are_missing_are_counted(
    settings: dict[str, Any], gone: str, message: str, tiny_model: Path, tmp_path: Path
) -> None:
    """PEFT loads such a file in silence, and the modules stay as the base has them."""
    trained(tiny_model, **settings).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    content = load_file(path)
    last = [name for name in content if gone in name and ".layers.0." not in name]
    save_file({name: tensor for name, tensor in content.items() if name not in last}, path)
    error = refused(message, tmp_path / "adapter", merge_adapter=True)
    assert "adapter_model.safetensors again" in error.fix


def test_matrices_of_single_experts_are_named(tmp_path: Path) -> None:
    """As transformers 4 trained them: the file isn't incomplete, which would be the other reason."""
    WHOLE["mixtral"]().save_pretrained(tmp_path / "base")
    trained(tmp_path / "base", target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
    set_in(tmp_path / "adapter" / "adapter_config.json", target_modules=["q_proj", "w1", "w2", "w3"])
    refused("holds matrices of single experts", tmp_path / "adapter", merge_adapter=True)


KINDS: dict[str, dict[str, Any]] = {
    "gaussian": {"init_lora_weights": "gaussian", "use_rslora": True},
    "orthogonal": {"init_lora_weights": "orthogonal", "alpha_pattern": {"q_proj": 32}},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "embeddings alone": {"target_modules": ["embed_tokens"]},
    "dora on embeddings": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "tokens": {"trainable_token_indices": [7, 3]},
    "tokens by name": {"trainable_token_indices": {"embed_tokens": [3, 500]}},
    "saved modules": {"modules_to_save": ["lm_head", "norm", "not in this model"]},
}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_makes_of_it(
    kind: str, whole: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a sharded checkpoint: the file that PEFT saves, and the weights that it merges."""
    adapted = trained(tiny_model, **KINDS[kind])
    run_folder = checkpoint_of(adapted, tmp_path / "run", whole)
    adapted.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    ours = export(run_folder, tmp_path / "adapter", verify="load", model=str(tiny_model))
    same({name: tensor for name, tensor in ours.items() if ".base_layer." not in name}, theirs)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "adapter")
    merged = export(run_folder, tmp_path / "merged", merge_adapter=True)
    same(merged, adapted.merge_and_unload().state_dict())


def test_a_changed_base_is_merged_where_the_checkpoint_holds_it(tiny_model: Path, tmp_path: Path) -> None:
    adapted = trained(tiny_model, init_lora_weights="pissa")
    run_folder = checkpoint_of(adapted, tmp_path / "run")
    merged = export(run_folder, tmp_path / "out", merge_adapter=True)
    same(merged, adapted.merge_and_unload().state_dict())


def test_of_several_adapters_none_is_taken_in_silence(tiny_model: Path, tmp_path: Path) -> None:
    """Of other ranks and scales, as DPO leaves them; as PEFT saves them, each has a folder."""
    adapted = trained(tiny_model, modules_to_save=["norm"])
    adapted.add_adapter("ref", LoraConfig(r=2, lora_alpha=32, target_modules=["q_proj"], modules_to_save=["norm"]))
    moved(adapted)
    refused("holds 2 adapters: default, ref", checkpoint_of(adapted, tmp_path / "run"), tmp_path / "out")
    adapted.save_pretrained(tmp_path / "saved")
    for name in ("", "ref"):
        theirs = load_file(tmp_path / "saved" / name / "adapter_model.safetensors")
        same(export(tmp_path / "saved" / name, tmp_path / f"out {name}", model=str(tiny_model)), theirs)


def test_adapters_of_other_kinds_are_not_a_model(tiny_model: Path, tmp_path: Path) -> None:
    """IA3's factors lie beside the base's weights, under names of their own."""
    from peft import IA3Config

    settings = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), settings)
    run_folder = checkpoint_of(adapted, tmp_path / "run")
    refused("its adapter is not LoRA", run_folder)


@pytest.mark.parametrize(
    ("make", "module", "said"),
    [
        *(("gpt2", "attn.c_proj", True), ("gpt2", "attn.c_proj", False)),
        *(("llama tied", "q_proj", True), ("llama tied", "q_proj", False)),
        *((make, "v_proj", None) for make in ("mixtral", "llava", "gemma3 with images")),
    ],
)
def test_a_base_whose_files_have_other_names_or_layouts(
    make: str, module: str, said: bool | None, tmp_path: Path
) -> None:
    """The adapter is named as the model in memory, the base as its files.

    Whether a weight is turned is told by its layer, as to PEFT, whatever `fan_in_fan_out` says: a square one would be
    merged wrongly, silently.
    """
    torch.manual_seed(0)
    model = WHOLE[make]()
    model.save_pretrained(tmp_path / "base")
    before = load_file(tmp_path / "base" / "model.safetensors")
    adapted = get_peft_model(type(model).from_pretrained(tmp_path / "base"), LoraConfig(r=2, target_modules=[module]))
    moved(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    if said is not None:
        set_in(tmp_path / "adapter" / "adapter_config.json", fan_in_fan_out=said)
    adapted.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours = export(tmp_path / "adapter", tmp_path / "out", merge_adapter=True, model=str(tmp_path / "base"))
    same(ours, load_file(tmp_path / "theirs" / "model.safetensors"))
    assert any(not torch.equal(ours[name], before[name]) for name in ours)


def test_a_base_whose_files_are_transposed_is_not_merged(tmp_path: Path) -> None:
    """The sum of both would fit, and be wrong."""
    model = WHOLE["llama tied"]()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    moved(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    with transposed_files():
        adapted.unload().save_pretrained(tmp_path / "base")
        refused("hold in another layout", tmp_path / "adapter", merge_adapter=True, model=str(tmp_path / "base"))


def test_a_vocabulary_that_has_grown_is_in_no_adapter(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.resize_token_embeddings(520)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    moved(adapted)
    adapted.peft_config["default"].base_model_name_or_path = str(tiny_model)
    run_folder = checkpoint_of(adapted, tmp_path / "run")
    refused(r"has 520 rows, the vocabulary of .* 509", run_folder)
    merged = export(run_folder, tmp_path / "out", merge_adapter=True, model=str(run_folder / "model"))
    same(merged, adapted.merge_and_unload().state_dict())


APART: dict[str, dict[str, Any]] = {
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
    "head saved": {"modules_to_save": ["lm_head"]},
    "both saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding adapted": {"target_modules": ["q_proj", "embed_tokens"]},
    "head adapted": {"target_modules": ["q_proj", "lm_head"]},
}


def tied_adapter(folder: Path, **settings: Any) -> PeftModel:
    """On a base with one weight for embedding and head; whatever is trained has moved."""
    torch.manual_seed(0)
    WHOLE["llama tied"]().save_pretrained(folder / "base")
    adapted = trained(folder / "base", **{"target_modules": ["q_proj"], **settings})
    adapted.save_pretrained(folder / "adapter")
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter").eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.arange(1, 9)[None]).logits
    return logits


@pytest.mark.parametrize("what", APART)
def test_tied_weights_that_were_trained_apart_are_not_merged(what: str, tmp_path: Path) -> None:
    """PEFT keeps the other one as it was. The advice, followed, makes the model that was trained."""
    adapted = tied_adapter(tmp_path, **APART[what])
    caught = refused(r"the adapter changes .* ties to ", tmp_path / "adapter", merge_adapter=True)
    advice = caught.fix.removeprefix("untie the base: ").partition(", then --model FOLDER")[0]
    places = {"BASE": str(tmp_path / "base"), "FOLDER": str(tmp_path / "untied")}
    exec(advice.replace("), base", ")\nbase"), {"AutoModelForCausalLM": AutoModelForCausalLM, **places})
    export(tmp_path / "adapter", tmp_path / "out", merge_adapter=True, model=places["FOLDER"])
    ours = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(ours, logits(adapted), atol=1e-5, rtol=1e-5)


def test_tied_weights_that_were_trained_together_are_merged(tmp_path: Path) -> None:
    adapted = tied_adapter(tmp_path, trainable_token_indices=[3, 7])
    export(tmp_path / "adapter", tmp_path / "out", merge_adapter=True)
    ours = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(ours, logits(adapted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("says", ["adapter_config.json", "run.json"])
def test_a_base_on_the_hub_is_the_revision_that_was_trained(
    says: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub cache with two revisions of one model, read without network."""
    place, commits = tmp_path / "hub" / "models--me--base", {"main": "a" * 40, "v1": "b" * 40}
    for factor, (name, commit) in enumerate(commits.items(), start=1):
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / name).write_text(commit)
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.get_input_embeddings().weight.data *= factor
        model.save_pretrained(place / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    adapted = trained(place / "snapshots" / commits["v1"])
    adapted.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    set_in(path, base_model_name_or_path="me/base", revision="v1" if says == path.name else None)
    account = {"arguments": {"model": {"model_name_or_path": "me/base", "model_revision": "v1"}}}
    if says == "run.json":
        (tmp_path / "adapter" / says).write_text(json.dumps(account))
    expected = adapted.merge_and_unload().state_dict()
    same(export(tmp_path / "adapter", tmp_path / "out", merge_adapter=True), expected)
    same(export(tmp_path / "adapter", tmp_path / "again", merge_adapter=True, model="me/base"), expected)
    for gone in ("v2", "../../x"):
        set_in(path, revision=gone)
        message = f"cannot get me/base at revision {gone}"
        refused(message, tmp_path / "adapter", tmp_path / "other", merge_adapter=True)
