"""What a model's training takes that neither its name nor the flags suggest, in sentences."""

from accel_fsdp.job import Recipe
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction.memory import ModelShape


def model_notes(shape: ModelShape, recipe: Recipe, quant_method: str = "") -> tuple[str, ...]:
    """The sentences about a model and a recipe."""
    notes = []
    if shape.eager_only:
        notes.append(
            f"{shape.name}: transformers has no sdpa for it and runs eager attention; so does this plan, "
            "regardless of the flag."
        )
    if shape.model_type == "gpt_oss":
        notes.append("Its weights are published in MXFP4, which Trainer doesn't train: they are dequantised to bf16.")
    if shape.model_type == "deepseek_v3" and shape.name.startswith("deepseek-ai/"):
        notes.append("Its weights are published in FP8, which Trainer doesn't train: convert them to bf16 first.")
    if quant_method:
        refused = " Trainer refuses full training of quantised weights." if recipe.method == "full" else ""
        notes.append(f"{shape.name} is quantised ({quant_method}); the plan is for its 16-bit original.{refused}")
    layers = [(len(block.layers), parameter) for block in shape.blocks for parameter in block.parameters]
    fused = sum(number * parameter.numel for number, parameter in layers if parameter.is_fused_experts)
    if recipe.method == "qlora" and fused:
        notes.append(f"{state_bytes.experts_in_16_bits(fused)}.")
    return tuple(notes)
