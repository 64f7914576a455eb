"""Packed rows against the same documents one by one: what is packed, the loss, the gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CHAT_DATA
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    DataCollatorForSeq2Seq,
    Lfm2Config,
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from accel_fsdp.errors import UserError
from accel_fsdp.training.data import Collator, DataArguments, batching, load, packing, tokenizing
from accel_fsdp.training.reporting import Tally

LIMIT = 96
TOLERANCE = 1e-5
PAD = 0


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def packed(tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, packing.Packed]:
    """24 short chats with only the assistant's tokens trained, some of them cut, packed."""
    chats = load.split(load.load(str(CHAT_DATA)), "train")["messages"][:24]
    short = [
        [{**turn, "content": turn["content"][: 10 + 5 * (n % 9)]} for turn in chat] for n, chat in enumerate(chats)
    ]
    rows = Dataset.from_dict({"messages": short})
    flags = {"max_length": LIMIT, "assistant_only_loss": True, "truncation_mode": "keep_end"}
    alone = tokenizing.tokenize(rows, tokenizer, DataArguments("chats", **flags))[0]
    packed = tokenizing.tokenize(rows, tokenizer, DataArguments("chats", packing=True, **flags))[0]
    assert isinstance(packed, packing.Packed)
    return alone, packed


def slow_best_fit(lengths: list[int], limit: int) -> list[list[int]]:
    """The definition: longest first, into the fullest row that has the space."""
    rows: list[list[int]] = []
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        space = [limit - sum(lengths[document] for document in row) for row in rows]
        fitting = [number for number, free in enumerate(space) if free >= lengths[document]]
        if fitting:
            rows[min(fitting, key=lambda number: space[number])].append(document)
        else:
            rows.append([document])
    return rows


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), limit=st.integers(50, 90))
def test_documents_are_packed_whole_by_best_fit_decreasing(lengths: list[int], limit: int) -> None:
    bins = packing.best_fit(np.asarray(lengths), limit)
    filled = [sum(lengths[document] for document in row) for row in bins]
    assert sorted(document for row in bins for document in row) == list(range(len(lengths)))
    assert max(filled) <= limit
    assert sorted(filled) == sorted(sum(lengths[document] for document in row) for row in slow_best_fit(lengths, limit))


def plain(model: torch.nn.Module, rows: Dataset) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss per trained token and gradients, each document in a forward pass of its own."""
    model.zero_grad()
    trained = sum(label != -100 for row in rows for label in row["labels"][1:])
    total = torch.zeros(())
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        total = total + functional.cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="sum") / trained
    total.backward()
    return total.detach(), {name: part.grad.clone() for name, part in model.named_parameters()}


@pytest.mark.parametrize(("attention", "flat"), [("eager", False), ("sdpa", False), ("sdpa", True)])
def test_loss_and_gradients_are_those_of_the_unpacked_rows(
    attention: str, flat: bool, packed: tuple[Dataset, packing.Packed], tiny_model: Path
) -> None:
    alone, together = packed
    assert len(together) < len(alone) / 1.5
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=attention)
    model.config.use_cache = False  # as Trainer does
    loss, gradients = plain(model, alone)
    batches = [
        Collator(PAD, packed=True, flat=flat)([together[n] for n in range(*part)])
        for part in ((0, 3), (3, len(together)))
    ]
    model.zero_grad()
    trained = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = sum(model(**batch, num_items_in_batch=trained).loss for batch in batches)
    total.backward()
    torch.testing.assert_close(total.detach(), loss, atol=TOLERANCE, rtol=0)
    for name, part in model.named_parameters():
        torch.testing.assert_close(part.grad, gradients[name], atol=TOLERANCE, rtol=0, msg=name)


def test_flash_attention_finds_the_documents_in_a_flat_batch(packed: tuple[Dataset, packing.Packed]) -> None:
    _, together = packed
    batch = Collator(PAD, packed=True, flat=True)([together[0], together[1]])
    lengths = [len(together.tokens[row]["input_ids"]) for number in (0, 1) for row in together.bins[number]]
    (starts, _), (longest, _) = prepare_fa_kwargs_from_position_ids(batch["position_ids"])
    assert starts.tolist() == [0, *np.cumsum(lengths)]
    assert longest == max(lengths)
    assert set(batch) == {"input_ids", "labels", "position_ids"}


def test_the_attention_decides_the_batch_format(tokenizer: PreTrainedTokenizerBase, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert batching.collator(tokenizer, model, packed=True) == Collator(PAD, packed=True, positions=256)
    model.config._attn_implementation = "flash_attention_2"
    assert batching.collator(tokenizer, model, packed=True) == Collator(PAD, packed=True, flat=True, positions=256)
    assert batching.collator(tokenizer, model, packed=False) == Collator(PAD, positions=256)


def test_rows_longer_than_the_model_has_positions_are_refused() -> None:
    """Also in a batch, as the lengths of a stream aren't known before; a packed row is as long as its documents."""
    ids = list(range(256))
    row, longer = ({"input_ids": tokens, "labels": tokens} for tokens in (ids, [*ids, 3]))
    Collator(PAD, positions=256)([row])
    with pytest.raises(UserError, match="a row has 257 tokens, and the model 256 positions"):
        Collator(PAD, positions=256)([row, longer])
    packed = {"input_ids": ids * 2, "labels": ids * 2}
    Collator(PAD, packed=True, positions=256)([{**packed, "position_ids": ids * 2}])
    with pytest.raises(UserError, match="a row has 512 tokens"):
        Collator(PAD, packed=True, positions=256)([{**packed, "position_ids": list(range(512))}])


