"""Whether a model predicts each token only from earlier ones: read from its config, then tested.

`AutoModelForCausalLM` also loads BERT. A model that sees the next token learns to copy it in training: the loss falls
to zero, and the model can't generate text.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import set_zero3_state
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from accel_fsdp.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

LARGEST = 100_000_000
"""Parameters of a model made up for the trial: half a second's work."""
VOCABULARY = 64
TOKENS = (5, 6, 7, 8, 9)
OTHER_LAST = 10
"""Ordinary tokens: some models derive positions or masks from special ones."""
ROUNDING = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""The possible rounding error of a prediction, if mixed experts are computed in other groups; a dense model has
none. A look ahead changes the predictions of trained weights by far more."""
FINE = 2.0**-17
DECODER = "a decoder, such as a Llama, Qwen or GPT-2"


def check_config(config: Any, name: str, remote_code: bool = False) -> None:
    """Refuses what can't be trained to predict the next token, before any data or weights are read.

    Raises:
        UserError: it has an encoder, is of another kind, or a small random model of its kind sees the next token.
    """
    architecture = str((config.architectures or [type(config).__name__.removesuffix("Config")])[0])
    if getattr(config, "is_encoder_decoder", False) and not architecture.endswith("ForCausalLM"):
        raise UserError(
            f"{name} is a {architecture}, which has an encoder and a decoder",
            why="this script trains a model to go on with a text; its encoder would be left out or never trained",
            fix=f"--model_name_or_path with {DECODER}; or Trainer's Seq2SeqTrainer in a script of your own",
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote_code:
        raise UserError(
            f"{name} is a {architecture}, of which transformers has no causal language model",
            why="this script trains a model to predict the next token",
            fix=f"--model_name_or_path with {DECODER}; or a script of your own for this kind",
        )
    if looks_ahead_by(config):
        raise _looks_ahead(name, architecture)


def check_model(model: "nn.Module", name: str) -> None:
    """Checks a loaded model whose kind is too large to test small, with one pass of ten tokens."""
    parameters = list(model.parameters())
    if any(hasattr(parameter, "ds_id") or not parameter.is_floating_point() for parameter in parameters):
        return  # parted by ZeRO-3, or quantised: they compute on their own device only
    if looks_ahead(model):
        raise _looks_ahead(name, type(model).__name__)


def _looks_ahead(name: str, architecture: str) -> UserError:
    return UserError(
        f"{name} is a {architecture} that sees the tokens after the one that it predicts",
        why="it would learn to copy the next token: the loss falls to nothing, and the model can't write",
        fix=f'--model_name_or_path with {DECODER}; if it is meant as a decoder: "is_decoder": true in its config.json',
    )


def looks_ahead_by(config: Any) -> bool | None:
    """Whether a random model of this kind with two layers sees later tokens; None if it can't be built."""
    try:
        with set_zero3_state():  # ZeRO-3 would part it and wait for the other ranks, which don't ask
            model = _random(_shrunk(config))
    except Exception:  # whatever a config of unknown kind brings: the loaded model is tried then
        return None
    return None if model is None else looks_ahead(model)


def _random(config: Any) -> "nn.Module | None":
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if sum(parameter.numel() for parameter in shape.parameters()) > LARGEST:
        return None
    with torch.random.fork_rng(devices=[]):  # the run's own random numbers stay as they are
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return model


def _shrunk(config: Any) -> Any:
    """Two layers and a small vocabulary; lists with an entry for each layer are cut too."""
    small = copy.deepcopy(config)
    for part in {id(config_part): config_part for config_part in (small, small.get_text_config())}.values():
        layers = getattr(part, "num_hidden_layers", None)
        if not isinstance(layers, int) or not hasattr(part, "vocab_size"):
            continue
        values = part.to_dict()
        cut = {name: value[:2] for name, value in values.items() if isinstance(value, list) and len(value) == layers}
        special = {
            name: None
            for name, value in values.items()
            if name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY
        }
        vocabulary = min(part.vocab_size, VOCABULARY)
        part.update({**cut, **special, "num_hidden_layers": min(layers, 2), "vocab_size": vocabulary})
    return small


def looks_ahead(model: "nn.Module") -> bool | None:
    """Whether another last token moves the predictions before it; None where the model can't be asked on its own."""
    rows = torch.tensor([TOKENS, (*TOKENS[:-1], OTHER_LAST)])
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits: Tensor = model(input_ids=rows).logits.float()
    except Exception:  # it wants other inputs, or another device
        return None
    finally:
        model.train(training)
    before = logits[:, :-1]
    allowed = ROUNDING.get(next(model.parameters()).dtype, FINE) * before.abs().max()
    return bool((before[1] - before[0]).abs().max() > allowed)
