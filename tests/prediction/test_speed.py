"""How long a step takes: identities, limits, and published runs."""

import dataclasses
import json
from collections.abc import Iterable
from math import isclose
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from throughput_accuracy import DATA, KINDS, Case, cases, gated, gelu

from accel_fsdp.config import Engine
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import GPUS, Gpu, find
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction import HBM_EFFICIENCY, block_work, step_time
from accel_fsdp.prediction.memory import Block, ModelShape

DIMENSIONS = json.loads(DATA.read_text())["models"]
LLAMA = gated("Llama-3-8B", DIMENSIONS["Llama-3-8B"], 4096)
H100 = find("H100")
NODE = Layout(Engine.FSDP2, 1, 8, 8)
ONE = Layout(Engine.NONE, 3, 1, 1)
PUBLISHED = cases()


def flops_per_token(shape: ModelShape, recipe: Recipe) -> float:
    """What the predicted MFU counts, read back from it."""
    step = step_time(shape, recipe, ONE, H100)
    return step.mfu * H100.half_flops / step.tokens_per_s_per_gpu


def test_flops_are_those_of_the_palm_paper_with_causal_attention_halved() -> None:
    """6 N + 12 L H Q T per token (PaLM, appendix B), N without the embedding that is only looked up."""
    embedding = 128256 * 4096
    norms = 65 * 4096
    by_hand = 6 * (8_030_261_248 - embedding - norms) + 12 * 32 * 4096 * 4096 / 2
    assert isclose(flops_per_token(LLAMA, Recipe(length=4096)), by_hand)


def test_mfu_agrees_with_the_one_that_was_published() -> None:
    """llm-foundry: MPT-7B at 10,643 tokens/s per H100 and 46.44 %, all of 6 N and attention that isn't halved."""
    shape = gelu("MPT-7b", DIMENSIONS["MPT-7b"], 2048)
    n = shape.numel
    assert n == 6_658_859_008
    published = 0.4644 * 989.4e12 / 10643
    ours = flops_per_token(shape, Recipe(length=2048))
    assert isclose(published, 6 * n + 12 * 32 * 4096 * 2048, rel_tol=0.01)
    assert isclose(ours, published, rel_tol=0.05)


def test_recomputing_adds_a_forward_of_the_blocks_but_for_its_last_product() -> None:
    seconds = {
        kind: step_time(LLAMA, Recipe(rows=8, checkpointing=kind), ONE, H100).step_seconds  # type: ignore[arg-type]
        for kind in ("none", "full", "reentrant")
    }
    assert 1.15 < seconds["full"] / seconds["none"] < seconds["reentrant"] / seconds["none"] < 4 / 3


def moe(used: int, loops: bool = False) -> ModelShape:
    sizes = DIMENSIONS["Mixtral-8x7B"] | {"experts_used": used, "loops": loops}
    return gated("Mixtral-8x7B", sizes, 4096)


def test_a_token_goes_through_the_experts_that_it_uses() -> None:
    """Two of eight experts are two dense layers, but for half a tile of 128 rows that each expert leaves empty."""
    recipe = Recipe(rows=4, length=4096)
    flops = [block_work(shape.blocks[0], shape, recipe)[0].matmul_flops for shape in (moe(1), moe(2), moe(4))]
    dense = 2 * 3 * 4096 * 14336 * recipe.rows * recipe.length
    assert isclose(flops[2] - flops[1], 2 * (flops[1] - flops[0]), rel_tol=1e-6)
    assert isclose(flops[1] - flops[0], dense, rel_tol=1e-6)
    without = 2 * (4096 * 4096 * 2 + 4096 * 1024 * 2) * recipe.rows * recipe.length
    assert isclose(flops[0] - dense - without, 8 * 64 * 2 * 3 * 4096 * 14336, rel_tol=1e-6)


def test_windows_bound_attention_in_the_layers_that_slide() -> None:
    half = tuple(Block("Layer", tuple(range(start, 32, 2)), LLAMA.blocks[0].parameters) for start in (0, 1))
    slides = dataclasses.replace(LLAMA, blocks=half, window=1024)
    recipe = Recipe(length=8192)
    sliding, whole = (block_work(block, slides, recipe)[0].attention_flops for block in half)
    by_hand = sum(min(position + 1, 1024) for position in range(8192)) / sum(range(1, 8193))
    assert isclose(sliding / whole, by_hand, rel_tol=1e-3)
    wide = dataclasses.replace(slides, window=8192)
    assert block_work(half[0], wide, recipe) == block_work(half[1], wide, recipe)


recipes = st.builds(
    Recipe,
    method=st.sampled_from(["full", "lora", "qlora"]),
    precision=st.sampled_from(["bf16", "no"]),
    dtype=st.just("bfloat16"),
    rows=st.integers(1, 32),
    length=st.sampled_from([1, 64, 500, 2048, 16384]),
    accumulation=st.integers(1, 4),
    optimizer=st.sampled_from(["adamw_torch", "adamw_torch_fused", "sgd"]),
    checkpointing=st.sampled_from(["none", "full", "reentrant"]),
    liger=st.booleans(),
)
sharded = st.builds(
    Layout,
    st.sampled_from(["fsdp1", "fsdp2"]),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 8, 64]),
    st.just(8),
).map(lambda layout: dataclasses.replace(layout, ranks_per_node=min(8, layout.ranks)))
shapes = st.sampled_from(
    [LLAMA, gelu("MPT-125m", DIMENSIONS["MPT-125m"], 2048), gated("MoE", DIMENSIONS["Qwen3-30B-A3B"], 1)]
)
cards = st.sampled_from([H100, find("RTX 4090"), find("T4"), find("MI300X")])


