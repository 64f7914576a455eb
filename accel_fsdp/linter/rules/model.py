"""Rules about the model (`--model`) and its number formats."""

from collections.abc import Iterator

from accel_fsdp.config import TORCH_DTYPES, Engine
from accel_fsdp.job import clashes
from accel_fsdp.linter.rules.engine import Finding, Subject, combined, rule

NAMES = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
POLICY = "fsdp_config.fsdp_auto_wrap_policy"


@rule("AF320", pains=("P84",))
def fsdp_block_on_tpu(subject: Subject) -> Iterator[Finding]:
    """An `fsdp_config` without `xla: true` under `distributed_type: XLA`.

    Accelerate ignores it there; the xla keys are for the training script, which passes them to Trainer.
    """
    if subject.engine is Engine.TPU and subject.section("fsdp_config") and not subject.on("fsdp_xla"):
        yield Finding(
            "fsdp_config",
            "on TPU nothing reads fsdp_config",
            "every core holds the whole model",
            "the xla keys of --fsdp_config in TrainingArguments",
        )


@rule("AF321", pains=("P86",))
def fp8_with_fsdp(subject: Subject) -> Iterator[Finding]:
    """FP8 by torchao with `fsdp_cpu_ram_efficient_loading`: Accelerate stops under FSDP."""
    section = subject.values.get("fp8_config")
    if not subject.is_fsdp or subject.top("mixed_precision") != "fp8" or not isinstance(section, dict):
        return
    backend = str(section.get("fp8_backend", section.get("backend"))).upper()
    if backend == "AO" and subject.on("fsdp_cpu_ram_efficient_loading"):
        yield Finding(
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
            "torchao's FP8 and RAM-efficient loading exclude each other",
            "Accelerate stops",
            "fsdp_cpu_ram_efficient_loading: false",
        )


@rule("AF503", pains=("P10", "P11"))
def declared_classes(subject: Subject) -> Iterator[Finding]:
    """No layer class in the file, and the model's (`--model`) `_no_split_modules` names a missing class, or none.

    For a missing class Accelerate stops: "Could not find the transformer layer class". Without a name, which is a
    warning, no layer becomes a unit.
    """
    model, takes_declared = subject.model, not subject.has("fsdp_transformer_layer_cls_to_wrap")
    wraps = subject.is_fsdp and subject.wrap_policy == "TRANSFORMER_BASED_WRAP"
    if not (model and wraps and takes_declared) or model.declared_classes is None:
        return
    absent = sorted(name for name in model.declared_classes if name not in model.classes)
    if absent or not model.declared_classes:
        yield Finding(
            POLICY,
            f"{model.name} names "
            + (f"{', '.join(absent)} as its layers and has none" if absent else "no layer class"),
            "Accelerate stops: Could not find the transformer layer class"
            if absent
            else "no layer becomes a unit and every rank gathers the whole model, silently",
            f"fsdp_transformer_layer_cls_to_wrap: {','.join(layer.name for layer in model.wrap_classes) or 'NAME'}",
            milder=None if absent else "warning",
        )


@rule("AF513")
def embeddings_under_fsdp2(subject: Subject) -> Iterator[Finding]:
    """FSDP2 and a model (`--model`) for whose input embedding and head Accelerate 1.14 or later can't make units.

    The model names no input embedding, such as CLIP and Wav2Vec2, or the weights are also in other modules, as in T5,
    BART and BERT's masked language model. PyTorch before 2.13 accepts the second case.
    """
    if not subject.older("accelerate", "1.14"):
        yield from combined(subject, "fsdp_config.fsdp_version", "no-embedding-fsdp2")
        if not subject.older("torch", "2.13"):
            yield from combined(subject, "fsdp_config.fsdp_version", "shared-embedding-fsdp2")


@rule("AF515")
def scalars_under_fsdp1(subject: Subject) -> Iterator[Finding]:
    """FSDP1 and a model (`--model`) with a parameter without a dimension, such as CLIP's `logit_scale`."""
    yield from combined(subject, "fsdp_config.fsdp_version", "scalars-fsdp1")


