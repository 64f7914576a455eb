"""Whether a model predicts each token only from earlier ones: read from its config, and tested once it is loaded.

`AutoModelForCausalLM` also loads BERT. A model that sees the next token learns to copy it in training: the loss falls
to zero, and the model can't generate text.
"""

from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from accel_fsdp.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

TOKENS = (5, 6, 7, 8, 9)
OTHER_LAST = 10
"""Ordinary token ids: some models derive positions or masks from special tokens."""
ROUNDING = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""The possible rounding error of a prediction, if mixed experts are computed in other groups; a dense model has
none. A look ahead changes the predictions of trained weights by far more."""
FINE = 2.0**-17
ALWAYS_AHEAD = ("xlnet", "cpmant")
"""Types of causal language models that see all tokens of a row with any config."""
AHEAD_UNLESS_DECODER = ("bert-generation",)
"""Types that see all tokens if the config lacks `is_decoder`, besides those also trained to fill in masked words."""
DECODER = "a decoder, such as a Llama, Qwen or GPT-2"


def check_config(config: Any, name: str, remote_code: bool = False) -> None:
    """Refuses models that can't be trained to predict the next token, before any data or weights are read.

    Raises:
        UserError: the model has an encoder, is of another kind, or is trained to fill in masked words, like BERT.
    """
    architecture = str((config.architectures or [type(config).__name__.removesuffix("Config")])[0])
    if getattr(config, "is_encoder_decoder", False) and not architecture.endswith("ForCausalLM"):
        raise UserError(
            f"{name} is a {architecture}, which has an encoder and a decoder",
            why="this script trains a model to continue a text; its encoder would be left out or never trained",
            fix=f"--model_name_or_path with {DECODER}; or Trainer's Seq2SeqTrainer in a script of your own",
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote_code:
        raise UserError(
            f"{name} is a {architecture}, of which transformers has no causal language model",
            why="this script trains a model to predict the next token",
            fix=f"--model_name_or_path with {DECODER}; or a script of your own for this kind",
        )
    reads_both_ways = type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type in AHEAD_UNLESS_DECODER
    is_always_ahead = config.model_type in ALWAYS_AHEAD
    if is_always_ahead or (reads_both_ways and not getattr(config, "is_decoder", False)):
        raise _looks_ahead(name, architecture, is_always_ahead)


def check_model(model: "nn.Module", name: str) -> None:
    """Tests a loaded model with one pass of ten tokens."""
    parameters = list(model.parameters())
    if any(hasattr(parameter, "ds_id") or not parameter.is_floating_point() for parameter in parameters):
        return  # partitioned by ZeRO-3, or quantised: they compute on their own device only
    if looks_ahead(model):
        raise _looks_ahead(name, type(model).__name__)


def _looks_ahead(name: str, architecture: str, always: bool = False) -> UserError:
    return UserError(
        f"{name} is a {architecture} that sees the tokens after the one that it predicts",
        why="it would learn to copy the next token: the loss falls to 0, and the model can't generate text",
        fix=f"--model_name_or_path with {DECODER}"
        + ("" if always else '; if it is meant as a decoder: "is_decoder": true in its config.json'),
    )


def looks_ahead(model: "nn.Module") -> bool | None:
    """Whether changing the last token changes earlier predictions; None if the model can't be run alone."""
    rows = torch.tensor([TOKENS, (*TOKENS[:-1], OTHER_LAST)])
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits: Tensor = model(input_ids=rows).logits.float()
    except Exception:  # it needs other inputs, or another device
        return None
    finally:
        model.train(training)
    before = logits[:, :-1]
    allowed = ROUNDING.get(next(model.parameters()).dtype, FINE) * before.abs().max()
    return bool((before[1] - before[0]).abs().max() > allowed)
