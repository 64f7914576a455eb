"""What the planner says a rank holds, against the storages of real ranks: to the byte, padding included."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, accelerate_launch
from held import ODD

from accel_fsdp.config import Engine, Precision
from accel_fsdp.job import Job, Layout, Recipe
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction import capacity
from accel_fsdp.prediction.memory import Block, ModelShape, Parameter, deepspeed, shards, step

HELD = ROOT / "tests" / "held.py"


def odd_llama() -> ModelShape:
    """The model of `held.py`: sizes that no number of ranks divides."""
    vocab, hidden, inner = ODD["vocab_size"], ODD["hidden_size"], ODD["intermediate_size"]
    heads, key_heads = ODD["num_attention_heads"], ODD["num_key_value_heads"]
    head = hidden // heads
    linear = {"q": (hidden, hidden), "k": (key_heads * head, hidden), "v": (key_heads * head, hidden)}
    linear |= {"o": (hidden, hidden), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    layer = [Parameter(name, shape, "linear") for name, shape in linear.items()]
    layer += [Parameter(name, (hidden,), "norm") for name in ("input_norm", "post_norm")]
    table = Parameter("embed", (vocab, hidden), "embedding")
    outer = (table, Parameter("norm", (hidden,), "norm"), Parameter("head", (vocab, hidden), "head"))
    block = Block("LlamaDecoderLayer", (0, 1), tuple(layer))
    return ModelShape("odd", "llama", hidden, vocab, heads, head, (block,), outer, tied=False)


def predicted(name: str, ranks: int) -> dict[str, int]:
    engine, strategy, *adapters = [*name.split(), "1"][:3] if name == "ddp" else name.split()
    layout = Layout(engine, int(strategy), ranks, ranks)
    recipe = Recipe("lora" if adapters else "full", precision="no", lora_rank=2)
    units = step.units_of(odd_llama(), recipe, layout)
    per_element = shards.master_bytes(recipe, layout)
    return {
        "parameters": sum(shards.shard_bytes(unit, layout) for unit in units),
        "gradients": sum(shards.trained_bytes(unit, layout, per_element, shard=True) for unit in units),
        "optimizer": sum(shards.optimizer_bytes(unit, recipe, layout) for unit in units),
    }


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_what_is_predicted(ranks: int, tmp_path: Path) -> None:
    config = tmp_path / "fsdp.yaml"
    content = {"distributed_type": "FSDP", "num_processes": ranks, "num_machines": 1, "mixed_precision": "no"}
    config.write_text(yaml.safe_dump({**content, "fsdp_config": {"fsdp_version": 2}}))
    finished = accelerate_launch(config, HELD, "held", tmp_path, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    assert finished.code == 0, finished.output[-3000:]
    line = next(line for line in finished.output.splitlines() if "HELD {" in line)
    seen = json.loads(line.partition("HELD ")[2])
    assert seen == {name: predicted(name, ranks) for name in seen}
    assert len(seen) == 9


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_number_of_parameters_says_what_the_planner_counts(precision: Precision) -> None:
    """On one rank nothing is padded: the linter's and the wizard's formulas are the planner's sums."""
    shape, layout = odd_llama(), Layout(Engine.FSDP2, 1, 1, 1, offload=True)
    recipe = Recipe("full", precision=precision, dtype="float32" if precision == "no" else "bfloat16")
    weights = shape.numel * state_bytes.MASTER
    host = capacity.host(shape, Job(layout, recipe))
    assert host.offload == state_bytes.training_bytes(weights)
    assert host.checkpoint == state_bytes.checkpoint_bytes(weights, 2 * weights)
    assert host.gathering == weights
    assert host.staging == host.checkpoint


@pytest.mark.parametrize(("engine", "table"), [("single", 8), ("ddp", 8), ("zero", 2)])
def test_trainer_keeps_an_embedding_out_of_8_bits(engine: Engine, table: int) -> None:
    """As it does for bitsandbytes, but of ZeRO's flat partitions, where nobody finds the embedding again."""
    embedding = Parameter("embed", (512, 128), "embedding")
    head = Parameter("head", (512, 128), "head")
    shape = ModelShape("two", "llama", 128, 512, 4, 32, (), (embedding, head), tied=False)
    recipe, layout = Recipe("full", "no", "float32", optimizer="adamw_8bit"), Layout(engine, 2, 1, 1)
    [unit] = step.units_of(shape, recipe, layout)
    assert shards.optimizer_bytes(unit, recipe, layout) == 512 * 128 * (table + 2)


def test_a_zero_stage_holds_the_bucket_of_deepspeeds_defaults() -> None:
    """Accelerate writes no size of it, so a small model holds as much as a large one."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config", exc_type=ImportError).DeepSpeedZeroConfig()
    assert not zero.overlap_comm
    assert zero.reduce_bucket_size == deepspeed.REDUCE_BUCKET_SIZE
