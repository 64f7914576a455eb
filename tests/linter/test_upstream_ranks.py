"""What the libraries do on real ranks today: the reasons for rules and workarounds. Red means: fixed upstream.

Each launch runs many experiments in one process group, the tests read what the ranks saw: `upstream_probe.py` is about
Accelerate and Trainer, `upstream_mesh.py` about transformers' meshes. `pain` marks the rows of the list of known pains
that a test shows.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import upstream_mesh
import upstream_sharding
import yaml
from conftest import ROOT, Finished, accelerate_launch, run
from packaging.version import Version
from reports import script_of

from accel_fsdp.config import Engine
from accel_fsdp.job import Job, Layout, clashes
from accel_fsdp.job.combinations import ADAMW
from accel_fsdp.models import model_facts

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PLAIN = ("LlamaForCausalLM", 2)
LAYERS = ["LlamaDecoderLayer", "LlamaDecoderLayer", "LlamaForCausalLM"]
WHOLE = {"fsdp1": ["LlamaForCausalLM"], "fsdp2": ["Embedding", "Linear", "LlamaForCausalLM", "LlamaRMSNorm"]}
IS_OLD = Version(torch.__version__) < Version("2.13")

Seen = dict[str, list[Any]]


class Part(str):
    """Equals each text that contains it."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) in other


SHARED = Part("is shared with a parameter already managed by another FSDP group")
EXISTS = "KeyError: \"attribute 'weight' already exists\""
EXACT = pytest.approx(10**-0.5, rel=1e-6)
UNEVEN = Part("Must flatten tensors with uniform dtype")
EXPECTS_ONE = Part("FSDP expects uniform original parameter dtype")
TOGETHER = Part("a model and optimizer must be passed together")
NO_GROUPS = "AttributeError: 'NoneType' object has no attribute 'param_groups'"
LISTS = Part("does not support containers that do not implement forward: ModuleList")
UNSEEN = Part("`model.embed_tokens.weight` is neither a parameter, buffer")
NOT_SHARDED = Part("save_only_model option is not compatible with FSDP state dict type 'SHARDED_STATE_DICT'")
NOT_WITH_BEST = Part("FSDP can't be used with `save_only_model` along with `load_best_model_at_end`")
NO_DIMENSION = Part("no dimension for FSDP to shard across")
KEPT, OTHER_TYPE = "ShardedStateDictConfig", Part("RuntimeError: Expected state_dict_config of type")


def records(finished: Finished, mark: str) -> list[Any]:
    """What rank 0 printed after this mark."""
    assert finished.code == 0, finished.output[-5000:]
    lines = [line.partition(mark) for line in finished.output.splitlines()]
    return [json.loads(text) for _, mark, text in lines if mark]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank saw, by the experiment's name."""
    folder, ranks = tmp_path_factory.mktemp("upstream"), Seen()
    content = {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1, "mixed_precision": "no"}
    (config := folder / "fsdp.yaml").write_text(yaml.safe_dump({**content, "fsdp_config": {"fsdp_version": 2}}))
    for group in ("sharding", "saving", "stock"):
        words = (ROOT / "tests" / "upstream_probe.py", group, folder / group)
        (folder / group).mkdir()
        finished = accelerate_launch(config, *words, CUDA_VISIBLE_DEVICES="")
        ranks |= {record["name"]: record["ranks"] for record in records(finished, "PROBE ")}
    finished = run([*TORCHRUN, ROOT / "tests" / "upstream_mesh.py", folder / "mesh"])
    return ranks | {name: [text] for name, text in records(finished, "SEEN ")}


