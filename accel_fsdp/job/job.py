"""One training job, as far as it is known: what a YAML, the wizard's answers and a live run describe alike."""

from dataclasses import dataclass, replace
from typing import Literal

from accel_fsdp.config import Engine, Method
from accel_fsdp.job.layout import FSDP_KINDS, Layout
from accel_fsdp.job.recipe import Recipe

Recompute = Literal["none", "engine", "script"]
DEFAULT_RECIPE = Recipe()


@dataclass(frozen=True)
class Job:
    """A training job. Unknown parts keep their defaults: empty, or 0.

    `layout` says how the ranks share the model, `recipe` how one rank trains it. `base` is how the weights that it
    starts from are quantised, such as gptq. `optimizer` is Trainer's name of it (`--optim`); `recipe` has the one that
    is predicted in its place. `recompute` says who recomputes activations: nobody, the engine
    (`fsdp_activation_checkpointing` of the YAML) or the script (`--gradient_checkpointing`). `layer_classes` are those
    that the wrap policy names. `flags` are boolean arguments of the script that are on, such as `use_dora`.
    """

    layout: Layout
    recipe: Recipe = DEFAULT_RECIPE
    model: str = ""
    base: str = ""
    optimizer: str = ""
    recompute: Recompute = "none"
    wrap_policy: str = ""
    layer_classes: tuple[str, ...] = ()
    ignores_modules: bool = False
    state_dict: str = ""
    flags: frozenset[str] = frozenset()

    @property
    def engine(self) -> Engine:
        """What it trains with."""
        return self.layout.engine

    @property
    def method(self) -> Method:
        """Full, LoRA or QLoRA."""
        return self.recipe.method

    @property
    def adapter(self) -> bool:
        """Whether an adapter is trained on a frozen base."""
        return self.method != "full"

    def of_rows(self, rows: int, length: int) -> "Job":
        """The same with another micro-batch."""
        return replace(self, recipe=replace(self.recipe, rows=rows, length=length))


def recompute_by(engine: Engine, method: Method) -> Recompute:
    """Who should recompute activations: FSDP where it can, as it gathers no layer twice; with an adapter the script.

    "script" means `--gradient_checkpointing true` in the script's arguments, as the YAML's key loses adapters.
    """
    return "engine" if engine in FSDP_KINDS and method == "full" else "script"


def of_plan(layout: Layout, recipe: Recipe) -> Job:
    """A row of the planner's table as a job, with activation checkpointing where `recompute_by` puts it."""
    who = recompute_by(layout.engine, recipe.method) if recipe.checkpointing != "none" else "none"
    return Job(layout, recipe, optimizer=recipe.optimizer, recompute=who)