@rule("AF514")
def unit_around_the_embedding(subject: Subject) -> Iterator[Finding]:
    """FSDP2 and a layer class, given or declared by the model (`--model`), that holds the input embedding.

    Accelerate 1.14 or later makes a unit of the embedding after those of the layer classes, and stops.
    """
    model = subject.model
    wraps = subject.engine is Engine.FSDP2 and subject.wrap_policy == "TRANSFORMER_BASED_WRAP"
    if model is None or not wraps or subject.older("accelerate", "1.14"):
        return
    names = subject.layer_classes or model.declared_classes or ()
    for name in sorted(model.embedding_parents.intersection(names)):
        kept = [class_name for class_name in names if class_name not in model.embedding_parents]
        kept = kept or [layer.name for layer in model.wrap_classes]
        yield Finding(
            NAMES,
            f"{name} holds the input embedding, of which Accelerate makes a unit itself",
            "prepare stops: TypeError: Invariant encountered: value was None when it should not be",
            f"fsdp_transformer_layer_cls_to_wrap: {','.join(kept) or 'NAME'}",
        )


@rule("AF505", "warning", pains=("P32",))
def mixed_dtypes_in_a_unit(subject: Subject) -> Iterator[Finding]:
    """A model that keeps some parameters in float32 while the rest loads in 16 bits.

    FSDP1 flattens a unit into one tensor and stops with "Must flatten tensors with uniform dtype"; FSDP2 without mixed
    precision stops too. Needs `--model`.
    """
    if subject.model is None or not subject.is_fsdp or (subject.engine is Engine.FSDP2 and subject.mixed):
        return
    module = {"bfloat16": subject.model.kept_bf16, "float16": subject.model.kept_fp16}.get(subject.load_dtype, "")
    if module:
        yield Finding(
            "mixed_precision",
            f"{module} stays float32 beside {subject.load_dtype} weights",
            "FSDP stops: a unit needs one dtype, unless the script loads float32",
            "--dtype float32, or fsdp_version: 2 with mixed_precision: bf16",
        )


@rule("AF506", pains=("P74",))
def tied_but_different(subject: Subject) -> Iterator[Finding]:
    """The config ties the embeddings, but the weights hold two different ones.

    transformers leaves them untied, RAM-efficient loading ties them again, and FSDP2 stops with "mapping failed". Needs
    `--model`.
    """
    apart = subject.model is not None and subject.model.tied_apart
    if subject.engine is Engine.FSDP2 and apart and subject.on("fsdp_cpu_ram_efficient_loading"):
        yield Finding(
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
            "the model's config ties embeddings that differ in its weights",
            "Accelerate stops: FSDP2 mapping failed",
            "tie_word_embeddings: false in the model's config.json",
        )


@rule("AF507", "warning", pains=("P58",))
def unit_per_expert(subject: Subject) -> Iterator[Finding]:
    """The class of a single expert among the layer classes.

    Ranks whose tokens choose different experts then gather different units, and the job hangs. Needs `--model`.
    """
    experts = subject.model.expert_classes if subject.model and subject.is_fsdp else frozenset()
    for name in sorted(experts.intersection(subject.layer_classes)):
        yield Finding(
            NAMES, f"{name} is one expert", "ranks gather different units and hang", "name the decoder layer only"
        )


@rule("AF509", "warning", pains=("P33", "P34"))
def quantized_storage(subject: Subject) -> Iterator[Finding]:
    """A 4-bit checkpoint (`--model`) whose storage is not the floating dtype of `mixed_precision`.

    With integers FSDP1 stops and FSDP2 leaves the base unsharded; with another floating dtype FSDP2 casts the packed
    bytes as if they were numbers.
    """
    if subject.model is None or subject.model.quantized != 4 or not subject.is_fsdp:
        return
    dtype = TORCH_DTYPES.get(str(subject.top("mixed_precision")))
    if subject.model.quant_storage != dtype:
        yield Finding(
            "mixed_precision",
            f"{subject.model.name} stores 4-bit weights as {subject.model.quant_storage}",
            "they are not sharded, or FSDP stops, or casts them as numbers",
            f"quantise it with bnb_4bit_quant_storage {dtype}",
        )


@rule("AF512")
def quantised_weights(subject: Subject) -> Iterator[Finding]:
    """A model (`--model`) whose weights are quantised, as by GPTQ or AWQ, with full training (`--args`), or QLoRA.

    Trainer trains only adapters on them, and not on all kinds. Without `--args` it is a warning.
    """
    for clash in clashes(subject.job):
        if clash.parts == ("base",) and subject.model is not None:
            yield Finding(
                "distributed_type",
                f"{subject.model.name} is quantised ({subject.model.quant_method}): {clash.what}",
                clash.why,
                clash.fix,
                milder=None if subject.args is not None else "warning",
            )
