"""The description of one training job; YAML files, the wizard's answers and live runs are converted to it."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from accel_fsdp.config import Embeddings, Engine, Method, Precision
from accel_fsdp.job.layout import FSDP_KINDS, Layout
from accel_fsdp.models import optimizers

Checkpointing = Literal["none", "full", "reentrant"]
LoraTargets = Literal["all", "attention"]
Attention = Literal["sdpa", "eager", "flash"]
ATTENTION_LINEAR = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"})
"""Names of attention's linear layers in common models."""


@dataclass(frozen=True)
class Recipe:
    """How one rank trains: everything besides model and machine that decides memory and time.

    `rows` is the micro-batch of one rank and `length` its sequence length. `precision` is the mixed precision, `dtype`
    that of the loaded weights: float32 masters with bf16 compute are ("bf16", "float32"), pure bf16 is ("no",
    "bfloat16"). `checkpointing` "reentrant" is torch's older implementation.

    `attention` "flash" is flash_attention_2. `liger`: the fused kernels of Trainer's `use_liger_kernel`. `eval_batch`
    is one rank's number of rows in an evaluation, 0 without one. `packed` rows hold several documents, which sdpa keeps
    apart by a mask. `offloads_inputs`: what checkpointing keeps of each layer, its input, is in host memory
    (`fsdp_activation_checkpointing_offload`).
    """

    method: Method = "full"
    precision: Precision = "bf16"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    rows: int = 1
    length: int = 2048
    accumulation: int = 1
    optimizer: optimizers.OptimizerName = "adamw_torch_fused"
    checkpointing: Checkpointing = "none"
    lora_rank: int = 16
    lora_targets: LoraTargets = "all"
    lora_dropout: bool = False
    attention: Attention = "sdpa"
    liger: bool = False
    eval_batch: int = 0
    packed: bool = False
    offloads_inputs: bool = False

    @property
    def recomputes(self) -> bool:
        """Whether backward computes whole blocks again."""
        return self.checkpointing != "none"

    @property
    def has_inputs_on_host(self) -> bool:
        """Whether the inputs that checkpointing keeps are in host memory from a layer's forward to its backward."""
        return self.recomputes and self.offloads_inputs

    @property
    def masks_documents(self) -> bool:
        """Whether attention takes a mask of rows x rows; Flash Attention reads the documents' lengths instead."""
        return self.packed and self.attention == "sdpa"


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

    @property
    def settled(self) -> "Job":
        """The job with the optimizer's name, and the part that `recompute_by` names, where nothing else says them."""
        is_open = self.recipe.checkpointing != "none" and self.recompute == "none"
        recompute = recompute_by(self.engine, self.method) if is_open else self.recompute
        return replace(self, recompute=recompute, optimizer=self.optimizer or self.recipe.optimizer)

    def with_recipe(self, **changed: Any) -> "Job":
        return replace(self, recipe=replace(self.recipe, **changed))

    def with_layout(self, **changed: Any) -> "Job":
        return replace(self, layout=replace(self.layout, **changed))


def recompute_by(engine: Engine, method: Method) -> Recompute:
    """The part that should recompute activations: FSDP, which gathers each layer only once, or the script.

    "script" means `--gradient_checkpointing true` in the script's arguments; the YAML's key loses adapters.
    """
    return "engine" if engine in FSDP_KINDS and method == "full" else "script"