def row(pains: str, experiment: str, expected: Any = None, later: bool = False, **named: Any) -> Any:
    """A case that shows these pains; `later`: torch 2.11 does something else."""
    skip = pytest.mark.skipif(later and IS_OLD, reason="torch 2.11 does something else here")
    marks = [pytest.mark.pain(*pains.split()), skip]
    return pytest.param(experiment, named if expected is None else expected, marks=marks, id=experiment)


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        # AF302: NO_SHARD under that key, from the YAML or from TrainingArguments, still trains FULL_SHARD.
        row("P04", "reshard_key_under_fsdp1", dict.fromkeys(("yaml", "arguments"), "FULL_SHARD")),
        # Each rank trains alone as a world of one; with `use_cpu` it is DDP. Both finish their steps without an error.
        row("P07", "fsdp_on_cpu", {"False": [False, 1, *PLAIN], "True": [False, 2, "DistributedDataParallel", 2]}),
        # AF306: a layer class alone wraps nothing; FSDP2 still splits off the embedding, the head and the last norm.
        row("P09", "no_wrap_policy", WHOLE),
        # AF503: an empty `_no_split_modules` passes for an answer, and no layer becomes a unit.
        row("P11", "no_split_modules_empty", WHOLE),
        # `from_pretrained` gives rank 1 the real weights too, not empty or random ones.
        row("P13", "ram_efficient_loading", {"real": True, "devices": ["cpu"]}),
        # AF613: weights, gradients and Adam's moments are all bf16; with mixed precision they are all float32.
        row("P14", "pure_bf16", {"no": ["torch.bfloat16"], "bf16": ["torch.float32"]}),
        # AF318: FSDP1 casts buffers to bf16, FSDP2 leaves 10 ** -0.5 in float32.
        row("P15", "rope_buffers", fsdp1=["torch.bfloat16", 0.31640625], fsdp2=["torch.float32", EXACT]),
        # FSDP2 can't prepare a model without an optimizer; FSDP1 can, and then has none to train with.
        row("P24", "evaluate_before_train", {"fsdp2": TOGETHER, "fsdp1 evaluate": "", "fsdp1 train": NO_GROUPS}),
        # AF603: FSDP's own in the YAML and the model's in the arguments.
        row("P25", "checkpointing_twice", Part("can't both be set to True")),
        # AF308: 1e8 parameters is more than a layer has, so there is one unit; a fitting size makes the layers units.
        row("P27 P28", "size_based", default=LAYERS[2:], fitting=LAYERS, fsdp2=LISTS),  # AF307
        # AF317: with `use_orig_params: false` Trainer finds none of the 5 norms that it would not decay.
        row("P29", "weight_decay_groups", {"False": 0, "True": 5}),
        # AF317: frozen and trained parameters in one layer; LoRA passes, as Trainer gives it a policy of its own.
        row("P30", "partly_frozen", {"layer": Part("Must flatten tensors with uniform `requires_grad`"), "lora": ""}),
        # AF505: FSDP1 refuses a unit of two dtypes under any precision, FSDP2 only where it does not upcast first.
        row("P32", "mixed_dtypes", {"1-no": UNEVEN, "1-bf16": UNEVEN, "2-no": EXPECTS_ONE, "2-bf16": ""}),
        # AF303: the mesh is one row of all ranks, and each holds half.
        row("P40", "strategy_under_fsdp2", {"HYBRID_SHARD": [[2], 0.5], "NO_SHARD": [[2], 0.5]}),
        # AF316: 2 x 2 on two ranks.
        row("P42", "mesh_too_large", Part("Mesh should not be bigger than default world size 2")),
        # AF609: Trainer registers `generate` with FSDP2's hooks; FSDP1 leaves it a flattened embedding.
        row("P61", "generating", {"fsdp2": "", "fsdp1": "RuntimeError: 'weight' must be 2-D"}),
        # AF319: `Embedding` among the layer classes takes the weight that the head shares.
        row("P72", "tied_embedding_class", {"with Embedding": SHARED, "without": ""}, later=True),
        # AF622: what fails, and how, depends on RAM-efficient loading: only with it can the embedding alone be trained.
        row(
            "P73",
            "tied_adapters",
            {
                **{"fsdp1": "", "adapted head False": "", "one True": ""},
                **{f"{name} True": EXISTS for name in ("both", "head", "adapted head")},
                **{f"{name} False": SHARED for name in ("both", "head", "one")},
                **{"tokens True": UNSEEN, "tokens False": Part("TypeError: ")},
            },
            later=True,
        ),
        # AF608: sharded, or together with `load_best_model_at_end`.
        row("P78", "only_model", sharded=NOT_SHARDED, best=NOT_WITH_BEST),
        # AF610: it reads the shape of a weight that is flat.
        row("P85", "dora", {"fsdp1": "IndexError: tuple index out of range", "fsdp2": ""}),
        # AF328 of FSDP1 with one process on each machine; AF316 of FSDP2, which stops.
        row("P103", "copies_of_one_rank", FSDP1={"2": 0.5, "1": 1.0}, FSDP2=NO_DIMENSION),
        # AF601, AF602: a file of 40 bytes without a tensor; FSDP2 without FSDP's checkpointing writes all 8.
        row("P01 P02", "adapter_exports", {"fsdp2 ac": [0, 40], "fsdp1": [0, 40], "fsdp2": [8, ANY]}),
        # AF901: no folder, no file, no word, under both versions.
        row("P03", "sharded_save_model", {"fsdp1": False, "fsdp2": False}),
        # `set_state_dict_type` keeps the sharded config object; FSDP1 checks its type, FSDP2 does not.
        row("P20", "full_after_sharded", fsdp1=[KEPT, OTHER_TYPE], fsdp2=[KEPT, ""]),
        # AF513, AF514 and AF515, as the facts of the same models say.
        row(
            "",
            "units_of_embeddings",
            {
                **{"ViT": "", "T5 FSDP1": "", "ViTEmbeddings": Part("Invariant encountered: value was None")},
                **{"BERT": SHARED, "T5": SHARED, "CLIP": Part("`get_input_embeddings` not auto")},
                "CLIP FSDP1": Part("FSDP doesn't support scalar parameters"),
            },
            later=True,
        ),
        # AF516
        row("", "heads", Part("is invalid for input of size")),
        row("", "key/value heads", Part("is invalid for input of size")),
        row("", "experts", Part("Cannot evenly shard 5 experts")),
        # AF517: gpt-oss has a plan for its experts; with `tp` its head alone is divided, each rank holds all layers.
        row("", "no tensor plan", Part("has no `tp_plan`")),
        row("", "no expert plan", Part("has no `ep_plan`")),
        row("", "head alone", "Parameter"),
        # AF519
        row("", "4 bits", Part("AssertionError")),
        row("", "4 bits in shards", Part("exceeds dimension size")),
        # What no rule says runs.
        row("", "even", "DTensor"),
        row("", "whole attention", ""),
        row("", "whole attention, others divided", "DTensor"),
    ],
)
def test_what_all_ranks_see(experiment: str, expected: Any, seen: Seen) -> None:
    assert seen[experiment] == [expected] * len(seen[experiment])


