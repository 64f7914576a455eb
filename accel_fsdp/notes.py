"""What the planner says beside an option of the wizard. Pure; silent where the model isn't bundled."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel_fsdp.asking import Context
from accel_fsdp.types import EngineKind, Layout, ModelShape, Recipe

if TYPE_CHECKING:
    from accel_fsdp.tapes import Tapes

ROWS, LENGTH = 1, 2048
"""The micro-batch that the notes are about; the wizard asks for none."""


def note(question: str, value: int, context: Context) -> str:
    """The predicted peak of a strategy on the GPUs of the answers, in a few words; empty for other questions."""
    ranks = context.machine.count * context["num_machines"] if question == "strategy" else 0
    if ranks < 2 or (value in (4, 5) and context["num_machines"] == 1):
        return ""
    from accel_fsdp import recorded  # not at the top: `accel-fsdp --help` lists the questions and needs no prediction

    found = recorded.find(context["model"])
    return "" if found is None else f", ~{_peak_gib(*found, value, ranks, context):,.0f} GiB"


def _peak_gib(shape: ModelShape, tapes: Mapping[str, "Tapes"], strategy: int, ranks: int, context: Context) -> float:
    from accel_fsdp.memory import predict
    from accel_fsdp.tapes import variant_of

    engine: EngineKind = "fsdp2" if context["fsdp_version"] == 2 else "fsdp1"
    engine = "ddp" if engine == "fsdp2" and strategy == 3 else engine  # FSDP2 has no NO_SHARD
    method = context["method"]
    recipe = Recipe(method, dtype="float32" if method == "full" else "bfloat16", rows=ROWS, length=LENGTH)
    layout = Layout(engine, strategy, ranks, context.machine.count)
    return predict(shape, tapes[variant_of(recipe, engine)], recipe, layout).peak.total / (1 << 30)
