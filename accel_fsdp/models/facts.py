"""Facts about a model, as frozen values."""

from dataclasses import dataclass

from accel_fsdp.config import Embeddings
from accel_fsdp.errors import UserError, did_you_mean
from accel_fsdp.models.parallel_plans import Divisible


@dataclass(frozen=True)
class LayerClass:
    """A module class in the model, with its number of instances, and the parameters of one."""

    name: str
    count: int
    parameters: int


@dataclass(frozen=True)
class ModelFacts(Divisible):
    """The facts of a model that was built on the meta device (no weights are loaded).

    `wrap_classes` are the transformer layer classes to give FSDP; empty when none was found. `classes` are all module
    classes that exist in the built model, so that a name can be checked. `persistent_buffers` counts the buffers that
    checkpoints store, such as router biases: FSDP2's RAM-efficient loading can't handle them in accelerate 1.15.
    `origin` says where the facts come from when the model was not built here.

    `dtype` is the default dtype of the loaded weights, empty if unknown. `tied` says that the config ties the
    embeddings, `tied_apart` that the weights nevertheless hold two different ones. `kept_bf16` and `kept_fp16` name a
    parameter that stays float32 when the rest loads in that dtype, empty if none does. `expert_classes` are classes of
    single experts in a list of experts, `declared_classes` what `_no_split_modules` names. `quantized` is the number of
    bits of a bitsandbytes checkpoint's weights, 0 for other checkpoints, `quant_storage` their dtype. `quant_method` is
    the quantisation of weights that stay quantised, such as gptq; empty without. `auto_class` is the class of
    transformers that trains it. `parameters` counts all of it. `language_parameters` are those of the part that text
    goes through, 0 if that is the whole model: `train/sft.py` loads and saves the whole model, and its rows of text
    train this part alone.

    `embeddings` says what Accelerate finds under FSDP2, where input embedding and head are units of their own: "none"
    if the model names no input embedding, "shared" if one of their weights is also in another module; empty without a
    problem. `embedding_parents` are the classes that hold the input embedding and no layer, such as BertEmbeddings.
    `scalars` says that a parameter has no dimension.

    `fused_experts` is the number of parameters in tensors of several experts, which bitsandbytes leaves in 16 bits.
    """

    name: str
    model_type: str
    parameters: int
    wrap_classes: tuple[LayerClass, ...]
    wrap_reason: str
    classes: frozenset[str]
    largest_layer_parameters: int
    persistent_buffers: int = 0
    origin: str = ""
    dtype: str = ""
    tied: bool = False
    tied_apart: bool = False
    kept_bf16: str = ""
    kept_fp16: str = ""
    expert_classes: frozenset[str] = frozenset()
    declared_classes: tuple[str, ...] | None = None
    quantized: int = 0
    quant_storage: str = ""
    quant_method: str = ""
    auto_class: str = "AutoModelForCausalLM"
    language_parameters: int = 0
    embeddings: Embeddings = ""
    scalars: bool = False
    embedding_parents: frozenset[str] = frozenset()
    fused_experts: int = 0


def check_layer_classes(names: tuple[str, ...], classes: frozenset[str], layers: tuple[str, ...] = ()) -> None:
    """Refuses layer class names that the built model doesn't have; `layers` are its repeated layers' classes.

    Raises:
        UserError: naming the first unknown one and the nearest existing class.
    """
    for name in names:
        if name not in classes:
            raise UserError(
                f"layer class {name} is not in the model.{did_you_mean(name, classes)}",
                why="Accelerate would stop at prepare: Could not find the transformer layer class",
                fix=("accel-fsdp config --layer-class " + ",".join(layers) + ", or " if layers else "")
                + "one of: "
                + ", ".join(sorted(classes.difference(layers))),
            )