def test_a_model_whose_documents_see_one_another_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """BLOOM's distances know no position ids, LFM2's convolutions reach back, and a cache makes transformers forget."""
    bloom = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    lfm2 = Lfm2Config(vocab_size=64, num_hidden_layers=2, layer_types=["conv", "full_attention"], **sizes)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    check = batching.IsolationCheck(Collator(PAD, packed=True))
    llama = AutoModelForCausalLM.from_pretrained(tiny_model).train()
    others = [AutoModelForCausalLM.from_config(config, attn_implementation="eager") for config in (bloom, lfm2)]
    for model, cached in ((others[0], False), (others[1], False), (llama, True)):
        model.config.use_cache = cached
        with pytest.raises(UserError, match=f"--packing doesn't work with {type(model).__name__}"):
            check.on_train_begin(arguments, TrainerState(), TrainerControl(), model=model)
    llama.config.use_cache = False
    check.on_train_begin(arguments, TrainerState(), TrainerControl(), model=llama)
    assert llama.training


def test_padding_is_reported_before_and_after(tokenizer: PreTrainedTokenizerBase) -> None:
    """Lengths 8, 8, 2, 2, ... in batches of two, whatever the order: padding only where an 8 meets a 2."""
    rows = Dataset.from_dict({"text": ["a" * 7, "b"] * 20})
    lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in rows["text"]]
    packed, summary = tokenizing.tokenize(rows, tokenizer, DataArguments("x", max_length=20, packing=True), 2)
    mixed = [
        [sum(max(pair) * 2 for pair in pairs)]
        for pairs in [[(max(lengths), min(lengths))] * 20, [(max(lengths),) * 2] * 10 + [(min(lengths),) * 2] * 10]
    ]
    worst, best = (1 - sum(lengths) / places for (places,) in mixed)
    before, after = (float(part.rstrip("%")) / 100 for part in str(summary).partition("padding ")[2].split(" -> "))
    assert best < before < worst
    assert after < before / 2
    assert f"packed into {len(packed)}" in str(summary)


def test_a_batch_without_a_token_to_train_is_an_error() -> None:
    row = {"input_ids": [5, 6, 7], "labels": [5, -100, -100]}
    with pytest.raises(UserError, match="a batch has no token to train on"):
        Collator(PAD)([row, row])
    assert Collator(PAD)([row, {**row, "labels": [-100, 6, -100]}])["labels"].tolist()[1] == [-100, 6, -100]


def test_unpacked_batches_are_those_of_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in (3, 9, 1)]
    theirs = DataCollatorForSeq2Seq(tokenizer)([dict(row) for row in rows])
    ours = Collator(tokenizer.pad_token_id)(rows)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_stream_is_packed_in_windows(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Twice round 10 rows: every document of a round is whole in some row of its windows."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(f'{{"text": "{"word " * (n + 1)}"}}\n' for n in range(10)))
    rows = load.split(load.load(str(path), streaming=True), "train")
    options = DataArguments(str(path), max_length=40, packing=True, streaming=True, streaming_buffer=20)
    stream_rows = list(tokenizing.stream(rows, tokenizer, options, seed=0).take(12))
    lengths = [len(tokenizer("word " * (n + 1))["input_ids"]) + 1 for n in range(10)]
    documents = []
    for row in stream_rows:
        starts = [*np.flatnonzero(np.asarray(row["position_ids"]) == 0).tolist(), len(row["input_ids"])]
        documents += np.diff(starts).tolist()
        assert starts[-1] <= 40
        assert all(row["labels"][start] == -100 for start in starts[:-1])
    assert set(documents) <= set(lengths)
    assert len(documents) > 15


def test_the_padding_of_packed_rows_is_not_counted(packed: tuple[Dataset, packing.Packed]) -> None:
    _, rows = packed
    batch = Collator(PAD, packed=True)([rows[number] for number in range(len(rows))])
    assert batch["input_ids"].numel() > rows.lengths.sum()
    tally = Tally()
    tally.count(batch)
    assert tally._counted.tolist() == [rows.lengths.sum(), sum(map(len, rows.bins))]  # type: ignore[union-attr]
