"""What a rank sends: against the ZeRO paper's statements, numbers worked by hand, and identities."""

import dataclasses
from math import isclose

import pytest
from throughput_accuracy import gated

from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction import Traffic, step_traffic

LLAMA = gated(
    "Llama-2-7B",
    {"vocab": 32000, "hidden": 4096, "intermediate": 11008, "layers": 32, "heads": 32, "kv_heads": 32}
    | {"head_dim": 128, "tied": False},
    2048,
)
P = 6_738_415_616
OUTSIDE = 2 * 32000 * 4096 + 4096  # embedding, head, last norm
LAST = 32000 * 4096 + 4096  # head and last norm, which FSDP2 never reshards
BLOCKS_ONLY = dataclasses.replace(LLAMA, outer=(), tied=True)  # what the ZeRO paper speaks of: no unit is kept
INSIDE = P - OUTSIDE
HALF = Recipe(precision="no", dtype="bfloat16")
MIXED = Recipe()


def layout(engine: str, strategy: int = 1, ranks: int = 8, per_node: int = 8, **other: bool) -> Layout:
    return Layout(engine, strategy, ranks, min(ranks, per_node), **other)  # type: ignore[arg-type]


def sent(traffic: Traffic) -> float:
    return traffic.intra_bytes + traffic.inter_bytes


def test_zero_sends_what_its_paper_says_and_fsdp_as_much() -> None:
    """Section 7: stages 1 and 2 send 2 Psi like data parallelism, stage 3 sends 3 Psi."""
    volumes = {("ddp", 1): 2, ("zero", 1): 2, ("zero", 2): 2, ("zero", 3): 3, ("fsdp1", 3): 2}
    volumes |= {(engine, strategy): 4 - strategy for engine in ("fsdp1", "fsdp2") for strategy in (1, 2)}
    for (engine, strategy), volume in volumes.items():
        seen = sent(step_traffic(BLOCKS_ONLY, HALF, layout(engine, strategy, ranks=64)))
        assert isclose(seen, volume * 2 * INSIDE * 63 / 64), (engine, strategy)


def test_llama_2_7b_worked_by_hand() -> None:
    """Bytes per element: DDP reduces float32; FSDP gathers and reduces bf16, and keeps what the engine keeps."""
    by_hand = {
        ("ddp", 1): 2 * 4 * P,
        ("fsdp1", 1): 2 * (2 * INSIDE + OUTSIDE) + 2 * P,
        ("fsdp2", 1): 2 * (2 * (P - LAST) + LAST) + 2 * P,
        ("fsdp1", 2): 2 * P + 2 * P,
        ("fsdp2", 2): 2 * P + 2 * P,
        ("fsdp1", 3): 2 * 2 * P,
        ("zero", 3): 2 * 2 * P + 2 * P,
    }
    for (engine, strategy), volume in by_hand.items():
        assert isclose(sent(step_traffic(LLAMA, MIXED, layout(engine, strategy))), volume * 7 / 8), engine


def test_a_ring_over_machines_crosses_the_network_once_per_machine() -> None:
    one_machine, two = (step_traffic(LLAMA, MIXED, layout("fsdp2", ranks=ranks)) for ranks in (8, 16))
    assert one_machine.inter_bytes == 0
    assert isclose(sent(two), sent(one_machine) * (15 / 16) / (7 / 8))
    assert isclose(two.inter_bytes, sent(two) / 8)
    alone = step_traffic(LLAMA, MIXED, layout("fsdp2", ranks=16, per_node=1))
    assert alone.intra_bytes == 0


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("hybrid", "inside"), [(4, 1), (5, 2)])
def test_hybrid_shards_inside_and_reduces_shards_outside(engine: str, hybrid: int, inside: int) -> None:
    node = step_traffic(LLAMA, MIXED, layout(engine, inside))
    seen = step_traffic(LLAMA, MIXED, layout(engine, hybrid, ranks=32))
    assert isclose(seen.intra_bytes, node.intra_bytes)
    assert isclose(seen.inter_bytes, 2 * 2 * P / 8 * 3 / 4)
    assert step_traffic(LLAMA, MIXED, layout(engine, hybrid)) == node


ADAPTERS = 39_976_960  # what PEFT's print_trainable_parameters shows for Llama-2-7B, rank 16, all linear layers


def test_adapters_alone_are_reduced_and_the_base_is_gathered() -> None:
    """QLoRA's in 4 bits."""
    lora, qlora = (Recipe(method=method, dtype="bfloat16") for method in ("lora", "qlora"))  # type: ignore[arg-type]
    assert isclose(sent(step_traffic(LLAMA, lora, layout("ddp"))), 2 * 4 * ADAPTERS * 7 / 8)
    gathered, seen = 2 * (2 * (P - LAST + ADAPTERS) + LAST), sent(step_traffic(LLAMA, lora, layout("fsdp2")))
    assert isclose(seen, (gathered + 2 * ADAPTERS) * 7 / 8)
    linear = INSIDE - 32 * 2 * 4096  # all of a block but its norms
    saved = seen - sent(step_traffic(LLAMA, qlora, layout("fsdp2")))
    assert isclose(saved, 2 * (2 - state_bytes.NF4_BYTES) * linear * 7 / 8)
    assert round(state_bytes.NF4_BYTES, 5) == 0.51587


def test_offload_moves_shards_down_and_gradients_up() -> None:
    """FSDP keeps float32 on the host and casts on the GPU; ZeRO sends bf16 both ways."""
    fsdp = step_traffic(LLAMA, MIXED, layout("fsdp2", offload=True))
    assert isclose(fsdp.pcie_bytes, (4 * (2 * (P - LAST) + LAST) + 4 * P) / 8)
    zero = step_traffic(LLAMA, MIXED, layout("zero", 3, offload=True))
    assert isclose(zero.pcie_bytes, (2 * 2 * P + 2 * P) / 8)
    assert step_traffic(LLAMA, MIXED, layout("fsdp2")).pcie_bytes == 0
    assert isclose(step_traffic(LLAMA, MIXED, layout("zero", 2, offload=True)).pcie_bytes, (2 * P + 2 * P) / 8)
