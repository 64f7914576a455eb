"""The description of one training job; YAML files, the wizard's answers and live runs are converted to it."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from accel_fsdp.config import Embeddings, Engine, Method
from accel_fsdp.job.layout import FSDP_KINDS, Layout
from accel_fsdp.job.recipe import Recipe

Recompute = Literal["none", "engine", "script"]
DEFAULT_RECIPE = Recipe()


@dataclass(frozen=True)
class Job:
    """A training job. Unknown parts keep their defaults: empty, or 0.

    `layout` describes how the ranks share the model, `recipe` how one rank trains it. `base` is the quantisation of the
    initial weights, such as gptq. `optimizer` is Trainer's name (`--optim`); `recipe` has the planner's name for it.
    `recompute` says who recomputes activations: "none", "engine" (`fsdp_activation_checkpointing` of the YAML) or
    "script" (`--gradient_checkpointing`). `layer_classes` are those of the wrap policy. `flags` are the enabled boolean
    arguments of the script, such as `load_in_8bit`. `embeddings` says why Accelerate can't make units of the model's
    embedding and head under FSDP2: it has "none", or their weights are "shared" with other modules. `scalars`: whether
    the model has parameters without a dimension.
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
    embeddings: Embeddings = ""
    scalars: bool = False

    @property
    def engine(self) -> Engine:
        return self.layout.engine

    @property
    def method(self) -> Method:
        return self.recipe.method

    @property
    def adapter(self) -> bool:
        """Whether an adapter is trained on a frozen base."""
        return self.method != "full"

    @property
    def is_one_unit(self) -> bool:
        """Whether FSDP gathers the whole model at once: under NO_WRAP, or without a wrap policy."""
        return self.layout.is_fsdp and self.wrap_policy == "NO_WRAP"

    @property
    def rows_per_step(self) -> int:
        """The rows of one optimizer step on all ranks."""
        return self.layout.rows_of_all(self.recipe.rows * self.recipe.accumulation)

    def with_recipe(self, **changed: Any) -> "Job":
        return replace(self, recipe=replace(self.recipe, **changed))

    def with_layout(self, **changed: Any) -> "Job":
        return replace(self, layout=replace(self.layout, **changed))


def recompute_by(engine: Engine, method: Method) -> Recompute:
    """The part that should recompute activations: FSDP, which gathers each layer only once, or the script.

    "script" means `--gradient_checkpointing true` in the script's arguments; the YAML's key loses adapters.
    """
    return "engine" if engine in FSDP_KINDS and method == "full" else "script"


def of_plan(layout: Layout, recipe: Recipe) -> Job:
    """A row of the planner's table as a job, with activation checkpointing by the part that `recompute_by` names."""
    recompute = recompute_by(layout.engine, recipe.method) if recipe.checkpointing != "none" else "none"
    return Job(layout, recipe, optimizer=recipe.optimizer, recompute=recompute)