@settings(max_examples=60)
@given(shapes, recipes, sharded, cards)
def test_more_work_never_takes_less_time(shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu) -> None:
    def seconds(of: Recipe = recipe, ranks: Layout = layout) -> float:
        return step_time(shape, of, ranks, gpu).step_seconds

    base = seconds()
    assert base > 0
    for field in ("rows", "length", "accumulation"):
        assert base <= seconds(dataclasses.replace(recipe, **{field: getattr(recipe, field) + 1}))
    assert base <= seconds(ranks=dataclasses.replace(layout, offload=True)) + 1e-12
    assert base <= seconds(dataclasses.replace(recipe, liger=False)) + 1e-12
    order = ["none", "full", "reentrant"]
    times = [seconds(dataclasses.replace(recipe, checkpointing=kind)) for kind in order]  # type: ignore[arg-type]
    assert times == sorted(times)


def test_what_bounds_a_step_is_said() -> None:
    recipe = Recipe(rows=4, checkpointing="full")
    apart = Layout(Engine.FSDP2, 1, 16, 8)
    assert step_time(LLAMA, recipe, NODE, H100).bound == "compute"
    assert step_time(LLAMA, recipe, NODE, dataclasses.replace(H100, link_bytes_per_s=1e9)).bound == "intra-node"
    assert step_time(LLAMA, recipe, apart, dataclasses.replace(H100, network_bytes_per_s=1e8)).bound == "inter-node"
    assert step_time(LLAMA, Recipe(), dataclasses.replace(NODE, offload=True), H100).bound == "pcie"


def test_the_optimizer_is_bound_by_memory_and_sharding_divides_it() -> None:
    """bf16: fused Adam reads p, g, m, v and writes p, m, v, 14 bytes; SGD reads p, g and writes p, 6 bytes."""
    bf16 = Recipe(precision="no", dtype="bfloat16")
    for layout in (ONE, NODE):
        adam, sgd = (
            step_time(LLAMA, dataclasses.replace(bf16, optimizer=kind), layout, H100).step_seconds  # type: ignore[arg-type]
            for kind in ("adamw_torch_fused", "sgd")
        )
        by_hand = (14 - 6) * 8_030_261_248 / layout.shard_ranks / (3350e9 * HBM_EFFICIENCY)
        assert isclose(adam - sgd, by_hand, rel_tol=1e-6)


def test_gpus_go_by_many_names() -> None:
    named: dict[tuple[str, float | None], tuple[str, float]] = {
        ("H100", None): ("H100", 80),
        ("NVIDIA H100 PCIe", None): ("H100 PCIe", 80),
        ("NVIDIA GeForce RTX 4090", None): ("RTX 4090", 24),
        ("NVIDIA RTX 6000 Ada Generation", None): ("RTX 6000 Ada", 48),
        ("NVIDIA GH200 480GB", None): ("GH200", 96),
        ("AMD Instinct MI300X", None): ("MI300X", 192),
        ("NVIDIA B300 SXM6 AC", None): ("B300", 270),
        ("A100", 39): ("A100", 39),
        ("NVIDIA A100-SXM4-40GB", 19.5): ("A100", 19.5),  # a slice (MIG)
        ("RTX 4090", 47.4): ("RTX 4090", 47.4),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", None): ("RTX PRO 6000", 96),
    }
    for (name, size), known in named.items():
        gpu = find(name, size)
        assert (gpu.name, gpu.memory_gib) == known
    for name, size in (("A100", 800), ("A100", 60), ("H100", 0.08), ("RTX 4090", 80)):
        with pytest.raises(UsageError, match=f"{name} does not exist with {size:g}GB"):
            find(name, size)
    with pytest.raises(UsageError, match="Did you mean RTX 4090"):
        find("RTX 4091")


def test_every_gpu_is_found_by_its_own_name_and_its_rates_are_in_order() -> None:
    for gpu in GPUS:
        assert find(gpu.name, gpu.memory_gib) == gpu
        assert gpu.half_flops > gpu.fp32_flops > gpu.hbm_bytes_per_s > gpu.link_bytes_per_s >= 16e9
        assert gpu.hbm_bytes_per_s > gpu.pcie_bytes_per_s >= 16e9
        assert gpu.network_bytes_per_s <= gpu.link_bytes_per_s
        assert gpu.source
        assert 0.3 < gpu.efficiency < 1.1


SMALL_GROUPS = {"accelerate#4022 Qwen3-30B-A3B": 0.17}
"""Two rows of one model whose experts are small; all rows of experts together are held to the general limit."""


def error(members: Iterable[Case]) -> float:
    return median(abs(case.error) for case in members)


def test_published_throughput_is_met() -> None:
    """By groups, and by kinds that need physics of their own; most steps lie in the predicted range."""
    for group in {case.group for case in PUBLISHED}:
        assert error(case for case in PUBLISHED if case.group == group) < SMALL_GROUPS.get(group, 0.12), group
    for kind, belongs in KINDS.items():
        members = [case for case in PUBLISHED if belongs(case)]
        assert len(members) >= 6
        assert error(members) < 0.12, kind
    assert not [case.id for case in PUBLISHED if abs(case.error) > 0.3 and not case.note]
    assert error(PUBLISHED) < 0.05

    def inside(case: Case) -> bool:
        tokens = case.recipe.rows * case.recipe.length * case.recipe.accumulation
        shortest, longest = case.step().range_seconds
        return shortest < tokens / case.tokens_per_s_per_gpu < longest

    assert sum(map(inside, PUBLISHED)) > 0.9 * len(PUBLISHED)
