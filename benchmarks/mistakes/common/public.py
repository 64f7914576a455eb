"""Models, data and metrics under the names by which scripts of others ask for them, in a working directory."""

import json
import random
from pathlib import Path

import numpy
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTMAEConfig,
    ViTMAEForPreTraining,
)

from accel_fsdp.models import catalogue

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]
WORDS = [f"word{number}" for number in range(200)]
LARGE = {
    "meta-llama/Llama-3.1-8B": "LlamaForCausalLM",
    "meta-llama/Llama-2-13b-chat-hf": "LlamaForCausalLM",
    "meta-llama/Llama-2-70b-hf": "LlamaForCausalLM",
    "mistralai/Mistral-7B-v0.1": "MistralForCausalLM",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "MixtralForCausalLM",
    "openai/gpt-oss-20b": "GptOssForCausalLM",
}
"""Models of which the hub's cache has the config and a tokenizer, and no weights."""
CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
METRIC = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        share = sum(map(int.__eq__, map(int, predictions), map(int, references))) / len(references)
        return dict.fromkeys(["accuracy", "f1", "score"], share)
"""


def tokenizer(folder: Path, pairs: bool, **options: str) -> None:
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
        **options,
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


def cached(hub: Path, name: str, architecture: str) -> None:
    """A model of the hub as its cache has it before the weights are there."""
    folder = hub / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0" * 40)
    known = catalogue.entries()[name]
    config = AutoConfig.for_model(
        **known["config"], max_position_embeddings=known["positions"], architectures=[architecture], dtype="bfloat16"
    )
    if architecture == "GptOssForCausalLM":
        config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder / "snapshots" / ("0" * 40))
    tokenizer(folder / "snapshots" / ("0" * 40), pairs=False, chat_template=CHAT)


def images(folder: Path, size: int, count: int) -> None:
    """Random pictures, a folder for each of three classes."""
    pixels = numpy.random.default_rng(0)
    for number in range(count):
        file = folder / "abc"[number % 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 255, (size, size, 3), dtype=numpy.uint8)).save(file)


def metric(folder: Path) -> None:
    folder.mkdir()
    (folder / f"{folder.name}.py").write_text(METRIC)


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
    for name in ("glue", "accuracy", "sacrebleu", "seqeval", "squad"):
        metric(folder / name)
    for_other_tasks(folder, size)
    for name, architecture in LARGE.items():
        cached(folder / "hub/hub", name, architecture)


def for_other_tasks(folder: Path, size: int) -> None:
    """Models and rows of translation, pictures, questions, choices among endings, preferences and retrieval."""
    t5 = T5Config(vocab_size=size, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model(folder / "t5-base", T5ForConditionalGeneration(t5), pairs=False)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(folder / "vit")
    decoder = {f"decoder_{key}": value for key, value in sizes.items()}
    mae = ViTMAEForPreTraining(ViTMAEConfig(image_size=32, patch_size=8, **sizes, **decoder))
    mae.save_pretrained(folder / "mae")
    for name in ("vit", "mae"):
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / name)
    for split, count in {"train": 36, "validation": 18, "val": 18}.items():
        images(folder / "images" / split, 40, count)
    unet = {"_class_name": "UNet2DModel", "sample_size": 32, "in_channels": 3, "out_channels": 3, "layers_per_block": 1}
    unet |= {"block_out_channels": [32, 32], "norm_num_groups": 8, "attention_head_dim": 8}
    unet |= {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
    (folder / "unet").mkdir()
    (folder / "unet/config.json").write_text(json.dumps(unet))
    rows = [",".join([text(5), text(2), *(text(3) for _ in range(4)), str(number % 4)]) for number in range(48)]
    (folder / "swag.csv").write_text("\n".join(["sent1,sent2,ending0,ending1,ending2,ending3,label", *rows, ""]))
    questions = [{"id": str(number), "context": text(12), "question": text(4)} for number in range(40)]
    answers = [{"text": [row["context"].split()[0]], "answer_start": [0]} for row in questions]
    found = [{**row, "answers": answer} for row, answer in zip(questions, answers, strict=True)]
    (folder / "qa.json").write_text(json.dumps({"data": found}))
    tags = [{"tokens": text(8).split(), "ner_tags": random.choices(["O", "B-A", "I-A"], k=8)} for _ in range(40)]
    (folder / "ner.json").write_text("\n".join(map(json.dumps, tags)))
    bank = folder / "temp/data/FinancialPhraseBank-v1.0"
    bank.mkdir(parents=True)
    phrases = [json.dumps({"sentence": text(8), "label": text(1)}) for _ in range(32)]
    for split in ("train", "val"):
        (bank / f"financial_phrase_bank_{split}.jsonl").write_text("\n".join(phrases))
    pairs = [{"translation": {"en": text(6), "ro": text(6)}} for _ in range(40)]
    (folder / "translation.json").write_text("\n".join(map(json.dumps, pairs)))

    def said(role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text(9)}]

    def passage(number: int) -> dict[str, str]:
        return {"docid": str(number), "title": text(2), "text": text(6)}

    sets: dict[str, list[dict[str, object]]] = {
        "unpaired": [{"prompt": text(4), "completion": text(5), "label": bool(n % 2)} for n in range(32)],
        "stepwise": [
            {"prompt": text(4), "completions": [text(3), text(3)], "labels": [True, bool(n % 2)]} for n in range(32)
        ],
        "chats": [{"messages": said("user") + said("assistant")} for _ in range(120)],
        "preferences": [
            {"prompt": said("user"), "chosen": said("assistant"), "rejected": said("assistant")} for _ in range(120)
        ],
        "queries": [{"query": text(8), "response": text(9)} for _ in range(120)],
        "roneneldan/TinyStories": [{"text": text(40)} for _ in range(200)],
        "passages": [
            {
                "query_id": str(n),
                "query": text(5),
                "positive_passages": [passage(n)],
                "negative_passages": [passage(100 + n), passage(200 + n), passage(300 + n)],
            }
            for n in range(48)
        ],
    }
    for name, own in sets.items():
        dataset(folder / name, "default", {"train": own, "test": own[:8]})
    for name, words in {"shakespeare_char/train": 64, "shakespeare_char/val": 64, "tok64/0": 64, "tok64/1": 64}.items():
        file = folder / "data" / f"{name}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        numpy.random.default_rng(0).integers(1, words, 6000, dtype=numpy.uint16).tofile(file)
