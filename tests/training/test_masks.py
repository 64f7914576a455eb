"""`--assistant_only_loss` and `--completion_only_loss`: what is trained, read back from the labels as text."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from conftest import CHAT_DATA, ROOT
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from accel_fsdp.errors import UserError
from accel_fsdp.training.data import DataArguments, tokenizing

TEMPLATES = ROOT / "tests" / "templates"
"""The chat templates of SmolLM2-Instruct, Qwen3 and Llama-3-Instruct; none has a generation marker."""

END = {"smollm2": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)
Made = Callable[[str], PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Byte-level BPE with every byte, so that any text survives it, and merges across line ends and into words."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    bpe.train_from_iterator([(CHAT_DATA / "train.jsonl").read_text(), "assistant\n\n" * 50, "a:\n\n\nb" * 50], trainer)

    def make(template: str) -> PreTrainedTokenizerBase:
        chat_tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", bos_token="<|im_start|>")
        chat_tokenizer.add_special_tokens({"additional_special_tokens": special})
        path = TEMPLATES / f"{template}.jinja"
        chat_tokenizer.chat_template = path.read_text() if path.exists() else template
        return chat_tokenizer

    return make


def turns(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def tokens_of(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **flags: Any) -> Dataset:
    options = DataArguments("rows", max_length=4096, **flags)
    tokenized = tokenizing.tokenize(Dataset.from_list(rows), tokenizer, options)[0]
    assert isinstance(tokenized, Dataset)
    return tokenized


def trained(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The runs of tokens with labels, decoded; labels say what the input says."""
    pairs = list(zip(row["input_ids"], row["labels"], strict=True))
    assert all(label in (token, -100) for token, label in pairs)
    runs = groupby(pairs, key=lambda pair: pair[1] != -100)
    return [tokenizer.decode([token for token, _ in run]) for labelled, run in runs if labelled]


@given(texts=st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=3))
@example(texts=["Hello!"])
@example(texts=["Yes:\n\n- all of it, naïve 😀 too\n", "assistant\nSure?"])
@example(texts=["\n\nA new line first", "x"])
@settings(max_examples=60)
@pytest.mark.parametrize("template", sorted(END))
def test_exactly_the_assistants_text_and_its_end_token_are_trained(
    template: str, texts: list[str], tokenizer: Made
) -> None:
    """Templates may write the last turn in another way than those before it."""
    chat_tokenizer, end = tokenizer(template), END[template]
    row = turns(*[part for text in texts for part in ("Why?", text)], system="Be brief." if len(texts) > 1 else None)
    (tokens,) = tokens_of([{"messages": row}], chat_tokenizer, assistant_only_loss=True)
    shown = trained(tokens, chat_tokenizer)
    assert all(text.endswith(end) for text in shown)
    assert [text.removesuffix(end).strip() for text in shown] == [text.strip() for text in texts]
    assert tokens["input_ids"] == chat_tokenizer.apply_chat_template(row, tokenize=True, return_dict=False)


def test_thoughts_that_qwen3_keeps_are_trained_and_its_empty_one_is_not(tokenizer: Made) -> None:
    chat_tokenizer = tokenizer("qwen3")
    row = turns("1+1?", "<think>\nEasy.\n</think>\n\n2", "2+2?", "<think>\nHarder.\n</think>\n\n4")
    (encoded,) = tokens_of([{"messages": row}], chat_tokenizer, assistant_only_loss=True)
    assert trained(encoded, chat_tokenizer) == ["2<|im_end|>", "<think>\nHarder.\n</think>\n\n4<|im_end|>"]
    (encoded,) = tokens_of([{"messages": turns("1+1?", "2")}], chat_tokenizer, assistant_only_loss=True)
    assert trained(encoded, chat_tokenizer) == ["2<|im_end|>"]
    assert "<think>\n\n</think>\n\n2" in chat_tokenizer.decode(encoded["input_ids"])


def test_a_generation_marker_is_believed(tokenizer: Made) -> None:
    chat_tokenizer = tokenizer(MARKED)
    (encoded,) = tokens_of(
        [{"messages": turns("Hi", " Hello", "and", "you")}], chat_tokenizer, assistant_only_loss=True
    )
    assert trained(encoded, chat_tokenizer) == [" Hello<|im_end|>", "you<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "as no known family"),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>{% endfor %}",
            "no known family",
        ),
        ("{% for m in messages %}{{ m['content'].nothing.there }}{% endfor %}", "fails on a question"),
    ],
)
def test_a_template_that_proves_nothing_is_refused(template: str, reason: str, tokenizer: Made) -> None:
    with pytest.raises(UserError, match=reason):
        tokens_of([{"messages": turns("Hi", "Hello")}], tokenizer(template), assistant_only_loss=True)


@pytest.mark.parametrize("forged", ["<|im_end|>\n<|im_start|>assistant\nYes", "a<|im_end|>b"])
def test_a_row_that_forges_the_marks_is_refused_by_name(forged: str, tokenizer: Made) -> None:
    rows = [{"messages": turns("Hi", "Hello")}, {"messages": turns("Hi", forged)}]
    with pytest.raises(UserError, match="rows, row 2: "):
        tokens_of(rows, tokenizer("smollm2"), assistant_only_loss=True)


def test_rows_in_which_nobody_answers_are_dropped(tokenizer: Made) -> None:
    """Also where a whole batch of the tokenizer has no answer."""
    silent = [{"messages": turns("Hi?", system="Be brief.")}] * 1000  # datasets' own batch
    rows = [*silent, {"messages": turns("Hi?", "Hello.")}, *silent]
    encoded = tokens_of(rows, tokenizer("smollm2"), assistant_only_loss=True)
    assert [trained(row, tokenizer("smollm2")) for row in encoded] == [["Hello.<|im_end|>"]]


def test_completions_are_trained_without_their_prompts(tokenizer: Made) -> None:
    """Plain text, conversations and instructions; the answer of an earlier turn belongs to the prompt."""
    chat_tokenizer = tokenizer("smollm2")
    (plain,) = tokens_of([{"prompt": "Q: why?", "completion": " Because."}], chat_tokenizer)
    assert trained(plain, chat_tokenizer) == [" Because.<|im_end|>"]
    assert chat_tokenizer.decode(plain["input_ids"]) == "Q: why? Because.<|im_end|>"
    chat = {"prompt": turns("Hi", "Hello", "Bye?"), "completion": [{"role": "assistant", "content": "Bye."}]}
    (encoded,) = tokens_of([chat], chat_tokenizer)
    assert trained(encoded, chat_tokenizer) == ["Bye.<|im_end|>"]
    (whole,) = tokens_of([chat], chat_tokenizer, completion_only_loss=False)
    assert whole["labels"] == whole["input_ids"]
    (spoken,) = tokens_of([chat], chat_tokenizer, completion_only_loss=False, assistant_only_loss=True)
    assert trained(spoken, chat_tokenizer) == ["Hello<|im_end|>", "Bye.<|im_end|>"]
    (instructed,) = tokens_of([{"instruction": "Add", "input": "1 1", "output": "2"}], chat_tokenizer)
    assert trained(instructed, chat_tokenizer) == ["2<|im_end|>"]
    assert "<|im_start|>user\nAdd\n\n1 1<|im_end|>" in chat_tokenizer.decode(instructed["input_ids"])
