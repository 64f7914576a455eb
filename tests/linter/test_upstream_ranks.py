"""What the libraries do on two real FSDP ranks today: the reasons for rules and workarounds. Red means: fixed upstream.

Each launch runs many experiments in one process group (`upstream_probe.py`), the tests read what the ranks saw. `pain`
marks the rows of the list of known pains that a test shows.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, accelerate_launch, run
from packaging.version import Version
from reports import script_of
from upstream_sharding import CONFIGS

from accel_fsdp.config import Engine
from accel_fsdp.job import Job, Layout, clashes
from accel_fsdp.job.combinations import ADAMW
from accel_fsdp.models import model_facts

PROBE = ROOT / "tests" / "upstream_probe.py"
LAYERS = ["LlamaDecoderLayer", "LlamaDecoderLayer"]
BESIDES_LAYERS = ["Embedding", "Linear", "LlamaForCausalLM", "LlamaRMSNorm"]
WHOLE = {"fsdp1": ["LlamaForCausalLM"], "fsdp2": BESIDES_LAYERS}
IS_OLD = Version(torch.__version__) < Version("2.13")
LATER = pytest.mark.skipif(IS_OLD, reason="torch 2.11 does something else here")
SHARED = "is shared with a parameter already managed by another FSDP group"

Seen = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("upstream")


def launch(folder: Path, group: str, processes: int = 2) -> Seen:
    """Runs a group of experiments; what each rank saw, by the experiment's name."""
    (folder / group).mkdir()
    config = folder / f"{group}.yaml"
    content = {"distributed_type": "FSDP", "num_processes": processes, "num_machines": 1, "mixed_precision": "no"}
    config.write_text(yaml.safe_dump({**content, "fsdp_config": {"fsdp_version": 2}}))
    finished = accelerate_launch(config, PROBE, group, folder / group, CUDA_VISIBLE_DEVICES="")
    assert finished.code == 0, finished.output[-5000:]
    lines = [line.partition("PROBE ")[2] for line in finished.output.splitlines() if "PROBE {" in line]
    return {record["name"]: record["ranks"] for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def sharding(folder: Path) -> Seen:
    return launch(folder, "sharding")


@pytest.fixture(scope="module")
def saving(folder: Path) -> Seen:
    return launch(folder, "saving")


def same(ranks: list[Any]) -> Any:
    """What all ranks saw alike."""
    assert all(seen == ranks[0] for seen in ranks), ranks
    return ranks[0]


pain = pytest.mark.pain


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        # AF302: NO_SHARD under that key, from the YAML or from TrainingArguments, still trains FULL_SHARD.
        pytest.param("reshard_key_under_fsdp1", dict.fromkeys(("yaml", "arguments"), "FULL_SHARD"), marks=pain("P04")),
        # AF306: a layer class alone wraps nothing; FSDP2 still splits off the embedding, the head and the last norm.
        pytest.param("no_wrap_policy", WHOLE, marks=pain("P09")),
        # AF503: an empty `_no_split_modules` passes for an answer, and no layer becomes a unit.
        pytest.param("no_split_modules_empty", WHOLE, marks=pain("P11")),
        # `from_pretrained` gives rank 1 the real weights too, not empty or random ones.
        pytest.param("ram_efficient_loading", {"real": True, "devices": ["cpu"]}, marks=pain("P13")),
        # AF613: weights, gradients and Adam's moments are all bf16; with mixed precision they are all float32.
        pytest.param("pure_bf16", {"no": ["torch.bfloat16"], "bf16": ["torch.float32"]}, marks=pain("P14")),
        # AF317: with `use_orig_params: false` Trainer finds none of the 5 norms that it would not decay.
        pytest.param("weight_decay_groups", {"False": 0, "True": 5}, marks=pain("P29")),
        # AF609: Trainer registers `generate` with FSDP2's hooks; FSDP1 leaves it a flattened embedding.
        pytest.param("generating", {"fsdp2": "", "fsdp1": "RuntimeError: 'weight' must be 2-D"}, marks=pain("P61")),
        # AF610: it reads the shape of a weight that is flat.
        pytest.param("dora", {"fsdp1": "IndexError: tuple index out of range", "fsdp2": ""}, marks=pain("P85")),
    ],
)
def test_what_all_ranks_see(experiment: str, expected: Any, sharding: Seen) -> None:
    assert same(sharding[experiment]) == expected


