"""Converts conversations to text with the tokenizer's chat template, and finds the assistant's turns in it.

A template with `{% generation %}` marks them itself. Others must be of a known family, whose marks a trial conversation
shows. Every turn is compared with the row's text: an unproven turn is refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.errors import UserError
from accel_fsdp.models import read_tokenizer
from accel_fsdp.training.data.columns import BadRow, Chat, or_bad_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION, ANSWER = "Xquestionx", "Xanswerx"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
END_OF_THOUGHT = "</think>"

TextSpan = tuple[int, int]


@dataclass(frozen=True)
class Marks:
    """The text before and after an assistant's text.

    `opening` comes first, then possibly one of `added`, which the template writes itself in some turns (an empty
    thought), and one of `endings` last, an end token.
    """

    opening: str
    endings: tuple[str, ...]
    added: tuple[str, ...] = ()


FAMILIES = (
    Marks("<|im_start|>assistant\n", ("<|im_end|>",), ("<think>\n\n</think>\n\n",)),  # ChatML: Qwen, SmolLM, Yi
    Marks("<|start_header_id|>assistant<|end_header_id|>\n\n", ("<|eot_id|>",)),  # Llama 3
    Marks("<|header_start|>assistant<|header_end|>\n\n", ("<|eot|>",)),  # Llama 4
    Marks("<start_of_turn>model\n", ("<end_of_turn>",)),  # Gemma
    Marks("[/INST]", ("</s>",)),  # Mistral, Llama 2
    Marks("<|im_start|>assistant<|im_sep|>", ("<|im_end|>",)),  # Phi-4
    Marks("<|assistant|>\n", ("<|end|>", "</s>", "<|endoftext|>")),  # Phi-3, Zephyr, OLMo
    Marks("<|assistant|>", ("<|end|>",)),  # Phi-4-mini
    Marks("<|start_of_role|>assistant<|end_of_role|>", ("<|end_of_text|>",)),  # Granite
    Marks("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",)),  # Command R
    Marks("<\uff5cAssistant\uff5c>", ("<\uff5cend\u2581of\u2581sentence\uff5c>",)),  # DeepSeek
)


def require_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuses conversations if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template, but the data set has messages",
            why="the model's chat format is unknown",
            fix="use the instruct version of the model, --chat_template_path with its tokenizer or a Jinja file, or a "
            "data set with a text column",
        )


def use_template(tokenizer: "PreTrainedTokenizerBase", source: str | None) -> None:
    """Gives the tokenizer the chat template of a Jinja file, or of another model; without a source it keeps its own."""
    if source is None:
        return
    if Path(source).is_file():
        tokenizer.chat_template = Path(source).read_text(encoding="utf-8")
        return
    try:
        template = read_tokenizer(source).chat_template
    except UserError as error:
        raise _no_template(source, error.what) from error
    if template is None:
        raise _no_template(source, "its tokenizer has none")
    tokenizer.chat_template = template


def _no_template(source: str, cause: str) -> UserError:
    return UserError(
        f"no chat template from {source}: {cause}",
        why="--chat_template_path names it",
        fix="give a Jinja file, or a model whose tokenizer has a chat template",
    )


def marks(tokenizer: "PreTrainedTokenizerBase") -> Marks | None:
    """The marks of the tokenizer's template; None if `{% generation %}` marks the turns.

    Two questions are asked, because templates write the last answer and those before it differently.

    Raises:
        UserError: the template is of no known family.
    """
    if GENERATION.search(tokenizer.get_chat_template()):
        return None
    two_turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}] * 2
    text = _render(tokenizer, two_turns)
    for family in FAMILIES:
        if family.opening in text and _answers_in(text, family) == [ANSWER, ANSWER]:
            return family
    raise UserError(
        "the chat template marks the assistant's text as no known family of models does",
        why="--assistant_only_loss and --completion_only_loss couldn't prove which tokens are the assistant's",
        fix="a template with {% generation %} around that text, by --chat_template_path; or --completion_only_loss "
        "false without --assistant_only_loss",
    )


def _answers_in(text: str, marks: Marks) -> list[str]:
    spans = or_bad_row(_spans_between, text, marks)
    return [] if isinstance(spans, BadRow) else [_text_without_ending(text[slice(*span)], marks) for span in spans]


def _render(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # a template may raise any error
        raise UserError(
            f"the chat template fails on a question with its answer: {error}",
            why="no conversation can be written with it",
            fix="--chat_template_path with another one",
        ) from error


def written(
    tokenizer: "PreTrainedTokenizerBase", chats: Sequence[Chat], marks: Marks | None, masked: bool
) -> list[tuple[str, list[TextSpan]] | BadRow]:
    """Writes conversations with the template; with `masked` also where in the text each assistant turn is.

    A span goes from the first letter of the assistant's text to the end of its end token.
    """
    try:
        texts, generated = _rendered_with_spans(tokenizer, chats, masked and marks is None)
    except Exception as error:  # a template may raise any error
        if len(chats) == 1:
            return [BadRow(f"the chat template refuses it: {error}")]
        return [row for chat in chats for row in written(tokenizer, [chat], marks, masked)]
    if not masked:
        return [(text, []) for text in texts]
    return [or_bad_row(_with_spans, *row, marks) for row in zip(chats, texts, generated, strict=True)]


def _rendered_with_spans(
    tokenizer: "PreTrainedTokenizerBase", chats: Sequence[Chat], generation: bool
) -> tuple[list[str], list[list[TextSpan]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        [chat.messages for chat in chats],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=generation,
        **tokenizer.special_tokens_map,
    )
    return texts, spans if generation else [[] for _ in texts]


def _with_spans(chat: Chat, text: str, generated: list[TextSpan], marks: Marks | None) -> tuple[str, list[TextSpan]]:
    assistant_turns = [turn for turn in chat.messages if turn["role"] == "assistant"]
    spans = generated if marks is None else _spans_between(text, marks)
    if marks is not None and len(spans) != len(assistant_turns):
        raise BadRow(
            f"{len(assistant_turns)} assistant turns, but the written text shows {len(spans)}: the text of a turn "
            "contains the marks"
        )
    answers = [_text_without_ending(text[start:end], marks) for start, end in spans]
    places = _turn_spans(assistant_turns, answers, exact=marks is not None)
    first = 0 if chat.answers is None else len(assistant_turns) - chat.answers
    return text, spans if first == 0 else spans[places[first] :] if first < len(places) else []


def _spans_between(text: str, marks: Marks) -> list[TextSpan]:
    """The spans from each opening to the first end token after it."""
    spans: list[TextSpan] = []
    start = text.find(marks.opening)
    while start >= 0:
        start += len(marks.opening)
        start += next((len(added) for added in marks.added if text.startswith(added, start)), 0)
        ends = [position + len(ending) for ending in marks.endings if (position := text.find(ending, start)) >= 0]
        if not ends:
            raise BadRow("an assistant turn has no end token")
        spans.append((start, min(ends)))
        start = text.find(marks.opening, min(ends))
    return spans


def _text_without_ending(text: str, marks: Marks | None) -> str:
    ending = next((ending for ending in marks.endings if text.endswith(ending)), "") if marks else ""
    return text.removesuffix(ending).strip()


def _turn_spans(spoken: list[dict[str, Any]], texts: list[str], exact: bool) -> list[int]:
    """The span of each assistant turn, in their order.

    A span contains the turn's text, or with `exact` is that text. Templates rearrange thoughts, so for a turn with a
    thought only the text after it is searched.
    """
    places: list[int] = []
    for turn in spoken:
        _, has_thought, after = str(turn["content"]).rpartition(END_OF_THOUGHT)
        answer, whole_turn = after.strip(), exact and not has_thought and "reasoning_content" not in turn
        rest = range(places[-1] + 1 if places else 0, len(texts))
        place = next((n for n in rest if (answer == texts[n] if whole_turn else answer in texts[n])), None)
        if place is None:
            raise BadRow("the template's text for an assistant turn differs from the turn's text")
        places.append(place)
    return places