@pytest.mark.pain("P12")
def test_each_rank_holds_a_full_float32_copy_before_it_shards(seen: Seen) -> None:
    """Even with RAM-efficient loading a 16-bit model is upcast whole, on every rank, before it goes to meta."""
    for rank in seen["upcast_before_meta"]:
        assert rank == {"dtypes": ["torch.float32"], "bytes": 4 * rank["elements"], "elements": ANY}


OPTIMIZERS = ("adafactor", "adamw_bnb_8bit", "lion_32bit", "adagrad", "sgd", ADAMW.removeprefix("--optim "))


@pytest.mark.pain("P36", "P37")
@pytest.mark.parametrize("engine", [Engine.FSDP1, Engine.FSDP2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_knows_which_optimizers_step_and_save(name: str, engine: Engine, seen: Seen) -> None:
    """AF604 and AF605: what the table of combinations says is what stock Trainer does, no more and no less."""
    if (name, engine) == ("adagrad", Engine.FSDP2) and IS_OLD:
        pytest.skip("torch 2.11 stops at its step already")
    step, save, weights = seen["optimizers"][0][name][engine.label]
    of_weights = Job(Layout(engine), optimizer=name, flags=frozenset({"save_only_model"}))
    effects = [[clash.effect for clash in clashes(job)] for job in (replace(of_weights, flags=frozenset()), of_weights)]
    assert effects[0] == (["stops"] if step else ["stops when it saves"] if save else [])
    assert effects[1] == (["stops"] if weights else [])


@pytest.mark.pain("P99")
def test_label_smoothing_compares_tokens_with_themselves_under_fsdp2(seen: Seen) -> None:
    """AF630: a billionth of smoothing must not change the loss; under FSDP2 it compares with other labels."""
    losses = seen["label_smoothing"][0]
    plain, smoothed = losses["FSDP1"]
    assert smoothed == pytest.approx(plain, rel=1e-4)
    plain, smoothed = losses["FSDP2"]
    assert abs(smoothed - plain) > 0.01 * plain


@pytest.mark.pain("P70")
def test_activation_checkpointing_without_a_policy(seen: Seen) -> None:
    """AF312: FSDP2 calls a policy that is None; FSDP1 wraps each module, activation functions and norms included."""
    modules = {"LlamaForCausalLM", "LlamaDecoderLayer", "Linear", "SiLUActivation", "LlamaRMSNorm"}
    for rank in seen["checkpointing_without_policy"]:
        assert rank["fsdp2"] == "TypeError: 'NoneType' object is not callable"
        assert modules <= set(rank["fsdp1"])


@pytest.mark.pain("P18")
def test_save_pretrained_without_a_state_dict(seen: Seen) -> None:
    """FSDP1 writes the shards of rank 0 as if they were the model, FSDP2 stops."""
    rank_0 = seen["unwrapped_save_pretrained"][0]
    assert rank_0["fsdp1"]["lm_head.weight"] == [0]
    assert len(rank_0["fsdp1"]["model.embed_tokens.weight"]) == 1
    assert "Attempted to access the data pointer on an invalid python storage" in rank_0["fsdp2"]


def test_the_facts_of_the_same_models_say_so_before() -> None:
    facts = {name: model_facts(name, config) for name, config in upstream_sharding.CONFIGS.items()}
    assert {name: (value.embeddings, value.scalars) for name, value in facts.items()} == {
        "ViT": ("", False), "BERT": ("shared", False), "T5": ("shared", False), "CLIP": ("none", True),
    }  # fmt: skip
    assert facts["ViT"].embedding_parents == {"ViTEmbeddings"}
    assert [layer.name for layer in facts["ViT"].wrap_classes] == ["ViTLayer"]
    facts = {name: model_facts("a", config) for name, (config, _, _) in upstream_mesh.CASES.items()}
    assert (facts["heads"].heads, facts["key/value heads"].kv_heads, facts["whole attention"].heads) == (3, 3, 0)
    assert (facts["experts"].experts, facts["experts"].fused_experts) == (5, 5 * 3 * 48 * 32)
    assert [name for name, fact in facts.items() if not fact.tensor_plan] == ["no tensor plan", "head alone"]
    assert [name for name, fact in facts.items() if fact.expert_plan] == ["experts", "head alone"]
    assert [name for name, fact in facts.items() if fact.replicated_norms] == ["experts"]


@pytest.mark.pain("P106")
def test_the_script_of_the_report_shows_it(tmp_path: Path) -> None:
    """As printed on the page: what a whole count leaves is off by 271/272 with a float."""
    finished = run([sys.executable, script_of("divided by a token count", tmp_path)])
    whole, rounded = (float(line.split()[1]) for line in finished.output.splitlines() if line.startswith("torch."))
    assert rounded / whole == pytest.approx(271 / 272, rel=1e-5)


@pytest.mark.slow
@pytest.mark.pain("P107")
def test_the_script_of_the_report_about_adapters_shows_it(tmp_path: Path) -> None:
    finished = run([*TORCHRUN, script_of("the cast of a layer's input", tmp_path)], OMP_NUM_THREADS="1")
    lines = [line for line in finished.output.splitlines() if line.startswith("casts: ")]
    assert len(lines) == 4
    assert all(("trains" in line) == ("False" in line) for line in lines)