@pytest.mark.parametrize(
    ("experiment", "error"),
    [
        # AF316: 2 x 2 on two ranks.
        pytest.param("mesh_too_large", "Mesh should not be bigger than default world size 2", marks=pain("P42")),
        # AF603: FSDP's own in the YAML and the model's in the arguments.
        pytest.param("checkpointing_twice", "can't both be set to True", marks=pain("P25")),
    ],
)
def test_what_stops_all_ranks(experiment: str, error: str, sharding: Seen) -> None:
    assert error in same(sharding[experiment])


@pytest.mark.pain("P12")
def test_each_rank_holds_a_full_float32_copy_before_it_shards(sharding: Seen) -> None:
    """Even with RAM-efficient loading a 16-bit model is upcast whole, on every rank, before it goes to meta."""
    seen = same(sharding["upcast_before_meta"])
    assert seen["dtypes"] == ["torch.float32"]
    assert seen["bytes"] == 4 * seen["elements"]


@pytest.mark.pain("P15")
def test_fsdp1_rounds_rope_frequencies(sharding: Seen) -> None:
    """AF318: FSDP1 casts buffers to bf16, FSDP2 leaves 10 ** -0.5 in float32."""
    seen = same(sharding["rope_buffers"])
    assert seen["fsdp1"] == ["torch.bfloat16", 0.31640625]
    assert seen["fsdp2"] == ["torch.float32", pytest.approx(10**-0.5, rel=1e-6)]


@pytest.mark.pain("P27", "P28")
def test_the_default_size_wraps_nothing_in_a_small_model(sharding: Seen) -> None:
    """AF308: 1e8 parameters is more than a layer has, so there is one unit; a fitting size makes the layers units."""
    seen = sharding["size_based"][0]
    assert seen["default"] == ["LlamaForCausalLM"]
    assert seen["fitting"] == [*LAYERS, "LlamaForCausalLM"]
    assert "does not support containers that do not implement forward: ModuleList" in seen["fsdp2"]  # AF307


@pytest.mark.pain("P30")
def test_a_partly_frozen_unit_can_not_be_flattened(sharding: Seen) -> None:
    """AF317: frozen and trained parameters in one layer; LoRA passes, as Trainer gives it a policy of its own."""
    seen = same(sharding["partly_frozen"])
    assert "Must flatten tensors with uniform `requires_grad`" in seen["layer"]
    assert seen["lora"] == ""


@pytest.mark.pain("P32")
def test_a_unit_of_two_dtypes_fails_unless_fsdp2_upcasts_it(sharding: Seen) -> None:
    """FSDP1 refuses it under any precision, FSDP2 only where it does not upcast first."""
    for seen in sharding["mixed_dtypes"]:
        assert "Must flatten tensors with uniform dtype" in seen["1-no"]
        assert "Must flatten tensors with uniform dtype" in seen["1-bf16"]
        assert "FSDP expects uniform original parameter dtype" in seen["2-no"]
        assert seen["2-bf16"] == ""


@pytest.mark.pain("P36", "P37")
@pytest.mark.parametrize("engine", [Engine.FSDP1, Engine.FSDP2])
@pytest.mark.parametrize(
    "name",
    ["adafactor", "adamw_bnb_8bit", "lion_32bit", "adagrad", "sgd", ADAMW.removeprefix("--optim ")],
)
def test_the_table_knows_which_optimizers_step_and_save(name: str, engine: Engine, sharding: Seen) -> None:
    """AF604 and AF605: what the table of combinations says is what stock Trainer does, no more and no less."""
    if (name, engine) == ("adagrad", Engine.FSDP2) and IS_OLD:
        pytest.skip("torch 2.11 stops at its step already")
    step, save, weights = sharding["optimizers"][0][name][engine.label]
    of_weights = Job(Layout(engine), optimizer=name, flags=frozenset({"save_only_model"}))
    effects = [[clash.effect for clash in clashes(job)] for job in (replace(of_weights, flags=frozenset()), of_weights)]
    assert effects[0] == (["stops"] if step else ["stops when it saves"] if save else [])
    assert effects[1] == (["stops"] if weights else [])


