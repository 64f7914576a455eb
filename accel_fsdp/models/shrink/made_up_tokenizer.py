"""A tokenizer for a model without one: a token for each byte, and those that the config names."""

from collections.abc import Mapping
from typing import Any

from accel_fsdp.models.shrink.config_parts import TOKENS

BYTES = 256
ALWAYS = ("pad", "eos", "mask", "im_start", "im_end")
"""Tokens that there are in any case; the last two mark turns."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def numbers(token_ids: Mapping[int, str]) -> dict[int, int]:
    """New ids for the tokens that a config names, behind those of the bytes; equal ids stay equal."""
    return {number: BYTES + index for index, number in enumerate(token_ids)}


def make(token_ids: Mapping[int, str]) -> Any:
    """Makes the tokenizer from each token id of a config and the key that names it, such as eos_token_id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    stems = _stems(token_ids)
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    extra = [name for name in ALWAYS if name not in stems]
    tokenizer.add_special_tokens([f"<|{name}|>" for name in (*stems, *extra)])
    special = {f"{name}_token": f"<|{name}|>" for name in ("bos", "eos", "pad", "mask") if name in (*stems, *ALWAYS)}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _stems(token_ids: Mapping[int, str]) -> list[str]:
    """A name for each token, all different, in their order."""
    stems: list[str] = []
    for key in token_ids.values():
        stem = TOKENS.sub("", key).strip("_") or "token"
        stems.append(stem if stem not in stems else f"{stem}_{len(stems)}")
    return stems
