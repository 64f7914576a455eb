"""Models, data and metrics under the names by which scripts of others ask for them, in a working directory."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]
WORDS = [f"word{number}" for number in range(200)]
METRIC = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features({{"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {{"{name}": sum(map(int.__eq__, map(int, predictions), map(int, references))) / len(references)}}
"""


def tokenizer(folder: Path, pairs: bool) -> None:
    """One token per word; pairs as BERT's are."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    word_tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    word_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    word_tokenizer.decoder = decoders.WordPiece()
    if pairs:
        word_tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
        )
    PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=64,
    ).save_pretrained(folder)


def model(folder: Path, model_built: PreTrainedModel, pairs: bool) -> None:
    """The model and its tokenizer, as if they came from the hub."""
    model_built.save_pretrained(folder)
    tokenizer(folder, pairs)


def text(words: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(words))


def dataset(folder: Path, name: str, splits: dict[str, list[dict[str, object]]], suffix: str = "json") -> None:
    """A dataset with one configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    card = ["---", "configs:", f"- config_name: {name}", "  data_files:"]
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def metric(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / f"{folder.name}.py").write_text(METRIC.format(name=name))


def make(folder: Path) -> None:
    """Everything that a script of `public.json` asks for."""
    random.seed(0)
    torch.manual_seed(0)
    size = len(SPECIAL) + len(WORDS)
    bert = BertConfig(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    llama = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=SPECIAL.index("</s>"),
        pad_token_id=0,
    )
    model(folder / "bert-base-cased", BertForMaskedLM(bert), pairs=True)
    model(folder / "HuggingFaceTB/SmolLM-360M", LlamaForCausalLM(llama), pairs=False)
    pairs = [{"sentence1": text(6), "sentence2": text(5), "label": number % 2, "idx": number} for number in range(64)]
    dataset(folder / "nyu-mll/glue", "mrpc", {"train": pairs, "validation": pairs[:24], "test": pairs[:24]})
    texts = [{"text": text(40)} for _ in range(40)]
    many = [{"text": text(12)} for _ in range(520)]
    dataset(folder / "Salesforce/wikitext", "wikitext-2-v1", {"train": many, "validation": texts, "test": texts})
    dataset(folder / "texts", "default", {"train": texts, "test": texts[:8]})
    choices: list[dict[str, object]] = [{"prompt": text(4), "chosen": text(5), "rejected": text(6)} for _ in range(32)]
    dataset(folder / "choices", "default", {"train": choices, "test": choices[:8]})
    (folder / "texts.txt").write_text("\n".join(str(row["text"]) for row in texts * 4))
    lines = [f"{row['sentence1']},{row['sentence2']},{row['label']}" for row in pairs]
    (folder / "pairs.csv").write_text("\n".join(["sentence1,sentence2,label", *lines, ""]))
    for name, figure in {"glue": "accuracy", "accuracy": "accuracy"}.items():
        metric(folder / name, figure)