@pytest.mark.pain("P99")
def test_label_smoothing_compares_tokens_with_themselves_under_fsdp2(sharding: Seen) -> None:
    """AF630: a billionth of smoothing must not change the loss; under FSDP2 it compares with other labels."""
    seen = sharding["label_smoothing"][0]
    plain, smoothed = seen["FSDP1"]
    assert smoothed == pytest.approx(plain, rel=1e-4)
    plain, smoothed = seen["FSDP2"]
    assert abs(smoothed - plain) > 0.01 * plain


@pytest.mark.pain("P103")
def test_hybrid_with_one_rank_a_copy_shards_nothing(sharding: Seen) -> None:
    """AF328 of FSDP1 with one process on each machine; AF316 of FSDP2, which stops."""
    seen = same(sharding["copies_of_one_rank"])
    assert seen["FSDP1"] == {"2": 0.5, "1": 1.0}
    assert "no dimension for FSDP to shard across" in seen["FSDP2"]


@pytest.mark.pain("P40")
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
def test_fsdp2_shards_fully_whatever_the_strategy(strategy: str, sharding: Seen) -> None:
    """AF303: the mesh is one row of all ranks, and each holds half."""
    assert same(sharding["strategy_under_fsdp2"])[strategy] == [[2], 0.5]


@pytest.mark.pain("P24")
def test_evaluate_before_train_fails(sharding: Seen) -> None:
    """FSDP2 can't prepare a model without an optimizer; FSDP1 can, and then has none to train with."""
    seen = same(sharding["evaluate_before_train"])
    assert "a model and optimizer must be passed together" in seen["fsdp2"]
    assert seen["fsdp1 evaluate"] == ""
    assert seen["fsdp1 train"] == "AttributeError: 'NoneType' object has no attribute 'param_groups'"


@pytest.mark.pain("P70")
def test_activation_checkpointing_without_a_policy(sharding: Seen) -> None:
    """AF312: FSDP2 calls a policy that is None; FSDP1 wraps each module, activation functions and norms included."""
    seen = same(sharding["checkpointing_without_policy"])
    assert seen["fsdp2"] == "TypeError: 'NoneType' object is not callable"
    assert {"LlamaForCausalLM", "LlamaDecoderLayer", "Linear", "SiLUActivation", "LlamaRMSNorm"} <= set(seen["fsdp1"])


@LATER
@pytest.mark.pain("P72")
def test_a_tied_embedding_in_a_unit_of_its_own_is_refused(sharding: Seen) -> None:
    """AF319: `Embedding` among the layer classes takes the weight that the head shares."""
    seen = same(sharding["tied_embedding_class"])
    assert SHARED in seen["with Embedding"]
    assert seen["without"] == ""


@LATER
@pytest.mark.pain("P73")
def test_adapters_on_tied_embeddings_fail_under_fsdp2(sharding: Seen) -> None:
    """AF622: what fails, and how, depends on RAM-efficient loading: only with it can the embedding alone be trained."""
    seen = same(sharding["tied_adapters"])
    assert seen["fsdp1"] == seen["adapted head False"] == ""
    for name in ("both", "head", "adapted head"):
        assert seen[f"{name} True"] == "KeyError: \"attribute 'weight' already exists\""
    assert "`model.embed_tokens.weight` is neither a parameter, buffer" in seen["tokens True"]
    assert seen["one True"] == ""
    assert SHARED in seen["both False"]
    assert SHARED in seen["one False"]
    assert SHARED in seen["head False"]
    assert seen["tokens False"].startswith("TypeError")


@pytest.mark.pain("P78")
def test_checkpoints_of_the_model_alone_are_refused(sharding: Seen) -> None:
    """AF608: sharded, or together with `load_best_model_at_end`."""
    seen = same(sharding["only_model"])
    assert "save_only_model option is not compatible with FSDP state dict type 'SHARDED_STATE_DICT'" in seen["sharded"]
    assert "FSDP can't be used with `save_only_model` along with `load_best_model_at_end`" in seen["best"]


@pytest.mark.slow(but=1)
@pytest.mark.pain("P01", "P02")
@pytest.mark.parametrize("lost", ["fsdp2 ac", "fsdp1"])
def test_an_adapter_is_exported_empty(lost: str, saving: Seen) -> None:
    """AF601, AF602: a file of 40 bytes without a tensor; FSDP2 without FSDP's checkpointing writes all 8."""
    seen = same(saving["adapter_exports"])
    assert seen[lost] == [0, 40]
    assert seen["fsdp2"][0] == 8


@pytest.mark.pain("P03")
def test_save_model_writes_nothing_when_sharded(saving: Seen) -> None:
    """No folder, no file, no word, under both versions."""
    assert same(saving["sharded_save_model"]) == {"fsdp1": False, "fsdp2": False}


@pytest.mark.pain("P18")
def test_save_pretrained_without_a_state_dict(saving: Seen) -> None:
    """FSDP1 writes the shards of rank 0 as if they were the model, FSDP2 stops."""
    seen = saving["unwrapped_save_pretrained"][0]
    assert seen["fsdp1"]["lm_head.weight"] == [0]
    assert len(seen["fsdp1"]["model.embed_tokens.weight"]) == 1
    assert "Attempted to access the data pointer on an invalid python storage" in seen["fsdp2"]


@pytest.mark.pain("P20")
def test_a_switch_to_full_breaks_the_next_checkpoint_of_fsdp1(saving: Seen) -> None:
    """`set_state_dict_type` keeps the sharded config object; FSDP1 checks its type, FSDP2 does not."""
    seen = same(saving["full_after_sharded"])
    assert seen["fsdp1"][0] == seen["fsdp2"][0] == "ShardedStateDictConfig"
    assert seen["fsdp1"][1].startswith("RuntimeError: Expected state_dict_config of type")
    assert seen["fsdp2"][1] == ""


@pytest.mark.pain("P07")
def test_an_fsdp_yaml_without_an_accelerator_shards_nothing(folder: Path) -> None:
    """Each rank trains alone as a world of one; with `use_cpu` it is DDP. Both finish their steps without an error."""
    seen = same(launch(folder, "stock")["fsdp_on_cpu"])
    assert seen == {"False": [False, 1, "LlamaForCausalLM", 2], "True": [False, 2, "DistributedDataParallel", 2]}


@LATER
def test_which_models_have_embeddings_that_fsdp2_cannot_make_units_of(sharding: Seen) -> None:
    """AF513, AF514 and AF515, as the facts of the same models say."""
    seen = same(sharding["units_of_embeddings"])
    assert (seen["ViT"], seen["T5 FSDP1"]) == ("", "")
    assert "Invariant encountered: value was None" in seen["ViTEmbeddings"]
    assert "is shared with a parameter already managed by another FSDP group" in seen["BERT"]
    assert "is shared with a parameter already managed by another FSDP group" in seen["T5"]
    assert "`get_input_embeddings` not auto" in seen["CLIP"]
    assert "FSDP doesn't support scalar parameters" in seen["CLIP FSDP1"]
    facts = {name: model_facts(name, config) for name, config in CONFIGS.items()}
    assert {name: (value.embeddings, value.scalars) for name, value in facts.items()} == {
        "ViT": ("", False), "BERT": ("shared", False), "T5": ("shared", False), "CLIP": ("none", True),
    }  # fmt: skip
    assert facts["ViT"].embedding_parents == {"ViTEmbeddings"}
    assert [layer.name for layer in facts["ViT"].wrap_classes] == ["ViTLayer"]


@pytest.mark.pain("P106")
def test_the_script_of_the_report_shows_it(tmp_path: Path) -> None:
    """As printed on the page: what a whole count leaves is off by 271/272 with a float."""
    finished = run([sys.executable, script_of("divided by a token count", tmp_path)])
    whole, rounded = (float(line.split()[1]) for line in finished.output.splitlines() if line.startswith("torch."))
    assert rounded / whole == pytest.approx(271 / 272, rel=1e-5)


@pytest.mark.slow
@pytest.mark.pain("P107")
def test_the_script_of_the_report_about_adapters_shows_it(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    finished = run([sys.executable, *launcher, script_of("the cast of a layer's input", tmp_path)], OMP_NUM_THREADS="1")
    lines = [line for line in finished.output.splitlines() if line.startswith("casts: ")]
    assert len(lines) == 4
    assert all(("trains" in line) == ("False" in line) for line in lines)
